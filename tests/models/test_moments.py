"""Moments of a neighbourhood: compiled and eager, every kind of row, against differentiation of the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from suite import batch_of, structure

from allforce.data.prepare import Limit, Needs
from allforce.models import kernels
from allforce.models.envmat import environment, switch
from allforce.models.moments import Compiled, Geometry, Listed, TablePull, TableSum
from allforce.models.pool import gomp_parallel
from allforce.models.spline import WIDTH, Grid, polynomials
from allforce.models.table_kernels import strips_of

RS, RC, P, CLOSE = 0.5, 4.0, 0.02, 1.0


class Seen:
    """As much of a model as the neighbours need."""

    needs, type_map = Needs(3, Limit(RC, [90, 90, 90])), ["A", "B", "C"]


def geometry(row: str, group: list[int] | None) -> Geometry:
    batch = batch_of(Seen(), structure(0, 9, 3), structure(1, 6, 3))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    center = 0.1 + 0.2 * torch.rand(3, 3, generator=generator, dtype=torch.float64)
    center[:, 1:] = 1 / center[:, 1:]
    s = environment(torch.tensor([[CLOSE, 0.0, 0.0]], dtype=torch.float64), RS, RC, P)[0, 0]
    grid = Grid(float((-center[:, 0] * center[:, 1]).min()), float(((s - center[:, 0]) * center[:, 1]).max()), 24)
    used = torch.ones(3, 3, dtype=torch.bool)
    used[0, 2] = used[2, 0] = False
    sel = torch.zeros(1 if group else 3, dtype=torch.float64)
    return Geometry(
        batch.edges.r, batch.edges, batch.type, batch.type_counts, center, used, sel, RS, RC, P, CLOSE, grid,
        torch.float64, row, None if group is None else torch.tensor(group),
    )  # fmt: skip


def definition(r: torch.Tensor, C: torch.Tensor, g: Geometry) -> torch.Tensor:
    """Σ_e Y_e ⊗ (B(x_e) C), the splines as polynomials of x, by autograd's own means."""
    tau, kind = g.type[g.edges.i], g.type[g.edges.j]
    avg, radial, angular = g.center[tau].T
    R = environment(r, g.rs, g.rc, g.protection)
    R = torch.cat([((R[:, 0] - avg) * radial)[:, None], R[:, 1:] * angular[:, None]], 1)
    distance = torch.linalg.vector_norm(r, dim=1, keepdim=True)
    Y = {"R": R, "w R": switch(distance, RS, RC) * R, "1": torch.ones_like(distance)}[g.row]
    used = g.used[tau, kind]
    keep, x = used & (distance[:, 0] >= CLOSE), R[:, 0]
    if g.row == "1":  # excluded neighbours are there, at x = 0
        keep, x = keep | ~used, torch.where(used, x, 0.0)
    b, _, _ = g.grid.weights(x.detach())
    u = (x - g.grid.lo) / g.grid.h - b
    B = (u[:, None] ** torch.arange(WIDTH)) @ torch.from_numpy(polynomials()).T  # (E, WIDTH)
    rows = (g.group[kind] * g.grid.K + b)[:, None] + torch.arange(WIDTH)
    table = C[tau if len(C) > 1 else torch.zeros_like(tau)]  # (E, groups·K, M)
    G = (B[:, :, None] * torch.gather(table, 1, rows[:, :, None].expand(-1, -1, C.shape[2]))).sum(1)
    T = Y[:, :, None] * G[:, None, :] * keep[:, None, None]
    return torch.zeros(len(g.type), Y.shape[1], C.shape[2], dtype=r.dtype).index_add(0, g.edges.i, T)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("nets", [1, 3])
