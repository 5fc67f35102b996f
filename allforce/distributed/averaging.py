"""Gradients of any torch model as means over all workers, in one collective.

    wire = [ gradients of all parameters | 1 for each parameter that has one ]

At the end of a backward pass the gradients are copied into one buffer, added up over the workers, and `.grad` of every
parameter is from then on a view of that buffer. So whatever comes before the optimizer's step, clipping or a gradient
scaler, sees the mean and decides alike on every worker. A parameter without a gradient on one worker counts as zero
there; without one on any worker it has none, as in a serial run.

Adding further gradients to a mean and averaging again is right as well, because the mean is the same everywhere; with
`accumulate` or no_sync() it is done once a step only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from ..errors import UserError
from .comm import Comm
from .connect import agree

Named = nn.Module | Iterable[tuple[str, Tensor]] | None


def average_gradients(comm: Comm, optimizer: Optimizer, model: Named, accumulate: int) -> Optimizer:
    """The optimizer itself, with the methods synchronize(), skip_synchronize() and no_sync()."""
    averager = Averager(comm, optimizer, model, accumulate)
    for name in ("synchronize", "skip_synchronize", "no_sync"):
        setattr(optimizer, name, getattr(averager, name))
    return optimizer


class Averager:
    """Averages the gradients of an optimizer's parameters at the end of every `accumulate`-th backward pass."""

    def __init__(self, comm: Comm, optimizer: Optimizer, model: Named, accumulate: int):
        self.comm, self.optimizer, self.accumulate = comm, optimizer, accumulate
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters = [p for p in everything if p.requires_grad]
        self.frozen = [p for p in everything if not p.requires_grad]
        self.names = _names(self.parameters, model)
        self.count = len(everything)
        self.queued = self.paused = False
        self.passes = 0  # backward passes since the gradients were averaged
        self.averaged = False  # since the last step
        if comm.size == 1:
            return
        forms = [[name, str(p.dtype), list(p.shape)] for name, p in zip(self.names, self.parameters, strict=True)]
        agree(comm, "the parameters of the optimizer", forms)
        self._make_buffer()
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self._arrived)
        optimizer.register_step_pre_hook(self._before_step)

    def _make_buffer(self) -> None:
        devices = {p.device for p in self.parameters}
        if len(devices) != 1:
            raise UserError(
                f"DistributedOptimizer: the parameters are on {sorted(map(str, devices)) or 'no device'}. Expected all"
                " on one: model.to(ad.device())"
            )
        dtype = torch.float32
        for p in self.parameters:
            dtype = torch.promote_types(dtype, p.dtype)
        sizes = [p.numel() for p in self.parameters]
        self.wire = self.comm.buffer(sum(sizes) + len(sizes), dtype, devices.pop())
        *pieces, self.there = self.wire.split([*sizes, len(sizes)])
        self.gradients = self.wire[: sum(sizes)]
        self.views = [_like(piece, p) for piece, p in zip(pieces, self.parameters, strict=True)]

    # ---- when

    def _arrived(self, _: Tensor) -> None:
        """A parameter has its gradient: average when all have theirs, at the end of this backward pass."""
        if not self.queued:
            self.queued = True
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self.queued = False
        self.passes += 1
        if not self.paused and self.passes >= self.accumulate:
            self.synchronize()

    def _before_step(self, *_: Any) -> None:
        """What is not averaged yet is averaged now; a worker without a backward pass takes part as well."""
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != self.count or any(
            p.grad is not None for p in self.frozen
        ):
            raise UserError(
                "DistributedOptimizer: parameters were added to the optimizer, or began to be trained, after it was"
                " made. Make it again then"
            )
        if (self.passes or not self.averaged) and not self.paused:
            self.synchronize()
        self.queued = self.averaged = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add up on this worker."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    skip_synchronize = no_sync  # Horovod's name, around step() after synchronize()

    # ---- what

    def synchronize(self) -> None:
        """Average now."""
        if self.comm.size == 1:
            return
        gradients = [p.grad for p in self.parameters]
        missing = [n for n, g in enumerate(gradients) if g is None]
        moves = [(to, g) for to, g in zip(self.views, gradients, strict=True) if g is not None and g is not to]
        if moves:
            self._check_dense(gradients)
            torch._foreach_copy_([to for to, _ in moves], [g for _, g in moves])
        self.there.fill_(1)
        if missing:
            torch._foreach_zero_([self.views[n] for n in missing])
            self.there[missing] = 0
        self.gradients.mul_(1 / self.comm.size)
        self.comm.all_reduce_start(self.wire).wait()
        counts = self.there[missing].tolist() if missing else []  # only who has none itself needs to know
        nowhere = {n for n, count in zip(missing, counts, strict=True) if count == 0}
        for n, (p, view, g) in enumerate(zip(self.parameters, self.views, gradients, strict=True)):
            if n not in nowhere and g is not view:
                p.grad = view if view.dtype == p.dtype else view.to(p.dtype)
        self.passes, self.averaged = 0, True

    def _check_dense(self, gradients: list[Tensor | None]) -> None:
        for name, g in zip(self.names, gradients, strict=True):
            if g is not None and g.layout != torch.strided:
                raise UserError(
                    f"DistributedOptimizer: the gradient of {name} is sparse. Expected dense ones: make the layer with"
                    " sparse=False"
                )


def _like(piece: Tensor, parameter: Tensor) -> Tensor:
    """The piece in the parameter's shape, and in its order in memory where that has no holes (channels_last)."""
    shape, strides = parameter.shape, parameter.stride()
    dense = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return piece.as_strided(shape, strides, piece.storage_offset()) if dense else piece.view(shape)


def _names(parameters: list[Tensor], model: Named) -> list[str]:
    named = model.named_parameters() if isinstance(model, nn.Module) else model or ()
    known = {id(p): name for name, p in named}
    return [known.get(id(p), f"parameter {n}") for n, p in enumerate(parameters)]
