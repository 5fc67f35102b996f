"""`training.spatial_workers: auto`: into how many blocks frames are cut, by atoms and memory.

The number S is the smallest divisor of the number of workers W with which

    W / S ≤ micro-batches of an epoch                     no group is without work of its own
    PAIR·E / S ≤ half of a worker's memory                what a worker computes of the largest micro-batch fits

E is the number of neighbour pairs of the largest micro-batch. More micro-batches at a time cost less than more blocks,
so a larger S is not taken for speed.
"""

from __future__ import annotations

import socket
from math import ceil

import numpy as np
import torch

from allforce.data.blocks import pairs_of_block
from allforce.data.cache import memory_of_host
from allforce.data.dataset import DataSet
from allforce.distributed.comm import Comm
from allforce.models import Model

PAIR = 2000  # bytes of a neighbour pair in training: 1,600 for se_e2_a in float64 (benchmarks/spatial.py) and some room
BLOCK = 2000  # atoms of the largest frame whose neighbours are counted


def largest_batch(training: DataSet, rcut: float) -> tuple[int, float]:
    """Atoms and, about, neighbour pairs of the micro-batch with the most atoms."""
    sizes = [
        s.natoms * (training.mixed_batch or b) for s, b in zip(training.systems, training.batch_sizes, strict=True)
    ]
    k = int(np.argmax(sizes))
    frame = training.systems[k].frame(0).by_type()
    parts = ceil(len(frame.type) / BLOCK)
    own, _, (i, _, _) = pairs_of_block(frame.coord, frame.cell, rcut, 0, parts, 1, training.systems[k].name)
    return sizes[k], len(i) / max(len(own), 1) * sizes[k]


def memory_of_worker(comm: Comm, device: torch.device) -> float:
    """Bytes of the worker that has the least: its GPU's, or its share of its host's."""
    host = socket.gethostname()
    if device.type == "cuda":
        own, name = torch.cuda.get_device_properties(device).total_memory, f"{host} gpu {device.index}"
    else:
        own, name = memory_of_host(), host
    reports = comm.gather([name, own])
    names = [name for name, _ in reports]
    return min(free / names.count(name) for name, free in reports)


def choose_groups(
    training: DataSet, model: Model, comm: Comm, device: torch.device, workers: int | None = None
) -> tuple[int, str]:
    """S, the same on all workers, and the sentence that tells why; `workers`: for so many instead of these."""
    workers = workers or comm.size
    if "energy" not in model.outputs:
        return 1, "spatial_workers: auto is 1, as only energies, forces and virials can be split."
    atoms, pairs = largest_batch(training, model.needs.limit.rcut)
    share, batches = memory_of_worker(comm, device) / 2, training.total_batches()
    divisors = [n for n in range(1, workers + 1) if workers % n == 0]
    fitting = [n for n in divisors if workers // n <= batches and pairs * PAIR / n <= share]
    size = fitting[0] if fitting else workers
    why = (
        f"spatial_workers: auto is {size}. The largest micro-batch has {atoms} atoms and {pairs:.3g} neighbour pairs, "
        f"about {pairs * PAIR / 2**30:.2g} GiB; half of a worker's memory is {share / 2**30:.2g} GiB; "
        f"an epoch has {batches} micro-batches for {workers // size} group(s) of workers."
    )
    return comm.gather(size)[0], why if fitting else f"{why} It may not fit: start more workers."
