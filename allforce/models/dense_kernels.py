"""Compiled loops of a dense layer y = tanh(x w + b), or x w + b, in the four sweeps of pinet_steps.py.

Rows are taken by tiles that stay in the cache: product, bias, tanh and slope of a tile follow each other there.
Letters: x (n, in), w (in, out), y (n, out). A bias that is shorter than y belongs to its last columns. Where sums over
rows are wanted, each of some parts of the rows has its own, and these are added in their order: the number of threads
does not matter.
"""

from __future__ import annotations

import numpy as np

from allforce.loops import njit
from allforce.models.kernels import inline, options
from allforce.models.pool import spread
from allforce.models.products import VECTOR, add_product, add_transposed_product, pack
from allforce.models.tanh import tanh

KERNELS, PRODUCTS, TANH = "2726311b", "a61d4448", "a50c7186"  # digests of other files, see atom_kernels.py
TILE = 256  # rows
PARTS = 16  # of the rows, at most, that have a sum of their own


@njit(**inline)
def whole(columns, itemsize):
    """Columns filled up to whole registers."""
    one = VECTOR // itemsize
    return -(-columns // one) * one


@njit(**options)
def packed_for(w):
    """w as products.py wants it."""
    out = np.empty(w.shape[0] * whole(w.shape[1], w.itemsize), w.dtype)
    pack(w, out)
    return out


@njit(**options)
def rows_of(b, columns):
    """A tile of rows [0, b], whole strips wide."""
    out = np.zeros((TILE, whole(columns, b.itemsize)), b.dtype)
    for n in range(TILE):
        for c in range(b.shape[0]):
            out[n, columns - b.shape[0] + c] = b[c]
    return out


@njit(**options)
def parts_of(rows, w):
    """Where the parts begin, and the end; zeros for w̄ and b̄ of each."""
    number = max(1, min(PARTS, rows // 64))
    w_bar = np.zeros((number, w.shape[0], whole(w.shape[1], w.itemsize)), w.dtype)
    return np.arange(number + 1) * rows // number, w_bar, np.zeros((number, 1, w.shape[1]), w.dtype)


@njit(**options)
def product(x, w, columns, begin, z):
    """begin + x w, in the first rows of the buffer z; `begin` of its shape, w packed."""
    flat, other = z.reshape(-1), begin.reshape(-1)
    for k in range(x.shape[0] * z.shape[1]):
        flat[k] = other[k]
    add_product(x, 0, x.shape[1], w, x.shape[1], columns, z[: x.shape[0]])


@njit(**inline)
def stretches(rows, columns, wide):
    """Rows of so many columns in an array that is `wide`, as stretches in one piece: their number, length, distance."""
    return (1, rows * columns, 0) if columns == wide else (rows, columns, wide)


@njit(**options)
def put(z, add, y):
    """y = z, or y += z; z may be wider."""
    number, length, distance = stretches(y.shape[0], y.shape[1], z.shape[1])
    source, target = z.reshape(-1), y.reshape(-1)
    for n in range(number):
        a, b = source[n * distance : n * distance + length], target[n * length : (n + 1) * length]
        if add:
            for k in range(length):
                b[k] += a[k]
        else:
            for k in range(length):
                b[k] = a[k]


@njit(**options)
def to_tanh(y):
    """y = tanh(y), in its place: between two arrays that are one the compiler uses no vector instructions."""
    flat = y.reshape(-1)
    for k in range(flat.shape[0]):
        flat[k] = tanh(flat[k])


@njit(**options)
def times_slope(y, z):
    """z ← z (1 − y²)."""
    one, y, z = y.dtype.type(1), y.reshape(-1), z.reshape(-1)
    for k in range(y.shape[0]):
        z[k] *= one - y[k] * y[k]


@njit(**options)
def tanh_adjoint(y, y_hat, y_dot, y_bar, z_bar):
    """z̄ = ȳ (1 − y²) − 2 y ŷ ẏ."""
    y, y_hat, y_dot, y_bar, z = (
        y.reshape(-1),
        y_hat.reshape(-1),
        y_dot.reshape(-1),
        y_bar.reshape(-1),
        z_bar.reshape(-1),
    )
    one, two = y.dtype.type(1), y.dtype.type(2)
    for n in range(y.shape[0]):
        z[n] = y_bar[n] * (one - y[n] * y[n]) - two * y[n] * y_hat[n] * y_dot[n]


@njit(**options)
def add_rows(x, total):
    """total += Σ_n x_n."""
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            total[c] += x[n, c]


@njit(**options)
def _dense(begin, end, x, w, bias, curved, y):
    z = np.empty_like(bias)
    for first in range(begin, end, TILE):
        last = min(first + TILE, end)
        product(x[first:last], w, y.shape[1], bias, z)
        put(z, False, y[first:last])
        if curved:
            to_tanh(y[first:last])


@njit(**options)
def dense(x, w, b, curved, y, pool):
    """y = tanh(x w + b), or x w + b."""
    spread(_dense, x.shape[0], (x, packed_for(w), rows_of(b, y.shape[1]), curved, y), pool)


@njit(**options)
def _dense_back(begin, end, y, y_hat, w, nothing, curved, add, x_hat):
    g, z = np.empty_like(nothing), np.empty((TILE, y.shape[1]), y.dtype)
    for first in range(begin, end, TILE):
        last = min(first + TILE, end)
        put(y_hat[first:last], False, z[: last - first])
        if curved:
            times_slope(y[first:last], z[: last - first])
        product(z[: last - first], w, x_hat.shape[1], nothing, g)
        put(g, add, x_hat[first:last])


@njit(**options)
def dense_back(y, y_hat, w, curved, add, x_hat, pool):
    """x̂ = ẑ wᵀ, or added to it, with ẑ = ŷ (1 − y²)."""
    nothing = np.zeros((TILE, whole(w.shape[0], w.itemsize)), w.dtype)
    spread(_dense_back, y.shape[0], (y, y_hat, packed_for(w.T), nothing, curved, add, x_hat), pool)


@njit(**options)
def _dense_tangent(begin, end, x_dot, w, nothing, y, curved, y_dot):
    z = np.empty_like(nothing)
    for first in range(begin, end, TILE):
        last = min(first + TILE, end)
        product(x_dot[first:last], w, y.shape[1], nothing, z)
        put(z, False, y_dot[first:last])
        if curved:
            times_slope(y[first:last], y_dot[first:last])


@njit(**options)
def dense_tangent(x_dot, w, y, curved, y_dot, pool):
    """ẏ = (ẋ w) (1 − y²)."""
    nothing = np.zeros((TILE, whole(w.shape[1], w.itemsize)), w.dtype)
    spread(_dense_tangent, y.shape[0], (x_dot, packed_for(w), nothing, y, curved, y_dot), pool)


@njit(**options)
def sums_over_rows(x, x_dot, z_bar, z_hat, w_bar, b_bar):
    """w̄ += xᵀ z̄ + ẋᵀ ẑ, b̄ += Σ z̄, of one tile."""
    add_transposed_product(x, z_bar, w_bar)
    add_transposed_product(x_dot, z_hat, w_bar)
    add_rows(z_bar, b_bar)


@njit(**options)
def sum_of_parts(parts, total):
    """total = Σ_p parts_p, without the columns that fill up the last strip."""
    for n in range(total.shape[0]):
        for c in range(total.shape[1]):
            total[n, c] = parts[0, n, c]
        for p in range(1, parts.shape[0]):
            for c in range(total.shape[1]):
                total[n, c] += parts[p, n, c]


@njit(**options)
def _dense_adjoint(begin, end, ends, x, x_dot, w, nothing, y, y_hat, y_dot, y_bar, curved, add, x_bar, w_bar, b_bar):
    g, columns = np.empty_like(nothing), y.shape[1]
    z_bars, z_hats = np.zeros((TILE + 1, columns), y.dtype), np.zeros((TILE + 1, columns), y.dtype)
    for part in range(begin, end):
        for first in range(ends[part], ends[part + 1], TILE):
            last = min(first + TILE, ends[part + 1])
            z_bar, z_hat, hat, bar = (
                z_bars[: last - first],
                z_hats[: last - first],
                y_hat[first:last],
                y_bar[first:last],
            )
            put(hat, False, z_hat)
            if curved:
                times_slope(y[first:last], z_hat)
                tanh_adjoint(y[first:last], hat, y_dot[first:last], bar, z_bar)
            else:
                put(bar, False, z_bar)
            sums_over_rows(x[first:last], x_dot[first:last], z_bar, z_hat, w_bar[part], b_bar[part, 0])
            product(z_bar, w, x.shape[1], nothing, g)
            put(g, add, x_bar[first:last])


@njit(**options)
def dense_adjoint(x, x_dot, w, y, y_hat, y_dot, y_bar, curved, add, x_bar, w_bar, b_bar, pool):
    """z̄ = ȳ (1 − y²) − 2 y ŷ ẏ, x̄ = z̄ wᵀ, or added to it, w̄ = xᵀ z̄ + ẋᵀ ẑ, b̄ = Σ z̄."""
    nothing = np.zeros((TILE, whole(w.shape[0], w.itemsize)), w.dtype)
    ends, w_bars, b_bars = parts_of(x.shape[0], w)
    inputs = ends, x, x_dot, packed_for(w.T), nothing, y, y_hat, y_dot, y_bar
    spread(_dense_adjoint, ends.shape[0] - 1, (*inputs, curved, add, x_bar, w_bars, b_bars), pool)
    sum_of_parts(w_bars, w_bar)
    sum_of_parts(b_bars, b_bar)
