"""Compiled loops over the vectors of PiNet2, for the steps of pinet2_steps.py; letters as in pinet_kernels.py."""

from __future__ import annotations

import numpy as np

from allforce.loops import njit
from allforce.models.kernels import inline, options
from allforce.models.pool import spread

KERNELS = "2726311b"  # numba takes a loop from its cache while its own file is the same: see POOL in kernels.py


@njit(**options)
def dots(a, b, add, y):
    """y_ic = Σ_k a_ikc b_ikc of vectors (3 N, c), or added to it."""
    for n in range(y.shape[0]):
        if not add:
            for c in range(y.shape[1]):
                y[n, c] = 0
        for k in range(3 * n, 3 * n + 3):
            for c in range(y.shape[1]):
                y[n, c] += a[k, c] * b[k, c]


@njit(**options)
def scaled(a, s, add, y):
    """y_ikc = a_ikc s_ic of vectors (3 N, c) and scalars, or added to it."""
    for n in range(s.shape[0]):
        for k in range(3 * n, 3 * n + 3):
            if add:
                for c in range(s.shape[1]):
                    y[k, c] += a[k, c] * s[n, c]
            else:
                for c in range(s.shape[1]):
                    y[k, c] = a[k, c] * s[n, c]


# ---- vectors: y_i = Σ_j q x, q = a_i + b_j + n; a, b, y (3 N, c), x the last c columns of (E, ·); no rows: no a or b


@njit(**options)
def or_zeros(a, width):
    """a, or the three rows that all atoms have instead."""
    return a if a.shape[0] > 0 else np.zeros((3, width), a.dtype)


@njit(**inline)
def add_seen(a, u, b, v, n, y, w, x):
    """x += Σ_k q_k y_k, with the rows from u of a, from v of b and from w of y."""
    a0, a1, a2, b0, b1, b2 = a[u], a[u + 1], a[u + 2], b[v], b[v + 1], b[v + 2]
    y0, y1, y2, n0, n1, n2 = y[w], y[w + 1], y[w + 2], n[0], n[1], n[2]
    for c in range(x.shape[0]):
        x[c] += (n0 + a0[c] + b0[c]) * y0[c] + (n1 + a1[c] + b1[c]) * y1[c] + (n2 + a2[c] + b2[c]) * y2[c]


@njit(**options)
def _vectors(begin, end, a, b, n, x, first, j, y):
    width, of_a, of_b = y.shape[1], 3 * min(a.shape[0], 1), 3 * min(b.shape[0], 1)
    a, b, skip = or_zeros(a, width), or_zeros(b, width), x.shape[1] - width
    for i in range(begin, end):
        for p in range(first[i], first[i + 1]):
            scalars = x[p, skip:]
            for k in range(3):
                to_i, to_j, along, target = a[of_a * i + k], b[of_b * j[p] + k], n[p, k], y[3 * i + k]
                for c in range(width):
                    target[c] += (along + to_i[c] + to_j[c]) * scalars[c]


@njit(**options)
def vectors(a, b, n, x, first, j, y, pool):
    spread(_vectors, first.shape[0] - 1, (a, b, n, x, first, j, y), pool)


@njit(**options)
def vectors_back(a, b, n, x, i, j, y_hat, a_hat, b_hat, n_hat, x_hat):
    """x̂ += Σ q ŷ_i; q̂ = ŷ_i x goes to a, b and n."""
    width, of_a, of_b = y_hat.shape[1], 3 * min(a.shape[0], 1), 3 * min(b.shape[0], 1)
    a, b, skip = or_zeros(a, width), or_zeros(b, width), x.shape[1] - width
    for p in range(x.shape[0]):
        scalars = x[p, skip:]
        add_seen(a, of_a * i[p], b, of_b * j[p], n[p], y_hat, 3 * i[p], x_hat[p, skip:])
        for k in range(3):
            hat, total = y_hat[3 * i[p] + k], x.dtype.type(0)
            for c in range(width):
                total += hat[c] * scalars[c]
            n_hat[p, k] += total
            if of_a:
                target = a_hat[3 * i[p] + k]
                for c in range(width):
                    target[c] += hat[c] * scalars[c]
            if of_b:
                target = b_hat[3 * j[p] + k]
                for c in range(width):
                    target[c] += hat[c] * scalars[c]


@njit(**options)
def _vectors_tangent(begin, end, a, b, n, x, first, j, a_dot, b_dot, n_dot, x_dot, y_dot):
    width, of_a, of_b = y_dot.shape[1], 3 * min(a.shape[0], 1), 3 * min(b.shape[0], 1)
    a, b, skip = or_zeros(a, width), or_zeros(b, width), x.shape[1] - width
    a_dot, b_dot = or_zeros(a_dot, width), or_zeros(b_dot, width)
    for i in range(begin, end):
        for p in range(first[i], first[i + 1]):
            scalars, scalars_dot = x[p, skip:], x_dot[p, skip:]
            for k in range(3):
                u, v, along, along_dot, target = of_a * i + k, of_b * j[p] + k, n[p, k], n_dot[p, k], y_dot[3 * i + k]
                to_i, to_j, to_i_dot, to_j_dot = a[u], b[v], a_dot[u], b_dot[v]
                for c in range(width):
                    q, q_dot = along + to_i[c] + to_j[c], along_dot + to_i_dot[c] + to_j_dot[c]
                    target[c] += q * scalars_dot[c] + q_dot * scalars[c]


@njit(**options)
def vectors_tangent(a, b, n, x, first, j, a_dot, b_dot, n_dot, x_dot, y_dot, pool):
    spread(_vectors_tangent, first.shape[0] - 1, (a, b, n, x, first, j, a_dot, b_dot, n_dot, x_dot, y_dot), pool)


@njit(**options)
def vectors_adjoint(a, b, n, x, i, j, a_dot, b_dot, n_dot, x_dot, y_hat, y_bar, a_bar, b_bar, x_bar):
    """x̄ += Σ q ȳ_i + q̇ ŷ_i; q̄ = ȳ_i x + ŷ_i ẋ goes to a and b."""
    width, of_a, of_b = y_hat.shape[1], 3 * min(a.shape[0], 1), 3 * min(b.shape[0], 1)
    a, b, skip = or_zeros(a, width), or_zeros(b, width), x.shape[1] - width
    a_dot, b_dot = or_zeros(a_dot, width), or_zeros(b_dot, width)
    for p in range(x.shape[0]):
        scalars, scalars_dot = x[p, skip:], x_dot[p, skip:]
        add_seen(a, of_a * i[p], b, of_b * j[p], n[p], y_bar, 3 * i[p], x_bar[p, skip:])
        add_seen(a_dot, of_a * i[p], b_dot, of_b * j[p], n_dot[p], y_hat, 3 * i[p], x_bar[p, skip:])
        for k in range(3):
            hat, bar = y_hat[3 * i[p] + k], y_bar[3 * i[p] + k]
            if of_a:
                target = a_bar[3 * i[p] + k]
                for c in range(width):
                    target[c] += bar[c] * scalars[c] + hat[c] * scalars_dot[c]
            if of_b:
                target = b_bar[3 * j[p] + k]
                for c in range(width):
                    target[c] += bar[c] * scalars[c] + hat[c] * scalars_dot[c]
