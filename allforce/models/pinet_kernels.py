"""Compiled loops over the pairs of PiNet, for the steps of pinet_steps.py, which has the equations.

Pairs are sorted by their first atom, so what is written to it stays in the cache. Letters: i, j (E,) the atoms of a
pair, `first` (N + 1,) the pairs of each atom; e, e_dot, e_hat (E, nb) the basis; w (E, nb, c) = tanh(z); ab (N, 2h) =
[a, b] of every atom, z = a_i + b_j. Loops with a `pool` write to pairs, or to their first atom, and run on torch's
threads (pool.py). What goes to the second atom, or into one sum, is added on one thread, in the order of the pairs.
"""

from __future__ import annotations

import numpy as np

from allforce.loops import njit
from allforce.models.dense_kernels import (
    TILE,
    packed_for,
    parts_of,
    product,
    put,
    rows_of,
    sum_of_parts,
    sums_over_rows,
    tanh_adjoint,
    times_slope,
    to_tanh,
    whole,
)
from allforce.models.kernels import inline, options
from allforce.models.pool import spread

KERNELS, DENSE = "2726311b", "76c98c6f"  # digests of other files, see atom_kernels.py
CLOSE = 4096  # numbers that are worked on at once where the width is any


# ---- between atoms and pairs


@njit(**options)
def _to_pairs(begin, end, ab, i, j, z):
    h = z.shape[1]
    for p in range(begin, end):
        a, b = i[p], j[p]
        for c in range(h):
            z[p, c] = ab[a, c] + ab[b, h + c]


