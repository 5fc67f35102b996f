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

The steps are compiled loops, so quantities and weights are NumPy arrays here, in memory from torch.
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

Array = np.ndarray


class Quantity:
    """y (rows, c), ŷ, ẏ, ȳ."""

    __slots__ = ("bar", "dot", "hat", "like", "y")

    def __init__(self, like: Tensor, rows: int, width: int, second: bool):
        both = like.new_empty(2 if second else 1, rows, width).numpy()
        self.like, self.y, self.dot = like, both[0], both[-1]
        self.hat: Any = None  # an array, once something was added
        self.bar: Any = None

    def has(self, name: str) -> bool:
        """Whether something was added to `hat` or `bar`; else there is room now for the first."""
        if getattr(self, name) is not None:
            return True
        setattr(self, name, self.like.new_empty(self.y.shape).numpy())
        return False

    def summed(self, name: str) -> Array:
        """`hat` or `bar` to add to: zeros at first."""
        if not self.has(name):
            getattr(self, name).fill(0.0)
        return getattr(self, name)


class Weight:
    """What is differentiated by. The steps may want its numbers in another order: view(shape).permute(order)."""

    def __init__(self, value: Tensor, shape: Sequence[int] = (), order: Sequence[int] = ()):
        self.own_shape, self.order, value = value.shape, order, value.detach()
        self.bar: Any = None
        if order:
            moved = value.view(tuple(shape)).permute(tuple(order))
            self.shape = moved.shape
            value = moved.reshape(len(moved), -1) if value.dim() > 1 else moved.flatten()
        self.value = value.numpy()

    def gradient(self) -> Tensor:
        bar, self.bar = torch.from_numpy(np.zeros_like(self.value) if self.bar is None else self.bar), None
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
        self.none = like.new_empty(0).numpy()
        self.out = self.out_bar = like.new_zeros(natoms).numpy()
        self.own = np.ones_like(self.out) if own is None else own.detach().to(like.dtype).numpy()
        r = r.detach()
        self.distance = torch.linalg.vector_norm(r, dim=1, keepdim=True)
        self.n = r / self.distance  # (E, 3)
        e, self.slope = basis.with_slope(self.distance[:, 0])
        self.e, self.unit = (x.to(like.dtype).contiguous().numpy() for x in (e, self.n))
        self.e_hat, self.n_hat = (like.new_zeros(x.shape).numpy() for x in (self.e, self.unit))
        self.vectors = False  # whether anything depends on n
        self.e_dot, self.n_dot = self.none, self.none

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
        gradient = (torch.from_numpy(self.e_hat) * self.slope).sum(1, keepdim=True) * self.n
        if self.vectors:
            gradient = gradient + self._across(torch.from_numpy(self.n_hat).double())
        apply: Callable = Recorded.apply
        return apply(self, torch.from_numpy(self.out).double(), gradient.double(), *self.inputs)

    def _across(self, v: Tensor) -> Tensor:
        """∂n/∂r · v, a symmetric matrix."""
        return (v - (v * self.n).sum(1, keepdim=True) * self.n) / self.distance

    def differentiate(self, out_bar: Tensor, v: Tensor) -> list[Tensor]:
        """∂Φ/∂w of all weights."""
        self.e_dot = (self.slope * (v * self.n).sum(1, keepdim=True)).to(self.like.dtype).numpy()
        if self.vectors:
            self.n_dot = self._across(v).to(self.like.dtype).numpy()
        self.out_bar = out_bar.to(self.like.dtype).contiguous().numpy()
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