@pytest.mark.parametrize("group", [None, [0, 0, 0]])
@pytest.mark.parametrize("row", ["R", "w R", "1"])
def test_sum_pull_and_their_derivatives(row, group, nets, backend, monkeypatch):
    monkeypatch.setenv(kernels.SWITCH, backend)
    g = geometry(row, group)
    generator = torch.Generator().manual_seed(5)
    C = torch.randn(nets, len(g.sel) * g.grid.K, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    r = g.r.clone().requires_grad_()
    expected = definition(r, C, g)
    T = TableSum.apply(C, g)
    torch.testing.assert_close(T, expected, rtol=1e-11, atol=1e-11)

    gT = torch.randn(T.shape, generator=generator, dtype=torch.float64, requires_grad=True)
    pulled = TablePull.apply(gT, C, g)
    by_autograd = torch.autograd.grad(expected, r, gT, create_graph=True)[0]
    torch.testing.assert_close(pulled, by_autograd, rtol=1e-10, atol=1e-10)
    assert pulled.abs().max() > 1e-3

    u = torch.randn(pulled.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(pulled, (gT, C), u),
        torch.autograd.grad(by_autograd, (gT, C), u, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    for a, b in zip(torch.autograd.grad(T, C, gT), torch.autograd.grad(expected, C, gT), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_radial_loops_do_not_depend_on_threads_or_pieces():
    """Places of the edges are found once for all loops: a group alone has its own columns, bit for bit."""
    g = geometry("1", None)
    generator = torch.Generator().manual_seed(7)
    gA = torch.randn(len(g.type), 1, 3 * g.grid.K, generator=generator, dtype=torch.float64)
    u = torch.randn(g.r.shape, generator=generator, dtype=torch.float64)

    def run(pieces: list[tuple[int, int]], pool) -> list[torch.Tensor]:
        one = geometry("1", None)
        one.__class__ = type("Pooled", (Geometry,), {"pool": pool})
        out, K = torch.zeros_like(g.r), g.grid.K
        for begin, end in pieces:
            Compiled.pull(gA[:, :, begin * K : end * K], one, begin, end, out)
        sums = [torch.cat([f(begin, end) for begin, end in pieces], 2) for f in (
            lambda begin, end: Compiled.moments(one, begin, end), lambda begin, end: Compiled.push(u, one, begin, end)
        )]  # fmt: skip
        return [out, *sums]

    alone = run([(0, 3)], (0, 1))
    assert all(x.abs().max() > 1e-3 for x in alone)
    for pieces, pool in (([(0, 1), (1, 2), (2, 3)], (0, 1)), ([(0, 3)], (gomp_parallel(), 3))):
        assert all(torch.equal(a, b) for a, b in zip(alone, run(pieces, pool), strict=True))


def sum_pull_and_derivatives(g: Geometry, nets: int, M: int) -> list[torch.Tensor]:
    """T, ∂E/∂r_e, what a loss on the latter gives for gT and C, and what a loss on T gives for C."""
    generator = torch.Generator().manual_seed(5)
    shape = nets, len(g.sel) * g.grid.K, M
    C = torch.randn(shape, generator=generator, dtype=torch.float64).to(g.dtype).requires_grad_()
    T = TableSum.apply(C, g)
    gT = torch.randn(T.shape, generator=generator, dtype=torch.float64).to(g.dtype).requires_grad_()
    pulled = TablePull.apply(gT, C, g)
    u = torch.randn(pulled.shape, generator=generator, dtype=torch.float64)
    derivatives = *torch.autograd.grad(pulled, (gT, C), u), *torch.autograd.grad(T, C, gT)
    return [x.detach() for x in (T, pulled, *derivatives)]


def with_empty_slots(row: str, group: list[int] | None, dtype: torch.dtype) -> Geometry:
    g = geometry(row, group)
    g.dtype, g.sel = dtype, 20.0 + g.sel
    return g


@pytest.mark.parametrize("M", [4, 21, 48, 100])  # less than a register, parts of one, whole strips, both
@pytest.mark.parametrize("nets", [1, 3])
@pytest.mark.parametrize("group", [None, [0, 0, 0]])
@pytest.mark.parametrize("row", ["R", "w R"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_listed_columns_are_all_that_matter(dtype, row, group, nets, M, monkeypatch):
    """What the loops give, with the columns that neighbours meet, is what products with all of A give."""
    g = with_empty_slots(row, group, dtype)
    listed = sum_pull_and_derivatives(g, nets, M)
    assert g.columns is not None and 0 < g.columns[2].max() < len(g.sel) * g.grid.K
    monkeypatch.setenv(kernels.SWITCH, "torch")
    dense = sum_pull_and_derivatives(with_empty_slots(row, group, dtype), nets, M)
    for a, b in zip(listed, dense, strict=True):
        rounding = torch.finfo(dtype).eps * 100 * float(b.abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=rounding)


@pytest.mark.parametrize("nets", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_listed_columns_do_not_depend_on_threads(dtype, nets):
    """Nor on the strips of the gradient of the table, which are narrow where threads are many: bit for bit."""

    def run(pool) -> list[torch.Tensor]:
        g = with_empty_slots("R", None, dtype)
        g.__class__ = type("Pooled", (Geometry,), {"pool": pool})
        return sum_pull_and_derivatives(g, nets, 100)

    alone = run((0, 1))
    for threads in (2, 3, 40):
        assert len(strips_of((15,) * nets, 100, 8, threads)) == nets * (5 if threads <= 5 * nets else 13)
        assert all(torch.equal(a, b) for a, b in zip(alone, run((gomp_parallel(), threads)), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_table_that_is_not_trained(dtype):
    """Gives the same bits, and A is not kept."""
    g = with_empty_slots("R", None, dtype)
    C = torch.randn(3, len(g.sel) * g.grid.K, 21, generator=torch.Generator().manual_seed(5), dtype=dtype)
    trained = C.clone().requires_grad_()
    T, expected = TableSum.apply(C, g), TableSum.apply(trained, g)
    assert torch.equal(T, expected) and Listed(C).sum(g, keep=False)[1] is None
    assert torch.equal(TablePull.apply(T, C, g), TablePull.apply(T, trained, g))


@pytest.mark.parametrize("K", [9, 10, 11, 64, 501])
def test_elimination_within_the_band(K):
    """Gives what a solver without any structure gives, and curves that take the values at the nodes."""
    grid = Grid(-0.4, 12.0, K)
    values = np.random.default_rng(1).normal(size=(K, 3))
    inverse = grid.collocation_inverse()
    first, splines, _ = grid.weights(torch.from_numpy(grid.nodes()))
    M = np.zeros((K, K))
    M[np.arange(K)[:, None], first.numpy()[:, None] + np.arange(splines.shape[1])] = splines.numpy()
    np.testing.assert_allclose(M @ inverse, np.eye(K), rtol=0, atol=1e-12)
    C = grid.solve(values)
    np.testing.assert_allclose(C, np.linalg.solve(M, values), rtol=1e-9, atol=1e-9)
    there = grid.interpolate(torch.from_numpy(C), torch.from_numpy(grid.nodes()))[0]
    np.testing.assert_allclose(there, values, rtol=0, atol=1e-11)
