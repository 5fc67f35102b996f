"""Every descriptor and fitting through the whole program: train, two workers, restart, freeze, test, predict."""

import re

import numpy as np
import pytest
import torch
from ase import Atoms
from tiny import BOX, dp, rows, write_input

from allforce import DeepDipole, DeepDOS, DeepPolar, DeepProperty
from allforce.cli import main
from allforce.files import checkpoint
from allforce.infer.ase import DP
from allforce.infer.predict import DeepPot

pytest_plugins = ["folder_fixture"]

COMMON = {"rcut": 4.5, "rcut_smth": 2.0, "neuron": [4, 8], "seed": 1}
ATTEN = COMMON | {"type": "se_atten", "sel": "auto", "axis_neuron": 3, "attn_layer": 0}
PAIRS = COMMON | {"type": "se_e2_a", "sel": [16, 20], "axis_neuron": 3}
DESCRIPTORS = {
    "se_atten": ATTEN,
    "strip": ATTEN | {"type": "dpa1", "sel": [20, 20], "stripped_type_embedding": True},
    "se_atten_v2": ATTEN | {"type": "se_atten_v2", "sel": 40},
    "attention": ATTEN | {"attn_layer": 1, "attn": 6, "sel": 40},
    "se_e2_r": COMMON | {"type": "se_e2_r", "sel": "auto"},
    "se_e3": COMMON | {"type": "se_t", "sel": "auto", "rcut": 4.0},
    "hybrid": {"type": "hybrid", "list": [PAIRS | {"type": "se_a"}, COMMON | {"type": "se_r", "rcut": 4.0}]},
}


def final(folder, step=20):
    return checkpoint.read(folder / f"model.ckpt-{step}.safetensors").tensors


def train(folder, *args, **changes):
    write_input(folder, **changes)
    assert main(["train", "input.json", *args]) == 0


