"""The input file: what is accepted, what it becomes, and what is said of mistakes."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allforce.config.keys import ACTIVATIONS, WITH_THRESHOLD, precision_name
from allforce.config.load import load_input, normalised, parse_input, validated_config
from allforce.config.schema import Input, LearningRateWSD
from allforce.config.section import aliases, sections, walk
from allforce.errors import UserError
from allforce.models.layers import ACTIVATIONS as FUNCTIONS
from allforce.models.layers import activation

WATER: dict[str, Any] = {
    "_comment": "that's all",
    "model": {
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [46, 92],
            "rcut_smth": 0.5,
            "rcut": 6.0,
            "neuron": [25, 50, 100],
            "resnet_dt": False,
            "axis_neuron": 16,
            "type_one_side": True,
            "precision": "float64",
            "seed": 1,
            "_comment": "that's all",
        },
        "fitting_net": {"neuron": [240, 240, 240], "resnet_dt": True, "precision": "float64", "seed": 1},
    },
    "learning_rate": {"type": "exp", "decay_steps": 5000, "start_lr": 0.001, "stop_lr": 3.51e-8},
    "loss": {
        "type": "ener",
        "start_pref_e": 0.02,
        "limit_pref_e": 1,
        "start_pref_f": 1000,
        "limit_pref_f": 1,
        "start_pref_v": 0,
        "limit_pref_v": 0,
    },
    "training": {
        "training_data": {"systems": ["../data/data_0/", "../data/data_1/", "../data/data_2/"], "batch_size": "auto"},
        "validation_data": {"systems": ["../data/data_3"], "batch_size": 1, "numb_btch": 3},
        "numb_steps": 1000000,
        "seed": 10,
        "disp_file": "lcurve.out",
        "disp_freq": 100,
        "save_freq": 1000,
    },
}
REMOVE = ...


def water(**changes: Any) -> dict[str, Any]:
    """The water example with changes, `model__descriptor__rcut=3.0`; REMOVE takes a key out."""
    data = copy.deepcopy(WATER)
    for path, value in changes.items():
        *parents, key = path.split("__")
        node = data
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is REMOVE:
            del node[key]
        else:
            node[key] = value
    return data


def mistake(**changes: Any) -> str:
    with pytest.raises(UserError) as info:
        parse_input(water(**changes), "input.json")
    return str(info.value)


# ------------------------------------------------------------------------------------------------- what is accepted


def test_water_example() -> None:
    config = parse_input(WATER)
    assert config.model.descriptor.sel == [46, 92]
    assert config.model.descriptor.axis_neuron == 16
    assert config.model.descriptor.env_protection == 0.0
    assert config.model.fitting_net.type == "ener"
    assert config.learning_rate.type == "exp" and config.learning_rate.stop == 3.51e-8
    assert config.optimizer.type == "Adam" and config.optimizer.adam_beta2 == 0.999
    assert config.loss.limit_pref_e == 1.0 and isinstance(config.loss.limit_pref_e, float)
    assert config.training.validation_data is not None and config.training.validation_data.numb_btch == 3
    assert config.training.max_ckpt_keep == 5 and config.training.acc_freq == 1
    assert config.training.sharding == "global" and config.training.table.mode == "table"


def test_defaults_are_those_of_deepmd() -> None:
    config = parse_input(
        {
            "model": {"descriptor": {"type": "se_e2_a"}, "fitting_net": {}},
            "learning_rate": {"start_lr": 1e-3},
            "training": {"training_data": {"systems": "data"}, "numb_epoch": 2},
        }
    )
    assert normalised(config) == {
        "model": {
            "type": "standard",
            "descriptor": {
                "type": "se_e2_a",
                "sel": "auto",
                "rcut": 6.0,
                "rcut_smth": 0.5,
                "neuron": [10, 20, 40],
                "axis_neuron": 4,
                "activation_function": "tanh",
                "resnet_dt": False,
                "type_one_side": False,
                "precision": "float64",
                "trainable": True,
                "exclude_types": [],
                "env_protection": 0.0,
                "set_davg_zero": False,
            },
            "fitting_net": {
                "type": "ener",
                "numb_fparam": 0,
                "numb_aparam": 0,
                "neuron": [120, 120, 120],
                "activation_function": "tanh",
                "precision": "float64",
                "resnet_dt": True,
                "trainable": True,
                "atom_ener": [],
                "use_aparam_as_mask": False,
            },
            "data_stat_nbatch": 10,
            "data_stat_protect": 0.01,
            "data_bias_nsample": 10,
            "pair_exclude_types": [],
            "atom_exclude_types": [],
        },
        "learning_rate": {
            "type": "exp",
            "start_lr": 0.001,
            "warmup_steps": 0,
            "warmup_start_factor": 0.0,
            "scale_by_worker": "linear",
            "decay_steps": 5000,
            "smooth": False,
        },
        "optimizer": {"type": "Adam", "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.0},
        "loss": {
            "type": "ener",
            **{"start_pref_e": 0.02, "limit_pref_e": 1.0, "start_pref_f": 1000.0, "limit_pref_f": 1.0},
            **{f"{when}_pref_{what}": 0.0 for when in ("start", "limit") for what in ("v", "ae", "pf")},
            **dict.fromkeys(("use_default_pf", "enable_atom_ener_coeff", "use_huber"), False),
            **{"huber_delta": 0.01, "loss_func": "mse", "f_use_norm": False, "intensive_ener_virial": False},
        },
        "training": {
            "training_data": {"systems": "data", "batch_size": "auto", "auto_prob": "prob_sys_size"},
            "numb_epoch": 2.0,
            "stat_file_mode": "update",
            "disp_file": "lcurve.out",
            "disp_freq": 1000,
            "save_freq": 1000,
            "save_ckpt": "model.ckpt",
            "max_ckpt_keep": 5,
            "enable_ema": False,
            "ema_decay": 0.999,
            "change_bias_after_training": False,
            "disp_training": True,
            "time_training": True,
            "disp_avg": False,
            "tensorboard": False,
            "tensorboard_log_dir": "log",
            "tensorboard_freq": 1,
            "profiling": False,
            "profiling_file": "timeline.json",
            "enable_profiler": False,
            "acc_freq": 1,
            "zero_stage": 0,
        },
        "validating": {
            "full_validation": False,
            "validation_freq": 5000,
            "save_best": True,
            "max_best_ckpt": 1,
            "validation_metric": "E:MAE",
            "full_val_file": "val.log",
            "full_val_start": 0.5,
        },
    }
    assert config.learning_rate.stop == 5e-8
    assert config.model.type_map is None


def all_aliases() -> list[tuple[str, str, str]]:
    return [
        (path, name, alias)
        for path, cls in walk(Input)
        for name, field in cls.model_fields.items()
        for alias in aliases(field)
    ]


@pytest.mark.parametrize(("path", "name", "alias"), all_aliases())
def test_every_alias_means_its_key(path: str, name: str, alias: str) -> None:
    values = {"axis_neuron": 7, "neuron": [3, 3], "numb_steps": 77, "numb_epoch": 3.5, "numb_btch": 6}
    values |= {"smooth_type_embedding": True, "sel_type": [1]}
    values |= {"auto_prob": "prob_uniform", "sys_probs": [0.2, 0.3, 0.5], "momentum": 0.8}
    node = (path + "/").replace("/", "__")
    drop = {"training__numb_steps": REMOVE} if name in ("numb_steps", "numb_epoch") else {}
    drop |= {f"{node}{name}": REMOVE} if name in ("axis_neuron", "neuron", "numb_btch") else {}
    drop |= {"optimizer__type": "HybridMuon"} if name == "momentum" else {}
    drop |= {"model__descriptor__type": "se_atten"} if name == "smooth_type_embedding" else {}
    kind = {"dipole_type": "dipole", "pol_type": "polar"}.get(alias)
    drop |= {"model__fitting_net__type": kind} if kind else {}
    config: Any = parse_input(water(**drop, **{node + alias: values[name]}))
    for part in path.split("/"):
        config = getattr(config, part)
    assert getattr(config, name) == values[name]
    assert name in normalised(config) and alias not in normalised(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"training__numb_steps": 1e6},
        {"model__type_map": REMOVE},
        {"model__descriptor__type": "se_a"},
        {"model__descriptor__sel": "auto"},
        {"model__descriptor__sel": "auto:1.25"},
        {"model__descriptor__sel": [46, 0]},
        {"model__descriptor__seed": [1, 2]},
        {"model__descriptor__seed": None},
        {"model__descriptor__activation_function": "Tanh"},
        {"model__descriptor__activation_function": "silut:10.0"},
        {"model__descriptor__activation_function": "None"},
        {"model__descriptor__exclude_types": [[0, 1]]},
        {"model__fitting_net__trainable": [True, False, True, False]},
        {"model__fitting_net__atom_ener": [None, -13.6]},
        {"model__fitting_net__numb_fparam": 2, "model__fitting_net__default_fparam": [0.0, 1]},
        {"model__preset_out_bias": {"energy": [None, -13.6]}},
        {"model__preset_out_bias": {"_comment": "eV", "energy": [None, -13.6]}},
        {"loss__type": "ener_hess"},
        {"loss__use_huber": True, "loss__huber_delta": [0.01, 0.02, 0.03]},
        {"loss__loss_func": "mae", "loss__f_use_norm": True},
        {"loss": REMOVE},
        {"optimizer": {"type": "AdamW", "weight_decay": 0.01}},
        {"training__training_data__batch_size": [1, 2, 3]},
        {"training__training_data__batch_size": "mixed:8"},
        {"training__training_data__batch_size": "filter:300"},
        {"training__training_data__auto_prob": "prob_sys_size; 0:2:0.3; 2:3:.7"},
        {"training__training_data__sys_probs": [0.5, -1, -1]},
        {"training__training_data__systems": "data"},
        {"training__training_data__systems": {"file": "a.xyz", "energy": "E0", "stress": "s"}},
        {"training__training_data__systems": ["data", {"file": "a.xyz", "energy": "E0", "forces": "F", "virial": "V"}]},
        {"training__validation_data": None},
        {"training__gradient_max_norm": 0},
        {"learning_rate": {"type": "cosine", "start_lr": 1, "stop_lr_ratio": 0.1, "warmup_ratio": 0.05}},
        {"learning_rate": {"type": "wsd", "start_lr": 1e-3, "decay_type": "cosine"}},
        {"learning_rate__warmup_steps": 10, "learning_rate__warmup_from_unscaled": True},
        {"training__table": {"mode": "exact", "_why": "reference"}},
        {"training__gradient_precision": "bfloat16", "training__acc_freq": 4, "training__sharding": "partition"},
    ],
    ids=str,
)
def test_accepted_and_round_trip(changes: dict[str, Any]) -> None:
    config = parse_input(water(**changes))
    written = normalised(config)
    assert parse_input(json.loads(json.dumps(written))) == config
    assert normalised(parse_input(written)) == written
    assert config.plain() == config.model_dump(mode="json")


def test_input_is_not_changed() -> None:
    data = water(training__numb_test=10, training__opt_type="AdamW", training__warmup_steps=5)
    before = copy.deepcopy(data)
    parse_input(data)
    assert data == before


def test_own_keys_are_written_only_when_set() -> None:
    own = {"sharding", "gradient_precision", "scale_steps_by_worker", "table", "cache_memory"}
    assert not own & set(normalised(parse_input(WATER))["training"])
    changed = normalised(parse_input(water(training__table={"nodes": 128}, training__scale_steps_by_worker=True)))
    assert changed["training"]["table"] == {"nodes": 128}
    assert changed["training"]["scale_steps_by_worker"] is True and "sharding" not in changed["training"]


@given(
    rcut=st.floats(1.0, 12.0),
    smooth=st.floats(0.0, 0.99),
    neuron=st.lists(st.integers(4, 200), min_size=1, max_size=4),
    seed=st.none() | st.integers(0, 2**40) | st.lists(st.integers(0, 99), max_size=3),
    rate=st.floats(1e-6, 1.0),
    schedule=st.sampled_from(["exp", "cosine", "wsd"]),
    optimizer=st.sampled_from(["Adam", "AdamW", "HybridMuon"]),
    batch=st.integers(1, 99) | st.sampled_from(["auto", "auto:64", "max:7", "mixed:3"]),
    nodes=st.integers(9, 999),
)
@settings(max_examples=60, deadline=None)
def test_round_trip_of_anything(rcut, smooth, neuron, seed, rate, schedule, optimizer, batch, nodes) -> None:
    descriptor = {"type": "se_a", "rcut": rcut, "rcut_smth": rcut * smooth, "neuron": neuron, "n_axis_neuron": 4}
    config = parse_input(
        water(
            model__descriptor={**descriptor, "seed": seed},
            learning_rate={"type": schedule, "start_lr": rate, "stop_lr_ratio": 0.5},
            optimizer={"type": optimizer},
            training__training_data__batch_size=batch,
            training__table={"nodes": nodes},
        )
    )
    assert config.model.descriptor.rcut == rcut and config.model.descriptor.seed == seed
    assert parse_input(json.loads(json.dumps(normalised(config)))) == config
    assert config.plain() == config.model_dump(mode="json")


def test_defaults_are_not_shared() -> None:
    first, second = parse_input(WATER), parse_input(WATER)
    first.model.pair_exclude_types.append([0, 0])
    first.training.table.nodes = 99
    assert second.model.pair_exclude_types == [] and second.training.table.nodes == 64
    assert parse_input(WATER) == second


@pytest.mark.parametrize(
    ("precision", "env", "name"),
    [
        ("default", {}, "float64"),
        ("default", {"DP_INTERFACE_PREC": "low"}, "float32"),
        ("default", {"DP_INTERFACE_PREC": "High"}, "float64"),
        ("float32", {"DP_INTERFACE_PREC": "high"}, "float32"),
        ("float64", {"DP_INTERFACE_PREC": "low"}, "float64"),
    ],
)
def test_precision(precision: str, env: dict[str, str], name: str) -> None:
    assert precision_name(precision, env) == name


def test_precision_of_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DP_INTERFACE_PREC", "medium")
    with pytest.raises(UserError, match='DP_INTERFACE_PREC is "medium"; expected "high" or "low"'):
        parse_input(water(model__descriptor__precision="default"))


@pytest.mark.parametrize("given", ["default", REMOVE])
def test_precision_is_resolved_when_the_input_is_read(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DP_INTERFACE_PREC", "low")
    config = parse_input(water(model__descriptor__precision=given))
    monkeypatch.delenv("DP_INTERFACE_PREC")
    assert config.model.descriptor.precision == "float32" and config.model.fitting_net.precision == "float64"
    assert normalised(config)["model"]["descriptor"]["precision"] == "float32"  # what a checkpoint keeps


# ---------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        # unknown keys
        (
            {"training__training_data__batchsize": 3},
            "training/training_data/batchsize",
            "value 3 (did you mean batch_size?)",
        ),
        ({"training__training_data__batchsize": 3}, "training/training_data/batchsize", "allowed here: systems, rglob"),
        ({"modle": {}}, "modle", "did you mean model?"),
        ({"model__descriptor__Rcut": 3}, "model/descriptor/Rcut", "did you mean rcut?"),
        ({"model__rcut": 3}, "model/rcut", "there is such a key in model/descriptor"),
        ({"training__start_lr": 3}, "training/start_lr", "there is such a key in learning_rate"),
        ({"learning_rate__type": "cosine"}, "learning_rate/decay_steps", 'belongs to type "exp"'),
        ({"training__table__node": 3}, "training/table/node", "did you mean nodes?"),
        # wrong types
        ({"model__descriptor__rcut": "six"}, "model/descriptor/rcut", 'found "six"; expected a number > 0'),
        ({"model__descriptor__rcut": "6.0"}, "model/descriptor/rcut", 'found "6.0"; expected a number'),
        ({"model__descriptor__rcut": True}, "model/descriptor/rcut", "found true; expected a number"),
        ({"model__descriptor__rcut": None}, "model/descriptor/rcut", "found null; expected a number"),
        ({"model__descriptor__rcut": float("nan")}, "model/descriptor/rcut", "found NaN; expected a number"),
        ({"model__descriptor__axis_neuron": True}, "model/descriptor/axis_neuron", "found true; expected an integer"),
        ({"model__descriptor__resnet_dt": 1}, "model/descriptor/resnet_dt", "found 1; expected true or false"),
        ({"model__descriptor__neuron": 25}, "model/descriptor/neuron", "expected a list of integers ≥ 1"),
        ({"model__descriptor__neuron": []}, "model/descriptor/neuron", "expected a list of integers ≥ 1"),
        (
            {"model__descriptor__neuron": [25, "x"]},
            "model/descriptor/neuron/1",
            'found "x"; expected for neuron a list',
        ),
        ({"model__descriptor__neuron": [25, 2.5]}, "model/descriptor/neuron/1", "found 2.5"),
        ({"model__descriptor__seed": False}, "model/descriptor/seed", "found false; expected an integer ≥ 0 or"),
        ({"model__descriptor": "se_e2_a"}, "model/descriptor", 'found "se_e2_a"; expected an object'),
        ({"model": []}, "model", "found []; expected an object"),
        ({"model__type_map": ["O", 1]}, "model/type_map/1", "found 1; expected for type_map a list of texts"),
        ({"training__numb_steps": 10.5}, "training/numb_steps", "found 10.5; expected an integer ≥ 1"),
        ({"training__validation_data": "data"}, "training/validation_data", "expected an object or null"),
        ({"training__disp_training": "yes"}, "training/disp_training", 'found "yes"; expected true or false'),
        # values that are not among those allowed
        ({"model__descriptor__type": "se_e2_b"}, "model/descriptor/type", 'found "se_e2_b" (did you mean se_e2_'),
        ({"model__descriptor__type": 3}, "model/descriptor/type", 'found 3; allowed: "se_e2_a"'),
        ({"optimizer__type": "adam"}, "optimizer/type", 'did you mean Adam?); allowed: "Adam", "AdamW", "HybridMuon"'),
        ({"model__descriptor__precision": "float6"}, "model/descriptor/precision", "did you mean float64?"),
        (
            {"model__descriptor__activation_function": "tan"},
            "model/descriptor/activation_function",
            "did you mean tanh?",
        ),
        ({"model__descriptor__sel": "auto1.1"}, "model/descriptor/sel", 'expected "auto" or "auto:1.1" or a list'),
        ({"training__training_data__batch_size": "auto:0"}, "training/training_data/batch_size", 'found "auto:0"'),
        ({"training__training_data__batch_size": 0}, "training/training_data/batch_size", "expected an integer ≥ 1"),
        ({"training__training_data__batch_size": [1, 0, 1]}, "training/training_data/batch_size/1", "found 0"),
        ({"training__sharding": "globl"}, "training/sharding", "did you mean global?"),
        (
            {"training__gradient_precision": "float16"},
            "training/gradient_precision",
            'expected "float32" or "bfloat16"',
        ),
        ({"learning_rate__scale_by_worker": "liner"}, "learning_rate/scale_by_worker", "did you mean linear?"),
        ({"model__preset_out_bias": {"dipole": [1, 2]}}, "model/preset_out_bias/dipole", '{"energy": [number'),
        # negative and other impossible numbers
        ({"model__descriptor__rcut": -6.0}, "model/descriptor/rcut", "found -6.0; expected a number > 0"),
        ({"model__descriptor__neuron": [25, -50]}, "model/descriptor/neuron/1", "found -50"),
        ({"model__descriptor__sel": [46, -92]}, "model/descriptor/sel/1", "found -92"),
        ({"learning_rate__start_lr": 0}, "learning_rate/start_lr", "found 0; expected a number > 0"),
        ({"learning_rate__decay_rate": 1.5}, "learning_rate/decay_rate", "found 1.5; expected a number > 0 and ≤ 1"),
        ({"training__disp_freq": 0}, "training/disp_freq", "found 0; expected an integer ≥ 1"),
        ({"training__numb_steps": -5}, "training/numb_steps", "found -5"),
        ({"training__seed": -1}, "training/seed", "found -1"),
        ({"loss__start_pref_f": -1}, "loss/start_pref_f", "found -1; expected a number ≥ 0"),
        # values that do not go together
        ({"model__descriptor__rcut_smth": 6}, "model/descriptor/rcut_smth", "6.0 must be smaller than rcut, 6.0"),
        ({"model__descriptor__axis_neuron": 101}, "model/descriptor/axis_neuron", "not exceed the last of neuron, 100"),
        ({"model__descriptor__sel": [46]}, "model/descriptor/sel", "has 1 entries; expected 2, one for each type"),
        ({"model__descriptor__sel": [0, 0]}, "model/descriptor/sel", "keeps no neighbour"),
        ({"model__descriptor__sel": "auto:0.5"}, "model/descriptor/sel", "must be at least 1"),
        ({"model__descriptor__exclude_types": [[0, 2]]}, "model/descriptor/exclude_types", "outside 0 … 1"),
        (
            {"model__descriptor__exclude_types": [[0]]},
            "model/descriptor/exclude_types/0",
            "a list of lists of 2 integers",
        ),
        ({"model__pair_exclude_types": [[5, 0]]}, "model/pair_exclude_types", "outside 0 … 1"),
        ({"model__atom_exclude_types": [2]}, "model/atom_exclude_types", "outside 0 … 1"),
        ({"model__type_map": ["O", "O"]}, "model/type_map", "has O more than once"),
        ({"model__type_map": []}, "model/type_map", "found []"),
        ({"model__preset_out_bias": {"energy": [1.0]}}, "model/preset_out_bias/energy", "expected 2"),
        ({"model__fitting_net__atom_ener": [1.0]}, "model/fitting_net/atom_ener", "expected 2"),
        ({"model__fitting_net__trainable": [True]}, "model/fitting_net/trainable", "has 1 entries; expected 4"),
        ({"model__fitting_net__default_fparam": [1.0]}, "model/fitting_net/default_fparam", "numb_fparam is 0"),
        ({"model__fitting_net__use_aparam_as_mask": True}, "model/fitting_net/use_aparam_as_mask", "numb_aparam is 0"),
        ({"learning_rate__stop_lr": 0.1}, "learning_rate/stop_lr", "0.1 must not exceed start_lr, 0.001"),
        ({"learning_rate__stop_lr_ratio": 0.1}, "learning_rate/stop_lr_ratio", "and stop_lr exclude each other"),
        ({"learning_rate": {"start_lr": 1e-9}}, "learning_rate/stop_lr", "5e-08 (the default) must not exceed"),
        ({"learning_rate": {"type": "wsd", "start_lr": 1, "stop_lr": 0}}, "learning_rate/stop_lr", "greater than 0"),
        ({"training__zero_stage": 1}, "training/zero_stage", "Adam is not shared out; set 0, or use HybridMuon"),
        ({"training__zero_stage": 2}, "training/zero_stage", "expected an integer ≥ 0 and ≤ 1"),
        (
            {"learning_rate__warmup_steps": 5, "learning_rate__warmup_ratio": 0.1},
            "learning_rate/warmup_ratio",
            "and warmup_steps exclude each other",
        ),
        ({"learning_rate__warmup_steps": 1000000}, "learning_rate/warmup_steps", "smaller than the number of steps"),
        ({"learning_rate__warmup_from_unscaled": True}, "learning_rate/warmup_from_unscaled", "needs warmup_steps"),
        ({"training__training_data__sys_probs": [0.5, 0.2]}, "training/training_data/sys_probs", "sum 0.7; expected 1"),
        ({"training__training_data__sys_probs": [0.9, 0.2, -1]}, "training/training_data/sys_probs", "sum 1.1"),
        ({"training__training_data__auto_prob": "prob_size"}, "training/training_data/auto_prob", "prob_sys_size"),
        ({"training__training_data__auto_prob": "prob_sys_size;2:1:1"}, "training/training_data/auto_prob", "2:1:1"),
        ({"training__training_data__systems": []}, "training/training_data/systems", "found []"),
        (
            {"training__training_data__systems": ["a", {"file": "b.xyz", "energie": "E"}]},
            "training/training_data/systems",
            'needs "file", and may have energy, forces, virial, stress',
        ),
        ({"training__training_data__systems": {"energy": "E"}}, "training/training_data/systems", 'needs "file"'),
        (
            {"training__training_data__systems": ["a", {"file": "b.xyz", "energy": 3}]},
            "training/training_data/systems/1/energy",
            'found 3; expected for systems a text or {"file": name, "energy": key, "forces": key, …}',
        ),
        (
            {"training__training_data__systems": {"file": "a", "stress": "s", "virial": "v"}},
            "training/training_data/systems",
            "names both virial and stress",
        ),
        ({"training__numb_epoch": 3}, "training/numb_epoch", "and numb_steps exclude each other"),
        ({"training__numb_steps": REMOVE}, "training/numb_steps", "or numb_epoch is required"),
        ({"training__stop_batch": 3}, "training/stop_batch", "another name of numb_steps"),
        ({"loss__f_use_norm": True}, "loss/f_use_norm", 'needs loss_func "mae" or use_huber'),
        ({"loss__use_huber": True, "loss__relative_f": 1.0}, "loss/relative_f", "and use_huber exclude each other"),
        ({"loss__use_huber": True, "loss__limit_pref_pf": 1.0}, "loss/start_pref_pf", "must be 0 with use_huber"),
        ({"loss__huber_delta": [0.1, 0.2]}, "loss/huber_delta", "one number or three"),
        (
            {f"loss__{when}_pref_{what}": 0 for when in ("start", "limit") for what in "ef"},
            "loss/start_pref_e",
            "nothing to fit",
        ),
        # missing keys
        ({"model": REMOVE}, "model", "required key is missing"),
        ({"model__descriptor__type": REMOVE}, "model/descriptor/type", 'required key is missing; allowed: "se_e2_a"'),
        (
            {"learning_rate__start_lr": REMOVE},
            "learning_rate/start_lr",
            "required key is missing; expected a number > 0",
        ),
        ({"training__training_data__systems": REMOVE}, "training/training_data/systems", "required key is missing"),
    ],
    ids=str,
)
def test_mistake(changes: dict[str, Any], path: str, words: str) -> None:
    text = mistake(**changes)
    assert text.startswith(f"input.json: {path}: "), text
    assert words in text
    assert "pydantic" not in text and "Traceback" not in text


def test_all_mistakes_at_once() -> None:
    text = mistake(
        model__descriptor__rcut="six",
        model__fitting_net__type="population",
        training__training_data__batchsize=1,
        training__disp_freq=-1,
        learning_rate__stop_lr=1.0,
        loss__start_pref_h=1.0,
    )
    assert text.startswith("input.json: 6 mistakes:")
    lines = text.splitlines()[1:]
    assert sorted(line.split(":")[0] for line in lines) == [
        "  - learning_rate/stop_lr",
        "  - loss/start_pref_h",
        "  - model/descriptor/rcut",
        "  - model/fitting_net/type",
        "  - training/disp_freq",
        "  - training/training_data/batchsize",
    ]


def test_two_impossible_values_of_one_object() -> None:
    text = mistake(model__descriptor__rcut_smth=7.0, model__descriptor__axis_neuron=500)
    assert "2 mistakes" in text and "model/descriptor/rcut_smth" in text and "model/descriptor/axis_neuron" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"model__descriptor__sel": ["a", 3]},
        {"model__descriptor__sel": [1]},
        {"model__descriptor__rcut_smth": 9.0},
        {"model__descriptor__type": REMOVE},
        {"model__fitting_net": REMOVE},
        {"model__pair_exclude_types": [[0, 5]], "model__descriptor__rcut": "x"},
        {"model__descriptor__rcutt": 6.0},
    ],
)
def test_the_model_of_a_model_file_is_judged_as_that_of_an_input(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as info:
        validated_config(water(**changes)["model"], "input.json")
    assert str(info.value) == mistake(**changes)


def test_the_model_of_a_model_file_is_not_changed() -> None:
    assert validated_config(WATER["model"], "m.dp") == parse_input(WATER).model


def test_long_values_are_cut() -> None:
    text = mistake(model__type_map=[["O"] * 500])
    assert "..." in text and len(text) < 300


# ------------------------------------------------------------------------------------- what only DeePMD-kit has


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"model__descriptor__type": "dpa2"}, "model/descriptor/type"),
        ({"model__descriptor__type": "loc_frame"}, "model/descriptor/type"),
        ({"model__type": "pairtab"}, "model/type"),
        ({"model__fitting_net__type": "population"}, "model/fitting_net/type"),
        ({"model__spin": {"use_spin": [True]}}, "model/spin"),
        ({"model__modifier": {"type": "dipole_charge"}}, "model/modifier"),
        ({"model__type_embedding": {"neuron": [8]}}, "model/type_embedding"),
        ({"model__fitting_net__dim_case_embd": 2}, "model/fitting_net/dim_case_embd"),
        ({"loss__type": "dens"}, "loss/type"),
        ({"loss__start_pref_gf": 1}, "loss/start_pref_gf"),
        ({"optimizer__type": "LKF"}, "optimizer/type"),
        ({"training__opt_type": "LKF"}, "optimizer/type"),
        ({"training__enable_compile": True}, "training/enable_compile"),
        ({"training__mixed_precision": {"compute_prec": "float16"}}, "training/mixed_precision"),
        ({"optimizer": {"type": "HybridMuon", "magma_muon": True}}, "optimizer/magma_muon"),
        ({"training__training_data__min_pair_dist": 0.5}, "training/training_data/min_pair_dist"),
        ({"training__training_data__batch_size": "mix:8"}, "training/training_data/batch_size"),
        ({"model__descriptor__precision": "bfloat16"}, "model/descriptor/precision"),
        ({"validating": {"tf32_infer": True}}, "validating/tf32_infer"),
    ],
    ids=str,
)
def test_deepmd_has_it_and_we_do_not(changes: dict[str, Any], path: str) -> None:
    text = mistake(**changes)
    assert text.startswith(f"input.json: {path}: found ")
    assert "DeePMD-kit has this" in text and "Allforce does not yet" in text


def test_neutral_values_of_such_keys_are_dropped() -> None:
    data = water(
        training__profiling=False,
        training__profiling_file="timeline.json",
        training__ema_ckpt_keep=3,
        training__mixed_precision=None,
        training__training_data__set_prefix="set",
        loss__start_pref_h=0,
        loss__limit_pref_gf=0.0,
        loss__numb_generalized_coord=0,
        model__fitting_net__tot_ener_zero=False,
        model__srtab_add_bias=True,
        model__bridging_method="None",
        validating={"full_validation": False, "compiled_infer": False, "_comment": ""},
        nvnmd={},
    )
    assert parse_input(data) == parse_input(WATER)


def test_typing_error_inside_an_object_that_is_off() -> None:
    assert "validating/save_bst: unknown key, with the value 1 (did you mean save_best?)" in mistake(
        validating={"save_bst": 1}
    )


# ------------------------------------------------------------------------------------------------------------- files


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


YAML = """
# a comment
model:
  type_map: [O, H]
  descriptor: {type: se_e2_a, sel: [46, 92], rcut: 6, axis_neuron: 16, neuron: [25, 50, 100]}
  fitting_net: {}
