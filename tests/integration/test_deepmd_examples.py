"""The settings of DeePMD-kit's example inputs train here as they are, on small data of their kinds, for two steps.

Sections and names of files are those of its examples/water, water_tensor, dplr, fparam, nopbc, dos and property, and of
the examples of its version 1; only the number of steps and the intervals of output are smaller.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import rows

from allforce import logs
from allforce.cli import main

COMMENT = {"_comment": " that's all"}
WIDE = {"neuron": [240, 240, 240], "resnet_dt": True, "seed": 1} | COMMENT
NARROW = {"neuron": [120, 120, 120], "resnet_dt": True, "seed": 1} | COMMENT
TENSOR = {"neuron": [100, 100, 100], "resnet_dt": True, "precision": "float64", "seed": 1} | COMMENT
SMOOTH = {"rcut_smth": 0.50, "rcut": 6.00, "resnet_dt": False, "seed": 1} | COMMENT
PAIRS = SMOOTH | {"type": "se_e2_a", "sel": [46, 92], "neuron": [25, 50, 100], "axis_neuron": 16}
RADIAL = SMOOTH | {"type": "se_e2_r", "sel": [46, 92], "neuron": [5, 10, 20]}
ANGLES = SMOOTH | {"type": "se_e3", "rcut": 5.80, "neuron": [2, 4, 8], "precision": "float64"}
ATTEN = SMOOTH | {"type": "se_atten", "sel": 120, "neuron": [25, 50, 100], "axis_neuron": 16}
ATTENTION = {"attn": 128, "attn_layer": 2, "attn_dotr": True, "attn_mask": False}
DPA1 = ATTEN | ATTENTION | {
    "type": "dpa1", "tebd_dim": 8, "type_one_side": True, "activation_function": "tanh", "scaling_factor": 1.0,
    "normalize": True, "temperature": 1.0,
}  # fmt: skip
DIPOLE = PAIRS | {"rcut_smth": 3.80, "rcut": 4.00, "axis_neuron": 6, "precision": "float64"}
POLAR = PAIRS | {"rcut_smth": 5.80, "precision": "float64"}
SELECTED = {"atom_exclude_types": [1]}
PARAMETERS = {
    "type": "se_a", "sel": [60], "rcut_smth": 1.80, "rcut": 6.00, "neuron": [25, 50, 100], "resnet_dt": False,
    "axis_neuron": 8, "seed": 1,
}  # fmt: skip
MOLECULES = {"rcut_smth": 1.00, "axis_neuron": 12}

EXP = {"type": "exp", "decay_steps": 5000, "start_lr": 0.001, "stop_lr": 3.51e-8} | COMMENT
ENERGY = {"start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 1000, "limit_pref_f": 1} | COMMENT
VIRIAL = ENERGY | {"start_pref_v": 0, "limit_pref_v": 0}
OLD = {"save_ckpt": "model.ckpt", "disp_training": True, "time_training": True, "profiling": False}
OLD |= {"profiling_file": "timeline.json"}

WATER = {
    "training_data": {"systems": [f"../data/data_{n}/" for n in range(3)], "batch_size": "auto"} | COMMENT,
    "validation_data": {"systems": ["../data/data_3"], "batch_size": 1, "numb_btch": 3} | COMMENT,
}
PARTS = ("atomic_system", "global_system")
TENSORS = {
    "training_data": {"systems": [f"./training_data/{part}" for part in PARTS], "batch_size": "auto"},
    "validation_data": {"systems": [f"./validation_data/{part}" for part in PARTS], "batch_size": 1, "numb_btch": 3},
}
DPLR = {"training_data": {"systems": ["data"], "batch_size": "auto", "set_prefix": "set"} | COMMENT}
BERYLLIUM = {
    "training_data": {
        "systems": ["../data/e3000_i2000/", "../data/e8000_i2000/"], "set_prefix": "set", "batch_size": 1
    }
}  # fmt: skip


def water(
    descriptor: dict[str, Any], fitting: dict[str, Any] = WIDE, training: dict | None = None, **model: Any
) -> dict:
    section = {"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": fitting} | model | COMMENT
    return {"model": section, "learning_rate": EXP, "loss": VIRIAL, "training": WATER | (training or {})}


def tensor(descriptor: dict[str, Any], fitting: dict[str, Any], rate: dict[str, Any], **model: Any) -> dict:
    loss = {"type": "tensor", "pref": 1.0, "pref_atomic": 1.0} | COMMENT
    section = {"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": TENSOR | fitting} | model
    return {"model": section, "learning_rate": rate, "loss": loss, "training": TENSORS}


def parameters(model: dict[str, Any], fitting: dict[str, Any]) -> dict:
    section = {"data_stat_nbatch": 1, "descriptor": PARAMETERS, "fitting_net": NARROW | fitting} | model
    rate = {"start_lr": 0.001, "stop_lr": 1e-8, "decay_steps": 5000}
    return {"model": section, "learning_rate": rate, "loss": VIRIAL, "training": BERYLLIUM | OLD}


def molecules(descriptor: dict[str, Any], batch: str) -> dict:
    training = {"training_data": {"systems": "../data/", "batch_size": batch} | COMMENT}
    model = {"type_map": ["C", "H", "O"], "descriptor": descriptor, "fitting_net": WIDE}
    return {"model": model, "learning_rate": EXP | {"decay_steps": 4000}, "loss": VIRIAL, "training": training}


def version_1(descriptor: dict[str, Any]) -> dict:
    """All data under training, keys of old without effect, a folder of systems, the shortest names."""
    training = {
        "systems": ["../data/"],
        "set_prefix": "set",
        "batch_size": 1,
        "numb_test": 10,
        "load_ckpt": "model.ckpt",
    }
    model = {"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": NARROW}
    rate = EXP | {"start_lr": 0.005, "stop_lr": 1.76e-7}
    top = {"with_distrib": False, "model_type": descriptor["type"]} | COMMENT
    return top | {"model": model, "learning_rate": rate, "loss": VIRIAL, "training": OLD | training}


def densities(folders: list[str], descriptor: dict[str, Any]) -> dict:
    model = {"type_map": ["Si"], "descriptor": PARAMETERS | {"sel": [90]} | descriptor}
    model["fitting_net"] = NARROW | {"type": "dos", "numb_dos": 250, "numb_fparam": 0}
    terms = {f"{when}_pref_{what}": 0.0 for when in ("start", "limit") for what in ("dos", "cdf", "acdf")}
    loss = {"type": "dos", "start_pref_ados": 1.0, "limit_pref_ados": 1.0} | terms
    data = {"systems": [f"../data/{name}" for name in folders], "set_prefix": "set", "batch_size": 1}
    rate = {"type": "exp", "start_lr": 0.001, "stop_lr": 1e-08}
    return {"model": model, "learning_rate": rate, "loss": loss, "training": OLD | {"training_data": data}} | COMMENT


def bands() -> dict:
    fitting = WIDE | {"type": "property", "intensive": True, "task_dim": 3, "property_name": "band_prop"}
    model = {"type_map": ["H", "C", "N", "O"], "descriptor": DPA1 | {"attn_layer": 0}, "fitting_net": fitting}
    loss = {"type": "property", "metric": ["mae"], "loss_func": "smooth_mae", "beta": 1.0} | COMMENT
    data = {
        "training_data": {"systems": ["../data/data_0", "../data/data_1"], "batch_size": 1} | COMMENT,
        "validation_data": {"systems": ["../data/data_2"], "batch_size": 1} | COMMENT,
    }
    training = data | {"warmup_steps": 0, "gradient_max_norm": 5.0}
    return {"model": model, "learning_rate": EXP | {"start_lr": 0.0002}, "loss": loss, "training": training}


TEN = {"type": "exp", "start_lr": 0.01, "decay_steps": 5000}
EXAMPLES: dict[str, dict[str, Any]] = {
    "water/se_e2_a": water(PAIRS),
    "water/se_e2_a torch": water(
        PAIRS | {"type_one_side": True}, training={"stat_file": "./se_e2_a"}, data_stat_nbatch=20
    ),
    "water/se_e2_a epochs": water(PAIRS, training={"stat_file": "./se_e2_a.hdf5", "num_epoch": 0.5}),
    "water/train se_a": version_1(PAIRS | {"type": "se_a"}),
    "water/train se_r": version_1(RADIAL | {"type": "se_r"}),
    "water/se_e2_r": water(RADIAL, NARROW),
    "water/se_e3": water(ANGLES | {"sel": "auto"}, training=OLD),
    "water/se_e3 torch": water(ANGLES | {"sel": [46, 92]}, training={"stat_file": "./se_e3.hdf5"}),
    "water/se_atten": water(ATTEN | ATTENTION),
    "water/se_atten v2": water(ATTEN | ATTENTION | {"type": "se_atten_v2", "precision": "float64"}),
    "water/se_atten torch": water(DPA1, training={"stat_file": "./dpa1.hdf5"}),
    "water/se_atten_compressible": water(ATTEN | ATTENTION | {"type": "se_atten_v2", "attn_layer": 0}),
    "water/se_atten_dpa1_compat": water(ATTEN | ATTENTION | {"stripped_type_embedding": False}),
    "water/hybrid": water(
        {
            "type": "hybrid",
            "list": [
                PAIRS | {"sel": [20, 40], "rcut": 4.00, "neuron": [10, 20, 40], "axis_neuron": 4},
                RADIAL,
                SMOOTH | {"type": "se_atten", "attn_layer": 0, "sel": [46, 92], "neuron": [5, 10, 20]},
            ],
        }
    ),
    "water_tensor/dipole": tensor(DIPOLE, {"type": "dipole", "sel_type": [0]}, TEN),
    "water_tensor/dipole torch": tensor(
        DIPOLE | {"type_one_side": True}, {"type": "dipole"}, TEN | {"stop_lr": 1e-7}, **SELECTED
    ),
    "water_tensor/polar": tensor(POLAR, {"type": "polar", "sel_type": [0], "fit_diag": False}, TEN | {"stop_lr": 3e-7}),
    "water_tensor/polar torch": tensor(
        POLAR | {"type_one_side": True}, {"type": "polar", "fit_diag": False}, TEN | {"stop_lr": 3e-7}, **SELECTED
    ),
    "water/dplr/train": tensor(PAIRS | {"neuron": [16, 32, 64]}, {"type": "dipole", "dipole_type": [0]}, TEN)
    | {"loss": {"type": "tensor", "pref": 0.0, "pref_atomic": 1.0}, "training": OLD | DPLR},
    "fparam/train": parameters({"type_map": ["Be"]}, {"numb_fparam": 1}),
    "fparam/train aparam": parameters({}, {"numb_aparam": 1}),
    "nopbc/train": molecules(PAIRS | MOLECULES | {"sel": [40, 80, 40], "type_one_side": True}, "auto"),
    "nopbc/mixed": molecules(ATTEN | MOLECULES, "mixed:4"),
    "dos/train": densities(["heat-221"], {}),
    "dos/train torch": densities([f"heat-221-reformat/{part}/" for part in PARTS], {"type_one_side": True}),
    "property/train": bands(),
}


def system(path: Path, types: list[int], names: str, frames: int = 3, cell: float | None = 9.0, **arrays: Any) -> None:
    """Atoms on a jittered grid with arrays of labels; a label given as its width is filled with noise."""
    rng, n = np.random.default_rng(len(str(path))), len(types)
    x = np.indices((3, 3, 3)).reshape(3, -1).T[:n] * 1.6 + rng.normal(scale=0.1, size=(frames, n, 3))
    folder = path / "set.000"
    folder.mkdir(parents=True)
    (path / "type.raw").write_text("\n".join(map(str, types)))
    (path / "type_map.raw").write_text("\n".join(names.split()))
    if cell is None:
        (path / "nopbc").touch()
    else:
        np.save(folder / "box.npy", np.tile(np.eye(3).ravel() * cell, (frames, 1)))
    np.save(folder / "coord.npy", x.reshape(frames, -1))
    for name, value in arrays.items():
        np.save(folder / f"{name}.npy", rng.normal(size=(frames, value)) if isinstance(value, int) else value)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders as in DeePMD-kit's examples."""
    root = tmp_path_factory.mktemp("examples")
    oxygen, n = [0] * 3 + [1] * 6, 9
    for k in range(4):
        system(root / f"water/data/data_{k}", oxygen, "O H", energy=1, force=3 * n, virial=9)
    for kind, width, label in (("dipole", 3, "dipole"), ("polar", 9, "polarizability")):
        for use in ("training_data", "validation_data"):
            folder = root / "water_tensor" / kind / use
            system(folder / "atomic_system", oxygen, "O H", **{f"atomic_{label}": 3 * width})  # of the oxygens
            system(folder / "global_system", oxygen, "O H", **{label: width})
    for name in ("e3000_i2000", "e8000_i2000"):  # atomic parameters of all frames in one row
        parameter = {"fparam": 1, "aparam": np.linspace(0.0, 1.0, 3 * 8)[None]}
        system(root / "fparam/data" / name, [0] * 8, "Be", energy=1, force=24, **parameter)
    for name, types in (("C1H4O2", [0, 1, 1, 1, 1, 2, 2]), ("C3H3O4", [0] * 3 + [1] * 3 + [2] * 4)):
        system(root / "nopbc/data" / name, types, "C H O", cell=None, energy=1, force=3 * len(types))
    system(root / "water/dplr/train/data", oxygen, "O H", atomic_dipole=3 * 3)
    numbers = {"atomic_system": {"atom_dos": 8 * 250}, "global_system": {"dos": 250}}
    for part, arrays in numbers.items():
        system(root / "dos/data/heat-221-reformat" / part, [0] * 8, "Si", **arrays)
    system(root / "dos/data/heat-221", [0] * 8, "Si", **numbers["atomic_system"], **numbers["global_system"])
    for k in range(3):  # molecules of different composition in one system
        kinds = np.random.default_rng(k).integers(0, 4, (3, 7)).astype(np.int32)
        folder = root / f"property/data/data_{k}"
        system(folder, [0] * 7, "H C N O", cell=None, real_atom_types=kinds, band_prop=3)
    return root


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_of_deepmd_kit(name: str, examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = examples / name.split()[0]
    where.mkdir(exist_ok=True, parents=True)
    monkeypatch.chdir(where)
    example = EXAMPLES[name]
    short = {"seed": 10, "disp_file": "lcurve.out", "disp_freq": 1, "save_freq": 2}
    if "num_epoch" not in example["training"]:
        short["numb_steps"] = 2
    Path("input.json").write_text(json.dumps(example | {"training": example["training"] | short}))
    try:
        assert main(["train", "input.json"]) == 0
    finally:
        logs.close()
    table = np.array([[float(x) for x in row.split()] for row in rows(where)])
    assert len(table) == 3  # before the first step and after each
    assert np.isfinite(table[:, 1]).any()
    assert (where / "model.ckpt-2.safetensors").is_file()
