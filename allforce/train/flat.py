"""All trainable parameters as one flat tensor, all their gradients as one buffer.

    wire = [ gradients of all parameters | metric sums | flags ]         one collective a step sends it whole

With a gradient_precision of its own the gradient is cast and sent alone, and the sums go beside it as they are.

The model's parameters are views of the flat tensor, so the optimizer is one fused call on one tensor (one for each
dtype, should a model mix them) and a step has no Python loop over parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from allforce.distributed.comm import Comm, Work
from allforce.train.stopping import FLAGS

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FlatParameters:
    """The trainable parameters of a model, their gradients, and room for `n_sums` numbers that ride along.

    `share`: the parameters too lie where the collective likes them, for workers that each update some of them.
    """

    def __init__(
        self,
        model: nn.Module,
        n_sums: int,
        precision: str | None = None,
        allocate: Callable[..., Tensor] = torch.zeros,
        share: bool = False,
    ):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        dtypes = sorted({p.dtype for _, p in named}, key=lambda d: -d.itemsize)
        named.sort(key=lambda item: dtypes.index(item[1].dtype))  # stable: one contiguous stretch for each dtype
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        sizes = [p.numel() for p in self.parameters]
        self.size = sum(sizes)
        device = self.parameters[0].device
        count = self.size + n_sums + FLAGS
        self.wire = (torch.zeros if precision else allocate)(count, dtype=dtypes[0], device=device)
        self.gradient, rest = self.wire[: self.size], self.wire[self.size :]
        self.sums, self.flags = rest[:n_sums], rest[n_sums:]
        self._sent: list[tuple[Tensor, Tensor]] = []  # what is cast, and what the collectives then add up
        if precision:
            for part, dtype in ((self.gradient, WIRE_DTYPES[precision]), (rest, dtypes[0])):
                self._sent.append((part, allocate(part.numel(), dtype=dtype, device=device)))
        self._gradients = self._views(self.gradient, self.parameters)
        self._further: Tensor | None = None  # the gradient of a micro-batch that is not the first
        self.passes = 0  # backward passes so far
        self.gradient_views = dict(zip(self.names, self._gradients, strict=True))
        self.flat: list[Tensor] = []  # one for each dtype
        for dtype in dtypes:
            group = [p for p in self.parameters if p.dtype == dtype]
            flat = torch.cat([p.detach().reshape(-1) for p in group])
            if share:
                flat = allocate(len(flat), dtype=dtype, device=device).copy_(flat)
            for parameter, view in zip(group, self._views(flat, group), strict=True):
                parameter.data = view
            self.flat.append(flat)

    @staticmethod
    def _views(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
        pieces = flat.split([p.numel() for p in parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]

    def write_directly(self) -> None:
        """Let functions write gradients straight into the buffer; only when a step has one micro-batch."""
        for parameter, target in zip(self.parameters, self._gradients, strict=True):
            if parameter.dtype == target.dtype:
                parameter.gradient_target = GradientTarget(target, self)  # type: ignore[attr-defined]

    def differentiate(self, loss: Tensor, sums: Tensor, scale: float, first: bool) -> None:
        """Set (first) or add scale·∂loss/∂parameters and the metric sums of one micro-batch.

        The gradient of a micro-batch is complete before it is added, so that two workers with one micro-batch each and
        one worker with two add the same two numbers.
        """
        self.passes += 1
        gradients = torch.autograd.grad(loss * scale, self.parameters, materialize_grads=True)
        if first:  # what a function has put into its target already stays there
            moves = [(to, g) for to, g in zip(self._gradients, gradients, strict=True) if to.data_ptr() != g.data_ptr()]
            if moves:
                torch._foreach_copy_([to for to, _ in moves], [g for _, g in moves])
            self.sums.copy_(sums)
        else:
            torch._foreach_add_(self._gradients, gradients)
            self.sums.add_(sums)

    def take(self, write: Callable[[list[Tensor]], None], sums: Tensor, first: bool) -> None:
        """The same for a micro-batch whose gradient is written by `write` into tensors like the parameters."""
        if first:
            write(self._gradients)
            self.sums.copy_(sums)
            return
        if self._further is None:
            self._further = torch.zeros_like(self.gradient)
            self._further_views = self._views(self._further, self.parameters)
        write(self._further_views)
        self.gradient.add_(self._further)
        self.sums.add_(sums)

    def reduce_start(self, comm: Comm) -> list[Work]:
        """Begin to add up the buffers of all workers: the one collective of a step (two where gradients are cast)."""
        if not self._sent or comm.size == 1:
            return [comm.all_reduce_start(self.wire)]
        for part, buffer in self._sent:
            buffer.copy_(part)
        return [comm.all_reduce_start(buffer) for _, buffer in self._sent]

    def reduce_finish(self, works: list[Work], comm: Comm) -> None:
        for work in works:
            work.wait()
        if comm.size > 1:
            for part, buffer in self._sent:
                part.copy_(buffer)

    def clip(self, max_norm: float) -> None:
        """g ← g·min(1, max_norm/|g|), on the device, nothing is waited for."""
        norm = torch.linalg.vector_norm(self.gradient)
        self.gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))

    def gradients(self) -> list[Tensor]:
        """The gradient of each flat tensor: slices of the buffer, cast only where the model mixes dtypes."""
        pieces = self.gradient.split([flat.numel() for flat in self.flat])
        return [piece.to(flat.dtype) for piece, flat in zip(pieces, self.flat, strict=True)]

    def copy(self) -> dict[str, Tensor]:
        """The parameters of now by name, for who looks at them later."""
        return self.split([flat.clone() for flat in self.flat])

    def split(self, per_flat: list[Tensor]) -> dict[str, Tensor]:
        """Tensors shaped like the flat ones (the optimizer's moments) by parameter name."""
        views: list[Tensor] = []
        for tensor, flat in zip(per_flat, self.flat, strict=True):
            views += self._views(tensor, [p for p in self.parameters if p.dtype == flat.dtype])
        return dict(zip(self.names, views, strict=True))


class GradientTarget:
    """The target of a parameter's gradient in the buffer, for the first of a backward pass that asks for it.

    A net that is used twice has two gradients, which autograd adds: the second must not lie where the first does.
    """

    def __init__(self, target: Tensor, owner: FlatParameters):
        self.target, self.owner, self.taken = target, owner, -1

    def take(self) -> Tensor | None:
        if self.taken == self.owner.passes:
            return None
        self.taken = self.owner.passes
        return self.target
