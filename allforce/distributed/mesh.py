"""W workers as a mesh: W/S groups of S, which split every frame among them; and the sum over a group.

The ranks of a group follow each other, so that they are on one host if they can be. Gradients are added up over all W.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from .comm import Comm, SerialComm


class Mesh:
    """The place of this worker: number `place` of `size` in group `number` of `groups`."""

    def __init__(self, comm: Comm, size: int = 1):
        if comm.size % size:
            fitting = [n for n in range(1, comm.size + 1) if comm.size % n == 0]
            raise UserError(
                f"training/spatial_workers is {size}, but {comm.size} workers cannot be grouped by {size}. "
                f"Start a multiple of {size} workers, or set it to one of {', '.join(map(str, fitting))}."
            )
        self.size, self.groups = size, comm.size // size
        self.number, self.position = divmod(comm.rank, size)
        self.comm: Comm = comm.split(self.number) if size > 1 else SerialComm()

    @property
    def leads(self) -> bool:
        """One worker of each group speaks for it, where all of them have the same to say."""
        return self.position == 0

    def once(self, tensor: Tensor) -> Tensor:
        """What all workers of a group have, for a sum over all workers: of one of them, zeros of the others."""
        return tensor if self.leads else torch.zeros_like(tensor)

    def sum(self, summands: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums over the group of tensors of one dtype, by name, in one collective."""
        values = list(summands.values())
        flat = GroupSum.apply(torch.cat([v.reshape(-1) for v in values]), self.comm)
        pieces = flat.split([v.numel() for v in values])
        return {name: piece.view_as(v) for (name, v), piece in zip(summands.items(), pieces, strict=True)}

    def close(self) -> None:
        if self.size > 1:
            self.comm.close()


class GroupSum(torch.autograd.Function):
    """y = Σ_s x_s, the same on all workers of a group, which go on alike to the same loss L(y).

    A worker's share of ∂L/∂θ is ∂L/∂y · ∂x_s/∂θ: what comes back is handed on as it is, and the sum of the shares is
    made where the gradients of all workers are added up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        y = x.detach().clone()
        comm.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> Any:
        return v, None
