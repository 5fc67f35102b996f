"""The moving average of the weights."""

import pytest
import torch
from torch import nn

from allforce.train.average import Average
from allforce.train.flat import FlatParameters


def test_average_is_its_formula_and_leaves_the_weights():
    model = nn.Linear(3, 2).double()
    flat = FlatParameters(model, 0)
    average, expected = Average(flat, 0.5), flat.flat[0].clone()
    for t in range(1, 20):
        flat.flat[0].add_(torch.sin(torch.arange(8) + t))
        average.update(t)
        d = min(0.5, (1 + t) / (10 + t))
        expected = d * expected + (1 - d) * flat.flat[0]
    assert torch.allclose(average.values[0], expected, rtol=1e-12)
    raw = flat.flat[0].clone()
    with pytest.raises(ValueError), average.in_use():
        assert torch.equal(model.weight.reshape(-1), average.values[0][:6]) and not torch.equal(flat.flat[0], raw)
        raise ValueError
    assert torch.equal(flat.flat[0], raw)
