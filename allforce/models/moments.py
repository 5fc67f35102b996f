"""The fast path: spline moments of the neighbourhood of every atom, with closed-form derivatives.

    A_i,t,k = Σ_{e of i, type t} B_k(x_e) Y_e  + (sel_t − n_it) B_k(p_0) p     x_e = R̂_e0,  p = −davg/dstd of the centre
    T_i     = Σ_t,k A_i,t,k ⊗ C_t,k                                            C: the embedding nets as splines
    ∂E/∂r_e = pull(∂E/∂A),  ∂E/∂A = ∂E/∂T Cᵀ,  and for losses on forces its adjoint push(v): all of them linear

The row Y_e of an edge is R̂_e, or w(r_e) R̂_e with the switch function w, or the number 1 (se_e2_r; p too is 1 then,
and a neighbour of an excluded type is at x = 0).
A holds geometry only, no parameters. So the nets are evaluated on the K nodes of a grid instead of on every neighbour.
On CPUs only the columns of A that an atom's neighbours meet are known to the products with C (Listed). Elsewhere, and
for se_e2_r, they are those of whole matrices (Dense): with many types A is made for some neighbour types at a time and
made again when it is needed, which costs little.
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
from allforce.models import kernels, table_kernels
from allforce.models.envmat import environment, switch
from allforce.models.pool import Pool, threads
from allforce.models.products import lanes, tiles_of
from allforce.models.spline import WIDTH, Grid
from allforce.trace import MOMENTS, phase

Row = Literal["R", "w R", "1"]
MOMENTS_BYTES = 256 << 20  # a larger A is made piece by piece
ATOMS = 8  # that a thread takes together, in loops with the table


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
    columns: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # of A, as Listed.sum has found them

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

    @cached_property
    def pool(self) -> Pool:
        return threads(self.r.shape[0])

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
        ctx.table, ctx.geometry = table_of(C, g), g
        T, ctx.moments = ctx.table.sum(g, ctx.needs_input_grad[0])
        return T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, T_bar: Tensor):
        return ctx.table.sum_adjoint(T_bar, ctx.moments, ctx.geometry), None


class TablePull(torch.autograd.Function):
    """∂E/∂r_e (E, 3) = pull(gT·Cᵀ) from gT = ∂E/∂T (N, c, M1); linear in gT and in C. After TableSum of the same."""

    @staticmethod
    def forward(ctx, gT: Tensor, C: Tensor, g: Geometry) -> Tensor:
        ctx.save_for_backward(gT)
        ctx.table, ctx.geometry = table_of(C, g), g
        return ctx.table.pull(gT, g)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u: Tensor):
        return *ctx.table.pull_adjoint(u, ctx.saved_tensors[0], ctx.geometry, ctx.needs_input_grad[1]), None


class Listed:
    """A table C (tables, m, M) times A where that is not zero: the loops of table_kernels.py."""

    def __init__(self, C: Tensor):
        self.C = in_one_piece(C)

    def counts(self, g: Geometry) -> tuple[int, ...]:
        """Atoms of each table."""
        return g.type_counts if len(self.C) > 1 else (g.type.shape[0],)

    def arguments(self, g: Geometry) -> tuple:
        """What loops over atoms take."""
        assert g.columns is not None, "TableSum comes first"
        tiles = tiles_of(self.counts(g), g.pool[1], ATOMS)
        return tiles, *g.for_loops, *g.columns, self.C

    def new_columns(self, g: Geometry) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where the list of each atom begins, room for the lists, and for their lengths."""
        at = table_kernels.places_of_lists(g.edges.first.numpy(), g.sel.shape[0], self.C.shape[1])
        return at, np.empty(at[-1], np.int64), np.empty(len(at) - 1, np.int64)

    def new_moments(self, g: Geometry) -> np.ndarray:
        assert g.columns is not None
        return np.empty(4 * len(g.columns[1]), self.C.dtype)

    def sum(self, g: Geometry, keep: bool) -> tuple[Tensor, np.ndarray | None]:
        """T (N, 4, M), and A if it is to be kept."""
        with phase(MOMENTS):
            g.columns = self.new_columns(g)
            T = torch.empty(g.type.shape[0], 4, self.C.shape[2], dtype=g.dtype)
            A = self.new_moments(g) if keep else np.empty(0, self.C.dtype)
            table_kernels.table_sum(*self.arguments(g), g.sel.numpy(), T.numpy(), A, g.pool)
        return T, A if keep else None

    def sum_adjoint(self, T_bar: Tensor, A: np.ndarray | None, g: Geometry) -> Tensor:
        """C̄ (tables, m, M) = Σ_i A_iᵀ T̄_i, over all centres or over those of each type."""
        assert g.columns is not None and A is not None
        C_bar = torch.zeros(self.C.shape, dtype=g.dtype)
        strips = table_kernels.strips_of(self.counts(g), self.C.shape[2], lanes(self.C.dtype), g.pool[1])
        table_kernels.table_gradient(strips, *g.columns, A, in_one_piece(T_bar), C_bar.numpy(), g.pool)
        return C_bar

    def pull(self, gT: Tensor, g: Geometry) -> Tensor:
        """∂E/∂r_e (E, 3), 0 where the edge is not on the grid."""
        out = torch.zeros_like(g.r)
        with phase(MOMENTS):
            table_kernels.table_pull(*self.arguments(g), in_one_piece(gT), out.numpy(), g.pool)
        return out

    def pull_adjoint(self, u: Tensor, gT: Tensor, g: Geometry, trained: bool) -> tuple[Tensor, Tensor | None]:
        """Adjoints of gT and of C, that if C is trained."""
        with phase(MOMENTS):
            gT_bar, A_dot = torch.empty(gT.shape, dtype=g.dtype), self.new_moments(g)
            table_kernels.table_push(*self.arguments(g), in_one_piece(u), gT_bar.numpy(), A_dot, g.pool)
        return gT_bar, self.sum_adjoint(gT, A_dot, g) if trained else None


