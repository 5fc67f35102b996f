"""The last layer by least squares: the equations are those of the model, their solution is the one of the evidence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from make import small_model
from suite import CELLS, batch_of, structure

from allforce.models import refit
from allforce.models.refit import PROBES, Equations, by_evidence, without_bias
from allforce.models.standard import StandardModel, signs

GROUP = [(0, 3), (0, 5)]


def labelled(model: StandardModel, *cells: str):
    """A batch with energies and forces that are zero, so that what is missing is minus the prediction."""
    frames = [structure(n, 9 + n, len(model.type_map), CELLS[cell]) for n, cell in enumerate(cells)]
    batch = batch_of(model, *frames)
    zero = {"energy": torch.zeros(batch.nframes).double(), "force": torch.zeros(len(batch.type), 3).double()}
    batch.labels = {**batch.labels, **zero}
    return batch


def equations_of(model: StandardModel, batch) -> Equations:
    return Equations.of_table(np.array(list(model.linear_rows(GROUP, batch))), len(model.type_map))


@pytest.mark.parametrize("backend", ["", "torch"])
@pytest.mark.parametrize(
    ("descriptor", "fitting", "mode"),
    [
        ({}, {}, "table"),
        ({}, {"activation_function": "gelu"}, "exact"),
        ({"type_one_side": True}, {"neuron": [12, 24, 24], "resnet_dt": True}, "table"),
        ({"type": "se_e2_r"}, {}, "table"),
        ({"type": "se_atten"}, {}, "table"),
        ({"type": "se_atten", "attn_layer": 1}, {}, "table"),
        ({"type": "hybrid", "list": [{"type": "se_e2_a"}, {"type": "se_e3", "neuron": [4, 8]}]}, {}, "table"),
    ],
)
def test_equations_are_linear_in_the_last_layer(descriptor, fitting, mode, backend, monkeypatch):
    """Another last layer changes energies and forces by just what the equations say."""
    monkeypatch.setenv("ALLFORCE_KERNELS", backend)
    model = small_model(descriptor, fitting, ntypes=3, mode=mode)
    batch = labelled(model, "cubic", "triclinic")
    model.requires_grad_(False)
    before = equations_of(model, batch)
    delta = np.random.default_rng(0).normal(size=before.x.shape[1])
    model.fitting.change_last_layer(delta)
    after = equations_of(model, batch)
    assert len(before.x) == 2 and len(before.x_dot) == 2 * PROBES
    assert before.counts.sum(1).tolist() == [9, 10]
    np.testing.assert_allclose(after.x, before.x, atol=1e-12)
    np.testing.assert_allclose(before.missing - after.missing, before.x @ delta, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(before.missing_dot - after.missing_dot, before.x_dot @ delta, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("descriptor", [{}, {"type_one_side": True}])
def test_equations_without_a_graph_are_the_same(descriptor, monkeypatch):
    """Of fused.py, which a model that is trained has, and by automatic differentiation."""
    model = small_model(descriptor, {"neuron": [12, 12, 24]}, ntypes=3)
    batch = labelled(model, "cubic", "triclinic")
    assert model.sweep(batch, ("energy", "forces")) is not None
    found = equations_of(model, batch)
    monkeypatch.setattr(StandardModel, "sweep", lambda *_: None)
    expected = equations_of(model, batch)
    assert all(p.requires_grad for p in model.parameters())
    for name in ("counts", "x", "missing", "x_dot", "missing_dot"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10 * np.abs(theirs).max())
    assert np.abs(found.x_dot).max() > 1e-3


def test_an_atom_alone_gives_an_equation_for_its_energy():
    model = small_model(ntypes=2)
    model.requires_grad_(False)
    batch = batch_of(model, structure(0, 1, 2, None))
    zero = {"energy": torch.zeros(1).double(), "force": torch.zeros(1, 3).double()}
    batch.labels = {**batch.labels, **zero}
    found = equations_of(model, batch)
    assert found.counts.sum() == 1 and np.isfinite(found.x).all()
    assert not found.x_dot.any() and not found.missing_dot.any()


def test_derivatives_are_those_of_the_energy_along_the_signs():
    model, step = small_model(ntypes=2, nodes=512), 1e-4
    model.requires_grad_(False)
    frame = structure(0, 9, 2, CELLS["cubic"])
    order = np.argsort(frame.type, kind="stable")
    batch = labelled(model, "cubic")
    v = np.empty((PROBES, 9, 3))
    v[:, order] = signs(GROUP, batch).numpy()
    found = equations_of(model, batch)
    for n in range(PROBES):
        ends = []
        for sign in (1, -1):
            moved = structure(0, 9, 2, CELLS["cubic"])
            moved.coord = frame.coord + sign * step * v[n]
            ends.append(float(model(batch_of(model, moved), ("energy",))["energy"]))
        slope = (ends[0] - ends[1]) / (2 * step)  # = −v·F, and labels are zero: missing is −v·ΔF = v·F
        assert np.abs(found.missing_dot + slope).min() < 1e-5 * np.abs(found.missing_dot).max()


@pytest.mark.parametrize(("equations", "unknowns"), [(200, 30), (30, 200)])
def test_solution_is_that_of_ridge_regression_with_the_weights_of_the_evidence(equations, unknowns):
    rng = np.random.default_rng(1)
    sizes = 1.0 / (1.0 + np.arange(unknowns))  # as of a layer's outputs: few large, many small
    M, true = rng.normal(size=(equations, unknowns)) * sizes, rng.normal(size=unknowns)
    noise = 0.3 * rng.normal(size=equations)
    delta = by_evidence(M, M @ true + noise, 1e-9)
    # at the fixed point α/η, which the gradient of the square error gives, is what the two equations for them say
    t, left = M @ true + noise, M @ true + noise - M @ delta
    ratio = float(np.mean(M.T @ left / delta))
    np.testing.assert_allclose(M.T @ left, ratio * delta, rtol=1e-6, atol=1e-8)
    s = np.linalg.svd(M, compute_uv=False) ** 2
    gamma = (s / (s + ratio)).sum()
    assert ratio == pytest.approx((gamma / (delta @ delta)) / ((equations - gamma) / (left @ left)), rel=0.02)
    assert np.abs(delta - true)[:3].max() < 0.5
    assert left @ left < t @ t


def test_the_change_is_not_much_larger_than_the_weights():
    """Outputs of a layer that are nearly alike: the data would like weights of 1e4 that cancel each other."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(400, 1)) + 1e-4 * rng.normal(size=(400, 50))
    missing = x @ (1e4 * rng.normal(size=50))
    wild = by_evidence(x, missing / missing.std(), 1e-12)
    equations = Equations(np.ones((400, 1)), x, missing, x[:0], missing[:0])
    calm = equations.solve(0.1 * rng.normal(size=50))
    assert np.linalg.norm(wild) * missing.std() > 1e3
    assert np.linalg.norm(calm) < 0.1 * np.sqrt(50)


