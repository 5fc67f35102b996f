"""The fast path: spline moments of the neighbourhood of every atom, with closed-form derivatives.

    A_i,t,k = Σ_{e of i, type t} B_k(x_e) Y_e  + (sel_t − n_it) B_k(p_0) p     x_e = R̂_e0,  p = −davg/dstd of the centre
    T_i     = Σ_t,k A_i,t,k ⊗ C_t,k                                            C: the embedding nets as splines
    ∂E/∂r_e = pull(∂E/∂A),  ∂E/∂A = ∂E/∂T Cᵀ,  and for losses on forces its adjoint push(v): all of them linear

The row Y_e of an edge is R̂_e, or w(r_e) R̂_e with the switch function w, or the number 1 (se_e2_r; p too is 1 then,
and a neighbour of an excluded type is at x = 0).
A holds geometry only, no parameters. So the nets are evaluated on the K nodes of a grid instead of on every neighbour.
With many types A is made for some neighbour types at a time and made again when it is needed: it costs little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from allforce.data.batch import Edges
from allforce.models import frozen_table, kernels
from allforce.models.envmat import environment, switch
from allforce.models.pool import Pool, threads
from allforce.models.products import tiles_of, whole_strips
from allforce.models.spline import WIDTH, Grid
from allforce.trace import MOMENTS, phase

Row = Literal["R", "w R", "1"]
MOMENTS_BYTES = 256 << 20  # a larger A is made piece by piece
ATOMS = 8  # that a thread takes together, with a table that is not trained


@dataclass
class Geometry:
    """The edges of a batch, and how a descriptor looks at them."""

    r: Tensor  # (E, 3)
    edges: Edges
    type: Tensor  # (N,)
    type_counts: tuple[int, ...]  # (nt,)
    center: Tensor  # (nt, 3) davg, 1/dstd radial, 1/dstd angular of the centre type
    used: Tensor  # (nt, nt) bool, False for excluded (centre, neighbour) types
    sel: Tensor  # (groups,) float64 slots of neighbour types; 0: empty ones are counted elsewhere
    rs: float
    rc: float
    protection: float
    r_close: float  # closer neighbours are beyond the grid and are left to the exact path
    grid: Grid
    dtype: torch.dtype
    row: Row = "R"  # Y_e
    group: Tensor = None  # type: ignore[assignment]  # (nt,) int64 group of a neighbour type; left out: each its own
    columns: tuple[np.ndarray, np.ndarray] | None = None  # of Frozen.sum, for Frozen.pull

    def __post_init__(self) -> None:
        if self.group is None:
            self.group = torch.arange(len(self.sel), device=self.type.device)

    @property
    def width(self) -> int:
        """Components c of Y."""
        return 1 if self.row == "1" else 4

    @cached_property
    def for_loops(self) -> tuple:
        """What all compiled loops take."""
        edges = self.edges
        arrays = (x.numpy() for x in (self.r, edges.j, edges.first, edges.type, self.center, self.used, self.group))
        grid = (self.rs, self.rc, self.protection, self.r_close, self.grid.lo, 1.0 / self.grid.h, self.grid.K)
        return *arrays, grid, self.row == "w R"

    @cached_property
    def places(self) -> tuple:
        """Where the edges are among the splines, for the compiled loops of row "1": made once, used by all of them."""
        place, node = np.empty((2, len(self.r))), np.empty(len(self.r), dtype=np.int64)
        kernels.radial_places(*self.for_loops, place, node, self.pool)
        return place, node

    @property
    def pool(self) -> Pool:
        return threads(len(self.r))

    def pieces(self) -> list[tuple[int, int]]:
        """Ranges of neighbour types whose moments fit into MOMENTS_BYTES, at least one type each."""
        groups = len(self.sel)
        one = max(1, len(self.type) * self.width * self.grid.K * self.dtype.itemsize)
        most = max(1, min(groups, MOMENTS_BYTES // one))
        return [(t, min(t + most, groups)) for t in range(0, groups, most)]

    def new_moments(self, begin: int, end: int) -> Tensor:
        """An array for them, not yet filled."""
        shape = (len(self.type), self.width, (end - begin) * self.grid.K)
        return torch.empty(shape, dtype=self.dtype, device=self.type.device)

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Rows (N·c, ·) of the atoms of each centre type: atoms are sorted by type."""
        return zip(*(t.flatten(0, 1).split([self.width * n for n in self.type_counts]) for t in tensors), strict=True)


