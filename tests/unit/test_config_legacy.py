"""Inputs of DeePMD-kit 0.x and 1.x, and keys that have moved."""

import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allforce.config.load import normalised, parse_input
from allforce.errors import UserError

V0: dict[str, Any] = {
    "_comment": " model parameters",
    "use_smooth": True,
    "sel_a": [46, 92],
    "rcut_smth": 5.80,
    "rcut": 6.00,
    "filter_neuron": [25, 50, 100],
    "filter_resnet_dt": False,
    "n_axis_neuron": 16,
    "n_neuron": [240, 240, 240],
    "resnet_dt": True,
    "coord_norm": True,
    "type_fitting_net": False,
    "systems": ["../data/"],
    "set_prefix": "set",
    "stop_batch": 1000000,
    "batch_size": [4],
    "start_lr": 0.001,
    "decay_steps": 5000,
    "decay_rate": 0.95,
    "start_pref_e": 0.02,
    "limit_pref_e": 8,
    "start_pref_f": 1000,
    "limit_pref_f": 1,
    "start_pref_v": 0,
    "limit_pref_v": 0,
    "seed": 1,
    "disp_file": "lcurve.out",
    "disp_freq": 100,
    "numb_test": 10,
    "save_freq": 1000,
    "save_ckpt": "model.ckpt",
    "load_ckpt": "model.ckpt",
    "disp_training": True,
    "time_training": True,
    "profiling": False,
    "profiling_file": "timeline.json",
}

V1: dict[str, Any] = {
    "model": {
        "descriptor": {
            "type": "se_a",
            "sel": [46, 92],
            "rcut_smth": 5.80,
            "rcut": 6.00,
            "neuron": [25, 50, 100],
            "resnet_dt": False,
            "axis_neuron": 16,
            "seed": 1,
        },
        "fitting_net": {"neuron": [240, 240, 240], "resnet_dt": True, "seed": 1},
    },
    "learning_rate": {"type": "exp", "start_lr": 0.001, "decay_steps": 5000, "decay_rate": 0.95},
    "loss": {
        **{"start_pref_e": 0.02, "limit_pref_e": 8, "start_pref_f": 1000, "limit_pref_f": 1},
        **{"start_pref_v": 0, "limit_pref_v": 0},
    },
    "training": {
        "systems": ["../data/"],
        "set_prefix": "set",
        "stop_batch": 1000000,
        "batch_size": [4],
        "seed": 1,
        "disp_file": "lcurve.out",
        "disp_freq": 100,
        "numb_test": 10,
        "save_freq": 1000,
        "save_ckpt": "model.ckpt",
        "load_ckpt": "model.ckpt",
        "disp_training": True,
        "time_training": True,
        "profiling": False,
        "profiling_file": "timeline.json",
    },
}


def without(data: dict[str, Any], *keys: str, **changes: Any) -> dict[str, Any]:
    return {**{key: value for key, value in data.items() if key not in keys}, **changes}


def test_version_0_and_1_are_the_same_input() -> None:
    assert parse_input(V0) == parse_input(V1)


def test_version_1_in_the_current_form() -> None:
    config = parse_input(V1)
    assert config.model.descriptor.type == "se_e2_a"
    assert config.training.training_data.systems == ["../data/"]
    assert config.training.training_data.batch_size == [4]
    assert config.training.numb_steps == 1000000
    assert config.learning_rate.stop == pytest.approx(0.001 * 0.95**200, rel=1e-12)
    written = normalised(config)
    assert "systems" not in written["training"] and "numb_test" not in written["training"]
    assert "decay_rate" not in written["learning_rate"]
    assert parse_input(written) == config


def test_the_change_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse_input(V0, "old.json")
    text = caplog.text
    assert "old.json: the input has the form of DeePMD-kit 0.x" in text
    assert "coord_norm has no effect" in text and "training/numb_test has no effect" in text


def test_version_1_keys_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_input(V1 | {"with_distrib": False, "model_type": "se_a"}) == parse_input(V1)
    for key in ("with_distrib", "model_type", "training/load_ckpt"):
        assert f"{key} has no effect since DeePMD-kit 2" in caplog.text