def in_one_piece(x: Tensor) -> np.ndarray:
    return x.detach().contiguous().numpy()


class Dense:
    """A table C (tables, m, M) times all of A, for some groups of neighbour types at a time."""

    def __init__(self, C: Tensor):
        self.C = C.detach()

    def pieces(self, g: Geometry) -> Iterator[tuple[int, int, Tensor]]:
        """Ranges of groups, and the table of each."""
        for begin, end in g.pieces():
            yield begin, end, self.C[:, begin * g.grid.K : end * g.grid.K]

    def sum(self, g: Geometry, keep: bool) -> tuple[Tensor, Tensor | None]:
        """T (N, c, M), and A if it is to be kept and in one piece."""
        T, A, pieces = None, None, list(self.pieces(g))
        for begin, end, C in pieces:
            with phase(MOMENTS):
                A = backend(g.r).moments(g, begin, end)
            part = times(A, C, g)
            T = part if T is None else T.add_(part)
        assert T is not None
        return T, A if len(pieces) == 1 and keep else None

    def sum_adjoint(self, T_bar: Tensor, A: Tensor | None, g: Geometry) -> Tensor:
        """C̄ (tables, m, M)."""
        parts = []
        for begin, end, _ in self.pieces(g):
            moments = A if A is not None else backend(g.r).moments(g, begin, end)
            parts.append(gradient_of_table(moments, T_bar, len(self.C), g))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def pull(self, gT: Tensor, g: Geometry) -> Tensor:
        """∂E/∂r_e (E, 3)."""
        out = torch.zeros_like(g.r)
        for begin, end, C in self.pieces(g):
            gA = times(gT, C.transpose(1, 2), g)
            with phase(MOMENTS):
                backend(g.r).pull(gA, g, begin, end, out)
        return out

    def pull_adjoint(self, u: Tensor, gT: Tensor, g: Geometry, trained: bool) -> tuple[Tensor, Tensor | None]:
        """Adjoints of gT and of C, that if C is trained."""
        gT_bar, parts = None, []
        for begin, end, C in self.pieces(g):
            with phase(MOMENTS):
                A_dot = backend(g.r).push(u, g, begin, end)
            part = times(A_dot, C, g)
            gT_bar = part if gT_bar is None else gT_bar.add_(part)
            parts += [gradient_of_table(A_dot, gT, len(self.C), g)] if trained else []
        assert gT_bar is not None
        return gT_bar, torch.cat(parts, 1) if len(parts) > 1 else parts[0] if parts else None


def table_of(C: Tensor, g: Geometry) -> Listed | Dense:
    return Listed(C) if g.width == 4 and kernels.compiled(g.r) else Dense(C)


class Compiled:
    """CPU, row "1": one compiled pass over the edges. pull adds to what is in out only where it writes."""

    @staticmethod
    def moments(g: Geometry, begin: int, end: int) -> Tensor:
        A = g.new_moments(begin, end)
        kernels.radial_moments(*g.for_loops, (begin, end), *g.places, g.sel.numpy(), A.numpy(), g.pool)
        return A

    @classmethod
    def pull(cls, gA: Tensor, g: Geometry, begin: int, end: int, out: Tensor) -> None:
        kernels.radial_pull(*cls.arguments(g, begin), gA.contiguous().numpy(), out.numpy(), g.pool)

    @classmethod
    def push(cls, u: Tensor, g: Geometry, begin: int, end: int) -> Tensor:
        A = g.new_moments(begin, end)
        kernels.radial_push(*cls.arguments(g, begin), u.contiguous().numpy(), A.numpy(), g.pool)
        return A

    @staticmethod
    def arguments(g: Geometry, begin: int) -> tuple:
        return g.r.numpy(), g.edges.first.numpy(), begin * g.grid.K, *g.places


class Eager:
    """Any device, any row: the same with tensor operations; also the reference for compiled loops in the tests."""

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