def times(A: Tensor, C: Tensor, g: Geometry) -> Tensor:
    """A (N, c, m) times C (nets, m, M) → (N, c, M); one net for all centres, or one for each centre type."""
    if len(C) == 1:
        return A @ C[0]
    out = A.new_empty(len(A), g.width, C.shape[2])
    for (a, y), c in zip(g.blocks(A, out), C, strict=True):
        torch.mm(a, c, out=y)
    return out


def gradient_of_table(A: Tensor, T: Tensor, nets: int, g: Geometry) -> Tensor:
    """Σ_i A_iᵀ T_i (nets, m, M), over all centres or over those of each type."""
    if nets == 1:
        return (A.flatten(0, 1).T @ T.flatten(0, 1))[None]
    out = A.new_empty(nets, A.shape[2], T.shape[2])
    for (a, t), c in zip(g.blocks(A, T), out, strict=True):
        torch.mm(a.T, t, out=c)
    return out


class TableSum(torch.autograd.Function):
    """T (N, c, M1) = A·C for C (nets, groups·K, M1); linear in C."""

    @staticmethod
    def forward(ctx, C: Tensor, g: Geometry) -> Tensor:
        if not ctx.needs_input_grad[0] and g.width == 4 and kernels.compiled(g.r):
            with phase(MOMENTS):
                return Frozen.of(C).sum(g)
        K, pieces = g.grid.K, g.pieces()
        T, A = None, None
        for begin, end in pieces:
            with phase(MOMENTS):
                A = backend(g.r).moments(g, begin, end)
            part = times(A, C[:, begin * K : end * K], g)
            T = part if T is None else T.add_(part)
        ctx.geometry, ctx.nets = g, len(C)
        ctx.moments = A if len(pieces) == 1 and ctx.needs_input_grad[0] else None
        assert T is not None
        return T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, T_bar: Tensor):
        g, parts = ctx.geometry, []
        for begin, end in g.pieces():
            A = ctx.moments if ctx.moments is not None else backend(g.r).moments(g, begin, end)
            parts.append(gradient_of_table(A, T_bar, ctx.nets, g))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1), None


class TablePull(torch.autograd.Function):
    """∂E/∂r_e (E, 3) = pull(gT·Cᵀ) from gT = ∂E/∂T (N, c, M1); linear in gT and in C."""

    @staticmethod
    def forward(ctx, gT: Tensor, C: Tensor, g: Geometry) -> Tensor:
        ctx.save_for_backward(gT, C)
        ctx.geometry = g
        K = g.grid.K
        out = torch.zeros_like(g.r)
        if g.columns is not None and not any(ctx.needs_input_grad):
            with phase(MOMENTS):
                return Frozen.of(C).pull(gT, g, out)
        for begin, end in g.pieces():
            gA = times(gT, C[:, begin * K : end * K].transpose(1, 2), g)
            with phase(MOMENTS):
                backend(g.r).pull(gA, g, begin, end, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u: Tensor):
        gT, C = ctx.saved_tensors
        g, K = ctx.geometry, ctx.geometry.grid.K
        gT_bar, parts = None, []
        for begin, end in g.pieces():
            with phase(MOMENTS):
                A_dot = backend(g.r).push(u, g, begin, end)
            part = times(A_dot, C[:, begin * K : end * K], g)
            gT_bar = part if gT_bar is None else gT_bar.add_(part)
            if ctx.needs_input_grad[1]:
                parts.append(gradient_of_table(A_dot, gT, len(C), g))
        return gT_bar, torch.cat(parts, 1) if len(parts) > 1 else parts[0] if parts else None, None


