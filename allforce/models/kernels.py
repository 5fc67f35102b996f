"""Compiled loops for CPUs (numba) over the edges of atoms: the moments and their derivatives.

Everything is recomputed from the edge vector, which is cheaper than reading it back; only the loops of se_e2_r, whose
edges have three numbers each, find them once a step. Edges are sorted by centre, so what is written stays in the cache.
They run on torch's threads (pool.py). Arguments: see moments.Geometry. Loops that go on to a table: table_kernels.py.
The environment variable ALLFORCE_KERNELS=torch turns them off.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from torch import Tensor

from allforce.loops import njit
from allforce.models.pool import spread
from allforce.models.spline import WIDTH, polynomials

LANES = 8  # WIDTH filled up with zeros to whole vector registers
VALUE = np.zeros((WIDTH, LANES))  # [power, spline]
VALUE[:, :WIDTH] = polynomials().T
SLOPE = VALUE[1:] * np.arange(1, WIDTH)[:, None]
# numba compiles these numbers in, and takes a loop from its cache as long as this file has not changed: if spline.py
# gives others, write them here, so that it changes.
TIMES_120 = [
    [1, 26, 66, 26, 1, 0],
    [-5, -50, 0, 50, 5, 0],
    [10, 20, -60, 20, 10, 0],
    [-10, 20, 0, -20, 10, 0],
    [5, -20, 30, -20, 5, 0],
    [-1, 5, -10, 10, -5, 1],
]
assert np.allclose(VALUE[:, :WIDTH] * 120, TIMES_120, atol=1e-9), (
    "spline.py has changed: loops in numba's cache are old"
)

# Likewise the code of pool.py, which is in every loop: its digest, as tests/unit/test_kernels.py asks for it.
POOL = "95cd4b4f"

options: dict[str, Any] = {"fastmath": True, "cache": True, "error_model": "numpy", "nogil": True}
inline: dict[str, Any] = {"inline": "always", "fastmath": True, "error_model": "numpy"}


SWITCH = "ALLFORCE_KERNELS"  # torch: tensor operations also on CPUs


def compiled(x: Tensor) -> bool:
    """Whether the loops here take over for tensors where x is."""
    return x.device.type == "cpu" and os.environ.get(SWITCH) != "torch"


@njit(**inline)
def radial(x, y, z, rs, rc, p):
    """Distance, s, s', q, q' of envmat.py."""
    r = np.sqrt(x * x + y * y + z * z)
    u = min(max((r - rs) / (rc - rs), 0.0), 1.0)
    w = 1.0 + u * u * u * (-6.0 * u * u + 15.0 * u - 10.0)
    dw = -30.0 * u * u * (1.0 - u) * (1.0 - u) / (rc - rs)
    f = 1.0 / (r + p)
    return r, w * f, (dw - w * f) * f, w * r * f * f, (dw * r + w - 2.0 * w * r * f) * f * f


@njit(**inline)
def polynomial(table, u, out):
    """The WIDTH splines (or slopes) at u by Horner's rule, all lanes at once."""
    for m in range(LANES):
        out[m] = table[table.shape[0] - 1, m]
    for k in range(table.shape[0] - 2, -1, -1):
        for m in range(LANES):
            out[m] = out[m] * u + table[k, m]


@njit(**inline)
def edge_buffers(first, begin, end):
    """For the edges of one atom: columns of `on_grid`, interval and neighbour type."""
    most = 0
    for i in range(begin, end):
        most = max(most, first[i + 1] - first[i])
    return np.empty((12, most)), np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)


