"""Fewer threads while other programs have the cores.

A step waits for the slowest of its threads at the end of every short operation. One that has no core of its own for a
moment stops all, so that two threads beside another program on two cores are several times slower than one. Hence

    threads = cores without those that others use,     others = (time that was not idle - this process's) / time

for the CPUs on which this process may run, looked at when the program has been loaded and then every half second. Time
that a host takes from a virtual machine does not count: it takes it from one thread as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

EVERY = 0.5  # s
SLACK = 0.3  # of a core, which small programs may use without effect
LEAST = 0.2  # s: in less, clocks that tick a hundred times a second tell nothing


def busy_time() -> float:
    """Seconds in which the CPUs of this process were not idle, since they were started."""
    times, own = psutil.cpu_times(percpu=True), os.sched_getaffinity(0)
    other = {"idle", "iowait", "steal", "guest", "guest_nice"}  # a guest's time is part of user's
    return sum(sum(v for k, v in t._asdict().items() if k not in other) for n, t in enumerate(times) if n in own)


Reading = tuple[float, float, float]  # time, busy time of all, own time


def reading() -> Reading:
    return time.perf_counter(), busy_time(), time.process_time()


LOADED = reading()  # commands.py loads this module before torch, which takes a second: enough to see what others do


class FreeCores:
    """Sets torch's threads between 1 and `most`; `cpus` of them are there."""

    def __init__(
        self,
        most: int,
        cpus: int,
        tell: Callable[[str], None],
        busy: Callable[[], float] = busy_time,
        own: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.most, self.cpus, self.tell = most, cpus, tell
        self.busy, self.own, self.clock = busy, own, clock
        self.wanted = self.threads = most  # by the last look, and now
        self._seen = clock(), busy(), own()

    def begin(self, since: Reading = LOADED) -> None:
        """What others have used since then decides at once."""
        if self.clock() >= since[0] + LEAST:
            self._seen = since
            self._set(self._others())

    def look(self) -> None:
        """Between two steps; two looks that agree change something."""
        if self.clock() < self._seen[0] + EVERY:
            return
        before, others = self.wanted, self._others()
        if self.wanted == before:
            self._set(others)

    def _others(self) -> float:
        """Cores that others have used since the last look; `wanted` is what they leave."""
        then, self._seen = self._seen, (self.clock(), self.busy(), self.own())
        took, busy, own = (now - before for now, before in zip(self._seen, then, strict=True))
        others = (busy - own) / took
        self.wanted = max(1, min(self.most, int(self.cpus - others + SLACK)))
        return others

    def _set(self, others: float) -> None:
        if self.wanted != self.threads:
            import torch  # here, so that this module is loaded without it

            self.threads = self.wanted
            torch.set_num_threads(self.threads)
            self.tell(
                f"other programs use {max(0.0, others):.1f} of {self.cpus} cores: {self.threads} thread(s) from here on"
            )
