"""What a run shows: lines of the log, rows of lcurve.out, TensorBoard, a bar on a terminal. Files are rank 0's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any

from allforce import logs
from allforce.logs import log
from allforce.train.boards import open_boards
from allforce.train.lcurve import LearningCurve

if TYPE_CHECKING:
    from allforce.config.schema import Training

Figures = dict[str, float]


class Display:
    """Shows the figures of a step and counts the time between displays."""

    def __init__(
        self, config: Training, names: list[str], rank: int, first: int, last: int, append: bool, facts: dict[str, Any]
    ):
        self.config, self.rank, self.last = config, rank, last
        self.curve, self.bar = None, None
        self.boards = open_boards(config, rank, facts)
        if rank == 0:
            if config.disp_training:
                at = first if append else None
                self.curve = LearningCurve(config.disp_file, names, config.validation_data is not None, at)
            self.bar = _bar(first, last)
        self.begun = self.since = perf_counter()
        self.at, self.training, self.counted, self.excluded = first, 0.0, 0, 0

    def figures(self, step: int, rate: float, training: Figures, validation: Figures | None, testing: float) -> None:
        """The lines of one displayed step; `testing` seconds went into the validation."""
        if self.rank == 0:
            log.info(f"Batch {step:7d}: trn: {logs.figures(training)}, lr = {rate:8.2e}")
            if validation is not None:
                log.info(f"Batch {step:7d}: val: {logs.figures(validation)}")
            if self.curve is not None:
                self.curve.row(step, training, validation, rate)
        self._times(step, testing)

    def _times(self, step: int, testing: float) -> None:
        now = perf_counter()
        passed, steps = now - self.since - testing, step - self.at
        if steps > 0:
            if self.excluded:
                self.training, self.counted = self.training + passed, self.counted + steps
            self.excluded = self.excluded or steps  # the first interval holds what happens once: caches, compilation
            if self.config.time_training:
                self._time_lines(step, passed, testing, steps)
        self.since, self.at = now, step

    def _time_lines(self, step: int, training: float, testing: float, steps: int) -> None:
        log.info(f"batch {step:7d} training time {training:.2f} s, testing time {testing:.2f} s")
        if self.rank == 0:
            left = timedelta(seconds=int((self.last - step) * (training + testing) / steps))
            end = f"{datetime.now() + left:%Y-%m-%d %H:%M}"
            log.info(f"Batch {step:7d}: total wall time = {training + testing:.2f} s, eta = {left} at {end}")

    def scalars(self, step: int, figures: Callable[[], Figures], rate: float, part: str) -> None:
        """For the boards; `figures` is asked for in their thread."""
        rest = {"lr": rate} if part == "train" else {}
        self.boards.scalars(step, lambda: {f"{name}/{part}": value for name, value in figures().items()} | rest)

    def speed(self, step: int, row: dict[str, Any]) -> None:
        """What rank 0 knows of all ranks since the last displayed step: see monitor.py."""
        if not row.get("steps"):
            return
        total = sum(row["phases"].values()) or 1.0
        shares = {f"phases/{name}": seconds / total for name, seconds in row["phases"].items()}
        self.boards.scalars(step, lambda: {"samples_per_second": row["samples_per_second"], **shares})
        if self.bar is not None:
            slowest = f", slowest rank {row['slowest_rank']}" if len(row["waiting"]) > 1 else ""
            rmse = ", ".join(f"{part} {row[part]['rmse']:.2e}" for part in ("train", "val") if row[part])
            note = f"{row['samples_per_second']:.1f} samples/s, {rmse}{slowest}"
            self.bar.update(self.bar.task_ids[0], note=note)

    def progress(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step)

    def close(self) -> None:
        self.boards.close()
        if self.curve is not None:
            self.curve.close()
        if self.bar is not None:
            self.bar.stop()

    def farewell(self) -> None:
        """The last lines of a run that came to its end."""
        if self.counted:
            average = self.training / self.counted
            log.info(f"average training time: {average:.4f} s/batch (exclude first {self.excluded} batches)")
        elif self.excluded:
            average = (self.since - self.begun) / self.excluded
            log.info(f"average training time: {average:.4f} s/batch")
        log.info("finished training")


def _bar(first: int, last: int) -> Any:
    """A bar that stays below the lines of the log; only where a person looks on."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    note = TextColumn("{task.fields[note]}", style="dim")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
    bar = Progress(*columns, console=Console(stderr=True, soft_wrap=True), refresh_per_second=1, transient=True)
    bar.add_task("training", total=last, completed=first, note="")
    bar.start()
    return bar
