"""Compiled loops over the pairs of PiNet, for the steps of pinet_steps.py, which has the equations.

Pairs are sorted by their first atom, so what is written to it stays in the cache. Letters: i, j (E,) the atoms of a
pair, `first` (N + 1,) the pairs of each atom; e, e_dot, e_hat (E, nb) the basis; w (E, nb, c) = tanh(z); ab (N, 2h) =
[a, b] of every atom, z = a_i + b_j. Loops with a `pool` write to pairs, or to their first atom, and run on torch's
threads (pool.py). What goes to the second atom, or into one sum, is added on one thread, in the order of the pairs.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from allforce.models.kernels import inline, options
from allforce.models.pool import spread

KERNELS = "b90919f2"  # numba takes a loop from its cache while its own file is the same: see POOL in kernels.py


@njit(**options)
def tanh_adjoint(y, y_hat, y_dot, y_bar, z_bar):
    """z̄ = ȳ (1 − y²) − 2 y ŷ ẏ, all in one row."""
    one, two = y.dtype.type(1), y.dtype.type(2)
    for n in range(y.shape[0]):
        t = y[n]
        z_bar[n] = y_bar[n] * (one - t * t) - two * t * y_hat[n] * y_dot[n]


@njit(**options)
def add_rows(x, total):
    """total += Σ_n x_n."""
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            total[c] += x[n, c]


# ---- between atoms and pairs


@njit(**options)
def _to_pairs(begin, end, ab, i, j, z):
    h = z.shape[1]
    for p in range(begin, end):
        a, b = i[p], j[p]
        for c in range(h):
            z[p, c] = ab[a, c] + ab[b, h + c]


@njit(**options)
def to_pairs(ab, i, j, z, pool):
    """z = a_i + b_j."""
    spread(_to_pairs, z.shape[0], (ab, i, j, z), pool)


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
        for p in range(first[a], first[a + 1]):
            for c in range(x.shape[1]):
                y[a, c] += x[p, c]


@njit(**options)
def sum_of_pairs(x, first, y, pool):
    """y_i += x."""
    spread(_sum_of_pairs, first.shape[0] - 1, (x, first, y), pool)


@njit(**options)
def _add_to_pairs(begin, end, y, i, x):
    for p in range(begin, end):
        a = i[p]
        for c in range(x.shape[1]):
            x[p, c] += y[a, c]


@njit(**options)
def add_to_pairs(y, i, x, pool):
    """x += y_i."""
    spread(_add_to_pairs, x.shape[0], (y, i, x), pool)


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


# ---- the same where z = a_i + b_j: nothing but w is kept for pairs; ab (N, 2, nb, c)


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


# ---- vectors: y_i = Σ_j q x, q = a_i + b_j + n; a, b, y (3 N, c), x the last c columns of (E, ·); no rows: no a or b


@njit(**inline)
def seen(a, b, n, u, v, q):
    for c in range(q.shape[0]):
        q[c] = n
    if a.shape[0] > 0:
        for c in range(q.shape[0]):
            q[c] += a[u, c]
    if b.shape[0] > 0:
        for c in range(q.shape[0]):
            q[c] += b[v, c]


@njit(**inline)
def scatter(q, u, v, a, b):
    """a_i += q, b_j += q, where there are such."""
    if a.shape[0] > 0:
        for c in range(q.shape[0]):
            a[u, c] += q[c]
    if b.shape[0] > 0:
        for c in range(q.shape[0]):
            b[v, c] += q[c]


@njit(**options)
def _vectors(begin, end, a, b, n, x, first, j, y):
    width, q = y.shape[1], np.empty(y.shape[1], y.dtype)
    skip = x.shape[1] - width
    for i in range(begin, end):
        for p in range(first[i], first[i + 1]):
            for k in range(3):
                u, v = 3 * i + k, 3 * j[p] + k
                seen(a, b, n[p, k], u, v, q)
                for c in range(width):
                    y[u, c] += q[c] * x[p, skip + c]


@njit(**options)
def vectors(a, b, n, x, first, j, y, pool):
    spread(_vectors, first.shape[0] - 1, (a, b, n, x, first, j, y), pool)


@njit(**options)
def vectors_back(a, b, n, x, i, j, y_hat, a_hat, b_hat, n_hat, x_hat):
    """x̂ += Σ q ŷ_i; q̂ = ŷ_i x goes to a, b and n."""
    width, q = y_hat.shape[1], np.empty(y_hat.shape[1], y_hat.dtype)
    skip = x.shape[1] - width
    for p in range(x.shape[0]):
        for k in range(3):
            u, v, total = 3 * i[p] + k, 3 * j[p] + k, x.dtype.type(0)
            seen(a, b, n[p, k], u, v, q)
            for c in range(width):
                x_hat[p, skip + c] += q[c] * y_hat[u, c]
            for c in range(width):
                g = y_hat[u, c] * x[p, skip + c]
                q[c] = g
                total += g
            n_hat[p, k] += total
            scatter(q, u, v, a_hat, b_hat)


@njit(**options)
def _vectors_tangent(begin, end, a, b, n, x, first, j, a_dot, b_dot, n_dot, x_dot, y_dot):
    width = y_dot.shape[1]
    skip, q, q_dot = x.shape[1] - width, np.empty(width, x.dtype), np.empty(width, x.dtype)
    for i in range(begin, end):
        for p in range(first[i], first[i + 1]):
            for k in range(3):
                u, v = 3 * i + k, 3 * j[p] + k
                seen(a, b, n[p, k], u, v, q)
                seen(a_dot, b_dot, n_dot[p, k], u, v, q_dot)
                for c in range(width):
                    y_dot[u, c] += q[c] * x_dot[p, skip + c] + q_dot[c] * x[p, skip + c]


@njit(**options)
def vectors_tangent(a, b, n, x, first, j, a_dot, b_dot, n_dot, x_dot, y_dot, pool):
    spread(_vectors_tangent, first.shape[0] - 1, (a, b, n, x, first, j, a_dot, b_dot, n_dot, x_dot, y_dot), pool)


@njit(**options)
def vectors_adjoint(a, b, n, x, i, j, a_dot, b_dot, n_dot, x_dot, y_hat, y_bar, a_bar, b_bar, x_bar):
    """x̄ += Σ q ȳ_i + q̇ ŷ_i; q̄ = ȳ_i x + ŷ_i ẋ goes to a and b."""
    width = y_hat.shape[1]
    skip, q, q_dot = x.shape[1] - width, np.empty(width, x.dtype), np.empty(width, x.dtype)
    for p in range(x.shape[0]):
        for k in range(3):
            u, v = 3 * i[p] + k, 3 * j[p] + k
            seen(a, b, n[p, k], u, v, q)
            seen(a_dot, b_dot, n_dot[p, k], u, v, q_dot)
            for c in range(width):
                x_bar[p, skip + c] += q[c] * y_bar[u, c] + q_dot[c] * y_hat[u, c]
            for c in range(width):
                q[c] = y_bar[u, c] * x[p, skip + c] + y_hat[u, c] * x_dot[p, skip + c]
            scatter(q, u, v, a_bar, b_bar)
