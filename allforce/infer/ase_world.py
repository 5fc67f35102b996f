"""ASE's `world` over the workers of any launcher, so that ASE reads, draws and writes as under MPI: once.

ASE finds mpi4py by itself. Under torchrun, srun and the like it would take every worker for a lone process, and all of
them would write to one file.
"""

from __future__ import annotations

import sys
from typing import Any

import ase.parallel
import numpy as np
import torch

from allforce.distributed.launch import World, detect
from allforce.errors import UserError


class AseWorld:
    """The interface of ase.parallel.world. The workers meet at the first call that needs the others."""

    def __init__(self, world: World):
        self.rank, self.size = world.rank, world.size

    @property
    def comm(self) -> Any:
        from allforce.infer.workers import all_workers

        return all_workers().comm

    def sum(self, a: Any, root: int = -1) -> Any:
        """In place for arrays, returned for numbers, on all ranks whatever the root."""
        if np.isscalar(a):
            return self.sum_scalar(a, root)
        real = a.dtype if a.dtype.kind in "fc" else np.dtype(np.int64)
        total = np.ascontiguousarray(a, dtype=real).copy()
        self.comm.all_reduce(torch.from_numpy(total.view(total.real.dtype)).view(-1))
        a[...] = total

    def sum_scalar(self, a: Any, root: int = -1) -> Any:
        array = np.array([a])
        self.sum(array)
        return array[0]

    def broadcast(self, a: Any, root: int) -> Any:
        """In place for arrays, returned for numbers."""
        array = np.array([a]) if np.isscalar(a) else np.ascontiguousarray(a).copy()
        self.comm.broadcast(torch.from_numpy(array.reshape(-1).view(np.uint8)), root)
        if np.isscalar(a):
            return array[0]
        if self.rank != root:  # whose own may be read-only
            a[...] = array

    def barrier(self) -> None:
        self.comm.barrier()

    def abort(self, code: int) -> None:
        self.comm.abort(code)


def take() -> None:
    """Be ASE's world where a launcher started several workers and ASE would not notice."""
    if ase.parallel.world.comm is not None or "mpi4py" in sys.modules:
        return
    try:
        world = detect()
    except UserError:  # raised again, and seen, when somebody asks for the workers
        return
    if world.size > 1:
        ase.parallel.world.comm = AseWorld(world)


def release() -> None:
    """Every worker is for itself after all."""
    if isinstance(ase.parallel.world.comm, AseWorld):
        ase.parallel.world.comm = None