@njit(**inline)
def on_grid(r, begin, end, center, grid, weighted, c, b):
    """Of the edges begin … end of one atom: x, x', q̂, q̂', unit vector, distance, place in the interval; the interval.

    A loop without branches, which the compiler turns into vector instructions. q̂ = q/dstd, slopes by the distance.
    The last two columns are the weight of the row R̂ and its slope: 1 and 0, or the switch function w and w', and then
    w is already in q̂.
    """
    avg, scale_r, scale_a = center[0], center[1], center[2]
    rs, rc, p, _, lo, inv_h, K = grid
    for n in range(end - begin):
        e = begin + n
        d, s, ds, q, dq = radial(r[e, 0], r[e, 1], r[e, 2], rs, rc, p)
        x = (s - avg) * scale_r
        v = (x - lo) * inv_h
        k = min(max(np.floor(v), 0.0), K - WIDTH)
        f = 1.0 / d
        c[0, n], c[1, n], c[2, n], c[3, n] = x, ds * scale_r, q * scale_a, dq * scale_a
        c[4, n], c[5, n], c[6, n] = r[e, 0] * f, r[e, 1] * f, r[e, 2] * f
        c[7, n], c[8, n], c[9, n] = d, v - k, f
        c[10, n], c[11, n] = 1.0, 0.0
        b[n] = np.int64(k)
    if weighted:
        for n in range(end - begin):
            e = begin + n
            d, s, ds, q, dq = radial(r[e, 0], r[e, 1], r[e, 2], rs, rc, p)
            w, dw = s * (d + p), ds * (d + p) + s
            c[10, n], c[11, n] = w, dw
            c[3, n] = w * c[3, n] + dw * c[2, n]
            c[2, n] = w * c[2, n]


@njit(**inline)
def neighbor_groups(j, begin, end, types, used, group, c, r_close, t):
    """The group of neighbour types of each edge; −1: not on the grid."""
    for n in range(end - begin):
        kind = types[j[begin + n]]
        t[n] = group[kind] if used[kind] and c[7, n] >= r_close else -1


@njit(**inline)
def edges_of_atom(i, r, j, first, types, center, used, group, grid, weighted, c, b, t):
    """Fill the buffers for the edges of atom i."""
    tau = types[i]
    on_grid(r, first[i], first[i + 1], center[tau], grid, weighted, c, b)
    neighbor_groups(j, first[i], first[i + 1], types, used[tau], group, c, grid[3], t)


@njit(**inline)
def splines_at(x, grid, value):
    """The interval of x, and the splines there."""
    v = (x - grid[4]) * grid[5]
    k = min(max(int(v), 0), grid[6] - WIDTH)
    polynomial(VALUE, v - k, value)
    return k


@njit(**inline)
def moments_of_atom(i, r, j, first, types, center, used, group, grid, weighted, sel, value, c, b, t, row):
    """row (4, ·) += A of atom i, and the first column of empty slots; value, c, b and t are buffers."""
    K = grid[6]
    empty = sel.copy()
    edges_of_atom(i, r, j, first, types, center, used, group, grid, weighted, c, b, t)
    for n in range(first[i + 1] - first[i]):
        empty[group[types[j[first[i] + n]]]] -= 1.0
        if t[n] < 0:
            continue
        x, q = c[10, n] * c[0, n], c[2, n]
        vx, vy, vz = q * c[4, n], q * c[5, n], q * c[6, n]
        polynomial(VALUE, c[8, n], value)
        k = t[n] * K + b[n]
        for m in range(WIDTH):
            row[0, k + m] += value[m] * x
            row[1, k + m] += value[m] * vx
            row[2, k + m] += value[m] * vy
            row[3, k + m] += value[m] * vz
    x = -center[types[i], 0] * center[types[i], 1]
    k = splines_at(x, grid, value)
    for g in range(len(sel)):
        for m in range(WIDTH):
            row[0, g * K + k + m] += max(empty[g], 0.0) * value[m] * x
    return k


