"""PiNet's output with its gradient, and the derivative of both by the weights, written by hand.

The network is recorded as steps y = f(x; w) that follow each other. Of each quantity y four things are computed, each
in one sweep over the steps:

    y                                     the value, forwards
    ŷ = ∂E/∂y,  E = Σ_i own_i out_i       backwards; with it ∂E/∂r
    ẏ = ∂y/∂r · v                         forwards, once the adjoint v of ∂E/∂r is known
    ȳ = ∂Φ/∂y,  Φ = Σ_i ē_i out_i + Ė     backwards; with it ∂Φ/∂w, because <v, ∂E/∂r> = Ė

For a dense layer y = tanh(z), z = x w + b, with s = 1 − y²:

    ẑ = ŷ s,  x̂ = ẑ wᵀ      ż = ẋ w,  ẏ = ż s      z̄ = ȳ s − 2 y ŷ ẏ,  x̄ = z̄ wᵀ,  w̄ = xᵀ z̄ + ẋᵀ ẑ,  b̄ = Σ z̄

six products with each w, as in scalar_net.py. Nothing is differentiated by r twice: no loss needs it. What does not
depend on r (w of pairs of elements, the linear output nets as one vector) is made by autograd before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allforce.data.batch import Edges
from allforce.models import dense_kernels
from allforce.models import pinet_kernels as kernels
from allforce.models.pool import Pool, threads


class Quantity:
    """y (rows, c), ŷ, ẏ, ȳ; y and ẏ are halves of one tensor, so that xᵀ z̄ + ẋᵀ ẑ is one product."""

    __slots__ = ("bar", "both", "dot", "hat", "y")

    def __init__(self, like: Tensor, rows: int, width: int, second: bool):
        self.both = like.new_empty(2 if second else 1, rows, width)
        self.y, self.dot = self.both[0], self.both[-1]
        self.hat: Any = None  # a tensor, once something was added
        self.bar: Any = None

    def zeros(self) -> Tensor:
        return torch.zeros_like(self.y)

    def has(self, name: str) -> bool:
        """Whether something was added to `hat` or `bar`; else there is room now for the first."""
        if getattr(self, name) is not None:
            return True
        setattr(self, name, torch.empty_like(self.y))
        return False

    def add_hat(self, value: Tensor) -> None:
        self.hat = value if self.hat is None else self.hat.add_(value)

    def add_bar(self, value: Tensor) -> None:
        self.bar = value if self.bar is None else self.bar.add_(value)


class Weight:
    """What is differentiated by. The steps may want its numbers in another order: view(shape).permute(order)."""

    def __init__(self, value: Tensor, shape: Sequence[int] = (), order: Sequence[int] = ()):
        self.own_shape, self.order, self.value = value.shape, order, value.detach()
        self.bar: Any = None
        if order:
            moved = self.value.view(tuple(shape)).permute(tuple(order))
            self.shape = moved.shape
            self.value = moved.reshape(len(moved), -1) if value.dim() > 1 else moved.flatten()

    def gradient(self) -> Tensor:
        bar, self.bar = torch.zeros_like(self.value) if self.bar is None else self.bar, None
        if not self.order:
            return bar
        back = sorted(range(len(self.order)), key=lambda k: self.order[k])
        return bar.view(self.shape).permute(back).reshape(self.own_shape)


class Tape:
    """The pairs, and the steps over them and their atoms."""

    def __init__(self, edges: Edges, r: Tensor, own: Tensor | None, natoms: int, like: Tensor, basis: Any):
        self.second = torch.is_grad_enabled()
        self.steps: list[Step] = []
        self.weak: Tape = weakref.proxy(self)  # for steps: in a circle, memory would wait for the garbage collector
        self.inputs: list[Tensor] = []
        self.weights: list[Weight] = []
        self.edges, self.natoms, self.like = edges, natoms, like
        self.i, self.j, self.first = edges.i.numpy(), edges.j.numpy(), edges.first.numpy()
        self.none = like.new_empty(0)
        self.out = self.out_bar = like.new_zeros(natoms, 1)
        self.own = torch.ones_like(self.out) if own is None else own.detach().to(like.dtype)[:, None]
        r = r.detach()
        self.distance = torch.linalg.vector_norm(r, dim=1, keepdim=True)
        self.n = r / self.distance  # (E, 3)
        e, slope = basis.with_slope(self.distance[:, 0])
        self.e, self.slope, self.unit = (x.to(like.dtype).contiguous() for x in (e, slope, self.n))
        self.e_hat, self.n_hat = torch.zeros_like(self.e), torch.zeros_like(self.unit)
        self.vectors = False  # whether anything depends on n
        self.e_dot, self.n_dot = torch.empty_like(self.e), torch.empty_like(self.unit)

    def weight(self, value: Tensor, shape: Sequence[int] = (), order: Sequence[int] = ()) -> Weight:
        self.inputs.append(value)
        self.weights.append(Weight(value, shape, order))
        return self.weights[-1]

    def quantity(self, rows: int, width: int) -> Quantity:
        return Quantity(self.like, rows, width, self.second)

    def results(self) -> tuple[Tensor, Tensor]:
        """out_i (N,) and ∂E/∂r (E, 3) in float64; in grad mode both can be differentiated by the weights."""
        used: list[Step] = []
        for step in reversed(self.steps):
            if step.out is None or step.out.hat is not None:  # the vectors of the last block do nothing
                step.back()
                used.insert(0, step)
        self.steps = used
        gradient = (self.e_hat * self.slope).sum(1, keepdim=True) * self.n
        if self.vectors:
            gradient = gradient + self._across(self.n_hat.double())
        apply: Callable = Recorded.apply
        return apply(self, self.out[:, 0].double(), gradient.double(), *self.inputs)

    def _across(self, v: Tensor) -> Tensor:
        """∂n/∂r · v, a symmetric matrix."""
        return (v - (v * self.n).sum(1, keepdim=True) * self.n) / self.distance

    def differentiate(self, out_bar: Tensor, v: Tensor) -> list[Tensor]:
        """∂Φ/∂w of all weights."""
        self.e_dot.copy_(self.slope * (v * self.n).sum(1, keepdim=True))
        if self.vectors:
            self.n_dot.copy_(self._across(v))
        self.out_bar = out_bar[:, None].to(self.like.dtype)
        for step in self.steps:
            step.tangent()
        for step in reversed(self.steps):
            step.adjoint()
        return [w.gradient() for w in self.weights]


class Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tape: Tape, out: Tensor, gradient: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.tape = tape if any(ctx.needs_input_grad) else None
        return out, gradient

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, out_bar: Tensor, v: Tensor):
        return None, None, None, *ctx.tape.differentiate(out_bar, v)


def numpy(*tensors: Tensor) -> list[np.ndarray]:
    return [x.numpy() for x in tensors]


def pool(x: Tensor) -> Pool:
    return threads(x.numel() // 64)  # a number of a pair takes a 64th of the time that pool.py calls an edge


def pool_of(x: Tensor, w: Tensor) -> Pool:
    """For the product of both: an edge takes as long as some 500 of its terms."""
    return threads(x.numel() * w.shape[1] // 512)


class Step:
    out: Any = None  # a Quantity, of all but the last steps

    def back(self) -> None: ...
    def tangent(self) -> None: ...
    def adjoint(self) -> None: ...


class Dense(Step):
    """y = tanh(x w + b) or x w + b; a short b belongs to the last columns."""

    def __init__(self, tape: Tape, x: Quantity, w: Weight, b: Weight | None, tanh: bool = True):
        self.x, self.w, self.b, self.tanh = x, w, b, tanh
        self.out = tape.quantity(len(x.y), w.value.shape[1])
        self.pool = pool_of(x.y, w.value)
        bias = tape.none if b is None else b.value
        dense_kernels.dense(*numpy(x.y, w.value, bias), tanh, self.out.y.numpy(), self.pool)
        tape.steps.append(self)

    def back(self) -> None:
        arrays, add = numpy(self.out.y, self.out.hat, self.w.value), self.x.has("hat")
        dense_kernels.dense_back(*arrays, self.tanh, add, self.x.hat.numpy(), self.pool)

    def tangent(self) -> None:
        arrays = numpy(self.x.dot, self.w.value, self.out.y)
        dense_kernels.dense_tangent(*arrays, self.tanh, self.out.dot.numpy(), self.pool)

    def adjoint(self) -> None:
        x, w, out, add = self.x, self.w, self.out, self.x.has("bar")
        w.bar, b_bar = torch.empty_like(w.value), w.value.new_empty(1, w.value.shape[1])
        arrays = numpy(x.y, x.dot, w.value, out.y, out.hat, out.dot, out.bar)
        dense_kernels.dense_adjoint(*arrays, self.tanh, add, *numpy(x.bar, w.bar, b_bar), self.pool)
        if self.b is not None:
            self.b.bar = b_bar[0, -len(self.b.value) :]
        out.bar = None


class Pairs(Step):
    """y = tanh(a_i + b_j) of pairs, with [a, b] of atoms."""

    def __init__(self, tape: Tape, x: Quantity):
        self.x, self.i, self.j = x, tape.i, tape.j
        self.out = tape.quantity(len(tape.i), x.y.shape[1] // 2)
        self.pool = pool(self.out.y)
        kernels.pairs(x.y.numpy(), self.i, self.j, self.out.y.numpy(), self.pool)
        tape.steps.append(self)

    def back(self) -> None:
        hat = self.x.zeros()
        kernels.pairs_back(*numpy(self.out.y, self.out.hat), self.i, self.j, hat.numpy())
        self.x.add_hat(hat)

    def tangent(self) -> None:
        kernels.pairs_tangent(self.x.dot.numpy(), self.i, self.j, *numpy(self.out.y, self.out.dot), self.pool)

    def adjoint(self) -> None:
        out, bar = self.out, self.x.zeros()
        kernels.pairs_adjoint(*numpy(out.y, out.hat, out.dot, out.bar), self.i, self.j, bar.numpy())
        self.x.add_bar(bar)
        out.bar = None


class Interaction(Step):
    """I_c = Σ_b tanh(z_bc) e_b, z = x w + b."""

    def __init__(self, tape: Tape, x: Quantity, w: Weight, b: Weight, n_basis: int):
        self.tape, self.x, self.w, self.b = tape.weak, x, w, b
        rows, width = len(x.y), w.value.shape[1] // n_basis
        self.out = tape.quantity(rows, width)
        self.tanh = x.y.new_empty(rows, n_basis, width)
        self.dot = torch.empty_like(self.tanh) if tape.second else self.tanh
        self.pool = pool_of(x.y, w.value)
        kernels.interaction_layer(*numpy(x.y, w.value, b.value, self.tanh, tape.e, self.out.y), self.pool)
        tape.steps.append(self)

    def back(self) -> None:
        t, add = self.tape, self.x.has("hat")
        arrays = numpy(self.tanh, t.e, self.out.hat, t.e_hat, self.w.value)
        kernels.interaction_layer_back(*arrays, add, self.x.hat.numpy(), self.pool)

    def tangent(self) -> None:
        t = self.tape
        arrays = numpy(self.x.dot, self.w.value, self.tanh, self.dot, t.e, t.e_dot, self.out.dot)
        kernels.interaction_layer_tangent(*arrays, self.pool)

    def adjoint(self) -> None:
        t, x, w, out, add = self.tape, self.x, self.w, self.out, self.x.has("bar")
        w.bar, b_bar = torch.empty_like(w.value), w.value.new_empty(1, w.value.shape[1])
        arrays = numpy(x.y, x.dot, w.value, self.tanh, self.dot, t.e, t.e_dot, out.hat, out.bar)
        kernels.interaction_layer_adjoint(*arrays, add, *numpy(x.bar, w.bar, b_bar), self.pool)
        self.b.bar, out.bar = b_bar[0], None


class Direct(Step):
    """I_c = Σ_b tanh(z_bc) e_b, z = a_i + b_j, with [a, b] of atoms."""

    def __init__(self, tape: Tape, x: Quantity, n_basis: int):
        self.tape, self.x = tape.weak, x
        rows, width = len(tape.i), x.y.shape[1] // 2 // n_basis
        self.out = tape.quantity(rows, width)
        self.shape = (-1, 2, n_basis, width)
        self.tanh = x.y.new_empty(rows, n_basis, width)
        arrays = numpy(self.tanh, tape.e, self.out.y)
        kernels.direct(x.y.numpy(), tape.i, tape.j, *arrays, pool(self.tanh))
        tape.steps.append(self)

    def back(self) -> None:
        t, hat = self.tape, self.x.zeros()
        arrays = numpy(hat.view(self.shape), t.e_hat)
        kernels.direct_back(*numpy(self.tanh, t.e, self.out.hat), t.i, t.j, *arrays)
        self.x.add_hat(hat)

    def tangent(self) -> None:
        t = self.tape
        arrays = numpy(t.e, t.e_dot, self.out.dot)
        kernels.direct_tangent(*numpy(self.tanh, self.x.dot.view(self.shape)), t.i, t.j, *arrays)

    def adjoint(self) -> None:
        t, out, bar = self.tape, self.out, self.x.zeros()
        arrays = numpy(t.e, t.e_dot, out.hat, out.bar, bar.view(self.shape))
        kernels.direct_adjoint(*numpy(self.tanh, self.x.dot.view(self.shape)), t.i, t.j, *arrays)
        self.x.add_bar(bar)
        out.bar = None


class OfKinds(Step):
    """I_c = Σ_b w_bc e_b, with w (kinds, nb, c) of the kind of pair: that of its elements."""

    def __init__(self, tape: Tape, kind: Tensor, w: Tensor):
        self.tape, self.kind, self.w = tape.weak, kind.numpy(), tape.weight(w)
        self.out = tape.quantity(len(kind), w.shape[2])
        self.pool = pool(self.out.y)
        kernels.of_kinds(self.w.value.numpy(), self.kind, *numpy(tape.e, self.out.y), self.pool)
        tape.steps.append(self)

    def back(self) -> None:
        kernels.of_kinds_back(self.w.value.numpy(), self.kind, *numpy(self.out.hat, self.tape.e_hat), self.pool)

    def tangent(self) -> None:
        kernels.of_kinds(self.w.value.numpy(), self.kind, *numpy(self.tape.e_dot, self.out.dot), self.pool)

    def adjoint(self) -> None:
        t, out, self.w.bar = self.tape, self.out, torch.zeros_like(self.w.value)
        kernels.of_kinds_adjoint(self.kind, *numpy(t.e, t.e_dot, out.hat, out.bar, self.w.bar))
        out.bar = None


class SumOfPairs(Step):
    """y_i = Σ_j x_ij."""

    def __init__(self, tape: Tape, x: Quantity):
        self.x, self.i, self.first, self.pool = x, tape.i, tape.first, pool(x.y)
        self.out = tape.quantity(tape.natoms, x.y.shape[1])
        self._sum(x.y, self.out.y)
        tape.steps.append(self)

    def _sum(self, x: Tensor, y: Tensor) -> None:
        kernels.sum_of_pairs(x.numpy(), self.first, y.zero_().numpy(), self.pool)

    def _spread(self, y: Tensor, x: Tensor | None) -> Tensor:
        x = torch.zeros_like(self.x.y) if x is None else x
        kernels.add_to_pairs(y.numpy(), self.i, x.numpy(), self.pool)
        return x

    def back(self) -> None:
        self.x.hat = self._spread(self.out.hat, self.x.hat)

    def tangent(self) -> None:
        self._sum(self.x.dot, self.out.dot)

    def adjoint(self) -> None:
        self.x.bar = self._spread(self.out.bar, self.x.bar)
        self.out.bar = None


class Residual(Step):
    """y = x w + new, or x + new; x may be a tensor that does not change with r."""

    def __init__(self, tape: Tape, x: Quantity | Tensor, w: Tensor | None, new: Quantity):
        self.x, self.new, self.w = x, new, None if w is None else tape.weight(w)
        self.out = tape.quantity(*new.y.shape)
        self._add(x if isinstance(x, Tensor) else x.y, new.y, self.out.y)
        tape.steps.append(self)

    def _add(self, x: Tensor, new: Tensor, out: Tensor) -> None:
        if self.w is None:
            torch.add(x, new, out=out)
        else:
            torch.addmm(new, x, self.w.value, out=out)

    def _split(self, g: Tensor) -> Tensor:
        return g.clone() if self.w is None else g @ self.w.value.T

    def back(self) -> None:
        self.new.add_hat(self.out.hat.clone())
        if isinstance(self.x, Quantity):
            self.x.add_hat(self._split(self.out.hat))

    def tangent(self) -> None:
        if isinstance(self.x, Quantity):
            self._add(self.x.dot, self.new.dot, self.out.dot)
        else:
            self.out.dot.copy_(self.new.dot)

    def adjoint(self) -> None:
        bar = self.out.bar
        self.new.add_bar(bar.clone())
        if isinstance(self.x, Quantity):
            self.x.add_bar(self._split(bar))
            if self.w is not None:
                self.w.bar = torch.addmm(self.x.y.T @ bar, self.x.dot.T, self.out.hat)
        elif self.w is not None:
            self.w.bar = self.x.T @ bar
        self.out.bar = None


class Out(Step):
    """out += ((x w_1 + b_1) w_2 + …) w = x u_0 + Σ_l b_l u_l with u_{l−1} = w_l u_l and u_L = w: a linear net."""

    def __init__(self, tape: Tape, x: Quantity, layers: list[tuple[Weight, Weight]], last: Weight):
        self.tape, self.x, self.layers, self.last = tape.weak, x, layers, last
        self.u = [last.value]
        for w, b in reversed(layers):
            tape.out += b.value @ self.u[0]
            self.u.insert(0, w.value @ self.u[0])
        tape.out.addmm_(x.y, self.u[0])
        tape.steps.append(self)

    def back(self) -> None:
        self.x.add_hat(self.tape.own * self.u[0].T)

    def adjoint(self) -> None:
        bar = self.tape.out_bar
        total, u_bar = bar.sum(), torch.addmm(self.x.y.T @ bar, self.x.dot.T, self.tape.own)
        for (w, b), u in zip(self.layers, self.u[1:], strict=True):
            w.bar, b.bar = u_bar @ u.T, u[:, 0] * total
            u_bar = torch.addmm(b.value[:, None] * total, w.value.T, u_bar)
        self.last.bar = u_bar
        self.x.add_bar(bar * self.u[0].T)
