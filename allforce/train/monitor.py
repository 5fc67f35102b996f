"""Watches a run: who spends how long on what, as lines of metrics.jsonl, a table at the end or on SIGUSR2, a timeline.

Everything here is told by all ranks together when a line of the learning curve is shown: one small gather, and one
all-reduce of the times at which the ranks came to their collectives. The steps in between are only counted.
"""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from errno import ENOSPC
from io import FileIO
from os import strerror
from pathlib import Path
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any

import torch

from allforce.distributed.profile import CountedComm
from allforce.distributed.timeline import LIMIT, Timeline, open_timeline, packed
from allforce.logs import log
from allforce.trace import DISPLAY, VALIDATION, Tracer
from allforce.train import summary
from allforce.train.summary import RankTimes

if TYPE_CHECKING:
    from allforce.config.schema import Training

Figures = dict[str, float]


class Monitor:
    """`facts` stand at the head of metrics.jsonl; `timeline` names its file, if one is wanted."""

    def __init__(
        self,
        config: Training,
        comm: CountedComm,
        device: torch.device,
        facts: dict[str, Any],
        timeline: str | None = None,
        append: bool = False,
    ):
        self.config, self.comm, self.device = config, comm, device
        self.trace = Tracer(events=LIMIT // comm.size + 1 if timeline is not None else 0)
        self.begun = self.since = perf_counter()
        self.samples, self.steps, self.shown_steps = 0, 0, 0
        self.before = self.first = self._so_far()
        self.last_row: dict[str, Any] = {}  # for who shows it otherwise
        self.sends, self.events = timeline is not None, 0  # the timeline's, of all ranks
        self.facts, self.wanted, self.append = facts, timeline, append
        self.metrics = JsonLines(None)
        self.timeline: Timeline | None = None
        self.profiler = _profiler(config, comm.rank) if config.enable_profiler else None
        if self.profiler is not None:
            self.trace.mirror = torch.profiler.record_function

    # ---- while it runs

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            self._open()
            with self.trace.installed():
                if self.profiler is not None:
                    self.profiler.start()
                self.begun = self.since = perf_counter()
                self.before = self.first = self._so_far()
                yield
        finally:
            self._close()

    def _open(self) -> None:
        hosts = self.comm.comm.gather(self.facts["host"])
        if self.comm.rank == 0:
            self.metrics = JsonLines(self.config.metrics_file, self.append)
            self.metrics.write({"run": self.facts})
            self.timeline = open_timeline(self.wanted, hosts, log.warning) if self.wanted is not None else None

    def step(self, samples: int) -> None:
        """A step is over, with so many frames of this rank."""
        self.samples += samples
        self.steps += 1
        if self.steps == 1:  # it holds what happens once: compilation, caches
            self.first = self._so_far()
        if self.profiler is not None:
            self.profiler.step()

    def row(self, step: int, rate: float, training: Figures, validation: Figures | None) -> None:
        """At a line of the learning curve; all ranks call it."""
        spans = self.comm.settle()
        now = self._so_far()
        spent, self.before = difference(now, self.before), now
        ranks = [RankTimes(**entry) for entry in self.comm.comm.gather(asdict(spent))]
        if self.sends:
            self._tell_events(spans)
        if self.comm.rank == 0:
            self._write(step, rate, training, validation, ranks)
        self.shown_steps = self.steps

    def report(self) -> None:
        """The table of the whole run so far; all ranks call it."""
        spans = self.comm.settle()
        if self.sends:
            self._tell_events(spans)
        ranks = self.ranks()
        if self.comm.rank == 0:
            for line in summary.table(ranks, self.steps - 1, self.first.wall):
                log.info(line)

    def ranks(self) -> list[RankTimes]:
        """What every rank has spent after the first step."""
        spent = difference(self._so_far(), self.first)
        return [RankTimes(**entry) for entry in self.comm.comm.gather(asdict(spent))]

    def finish(self) -> None:
        """The last words of a run that came to its end: the table, and the whole run in metrics.jsonl."""
        self.report()
        ranks, record = self.ranks(), self.comm.record
        names = sorted({name for name, _ in record.counts})
        calls = [{"routine": name, **asdict(record.routine(name))} for name in names]
        whole: dict[str, Any] = {
            "steps": self.steps - 1,
            "seconds": ranks[0].wall,
            "first_step_seconds": self.first.wall,
        }
        whole |= {"samples": sum(r.samples for r in ranks)}
        whole["verdict"] = summary.verdict(ranks).partition(": ")[2]
        self.metrics.write({"end": {**whole, **summary.as_dict(ranks), "communication": calls}})

    # ---- inside

    def _so_far(self) -> RankTimes:
        used = resource.getrusage(resource.RUSAGE_SELF)
        loader: dict[str, float] = {}
        for lane in list(self.trace.lanes):
            if lane.name.startswith("loader"):
                for name, seconds in self.trace.own_seconds(lane).items():
                    loader[name] = loader.get(name, 0.0) + seconds
        return RankTimes(
            wall=perf_counter() - self.begun,
            phases=self.trace.own_seconds(),
            waiting=self.comm.record.waiting,
            loader=loader,
            samples=self.samples,
            cpu=used.ru_utime + used.ru_stime,
            memory=used.ru_maxrss / 1024,
            **_gpu(self.device),
        )

    def _write(
        self, step: int, rate: float, training: Figures, validation: Figures | None, ranks: list[RankTimes]
    ) -> None:
        steps, wall = self.steps - self.shown_steps, max(r.wall for r in ranks)
        shown = max(r.phases.get(VALIDATION, 0.0) + r.phases.get(DISPLAY, 0.0) for r in ranks)
        samples, seconds = sum(r.samples for r in ranks), wall - shown
        row: dict[str, Any] = {
            "step": step,
            "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
            "elapsed": perf_counter() - self.begun,
            "lr": rate,
            "train": training,
            "val": validation,
            "steps": steps,
            "seconds": wall,
            "training_seconds": seconds,  # without validation and display
            "samples": samples,
            "samples_per_second": samples / seconds if seconds > 0 else 0.0,
            **summary.as_dict(ranks),
        }
        self.last_row = row
        self.metrics.write(row)

    def _tell_events(self, spans: list[tuple[str, float, float]]) -> None:
        events = self.trace.take_events() + [("main", *span) for span in spans if span[2] > span[1]]
        gathered = self.comm.comm.gather(packed(events, self.comm.origin))
        self.events += sum(len(rank["events"]) for rank in gathered)
        if self.timeline is not None:
            self.timeline.add(gathered)
        if self.events > LIMIT:
            self.sends, self.trace.max_events = False, 0
            if self.comm.rank == 0:
                log.info(f"the timeline has {self.events} events and ends here: a browser shows not many more")

    def _close(self) -> None:
        """Also when the run has failed and the others are gone: nothing here asks them."""
        if self.profiler is not None:
            self.profiler.stop()
        if self.timeline is not None:
            if self.sends and (events := self.trace.take_events()):
                rest = packed(events, self.comm.origin)
                nothing: dict[str, Any] = {"names": [], "threads": [], "events": []}
                self.timeline.add([rest] + [nothing] * (self.comm.size - 1))
            self.timeline.close()
        self.metrics.close()


def difference(now: RankTimes, before: RankTimes) -> RankTimes:
    """What was spent in between."""
    phases, loader = (
        {name: seconds - old.get(name, 0.0) for name, seconds in new.items()}
        for new, old in ((now.phases, before.phases), (now.loader, before.loader))
    )
    return RankTimes(
        now.wall - before.wall, phases, now.waiting - before.waiting, loader, now.samples - before.samples,
        now.cpu - before.cpu, now.memory, now.gpu, now.gpu_memory,
    )  # fmt: skip


class JsonLines:
    """One JSON object a line, each written whole; a problem is said once and ends it."""

    def __init__(self, path: str | None, append: bool = False):
        self.path = path
        self.file: FileIO | None = None
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self.file = FileIO(path, "a" if append else "w")
            except OSError as error:
                log.warning(f"training/metrics_file: {path} cannot be written ({error.strerror})")

    def write(self, value: Any) -> None:
        if self.file is None:
            return
        line = (json.dumps(_plain(value), allow_nan=False) + "\n").encode()
        try:
            if self.file.write(line) != len(line):
                raise OSError(ENOSPC, strerror(ENOSPC))
        except OSError as error:
            log.warning(f"training/metrics_file: {self.path} is not continued ({error.strerror})")
            self.close()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.file = None


def _plain(value: Any) -> Any:
    """JSON has no NaN: what has no number is null."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _gpu(device: torch.device) -> dict[str, float]:
    """Utilisation by nvidia-ml-py, where it is installed; memory by torch."""
    if device.type != "cuda":
        return {}
    memory = {"gpu_memory": torch.cuda.max_memory_reserved(device) / 2**20}
    try:
        return memory | {"gpu": float(torch.cuda.utilization(device))}
    except (ModuleNotFoundError, RuntimeError):
        return memory


def _profiler(config: Training, rank: int) -> Any:
    """torch.profiler for three steps after a warm-up, one trace for each rank in tensorboard_log_dir."""
    from torch.profiler import profile, schedule

    path = Path(config.tensorboard_log_dir) / f"rank{rank}.{time_ns()}.pt.trace.json"

    def ready(found: Any) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(path))
            whole = path.read_bytes().rstrip().endswith(b"}")  # it is silent about a full disk
        except (OSError, RuntimeError) as error:
            log.warning(f"training/enable_profiler: no trace in {path} ({error})")
        else:
            if not whole:
                log.warning(f"training/enable_profiler: the trace {path} is not complete; is the disk full?")

    return profile(schedule=schedule(wait=1, warmup=15, active=3, repeat=1), on_trace_ready=ready)