def test_version_0_details() -> None:
    data = without(V0, "n_neuron", "n_axis_neuron", fitting_neuron=[10, 10], axis_neuron=8, fitting_resnet_dt=False)
    data |= {"filter_resnet_dt": True, "start_pref_ae": 1.0, "type_map": ["O", "H"]}
    config = parse_input(data)
    assert config.model.fitting_net.neuron == [10, 10] and config.model.fitting_net.resnet_dt is False
    assert config.model.descriptor.axis_neuron == 8 and config.model.descriptor.resnet_dt is True
    assert config.loss.start_pref_ae == 1.0 and config.model.type_map == ["O", "H"]
    assert config.model.descriptor.seed == config.model.fitting_net.seed == config.training.seed == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (without(V0, use_smooth=False), 'model/descriptor/type: found "loc_frame"; DeePMD-kit has this type'),
        (without(V0, "rcut_smth"), "model/descriptor/rcut_smth: 6.0 must be smaller than rcut, 6.0"),
        (without(V0, "n_neuron", n_neurons=[1]), "n_neurons: unknown key, with the value [1] (did you mean n_neuron?)"),
        (without(V0, rcut="six"), 'model/descriptor/rcut: found "six"'),
        (without(V0, set_prefix="part"), 'training/training_data/set_prefix: found "part"; DeePMD-kit has this key'),
        (without(V0, "stop_batch"), "training/numb_steps: or numb_epoch is required"),
        (without(V0, decay_rate="slow"), 'learning_rate/decay_rate: found "slow"'),
        (without(V1, training={**V1["training"], "training_data": {"systems": "a"}}), "training/systems: unknown key"),
        (without(V1, training=[]), "training: found []; expected an object"),
        (without(V1, "model"), "model: required key is missing"),
    ],
)
def test_mistakes_in_old_inputs(data: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as info:
        parse_input(data)
    assert words in str(info.value)


def test_mistakes_in_old_inputs_come_with_the_note() -> None:
    with pytest.raises(UserError, match=r"\(Note: the input has the form of DeePMD-kit 0.x"):
        parse_input(without(V0, rcut="six"))


def test_sys_prob_of_version_1() -> None:
    training = {**V1["training"], "systems": ["a", "b"], "sys_prob": [0.25, 0.75], "auto_prob_style": "prob_uniform"}
    config = parse_input(without(V1, training=training))
    assert config.training.training_data.sys_probs == [0.25, 0.75]
    assert config.training.training_data.auto_prob == "prob_uniform"


def test_moved_keys() -> None:
    training = {**V1["training"], "opt_type": "AdamW", "weight_decay": 0.01, "adam_beta1": 0.8, "warmup_steps": 50}
    config = parse_input(without(V1, training=training))
    assert config.optimizer.type == "AdamW"
    assert (config.optimizer.weight_decay, config.optimizer.adam_beta1) == (0.01, 0.8)
    assert config.learning_rate.warmup_steps == 50


PLACES = [
    ("warmup_steps", "learning_rate", "warmup_steps", 50, 60),
    ("warmup_ratio", "learning_rate", "warmup_ratio", 0.1, 0.2),
    ("warmup_start_factor", "learning_rate", "warmup_start_factor", 0.5, 0.25),
    ("opt_type", "optimizer", "type", "AdamW", "Adam"),
    ("weight_decay", "optimizer", "weight_decay", 0.01, 0.02),
    ("adam_beta1", "optimizer", "adam_beta1", 0.8, 0.7),
    ("adam_beta2", "optimizer", "adam_beta2", 0.99, 0.98),
]


def twice(old: str, value: Any, section: str, new: str, other: Any) -> dict[str, Any]:
    """The input of version 1 with a key under training and in its current section."""
    training = {**V1["training"], old: value}
    return without(V1, training=training, **{section: {**V1.get(section, {}), new: other}})


@pytest.mark.parametrize(("old", "section", "new", "value", "other"), PLACES)
def test_a_moved_key_in_both_places(old: str, section: str, new: str, value: Any, other: Any) -> None:
    """Equal values are one; different ones are a mistake that names both."""
    config = parse_input(twice(old, value, section, new, value))
    assert getattr(getattr(config, section), new) == value
    with pytest.raises(UserError) as info:
        parse_input(twice(old, value, section, new, other), "both.json")
    a, b = json.dumps(value), json.dumps(other)
    words = f"both.json: training/{old}: found {a}, but {section}/{new}, where this key is now, has {b}; remove"
    assert words in str(info.value)


def test_both_places_with_values_that_look_alike() -> None:
    """50.0 is 50, true is not 1."""
    config = parse_input(twice("warmup_steps", 50.0, "learning_rate", "warmup_steps", 50))
    assert config.learning_rate.warmup_steps == 50
    with pytest.raises(UserError, match="training/warmup_steps: found true, but learning_rate/warmup_steps, .* has 1;"):
        parse_input(twice("warmup_steps", True, "learning_rate", "warmup_steps", 1))


def test_both_places_are_told_with_the_other_mistakes(tmp_path: Path) -> None:
    data = twice("warmup_steps", 50, "learning_rate", "warmup_steps", -1)
    path = tmp_path / "input.json"
    path.write_text(json.dumps(data))
    ended = subprocess.run([sys.executable, "-m", "allforce", "train", path], capture_output=True, text=True)
    text = ended.stderr
    assert ended.returncode == 2 and "2 mistakes" in text and "Traceback" not in text
    assert "- training/warmup_steps: found 50, but learning_rate/warmup_steps" in text
    assert "- learning_rate/warmup_steps: found -1; expected an integer" in text


def test_the_current_place_has_no_clash_with_other_old_keys() -> None:
    """Keys of one section may be spread over both places."""
    data = twice("opt_type", "AdamW", "optimizer", "weight_decay", 0.02)
    config = parse_input(data)
    assert (config.optimizer.type, config.optimizer.weight_decay) == ("AdamW", 0.02)
    assert data["training"]["opt_type"] == "AdamW" and data["optimizer"] == {"weight_decay": 0.02}  # left alone


def test_decay_rate_stays_in_the_current_form() -> None:
    training = {"training_data": {"systems": "a"}, "numb_steps": 1000}
    config = parse_input(without(V1, training=training))
    assert getattr(config.learning_rate, "decay_rate", None) == 0.95
    assert math.isclose(config.learning_rate.stop, 5e-8)
