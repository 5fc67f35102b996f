"""Inputs of PiNN, its losses and Keras' Adam, against formulas written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from allforce.config.load import load_input, parse_input
from allforce.data.batch import Frame
from allforce.data.loader import collate
from allforce.errors import UserError
from allforce.losses import LOSSES
from allforce.optim import OPTIMIZERS
from allforce.train.flat import FlatParameters

PARAMS = {
    "model_dir": "run",
    "network": {"name": "PiNet", "params": {"atom_types": [8, 1], "rc": 5.0}},
    "model": {"name": "potential_model", "params": {"use_force": True, "e_dress": {8: -2.0, 1: -1}, "e_scale": 2}},
}


def read(**changes):
    return parse_input({**PARAMS, **changes}, "params.yml")


# ---- inputs


def test_defaults_of_pinn():
    found = read()
    assert found.model.type == "pinet" and found.model.type_map == ["O", "H"] and found.model.rc == 5.0
    assert found.model.e_dress == {"8": -2.0, "1": -1.0}
    assert (found.model.e_scale, found.loss.e_scale, found.loss.use_force) == (2.0, 2.0, True)
    assert found.optimizer.type == "KerasAdam" and found.optimizer.clipnorm == 0.01 and found.optimizer.epsilon == 1e-7
    rate = found.learning_rate
    assert (rate.start_lr, rate.decay_steps, rate.decay_rate, rate.smooth) == (3e-4, 10000, 0.994, True)
    assert found.training.save_dir == "run" and found.training.parallel is False
    assert (found.training.disp_file, found.training.metrics_file) == ("run/lcurve.out", "run/metrics.jsonl")
    assert found.training.numb_steps == 1000000 and found.training.training_data.systems == "train.yml"


def test_four_elements_when_none_are_named():
    assert read(network={"name": "PiNet"}).model.type_map == ["H", "C", "N", "O"]


def test_an_optimizer_of_keras():
    schedule = {"initial_learning_rate": 1e-4, "decay_steps": 100, "decay_rate": 0.9, "staircase": True}
    config = {"learning_rate": {"class_name": "ExponentialDecay", "config": schedule}, "global_clipnorm": 0.01}
    found = read(optimizer={"class_name": "Adam", "config": {**config, "name": "Adam", "amsgrad": False, "decay": 0.0}})
    assert found.optimizer.global_clipnorm == 0.01 and found.optimizer.clipnorm is None
    assert (found.learning_rate.decay_rate, found.learning_rate.smooth) == (0.9, False)
    assert read(optimizer={"class_name": "Adam", "config": {"learning_rate": 1e-3}}).learning_rate.decay_rate == 1.0


def test_the_older_form():
    found = parse_input(
        {
            "model_dir": "run", "network": "pinet", "parallel": True,
            "network_params": {"atom_types": [1, 8], "en_nodes": [8]},
            "model_params": {"use_force": True, "learning_rate": 1e-3, "decay_step": 50, "use_norm_clip": True},
        },
        "params.yml",
    )  # fmt: skip
    assert found.model.out_nodes == [8] and found.training.parallel is True and found.loss.use_force
    assert found.optimizer.global_clipnorm == 0.01
    rate = found.learning_rate
    assert (rate.start_lr, rate.decay_steps, rate.decay_rate, rate.smooth) == (1e-3, 50, 0.999, False)


@pytest.mark.parametrize(
    ("name", "kind", "vector", "bonds", "charge"),
    [
        ("dipole_model", "dipole", False, False, True),
        ("AC_dipole_model", "AC", False, False, False),
        ("AD_OS_dipole_model", "AD_OS", True, False, False),
        ("AC_BC_R_dipole_model", "AC_BC_R", False, True, False),
    ],
)
def test_dipole_models(name, kind, vector, bonds, charge):
    found = read(network={"name": "PiNet2"}, model={"name": name, "params": {"d_scale": 2.0}})
    assert found.model.type == "pinet2_dipole" and found.model.kind == kind
    loss = found.loss
    assert (loss.d_scale, loss.vector_dipole, loss.regularization, loss.use_charge) == (2.0, vector, bonds, charge)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"network": {"name": "BPNN"}}, "network 'BPNN' is not known here; expected PiNet or PiNet2"),
        ({"network": {"name": "PiNet", "params": {"depht": 3}}}, "model/depht: unknown key"),
        ({"network": {"name": "PiNet", "params": {"rc": "5"}}}, "model/rc"),
        ({"network": {"name": "PiNet", "params": {"out_units": 3}}}, "network/params/out_units has to be 1"),
        ({"network": {"name": "PiNet", "params": {"atom_types": ["H"]}}}, "expected a list of atomic numbers"),
        ({"network": {"name": "PiNet2", "params": {"rank": 5}}}, "model/rank"),
        ({"model": {"name": "polarizability_model"}}, "model 'polarizability_model' is not known here"),
        ({"model": {"name": "potential_model", "params": {"separate_errors": True}}}, "separate_errors is not offered"),
        ({"optimizer": {"class_name": "EKF", "config": {}}}, "optimizer 'EKF' of Keras is not known here"),
        ({"optimizer": {"class_name": "Adam", "config": {"amsgrad": True}}}, "amsgrad is True; only False"),
        ({"batch": 3}, "unknown key batch"),
        ({"network": {"name": ["PiNet"]}}, "network ['PiNet'] is not known here"),
        ({"network": {"name": "PiNet", "params": [4.5]}}, "network/params should be keys with values; found '[4.5]'"),
        ({"model": {"name": 3}}, "model 3 is not known here"),
        ({"model": {"params": {"e_dress": "none"}}}, "model/params/e_dress should be keys with values; found 'none'"),
        ({"model": {"params": {"e_dress": {8: "x"}}}}, "model/e_dress"),
        ({"model": {"params": {"e_scale": "large"}}}, "model/e_scale"),
        ({"optimizer": "Adam"}, "optimizer should be keys with values; found 'Adam'"),
        ({"training": "long"}, "training should be keys with values; found 'long'"),
        ({"model_dir": 3}, "model_dir should be the name of a folder; found '3'"),
        ({"network": {"name": "PiNet"}, "model": {"name": "AD_dipole_model"}}, "model/kind"),
    ],
)
def test_mistakes_are_told(changes, text):
    with pytest.raises(UserError, match=None) as error:
        read(**changes)
    assert text in str(error.value) and "params.yml" in str(error.value)


def test_a_yaml_file(tmp_path):
    path = tmp_path / "params.yml"
    path.write_text("network: {name: PiNet, params: {rc: 4.5}}\nmodel: {name: potential_model}\nparallel: true\n")
    assert load_input(path).model.rc == 4.5 and load_input(path).training.parallel is True


# ---- losses


def batch_with_labels():
    rng = np.random.default_rng(0)
    frames, none = [], (np.empty(0, int), np.empty(0, int), np.empty((0, 3)))
    for n in (2, 3):
        labels = {
            "energy": rng.normal(size=1), "force": rng.normal(size=(n, 3)), "virial": rng.normal(size=9),
            "e_weight": rng.uniform(size=1), "f_weights": rng.uniform(size=(n, 3)), "d_weight": rng.uniform(size=1),
            "dipole": rng.normal(size=3),
        }  # fmt: skip
        frames.append(Frame(rng.normal(size=(n, 3)), np.zeros(n, int), np.diag([2.0, 3.0, -4.0]), labels))
    prediction = {
        "energy": rng.normal(size=2), "forces": rng.normal(size=(5, 3)), "virial": rng.normal(size=(2, 9)),
        "dress energy": np.zeros(2), "mean square of weights": np.array(0.3), "dipole": rng.normal(size=(2, 3)),
        "dipole norm": rng.uniform(size=2), "charge": rng.normal(size=2),
        "mean square of bond charges": np.array(0.7), "half square sum of weights": np.array(0.2),
    }  # fmt: skip
    return collate(frames, [none, none], 1), {k: torch.from_numpy(np.asarray(v)) for k, v in prediction.items()}


def loss_of(kind: str, prediction, batch, **keys) -> float:
    cls = LOSSES[kind]
    return float(cls(cls.Config(type=kind, **keys), 1.0)(prediction, batch, 1.0)[0])


def test_potential_loss():
    batch, p = batch_with_labels()
    label = {k: v.numpy() for k, v in batch.labels.items()}
    e = 2.5 * (p["energy"].numpy() / 0.5 - label["energy"])
    f = 2.5 * (p["forces"].numpy() / 0.5 - label["force"])
    s = 2.5 * (p["virial"].numpy() / 0.5 - label["virial"]) / 24.0
    units = {"e_scale": 2.5, "e_unit": 0.5}
    assert loss_of("pinn", p, batch, **units) == pytest.approx((e**2).mean(), rel=1e-12)
    weights = {"e_loss_multiplier": 2.0, "f_loss_multiplier": 0.5, "s_loss_multiplier": 3.0, "l2_loss_multiplier": 0.1}
    found = loss_of("pinn", p, batch, **units, **weights, use_force=True, use_stress=True, use_l2=True)
    expected = 2 * (e**2).mean() + 0.5 * (f**2).mean() + 3 * (s**2).mean() + 0.1 * 0.3
    assert found == pytest.approx(expected, rel=1e-12)
    found = loss_of("pinn", p, batch, **units, use_e_per_atom=True, use_e_weight=True)
    assert found == pytest.approx((label["e_weight"] * (e / [2, 3]) ** 2).mean(), rel=1e-12)
    found = loss_of("pinn", p, batch, **units, use_force=True, use_f_weights=True, e_loss_multiplier=0.0)
    assert found == pytest.approx((label["f_weights"] * f**2).mean(), rel=1e-12)


def test_what_is_too_large_is_left_out():
    batch, p = batch_with_labels()
    label = batch.labels["energy"].numpy()
    limit = float(np.abs(label).mean())
    small = int(np.abs(label).argmin())
    found = loss_of("pinn", p, batch, max_energy=limit)
    assert found == pytest.approx((p["energy"].numpy() - label)[small] ** 2, rel=1e-12)
    force = batch.labels["force"].numpy()
    keep = np.abs(force) <= 0.5
    found = loss_of("pinn", p, batch, max_force_comp=0.5, use_force=True, e_loss_multiplier=0.0)
    assert found == pytest.approx(((p["forces"].numpy() - force)[keep] ** 2).mean(), rel=1e-12)
    assert loss_of("pinn", p, batch, max_energy=1e-9) == 0.0


def test_dipole_loss():
    batch, p = batch_with_labels()
    label = batch.labels["dipole"].numpy()
    units = {"d_scale": 2.0, "d_unit": 0.75}
    d = 2.0 * (p["dipole"].numpy() / 0.75 - label)
    found = loss_of("pinn_dipole", p, batch, **units, vector_dipole=True, d_loss_multiplier=3.0)
    assert found == pytest.approx(3 * (d**2).mean(), rel=1e-12)
    n = 2.0 * (p["dipole norm"].numpy() / 0.75 - np.linalg.norm(label, axis=1))
    q = 2.0 / 0.75 * p["charge"].numpy()
    found = loss_of("pinn_dipole", p, batch, **units, use_charge=True, regularization=True, use_l2=True)
    assert found == pytest.approx((n**2).mean() + (q**2).mean() + 0.7 + 0.2, rel=1e-12)
    found = loss_of("pinn_dipole", p, batch, **units, use_d_weight=True, use_d_per_atom=True)
    weight = batch.labels["d_weight"].numpy()
    assert found == pytest.approx((weight * (n / [2, 3]) ** 2).mean(), rel=1e-12)


# ---- Keras' Adam


@pytest.mark.parametrize("clip", [{}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}])
def test_keras_adam(clip):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, dtype=torch.float64)
    flat = FlatParameters(model, 0)
    cls = OPTIMIZERS["KerasAdam"]
    optimizer = cls(flat, cls.Config(type="KerasAdam", **clip))
    values = {k: p.detach().numpy().copy() for k, p in model.named_parameters()}
    mean, square = ({k: np.zeros_like(v) for k, v in values.items()} for _ in range(2))
    one = {k: float(np.float32(v)) for k, v in {"b1": 0.9, "b2": 0.999, "eps": 1e-7, "rate": 1e-3}.items()}
    rng = np.random.default_rng(1)
    for t in (1, 2, 3):
        g = {k: rng.normal(size=v.shape) for k, v in values.items()}
        flat.gradient.copy_(torch.from_numpy(np.concatenate([g[name].ravel() for name in flat.names])))
        optimizer.step(1e-3)
        limit = float(np.float32(next(iter(clip.values()), np.inf)))
        total = np.sqrt(sum((x**2).sum() for x in g.values()))
        for k, x in g.items():
            if "clipnorm" in clip:
                x = x * limit / max(limit, np.linalg.norm(x))
            if "global_clipnorm" in clip:
                x = x * limit / max(limit, total)
            if "clipvalue" in clip:
                x = x.clip(-limit, limit)
            mean[k] = one["b1"] * mean[k] + (1 - one["b1"]) * x
            square[k] = one["b2"] * square[k] + (1 - one["b2"]) * x**2
            rate = one["rate"] * np.sqrt(1 - one["b2"] ** t) / (1 - one["b1"] ** t)
            values[k] -= rate * mean[k] / (np.sqrt(square[k]) + one["eps"])
    for k, p in model.named_parameters():
        np.testing.assert_allclose(p.detach(), values[k], rtol=0, atol=1e-14)
