"""TensorBoard and Weights & Biases, fed by a thread of rank 0: the training only hands over a copy of its sums."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from allforce.errors import UserError
from allforce.logs import log

if TYPE_CHECKING:
    from allforce.config.schema import Training

Figures = dict[str, float]
AHEAD = 1000  # entries that may wait; beyond them the training does


class Board(Protocol):
    def scalars(self, step: int, figures: Figures) -> None: ...
    def histograms(self, step: int, tensors: dict[str, Tensor]) -> None: ...
    def close(self) -> None: ...


class Boards:
    """Takes what is to be shown; nothing is computed or written before the thread gets to it."""

    def __init__(self, boards: list[Board]):
        self.boards = boards
        self.queue: queue.Queue[Callable[[Board], None] | None] = queue.Queue(AHEAD)
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
            self.queue.put(None)
            self.thread.join()

    def _run(self) -> None:
        working = list(self.boards)
        while (entry := self.queue.get()) is not None:
            for board in list(working):
                try:
                    entry(board)
                except Exception as error:  # a full disk, a lost server: training is worth more
                    log.warning(f"{type(board).__name__} is not continued: {error}")
                    working.remove(board)
        for board in working:
            try:
                board.close()
            except Exception as error:
                log.warning(f"{type(board).__name__} was not closed well: {error}")


class TensorBoard:
    """One event a step for all its figures: a tenth of the work of one for each."""

    def __init__(self, folder: str):
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self.writer, self.summary = SummaryWriter(folder), Summary

    def scalars(self, step: int, figures: Figures) -> None:
        values = [self.summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self.writer._get_file_writer().add_summary(self.summary(value=values), step)

    def histograms(self, step: int, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.writer.add_histogram(name, tensor, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Weights & Biases; WANDB_MODE=offline keeps everything on disk, WANDB_DIR says where."""

    def __init__(self, project: str, facts: dict[str, Any]):
        import wandb

        self.wandb = wandb
        self.run = wandb.init(project=project, config=facts)

    def scalars(self, step: int, figures: Figures) -> None:
        self.run.log(figures, step=step)

    def histograms(self, step: int, tensors: dict[str, Tensor]) -> None:
        self.run.log({name: self.wandb.Histogram(t.cpu().numpy()) for name, t in tensors.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


def open_boards(config: Training, rank: int, facts: dict[str, Any]) -> Boards:
    """Those that the input asks for, on rank 0."""
    boards: list[Board] = []
    if rank == 0 and config.tensorboard:
        boards.append(_needs("tensorboard", "tensorboard", lambda: TensorBoard(config.tensorboard_log_dir)))
    if rank == 0 and config.wandb_project is not None:
        boards.append(_needs("wandb_project", "wandb", lambda: WandB(str(config.wandb_project), facts)))
    return Boards(boards)


def _needs(key: str, package: str, make: Callable[[], Board]) -> Board:
    try:
        return make()
    except ImportError:
        raise UserError(
            f"training/{key} is set, but the package {package} is not installed. "
            f"Install it (pip install allforce[{package}]) or leave the key out."
        ) from None
