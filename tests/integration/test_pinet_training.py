"""PiNet and dipole models from the input to ASE: workers, checkpoints, freezing, testing; PiNN's parameter files."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from tiny import BOX, changed, dp, rows, write_data

from allforce import logs
from allforce.cli import main
from allforce.files import checkpoint
from allforce.files.model_file import load_model
from allforce.infer.ase import DP

NETWORK = {"rc": 4.5, "depth": 2, "pp_nodes": [6], "pi_nodes": [6], "ii_nodes": [6], "out_nodes": [4], "seed": 1}
MODELS = {
    "pinet": ({"type": "pinet", **NETWORK}, {"type": "pinn", "use_force": True, "use_l2": True}),
    "pinet2 and the loss ener": (
        {"type": "pinet2", **NETWORK},
        {"type": "ener", "start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 10, "limit_pref_f": 10},
    ),
    "dipoles": (
        {"type": "pinet2_dipole", "kind": "AC_BC_R", **NETWORK},
        {"type": "pinn_dipole", "vector_dipole": True, "regularization": True},
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_data(tmp_path)
    for system in ("small", "large", "held"):
        (tmp_path / system / "type_map.raw").write_text("O\nH\n")
        types = np.loadtxt(tmp_path / system / "type.raw", dtype=int)
        x = np.load(tmp_path / system / "set.000/coord.npy").reshape(-1, len(types), 3)
        charges = np.where(types == 0, -0.8, 0.4)
        np.save(tmp_path / system / "set.000/dipole.npy", np.einsum("i,fia->fa", charges - charges.mean(), x))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    logs.close()


def write(folder, name: str, **changes) -> None:
    model, loss = MODELS[name]
    data = changed(model={**model, "type_map": ["O", "H"]}, loss=loss, **changes)
    (folder / "input.json").write_text(json.dumps(data))


def final(folder, step: int = 20):
    return checkpoint.read(folder / f"model.ckpt-{step}.safetensors").tensors


@pytest.mark.parametrize("name", MODELS)
def test_two_workers_are_one_with_two_micro_batches_bit_for_bit(folder, name):
    write(folder, name)
    result = dp(folder, "train", "input.json", "--workers", "2")
    assert result.returncode == 0, result.stderr
    two, curve = final(folder), rows(folder)
    write(folder, name, training__acc_freq=2)
    assert main(["train", "input.json"]) == 0
    one = final(folder)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert rows(folder) == curve
    first, last = (float(curve[k].split()[1]) for k in (0, -1))
    assert last < 0.8 * first  # it learns


@pytest.mark.parametrize("name", ["pinet", "dipoles"])
def test_a_run_that_was_interrupted_goes_on_exactly(folder, name):
    write(folder, name)
    assert main(["train", "input.json"]) == 0
    whole = final(folder)
    assert main(["train", "input.json", "--restart", "model.ckpt-10"]) == 0
    again = final(folder)
    assert all(torch.equal(whole[k], again[k]) for k in whole)


def test_a_potential_in_files_and_in_ase(folder, capfd):
    write(folder, "pinet")
    assert main(["train", "input.json"]) == 0
    assert main(["freeze", "-o", "pinet.dp"]) == 0
    saved, frozen = final(folder), load_model("pinet.dp").state_dict()
    assert all(torch.equal(frozen[k], saved[f"model/{k}"]) for k in frozen)
    assert main(["test", "-m", "pinet.dp", "-s", "held", "-d", "detail"]) == 0
    shown = re.search(r"Force  RMSE +: (\S+) eV", capfd.readouterr().err)
    data, pred = np.split(np.loadtxt("detail.f.out"), 2, axis=1)
    assert shown and float(shown[1]) == pytest.approx(np.sqrt(((data - pred) ** 2).mean()), rel=1e-5)
    atoms = Atoms(
        "OH2", [[0, 0, 0], [2.4, 0, 0], [0, 2.5, 0.3]], cell=np.eye(3) * BOX, pbc=True, calculator=DP("pinet.dp")
    )
    forces, stress = atoms.get_forces(), atoms.get_stress()
    h = 1e-5
    atoms.positions[1, 0] += h
    up = atoms.get_potential_energy()
    atoms.positions[1, 0] -= 2 * h
    assert forces[1, 0] == pytest.approx(-(up - atoms.get_potential_energy()) / (2 * h), abs=1e-8)
    assert stress.shape == (6,) and np.abs(stress).max() > 0


def test_dipoles_in_files_and_in_ase(folder, capfd):
    write(folder, "dipoles")
    assert main(["train", "input.json"]) == 0
    assert main(["freeze", "-o", "dipole.dp"]) == 0
    assert main(["test", "-m", "dipole.dp", "-s", "held", "-d", "detail"]) == 0
    data, pred = np.split(np.loadtxt("detail.dipole.out"), 2, axis=1)
    text = capfd.readouterr().err
    lengths = [np.linalg.norm(x, axis=1, keepdims=True) for x in (data, pred)]
    for name, (a, b) in {"Dipole": (data, pred), "Dipole length": lengths}.items():
        shown = re.search(rf"{name} RMSE +: (\S+) e", text)
        assert shown and float(shown[1]) == pytest.approx(np.sqrt(((a - b) ** 2).mean()), rel=1e-5)
    assert "only their lengths are learned" not in text
    calculator = DP("dipole.dp")
    assert calculator.implemented_properties == ["dipole", "charges"]
    x = np.load("held/set.000/coord.npy")[0].reshape(-1, 3)
    symbols = ["OH"[t] for t in np.loadtxt("held/type.raw", dtype=int)]
    atoms = Atoms(symbols, x, cell=np.eye(3) * BOX, pbc=True, calculator=calculator)
    np.testing.assert_allclose(atoms.get_dipole_moment(), pred[0], rtol=0, atol=1e-9)
    assert atoms.get_charges().sum() == pytest.approx(0, abs=1e-9)


def test_lengths_of_vectors_are_told(folder, capfd):
    write(folder, "dipoles", loss__vector_dipole=False, training__numb_steps=1)
    assert main(["train", "input.json"]) == 0
    assert "loss/vector_dipole is false, PiNN's default: only their lengths are learned" in capfd.readouterr().err


def test_the_wrong_loss_is_told(folder, capfd):
    write(folder, "dipoles", loss__type="pinn", loss__vector_dipole=None, loss__regularization=None)
    assert main(["train", "input.json"]) == 2
    assert "looks at energy; the model predicts dipole" in capfd.readouterr().err


PARAMS = {
    "model_dir": "run",
    "network": {"name": "PiNet", "params": {**{k: v for k, v in NETWORK.items() if k != "seed"}, "atom_types": [8, 1]}},
    "model": {"name": "potential_model", "params": {"use_force": True, "e_dress": {8: -3, 1: -1}}},
    "seed": 1,
    "training": {
        "training_data": {"systems": ["small", "large"], "batch_size": 2},
        "numb_steps": 5,
        "disp_freq": 5,
        "seed": 10,
    },
}


def test_a_parameter_file_of_pinn(folder):
    (folder / "params.yml").write_text(yaml.safe_dump(PARAMS))
    assert main(["train", "params.yml"]) == 0
    assert (folder / "run/model.ckpt-5.safetensors").exists()
    result = dp(folder, "train", "params.yml", "--workers", "2")
    assert result.returncode == 2 and "2 workers were started, but `parallel` is not true" in result.stderr
    (folder / "params.yml").write_text(yaml.safe_dump({**PARAMS, "parallel": True}))
    result = dp(folder, "train", "params.yml", "--workers", "2")
    assert result.returncode == 0, result.stderr
    told = re.findall(r"INFO    parallel: (.*)", result.stderr)
    assert [line.split()[0] for line in told] == ["only", "learning", "initial", "gradients", "one"]
    assert "3.00e-04 x 2 = 6.00e-04" in told[1] and "from scratch" in told[2]
