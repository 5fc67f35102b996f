"""Attention among neighbours: derivatives written by hand against automatic ones, and against differences."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from make import small_model
from suite import batch_of, structure
from torch import Tensor

from allforce.data.batch import Frame
from allforce.models import kernels
from allforce.models.attention import AttentionLayer, Neighbors
from allforce.models.attention_core import Attend, Norm, Rule
from allforce.models.layers import generator

MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.float64)
RULES = [Rule(0.7, *options) for options in product((True, False), repeat=3)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def neighbors(smooth: bool) -> tuple[Tensor, Tensor]:
    """w (1 or 0 where it is not smooth) and unit vectors of four atoms; one has all neighbours, one has none."""
    w = MASK * (0.1 + 0.9 * random(*MASK.shape, seed=1).sigmoid()) if smooth else MASK.clone()
    unit = torch.nn.functional.normalize(random(*MASK.shape, 3, seed=2), dim=-1) * MASK[:, :, None]
    return w.requires_grad_(smooth), unit.requires_grad_()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / (1e-12 + b.detach().abs().max()))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_layer_and_its_derivatives_are_those_of_the_equations(rule, monkeypatch):
    config = small_model({"type": "se_atten", "attn_layer": 1, "smooth_type_embedding": rule.smooth}).descriptor.config
    options = {"attn_dotr": rule.dotr, "normalize": rule.normalize, "temperature": rule.alpha}
    layer = AttentionLayer(config.model_copy(update=options), 6, generator(3), torch.float64)
    w, unit = neighbors(rule.smooth)
    at, G = Neighbors(MASK, w, unit, 3.0), random(4, 5, 6, seed=3).requires_grad_()
    inputs = [x for x in (G, w, unit) if x.requires_grad]
    constants = [random(*x.shape, seed=9) * (MASK if x.dim() == 2 else MASK[:, :, None]) for x in inputs]

    def run() -> list[Tensor]:
        y = layer(G, at)
        first = torch.autograd.grad(y, inputs, torch.sin(y), create_graph=True, materialize_grads=True)
        loss = (y**3).sum() + sum((torch.sin(c * x)).sum() for c, x in zip(constants, first, strict=True))
        second = torch.autograd.grad(loss, [*inputs, *layer.parameters()], materialize_grads=True)
        return [y, *(x * (c != 0) for c, x in zip(constants, [*first, *second], strict=False)), *second[len(inputs) :]]

    by_hand = run()
    monkeypatch.setenv(kernels.SWITCH, "torch")
    automatic = run()
    assert relative(by_hand[0], automatic[0]) < 1e-12
    assert max(relative(a, b) for a, b in zip(by_hand, automatic, strict=True)) < 1e-10


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_derivatives_against_differences(rule):
    w, unit = neighbors(rule.smooth)
    z = random(4, 5, 6, seed=4).requires_grad_()

    def attend(z: Tensor, w: Tensor, unit: Tensor) -> Tensor:
        return Attend.apply(z, w, unit, 2.0, rule)[0]

    assert torch.autograd.gradcheck(attend, (z, w, unit))
    assert torch.autograd.gradgradcheck(attend, (z, w, unit))


def test_norm_against_differences():
    def norm(x: Tensor) -> Tensor:
        return Norm.apply(x, 1e-3)[0]

    x = random(2, 3, 5).requires_grad_()
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (5,), eps=1e-3), rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(norm, (x,)) and torch.autograd.gradgradcheck(norm, (x,))


def test_a_third_derivative_is_refused():
    x = random(2, 3, 5).requires_grad_()
    (first,) = torch.autograd.grad(Norm.apply(x, 1e-3)[0].sin().sum(), x, create_graph=True)
    with pytest.raises((AssertionError, RuntimeError), match="twice|once_differentiable"):
        (second,) = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
        second.sum().backward()


@pytest.mark.parametrize("options", [{"smooth_type_embedding": True, "exclude_types": [[1, 1]]}, {"attn_dotr": False}])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_training_is_that_of_the_equations(options, precision, monkeypatch):
    """Energies, forces, virials and the gradient of a loss on the last two, also with an atom without neighbours."""
    descriptor = {"type": "se_atten", "attn_layer": 2, "precision": precision, **options}
    model, frame = small_model(descriptor), structure(0, 9, cell=None)
    frame = Frame(np.vstack([frame.coord, [[50.0, 0.0, 0.0]]]), np.append(frame.type, 1), None)
    batch = batch_of(model, frame, structure(1, 5))
    wanted = ("energy", "forces", "virial")

    def run() -> list[Tensor]:
        p = model(batch, wanted)
        loss = (p["forces"] ** 2).mean() + (p["virial"] ** 2).mean()
        return [*p.values(), *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)]

    by_hand = run()
    monkeypatch.setenv(kernels.SWITCH, "torch")
    tolerance = 1e-10 if precision == "float64" else 1e-4  # some hundred roundings
    assert max(relative(a, b) for a, b in zip(by_hand, run(), strict=True)) < tolerance
