"""Adam as Keras has it, with its ways to shorten gradients.

    g ← shortened g     m ← β1 m + (1-β1) g     v ← β2 v + (1-β2) g²     p ← p - rate·√(1-β2^t)/(1-β1^t)·m/(√v + ε)

ε stands beside √v, not beside √v̂ = √(v/(1-β2^t)) as in torch: where gradients are small, and clipped ones are, the two
differ. Keras keeps the numbers of its configuration in single precision; so does this class.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from allforce.config.section import Section, key
from allforce.distributed.comm import Comm
from allforce.optim.optimizer import TYPE_HELP, Optimizer, Parameters


class KerasAdamConfig(Section):
    """Adam as Keras has it, for inputs of PiNN."""

    type: Literal["KerasAdam"] = key("KerasAdam", TYPE_HELP)
    beta_1: float = key(0.9, "Decay of the mean of the gradient.", ge=0, lt=1, own=True)
    beta_2: float = key(0.999, "Decay of the mean of its square.", ge=0, lt=1, own=True)
    epsilon: float = key(1e-7, "Added to the root of the mean square.", gt=0, own=True)
    clipnorm: float | None = key(
        None, "The gradient of each parameter tensor is shortened to this length when it is longer.", gt=0, own=True
    )
    global_clipnorm: float | None = key(
        None, "The whole gradient is shortened to this length when it is longer.", gt=0, own=True
    )
    clipvalue: float | None = key(None, "Components of the gradient are cut at ± this number.", gt=0, own=True)

    def problems(self) -> Iterator[tuple[str, str]]:
        given = [x for x in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(self, x) is not None]
        if len(given) > 1:
            yield given[1], f"and {given[0]} exclude each other; give one of them"


class KerasAdam(Optimizer):
    Config = KerasAdamConfig

    def __init__(self, parameters: Parameters, config: KerasAdamConfig, comm: Comm | None = None):
        self.parameters, self.config, self.updates = parameters, config, 0
        self.mean = [torch.zeros_like(t) for t in parameters.flat]
        self.square = [torch.zeros_like(t) for t in parameters.flat]
        marks = [torch.zeros_like(t, dtype=torch.int64) for t in parameters.flat]
        for number, view in enumerate(parameters.split(marks).values()):
            view.fill_(number)
            self.count = number + 1
        self.owner = marks  # which parameter each number of a flat tensor belongs to

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.updates += 1
        b1, b2 = single(self.config.beta_1), single(self.config.beta_2)
        rate = single(rate) * sqrt(1.0 - b2**self.updates) / (1.0 - b1**self.updates)
        gradients = self.shortened(self.parameters.gradients())
        torch._foreach_lerp_(self.mean, gradients, 1.0 - b1)
        torch._foreach_mul_(self.square, b2)
        torch._foreach_addcmul_(self.square, gradients, gradients, 1.0 - b2)
        root = torch._foreach_sqrt(self.square)
        torch._foreach_add_(root, single(self.config.epsilon))
        torch._foreach_addcdiv_(self.parameters.flat, self.mean, root, -rate)

    def shortened(self, gradients: list[Tensor]) -> list[Tensor]:
        c = self.config
        if c.clipvalue is not None:
            return [g.clamp(-single(c.clipvalue), single(c.clipvalue)) for g in gradients]
        if c.global_clipnorm is not None:
            limit = single(c.global_clipnorm)
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            return list(torch._foreach_mul(gradients, limit / norm.clamp(min=limit)))
        if c.clipnorm is not None:
            limit, squares = single(c.clipnorm), gradients[0].new_zeros(self.count)
            for g, owner in zip(gradients, self.owner, strict=True):  # one for each dtype
                squares.index_add_(0, owner, (g * g).to(squares.dtype))
            factor = limit / squares.sqrt().clamp(min=limit)
            return [g * factor[owner].to(g.dtype) for g, owner in zip(gradients, self.owner, strict=True)]
        return gradients

    def tensors(self) -> dict[str, Tensor]:
        moments = {"mean": self.mean, "square": self.square}
        return {f"{what}/{k}": v for what, flat in moments.items() for k, v in self.parameters.split(flat).items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])

    def numbers(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        self.updates = int(numbers["updates"])


def single(x: float) -> float:
    """The nearest number of single precision."""
    return float(np.float32(x))
