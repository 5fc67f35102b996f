"""Steps of PiNet2 over vectors, in the manner of pinet_steps.py: three rows for each atom, (3 N, c)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from allforce.models import pinet_kernels as kernels
from allforce.models.pinet_steps import Quantity, Step, Tape, numpy, pool


class Vectors(Step):
    """y_i = Σ_j (a_i + b_j + n) x_ij (3 N, c), with x the last c columns of `pairs`; a, b (3 N, c) or nothing."""

    def __init__(self, tape: Tape, pairs: Quantity, width: int, a: Quantity | None, b: Quantity | None):
        self.tape, self.pairs, self.a, self.b = tape.weak, pairs, a, b
        self.none = tape.like.new_empty(0, width)
        self.out = tape.quantity(3 * tape.natoms, width)
        self.x, self.pool = (*self._of("y"), *numpy(tape.unit, pairs.y)), pool(pairs.y)
        kernels.vectors(*self.x, tape.first, tape.j, self.out.y.zero_().numpy(), self.pool)
        tape.vectors = True
        tape.steps.append(self)

    def _of(self, name: str) -> list[np.ndarray]:
        return numpy(*(self.none if q is None else getattr(q, name) for q in (self.a, self.b)))

    def _make(self, name: str) -> None:
        """Zeros to add to, where nothing has been added yet."""
        for q in (self.a, self.b, self.pairs):
            if q is not None and getattr(q, name) is None:
                setattr(q, name, q.zeros())

    def back(self) -> None:
        self._make("hat")
        t, of_x = self.tape, numpy(self.tape.n_hat, self.pairs.hat)
        kernels.vectors_back(*self.x, t.i, t.j, self.out.hat.numpy(), *self._of("hat"), *of_x)

    def _dots(self) -> list[np.ndarray]:
        return [*self._of("dot"), *numpy(self.tape.n_dot, self.pairs.dot)]

    def tangent(self) -> None:
        t = self.tape
        kernels.vectors_tangent(*self.x, t.first, t.j, *self._dots(), self.out.dot.zero_().numpy(), self.pool)

    def adjoint(self) -> None:
        self._make("bar")
        t, of_y = self.tape, numpy(self.out.hat, self.out.bar)
        kernels.vectors_adjoint(*self.x, t.i, t.j, *self._dots(), *of_y, *self._of("bar"), self.pairs.bar.numpy())
        self.out.bar = None


class Product(Step):
    """y = product(a, b) of atoms, linear in both; its transpose gives the part of ŷ for a, with b given, and for b."""

    def __init__(self, tape: Tape, a: Quantity, b: Quantity):
        self.a, self.b = a, b
        y = self.product(a.y, b.y)
        self.out = tape.quantity(*y.shape)
        self.out.y.copy_(y)
        tape.steps.append(self)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError

    def for_a(self, y: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError

    def for_b(self, y: Tensor, a: Tensor) -> Tensor:
        raise NotImplementedError

    def back(self) -> None:
        self.a.add_hat(self.for_a(self.out.hat, self.b.y))
        self.b.add_hat(self.for_b(self.out.hat, self.a.y))

    def tangent(self) -> None:
        torch.add(self.product(self.a.dot, self.b.y), self.product(self.a.y, self.b.dot), out=self.out.dot)

    def adjoint(self) -> None:
        out, a, b = self.out, self.a, self.b
        self.a.add_bar(self.for_a(out.bar, b.y).add_(self.for_a(out.hat, b.dot)))
        self.b.add_bar(self.for_b(out.bar, a.y).add_(self.for_b(out.hat, a.dot)))
        out.bar = None


class Dot(Product):
    """y_c = Σ_x a_xc b_xc of vectors (3 N, c)."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * b).view(-1, 3, a.shape[1]).sum(1)

    def for_a(self, y: Tensor, b: Tensor) -> Tensor:
        return (b.view(-1, 3, b.shape[1]) * y[:, None, :]).view(b.shape)

    def for_b(self, y: Tensor, a: Tensor) -> Tensor:
        return self.for_a(y, a)


class Scaled(Product):
    """y_xc = a_xc b_c of vectors a (3 N, c) and scalars b (N, c)."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return (a.view(len(b), 3, b.shape[1]) * b[:, None, :]).view(a.shape)

    def for_a(self, y: Tensor, b: Tensor) -> Tensor:
        return self.product(y, b)

    def for_b(self, y: Tensor, a: Tensor) -> Tensor:
        return (y * a).view(-1, 3, a.shape[1]).sum(1)


class Columns(Step):
    """Of all columns side by side those from `begin` on."""

    def __init__(self, tape: Tape, parts: list[Quantity], begin: int, end: int):
        self.parts, self.span = parts, slice(begin, end)
        self.out = tape.quantity(len(parts[0].y), end - begin)
        self._fill("y")
        tape.steps.append(self)

    def _fill(self, name: str) -> None:
        getattr(self.out, name).copy_(torch.cat([getattr(q, name) for q in self.parts], 1)[:, self.span])

    def _split(self, value: Tensor) -> list[Tensor]:
        widths = [q.y.shape[1] for q in self.parts]
        whole = value.new_zeros(len(value), sum(widths))
        whole[:, self.span] = value
        return [part.contiguous() for part in whole.split(widths, 1)]

    def back(self) -> None:
        for q, part in zip(self.parts, self._split(self.out.hat), strict=True):
            q.add_hat(part)

    def tangent(self) -> None:
        self._fill("dot")

    def adjoint(self) -> None:
        for q, part in zip(self.parts, self._split(self.out.bar), strict=True):
            q.add_bar(part)
        self.out.bar = None
