"""The optimizers: their updates, their state, their sections of the input."""

from typing import get_args

import pytest
import torch
from torch import nn

from allforce.config.schema import Input
from allforce.config.section import sections
from allforce.optim import OPTIMIZERS
from allforce.optim.adam import AdamConfig, AdamWConfig
from allforce.train.flat import FlatParameters


def make(config, *parameters):
    """The optimizer of a model that has these parameters."""
    flat = FlatParameters(nn.ParameterList([p.clone() for p in parameters]), 0)
    return OPTIMIZERS[config.type](flat, config)


def test_every_optimizer_is_in_the_schema_by_its_name():
    in_schema = sections(Input.model_fields["optimizer"].annotation)
    assert in_schema == tuple(cls.Config for cls in OPTIMIZERS.values())
    assert [get_args(c.model_fields["type"].annotation)[0] for c in in_schema] == list(OPTIMIZERS)


@pytest.mark.parametrize("config", [AdamConfig(weight_decay=0.1), AdamWConfig(adam_beta1=0.8, weight_decay=0.1)])
def test_adam_is_torchs(config):
    p = torch.linspace(-1, 1, 7, dtype=torch.float64)
    adam, theirs = make(config, p), nn.Parameter(p.clone())
    cls = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[config.type]
    reference = cls([theirs], betas=(config.adam_beta1, config.adam_beta2), weight_decay=0.1)
    for k in range(5):
        g = torch.sin(torch.arange(7, dtype=torch.float64) + k)
        theirs.grad = g.clone()
        reference.param_groups[0]["lr"] = 0.01 * (k + 1)
        reference.step()
        adam.step([g], 0.01 * (k + 1))
    assert torch.allclose(adam.parameters.flat[0], theirs.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_complete(name):
    """Another optimizer that is given tensors and numbers goes on exactly alike."""
    shapes, config = [(6, 4), (4,), (4, 4)], OPTIMIZERS[name].Config()
    torch.manual_seed(0)
    first = make(config, *(torch.randn(s) for s in shapes))
    gradients = [torch.randn(first.parameters.flat[0].shape) for _ in range(6)]
    for g in gradients[:3]:
        first.step([g], 0.01)
    second = make(config, *first.parameters.split(first.parameters.flat).values())
    for key, tensor in second.tensors().items():
        tensor.copy_(first.tensors()[key])
    second.set_numbers(first.numbers())
    for g in gradients[3:]:
        first.step([g], 0.01)
        second.step([g], 0.01)
    assert torch.equal(first.parameters.flat[0], second.parameters.flat[0])