@njit(**inline)
def pull_of_atom(i, r, j, first, types, center, used, group, grid, weighted, value, slope, c, b, t, gA, g):
    """g_e of the edges of atom i from gA = ∂E/∂A_i (4, ·); value, slope, c, b and t are buffers."""
    inv_h, K = grid[5], grid[6]
    edges_of_atom(i, r, j, first, types, center, used, group, grid, weighted, c, b, t)
    for n in range(first[i + 1] - first[i]):
        if t[n] < 0:
            continue
        x, dx, q, dq = c[0, n], c[1, n], c[2, n], c[3, n]
        nx, ny, nz, w, dw = c[4, n], c[5, n], c[6, n], c[10, n], c[11, n]
        polynomial(VALUE, c[8, n], value)
        polynomial(SLOPE, c[8, n], slope)
        k = t[n] * K + b[n]
        v0, vx, vy, vz, s0, sx, sy, sz = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0  # Σ_m value·gA and Σ_m slope·gA
        for m in range(WIDTH):
            g0, gx, gy, gz = gA[0, k + m], gA[1, k + m], gA[2, k + m], gA[3, k + m]
            v0 += value[m] * g0
            vx += value[m] * gx
            vy += value[m] * gy
            vz += value[m] * gz
            s0 += slope[m] * g0
            sx += slope[m] * gx
            sy += slope[m] * gy
            sz += slope[m] * gz
        vn = vx * nx + vy * ny + vz * nz
        sn = sx * nx + sy * ny + sz * nz
        across = q * c[9, n]
        along = (v0 * w + (s0 * w * x + sn * q) * inv_h) * dx + v0 * dw * x + vn * (dq - across)
        e = first[i] + n
        g[e, 0] = along * nx + across * vx
        g[e, 1] = along * ny + across * vy
        g[e, 2] = along * nz + across * vz


@njit(**inline)
def push_of_atom(i, r, j, first, types, center, used, group, grid, weighted, value, slope, c, b, t, u, row):
    """The adjoint of pull_of_atom: row (4, ·) += Σ_e ∂(B R̂)/∂r_e · u_e over the edges of atom i."""
    inv_h, K = grid[5], grid[6]
    edges_of_atom(i, r, j, first, types, center, used, group, grid, weighted, c, b, t)
    for n in range(first[i + 1] - first[i]):
        if t[n] < 0:
            continue
        e = first[i] + n
        ux, uy, uz = u[e, 0], u[e, 1], u[e, 2]
        q, nx, ny, nz = c[2, n], c[4, n], c[5, n], c[6, n]
        polynomial(VALUE, c[8, n], value)
        polynomial(SLOPE, c[8, n], slope)
        k = t[n] * K + b[n]
        un = ux * nx + uy * ny + uz * nz
        dx = un * c[1, n]
        y, dy = c[10, n] * c[0, n], c[10, n] * dx + c[11, n] * un * c[0, n]  # w x and its change
        across = q * c[9, n]
        along = (c[3, n] - across) * un
        vx, vy, vz = along * nx + across * ux, along * ny + across * uy, along * nz + across * uz
        w0 = inv_h * dx * y
        w = inv_h * dx * q
        wx, wy, wz = w * nx, w * ny, w * nz
        for m in range(WIDTH):
            row[0, k + m] += slope[m] * w0 + value[m] * dy
            row[1, k + m] += slope[m] * wx + value[m] * vx
            row[2, k + m] += slope[m] * wy + value[m] * vy
            row[3, k + m] += slope[m] * wz + value[m] * vz


@njit(**options)
def _radial_places(begin, end, r, j, first, types, center, used, group, grid, weighted, place, node):
    rs, rc, p, r_close, lo, inv_h, K = grid
    for i in range(begin, end):
        tau = types[i]
        avg, scale = center[tau, 0], center[tau, 1] * inv_h
        for e in range(first[i], first[i + 1]):
            d, s, ds, _, _ = radial(r[e, 0], r[e, 1], r[e, 2], rs, rc, p)
            v = (s - avg) * scale - lo * inv_h
            k = min(max(np.floor(v), 0.0), K - WIDTH)
            place[0, e], place[1, e] = v - k, ds * scale / d
            node[e] = np.int64(k) if d >= r_close else -1
        for e in range(first[i], first[i + 1]):
            kind = types[j[e]]
            node[e] = node[e] + group[kind] * K if used[tau, kind] and node[e] >= 0 else -1


