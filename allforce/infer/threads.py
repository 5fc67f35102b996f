"""The cores of a machine: a large batch in parts, or several batches, a thread for each.

Loops over edges run on one core, and products of some hundred rows do not fill many. So the whole evaluation is cut:
each thread takes some of the centres with their edges, as a worker takes a block (models/parts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from allforce.data.batch import Batch
from allforce.models import Model
from allforce.models.parts import SUMS, summands

EDGES = 20000  # of a part, at least: with 8,000 (half of 192 atoms of water) float32 took 25 ms instead of 13
T = TypeVar("T")


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "evaluate")


@contextmanager
def cores(number: int) -> Iterator[None]:
    """torch's own threads are `number` for each thread that calls it now."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def together(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What the tasks return. All of them run at the same time, the first one here, and share torch's threads."""
    if len(tasks) == 1:
        return [tasks[0]()]
    each = max(1, torch.get_num_threads() // len(tasks))

    def run(task: Callable[[], T]) -> T:
        torch.set_num_threads(each)  # partly of the calling thread, and the pool's are used again
        return task()

    with cores(each):
        others = [pool(len(tasks) - 1).submit(run, task) for task in tasks[1:]]
        try:
            return [tasks[0](), *(other.result() for other in others)]
        finally:
            wait(others)


def divided(items: Sequence[T], sizes: Sequence[int], parts: int) -> list[list[T]]:
    """Items one after the other in at most `parts` lists, of about the same size in all."""
    ends = np.cumsum(sizes)
    middle = ends - np.array(sizes) / 2
    which = np.minimum(middle * parts // max(1, ends[-1]), parts - 1)
    return [[items[k] for k in np.flatnonzero(which == p).tolist()] for p in np.unique(which)]


def predict(model: Model, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
    """model(batch, wanted) on all cores, without gradients by parameters."""
    parts = parts_of(model, batch, wanted)
    if parts == 1:
        with torch.no_grad():
            return model(batch, wanted)
    edges = torch.arange(1, parts) * (len(batch.edges.i) // parts)  # as many for each part
    bounds = [0, *torch.searchsorted(batch.edges.first, edges).tolist(), len(batch.type)]
    first, *others = together([partial(summand, model, batch, a, b, wanted) for a, b in pairwise(bounds)])
    for other in others:
        for name, value in other.items():
            first[name] += value
    return first


@torch.no_grad()
def summand(model: Model, batch: Batch, a: int, b: int, wanted: Collection[str]) -> dict[str, Tensor]:
    return summands(model, replace(batch, part=centers(batch, a, b)), wanted)


def parts_of(model: Model, batch: Batch, wanted: Collection[str]) -> int:
    """Into how many parts a batch is cut; 1 where its atoms are not independent of each other, or it is small."""
    alone = batch.edges.r.device.type != "cpu" or batch.part is not None or batch.rows is not None
    if alone or model.needs.limit.depth > 1 or "energy" not in model.outputs or not SUMS.issuperset(wanted):
        return 1
    return max(1, min(torch.get_num_threads(), len(batch.edges.i) // EDGES, len(batch.type)))


def centers(batch: Batch, a: int, b: int) -> Batch:
    """The part of a batch whose centres are a … b − 1; the other atoms come behind them."""
    edges, n = batch.edges, len(batch.edges.type)
    begin, end = edges.first[a].item(), edges.first[b].item()
    rows = torch.cat([torch.arange(a, b), torch.arange(a), torch.arange(b, n)])  # (A,) in the whole
    index = torch.empty_like(rows)
    index[rows] = torch.arange(n)
    counts = np.clip(np.cumsum([0, *batch.type_counts]), a, b)
    return replace(
        batch,
        type=batch.type[a:b],
        frame=batch.frame[a:b],
        type_counts=tuple(np.diff(counts).tolist()),
        coord=batch.coord[a:b],
        order=batch.order[a:b],
        labels={},
        aparam=None if batch.aparam is None else batch.aparam[a:b],
        rows=rows,
        edges=replace(
            edges,
            i=edges.i[begin:end] - a,
            j=index[edges.j[begin:end]],
            r=edges.r[begin:end],
            first=edges.first[a : b + 1] - begin,
            type=edges.type[rows],
        ),
    )