def force_errors(folder):
    """First and last force error of the held-out frames."""
    table = np.array([[float(x) for x in row.split()] for row in rows(folder)])
    assert np.isfinite(table).all()
    return table[0, 5], table[-1, 5]


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_descriptor_from_training_to_prediction(name, folder, capsys):
    section = DESCRIPTORS[name]
    steps = {"training__numb_steps": 150, "training__disp_freq": 50, "training__save_freq": 50}
    if name == "se_e2_r":  # its D is small
        steps |= {"learning_rate__start_lr": 0.03, "learning_rate__decay_steps": 60}
    train(folder, model__descriptor=section, **steps)
    first, last = force_errors(folder)
    assert last < 0.7 * first
    whole = final(folder, 150)
    assert main(["train", "input.json", "--restart", "model.ckpt-100.safetensors"]) == 0
    assert all(torch.equal(whole[k], x) for k, x in final(folder, 150).items())
    for target in ("m.dp", "m.yaml"):
        assert main(["freeze", "-o", target]) == 0
    capsys.readouterr()
    assert main(["test", "-m", "m.dp", "-s", "held"]) == 0
    found = re.search(r"Force  RMSE +: (\S+) ", capsys.readouterr().err)
    assert found is not None and float(found[1]) < 2 * last + 0.2

    x, types = np.load("held/set.000/coord.npy")[:2], [0, 0, 1, 1, 1, 0]
    cell = np.tile(np.eye(3).ravel() * BOX, (2, 1))
    a, b = (DeepPot(path, table="exact").eval(x, cell, types) for path in ("m.dp", "m.yaml"))
    table = DeepPot("m.dp").eval(x, cell, types)
    for i, j, k in zip(a, b, table, strict=True):
        np.testing.assert_array_equal(i, j)
        np.testing.assert_allclose(i, k, rtol=0, atol=1e-6)
    atoms = Atoms("H6", positions=x[0].reshape(-1, 3), cell=cell[0].reshape(3, 3), pbc=True)
    atoms.symbols[[2, 3, 4]] = "He"
    atoms.calc = DP("m.dp", type_dict={"H": 0, "He": 1})
    np.testing.assert_allclose(atoms.get_forces(), table[1][0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["se_atten", "attention", "hybrid"])
def test_two_workers_are_one_with_two_micro_batches(name, folder):
    section = DESCRIPTORS[name]
    write_input(folder, model__descriptor=section)
    result = dp(folder, "train", "input.json", "--workers", "2")
    assert result.returncode == 0, result.stderr
    two, curve = final(folder), rows(folder)
    train(folder, model__descriptor=section, training__acc_freq=2)
    assert all(torch.equal(x, two[k]) for k, x in final(folder).items())
    assert rows(folder) == curve


def add_tensors(folder, selected: bool) -> None:
    """Made-up dipoles and polarizabilities of atoms of type 0, from their neighbours; of frames their sum."""
    for system in ("small", "large", "held"):
        types = np.loadtxt(folder / system / "type.raw", dtype=int)
        x = np.load(folder / system / "set.000" / "coord.npy").reshape(-1, len(types), 3)
        d = x[:, None, :, :] - x[:, :, None, :]
        d -= BOX * np.round(d / BOX)
        w = np.exp(-(d**2).sum(-1) / 4.0)[..., None]
        dipole = (w * d).sum(2) * (types == 0)[:, None]
        polar = ((w * d)[..., :, None] * d[..., None, :]).sum(2) + 2 * np.eye(3)
        polar = polar.reshape(len(x), len(types), 9) * (types == 0)[:, None]
        for name, value in (("dipole", dipole), ("polarizability", polar)):
            # as many atoms of one type as of the other: all must be there
            rows_of = value[:, types == 0] if selected and system != "held" else value
            np.save(folder / system / "set.000" / f"atomic_{name}.npy", rows_of.reshape(len(x), -1))
            np.save(folder / system / "set.000" / f"{name}.npy", value.sum(1))


@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize(("kind", "reader"), [("dipole", DeepDipole), ("polar", DeepPolar)])
def test_tensor_from_training_to_prediction(kind, reader, selected, folder, capsys):
    """Labels of all atoms, or of the atoms of the selected type only."""
    add_tensors(folder, selected)
    fitting = {"type": kind, "neuron": [12, 12], "seed": 1, "sel_type": [0]}
    loss = {"type": "tensor", "pref": 1.0, "pref_atomic": 1.0}
    steps = {"training__numb_steps": 200, "training__disp_freq": 50, "training__save_freq": 100}
    train(folder, model__descriptor=PAIRS, model__fitting_net=fitting, loss=loss, **steps)
    assert "rmse_lc_val" in (folder / "lcurve.out").read_text() and "rmse_gl_trn" in (folder / "lcurve.out").read_text()
    table = np.array([[float(x) for x in row.split()] for row in rows(folder)])
    assert table[-1, 3] < 0.7 * table[0, 3] or table[-1, 3] < 0.05  # of atoms, held out
    assert main(["freeze", "-o", "m.dp"]) == 0
    capsys.readouterr()
    assert main(["test", "-m", "m.dp", "-s", "held", "-a", "-d", "detail"]) == 0
    log = capsys.readouterr().err
    found = re.search(r"RMSE +: (\S+)", log)
    assert found is not None and float(found[1]) == pytest.approx(table[-1, 3], rel=0.5)
    width = {"dipole": 3, "polar": 9}[kind]
    detail = np.loadtxt("detail.out")
    assert detail.shape == (6, 2 * width * 3)  # three atoms of type 0
    model = reader("m.dp")
    assert model.get_sel_type() == [0]
    x, types = np.load("held/set.000/coord.npy"), [0, 0, 1, 1, 1, 0]
    cell = np.tile(np.eye(3).ravel() * BOX, (6, 1))
    atomic, total = (model.eval(x, cell, types, atomic=flag) for flag in (True, False))
    assert atomic.shape == (6, 6, width) and total.shape == (6, width)
    np.testing.assert_allclose(atomic.sum(1), total, rtol=0, atol=1e-12)
    np.testing.assert_allclose(atomic[:, [0, 1, 5]].reshape(6, -1), detail[:, width * 3 :], rtol=0, atol=1e-9)
    if kind == "dipole":
        atoms = Atoms("H6", positions=x[0].reshape(-1, 3), cell=cell[0].reshape(3, 3), pbc=True)
        atoms.symbols[[2, 3, 4]] = "He"
        atoms.calc = DP("m.dp", type_dict={"H": 0, "He": 1})
        np.testing.assert_allclose(atoms.get_dipole_moment(), total[0], rtol=0, atol=1e-9)
    assert main(["test", "-m", "m.dp", "-s", "held"]) == 0 and "RMSE/sqrtN" in capsys.readouterr().err
    assert main(["eval-desc", "-m", "m.dp", "-s", "held"]) == 0 and np.load("desc/held.npy").shape == (6, 6, 24)


@pytest.mark.parametrize("descriptor", ["pairs", "se_e2_r"])
def test_density_of_states_from_training_to_prediction(descriptor, folder, capsys):
    """Made-up densities: Gaussians of the energy, at a place and of a height that the neighbours give."""
    grid = np.linspace(-1.0, 1.0, 7)
    for system in ("small", "large", "held"):
        types = np.loadtxt(folder / system / "type.raw", dtype=int)
        x = np.load(folder / system / "set.000" / "coord.npy").reshape(-1, len(types), 3)
        d = x[:, None, :, :] - x[:, :, None, :]
        d -= BOX * np.round(d / BOX)
        near = np.exp(-(d**2).sum(-1) / 4.0).sum(2)[..., None] - 1.0
        of_atoms = (1.0 + types[:, None]) * np.exp(-4.0 * (grid - near + 0.5) ** 2)  # (frames, atoms, 7)
        np.save(folder / system / "set.000" / "atom_dos.npy", of_atoms.reshape(len(x), -1))
        np.save(folder / system / "set.000" / "dos.npy", of_atoms.sum(1))
    section = PAIRS if descriptor == "pairs" else DESCRIPTORS[descriptor]
    fitting = {"type": "dos", "numb_dos": 7, "neuron": [12, 12], "seed": 1}
    loss = {"type": "dos"} | {f"{end}_pref_{t}": 1.0 for end in ("start", "limit") for t in ("dos", "cdf", "acdf")}
    steps = {"training__numb_steps": 200, "training__disp_freq": 50, "training__save_freq": 100}
    steps |= {"learning_rate__start_lr": 0.03, "learning_rate__decay_steps": 100}
    train(folder, model__descriptor=section, model__fitting_net=fitting, loss=loss, **steps)
    header = (folder / "lcurve.out").read_text().split()
    assert [f"rmse_{t}_val" in header for t in ("dos", "ados", "cdf", "acdf")] == [True] * 4
    table = np.array([[float(x) for x in row.split()] for row in rows(folder)])
    assert table[-1, 5] < 0.7 * table[0, 5]  # of atoms, held out
    for target in ("m.dp", "m.yaml"):
        assert main(["freeze", "-o", target]) == 0
    capsys.readouterr()
    assert main(["test", "-m", "m.dp", "-s", "held", "-a", "-d", "detail"]) == 0
    found = re.search(r"Atomic DOS RMSE +: (\S+)", capsys.readouterr().err)
    assert found is not None and float(found[1]) == pytest.approx(table[-1, 5], rel=0.5)
    x, types = np.load("held/set.000/coord.npy"), [0, 0, 1, 1, 1, 0]
    cell = np.tile(np.eye(3).ravel() * BOX, (6, 1))
    total, atomic = DeepDOS("m.dp").eval(x, cell, types, atomic=True)
    assert DeepDOS("m.yaml").numb_dos == 7 and total.shape == (6, 7) and atomic.shape == (6, 6, 7)
    np.testing.assert_allclose(atomic.sum(1), total, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.loadtxt("detail.dos.out")[:, 1], total.ravel(), rtol=0, atol=1e-9)
    write_input(folder, model__fitting_net=fitting | {"numb_dos": 9}, loss=loss)
    assert main(["train", "input.json"]) == 2 and "numb_dos is 9" in capsys.readouterr().err


PROPERTY = {"type": "property", "property_name": "crowd", "task_dim": 2, "neuron": [12, 12], "seed": 1}


def add_property(folder, intensive: bool) -> None:
    """Made-up crowd.npy: how near the neighbours are and the square of that, by type; a sum over atoms or a mean."""
    for system in ("small", "large", "held"):
        types = np.loadtxt(folder / system / "type.raw", dtype=int)
        x = np.load(folder / system / "set.000" / "coord.npy").reshape(-1, len(types), 3)
        d = x[:, None, :, :] - x[:, :, None, :]
        d -= BOX * np.round(d / BOX)
        near = (np.exp(-(d**2).sum(-1) / 9.0).sum(2) - 1.0) * (1.0 + types)
        of_atoms = np.stack([5.0 + near, 3.0 * near**2], axis=-1)  # (frames, atoms, 2)
        np.save(folder / system / "set.000" / "atom_crowd.npy", of_atoms.reshape(len(x), -1))
        np.save(folder / system / "set.000" / "crowd.npy", of_atoms.mean(1) if intensive else of_atoms.sum(1))


@pytest.mark.parametrize("intensive", [False, True])
def test_property_from_training_to_prediction(intensive, folder, capsys):
    add_property(folder, intensive)
    fitting, loss = PROPERTY | {"intensive": intensive}, {"type": "property", "metric": ["mae", "rmse"]}
    steps = {"training__numb_steps": 400, "training__disp_freq": 100, "training__save_freq": 200}
    steps |= {"learning_rate__start_lr": 0.02, "learning_rate__stop_lr": 2e-3, "learning_rate__decay_steps": 20}
    train(folder, model__descriptor=PAIRS, model__fitting_net=fitting, loss=loss, **steps)
    header = (folder / "lcurve.out").read_text().split()
    assert "mae_property_val" in header and "rmse_property_trn" in header
    assert np.isfinite([[float(x) for x in row.split()] for row in rows(folder)]).all()
    whole = final(folder, 400)
    assert main(["train", "input.json", "--restart", "model.ckpt-200.safetensors"]) == 0
    assert all(torch.equal(whole[k], x) for k, x in final(folder, 400).items())
    for target in ("m.dp", "m.yaml"):
        assert main(["freeze", "-o", target]) == 0
    capsys.readouterr()
    assert main(["test", "-m", "m.dp", "-s", "held", "-a", "-d", "detail"]) == 0
    log = capsys.readouterr().err
    model = DeepProperty("m.dp")
    assert (model.task_dim, model.get_intensive(), model.get_var_name()) == (2, intensive, "crowd")
    x, y = (np.load(f"large/set.000/{name}.npy") for name in ("coord", "crowd"))
    cell = np.tile(np.eye(3).ravel() * BOX, (len(x), 1))
    (found,) = model.eval(x, cell, [0, 1, 0, 0, 1, 0, 1, 0])
    assert (np.sqrt(((found - y) ** 2).mean(0)) < 0.5 * y.std(0)).all()  # the constants alone leave the deviation
    x, types = np.load("held/set.000/coord.npy"), [0, 0, 1, 1, 1, 0]
    cell = np.tile(np.eye(3).ravel() * BOX, (6, 1))
    total, atomic = model.eval(x, cell, types, atomic=True)
    assert total.shape == (6, 2) and atomic.shape == (6, 6, 2) and len(model.eval(x, cell, types)) == 1
    np.testing.assert_allclose(atomic.mean(1) if intensive else atomic.sum(1), total, rtol=0, atol=1e-12)
    np.testing.assert_allclose(DeepProperty("m.yaml").eval(x, cell, types)[0], total, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.loadtxt("detail.property.out")[:, 1], total.ravel(), rtol=0, atol=1e-9)
    for name, label, found in (("PROPERTY", "crowd", total), ("Atomic PROPERTY", "atom_crowd", atomic)):
        error = found.reshape(6, -1) - np.load(f"held/set.000/{label}.npy")
        mae, rmse = (float(re.search(rf"  {name} {x} *: (\S+) units", log)[1]) for x in ("MAE", "RMSE"))
        assert mae == pytest.approx(abs(error).mean(), rel=1e-5)
        assert rmse == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)


