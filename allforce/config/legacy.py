"""Inputs of DeePMD-kit 0.x and 1.x, and keys that have moved since, brought to the current form.

Values are moved, never judged: what is wrong in them is found later, by the schema, under the current path. Only a
key that is given in its old and its current place with different values is told from here, as a `Clash`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from allforce.config.schema import Training
from allforce.config.section import aliases

Data = dict[str, Any]

# key of a version 0 input -> where it belongs; "seed" and the keys without a place are treated apart
V0_KEYS: dict[str, str] = {
    "type_map": "model/type_map",
    "sel_a": "model/descriptor/sel",
    "rcut": "model/descriptor/rcut",
    "rcut_smth": "model/descriptor/rcut_smth",
    "filter_neuron": "model/descriptor/neuron",
    "filter_resnet_dt": "model/descriptor/resnet_dt",
    "axis_neuron": "model/descriptor/axis_neuron",
    "n_axis_neuron": "model/descriptor/axis_neuron",
    "fitting_neuron": "model/fitting_net/neuron",
    "n_neuron": "model/fitting_net/neuron",
    "resnet_dt": "model/fitting_net/resnet_dt",
    "fitting_resnet_dt": "model/fitting_net/resnet_dt",
    **{key: f"learning_rate/{key}" for key in ("start_lr", "decay_steps", "decay_rate")},
    **{
        f"{when}_pref_{what}": f"loss/{when}_pref_{what}"
        for when in ("start", "limit")
        for what in ("e", "f", "v", "ae")
    },
    **{key: f"training/{key}" for key in ("systems", "set_prefix", "stop_batch", "batch_size", "numb_test")},
    **{key: f"training/{key}" for key in ("disp_file", "disp_freq", "save_freq", "save_ckpt")},
    **{key: f"training/{key}" for key in ("disp_training", "time_training", "profiling", "profiling_file")},
}
V0_WITHOUT_EFFECT = ("coord_norm", "type_fitting_net", "load_ckpt")  # DeePMD-kit drops them as well

V1_DATA_KEYS = (
    *("systems", "set_prefix", "batch_size", "auto_prob", "auto_prob_style"),
    *("sys_prob", "sys_probs", "sys_weights"),
)
V1_WITHOUT_EFFECT = (
    "with_distrib",
    "model_type",
)  # at the top of its example inputs, which have training/load_ckpt too
WARMUP_KEYS = ("warmup_steps", "warmup_ratio", "warmup_start_factor")
OPTIMIZER_KEYS = (
    *("weight_decay", "adam_beta1", "adam_beta2", "momentum", "muon_momentum", "lr_adjust", "lr_adjust_coeff"),
    *("kf_blocksize", "kf_start_pref_e", "kf_limit_pref_e", "kf_start_pref_f", "kf_limit_pref_f"),
    *("muon_2d_only", "min_2d_dim"),
)


class Clash(NamedTuple):
    """A key in its old and in its current place, with different values."""

    old_path: str
    old_value: Any
    path: str
    value: Any


def modernise(data: Data) -> tuple[Data, list[str], list[Clash]]:
    """The same input in the current form, notes of what was changed, and keys that contradict themselves.

    The data given are left as they are.
    """
    notes: list[str] = []
    if is_v0(data):
        data = _from_v0(data, notes)
    if not isinstance(data.get("training"), dict):
        return data, notes, []
    data = {name: dict(value) if isinstance(value, dict) else value for name, value in data.items()}
    if "systems" in data["training"] and "training_data" not in data["training"]:
        _from_v1(data, notes)
    if "numb_test" in data["training"]:
        del data["training"]["numb_test"]
        notes.append("training/numb_test has no effect since DeePMD-kit 2; use training/validation_data/numb_btch")
    clashes = _move(data, "learning_rate", {key: key for key in WARMUP_KEYS}, notes)
    clashes += _move(data, "optimizer", {"opt_type": "type", **{key: key for key in OPTIMIZER_KEYS}}, notes)
    return data, notes, clashes


def is_v0(data: Data) -> bool:
    """A flat input: no sections, but at least two of the keys that version 0 had."""
    sections = {"model", "training", "learning_rate", "loss"}
    return not sections & set(data) and len(set(V0_KEYS) & set(data)) > 1


def _from_v0(data: Data, notes: list[str]) -> Data:
    """The flat form of version 0 into sections. Keys without a place stay at the top, where the schema refuses them."""
    notes.append("the input has the form of DeePMD-kit 0.x and was brought to the current form")
    smooth = data.get("use_smooth", True) is not False
    out: Data = {"model": {"descriptor": {"type": "se_e2_a" if smooth else "loc_frame"}, "fitting_net": {}}}
    out |= {"learning_rate": {"type": "exp"}, "loss": {}, "training": {}}
    for key, value in data.items():
        if key in V0_WITHOUT_EFFECT:
            notes.append(f"{key} has no effect since DeePMD-kit 1")
        elif key == "seed":
            for section in (out["model"]["descriptor"], out["model"]["fitting_net"], out["training"]):
                section["seed"] = value
        elif key not in V0_KEYS and key != "use_smooth":
            out[key] = value
    for key, path in V0_KEYS.items():  # in this order, so that fitting_resnet_dt comes after resnet_dt
        if key in data:
            *parents, name = path.split("/")
            section = out
            for parent in parents:
                section = section[parent]
            section[name] = data[key]
    if smooth and "rcut" in data:
        out["model"]["descriptor"].setdefault("rcut_smth", data["rcut"])
    return out


def _from_v1(data: Data, notes: list[str]) -> None:
    """training/systems and its companions go under training/training_data; decay_rate becomes stop_lr."""
    notes.append("the input has the form of DeePMD-kit 1.x and was brought to the current form")
    training = data["training"]
    ignored = [key for key in V1_WITHOUT_EFFECT if data.pop(key, None) is not None]
    if training.pop("load_ckpt", None) is not None:
        ignored.append("training/load_ckpt")
    notes += [f"{key} has no effect since DeePMD-kit 2" for key in ignored]
    moved = {key: training.pop(key) for key in list(training) if key in V1_DATA_KEYS}
    if "sys_prob" in moved:
        moved["sys_probs"] = moved.pop("sys_prob")
    training["training_data"] = moved
    rate = data.get("learning_rate")
    if isinstance(rate, dict) and "decay_rate" in rate:
        _decay_rate_to_stop_lr(rate, training)


def _decay_rate_to_stop_lr(rate: Data, training: Data) -> None:
    """stop_lr = start_lr · decay_rate^(steps / decay_steps); left alone when one of them is no positive number."""
    names = ["numb_steps", *aliases(Training.model_fields["numb_steps"])]
    steps = next((training[name] for name in names if name in training), None)
    numbers = (rate["decay_rate"], rate.get("start_lr"), rate.get("decay_steps", 5000), steps)
    if all(isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0 for x in numbers):
        decay, start, every, steps = map(float, numbers)
        del rate["decay_rate"]
        rate["stop_lr"] = start * math.exp(math.log(decay) * steps / every)


def _move(data: Data, section: str, names: dict[str, str], notes: list[str]) -> list[Clash]:
    """Keys that used to be under training and are now in a section of their own, where a value given there stays."""
    moved = {key: data["training"].pop(key) for key in names if key in data["training"]}
    if not moved or not isinstance(data.setdefault(section, {}), dict):
        return []
    notes.append(f"{', '.join(moved)} belong under {section} now, no longer under training")
    given = data[section]
    data[section] = {names[key]: value for key, value in moved.items()} | given
    return [
        Clash(f"training/{key}", value, f"{section}/{names[key]}", given[names[key]])
        for key, value in moved.items()
        if names[key] in given and not _same(value, given[names[key]])
    ]


def _same(a: Any, b: Any) -> bool:
    """50 is 50.0, but true is not 1: the schema takes the one and refuses the other."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)
