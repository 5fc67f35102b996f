"""A loss or gradient that is not finite (training/on_nan): stop, skip the step, or rewind.

What is looked at are the sums over all workers that the one collective of a step has made, the same numbers on all of
them: they decide alike without asking each other. Only then do they talk, about where it came from. A run that stops
looks at the loss alone, which costs nothing: a bad gradient makes the next loss one that is not finite, before a save.

    skip      no update; the next step has the next micro-batches
    rewind    weights and optimizer of the last checkpoint; the next step has the next micro-batches
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from allforce.distributed.comm import Comm
from allforce.errors import UserError
from allforce.files import checkpoint
from allforce.logs import log
from allforce.train.start import Job
from allforce.train.writer import Writer

NEVER = 2**62
SKIPS = 10  # bad steps in a row: it is not the data
REWINDS = 3  # to the same checkpoint


class Guard:
    """Looks at every step: at once on CPUs, and everywhere if the run is to go on. Else, as a look makes the device
    wait, the first bad step is remembered there and looked at when lines are shown or saved."""

    def __init__(self, job: Job, comm: Comm, writer: Writer):
        self.job, self.comm, self.writer, self.action = job, comm, writer, job.input.training.on_nan
        device = job.state.flat.wire.device
        self.looks = device.type == "cpu" or self.action != "stop"
        self.first_bad = torch.full((), NEVER, dtype=torch.int64, device=device)
        self.skipped = 0  # bad steps in a row
        self.rewound: list[str] = []  # checkpoints that were gone back to

    def finite(self, step: int, seen: list[tuple[str, Tensor]], due: bool, update: bool = True) -> bool:
        """Whether the step can be used; a UserError when the run is to stop. Without `update` there is a loss alone, of
        weights that have been found good: a run that is to go on then has nothing to decide."""
        flat = self.job.state.flat
        gradients = update and self.action != "stop"
        total = flat.sums[0] + flat.gradient.sum() if gradients else flat.sums[0]
        if self.looks:
            if isfinite(total) or (not update and self.action != "stop"):
                self.skipped = 0
                return True
            what = "gradient" if isfinite(flat.sums[0]) else "loss"
            self._decide(what, step, [name for name, loss in seen if what == "gradient" or not torch.isfinite(loss)])
            return False
        self.first_bad = torch.where(torch.isfinite(total), self.first_bad, self.first_bad.clamp(max=step))
        if due and (bad := int(self.first_bad)) < NEVER:
            self._decide("loss", bad, self.job.names_of(bad))
        return True

    def _decide(self, what: str, step: int, own: list[str]) -> None:
        names = dict.fromkeys(name for rank in self.comm.gather(own) for name in rank)
        words = f"The {what} is not finite at step {step}, in the batch of {'; '.join(names)}."
        self.writer.wait()
        saved = [str(p) for p in checkpoint.of_run(self.job.prefix, self.job.run, step)] if self.comm.rank == 0 else []
        kept = self.comm.gather(saved)[0]
        self.skipped += 1
        if self.action == "skip" and self.skipped <= SKIPS:
            self._tell(f"{words} The step is skipped (training/on_nan).")
        elif self.action == "rewind" and kept and self.rewound.count(kept[-1]) < REWINDS:
            self._tell(f"{words} Back to {kept[-1]} (training/on_nan).")
            self._rewind(kept[-1], step)
        else:
            self._stop(words, kept)

    def _tell(self, words: str) -> None:
        if self.comm.rank == 0:
            log.warning(words)

    def _rewind(self, path: str, step: int) -> None:
        state = self.job.state
        self.rewound.append(path)
        if self.comm.rank == 0:
            state.restore(checkpoint.read(checkpoint.find(path)))
        state.broadcast(self.comm)
        state.model.prepare(self.job.input.training.table)
        state.step = step

    def _stop(self, words: str, kept: list[str]) -> None:
        where = f"The last good checkpoint is {kept[-1]}." if kept else "No checkpoint had been written."
        if self.action == "skip":
            where = f"That was the step number {self.skipped} in a row that was not. {where}"
        elif self.rewound:
            where = f"{REWINDS} times the run has gone back to it. {where}"
        raise UserError(
            f"{words} {where} Look for wrong labels or atoms too close in that system, or lower learning_rate/start_lr "
            "(or set training/gradient_max_norm)."
        )
