"""Moments times a table that does not change, and back, for a tile of atoms at a time (equations in moments.py).

A and ∂E/∂A of a tile stay in the cache. No neighbour of the tile is on most of the grid, near the atoms: these columns
are left out of the products.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from allforce.models.kernels import LANES, WIDTH, edge_buffers, inline, moments_of_atom, options, pull_of_atom
from allforce.models.pool import spread
from allforce.models.products import VECTOR, add_product, add_strip, highest

KERNELS, PRODUCTS = "b90919f2", "92543206"  # digests of other files, see atom_kernels.py


@njit(**inline)
def mark(b, t, count, empty, K, m, strip, occupied):
    """occupied[s] where one of the columns s·strip … of A (·, m) has an edge, or empty slots: column `empty` of every
    group and those behind it."""
    for n in range(count):
        if t[n] >= 0:
            k = t[n] * K + b[n]
            occupied[k // strip] = occupied[(k + WIDTH - 1) // strip] = True
    for k in range(empty, m, K):
        occupied[k // strip] = occupied[(k + WIDTH - 1) // strip] = True


@njit(**inline)
def product_of_occupied(A, occupied, strip, w, m, M, y):
    """y = A C, by runs of occupied columns."""
    for n in range(y.shape[0]):
        for k in range(y.shape[1]):
            y[n, k] = 0.0
    s = 0
    while s < occupied.shape[0]:
        first = s
        while s < occupied.shape[0] and occupied[s]:
            s += 1
        if s > first:
            add_product(A, first * strip, min(s * strip, m), w, m, M, y)
        s += 1


@njit(**options)
def _table_sum(begin, end, tiles, r, j, first, types, center, used, group, grid, weighted, piece, sel, w, T, occupied):
    K, M, m = grid[6], T.shape[2], (piece[1] - piece[0]) * grid[6]
    most, strip = highest(tiles, begin, end), VECTOR // T.itemsize
    c, b, t = edge_buffers(first, tiles[begin, 0], tiles[end - 1, 1])
    value, row, A = np.empty(LANES), np.empty((4, m)), np.empty((4 * most, m), T.dtype)
    y = np.empty((4 * most, w.shape[1] // m), T.dtype)  # as T, in whole strips
    for tile in range(begin, end):
        start, rows = tiles[tile, 0], 4 * (tiles[tile, 1] - tiles[tile, 0])
        for i in range(start, tiles[tile, 1]):
            row[:] = 0.0
            empty = moments_of_atom(
                i, r, j, first, types, center, used, group, grid, weighted, piece, sel, value, c, b, t, row
            )
            mark(b, t, first[i + 1] - first[i], empty, K, m, strip, occupied[tile])
            for n in range(4):
                for k in range(m):
                    A[4 * (i - start) + n, k] = row[n, k]
        product_of_occupied(A[:rows], occupied[tile], strip, w[tiles[tile, 2]], m, M, y[:rows])
        for n in range(rows):
            for k in range(M):
                T[start + n // 4, n % 4, k] = y[n, k]


@njit(**options)
def table_sum(tiles, r, j, first, types, center, used, group, grid, weighted, piece, sel, w, T, occupied, pool):
    """T_i = A_i C; occupied (tiles, ·) is for table_pull."""
    arguments = (tiles, r, j, first, types, center, used, group, grid, weighted, piece, sel, w, T, occupied)
    spread(_table_sum, tiles.shape[0], arguments, pool)


@njit(**options)
def _table_pull(begin, end, tiles, r, j, first, types, center, used, group, grid, weighted, piece, w, gT, occupied, g):
    M = gT.shape[1]
    most = highest(tiles, begin, end)
    value, slope = np.empty(LANES), np.empty(LANES)
    c, b, t = edge_buffers(first, tiles[begin, 0], tiles[end - 1, 1])
    gA = np.empty((4 * most, w.shape[1] // M), gT.dtype)  # ∂E/∂A in whole strips
    strip = VECTOR // gT.itemsize
    for tile in range(begin, end):
        start, rows = tiles[tile, 0], 4 * (tiles[tile, 1] - tiles[tile, 0])
        for s in range(occupied.shape[1]):
            if occupied[tile, s]:
                for n in range(rows):
                    for k in range(s * strip, (s + 1) * strip):
                        gA[n, k] = 0.0
                add_strip(gT[4 * start : 4 * start + rows], 0, M, w[tiles[tile, 2]], M, s * strip, gA[:rows])
        for i in range(start, tiles[tile, 1]):
            pull_of_atom(
                i, r, j, first, types, center, used, group, grid, weighted, piece, value, slope, c, b, t,
                gA, 4 * (i - start), g,
            )  # fmt: skip


@njit(**options)
def table_pull(tiles, r, j, first, types, center, used, group, grid, weighted, piece, w, gT, occupied, g, pool):
    """g_e = ∂E/∂r_e from gT = ∂E/∂T (N·4, M)."""
    arguments = (tiles, r, j, first, types, center, used, group, grid, weighted, piece, w, gT, occupied, g)
    spread(_table_pull, tiles.shape[0], arguments, pool)
