"""A script of PiNN, in this process: training, its metrics, predictions, going on where it ended."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import yaml
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from tiny import BOX, soft_spheres

from allforce import logs
from allforce.cli import main
from allforce.errors import UserError
from allforce.files import checkpoint
from allforce.pinn import (
    EvalSpec,
    TrainSpec,
    dipole_model,
    get_calc,
    get_model,
    load_ase,
    potential_model,
    sparse_batch,
    train_and_evaluate,
)

NODES = {"pp_nodes": [6], "pi_nodes": [6], "ii_nodes": [6], "out_nodes": []}
NETWORK = {"atom_types": [8, 1], "rc": 4.5, "depth": 2, **NODES}
POTENTIAL = {"use_force": True, "e_dress": {8: -3.0, 1: -1.0}, "e_scale": 2.0, "log_e_per_atom": True}
PARAMS = {
    "network": {"name": "PiNet", "params": NETWORK},
    "model": {"name": "potential_model", "params": POTENTIAL},
    "optimizer": {"class_name": "Adam", "config": {"learning_rate": 0.01}},
    "seed": 1,
    "training": {"disp_freq": 10, "seed": 3},
}


@pytest.fixture
def frames(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng, structures = np.random.default_rng(0), []
    for n in (4, 6) * 6:
        types = rng.integers(0, 2, n)
        grid = np.array([[i, j, k] for i in range(2) for j in range(2) for k in range(2)])[:n] * 2.6
        atoms = Atoms(
            ["OH"[t] for t in types], grid + rng.normal(scale=0.2, size=(n, 3)), cell=np.eye(3) * BOX, pbc=True
        )
        energy, forces = soft_spheres(atoms.positions, types)
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
        structures.append(atoms)
    write("data.xyz", structures, format="extxyz")
    yield read("data.xyz", ":")  # as they are in the file, rounded
    logs.close()


def specs(steps: int) -> tuple[TrainSpec, EvalSpec]:
    data = load_ase("data.xyz", split={"train": 8, "vali": 4})
    train = data["train"].shuffle(100).repeat().apply(sparse_batch(4))
    return TrainSpec(lambda: train, max_steps=steps), EvalSpec(lambda: data["vali"].apply(sparse_batch(2)))


def test_train_and_evaluate(frames, tmp_path):
    params = {**PARAMS, "model_dir": str(tmp_path / "run")}
    model = potential_model(params)
    before = model.evaluate(specs(20)[1].input_fn)
    after = train_and_evaluate(model, *specs(20))
    assert after["loss"] < 0.5 * before["loss"] and (before["global_step"], after["global_step"]) == (0, 20)
    train_and_evaluate(potential_model(params), *specs(30))  # goes on from the folder
    assert get_model(tmp_path / "run").evaluate(specs(30)[1].input_fn)["global_step"] == 30
    assert yaml.safe_load((tmp_path / "run/params.yml").read_text())["network"]["name"] == "PiNet"


def test_a_folder_has_everything_of_its_run(frames, tmp_path):
    params = {**PARAMS, "model_dir": tmp_path / "run"}
    potential_model(params).train(specs(5)[0].input_fn, max_steps=5)
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert there >= {"lcurve.out", "metrics.jsonl", "params.yml", "out.json", "model.ckpt-5.safetensors"}
    assert not (tmp_path / "metrics.jsonl").exists()
    assert main(["report", "run"]) == 0  # also where the files are named from one folder above
    older = checkpoint.read(tmp_path / "run/model.ckpt-5.safetensors")
    older.meta["step"] = 3
    checkpoint.save(tmp_path / "run/model.ckpt", older, keep=5)  # a shorter run, after a longer one
    assert get_model(tmp_path / "run").global_step == 3


def test_predictions_and_metrics(frames, tmp_path):
    """METRICS are errors in scaled units, of what `predict` and the calculator give."""
    model = potential_model({**PARAMS, "model_dir": str(tmp_path / "run")})
    model.train(specs(5)[0].input_fn, max_steps=5)
    whole = load_ase("data.xyz", shuffle=False)
    metrics, found = model.evaluate(lambda: whole), list(model.predict(lambda: whole))
    calculator = get_calc(get_model(tmp_path / "run"))
    errors = []
    for label in frames:
        atoms = label.copy()
        atoms.calc = calculator
        energy = atoms.get_potential_energy()
        (same,) = [x for x in found if abs(x["energy"] - energy) < 1e-9]
        np.testing.assert_allclose(same["forces"], atoms.get_forces(), rtol=0, atol=1e-9)
        assert same["stress"].shape == (3, 3)
        errors.append((2.0 * (label.get_potential_energy() - energy), len(atoms)))
    e, n = np.array(errors).T
    assert metrics["METRICS/E_MAE"] == pytest.approx(np.abs(e).mean(), rel=1e-8)
    assert metrics["METRICS/E_RMSE"] == pytest.approx(np.sqrt((e**2).mean()), rel=1e-8)
    assert metrics["METRICS/E_PER_ATOM_MAE"] == pytest.approx(np.abs(e / n).mean(), rel=1e-8)
    assert metrics["METRICS/E_LOSS"] == pytest.approx((e**2).mean(), rel=1e-8)  # batches of one frame
    assert metrics["loss"] == pytest.approx(metrics["METRICS/E_LOSS"] + metrics["METRICS/F_LOSS"], rel=1e-8)


def test_data_without_labels(frames, tmp_path):
    model = potential_model({**PARAMS, "model_dir": str(tmp_path / "run")})
    with pytest.raises(UserError, match="no frames with a label"):
        model.evaluate(lambda: load_ase("data.xyz").take(0))
    for atoms in frames:
        atoms.calc.results.pop("forces")
    write("energies.xyz", frames, format="extxyz")
    assert "METRICS/F_MAE" not in model.evaluate(lambda: load_ase("energies.xyz"))
    write("bare.xyz", [Atoms(a.symbols, a.positions, cell=a.cell, pbc=True) for a in frames], format="extxyz")
    with pytest.raises(UserError, match="no frames with a label"):
        model.evaluate(lambda: load_ase("bare.xyz"))


def test_the_wrong_model_is_told():
    with pytest.raises(UserError, match="expected one with dipole in its name"):
        dipole_model({**PARAMS, "model_dir": "run"})
    with pytest.raises(UserError, match="expected one with potential in its name"):
        potential_model({**PARAMS, "model": {"name": "AC_dipole_model"}})


def test_a_script_ends_with_one_paragraph(tmp_path):
    lines = ["from allforce.pinn import distribute_data", "files = ['a', 'b']", "distribute_data(files, files[:1])"]
    (tmp_path / "script.py").write_text("\n".join(lines))
    result = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert re.match(r"error: .*script.py, line 3: distribute_data: .*2", result.stderr), result.stderr


def test_numbers_of_numpy_are_numbers():
    network = {"name": "PiNet", "params": {"atom_types": np.array([8, 1]), "rc": np.float64(4.5), "pi_nodes": (4, 3)}}
    model = potential_model({"model_dir": "run", "network": network})
    assert model.input.model.rc == 4.5 and model.input.model.type_map == ["O", "H"]