learning_rate:
  start_lr: 1e-3
  stop_lr: 3.51E-8
training:
  training_data:
    systems: [a, b]
  numb_steps: 1000
"""


def test_yaml_with_numbers_that_yaml_1_1_takes_for_text(tmp_path: Path) -> None:
    config = load_input(write(tmp_path / "input.yaml", YAML))
    assert config.learning_rate.start_lr == 1e-3 and config.learning_rate.stop == 3.51e-8
    assert config.model.descriptor.rcut == 6.0 and config.training.training_data.systems == ["a", "b"]


def test_json_file_and_text_path(tmp_path: Path) -> None:
    path = write(tmp_path / "input.json", json.dumps(WATER))
    assert load_input(str(path)) == parse_input(WATER)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{\n  "model": {},\n  "loss": {,}\n}', "not valid JSON at line 3, column 12"),
        ("a.json", '{"model": 1,}', "not valid JSON at line 1, column 1"),
        ("a.json", '{"model": {}', "not valid JSON at line 1, column 13"),
        ("a.json", "", "not valid JSON at line 1, column 1"),
        ("a.json", "[1, 2]", "expected an object with the keys model"),
        ("a.json", '{"model": {"rcut": 1, "rcut": 2}}', "the key rcut is there twice"),
        ("a.yaml", "model: {type_map: [O}", "not valid YAML at line 1, column 21"),
        ("a.yaml", "model:\n\tx: 1", "not valid YAML at line 2, column 1"),
        ("a.yaml", "model: !!python/object/apply:os.system ['true']", "not valid YAML at line 1, column 8"),
        ("a.yml", "", "found nothing"),
        ("a.yml", "a: 1\nb: 2\na: 3", "line 1: the key a is there twice"),
        ("a.txt", "{}", "must end in .json, .yaml or .yml"),
        ("a.yaml", "1: 2", "1: unknown key"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(UserError) as info:
        load_input(path)
    assert str(info.value).startswith(str(path)) and words in str(info.value)


def test_repeated_comments_are_fine(tmp_path: Path) -> None:
    text = json.dumps(WATER).replace('"model":', '"_comment": "a", "_comment": "b", "model":', 1)
    assert load_input(write(tmp_path / "input.json", text)) == parse_input(WATER)


def test_missing_file_folder_and_bytes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.json: the input file cannot be read: No such file"):
        load_input(tmp_path / "none.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match="folder.json: the input file cannot be read"):
        load_input(tmp_path / "folder.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_input(tmp_path / "bytes.json")


def test_every_section_of_a_choice_is_reachable() -> None:
    """The discriminator and the table of types agree."""
    for _, cls in walk(Input):
        for field in cls.model_fields.values():
            kinds = [
                inner.model_fields["type"].default
                for inner in sections(field.annotation)
                if "type" in inner.model_fields
            ]
            assert len(kinds) == len(set(kinds))
    config = parse_input(water(learning_rate={"type": "wsd", "start_lr": 1e-3}))
    assert isinstance(config.learning_rate, LearningRateWSD)


def test_every_activation_has_its_function() -> None:
    """The names are stated in config/keys.py, the functions in models/layers.py."""
    assert set(FUNCTIONS) == set(ACTIVATIONS)
    for name in (*ACTIVATIONS, *WITH_THRESHOLD, "silut:2.5"):
        parse_input(water(model__descriptor__activation_function=name))
        assert activation(name)(torch.ones(1)).shape == (1,)
