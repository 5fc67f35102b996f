"""The loss against its formula, written out in numpy."""

from math import isnan, sqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from allforce.losses.ener import EnerLoss, EnerLossConfig

SIZES = [3, 5]  # atoms of the two frames
N = sum(SIZES)
OUTPUT = {"energy": "energy", "force": "forces", "virial": "virial"}  # label -> output of the model


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def make(rng, labels=("energy", "force", "virial", "atom_ener", "atom_pref", "atom_ener_coeff")):
    shapes = {"energy": (2,), "force": (N, 3), "virial": (2, 9)}
    t = {k: torch.from_numpy(rng.normal(size=shapes.get(k, (N,)))).abs() for k in labels}
    frame = torch.repeat_interleave(torch.arange(2), torch.tensor(SIZES))
    batch = SimpleNamespace(
        labels=t, natoms=torch.tensor(SIZES, dtype=torch.float64), type=torch.zeros(N, dtype=torch.int64), frame=frame
    )
    p = {OUTPUT[k]: torch.from_numpy(rng.normal(size=s)).requires_grad_() for k, s in shapes.items()}
    p["atomic energy"] = torch.from_numpy(rng.normal(size=N)).requires_grad_()
    return p, batch


def arrays(p, batch):
    d = {k: p[OUTPUT[k]].detach().numpy() - batch.labels[k].numpy() for k in ("energy", "force", "virial")}
    return d["energy"], d["force"], d["virial"], np.array(SIZES, dtype=float)


ALL = {
    "start_pref_v": 0.5,
    "limit_pref_v": 0.1,
    "start_pref_ae": 2.0,
    "limit_pref_ae": 1.0,
    "start_pref_pf": 3.0,
    "limit_pref_pf": 0.0,
}


def test_every_term_and_its_prefactor(rng):
    p, batch = make(rng)
    loss, sums = EnerLoss(EnerLossConfig(**ALL), start_lr=1e-3)(p, batch, lr=5e-4)
    dE, dF, dV, n = arrays(p, batch)
    ae = p["atomic energy"].detach().numpy() - batch.labels["atom_ener"].numpy()
    pf = batch.labels["atom_pref"].numpy()[:, None] * dF**2
    expected = (
        0.51 * np.mean(dE**2 / n)  # prefactors half-way between start and limit
        + 500.5 * np.mean(dF**2)
        + 0.3 * np.mean(dV**2 / n[:, None])
        + 1.5 * np.mean(ae**2)
        + 1.5 * np.mean(pf)
    )
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-13)
    figures = EnerLoss(EnerLossConfig(**ALL), 1e-3).metric(sums)
    assert list(figures) == ["rmse", "rmse_ae", "rmse_e", "rmse_f", "rmse_pf", "rmse_v"]
    assert figures["rmse"] == pytest.approx(sqrt(expected))
    assert figures["rmse_e"] == pytest.approx(sqrt(np.mean((dE / n) ** 2)))
    assert figures["rmse_f"] == pytest.approx(sqrt(np.mean(dF**2)))
    assert figures["rmse_v"] == pytest.approx(sqrt(np.mean((dV / n[:, None]) ** 2)))
    assert figures["rmse_pf"] == pytest.approx(sqrt(np.mean(pf)))


def test_gradient_of_the_force_term(rng):
    p, batch = make(rng)
    loss, _ = EnerLoss(EnerLossConfig(start_pref_e=0, limit_pref_e=0, start_pref_f=2.0, limit_pref_f=2.0), 1.0)(
        p, batch, 1.0
    )
    (g,) = torch.autograd.grad(loss, p["forces"])
    assert torch.allclose(g, 4.0 * (p["forces"] - batch.labels["force"]).detach() / (3 * N), rtol=1e-13)


def test_a_term_is_on_when_start_or_limit_is_not_zero():
    assert EnerLoss(EnerLossConfig(start_pref_v=0.0, limit_pref_v=1.0), 1.0).names == [
        "rmse",
        "rmse_e",
        "rmse_f",
        "rmse_v",
    ]
    energy_only = EnerLoss(EnerLossConfig(start_pref_f=0.0, limit_pref_f=0.0), 1.0)
    assert energy_only.names == ["rmse", "rmse_e"]


def test_missing_labels_are_nan_and_weigh_nothing(rng):
    loss = EnerLoss(EnerLossConfig(start_pref_v=1.0, limit_pref_v=1.0), 1.0)
    p, batch = make(rng, ("energy", "force"))
    value, sums = loss(p, batch, 1.0)
    assert isnan(loss.metric(sums)["rmse_v"]) and np.isfinite(float(value.detach()))
    q, full = make(rng)
    both = sums + loss(q, full, 1.0)[1]
    assert loss.metric(both)["rmse_v"] == pytest.approx(loss.metric(loss(q, full, 1.0)[1])["rmse_v"])


