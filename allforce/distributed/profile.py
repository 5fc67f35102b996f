"""What the workers say to each other, counted: one wrapper around any Comm.

Calls, bytes and seconds are counted by routine and size of the message. How much of the time was waiting for the others
is found without an extra collective in the step: every rank notes when it came to each call, and `settle`, called now
and then by all, finds the latest of them. Waiting lasts until the last rank has come, the rest is moving bytes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..trace import COMMUNICATION, TRANSFER, WAITING, phase
from .comm import Comm, Work

if TYPE_CHECKING:
    from .watch import Watch

ALL_REDUCE, BROADCAST, GATHER, BARRIER = "MPI_Allreduce", "MPI_Bcast", "MPI_Allgather", "MPI_Barrier"
ROUNDS = 8  # of the comparison of clocks


@dataclass
class Count:
    """Calls of one routine with messages of about one size."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.calls += 1
        self.bytes += nbytes
        self.seconds += seconds


@dataclass
class Record:
    """All calls of this rank so far."""

    counts: dict[tuple[str, int], Count] = field(default_factory=dict)  # by routine and bin of sizes
    waiting: float = 0.0  # seconds, of the calls that are settled

    def add(self, routine: str, nbytes: int, seconds: float) -> None:
        key = routine, size_bin(nbytes)
        if key not in self.counts:
            self.counts[key] = Count()
        self.counts[key].add(nbytes, seconds)

    def routine(self, name: str) -> Count:
        """All sizes together."""
        parts = [c for (routine, _), c in self.counts.items() if routine == name]
        return Count(sum(c.calls for c in parts), sum(c.bytes for c in parts), sum(c.seconds for c in parts))

    @property
    def seconds(self) -> float:
        return sum(c.seconds for c in self.counts.values())


def size_bin(nbytes: int) -> int:
    """0: nothing; 1: up to 4 bytes, 2: 5 to 8, 3: 9 to 16, … doubling."""
    return max(1, (nbytes - 1).bit_length() - 1) if nbytes > 0 else 0