def test_property_on_two_workers_is_one_with_two_micro_batches(folder):
    add_property(folder, intensive=False)
    changes = {"model__fitting_net": PROPERTY, "loss": {"type": "property"}}
    write_input(folder, **changes)
    result = dp(folder, "train", "input.json", "--workers", "2")
    assert result.returncode == 0, result.stderr
    two, curve = final(folder), rows(folder)
    train(folder, training__acc_freq=2, **changes)
    assert all(torch.equal(x, two[k]) for k, x in final(folder).items())
    assert rows(folder) == curve


def test_properties_that_are_not_there_are_told(folder, capsys):
    changes = {"model__fitting_net": PROPERTY, "loss": {"type": "property"}}
    write_input(folder, **changes)
    assert main(["train", "input.json"]) == 2
    message = capsys.readouterr().err
    assert "no system has a label that the loss uses (in small: " in message and "property is crowd.npy" in message
    add_property(folder, intensive=False)
    write_input(folder, **changes | {"model__fitting_net": PROPERTY | {"task_dim": 3}})
    assert main(["train", "input.json"]) == 2
    assert "small/set.000/crowd.npy: has shape (40, 2), expected (40, 3)" in capsys.readouterr().err
    write_input(folder, **changes | {"model__fitting_net": PROPERTY | {"property_name": "virial"}})
    assert main(["train", "input.json"]) == 2
    assert "model/fitting_net/property_name: virial.npy has 9 number(s) of a frame" in capsys.readouterr().err
    write_input(folder, loss={"type": "property"})
    assert main(["train", "input.json"]) == 2
    assert "needs a model that predicts one" in capsys.readouterr().err
    train(folder, **changes, training__numb_steps=2)
    assert main(["freeze", "-o", "m.dp"]) == 0
    (folder / "held/set.000/crowd.npy").unlink()
    assert main(["test", "-m", "m.dp", "-s", "held"]) == 2
    assert "held: has no crowd.npy" in capsys.readouterr().err
    (folder / "small/set.000/atom_crowd.npy").unlink()
    assert main(["test", "-m", "m.dp", "-s", "small", "-a"]) == 2
    assert "has no atom_crowd.npy, which --atomic needs" in capsys.readouterr().err


def test_what_does_not_go_together_is_told(folder, capsys):
    write_input(folder, model__fitting_net={"type": "dipole", "neuron": [4]})
    assert main(["train", "input.json"]) == 2
    assert "loss/type 'ener' looks at energy" in capsys.readouterr().err
    write_input(folder, loss={"type": "tensor", "pref": 1.0, "pref_atomic": 0.0})
    assert main(["train", "input.json"]) == 2
    assert "dipole or polar" in capsys.readouterr().err
    write_input(folder, model__descriptor={"type": "hybrid", "list": [PAIRS, {"type": "se_e2_r", "sell": [1, 2]}]})
    assert main(["train", "input.json"]) == 2
    assert "model/descriptor/list/1/sell" in capsys.readouterr().err
    write_input(folder, model__descriptor={"type": "hybrid", "list": [PAIRS, {"type": "se_e2_r", "rcut": "six"}]})
    assert main(["train", "input.json"]) == 2
    assert "model/descriptor/list/1/rcut" in capsys.readouterr().err
    write_input(folder, model__descriptor={"type": "hybrid", "list": [{"type": "dpa2"}]})
    assert main(["train", "input.json"]) == 2
    assert "DeePMD-kit has this type" in capsys.readouterr().err
