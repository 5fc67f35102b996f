"""Fewer threads while other programs have the cores.

A step waits for the slowest of its threads at the end of every short operation. One that has no core of its own for a
moment stops all, so that two threads beside another program on two cores are several times slower than one. Hence

    threads = cores without those that others use,     others = (time that was not idle - this process's) / time

for the CPUs on which this process may run, looked at every half second. Time that a host takes from a virtual machine
does not count: it takes it from one thread as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil
import torch

EVERY = 0.5  # s
SLACK = 0.3  # of a core, which small programs may use without effect


def busy_time() -> float:
    """Seconds in which the CPUs of this process were not idle, since they were started."""
    times, own = psutil.cpu_times(percpu=True), os.sched_getaffinity(0)
    other = {"idle", "iowait", "steal", "guest", "guest_nice"}  # a guest's time is part of user's
    return sum(sum(v for k, v in t._asdict().items() if k not in other) for n, t in enumerate(times) if n in own)


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

    def look(self) -> None:
        """Between two steps; two looks that agree change something."""
        if (now := self.clock()) < self._seen[0] + EVERY:
            return
        then, seen, self._seen = self._seen[0], self._seen[1:], (now, self.busy(), self.own())
        others = (self._seen[1] - seen[0] - (self._seen[2] - seen[1])) / (now - then)
        before, self.wanted = self.wanted, max(1, min(self.most, int(self.cpus - others + SLACK)))
        if self.wanted == before and self.wanted != self.threads:
            self.threads = self.wanted
            torch.set_num_threads(self.threads)
            self.tell(
                f"other programs use {max(0.0, others):.1f} of {self.cpus} cores: {self.threads} thread(s) from here on"
            )