def pool(x: Array) -> Pool:
    return threads(x.size // 64)  # a number of a pair takes a 64th of the time that pool.py calls an edge


def pool_of(x: Array, w: Array) -> Pool:
    """For the product of both: an edge takes as long as some 500 of its terms."""
    return threads(x.size * w.shape[1] // 512)


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
        dense_kernels.dense(x.y, w.value, tape.none if b is None else b.value, tanh, self.out.y, self.pool)
        tape.steps.append(self)

    def back(self) -> None:
        out, add = self.out, self.x.has("hat")
        dense_kernels.dense_back(out.y, out.hat, self.w.value, self.tanh, add, self.x.hat, self.pool)

    def tangent(self) -> None:
        dense_kernels.dense_tangent(self.x.dot, self.w.value, self.out.y, self.tanh, self.out.dot, self.pool)

    def adjoint(self) -> None:
        x, w, out, add = self.x, self.w, self.out, self.x.has("bar")
        w.bar, b_bar = np.empty_like(w.value), np.empty((1, w.value.shape[1]), w.value.dtype)
        arrays = x.y, x.dot, w.value, out.y, out.hat, out.dot, out.bar
        dense_kernels.dense_adjoint(*arrays, self.tanh, add, x.bar, w.bar, b_bar, self.pool)
        if self.b is not None:
            self.b.bar = b_bar[0, -len(self.b.value) :]
        out.bar = None


class Pairs(Step):
    """y = tanh(a_i + b_j) of pairs, with [a, b] of atoms."""

    def __init__(self, tape: Tape, x: Quantity):
        self.x, self.i, self.j = x, tape.i, tape.j
        self.out = tape.quantity(len(tape.i), x.y.shape[1] // 2)
        self.pool = pool(self.out.y)
        kernels.pairs(x.y, self.i, self.j, self.out.y, self.pool)
        tape.steps.append(self)

    def back(self) -> None:
        kernels.pairs_back(self.out.y, self.out.hat, self.i, self.j, self.x.summed("hat"))

    def tangent(self) -> None:
        kernels.pairs_tangent(self.x.dot, self.i, self.j, self.out.y, self.out.dot, self.pool)

    def adjoint(self) -> None:
        out = self.out
        kernels.pairs_adjoint(out.y, out.hat, out.dot, out.bar, self.i, self.j, self.x.summed("bar"))
        out.bar = None


class Interaction(Step):
    """I_c = Σ_b tanh(z_bc) e_b, z = x w + b."""

    def __init__(self, tape: Tape, x: Quantity, w: Weight, b: Weight, n_basis: int):
        self.tape, self.x, self.w, self.b = tape.weak, x, w, b
        shape = len(x.y), n_basis, w.value.shape[1] // n_basis
        self.out = tape.quantity(shape[0], shape[2])
        self.tanh = tape.like.new_empty(shape).numpy()
        self.dot = tape.like.new_empty(shape).numpy() if tape.second else self.tanh
        self.pool = pool_of(x.y, w.value)
        kernels.interaction_layer(x.y, w.value, b.value, self.tanh, tape.e, self.out.y, self.pool)
        tape.steps.append(self)

    def back(self) -> None:
        t, x, add = self.tape, self.x, self.x.has("hat")
        kernels.interaction_layer_back(self.tanh, t.e, self.out.hat, t.e_hat, self.w.value, add, x.hat, self.pool)

    def tangent(self) -> None:
        t, w = self.tape, self.w.value
        kernels.interaction_layer_tangent(self.x.dot, w, self.tanh, self.dot, t.e, t.e_dot, self.out.dot, self.pool)

    def adjoint(self) -> None:
        t, x, w, out, add = self.tape, self.x, self.w, self.out, self.x.has("bar")
        w.bar, b_bar = np.empty_like(w.value), np.empty((1, w.value.shape[1]), w.value.dtype)
        arrays = x.y, x.dot, w.value, self.tanh, self.dot, t.e, t.e_dot, out.hat, out.bar
        kernels.interaction_layer_adjoint(*arrays, add, x.bar, w.bar, b_bar, self.pool)
        self.b.bar, out.bar = b_bar[0], None


class Direct(Step):
    """I_c = Σ_b tanh(z_bc) e_b, z = a_i + b_j, with [a, b] of atoms."""

    def __init__(self, tape: Tape, x: Quantity, n_basis: int):
        self.tape, self.x = tape.weak, x
        rows, width = len(tape.i), x.y.shape[1] // 2 // n_basis
        self.out = tape.quantity(rows, width)
        self.shape = (-1, 2, n_basis, width)
        self.tanh = tape.like.new_empty(rows, n_basis, width).numpy()
        kernels.direct(x.y, tape.i, tape.j, self.tanh, tape.e, self.out.y, pool(self.tanh))
        tape.steps.append(self)

    def back(self) -> None:
        t, hat = self.tape, self.x.summed("hat")
        kernels.direct_back(self.tanh, t.e, self.out.hat, t.i, t.j, hat.reshape(self.shape), t.e_hat)

    def tangent(self) -> None:
        t, dot = self.tape, self.x.dot.reshape(self.shape)
        kernels.direct_tangent(self.tanh, dot, t.i, t.j, t.e, t.e_dot, self.out.dot)

    def adjoint(self) -> None:
        t, out, dot, bar = self.tape, self.out, self.x.dot.reshape(self.shape), self.x.summed("bar")
        arrays = t.e, t.e_dot, out.hat, out.bar, bar.reshape(self.shape)
        kernels.direct_adjoint(self.tanh, dot, t.i, t.j, *arrays)
        out.bar = None


class OfKinds(Step):
    """I_c = Σ_b w_bc e_b, with w (kinds, nb, c) of the kind of pair: that of its elements."""

    def __init__(self, tape: Tape, kind: Tensor, w: Tensor):
        self.tape, self.kind, self.w = tape.weak, kind.numpy(), tape.weight(w)
        self.out = tape.quantity(len(kind), w.shape[2])
        self.pool = pool(self.out.y)
        kernels.of_kinds(self.w.value, self.kind, tape.e, self.out.y, self.pool)
        tape.steps.append(self)

    def back(self) -> None:
        kernels.of_kinds_back(self.w.value, self.kind, self.out.hat, self.tape.e_hat, self.pool)

    def tangent(self) -> None:
        kernels.of_kinds(self.w.value, self.kind, self.tape.e_dot, self.out.dot, self.pool)

    def adjoint(self) -> None:
        t, out, self.w.bar = self.tape, self.out, np.zeros_like(self.w.value)
        kernels.of_kinds_adjoint(self.kind, t.e, t.e_dot, out.hat, out.bar, self.w.bar)
        out.bar = None


class SumOfPairs(Step):
    """y_i = Σ_j x_ij."""

    def __init__(self, tape: Tape, x: Quantity):
        self.x, self.i, self.first, self.pool = x, tape.i, tape.first, pool(x.y)
        self.out = tape.quantity(tape.natoms, x.y.shape[1])
        kernels.sum_of_pairs(x.y, self.first, self.out.y, self.pool)
        tape.steps.append(self)

    def back(self) -> None:
        add = self.x.has("hat")
        kernels.spread_to_pairs(self.out.hat, self.i, add, self.x.hat, self.pool)

    def tangent(self) -> None:
        kernels.sum_of_pairs(self.x.dot, self.first, self.out.dot, self.pool)

    def adjoint(self) -> None:
        add = self.x.has("bar")
        kernels.spread_to_pairs(self.out.bar, self.i, add, self.x.bar, self.pool)
        self.out.bar = None


class Residual(Step):
    """y = x + new of two quantities, or x w + new, or x + new with an x (rows, ·) that does not change with r."""

    def __init__(self, tape: Tape, x: Quantity | Tensor, w: Tensor | None, new: Quantity):
        self.x, self.new, self.w = x, new, None if w is None else tape.weight(w)
        self.out = tape.quantity(*new.y.shape)
        if isinstance(x, Quantity):
            assert w is None
            old = x.y
        else:
            old = x.numpy() if w is None else (x @ w.detach()).numpy()
        np.add(old, new.y, out=self.out.y)
        tape.steps.append(self)

    def back(self) -> None:
        self._split("hat")

    def tangent(self) -> None:
        if isinstance(self.x, Quantity):
            np.add(self.x.dot, self.new.dot, out=self.out.dot)
        else:
            self.out.dot[...] = self.new.dot

    def adjoint(self) -> None:
        self._split("bar")
        if self.w is not None and isinstance(self.x, Tensor):
            self.w.bar = (self.x.T @ torch.from_numpy(self.out.bar)).numpy()
        self.out.bar = None

    def _split(self, name: str) -> None:
        for part in (self.new, self.x):
            if isinstance(part, Quantity):
                dense_kernels.put(getattr(self.out, name), part.has(name), getattr(part, name))


class Out(Step):
    """out += ((x w_1 + b_1) w_2 + …) w = x u_0 + Σ_l b_l u_l with u_{l−1} = w_l u_l and u_L = w: a linear net."""

    def __init__(self, tape: Tape, x: Quantity, layers: list[tuple[Weight, Weight]], last: Weight):
        self.tape, self.x, self.layers, self.last = tape.weak, x, layers, last
        self.u, constant = [last.value[:, 0]], 0.0
        for w, b in reversed(layers):
            constant += float((b.value * self.u[0]).sum())
            self.u.insert(0, (w.value * self.u[0]).sum(1))
        kernels.out(x.y, self.u[0], constant, tape.out)
        tape.steps.append(self)

    def back(self) -> None:
        add = self.x.has("hat")
        kernels.add_outer(self.tape.own, self.u[0], add, self.x.hat)

    def adjoint(self) -> None:
        bar, x, u_bar = self.tape.out_bar, self.x, np.empty_like(self.u[0])
        kernels.out_adjoint(x.y, bar, x.dot, self.tape.own, u_bar)
        total = bar.sum()
        for (w, b), u in zip(self.layers, self.u[1:], strict=True):
            w.bar, b.bar = u_bar[:, None] * u, u * total
            u_bar = b.value * total + (w.value * u_bar[:, None]).sum(0)
        self.last.bar = u_bar[:, None]
        add = x.has("bar")
        kernels.add_outer(bar, self.u[0], add, x.bar)
