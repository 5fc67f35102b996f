"""Checkpoints are written beside the training: from a copy, by a thread. What fails is tried again at the next save."""

from __future__ import annotations

import threading
from pathlib import Path

from allforce.errors import UserError, file_problem
from allforce.files import checkpoint
from allforce.files.checkpoint import Checkpoint
from allforce.logs import log


class Writer:
    """Writes the checkpoints of a run, one after the other; rank 0 has one."""

    def __init__(self, prefix: Path, keep: int):
        self.prefix, self.keep = prefix, keep
        self.thread: threading.Thread | None = None
        self.problem = ""  # of the latest save

    def save(self, state: Checkpoint) -> None:
        """Begin to write a copy of `state`; the one before is waited for."""
        self.wait()
        copy = Checkpoint({k: v.detach().cpu().clone() for k, v in state.tensors.items()}, state.meta)
        self.thread = threading.Thread(target=self._write, args=(copy,), name="allforce-writer")
        self.thread.start()

    def _write(self, state: Checkpoint) -> None:
        try:
            checkpoint.save(self.prefix, state, self.keep)
        except OSError as error:
            if not self.problem:
                log.warning(f"no checkpoint of step {state.step}: {file_problem(error)}. The next save tries again.")
            self.problem = file_problem(error)
        else:
            self.problem = ""
            log.info(f"saved checkpoint {self.prefix.name}")

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
        self.thread = None

    def finish(self) -> None:
        """The last save is on the disk, or the run has failed."""
        self.wait()
        if self.problem:
            kept = checkpoint.numbered(self.prefix)
            older = f"The last one that was written is {kept[-1][1]}." if kept else "None was written."
            raise UserError(f"The last checkpoint could not be written: {self.problem}. {older}")
