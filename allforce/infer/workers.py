"""The workers of a launcher evaluate frames together: each computes its part, and all of them have the whole result.

Parts are whole frames where there are enough of them, else blocks of space of every frame (data/blocks.py). All
workers see the structures of rank 0, and an error of one is an error of all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from allforce.data.batch import Batch, Frame
from allforce.distributed.comm import Comm, SerialComm
from allforce.distributed.launch import detect
from allforce.distributed.mesh import Mesh
from allforce.errors import UserError, file_problem
from allforce.infer.threads import predict
from allforce.models import Model
from allforce.models.parts import SUMS, summands

EQUAL = 1e-6  # Å: further from rank 0's, it is another structure
T = TypeVar("T")


class Workers:
    """One process, or the `size` processes that a launcher started, this one being `rank`. Everybody calls alike."""

    def __init__(self, comm: Comm, device: torch.device | None = None):
        self.comm, self.device = comm, device
        self.rank, self.size = comm.rank, comm.size
        self.mesh = Mesh(comm, comm.size)

    def block(self, k: int, frames: int, divisible: bool) -> tuple[int, int] | None:
        """(s, S): block s of S of frame k of `frames` is this worker's; None: nothing of it."""
        if divisible and frames < self.size:
            return self.rank, self.size
        return (0, 1) if k % self.size == self.rank else None

    def predict(self, model: Model, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
        """Of the whole batch, whoever computes which part of it."""
        if batch.part is None:
            return predict(model, batch, wanted)
        with torch.no_grad():
            return self.mesh.sum(summands(model, batch, wanted))

    def attempt(self, make: Callable[[], T]) -> T:
        """What `make` returns; a UserError of one worker is raised by all, as nobody may wait for it."""
        if self.size == 1:
            return make()
        value, problem = None, None
        try:
            value = make()
        except UserError as error:
            problem = str(error)
        for found in self.comm.gather(problem):
            if found is not None:
                raise UserError(found)
        return value  # type: ignore[return-value]

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """An error that leaves this block ends all workers, also where somebody would catch it."""
        try:
            yield
        except Exception as error:
            if self.size > 1:
                from allforce.distributed import api

                known = isinstance(error, OSError) and error.filename is not None
                api.fail(UserError(file_problem(error)) if known else error)  # type: ignore[arg-type]
            raise

    def of_rank_0(self, arrays: Sequence[np.ndarray], kind: object) -> list[np.ndarray]:
        """Rank 0's arrays in the place of one's own, of which there are as many numbers, and whose `kind` is alike."""
        flat = np.concatenate([np.empty(0), *(np.ravel(a) for a in arrays)])
        own = torch.tensor([len(flat), zlib.crc32(repr(kind).encode())])
        first = own.clone()
        self.comm.broadcast(first)
        wire = torch.from_numpy(flat.copy()) if self.rank == 0 else torch.empty(int(first[0]), dtype=torch.float64)
        self.comm.broadcast(wire)
        if not torch.equal(own, first):
            raise self._another("others than rank 0's")
        pieces = np.split(wire.numpy(), np.cumsum([np.size(a) for a in arrays])[:-1])
        return [piece.reshape(np.shape(a)) for piece, a in zip(pieces, arrays, strict=True)]

    def check_apart(self, own: Sequence[np.ndarray], first: Sequence[np.ndarray], far: float = EQUAL) -> float:
        """How far the numbers of this worker are from rank 0's, which is at most `far`."""
        apart = max((float(np.abs(a - b).max(initial=0.0)) for a, b in zip(own, first, strict=True)), default=0.0)
        if not apart <= far:
            raise self._another(f"up to {apart:.3g} Å from where rank 0 has them")
        return apart

    def _another(self, what: str) -> UserError:
        return UserError(
            f"rank {self.rank}: its atoms are {what}, but {self.size} workers compute one structure together. Let all "
            "of them read or draw the same one, or say parallel=False: then every worker computes its own."
        )

    def same(self, frames: Sequence[Frame], count: int) -> list[Frame]:
        """Rank 0's frames. count: of all frames that are evaluated, as far as it is known."""
        if self.size == 1:
            return list(frames)
        names = ("coord", "cell", "fparam", "aparam")
        given = [{name: getattr(f, name) for name in names if getattr(f, name) is not None} for f in frames]
        kind = count, [(f.type.tolist(), list(g)) for f, g in zip(frames, given, strict=True)]
        own = [a for g in given for a in g.values()]
        first = self.of_rank_0(own, kind)
        self.check_apart(own, first)
        arrays: Iterator[Any] = iter(first)
        return [replace(f, **{name: next(arrays) for name in g}) for f, g in zip(frames, given, strict=True)]


ALONE = Workers(SerialComm())


def divisible(model: Model, wanted: Collection[str]) -> bool:
    """What is wanted is a sum over blocks of space."""
    return "energy" in model.outputs and SUMS.issuperset(wanted)


@cache
def all_workers() -> Workers:
    """Those of the launcher that started this process, joined at the first call; this process alone without one."""
    if detect().size == 1:
        return ALONE
    from allforce.distributed import api

    api.init()
    return Workers(api.connection(), api.device())