class CountedComm:
    """Any Comm, its collectives counted. exact: on a GPU wait for each of them, so that its time is seen."""

    def __init__(self, comm: Comm, exact: bool = False, record: Record | None = None):
        self.comm, self.exact = comm, exact
        self.rank, self.size, self.engine = comm.rank, comm.size, comm.engine
        self.part = record is not None  # of a group whose calls it counts along; only the whole knows who is waited for
        self.record = Record() if record is None else record
        self.begun = perf_counter()
        self.origin = self.begun  # when rank 0 began, by the clock of this rank
        self.calls, self.inside, self.since = 0, False, monotonic()  # for the watch: where this worker is
        self.watch: Watch | None = None
        self.offset, self.one_clock = 0.0, True
        self.timed = True  # whether times of calls are kept for settle()
        self._came, self._begin, self._end = array("d"), array("d"), array("d")  # of the calls since settle()
        if comm.size > 1 and not self.part:
            self.compare_clocks()

    # ---- the collectives

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        call = Call(self, ALL_REDUCE, tensor)
        with call:
            self.comm.all_reduce(tensor, op)

    def all_reduce_start(self, tensor: Tensor) -> Work:
        call = Call(self, ALL_REDUCE, tensor)
        with phase(COMMUNICATION):
            call.work = self.comm.all_reduce_start(tensor)
        call.begun_for = perf_counter() - call.came
        return call

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        with Call(self, BROADCAST, tensor):
            self.comm.broadcast(tensor, root)

    def gather(self, value: Any) -> list[Any]:
        with Call(self, GATHER, len(json.dumps(value))):
            return self.comm.gather(value)

    def barrier(self) -> None:
        with Call(self, BARRIER, 0):
            self.comm.barrier()

    # ---- the rest of the protocol

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return self.comm.buffer(count, dtype, device)

    def split(self, color: int) -> Comm:
        return CountedComm(self.comm.split(color), self.exact, self.record)

    def abort(self, code: int = 1) -> None:
        if self.watch is not None:
            self.watch.stop_all(code)
        self.comm.abort(code)

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.comm.close()

    # ---- waiting

    def came(self) -> int:
        """The place of a new call among those since settle()."""
        if not self.timed:
            return 0
        now = perf_counter()
        for times in (self._came, self._begin, self._end):
            times.append(now)
        return len(self._came) - 1

    def blocked(self, index: int, begin: float, end: float) -> None:
        if index < len(self._came):  # else it was settled while under way
            self._begin[index], self._end[index] = begin, end

    def settle(self) -> list[tuple[str, float, float]]:
        """Of the calls since the last time: spans of waiting and transfer. All ranks call it together."""
        if self.size == 1 or self.part:
            return []
        if not self.one_clock:
            self.compare_clocks(rounds=2)
        spans, last = [], torch.frombuffer(self._came, dtype=torch.float64) - self.offset if self._came else None
        if last is not None:
            with self._waiting():
                self.comm.all_reduce(last, "max")
            for begin, end, latest in zip(self._begin, self._end, (last + self.offset).tolist(), strict=True):
                there = min(max(latest, begin), end)
                self.record.waiting += there - begin
                spans += [(WAITING, begin, there), (TRANSFER, there, end)]
        self._came, self._begin, self._end = array("d"), array("d"), array("d")
        return spans

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A collective that is not counted: the watch must see it nevertheless."""
        self.calls += 1
        self.inside, self.since = True, monotonic()
        yield
        self.inside, self.since = False, monotonic()

    def compare_clocks(self, rounds: int = ROUNDS) -> None:
        """offset: this rank's clock minus that of rank 0.

        Nobody leaves a barrier before all have come. So with E and X for coming and leaving,
        E_r − X_0 ≤ offset ≤ X_r − E_0, which every barrier narrows. Ranks of one host have one clock, offset 0, which
        is what is taken when it is within the bounds.
        """
        times = []
        with self._waiting():
            for _ in range(rounds):
                came = perf_counter()
                self.comm.barrier()
                times.append((came, perf_counter()))
            gathered = self.comm.gather([self.begun, times])
        all_times = [entry[1] for entry in gathered]
        offsets = [bounds(times, all_times[0]) for times in all_times]
        self.one_clock = all(low <= 0 <= high for low, high in offsets)
        low, high = offsets[self.rank]
        self.offset = 0.0 if self.one_clock else (low + high) / 2
        self.origin = gathered[0][0] + self.offset


class Call:
    """One collective: `with` blocks until it is done, or all_reduce_start and later wait()."""

    def __init__(self, comm: CountedComm, routine: str, what: Tensor | int):
        self.comm, self.routine, self.phase = comm, routine, phase(COMMUNICATION)
        self.bytes = what if isinstance(what, int) else what.numel() * what.element_size()
        self.device = what.device if comm.exact and isinstance(what, Tensor) and what.is_cuda else None
        self._synchronize()
        self.came, self.index = perf_counter(), comm.came()
        comm.calls += 1
        self.begun_for = 0.0
        self.work: Work | None = None

    def __enter__(self) -> None:
        self.phase.__enter__()
        self.comm.inside, self.comm.since = True, monotonic()
        self.begun = perf_counter()

    def __exit__(self, *error: Any) -> None:
        self._synchronize()
        end = perf_counter()
        self.comm.inside, self.comm.since = False, monotonic()
        self.phase.__exit__(*error)
        self.comm.blocked(self.index, self.begun, end)
        self.comm.record.add(self.routine, self.bytes, end - self.begun + self.begun_for)

    def wait(self) -> None:
        assert self.work is not None
        with self:
            self.work.wait()

    def _synchronize(self) -> None:
        if self.device is not None:
            torch.cuda.synchronize(self.device)


def bounds(times: list[list[float]], zero: list[list[float]]) -> tuple[float, float]:
    """Smallest and largest offset of a clock to that of rank 0, from (coming, leaving) of the same barriers."""
    low = max(came - left0 for (came, _), (_, left0) in zip(times, zero, strict=True))
    high = min(left - came0 for (_, left), (came0, _) in zip(times, zero, strict=True))
    return low, high
