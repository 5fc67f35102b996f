"""Flat parameters, one gradient buffer."""

import numpy as np
import pytest
import torch
from torch import nn

from allforce.distributed.comm import SerialComm
from allforce.models.layers import Net
from allforce.models.scalar_net import value_and_gradient
from allforce.train.flat import FlatParameters


def net(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def loss_of(model, seed=0):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    dtype = model[0].weight.dtype
    return model(x.to(dtype)).square().sum().double()


def test_parameters_are_views_and_gradients_agree():
    model, reference = net(), net()
    flat = FlatParameters(model, 2)
    assert flat.size == 21 and flat.flat[0].data_ptr() == model[0].weight.data_ptr()
    flat.differentiate(loss_of(model), torch.tensor([1.0, 2.0], dtype=torch.float64), 0.5, first=True)
    (0.5 * loss_of(reference)).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in reference.parameters()])
    assert torch.equal(flat.gradient, expected) and flat.sums.tolist() == [1.0, 2.0]


def test_running_sum_adds_complete_gradients():
    model = net()
    flat, sums = FlatParameters(model, 1), torch.ones(1, dtype=torch.float64)
    pieces = []
    for seed in (1, 2):
        flat.differentiate(loss_of(model, seed), sums, 0.5, first=True)
        pieces.append(flat.wire.clone())
    for k, seed in enumerate((1, 2)):
        flat.differentiate(loss_of(model, seed), sums, 0.5, first=k == 0)
    assert torch.equal(flat.wire, pieces[0] + pieces[1])


def test_frozen_parameters_stay_outside_and_unused_ones_get_zero():
    model = net()
    model[0].requires_grad_(False)
    flat = FlatParameters(model, 0)
    assert flat.names == ["2.weight", "2.bias"]
    flat.differentiate(model[2].weight.sum(), torch.zeros(0, dtype=torch.float64), 1.0, first=True)
    assert flat.gradient.tolist() == [1.0] * 4 + [0.0]


def test_two_dtypes_share_one_wire():
    model = nn.ModuleDict({"a": net(torch.float32), "b": net(torch.float64)})
    flat = FlatParameters(model, 1)
    assert flat.wire.dtype == torch.float64 and [f.dtype for f in flat.flat] == [torch.float64, torch.float32]
    flat.differentiate(loss_of(model["a"]) + loss_of(model["b"]), torch.ones(1, dtype=torch.float64), 1.0, first=True)
    names = flat.split(flat.gradients())
    (loss_of(reference := net(torch.float32))).backward()
    assert names["a.0.weight"].dtype == torch.float32 and torch.equal(names["a.0.weight"], reference[0].weight.grad)


def test_clip():
    model = net()
    flat = FlatParameters(model, 1)
    flat.wire.fill_(2.0)
    flat.clip(0.5)
    assert float(flat.gradient.norm()) == pytest.approx(0.5, rel=1e-5) and flat.sums.tolist() == [2.0]
    before = flat.gradient.clone()
    flat.clip(10.0)
    assert torch.equal(flat.gradient, before)


class Doubling(SerialComm):
    """Two ranks with the same numbers; remembers what was sent."""

    size = 2

    def __init__(self):
        self.sent = []

    def all_reduce_start(self, tensor):
        self.sent.append(tensor.dtype)
        tensor.mul_(2)
        return super().all_reduce_start(tensor)


@pytest.mark.parametrize(
    "precision, dtype", [(None, torch.float64), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_wire_precision(precision, dtype):
    flat, comm = FlatParameters(net(), 1, precision), Doubling()
    flat.wire.fill_(1 / 3)
    flat.reduce_finish(flat.reduce_start(comm), comm)
    assert comm.sent == ([dtype, torch.float64] if precision else [dtype])
    assert torch.equal(flat.gradient, torch.full_like(flat.gradient, 2 * float(torch.tensor(1 / 3, dtype=dtype))))
    assert flat.sums.tolist() == [2 / 3]  # figures are shown as they are, however gradients travel


def test_a_net_used_twice_has_the_sum_of_both_gradients():
    """Functions write gradients straight into the buffer: the second must not overwrite the first."""
    nets = nn.ModuleList([Net(3, [4, 4], "tanh", True, torch.float64, np.random.default_rng(0), 1)])
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradient(landed):
        flat = FlatParameters(nets, 1)
        if landed:
            flat.write_directly()
        for _ in range(2):  # places are free again in the next pass
            loss = sum((k + 1) * e.square().sum() + (g**2).sum() for k in range(2) for e, g in [net_and_slope(k)])
            flat.differentiate(loss, torch.ones(1, dtype=torch.float64), 1.0, first=True)
        return flat.gradient.clone()

    def net_and_slope(k):
        return value_and_gradient(list(nets), [5], x[k].clone().requires_grad_())

    expected = gradient(landed=False)
    assert torch.allclose(gradient(landed=True), expected, rtol=1e-12, atol=1e-14) and expected.abs().min() > 0