class Frozen:
    """A table C (tables, m, M) that is not trained, with its rows filled up to whole registers, for frozen_table.py."""

    def __init__(self, C: Tensor):
        self.M = C.shape[2]
        self.tables = np.zeros((*C.shape[:2], whole_strips(self.M, C.numpy().dtype)), C.numpy().dtype)
        self.tables[:, :, : self.M] = C.numpy()

    @classmethod
    def of(cls, C: Tensor) -> Frozen:
        """Made once and kept with C."""
        if not hasattr(C, "frozen"):
            C.frozen = cls(C.detach())  # type: ignore[attr-defined]
        return C.frozen  # type: ignore[attr-defined]

    def arguments(self, g: Geometry) -> tuple:
        """What both loops take."""
        tiles = tiles_of(g.type_counts if len(self.tables) > 1 else (len(g.type),), g.pool[1], ATOMS)
        return tiles, *Compiled.arguments(g, 0, len(g.sel)), g.sel.numpy(), self.tables

    def sum(self, g: Geometry) -> Tensor:
        """T (N, 4, M)."""
        N, T = len(g.type), torch.empty(len(g.type), 4, self.M, dtype=g.dtype)
        g.columns = np.empty(WIDTH * (len(g.r) + N * len(g.sel)) + N, dtype=np.int64), np.empty(N, dtype=np.int64)
        frozen_table.table_sum(*self.arguments(g), T.numpy(), *g.columns, g.pool)
        return T

    def pull(self, gT: Tensor, g: Geometry, out: Tensor) -> Tensor:
        """out (E, 3) = ∂E/∂r_e where the edge is on the grid."""
        assert g.columns is not None
        frozen_table.table_pull(*self.arguments(g), gT.contiguous().numpy(), *g.columns, out.numpy(), g.pool)
        return out


class Compiled:
    """CPU: one compiled pass over the edges. pull adds to what is in out only where it writes."""

    @staticmethod
    def arguments(g: Geometry, begin: int, end: int) -> tuple:
        return *g.for_loops, (begin, end)

    @classmethod
    def moments(cls, g: Geometry, begin: int, end: int) -> Tensor:
        A = g.new_moments(begin, end)
        kernel, places = (kernels.radial_moments, g.places) if g.width == 1 else (kernels.moments, ())
        kernel(*cls.arguments(g, begin, end), *places, g.sel.numpy(), A.numpy(), g.pool)
        return A

    @classmethod
    def pull(cls, gA: Tensor, g: Geometry, begin: int, end: int, out: Tensor) -> None:
        gA = gA.contiguous()
        if g.width == 1:
            kernels.radial_pull(*cls.radial_arguments(g, begin), gA.numpy(), out.numpy(), g.pool)
        else:
            kernels.pull(*cls.arguments(g, begin, end), gA.flatten(0, 1).numpy(), out.numpy(), g.pool)

    @classmethod
    def push(cls, u: Tensor, g: Geometry, begin: int, end: int) -> Tensor:
        A = g.new_moments(begin, end)
        arrays = u.contiguous().numpy(), A.numpy(), g.pool
        if g.width == 1:
            kernels.radial_push(*cls.radial_arguments(g, begin), *arrays)
        else:
            kernels.push(*cls.arguments(g, begin, end), *arrays)
        return A

    @staticmethod
    def radial_arguments(g: Geometry, begin: int) -> tuple:
        return g.r.numpy(), g.edges.first.numpy(), begin * g.grid.K, *g.places


