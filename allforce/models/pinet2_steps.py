"""Steps of PiNet2 over vectors, in the manner of pinet_steps.py: three rows for each atom, (3 N, c)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from allforce.models import pinet2_kernels as kernels
from allforce.models.pinet_steps import Array, Quantity, Step, Tape, pool


class Vectors(Step):
    """y_i = Σ_j (a_i + b_j + n) x_ij (3 N, c), with x the last c columns of `pairs`; a, b (3 N, c) or nothing."""

    def __init__(self, tape: Tape, pairs: Quantity, width: int, a: Quantity | None, b: Quantity | None):
        self.tape, self.pairs, self.a, self.b = tape.weak, pairs, a, b
        self.none = np.empty((0, width), pairs.y.dtype)
        self.out = tape.quantity(3 * tape.natoms, width)
        self.x, self.pool = (*self._of("y"), tape.unit, pairs.y), pool(pairs.y)
        self.out.y.fill(0.0)
        kernels.vectors(*self.x, tape.first, tape.j, self.out.y, self.pool)
        tape.vectors = True
        tape.steps.append(self)

    def _of(self, name: str) -> list[Array]:
        return [self.none if q is None else getattr(q, name) for q in (self.a, self.b)]

    def _summed(self, name: str) -> list[Array]:
        return [self.none if q is None else q.summed(name) for q in (self.a, self.b)]

    def back(self) -> None:
        t, hats = self.tape, self._summed("hat")
        kernels.vectors_back(*self.x, t.i, t.j, self.out.hat, *hats, t.n_hat, self.pairs.summed("hat"))

    def _dots(self) -> list[Array]:
        return [*self._of("dot"), self.tape.n_dot, self.pairs.dot]

    def tangent(self) -> None:
        t = self.tape
        self.out.dot.fill(0.0)
        kernels.vectors_tangent(*self.x, t.first, t.j, *self._dots(), self.out.dot, self.pool)

    def adjoint(self) -> None:
        t, out, bars = self.tape, self.out, self._summed("bar")
        kernels.vectors_adjoint(*self.x, t.i, t.j, *self._dots(), out.hat, out.bar, *bars, self.pairs.summed("bar"))
        out.bar = None


class Product(Step):
    """y = product(a, b) of atoms, linear in both; for_a(ŷ, b) is the part of ŷ for a, for_b(ŷ, a) that for b.

    Each takes whether to add to its result, and the result.
    """

    product: Callable
    for_a: Callable
    for_b: Callable

    def __init__(self, tape: Tape, a: Quantity, b: Quantity, rows: int):
        self.a, self.b = a, b
        self.out = tape.quantity(rows, a.y.shape[1])
        self.product(a.y, b.y, False, self.out.y)
        tape.steps.append(self)

    def back(self) -> None:
        self.for_a(self.out.hat, self.b.y, self.a.has("hat"), self.a.hat)
        self.for_b(self.out.hat, self.a.y, self.b.has("hat"), self.b.hat)

    def tangent(self) -> None:
        self.product(self.a.dot, self.b.y, False, self.out.dot)
        self.product(self.a.y, self.b.dot, True, self.out.dot)

    def adjoint(self) -> None:
        out, a, b = self.out, self.a, self.b
        self.for_a(out.bar, b.y, a.has("bar"), a.bar)
        self.for_a(out.hat, b.dot, True, a.bar)
        self.for_b(out.bar, a.y, b.has("bar"), b.bar)
        self.for_b(out.hat, a.dot, True, b.bar)
        out.bar = None


class Dot(Product):
    """y_c = Σ_x a_xc b_xc of vectors (3 N, c)."""

    def __init__(self, tape: Tape, a: Quantity, b: Quantity):
        super().__init__(tape, a, b, len(a.y) // 3)

    def product(self, a: Array, b: Array, add: bool, y: Array) -> None:
        kernels.dots(a, b, add, y)

    def for_a(self, y: Array, b: Array, add: bool, a: Array) -> None:
        kernels.scaled(b, y, add, a)

    for_b = for_a


class Scaled(Product):
    """y_xc = a_xc b_c of vectors a (3 N, c) and scalars b (N, c)."""

    def __init__(self, tape: Tape, a: Quantity, b: Quantity):
        super().__init__(tape, a, b, len(a.y))

    def product(self, a: Array, b: Array, add: bool, y: Array) -> None:
        kernels.scaled(a, b, add, y)

    for_a = product

    def for_b(self, y: Array, a: Array, add: bool, b: Array) -> None:
        kernels.dots(y, a, add, b)


class Columns(Step):
    """Of all columns side by side those from `begin` on."""

    def __init__(self, tape: Tape, parts: list[Quantity], begin: int, end: int):
        self.parts, self.span = parts, slice(begin, end)
        self.out = tape.quantity(len(parts[0].y), end - begin)
        self._fill("y")
        tape.steps.append(self)

    def _fill(self, name: str) -> None:
        getattr(self.out, name)[...] = np.concatenate([getattr(q, name) for q in self.parts], 1)[:, self.span]

    def _split(self, name: str) -> None:
        value, begin = getattr(self.out, name), 0
        for q in self.parts:
            end = begin + q.y.shape[1]
            first, last = max(begin, self.span.start), min(end, self.span.stop)
            target = q.summed(name)[:, first - begin : last - begin]
            target += value[:, first - self.span.start : last - self.span.start]
            begin = end

    def back(self) -> None:
        self._split("hat")

    def tangent(self) -> None:
        self._fill("dot")

    def adjoint(self) -> None:
        self._split("bar")
        self.out.bar = None
