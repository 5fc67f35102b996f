"""The exponential moving average of the weights (EMA), which is often better than the weights of the last step.

    d = min(decay, (1 + t)/(10 + t))     ā ← d ā + (1 - d) p        t updates so far: the average begins short

It starts at the first weights of the run, lies in the checkpoints beside the raw weights, and is what is validated and
frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from allforce.train.flat import FlatParameters


class Average:
    """The average of flat parameters."""

    def __init__(self, flat: FlatParameters, decay: float):
        self.flat, self.decay = flat, decay
        self.values = [p.clone() for p in flat.flat]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(self.values, self.flat.flat, 1 - decay)

    def tensors(self) -> dict[str, Tensor]:
        """By parameter name; the tensors themselves."""
        return self.flat.split(self.values)

    @torch.no_grad()
    def restart(self, saved: dict[str, Tensor]) -> None:
        """Go on from what was saved, or, where nothing was, from the present weights."""
        torch._foreach_copy_(self.values, self.flat.flat)
        for name, tensor in self.tensors().items():
            tensor.copy_(saved.get(name, tensor))

    @contextmanager
    def in_use(self, changing: bool = False) -> Iterator[None]:
        """The model has the averaged weights; changing: what is done to them is kept."""
        raw = [p.clone() for p in self.flat.flat]
        torch._foreach_copy_(self.flat.flat, self.values)
        try:
            yield
            if changing:
                torch._foreach_copy_(self.values, self.flat.flat)
        finally:
            torch._foreach_copy_(self.flat.flat, raw)
