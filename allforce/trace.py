"""Where the time goes: named phases of a run, nested, of every thread.

    with phase("forward"):
        with phase("moments"): …

costs about a microsecond and adds to the sums of the installed tracer: how often, how long, and how long without the
phases inside. Events (name, begin, end) are kept on request, for a timeline. Without a tracer a phase does nothing.
One tracer is installed at a time, for the whole process, as there is one log: the model and the loader name their
phases without knowing who asks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any

# The phases of a step, in the order in which they are shown; further ones may be named anywhere.
DATA, NEIGHBORS, MOMENTS, FORWARD, BACKWARD = "data wait", "neighbours", "moments", "forward", "backward"
COMMUNICATION, WAITING, TRANSFER = "communication", "waiting", "transfer"  # the second and third make the first
OPTIMIZER, VALIDATION, DISPLAY, CHECKPOINT, BATCH = "optimizer", "validation", "display", "checkpoint", "batch"

NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass
class Total:
    """A phase of one thread so far."""

    count: int = 0
    seconds: float = 0.0
    own: float = 0.0  # without the phases inside


@dataclass
class Lane:
    """One thread."""

    name: str
    totals: dict[str, Total] = field(default_factory=dict)
    stack: list[Span] = field(default_factory=list)
    events: deque[tuple[str, float, float]] = field(default_factory=deque)  # name, begin, end by perf_counter


class Span:
    """One pass through a phase."""

    __slots__ = ("begun", "inner", "lane", "mirror", "name", "tracer")

    def __init__(self, tracer: Tracer, name: str):
        self.tracer, self.name, self.inner = tracer, name, 0.0

    def __enter__(self) -> None:
        lane = self.lane = self.tracer.lane()
        lane.stack.append(self)
        self.mirror = None
        if self.tracer.mirror is not None:
            self.mirror = self.tracer.mirror(self.name)
            self.mirror.__enter__()
        self.begun = perf_counter()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        end = perf_counter()
        if self.mirror is not None:
            self.mirror.__exit__(kind, error, trace)
        lane, took = self.lane, end - self.begun
        lane.stack.pop()
        if lane.stack:
            lane.stack[-1].inner += took
        total = lane.totals.get(self.name)
        if total is None:
            total = lane.totals[self.name] = Total()
        total.count += 1
        total.seconds += took
        total.own += took - self.inner
        if len(lane.events) < self.tracer.max_events:
            lane.events.append((self.name, self.begun, end))


class Tracer:
    """Sums of the phases of all threads; of up to `events` in each, until they are taken, also begin and end."""

    def __init__(self, events: int = 0):
        self.max_events = events
        self.mirror: Callable[[str], Any] | None = None  # torch.profiler.record_function, when that runs as well
        self.lanes: list[Lane] = []
        self._local = threading.local()
        self._lock = threading.Lock()
        self.begun = perf_counter()

    def __call__(self, name: str) -> Span:
        return Span(self, name)

    def lane(self) -> Lane:
        """Of the calling thread."""
        try:
            return self._local.lane
        except AttributeError:
            thread = threading.current_thread()
            lane = self._local.lane = Lane("main" if thread is threading.main_thread() else thread.name)
            with self._lock:
                self.lanes.append(lane)
            return lane

    def own_seconds(self, lane: Lane | None = None) -> dict[str, float]:
        """Of each phase without those inside, in the thread of a lane (the calling one)."""
        return {name: total.own for name, total in (lane or self.lane()).totals.items()}

    def take_events(self) -> list[tuple[str, str, float, float]]:
        """(thread, name, begin, end) since the last call; other threads may go on meanwhile."""
        taken = []
        for lane in list(self.lanes):
            for _ in range(len(lane.events)):
                taken.append((lane.name, *lane.events.popleft()))
        return taken

    @contextmanager
    def installed(self) -> Iterator[Tracer]:
        """`phase` means this tracer within the block."""
        global _tracer
        before, _tracer = _tracer, self
        try:
            yield self
        finally:
            _tracer = before


_tracer: Tracer | None = None


def phase(name: str) -> AbstractContextManager[None]:
    """A phase of whatever tracer is installed."""
    return NOTHING if _tracer is None else Span(_tracer, name)
