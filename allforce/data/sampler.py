"""The order of the micro-batches: one endless sequence, a pure function of (seed, number).

Epoch e holds, of every system i, F_i(e + 1) - F_i(e) micro-batches with

    F_i(e) = floor(e·L·p_i + phi_i),      L = ceil(max n_batch_i / p_i),      0 < phi_i < 1 drawn for (seed, i),

in an order that is a permutation drawn for (seed, e). The k-th micro-batch of system i ever is slice k mod n_batch_i of
a permutation of its frames drawn for (seed, i, k div n_batch_i). All draws are from a counter-based generator (Philox),
so any place of the sequence is found without going through those before it. With probabilities in proportion to the
batches L·p_i = n_batch_i, and an epoch shows every frame exactly once. "mixed:N": batches of one frame, N consecutive
ones together.

Worker r of W takes the places r, r + W, …: shards are disjoint, and W workers see what one sees in W times the steps.
"""

from __future__ import annotations

import numpy as np

from allforce.data.dataset import DataSet

PHASE, ORDER, FRAMES = 1, 2, 3  # what a draw is for


class Sampler:
    """The sequence for a seed; with `rank`, one of its own for that worker (sharding replicate and partition)."""

    def __init__(self, dataset: DataSet, seed: int, rank: int | None = None):
        self.dataset = dataset
        self.key = (seed % 2**32, 0 if rank is None else rank + 1)
        rate = (
            dataset.entries_per_epoch * dataset.probabilities
        )  # (systems,) micro-batches of an epoch, at least n_batches
        whole = np.round(rate)
        self.rate = np.where(np.abs(rate - whole) < 1e-9 * np.maximum(rate, 1), whole, rate)  # n·(1/n) is 1, not nearly
        self.phase = self._draw(PHASE).uniform(1e-6, 1 - 1e-6, len(rate))
        self._epoch: tuple[int, int, np.ndarray, np.ndarray] | None = None
        self._frames: dict[int, tuple[int, np.ndarray]] = {}  # of each system its latest (pass, permutation)

    def micro_batch(self, m: int) -> list[tuple[int, int]]:
        """The (system, frame) pairs of micro-batch m = 0, 1, …"""
        n = self.dataset.mixed_batch
        return [pair for entry in range(m * n, m * n + n) for pair in self._entry(entry)] if n else self._entry(m)

    def _entry(self, m: int) -> list[tuple[int, int]]:
        start, systems, counts = self._epoch_of(m)
        i, k = int(systems[m - start]), int(counts[m - start])
        size = self.dataset.batch_sizes[i]
        passes, piece = divmod(k, int(self.dataset.n_batches[i]))
        return [(i, int(f)) for f in self._permutation(i, passes)[piece * size : (piece + 1) * size]]

    def _drawn(self, e: int) -> np.ndarray:
        """F_i(e): micro-batches of every system before epoch e."""
        return np.floor(e * self.rate + self.phase).astype(np.int64)

    def _epoch_of(self, m: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The epoch that holds place m: its first place, and of each place the system and the number of its batch."""
        plan = self._epoch
        if plan is None or not plan[1] <= m < plan[1] + len(plan[2]):
            e = m // self.dataset.entries_per_epoch
            while self._drawn(e).sum() > m:
                e -= 1
            while self._drawn(e + 1).sum() <= m:
                e += 1
            plan = self._epoch = (e, int(self._drawn(e).sum()), *self._plan(e))
        return plan[1:]

    def _plan(self, e: int) -> tuple[np.ndarray, np.ndarray]:
        before, after = self._drawn(e), self._drawn(e + 1)
        count = after - before
        systems = np.repeat(np.arange(len(count), dtype=np.int32), count)
        self._draw(ORDER, e).shuffle(systems)
        number = np.empty(len(systems), dtype=np.int64)  # the batches of a system are used in the order they come up
        number[np.argsort(systems, kind="stable")] = np.arange(len(systems)) - np.repeat(
            np.cumsum(count) - count, count
        )
        return systems, number + before[systems]

    def _permutation(self, i: int, passes: int) -> np.ndarray:
        known = self._frames.get(i)
        if known is None or known[0] != passes:
            order = np.arange(self.dataset.systems[i].nframes, dtype=np.int32)
            self._draw(FRAMES, i, passes).shuffle(order)
            known = self._frames[i] = (passes, order)
        return known[1]

    def _draw(self, what: int, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([what, *self.key, *key])))


def make_sampler(dataset: DataSet, seed: int, sharding: str, rank: int) -> Sampler:
    """The sampler of a worker: one order for all (global), or an order of its own (replicate, partition)."""
    return Sampler(dataset, seed, None if sharding == "global" else rank)


def stride(sharding: str, rank: int, size: int) -> tuple[int, int]:
    """(a, b): the k-th micro-batch of this worker is number a + b·k of its sampler."""
    return (rank, size) if sharding == "global" else (0, 1)
