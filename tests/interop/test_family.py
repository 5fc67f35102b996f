"""Every descriptor and fitting to and from the real DeePMD-kit 3.2: its models here, ours there, the same numbers.

Energies of atoms and tensors are compared with its NumPy backend, which knows all of them and no derivatives; forces
and virials with its TensorFlow backend, for those that it converts. Types are sorted: see docs/conventions.md on empty
places of sel.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_deepmd import ENERGY_PER_ATOM, FORCE, PEER, VIRIAL

from allforce.data.batch import Frame
from allforce.files.model_file import load_model, save_model
from allforce.infer.evaluate import Evaluator
from allforce.infer.invariant import DeepProperty
from allforce.infer.predict import DeepPot

HERE = Path(__file__).parent
TENSOR = 1e-9
pytestmark = pytest.mark.skipif(
    not PEER.exists(), reason="no DeePMD-kit here; `make interop` installs it and runs these"
)

COMMON = {"rcut": 4.0, "rcut_smth": 0.5, "neuron": [3, 6, 12], "seed": 1, "precision": "float64"}
PAIRS = COMMON | {"type": "se_e2_a", "sel": [60, 60, 60], "axis_neuron": 4}
RADIAL = COMMON | {"type": "se_e2_r", "sel": [60, 60, 60], "type_one_side": True}
ATTEN = COMMON | {"type": "dpa1", "sel": 140, "axis_neuron": 4, "attn_layer": 0, "attn": 9}
V2 = ATTEN | {"type": "se_atten_v2"}
ATTEN |= {"smooth_type_embedding": False}  # DeePMD-kit's classes have another default than its input
ANGLES = COMMON | {"type": "se_e3", "sel": [40, 40, 40], "rcut": 3.0}
PROPERTY = {"type": "property", "property_name": "gap", "task_dim": 3}

# name -> (descriptor, fitting, davg, further keys of the model)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float, dict[str, Any]]] = {
    f"dpa1_{mode}{'_one_side' * one}{'_smooth' * smooth}_{layers}": (
        ATTEN
        | {"tebd_input_mode": mode, "type_one_side": one, "smooth_type_embedding": smooth, "attn_layer": layers},
        {}, 0.1, {},
    )
    for mode in ("concat", "strip") for one in (False, True) for smooth in (False, True) for layers in (0, 2)
}  # fmt: skip
CASES |= {
    "dpa1_forces": (ATTEN, {}, 0.0, {}),
    "dpa1_strip_forces": (ATTEN | {"tebd_input_mode": "strip"}, {}, 0.0, {}),
    "dpa1_bias": (ATTEN | {"use_tebd_bias": True, "resnet_dt": True, "concat_output_tebd": False}, {}, 0.0, {}),
    "dpa1_attention_options": (
        ATTEN | {"attn_layer": 1, "attn_dotr": False, "normalize": False, "temperature": 0.7, "ln_eps": 1e-3},
        {}, 0.0, {},
    ),
    "dpa1_excluded": (ATTEN | {"attn_layer": 1, "exclude_types": [[0, 1]]}, {}, 0.1, {}),
    "se_atten_v2": (V2, {}, 0.1, {}),
    "se_e2_r": (RADIAL, {}, 0.1, {}),
    "se_e2_r_excluded": (RADIAL | {"exclude_types": [[0, 1]]}, {}, 0.1, {}),
    "se_e3": (ANGLES, {}, 0.1, {}),
    "hybrid": ({"type": "hybrid", "list": [PAIRS, RADIAL | {"rcut": 3.0, "sel": [30, 30, 30]}]}, {}, 0.1, {}),
    "hybrid_mixed": ({"type": "hybrid", "list": [PAIRS, ATTEN]}, {}, 0.1, {}),
    "dipole": (PAIRS, {"type": "dipole"}, 0.1, {}),
    "dipole_selected": (ATTEN, {"type": "dipole"}, 0.0, {"atom_exclude_types": [1]}),
    "polar": (PAIRS, {"type": "polar", "scale": [1.0, 2.0, 0.5]}, 0.1, {}),
    "dos": (PAIRS, {"type": "dos", "numb_dos": 7}, 0.1, {}),
    "dos_mixed": (ATTEN, {"type": "dos", "numb_dos": 5}, 0.0, {"atom_exclude_types": [1]}),
    "property": (PAIRS, PROPERTY, 0.1, {}),
    "property_mixed": (ATTEN, PROPERTY | {"task_dim": 1}, 0.0, {"atom_exclude_types": [1]}),
    "property_mean": (PAIRS, PROPERTY | {"intensive": True}, 0.1, {"atom_exclude_types": [1]}),
    "property_alike": (PAIRS, PROPERTY | {"distinguish_types": False}, 0.1, {}),
    "polar_full": (PAIRS, {"type": "polar", "fit_diag": False, "shift_diag": False}, 0.1, {}),
}  # fmt: skip
BY_TENSORFLOW = ("dpa1_forces", "dpa1_strip_forces", "se_e2_r", "se_e3", "hybrid")
NAMES = {
    "energy": "atom_energy",
    "dos": "atom_dos",
    "property": "atom_gap",
    "dipole": "dipole",
    "polar": "polar",
}  # our output -> theirs, of atoms


def section(name: str) -> dict[str, Any]:
    descriptor, fitting, _, more = CASES[name]
    fitting = {"neuron": [10, 10], "seed": 2, "precision": "float64", **fitting}
    return {"type_map": ["O", "H", "C"], "descriptor": descriptor, "fitting_net": fitting, **more}


def structures(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    cell = np.array([[7.0, 0.0, 0.0], [2.0, 6.5, 0.0], [-1.0, 1.5, 6.0]])
    images = np.array(np.meshgrid(*[[-1, 0, 1]] * 3)).reshape(3, -1).T @ cell
    frames = []
    for _ in range(2):
        x: list[np.ndarray] = []
        while len(x) < 14:
            new = rng.uniform(0.0, 1.0, 3) @ cell
            if all(np.linalg.norm(new - old + images, axis=1).min() > 0.9 for old in x):
                x.append(new)
        frames.append(np.array(x).ravel())
    types = np.sort(rng.integers(0, 3, 14))
    types[0] = 0
    return {"coord": np.array(frames), "cell": np.tile(cell.reshape(1, 9), (2, 1)), "type": types}


def run(folder: Path, jobs: list[dict[str, Any]]) -> None:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [str(PEER), str(HERE / "peer_family.py"), str(folder / "jobs.json")]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with DeePMD-kit's models and what it computes with them."""
    folder, jobs = tmp_path_factory.mktemp("theirs"), []
    for seed, name in enumerate(CASES):
        np.savez(folder / f"{name}_in.npz", **structures(seed))
        job = {"section": section(name), "davg": CASES[name][2], "seed": seed, "model": str(folder / f"{name}.yaml")}
        job |= {"input": str(folder / f"{name}_in.npz"), "output": str(folder / f"{name}_out.npz")}
        if name in BY_TENSORFLOW:
            job |= {"frozen": str(folder / f"{name}.pb"), "output_tf": str(folder / f"{name}_tf.npz")}
        jobs.append(job)
    run(folder, jobs)
    return folder


