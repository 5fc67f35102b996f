"""Fittings of dipoles and polarizabilities, and the loss `tensor`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from make import small_model
from suite import CELLS, batch_of, evaluate, structure

from allforce.data.batch import Frame
from allforce.errors import UserError
from allforce.losses.tensor import TensorLoss, TensorLossConfig

DIPOLE = {"type": "dipole"}
POLAR = {"type": "polar", "scale": [1.0, 2.0]}
FULL = {"type": "polar", "fit_diag": False, "shift_diag": False}


def model(fitting, descriptor=None, **kwargs):
    made = small_model(descriptor, fitting, **kwargs)
    if hasattr(made.fitting, "constant_matrix"):
        made.fitting.constant_matrix[:] = torch.tensor([0.7, -0.2], dtype=torch.float64)
    return made


def both(made, *frames):
    name = made.fitting.name
    p = evaluate(made, *frames, wanted=(name, f"atomic {name}"))
    return getattr(p, name), getattr(p, f"atomic_{name}")


@pytest.mark.parametrize("descriptor", [None, {"type": "se_atten", "attn_layer": 1}, {"type": "se_atten_v2"}])
@pytest.mark.parametrize("fitting", [DIPOLE, POLAR, FULL])
def test_rotates_with_the_atoms(fitting, descriptor):
    made, f = model(fitting, descriptor), structure(5, 8, 2, CELLS["triclinic"])
    Q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    total, atomic = both(made, f)
    turned, turned_atomic = both(made, Frame(f.coord @ Q.T, f.type, f.cell @ Q.T))
    Q = torch.from_numpy(Q)

    def turn(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 3:
            return x @ Q.T
        return (Q @ x.view(-1, 3, 3) @ Q.T).flatten(1)

    torch.testing.assert_close(turn(total), turned, rtol=0, atol=1e-11)
    torch.testing.assert_close(turn(atomic), turned_atomic, rtol=0, atol=1e-11)
    assert total.abs().max() > 1e-4
    torch.testing.assert_close(atomic.sum(0), total[0], rtol=1e-12, atol=1e-12)
    if x := atomic.shape[1] == 9:
        assert x and torch.allclose(atomic.view(-1, 3, 3), atomic.view(-1, 3, 3).transpose(1, 2))


@pytest.mark.parametrize("fitting", [DIPOLE, POLAR])
def test_batch_permutation_and_translation(fitting):
    made = model(fitting)
    a, b = structure(7, 9, 2), structure(8, 5, 2, CELLS["triclinic"])
    together, atoms = both(made, a, b)
    apart = [both(made, f) for f in (a, b)]
    torch.testing.assert_close(together, torch.cat([x for x, _ in apart]), rtol=0, atol=1e-11)
    torch.testing.assert_close(atoms, torch.cat([x for _, x in apart]), rtol=0, atol=1e-11)
    order = np.random.default_rng(1).permutation(9)
    moved, moved_atoms = both(made, Frame(a.coord[order] + [3.0, -9.0, 1.0], a.type[order], a.cell))
    torch.testing.assert_close(moved[0], together[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(moved_atoms, atoms[:9][order], rtol=0, atol=1e-11)


@pytest.mark.parametrize("section", [{"fitting": {"sel_type": [0]}}, {"model": {"atom_exclude_types": [1]}}])
def test_types_without_the_quantity_are_zero(section):
    made, whole = model(DIPOLE | section.get("fitting", {}), model=section.get("model")), model(DIPOLE)
    f = structure(3)
    _, atomic = both(made, f)
    _, all_atoms = both(whole, f)
    first = torch.from_numpy(f.type == 0)
    torch.testing.assert_close(atomic[first], all_atoms[first], rtol=0, atol=0)
    assert (atomic[~first] == 0).all() and (all_atoms[~first] != 0).any()


def test_polar_by_its_formula():
    """α_i = Vᵀ diag(scale f) V + scale c I, with V from the descriptor."""
    made, batch = model(POLAR), None
    f = structure(4, 6)
    batch = batch_of(made, f)
    with torch.no_grad():
        D, V = made.descriptor.with_vectors(batch, batch.edges.r)
        found = made(batch, ("polar", "atomic polar"))["atomic polar"]
        for i, t in enumerate(batch.type.tolist()):
            scale, c = [1.0, 2.0][t], [0.7, -0.2][t]
            y = made.fitting.nets[t](D[i : i + 1])[0]
            expected = V[i].T @ torch.diag(scale * y) @ V[i] + scale * c * torch.eye(3, dtype=torch.float64)
            torch.testing.assert_close(found[i].view(3, 3), expected, rtol=1e-12, atol=1e-12)


def test_a_descriptor_without_directions_is_refused():
    with pytest.raises(UserError, match="directions"):
        small_model({"type": "se_e2_r"}, DIPOLE)


@pytest.mark.parametrize("atomic", [0.0, 0.5])
def test_loss_and_its_gradient(atomic):
    """pref <ΔX²> + pref_atomic <(w ΔX_i)²> over atoms of selected types, and finite differences of it."""
    made = model(DIPOLE | {"sel_type": [0]})
    config = TensorLossConfig.model_validate(
        {"type": "tensor", "pref": 2.0, "pref_atomic": atomic, "enable_atomic_weight": True}
    )
    loss = TensorLoss(config, 1e-3, made.outputs)
    batch = batch_of(made, structure(0), structure(1))
    rng = torch.Generator().manual_seed(1)
    n = len(batch.type)
    batch.labels = {
        "dipole": torch.randn(2, 3, generator=rng, dtype=torch.float64),
        "atom_dipole": torch.randn(n, 3, generator=rng, dtype=torch.float64),
        "atom_weight": torch.rand(n, 1, generator=rng, dtype=torch.float64),
    }

    def value() -> tuple[torch.Tensor, torch.Tensor]:
        return loss(made(batch, loss.wanted), batch, 1e-4)

    total, sums = value()
    p = made(batch, loss.wanted)
    chosen = batch.type == 0
    local = (p["atomic dipole"] - batch.labels["atom_dipole"]) * batch.labels["atom_weight"]
    expected = 2.0 * ((p["dipole"] - batch.labels["dipole"]) ** 2).mean() + atomic * (local[chosen] ** 2).mean()
    torch.testing.assert_close(total, expected)
    figures = loss.metric(sums)
    assert list(figures) == (["rmse", "rmse_lc", "rmse_gl"] if atomic else ["rmse", "rmse_gl"])
    assert figures["rmse"] == pytest.approx(float(expected.detach()) ** 0.5)
    parameter = made.descriptor.nets[0].layers[1].w
    (gradient,) = torch.autograd.grad(total, parameter)
    place, h = int(gradient.abs().argmax()), 1e-5
    with torch.no_grad():
        parameter.view(-1)[place] += h
        up = float(value()[0].detach())
        parameter.view(-1)[place] -= 2 * h
        down = float(value()[0].detach())
    assert float(gradient.view(-1)[place]) == pytest.approx((up - down) / (2 * h), rel=1e-5)


def test_the_loss_needs_a_tensor():
    config = TensorLossConfig.model_validate({"type": "tensor", "pref": 1.0, "pref_atomic": 0.0})
    with pytest.raises(UserError, match="dipole or polar"):
        TensorLoss(config, 1e-3, small_model().outputs)