def test_sums_over_micro_batches_are_weighted_by_atoms(rng):
    loss = EnerLoss(EnerLossConfig(), 1.0)
    p, batch = make(rng)
    one = loss(p, batch, 1.0)[1]
    small = SimpleNamespace(**{**vars(batch), "type": batch.type[:2]})
    small_sums = loss(p, small, 1.0)[1]  # the same figures with the weight of 2 atoms
    doubled = {**p, "forces": 3 * p["forces"]}
    other = loss(doubled, batch, 1.0)[1]
    a, b = loss.metric(one)["rmse_f"], loss.metric(other)["rmse_f"]
    assert loss.metric(small_sums + other)["rmse_f"] == pytest.approx(sqrt((2 * a**2 + N * b**2) / (2 + N)))


def test_intensive_relative_and_coefficients(rng):
    p, batch = make(rng)
    dE, dF, dV, n = arrays(p, batch)
    value, _ = EnerLoss(
        EnerLossConfig(start_pref_f=0, limit_pref_f=0, limit_pref_e=0.02, intensive_ener_virial=True), 1.0
    )(p, batch, 1.0)
    assert float(value.detach()) == pytest.approx(0.02 * np.mean((dE / n) ** 2))
    config = EnerLossConfig(start_pref_e=0, limit_pref_e=0, start_pref_f=1, limit_pref_f=1, relative_f=0.3)
    value, _ = EnerLoss(config, 1.0)(p, batch, 1.0)
    size = np.linalg.norm(batch.labels["force"].numpy(), axis=1, keepdims=True)
    assert float(value.detach()) == pytest.approx(np.mean((dF / (size + 0.3)) ** 2))
    config = EnerLossConfig(start_pref_e=1, limit_pref_e=1, start_pref_f=0, limit_pref_f=0, enable_atom_ener_coeff=True)
    value, _ = EnerLoss(config, 1.0)(p, batch, 1.0)
    weighted = (p["atomic energy"].detach() * batch.labels["atom_ener_coeff"]).numpy()
    energy = np.array([weighted[:3].sum(), weighted[3:].sum()])
    assert float(value.detach()) == pytest.approx(np.mean((energy - batch.labels["energy"].numpy()) ** 2 / n))


def huber(d, delta):
    return np.where(np.abs(d) <= delta, 0.5 * d**2, delta * (np.abs(d) - 0.5 * delta)).mean()


def test_huber_with_three_widths(rng):
    p, batch = make(rng)
    dE, dF, dV, n = arrays(p, batch)
    prefs = {f"{w}_pref_{t}": v for t, v in (("e", 2.0), ("f", 3.0), ("v", 4.0)) for w in ("start", "limit")}
    value, sums = EnerLoss(EnerLossConfig(**prefs, use_huber=True, huber_delta=[0.1, 0.5, 0.02]), 1.0)(p, batch, 1.0)
    expected = 2 * huber(dE / n, 0.1) + 3 * huber(dF, 0.5) + 4 * huber(dV / n[:, None], 0.02)
    assert float(value.detach()) == pytest.approx(expected)


def test_mae_and_norm(rng):
    p, batch = make(rng)
    dE, dF, _, n = arrays(p, batch)
    loss = EnerLoss(EnerLossConfig(loss_func="mae", f_use_norm=True, start_pref_f=2.0, limit_pref_f=2.0), 1.0)
    value, sums = loss(p, batch, 1.0)
    norm = np.linalg.norm(dF, axis=1).mean()
    assert float(value.detach()) == pytest.approx(0.02 * np.abs(dE / n).mean() + 2 * norm)
    assert loss.metric(sums)["mae_f"] == pytest.approx(norm)


def test_weighted_forces_need_weights_or_the_default(rng):
    prefs = {"start_pref_pf": 1.0, "limit_pref_pf": 1.0}
    p, batch = make(rng, ("energy", "force"))
    without, with_default = (
        EnerLoss(EnerLossConfig(**prefs), 1.0),
        EnerLoss(EnerLossConfig(**prefs, use_default_pf=True), 1.0),
    )
    assert isnan(without.metric(without(p, batch, 1.0)[1])["rmse_pf"])
    figures = with_default.metric(with_default(p, batch, 1.0)[1])
    assert figures["rmse_pf"] == pytest.approx(figures["rmse_f"])