@pytest.fixture(scope="module")
def again(theirs: Path) -> Path:
    """The same models, read and written here, and what DeePMD-kit computes with those."""
    jobs = []
    for name in CASES:
        save_model(load_model(theirs / f"{name}.yaml"), theirs / f"{name}_again.dp")
        job = {"model": f"{name}_again.dp", "input": f"{name}_in.npz", "output": f"{name}_again_out.npz"}
        jobs.append({key: str(theirs / file) for key, file in job.items()})
    run(theirs, jobs)
    return theirs


class AnyModel(Evaluator):
    kind = "descriptor"


def ours(path: Path, data: Any, table: str) -> np.ndarray:
    model = AnyModel(path, table=table)
    name = next(name for name in NAMES if name in model.model.outputs)
    frames = [Frame(x.reshape(-1, 3), data["type"], data["cell"][0].reshape(3, 3)) for x in data["coord"]]
    return np.array([r[f"atomic {name}"] for r in model.evaluate(frames, (f"atomic {name}",))])


@pytest.mark.parametrize("table", ["exact", "table"])
@pytest.mark.parametrize("name", CASES)
def test_their_model_here(name: str, table: str, theirs: Path) -> None:
    there = np.load(theirs / f"{name}_out.npz")
    expected = next(there[x] for x in NAMES.values() if x in there)
    found = ours(theirs / f"{name}.yaml", np.load(theirs / f"{name}_in.npz"), table).reshape(expected.shape)
    assert np.abs(expected).max() > 1e-5
    assert np.abs(found - expected).max() < (ENERGY_PER_ATOM if "atom_energy" in there else TENSOR)


@pytest.mark.parametrize("name", CASES)
def test_our_model_there(name: str, again: Path) -> None:
    before, after = np.load(again / f"{name}_out.npz"), np.load(again / f"{name}_again_out.npz")
    assert before.files == after.files
    for key in before.files:
        np.testing.assert_allclose(before[key], after[key], rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("property")])
def test_properties_of_frames(name: str, theirs: Path) -> None:
    """Sums, and means over the atoms whose type is not excluded."""
    data, there = np.load(theirs / f"{name}_in.npz"), np.load(theirs / f"{name}_out.npz")
    (found,) = DeepProperty(theirs / f"{name}.yaml", table="exact").eval(data["coord"], data["cell"], data["type"])
    assert np.abs(found - there["gap"]).max() < TENSOR and np.abs(found).max() > 1e-3


@pytest.mark.parametrize("name", BY_TENSORFLOW)
def test_forces_and_virials(name: str, theirs: Path) -> None:
    data, there = np.load(theirs / f"{name}_in.npz"), np.load(theirs / f"{name}_tf.npz")
    energy, force, virial = DeepPot(theirs / f"{name}.yaml", table="exact").eval(
        data["coord"], data["cell"], data["type"]
    )
    assert np.abs(energy - there["energy"]).max() / 14 < ENERGY_PER_ATOM
    assert np.abs(force - there["force"]).max() < FORCE
    assert np.abs(virial - there["virial"]).max() < VIRIAL
    assert np.abs(there["force"]).max() > 1e-4