@njit(**options)
def radial_places(r, j, first, types, center, used, group, grid, weighted, place, node, pool):
    """Of every edge: place in its interval and x'/(h·distance); first spline, by group and interval, −1: none."""
    arguments = (r, j, first, types, center, used, group, grid, weighted, place, node)
    spread(_radial_places, first.shape[0] - 1, arguments, pool)


@njit(**options)
def _radial_moments(begin, end, r, j, first, types, center, used, group, grid, piece, place, node, sel, A):
    value = np.empty(LANES)
    K = grid[6]
    before, length = piece[0] * K, A.shape[2]
    row = np.empty(length + LANES)  # of one atom, in float64 and in the cache; room for the lanes that are zero
    for i in range(begin, end):
        row[:] = 0.0
        empty = sel.copy()
        for e in range(first[i], first[i + 1]):
            kind = types[j[e]]
            empty[group[kind]] -= 1.0
            k = node[e] - before
            if k >= 0 and k < length:
                polynomial(VALUE, place[0, e], value)
                for m in range(LANES):
                    row[k + m] += value[m]
            elif not used[types[i], kind] and piece[0] <= group[kind] < piece[1]:
                k = splines_at(0.0, grid, value) + (group[kind] - piece[0]) * K
                for m in range(LANES):
                    row[k + m] += value[m]
        k = splines_at(-center[types[i], 0] * center[types[i], 1], grid, value)
        for g in range(piece[0], piece[1]):
            for m in range(LANES):
                row[(g - piece[0]) * K + k + m] += max(empty[g], 0.0) * value[m]
        A[i, 0] = row[:length]


@njit(**options)
def radial_moments(r, j, first, types, center, used, group, grid, weighted, piece, place, node, sel, A, pool):
    """A[i, 0, (t − piece[0])·K + k] = Σ B_k(x_e): the number 1 for a row; neighbours of excluded types are at x = 0."""
    arguments = (r, j, first, types, center, used, group, grid, piece, place, node, sel, A)
    spread(_radial_moments, first.shape[0] - 1, arguments, pool)


@njit(**options)
def _radial_pull(begin, end, r, first, before, place, node, gA, g):
    slope = np.empty(LANES)
    length = gA.shape[2]
    row = np.zeros(length + LANES)
    for i in range(begin, end):
        row[:length] = gA[i, 0]
        for e in range(first[i], first[i + 1]):
            k = node[e] - before
            if k < 0 or k >= length:
                continue
            polynomial(SLOPE, place[0, e], slope)
            s = 0.0
            for m in range(LANES):
                s += slope[m] * row[k + m]
            s *= place[1, e]
            g[e, 0], g[e, 1], g[e, 2] = s * r[e, 0], s * r[e, 1], s * r[e, 2]


@njit(**options)
def radial_pull(r, first, before, place, node, gA, g, pool):
    """g_e = ∂E/∂r_e from gA = ∂E/∂A of radial_moments; before: splines of the groups before those of A."""
    spread(_radial_pull, first.shape[0] - 1, (r, first, before, place, node, gA, g), pool)


@njit(**options)
def _radial_push(begin, end, r, first, before, place, node, u, A):
    slope = np.empty(LANES)
    length = A.shape[2]
    row = np.empty(length + LANES)
    for i in range(begin, end):
        row[:] = 0.0
        for e in range(first[i], first[i + 1]):
            k = node[e] - before
            if k < 0 or k >= length:
                continue
            polynomial(SLOPE, place[0, e], slope)
            dx = (u[e, 0] * r[e, 0] + u[e, 1] * r[e, 1] + u[e, 2] * r[e, 2]) * place[1, e]
            for m in range(LANES):
                row[k + m] += slope[m] * dx
        A[i, 0] = row[:length]


@njit(**options)
def radial_push(r, first, before, place, node, u, A, pool):
    """The adjoint of radial_pull."""
    spread(_radial_push, first.shape[0] - 1, (r, first, before, place, node, u, A), pool)