def test_nothing_to_learn_changes_nothing():
    assert not by_evidence(np.zeros((0, 7)), np.zeros(0), 1.0).any()
    assert not by_evidence(np.zeros((5, 7)), np.ones(5), 1.0).any()
    assert not by_evidence(np.ones((5, 7)), np.zeros(5), 1.0).any()


def test_biases_are_unknown_as_well():
    counts = np.array([[2.0, 4.0], [3.0, 6.0], [1.0, 5.0]])
    left = without_bias(counts, counts @ [1.5, -2.0] + [0.0, 0.0, 0.0])
    np.testing.assert_allclose(left, 0.0, atol=1e-12)
    only_forces = Equations(np.zeros((0, 2)), np.zeros((0, 4)), np.zeros(0), np.eye(4), np.ones(4))
    assert np.isfinite(only_forces.solve(np.ones(4))).all()


def test_signs_belong_to_the_frames():
    model = small_model()
    batch = labelled(model, "cubic", "cubic")
    assert torch.equal(signs(GROUP, batch), signs(GROUP, batch))
    assert not torch.equal(signs(GROUP, batch), signs([(0, 4)], batch))
    assert signs(GROUP, batch).abs().unique().tolist() == [1.0]
    assert signs(GROUP, batch).shape == (refit.PROBES, len(batch.type), 3)
