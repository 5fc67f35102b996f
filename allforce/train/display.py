"""What a run shows: lines of the log, rows of lcurve.out, TensorBoard, a bar on a terminal. Files are rank 0's."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any

from allforce.errors import UserError
from allforce.train import logs
from allforce.train.lcurve import LearningCurve
from allforce.train.logs import log

if TYPE_CHECKING:
    from allforce.config.schema import Training

Figures = dict[str, float]


class Display:
    """Shows the figures of a step and counts the time between displays."""

    def __init__(self, config: Training, names: list[str], rank: int, first: int, last: int, append: bool):
        self.config, self.rank, self.last = config, rank, last
        self.curve, self.board, self.bar = None, None, None
        if rank == 0:
            self.board = _tensorboard(config)
            if config.disp_training:
                self.curve = LearningCurve(config.disp_file, names, config.validation_data is not None, append)
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

    def scalars(self, step: int, figures: Figures, rate: float, part: str) -> None:
        if self.board is not None:
            for name, value in figures.items():
                self.board.add_scalar(f"{name}/{part}", value, step)
            if part == "train":
                self.board.add_scalar("lr", rate, step)

    def progress(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step)

    def close(self) -> None:
        for thing in (self.curve, self.board):
            if thing is not None:
                thing.close()
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


def _tensorboard(config: Training) -> Any:
    if not config.tensorboard:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "training/tensorboard: true, but the package tensorboard is not installed. "
            "Install it (pip install allforce[tensorboard]) or set it to false."
        ) from None
    return SummaryWriter(config.tensorboard_log_dir)


def _bar(first: int, last: int) -> Any:
    """A bar that stays below the lines of the log; only where a person looks on."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True, soft_wrap=True), refresh_per_second=1, transient=True)
    bar.add_task("training", total=last, completed=first)
    bar.start()
    return bar
