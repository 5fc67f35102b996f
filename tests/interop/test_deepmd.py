"""Our models in the real DeePMD-kit 3.2 and its models here: energies, forces and virials are the same numbers.

Needs an environment with deepmd-kit and tensorflow-cpu, which `make interop` makes. rcut and rcut_smth are exact in
float32, because DeePMD-kit's TensorFlow operators take them in this precision.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from allforce.files.model_file import load_model, save_model
from allforce.infer.predict import DeepPot
from allforce.models.standard import StandardConfig, StandardModel

HERE = Path(__file__).parent
PEER = Path(os.environ.get("ALLFORCE_DEEPMD_PYTHON", HERE.parents[1] / ".peers" / "tf" / "bin" / "python"))
pytestmark = pytest.mark.skipif(
    not PEER.exists(), reason="no DeePMD-kit here; `make interop` installs it and runs these"
)

ENERGY_PER_ATOM, FORCE, VIRIAL = 1e-10, 1e-9, 1e-8  # eV, eV/Å, eV
TABLE = 1e-7  # of the default evaluation through the spline table, eV/Å


@dataclass
class Case:
    """A random model and random structures for it."""

    natoms: tuple[int, ...] = (8, 16)  # of each type
    cell: list | None = field(default_factory=lambda: [9.0, 9.0, 9.0])
    nearest: float = 0.9  # Å
    descriptor: dict = field(default_factory=dict)
    fitting: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    davg: float = 0.1
    nearest_known: bool = True


CASES = {
    "water": Case(natoms=(16, 32), descriptor={"type_one_side": True}),
    "two_sided": Case(),
    "triclinic": Case(cell=[[8.0, 0.0, 0.0], [2.5, 7.5, 0.0], [-1.5, 2.0, 8.5]]),
    "rotated": Case(cell=[[0.0, 8.0, 0.0], [0.0, 1.0, 9.0], [8.5, 0.0, 0.0]]),
    "not_periodic": Case(cell=None),
    "three_types": Case(natoms=(5, 9, 4)),
    "three_types_one_side": Case(natoms=(5, 9, 4), descriptor={"type_one_side": True}),
    "images": Case(natoms=(1, 2), cell=[[3.1, 0.0, 0.0], [0.4, 2.9, 0.0], [0.2, 0.3, 3.3]]),
    "one_atom": Case(natoms=(1, 0), cell=[2.5, 2.6, 2.7]),
    "resnet_dt": Case(descriptor={"resnet_dt": True, "neuron": [2, 4, 8]}, fitting={"resnet_dt": True}),
    "no_resnet_dt": Case(fitting={"resnet_dt": False}, descriptor={"neuron": [5, 10, 12]}),
    "fparam": Case(fitting={"numb_fparam": 2}),
    "aparam": Case(fitting={"numb_fparam": 1, "numb_aparam": 2}),
    "atom_ener": Case(fitting={"atom_ener": [-1.5, -0.25]}, davg=0.0),
    "exclude_types": Case(descriptor={"exclude_types": [[0, 1]]}, davg=0.0),
    "atom_exclude_types": Case(natoms=(5, 9, 4), model={"atom_exclude_types": [0, 2]}),
    "atom_exclude_types_vacuum": Case(
        fitting={"atom_ener": [-1.5, -0.25]}, davg=0.0, model={"atom_exclude_types": [1]}, nearest_known=False
    ),
    "gelu": Case(descriptor={"activation_function": "gelu"}, fitting={"activation_function": "softplus"}),
}


def potential(case: Case, seed: int) -> StandardModel:
    """Random weights, statistics and biases; sel far above what the structures need."""
    nt = len(case.natoms)
    config = StandardConfig.model_validate(
        {
            "type_map": ["O", "H", "Na"][:nt],
            "descriptor": {
                "type": "se_e2_a", "sel": [120] * nt, "rcut": 4.5, "rcut_smth": 0.5, "neuron": [4, 8, 16],
                "axis_neuron": 3, "precision": "float64", "seed": seed, **case.descriptor,
            },
            "fitting_net": {"neuron": [20, 20, 20], "precision": "float64", "seed": seed + 1, **case.fitting},
            **case.model,
        }
    )  # fmt: skip
    model = StandardModel(config)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        model.descriptor.davg[:, 0] = torch.from_numpy(case.davg * rng.uniform(0.5, 1.0, nt))
        angular = rng.uniform(0.1, 0.3, nt)
        model.descriptor.dstd.copy_(torch.from_numpy(np.stack([rng.uniform(0.1, 0.3, nt), *[angular] * 3], 1)))
        model.fitting.bias_atom_e.copy_(torch.from_numpy(rng.uniform(-300.0, -10.0, nt)))
        for net in model.fitting.nets:
            net.layers[-1].w.mul_(20.0)  # forces of a size as in reality
        for name in ("fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std"):
            value = getattr(model.fitting, name)
            value.copy_(torch.from_numpy(rng.uniform(0.5, 1.5, len(value))))
    model.min_nbor_dist = case.nearest if case.nearest_known else None
    return model


def structures(case: Case, seed: int, frames: int = 2) -> dict[str, np.ndarray]:
    """Atoms at random, none nearer than case.nearest; some outside the cell."""
    rng = np.random.default_rng(seed + 100)
    types = rng.permutation(np.repeat(np.arange(len(case.natoms)), case.natoms))
    cell = None if case.cell is None else np.array(case.cell, dtype=float)
    if cell is not None and cell.ndim == 1:
        cell = np.diag(cell)
    box = np.diag([9.0] * 3) if cell is None else cell
    images = np.array(np.meshgrid(*[[-1, 0, 1]] * 3)).reshape(3, -1).T @ box if cell is not None else np.zeros((1, 3))
    coords = []
    for _ in range(frames):
        x: list[np.ndarray] = []
        while len(x) < len(types):
            new = rng.uniform(0.0, 1.0, 3) @ box
            if all(np.linalg.norm(new - old + images, axis=1).min() > case.nearest for old in x):
                x.append(new)
        coords.append(np.array(x) + rng.integers(-1, 2, (len(types), 3)) @ (box if cell is not None else 0.0 * box))
    out = {"coord": np.array(coords).reshape(frames, -1), "type": types}
    if cell is not None:
        out["cell"] = np.tile(cell.reshape(1, 9), (frames, 1))
    if n := case.fitting.get("numb_fparam"):
        out["fparam"] = rng.uniform(0.0, 2.0, (frames, n))
    if n := case.fitting.get("numb_aparam"):
        out["aparam"] = rng.uniform(0.0, 2.0, (frames, len(types) * n))
    return out


TRAINED = {  # models that DeePMD-kit itself makes: descriptor, fitting, structures
    "their_two_sided": Case(descriptor={"resnet_dt": True}),
    "their_three_types": Case(natoms=(5, 9, 4), descriptor={"type_one_side": True}),
    "their_fparam": Case(fitting={"numb_fparam": 2}),
}


def training_folder(folder: Path, case: Case, seed: int) -> None:
    """Data with made-up labels and an input for two steps of training."""
    (folder / "data" / "set.000").mkdir(parents=True)
    data = structures(case, seed, frames=4)
    rng = np.random.default_rng(seed)
    n = len(data["type"])
    np.savetxt(folder / "data" / "type.raw", data["type"], fmt="%d")
    arrays = {"coord": data["coord"], "box": data["cell"], "energy": rng.normal(-50.0 * n, 1.0, (4, 1))}
    arrays["force"] = rng.normal(0.0, 1.0, (4, 3 * n))
    if "fparam" in data:
        arrays["fparam"] = data["fparam"]
    for name, value in arrays.items():
        np.save(folder / "data" / "set.000" / f"{name}.npy", value)
    names = ["O", "H", "Na"][: len(case.natoms)]
    (folder / "data" / "type_map.raw").write_text("\n".join(names))
    descriptor = {"type": "se_e2_a", "sel": [60] * len(names), "rcut": 4.5, "rcut_smth": 0.5, "neuron": [4, 8, 16]}
    model = {
        "type_map": names,
        "descriptor": {**descriptor, "axis_neuron": 3, "seed": 1, **case.descriptor},
        "fitting_net": {"neuron": [20, 20], "seed": 1, **case.fitting},
    }
    training = {
        "training_data": {"systems": ["data"], "batch_size": 1},
        "numb_steps": 2,
        "disp_freq": 1,
        "save_freq": 1,
    }
    section = {"model": model, "learning_rate": {"start_lr": 0.001}, "loss": {"type": "ener"}, "training": training}
    (folder / "input.json").write_text(json.dumps(section))


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that DeePMD-kit made of our models and of its own, in one run of it."""
    folder = tmp_path_factory.mktemp("interop")
    jobs = []
    for seed, (name, case) in enumerate((CASES | TRAINED).items()):
        np.savez(folder / f"{name}_in.npz", **structures(case, seed))
        files = {
            "input": f"{name}_in.npz",
            "output": f"{name}_out.npz",
            "frozen": f"{name}.pb",
            "back": f"{name}_back.dp",
        }
        job = {key: str(folder / file) for key, file in files.items()}
        if name in TRAINED:
            training_folder(folder / name, case, seed)
            job["train"] = str(folder / name)
        else:
            save_model(potential(case, seed), folder / f"{name}.dp")
            job["model"] = str(folder / f"{name}.dp")
        jobs.append(job)
    save_model(potential(CASES["water"], 0), folder / "yaml.yaml")
    jobs.append(
        {
            "model": str(folder / "yaml.yaml"),
            "frozen": str(folder / "yaml.pb"),
            "input": str(folder / "water_in.npz"),
            "output": str(folder / "yaml_out.npz"),
        }
    )
    (folder / "jobs.json").write_text(json.dumps(jobs))
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [str(PEER), str(HERE / "peer.py"), str(folder / "jobs.json")]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def ours(model: DeepPot, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    optional = {name: data[name] for name in ("fparam", "aparam") if name in data}
    values = model.eval(data["coord"], data.get("cell"), data["type"], atomic=True, **optional)
    return dict(zip(("energy", "force", "virial", "atom_energy", "atom_virial"), values, strict=True))


def compare(
    name: str, model: DeepPot, folder: Path, differences: dict, force: float = FORCE, virial: float = VIRIAL
) -> None:
    source = "water" if name == "yaml" else name
    data = dict(np.load(folder / f"{source}_in.npz"))
    here, there = ours(model, data), np.load(folder / f"{name}_out.npz")
    n = len(data["type"])
    difference = {key: float(np.abs(here[key] - there[key]).max()) for key in here}
    difference["energy"] /= n
    differences[name if force == FORCE else f"{name}, table"] = difference
    assert np.abs(there["force"]).max() > 0.01 or n == 1  # the case says something
    assert difference["energy"] < max(ENERGY_PER_ATOM, force / 10)
    assert difference["atom_energy"] < max(ENERGY_PER_ATOM, force / 10)
    assert difference["force"] < force
    assert difference["virial"] < virial
    assert difference["atom_virial"] < virial


@pytest.mark.parametrize("name", [*CASES, "yaml"])
def test_our_model_there(name: str, peer: Path, differences: dict) -> None:
    suffix = "yaml" if name == "yaml" else "dp"
    compare(name, DeepPot(peer / f"{name}.{suffix}", table="exact"), peer, differences)


@pytest.mark.parametrize("name", TRAINED)
def test_their_model_here(name: str, peer: Path, differences: dict) -> None:
    compare(name, DeepPot(peer / f"{name}_back.dp", table="exact"), peer, differences)


@pytest.mark.parametrize("name", ["water", "three_types", "fparam", "their_two_sided"])
def test_default_table_agrees_too(name: str, peer: Path, differences: dict) -> None:
    compare(name, DeepPot(peer / f"{name}_back.dp"), peer, differences, force=TABLE, virial=10 * TABLE)


@pytest.mark.parametrize("name", sorted(name for name in CASES if "exclude" not in name))
def test_round_trip_through_their_graph(name: str, peer: Path) -> None:
    """ours.dp -> .pb -> .dp by DeePMD-kit gives our weights back (nets of excluded pairs would be zero)."""
    before, after = load_model(peer / f"{name}.dp"), load_model(peer / f"{name}_back.dp")
    for key, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[key]), key
    assert before.config.descriptor.model_dump(exclude={"seed"}) == after.config.descriptor.model_dump(exclude={"seed"})