@njit(**inline)
def tile_of_pairs(width):
    return max(1, CLOSE // width)


@njit(**options)
def _pairs(begin, end, ab, i, j, y):
    step = tile_of_pairs(y.shape[1])
    for first in range(begin, end, step):
        last = min(first + step, end)
        _to_pairs(first, last, ab, i, j, y)
        to_tanh(y[first:last])


@njit(**options)
def pairs(ab, i, j, y, pool):
    """y = tanh(a_i + b_j)."""
    spread(_pairs, y.shape[0], (ab, i, j, y), pool)


@njit(**options)
def _pairs_tangent(begin, end, ab_dot, i, j, y, y_dot):
    step = tile_of_pairs(y.shape[1])
    for first in range(begin, end, step):
        last = min(first + step, end)
        _to_pairs(first, last, ab_dot, i, j, y_dot)
        times_slope(y[first:last], y_dot[first:last])


@njit(**options)
def pairs_tangent(ab_dot, i, j, y, y_dot, pool):
    """ẏ = (1 − y²) (ȧ_i + ḃ_j)."""
    spread(_pairs_tangent, y.shape[0], (ab_dot, i, j, y, y_dot), pool)


@njit(**options)
def pairs_back(y, y_hat, i, j, ab_hat):
    """ẑ = ŷ (1 − y²) goes to a_i and b_j."""
    step = tile_of_pairs(y.shape[1])
    z = np.empty((step, y.shape[1]), y.dtype)
    for first in range(0, y.shape[0], step):
        last = min(first + step, y.shape[0])
        put(y_hat[first:last], False, z[: last - first])
        times_slope(y[first:last], z[: last - first])
        from_pairs(z[: last - first], i[first:last], j[first:last], ab_hat)


@njit(**options)
def pairs_adjoint(y, y_hat, y_dot, y_bar, i, j, ab_bar):
    """z̄ = ȳ (1 − y²) − 2 y ŷ ẏ goes to a_i and b_j."""
    step = tile_of_pairs(y.shape[1])
    z = np.empty((step, y.shape[1]), y.dtype)
    for first in range(0, y.shape[0], step):
        last = min(first + step, y.shape[0])
        tanh_adjoint(y[first:last], y_hat[first:last], y_dot[first:last], y_bar[first:last], z[: last - first])
        from_pairs(z[: last - first], i[first:last], j[first:last], ab_bar)


@njit(**options)
def from_pairs(z, i, j, ab):
    """a_i += z, b_j += z."""
    h = z.shape[1]
    for p in range(z.shape[0]):
        a, b = i[p], j[p]
        for c in range(h):
            ab[a, c] += z[p, c]
        for c in range(h):
            ab[b, h + c] += z[p, c]


@njit(**options)
def _sum_of_pairs(begin, end, x, first, y):
    for a in range(begin, end):
        for c in range(x.shape[1]):
            y[a, c] = 0
        for p in range(first[a], first[a + 1]):
            for c in range(x.shape[1]):
                y[a, c] += x[p, c]


@njit(**options)
def sum_of_pairs(x, first, y, pool):
    """y_i = Σ x."""
    spread(_sum_of_pairs, first.shape[0] - 1, (x, first, y), pool)


@njit(**options)
def _spread_to_pairs(begin, end, y, i, add, x):
    for p in range(begin, end):
        a = i[p]
        if add:
            for c in range(x.shape[1]):
                x[p, c] += y[a, c]
        else:
            for c in range(x.shape[1]):
                x[p, c] = y[a, c]


@njit(**options)
def spread_to_pairs(y, i, add, x, pool):
    """x = y_i, or added to it."""
    spread(_spread_to_pairs, x.shape[0], (y, i, add, x), pool)


# ---- of atoms


@njit(**options)
def out(x, u, constant, y):
    """y_i += Σ_c x_ic u_c + constant."""
    for n in range(x.shape[0]):
        total = x.dtype.type(constant)
        for c in range(u.shape[0]):
            total += x[n, c] * u[c]
        y[n] += total


@njit(**options)
def out_adjoint(x, y_bar, x_dot, own, u_bar):
    """ū_c = Σ_i x_ic ȳ_i + ẋ_ic own_i."""
    u_bar[:] = 0
    for n in range(x.shape[0]):
        for c in range(u_bar.shape[0]):
            u_bar[c] += x[n, c] * y_bar[n] + x_dot[n, c] * own[n]


@njit(**options)
def add_outer(y, u, add, x):
    """x_ic = y_i u_c, or added to it."""
    for n in range(x.shape[0]):
        if add:
            for c in range(u.shape[0]):
                x[n, c] += y[n] * u[c]
        else:
            for c in range(u.shape[0]):
                x[n, c] = y[n] * u[c]


# ---- I_c = Σ_b w_bc e_b


@njit(**options)
def _interaction(begin, end, w, e, I):  # noqa: E741
    for p in range(begin, end):
        first = e[p, 0]
        for c in range(w.shape[2]):
            I[p, c] = w[p, 0, c] * first
        for b in range(1, w.shape[1]):
            eb = e[p, b]
            for c in range(w.shape[2]):
                I[p, c] += w[p, b, c] * eb


@njit(**options)
def interaction(w, e, I, pool):  # noqa: E741
    spread(_interaction, w.shape[0], (w, e, I), pool)


@njit(**options)
def _interaction_back(begin, end, w, e, I_hat, z_hat, e_hat):
    zero, one = w.dtype.type(0), w.dtype.type(1)
    for p in range(begin, end):
        for b in range(w.shape[1]):
            total, eb = zero, e[p, b]
            for c in range(w.shape[2]):
                t = w[p, b, c]
                z_hat[p, b, c] = I_hat[p, c] * eb * (one - t * t)
                total += I_hat[p, c] * t
            e_hat[p, b] += total


@njit(**options)
def interaction_back(w, e, I_hat, z_hat, e_hat, pool):
    """ẑ = Î_c e_b (1 − w²), ê += Σ_c Î_c w."""
    spread(_interaction_back, w.shape[0], (w, e, I_hat, z_hat, e_hat), pool)


@njit(**options)
def interaction_tangent(w, z_dot, e, e_dot, I_dot):
    """İ_c = Σ_b ((1 − w²) ż e_b + w ė_b)."""
    one = w.dtype.type(1)
    for p in range(w.shape[0]):
        for c in range(w.shape[2]):
            I_dot[p, c] = 0
        for b in range(w.shape[1]):
            eb, db = e[p, b], e_dot[p, b]
            for c in range(w.shape[2]):
                t = w[p, b, c]
                I_dot[p, c] += (one - t * t) * z_dot[p, b, c] * eb + t * db


@njit(**options)
def interaction_adjoint(w, z_dot, e, e_dot, I_hat, I_bar, z_hat, z_bar):
    """z̄ = (1 − w²)(Ī e_b + Î (ė_b − 2 w ż e_b)), and ẑ once more."""
    one, two = w.dtype.type(1), w.dtype.type(2)
    for p in range(w.shape[0]):
        for b in range(w.shape[1]):
            eb, db = e[p, b], e_dot[p, b]
            for c in range(w.shape[2]):  # two loops: with one array to write, they become vector instructions
                t = w[p, b, c]
                g = I_bar[p, c] * eb + I_hat[p, c] * (db - two * t * z_dot[p, b, c] * eb)
                z_bar[p, b, c] = g * (one - t * t)
            for c in range(w.shape[2]):
                t = w[p, b, c]
                z_hat[p, b, c] = I_hat[p, c] * eb * (one - t * t)


# ---- the same with the layer before: z = x w + b, tile by tile


@njit(**options)
def _interaction_layer(begin, end, x, w, bias, y, e, I):  # noqa: E741
    z, flat = np.empty_like(bias), y.reshape(y.shape[0], y.shape[1] * y.shape[2])
    for first in range(begin, end, TILE):
        last = min(first + TILE, end)
        product(x[first:last], w, flat.shape[1], bias, z)
        put(z, False, flat[first:last])
        to_tanh(flat[first:last])
        _interaction(first, last, y, e, I)


@njit(**options)
def interaction_layer(x, w, b, y, e, I, pool):  # noqa: E741
    """y = tanh(x w + b), I_c = Σ_b y_bc e_b."""
    spread(_interaction_layer, x.shape[0], (x, packed_for(w), rows_of(b, w.shape[1]), y, e, I), pool)


@njit(**options)
def _interaction_layer_back(begin, end, y, e, I_hat, e_hat, w, nothing, add, x_hat):
    g, z = np.empty_like(nothing), np.empty((TILE, y.shape[1], y.shape[2]), y.dtype)
    flat = z.reshape(TILE, y.shape[1] * y.shape[2])
    for first in range(begin, end, TILE):
        last = min(first + TILE, end)
        _interaction_back(0, last - first, y[first:last], e[first:last], I_hat[first:last], z, e_hat[first:last])
        product(flat[: last - first], w, x_hat.shape[1], nothing, g)
        put(g, add, x_hat[first:last])


@njit(**options)
def interaction_layer_back(y, e, I_hat, e_hat, w, add, x_hat, pool):
    """ẑ and ê as above, x̂ = ẑ wᵀ, or added to it."""
    nothing = np.zeros((TILE, whole(w.shape[0], w.itemsize)), w.dtype)
    spread(_interaction_layer_back, y.shape[0], (y, e, I_hat, e_hat, packed_for(w.T), nothing, add, x_hat), pool)


@njit(**options)
def _interaction_layer_tangent(begin, end, x_dot, w, nothing, y, z_dot, e, e_dot, I_dot):
    z, flat = np.empty_like(nothing), z_dot.reshape(y.shape[0], y.shape[1] * y.shape[2])
    for first in range(begin, end, TILE):
        last = min(first + TILE, end)
        product(x_dot[first:last], w, flat.shape[1], nothing, z)
        put(z, False, flat[first:last])
        tile = y[first:last], z_dot[first:last], e[first:last], e_dot[first:last], I_dot[first:last]
        interaction_tangent(*tile)


@njit(**options)
def interaction_layer_tangent(x_dot, w, y, z_dot, e, e_dot, I_dot, pool):
    """ż = ẋ w, İ as above."""
    nothing = np.zeros((TILE, whole(w.shape[1], w.itemsize)), w.dtype)
    arguments = x_dot, packed_for(w), nothing, y, z_dot, e, e_dot, I_dot
    spread(_interaction_layer_tangent, y.shape[0], arguments, pool)


@njit(**options)
def _interaction_layer_adjoint(
    begin, end, ends, x, x_dot, w, nothing, y, z_dot, e, e_dot, I_hat, I_bar, add, x_bar, w_bar, b_bar
):
    g, shape = np.empty_like(nothing), (TILE + 1, y.shape[1], y.shape[2])
    z_bar, z_hat, width = np.zeros(shape, y.dtype), np.zeros(shape, y.dtype), y.shape[1] * y.shape[2]
    bars, hats = z_bar.reshape(TILE + 1, width), z_hat.reshape(TILE + 1, width)
    for part in range(begin, end):
        for first in range(ends[part], ends[part + 1], TILE):
            last = min(first + TILE, ends[part + 1])
            n, tile = last - first, (y[first:last], z_dot[first:last], e[first:last], e_dot[first:last])
            interaction_adjoint(*tile, I_hat[first:last], I_bar[first:last], z_hat, z_bar)
            sums_over_rows(x[first:last], x_dot[first:last], bars[:n], hats[:n], w_bar[part], b_bar[part, 0])
            product(bars[:n], w, x.shape[1], nothing, g)
            put(g, add, x_bar[first:last])


@njit(**options)
def interaction_layer_adjoint(x, x_dot, w, y, z_dot, e, e_dot, I_hat, I_bar, add, x_bar, w_bar, b_bar, pool):
    """z̄ and ẑ as above; x̄ = z̄ wᵀ, or added to it, w̄ = xᵀ z̄ + ẋᵀ ẑ, b̄ = Σ z̄."""
    nothing = np.zeros((TILE, whole(w.shape[0], w.itemsize)), w.dtype)
    ends, w_bars, b_bars = parts_of(x.shape[0], w)
    inputs = ends, x, x_dot, packed_for(w.T), nothing, y, z_dot, e, e_dot, I_hat, I_bar
    spread(_interaction_layer_adjoint, ends.shape[0] - 1, (*inputs, add, x_bar, w_bars, b_bars), pool)
    sum_of_parts(w_bars, w_bar)
    sum_of_parts(b_bars, b_bar)


# ---- the same where z = a_i + b_j: nothing but w is kept for pairs; ab (N, 2, nb, c)


@njit(**options)
def _direct(begin, end, ab, i, j, w, e, I):  # noqa: E741
    flat = w.reshape(w.shape[0], w.shape[1] * w.shape[2])
    step = tile_of_pairs(flat.shape[1])
    for first in range(begin, end, step):
        last = min(first + step, end)
        _pairs(first, last, ab, i, j, flat)
        _interaction(first, last, w, e, I)


@njit(**options)
def direct(ab, i, j, w, e, I, pool):  # noqa: E741
    spread(_direct, w.shape[0], (ab, i, j, w, e, I), pool)


@njit(**options)
def direct_back(w, e, I_hat, i, j, ab_hat, e_hat):
    zero, one, row = w.dtype.type(0), w.dtype.type(1), np.empty(w.shape[2], w.dtype)
    for p in range(w.shape[0]):
        first, second = i[p], j[p]
        for b in range(w.shape[1]):
            total, eb = zero, e[p, b]
            for c in range(w.shape[2]):
                t = w[p, b, c]
                row[c] = I_hat[p, c] * eb * (one - t * t)
                total += I_hat[p, c] * t
            e_hat[p, b] += total
            for c in range(w.shape[2]):
                ab_hat[first, 0, b, c] += row[c]
            for c in range(w.shape[2]):
                ab_hat[second, 1, b, c] += row[c]


@njit(**options)
def direct_tangent(w, ab_dot, i, j, e, e_dot, I_dot):
    one = w.dtype.type(1)
    for p in range(w.shape[0]):
        first, second = i[p], j[p]
        for c in range(w.shape[2]):
            I_dot[p, c] = 0
        for b in range(w.shape[1]):
            eb, db = e[p, b], e_dot[p, b]
            for c in range(w.shape[2]):
                t, z_dot = w[p, b, c], ab_dot[first, 0, b, c] + ab_dot[second, 1, b, c]
                I_dot[p, c] += (one - t * t) * z_dot * eb + t * db


@njit(**options)
def direct_adjoint(w, ab_dot, i, j, e, e_dot, I_hat, I_bar, ab_bar):
    one, two, row = w.dtype.type(1), w.dtype.type(2), np.empty(w.shape[2], w.dtype)
    for p in range(w.shape[0]):
        first, second = i[p], j[p]
        for b in range(w.shape[1]):
            eb, db = e[p, b], e_dot[p, b]
            for c in range(w.shape[2]):
                t, z_dot = w[p, b, c], ab_dot[first, 0, b, c] + ab_dot[second, 1, b, c]
                row[c] = (one - t * t) * (I_bar[p, c] * eb + I_hat[p, c] * (db - two * t * z_dot * eb))
            for c in range(w.shape[2]):
                ab_bar[first, 0, b, c] += row[c]
            for c in range(w.shape[2]):
                ab_bar[second, 1, b, c] += row[c]


# ---- the same where w depends on the kind of the pair only: w (kinds, nb, c)


@njit(**options)
def _of_kinds(begin, end, w, kind, e, I):  # noqa: E741
    for p in range(begin, end):
        k = kind[p]
        for c in range(w.shape[2]):
            I[p, c] = 0
        for b in range(w.shape[1]):
            eb = e[p, b]
            for c in range(w.shape[2]):
                I[p, c] += w[k, b, c] * eb


@njit(**options)
def of_kinds(w, kind, e, I, pool):  # noqa: E741
    """I = Σ_b w[kind] e_b; with ė for e the tangent."""
    spread(_of_kinds, I.shape[0], (w, kind, e, I), pool)


@njit(**options)
def _of_kinds_back(begin, end, w, kind, I_hat, e_hat):
    for p in range(begin, end):
        k = kind[p]
        for b in range(w.shape[1]):
            total = w.dtype.type(0)
            for c in range(w.shape[2]):
                total += I_hat[p, c] * w[k, b, c]
            e_hat[p, b] += total


@njit(**options)
def of_kinds_back(w, kind, I_hat, e_hat, pool):
    spread(_of_kinds_back, I_hat.shape[0], (w, kind, I_hat, e_hat), pool)


@njit(**options)
def of_kinds_adjoint(kind, e, e_dot, I_hat, I_bar, w_bar):
    for p in range(I_hat.shape[0]):
        k = kind[p]
        for b in range(w_bar.shape[1]):
            eb, db = e[p, b], e_dot[p, b]
            for c in range(w_bar.shape[2]):
                w_bar[k, b, c] += I_bar[p, c] * eb + I_hat[p, c] * db
