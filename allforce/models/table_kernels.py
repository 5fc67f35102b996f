"""Compiled loops for CPUs: moments times a table and what is derived from it, atom by atom (equations in moments.py).

A of an atom is zero but in the columns that its neighbours meet: each of them meets 6, however many nodes there are,
and many meet the same. The products know these columns only, so a table may have as many nodes as its accuracy asks
for. Of each atom i there are `size[i]` of them, listed in met[at[i]:at[i + 1]], in the order in which they are met; the
values of A there are the first of each row of A[4·at[i]:4·at[i + 1]], seen as four rows.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from allforce.loops import njit
from allforce.models.kernels import (
    LANES,
    WIDTH,
    edge_buffers,
    inline,
    moments_of_atom,
    options,
    pull_of_atom,
    push_of_atom,
)
from allforce.models.pool import spread
from allforce.models.products import VECTOR, WIDE, add_listed, add_outer, times_listed

KERNELS, PRODUCTS = "2726311b", "a61d4448"  # digests of other files, see atom_kernels.py


@lru_cache(maxsize=64)
def strips_of(counts: tuple[int, ...], M: int, lanes: int, threads: int) -> np.ndarray:
    """(strips, 5): first atom, the one behind the last, table, first column and registers of parts of the gradients of
    tables (m, M), for counts[n] atoms of table n. Of WIDE registers, or of one where these would be too few."""
    width, strips, first = WIDE * lanes, [], 0
    middle = M // width * width if len(counts) * -(-M // width) >= threads else 0
    for table, count in enumerate(counts):
        parts = [(column, WIDE) for column in range(0, middle, width)]
        parts += [(column, 1) for column in range(middle, M, lanes)]
        strips += [(first, first + count, table, *part) for part in parts]
        first += count
    return np.array(strips, dtype=np.int64).reshape(-1, 5)


@njit(**options)
def places_of_lists(first, groups, m):
    """`at` for atoms with neighbours as in `first`: room for all columns that they may meet of m, and one more."""
    at = np.zeros(len(first), np.int64)
    for i in range(len(first) - 1):
        at[i + 1] = at[i] + min(WIDTH * (first[i + 1] - first[i] + groups), m) + 1
    return at


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


@njit(**inline)
def most_columns(at, begin, end):
    """Room for those of any of some atoms."""
    most = 0
    for i in range(begin, end):
        most = max(most, at[i + 1] - at[i])
    return most


@njit(**inline)
def strip_buffer(T):
    """For one of T (N, 4, M), M filled up to whole registers."""
    one = VECTOR // T.itemsize
    return np.empty((4, -(-T.shape[2] // one) * one), T.dtype)


@njit(**inline)
def times_table(row, columns, count, C, x, y, T):
    """T (4, M) = row C by the listed columns, whose values go from `row` to x and are zero there afterwards."""
    for q in range(4):
        for n in range(count):
            x[q, n] = row[q, columns[n]]
            row[q, columns[n]] = 0.0
    y[:] = 0.0
    add_listed(x, columns, count, C, y)
    for q in range(4):
        for k in range(T.shape[1]):
            T[q, k] = y[q, k]


@njit(**options)
def _table_sum(begin, end, tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, sel, T, A):
    c, b, t = edge_buffers(first, tiles[begin, 0], tiles[end - 1, 1])
    value, row, seen = np.empty(LANES), np.zeros((4, C.shape[1])), np.zeros(C.shape[1], np.bool_)
    buffer = np.empty(4 * most_columns(at, tiles[begin, 0], tiles[end - 1, 1]), T.dtype)
    y = strip_buffer(T)
    for tile in range(begin, end):
        for i in range(tiles[tile, 0], tiles[tile, 1]):
            empty = moments_of_atom(
                i, r, j, first, types, center, used, group, grid, weighted, sel, value, c, b, t, row
            )
            columns, room = met[at[i] : at[i + 1]], at[i + 1] - at[i]
            size[i] = columns_of_atom(b, t, first[i + 1] - first[i], empty, grid[6], sel, seen, columns)
            x = (A[4 * at[i] : 4 * at[i + 1]] if len(A) > 0 else buffer[: 4 * room]).reshape(4, room)
            times_table(row, columns, size[i], C[tiles[tile, 2]], x, y, T[i])


@njit(**options)
def table_sum(tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, sel, T, A, pool):
    """T_i = A_i C for C (tables, m, M); also the list of columns, and A unless there is no room for it."""
    arguments = (tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, sel, T, A)
    spread(_table_sum, tiles.shape[0], arguments, pool)


@njit(**options)
def _table_pull(begin, end, tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, gT, g):
    value, slope = np.empty(LANES), np.empty(LANES)
    c, b, t = edge_buffers(first, tiles[begin, 0], tiles[end - 1, 1])
    gA = np.empty((4, C.shape[1]), gT.dtype)
    for tile in range(begin, end):
        for i in range(tiles[tile, 0], tiles[tile, 1]):
            times_listed(gT[i], met[at[i] : at[i + 1]], size[i], C[tiles[tile, 2]], gA)
            pull_of_atom(i, r, j, first, types, center, used, group, grid, weighted, value, slope, c, b, t, gA, g)


@njit(**options)
def table_pull(tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, gT, g, pool):
    """g_e = ∂E/∂r_e from gT = ∂E/∂T (N, 4, M)."""
    arguments = (tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, gT, g)
    spread(_table_pull, tiles.shape[0], arguments, pool)


@njit(**options)
def _table_push(begin, end, tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, u, T, A):
    value, slope = np.empty(LANES), np.empty(LANES)
    c, b, t = edge_buffers(first, tiles[begin, 0], tiles[end - 1, 1])
    row, y = np.zeros((4, C.shape[1])), strip_buffer(T)
    for tile in range(begin, end):
        for i in range(tiles[tile, 0], tiles[tile, 1]):
            push_of_atom(i, r, j, first, types, center, used, group, grid, weighted, value, slope, c, b, t, u, row)
            x = A[4 * at[i] : 4 * at[i + 1]].reshape(4, at[i + 1] - at[i])
            times_table(row, met[at[i] : at[i + 1]], size[i], C[tiles[tile, 2]], x, y, T[i])


@njit(**options)
def table_push(tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, u, T, A, pool):
    """The adjoint of table_pull: T_i = A_i C for A = Σ_e ∂(B R̂)/∂r_e · u_e, and that A."""
    arguments = (tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, u, T, A)
    spread(_table_push, tiles.shape[0], arguments, pool)


@njit(**options)
def _table_gradient(begin, end, strips, at, met, size, A, T, C):
    for n in range(begin, end):
        first, last, table, column, registers = strips[n]
        for i in range(first, last):
            x = A[4 * at[i] : 4 * at[i + 1]].reshape(4, at[i + 1] - at[i])
            if registers == WIDE:
                add_outer(x, met[at[i] : at[i + 1]], size[i], T[i], C[table], column, WIDE)
            else:
                add_outer(x, met[at[i] : at[i + 1]], size[i], T[i], C[table], column, 1)


@njit(**options)
def table_gradient(strips, at, met, size, A, T, C, pool):
    """C += Σ_i A_iᵀ T_i, each strip of it by one thread: the order of the atoms does not depend on their number."""
    spread(_table_gradient, strips.shape[0], (strips, at, met, size, A, T, C), pool)