class Eager:
    """Any device: the same with tensor operations; also the reference for Compiled in the tests."""

    @staticmethod
    def rows(r: Tensor, g: Geometry) -> tuple[Tensor, Tensor]:
        """x (E, 1) and Y (E, c), differentiable."""
        tau = g.type[g.edges.i]
        R = environment(r, g.rs, g.rc, g.protection)
        R = torch.cat([R[:, :1] - g.center[tau, :1], R[:, 1:]], 1) * g.center[tau][:, [1, 2, 2, 2]]
        x = R[:, :1]
        if g.row == "1":
            return x, torch.ones_like(x)
        if g.row == "w R":
            return x, switch(torch.linalg.vector_norm(r, dim=1, keepdim=True), g.rs, g.rc) * R
        return x, R

    @staticmethod
    def indices(x: Tensor, g: Geometry, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices in A (E, WIDTH, c), spline values and slopes (E, WIDTH), zero for edges not in use."""
        tau, kind = g.type[g.edges.i], g.edges.type[g.edges.j]
        t, groups = g.group[kind], end - begin
        keep = g.used[tau, kind] & (torch.linalg.vector_norm(g.r, dim=1) >= g.r_close) & (t >= begin) & (t < end)
        b, value, slope = g.grid.weights(x[:, 0].clamp(max=g.grid.hi).detach())
        mask, steps = keep[:, None].to(x.dtype), torch.arange(WIDTH, device=x.device)
        row = (g.edges.i * g.width * groups + (t - begin).clamp(0, groups - 1)) * g.grid.K + b
        component = torch.arange(g.width, device=x.device) * (groups * g.grid.K)
        return row[:, None, None] + steps[:, None] + component, value * mask, slope * mask

    @staticmethod
    def scatter(index: Tensor, values: Tensor, g: Geometry, begin: int, end: int) -> Tensor:
        A = g.new_moments(begin, end).zero_()
        A.view(-1).index_add_(0, index.reshape(-1), values.reshape(-1).to(A.dtype))
        return A

    @classmethod
    def moments(cls, g: Geometry, begin: int, end: int) -> Tensor:
        x, Y = cls.rows(g.r, g)
        index, value, _ = cls.indices(x, g, begin, end)
        A = cls.scatter(index, value[:, :, None] * Y[:, None, :], g, begin, end)
        p0 = -g.center[:, 0] * g.center[:, 1]  # (nt,) x of an empty slot, by the centre type
        empty = (g.sel - cls.neighbors(g, torch.ones_like(g.edges.i, dtype=torch.bool))).clamp(min=0.0)
        cls.add_at(A, p0, empty * (1.0 if g.row == "1" else p0[g.type][:, None]), g, begin, end)
        if g.row == "1":
            hidden = cls.neighbors(g, ~g.used[g.type[g.edges.i], g.edges.type[g.edges.j]])
            cls.add_at(A, torch.zeros_like(p0), hidden, g, begin, end)
        return A

    @staticmethod
    def neighbors(g: Geometry, mask: Tensor) -> Tensor:
        """(N, groups) how many of the edges of a mask (E,) each atom has to each group of types."""
        N, groups = len(g.type), len(g.sel)
        count = torch.zeros(N * groups, dtype=g.sel.dtype, device=mask.device)
        index = g.edges.i * groups + g.group[g.edges.type[g.edges.j]]
        return count.index_add_(0, index, mask.to(count.dtype)).view(N, groups)

    @staticmethod
    def add_at(A: Tensor, x: Tensor, amount: Tensor, g: Geometry, begin: int, end: int) -> None:
        """A += amount (N, groups) B(x), x (nt,) by the centre type: slots that are all at one place."""
        b, value, _ = g.grid.weights(x)
        indices = (b[:, None] + torch.arange(WIDTH, device=A.device))[g.type]  # (N, WIDTH)
        values = amount[:, begin:end, None] * value[g.type][:, None, :]  # (N, groups, WIDTH)
        of_group = A.view(len(A), g.width, end - begin, g.grid.K)[:, 0]
        of_group.scatter_add_(2, indices[:, None, :].expand(-1, end - begin, -1), values.to(A.dtype))

    @classmethod
    def pull(cls, gA: Tensor, g: Geometry, begin: int, end: int, out: Tensor) -> None:
        with torch.enable_grad():
            r = g.r.detach().requires_grad_()
            x, Y = cls.rows(r, g)
            index, value, slope = cls.indices(x, g, begin, end)
            ga = gA.reshape(-1)[index].to(r.dtype)  # (E, WIDTH, c)
            gx = (slope[:, :, None] * ga * Y.detach()[:, None, :]).sum((1, 2))[:, None]
            gY = (value[:, :, None] * ga).sum(1)
            outputs, gradients = ([x], [gx]) if g.row == "1" else ([x, Y], [gx, gY])
            out += torch.autograd.grad(outputs, r, gradients)[0]

    @classmethod
    def push(cls, u: Tensor, g: Geometry, begin: int, end: int) -> Tensor:
        (x, Y), (dx, dY) = torch.autograd.functional.jvp(lambda r: cls.rows(r, g), g.r, u)
        index, value, slope = cls.indices(x, g, begin, end)
        values = slope[:, :, None] * dx[:, None, :] * Y[:, None, :] + value[:, :, None] * dY[:, None, :]
        return cls.scatter(index, values, g, begin, end)


def backend(r: Tensor) -> type[Compiled] | type[Eager]:
    return Compiled if kernels.compiled(r) else Eager
