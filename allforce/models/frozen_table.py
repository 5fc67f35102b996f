"""Moments times a table that does not change, and back, atom by atom (equations in moments.py).

A of an atom is zero but in the columns that its neighbours meet: each of them meets 6, however many nodes there are.
The products know these columns only, so a table may have as many nodes as its accuracy asks for.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from allforce.models.kernels import LANES, WIDTH, edge_buffers, inline, moments_of_atom, options, pull_of_atom
from allforce.models.pool import spread
from allforce.models.products import add_listed, times_listed

KERNELS, PRODUCTS = "b90919f2", "58a70ff6"  # digests of other files, see atom_kernels.py


@njit(**inline)
def add_columns(k, met, columns, count):
    """Columns k … of an interval behind the others in the list, unless they are there; how many there are now."""
    for column in range(k, k + WIDTH):
        columns[count] = column
        count += 0 if met[column] else 1
        met[column] = True
    return count


@njit(**inline)
def columns_of_atom(b, t, edges, empty, K, sel, met, columns):
    """The columns of A of an atom with so many edges, and how many; `empty`: first column of empty slots of a group."""
    count = 0
    for n in range(edges):
        if t[n] >= 0:
            count = add_columns(t[n] * K + b[n], met, columns, count)
    for group in range(sel.shape[0]):
        if sel[group] > 0.0:
            count = add_columns(group * K + empty, met, columns, count)
    for n in range(count):
        met[columns[n]] = False
    return count


@njit(**options)
def _table_sum(begin, end, tiles, r, j, first, types, center, used, group, grid, weighted, piece, sel, C, T, met, size):
    K, m = grid[6], C.shape[1]
    c, b, t = edge_buffers(first, tiles[begin, 0], tiles[end - 1, 1])
    value, row, seen = np.empty(LANES), np.zeros((4, m)), np.zeros(m, np.bool_)
    x, y = np.empty((4, WIDTH * (len(b) + len(sel)) + 1), T.dtype), np.empty((4, C.shape[2]), T.dtype)
    for tile in range(begin, end):
        for i in range(tiles[tile, 0], tiles[tile, 1]):
            empty = moments_of_atom(
                i, r, j, first, types, center, used, group, grid, weighted, piece, sel, value, c, b, t, row
            )
            columns = met[WIDTH * (first[i] + i * len(sel)) + i :]
            size[i] = columns_of_atom(b, t, first[i + 1] - first[i], empty, K, sel, seen, columns)
            for q in range(4):
                for n in range(size[i]):
                    x[q, n] = row[q, columns[n]]
                    row[q, columns[n]] = 0.0
            y[:] = 0.0
            add_listed(x, columns, size[i], C[tiles[tile, 2]], y)
            for q in range(4):
                for k in range(T.shape[2]):
                    T[i, q, k] = y[q, k]


@njit(**options)
def table_sum(tiles, r, j, first, types, center, used, group, grid, weighted, piece, sel, C, T, met, size, pool):
    """T_i = A_i C for C (tables, m, whole strips). `met`, of each atom its columns, and `size` are for table_pull."""
    arguments = (tiles, r, j, first, types, center, used, group, grid, weighted, piece, sel, C, T, met, size)
    spread(_table_sum, tiles.shape[0], arguments, pool)


@njit(**options)
def _table_pull(
    begin, end, tiles, r, j, first, types, center, used, group, grid, weighted, piece, sel, C, gT, met, size, g
):
    value, slope = np.empty(LANES), np.empty(LANES)
    c, b, t = edge_buffers(first, tiles[begin, 0], tiles[end - 1, 1])
    x, gA = np.zeros((4, C.shape[2]), gT.dtype), np.empty((4, C.shape[1]), gT.dtype)
    for tile in range(begin, end):
        for i in range(tiles[tile, 0], tiles[tile, 1]):
            for q in range(4):
                for k in range(gT.shape[2]):
                    x[q, k] = gT[i, q, k]
            columns = met[WIDTH * (first[i] + i * len(sel)) + i :]
            times_listed(x, columns, size[i], C[tiles[tile, 2]], gA)
            pull_of_atom(
                i, r, j, first, types, center, used, group, grid, weighted, piece, value, slope, c, b, t, gA, 0, g
            )


@njit(**options)
def table_pull(tiles, r, j, first, types, center, used, group, grid, weighted, piece, sel, C, gT, met, size, g, pool):
    """g_e = ∂E/∂r_e from gT = ∂E/∂T (N, 4, M)."""
    arguments = (tiles, r, j, first, types, center, used, group, grid, weighted, piece, sel, C, gT, met, size, g)
    spread(_table_pull, tiles.shape[0], arguments, pool)
