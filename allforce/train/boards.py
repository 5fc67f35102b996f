"""TensorBoard and Weights & Biases, fed by a thread of rank 0: the training only hands over a copy of its sums."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from allforce.errors import UserError
from allforce.logs import log

if TYPE_CHECKING:
    from allforce.config.schema import Training

Figures = dict[str, float]
AHEAD = 10_000  # entries that may wait; beyond them the training does
FLUSH = 5.0  # seconds, after which a TensorBoard that looks on sees what is new
PAUSE = 0.5  # seconds: many entries at once disturb the training less than each when it comes


class Board(Protocol):
    def scalars(self, step: int, figures: Figures) -> None: ...
    def histograms(self, step: int, tensors: dict[str, Tensor]) -> None: ...
    def close(self) -> None: ...


class Boards:
    """Takes what is to be shown; nothing is computed or written before the thread gets to it."""

    def __init__(self, boards: list[Board]):
        self.boards = boards
        self.queue: queue.Queue[Callable[[Board], None] | None] = queue.Queue(AHEAD)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="boards", daemon=True)
        if boards:
            self.thread.start()

    def __bool__(self) -> bool:
        return bool(self.boards)

    def scalars(self, step: int, figures: Callable[[], Figures]) -> None:
        if self:
            self.queue.put(lambda board: board.scalars(step, figures()))

    def histograms(self, step: int, tensors: dict[str, Tensor]) -> None:
        if self:
            self.queue.put(lambda board: board.histograms(step, tensors))

    def close(self) -> None:
        if self.thread.is_alive():
            self.over.set()
            self.queue.put(None)
            self.thread.join()

    def _run(self) -> None:
        working = list(self.boards)
        while (entry := self.queue.get()) is not None:
            if self.queue.empty():
                self.over.wait(PAUSE)
            for board in list(working):
                try:
                    entry(board)
                except Exception as error:  # a full disk, a lost server: training is worth more
                    log.warning(f"{type(board).__name__} is not continued: {error}")
                    working.remove(board)
                    with suppress(Exception):
                        board.close()
        for board in working:
            try:
                board.close()
            except Exception as error:
                log.warning(f"{type(board).__name__} was not closed well: {error}")


class TensorBoard:
    """One event a step for all its figures: a tenth of the work of one for each.

    Written here rather than by a SummaryWriter, which has one more thread and there meets a full disk with a traceback.
    """

    def __init__(self, folder: str):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import histogram

        self.event, self.summary, self.histogram = Event, Summary, histogram
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.0"
        self.file = open(Path(folder) / name, "wb")
        self.writer, self.flushed = RecordWriter(self.file), 0.0
        try:
            self._write(file_version="brain.Event:2")
        except OSError:
            with suppress(OSError):
                self.file.close()
            raise

    def scalars(self, step: int, figures: Figures) -> None:
        values = [self.summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(step=step, summary=self.summary(value=values))

    def histograms(self, step: int, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._write(step=step, summary=self.histogram(name, tensor, bins=64))

    def _write(self, **what: Any) -> None:
        now = time.time()
        self.writer.write(self.event(wall_time=now, **what).SerializeToString())
        if now > self.flushed + FLUSH:
            self.file.flush()
            self.flushed = now

    def close(self) -> None:
        self.file.close()


class WandB:
    """Weights & Biases; WANDB_MODE=offline keeps everything on disk, WANDB_DIR says where."""

    def __init__(self, project: str, facts: dict[str, Any]):
        import wandb

        self.check_disk()
        self.wandb = wandb
        self.run = wandb.init(project=project, config=facts)
        for handler in logging.getLogger("wandb").handlers:  # its own log: a full disk is told once, by us
            handler.handleError = lambda record: None  # type: ignore[method-assign]

    def scalars(self, step: int, figures: Figures) -> None:
        self.run.log(figures, step=step)

    def histograms(self, step: int, tensors: dict[str, Tensor]) -> None:
        counted = {name: self.wandb.Histogram(t.cpu().numpy()) for name, t in tensors.items()}  # type: ignore[arg-type]
        self.run.log(counted, step=step)

    def close(self) -> None:
        self.run.finish()
        self.check_disk()

    @staticmethod
    def check_disk() -> None:
        """An error where its files have no room: itself it goes on without a word, or with many."""
        with TemporaryFile(dir=os.environ.get("WANDB_DIR", ".")) as file:
            file.write(bytes(1 << 16))


def open_boards(config: Training, rank: int, facts: dict[str, Any]) -> Boards:
    """Those that the input asks for, on rank 0."""
    boards: list[Board] = []
    if rank == 0 and config.tensorboard:
        boards += _made("tensorboard", "tensorboard", lambda: TensorBoard(config.tensorboard_log_dir))
    if rank == 0 and config.wandb_project is not None:
        boards += _made("wandb_project", "wandb", lambda: WandB(str(config.wandb_project), facts))
    return Boards(boards)


def _made(key: str, package: str, make: Callable[[], Board]) -> list[Board]:
    try:
        return [make()]
    except OSError as error:
        log.warning(f"training/{key}: nothing will be written ({error})")
        return []
    except ImportError:
        raise UserError(
            f"training/{key} is set, but the package {package} is not installed. "
            f"Install it (pip install allforce[{package}]) or leave the key out."
        ) from None
