"""Compiled loops for CPUs (numba): over edges for the moments, over atoms for the Gram matrix of the descriptor.

Everything is recomputed from the edge vector, which is cheaper than reading it back. Edges are sorted by centre, so
what is written stays in the cache. One thread: a second thread pool beside torch's costs more than it brings.
Arguments: see moments.Geometry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from allforce.models.spline import WIDTH, polynomials

LANES = 8  # WIDTH filled up with zeros to whole vector registers
VALUE = np.zeros((WIDTH, LANES))  # [power, spline]
VALUE[:, :WIDTH] = polynomials().T
SLOPE = VALUE[1:] * np.arange(1, WIDTH)[:, None]

options: dict[str, Any] = {"fastmath": True, "cache": True, "error_model": "numpy", "nogil": True}
inline: dict[str, Any] = {"inline": "always", "fastmath": True, "error_model": "numpy"}


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
def interval(x, lo, inv_h, K):
    """Interval of the grid that x is in, and the place in it, 0 … 1."""
    v = (x - lo) * inv_h
    b = min(max(int(v), 0), K - WIDTH)
    return b, v - b


@njit(**inline)
def polynomial(table, u, out):
    """The WIDTH splines (or slopes) at u by Horner's rule, all lanes at once."""
    for m in range(LANES):
        out[m] = table[table.shape[0] - 1, m]
    for k in range(table.shape[0] - 2, -1, -1):
        for m in range(LANES):
            out[m] = out[m] * u + table[k, m]


@njit(**options)
def moments(r, j, first, types, center, used, rs, rc, p, r_close, lo, inv_h, K, begin, end, sel, A):
    """A[i, :, (t − begin)·K + k] += B_k(x_e) R̂_e over the edges of i, and the empty slots of `sel`."""
    value = np.empty(LANES)
    for i in range(types.shape[0]):
        tau = types[i]
        avg, scale_r, scale_a = center[tau, 0], center[tau, 1], center[tau, 2]
        empty = sel.copy()
        for e in range(first[i], first[i + 1]):
            t = types[j[e]]
            if t < begin or t >= end:
                continue
            empty[t] -= 1.0
            d, s, _, q, _ = radial(r[e, 0], r[e, 1], r[e, 2], rs, rc, p)
            if d < r_close or not used[tau, t]:
                continue
            x = (s - avg) * scale_r
            b, u = interval(x, lo, inv_h, K)
            polynomial(VALUE, u, value)
            b += (t - begin) * K
            v = q * scale_a / d
            vx, vy, vz = v * r[e, 0], v * r[e, 1], v * r[e, 2]
            for m in range(WIDTH):
                A[i, 0, b + m] += value[m] * x
                A[i, 1, b + m] += value[m] * vx
                A[i, 2, b + m] += value[m] * vy
                A[i, 3, b + m] += value[m] * vz
        x = -avg * scale_r
        b, u = interval(x, lo, inv_h, K)
        polynomial(VALUE, u, value)
        for t in range(begin, end):
            for m in range(WIDTH):
                A[i, 0, (t - begin) * K + b + m] += max(empty[t], 0.0) * value[m] * x


@njit(**options)
def pull(r, j, first, types, center, used, rs, rc, p, r_close, lo, inv_h, K, begin, end, gA, g):
    """g_e = ∂E/∂r_e from gA = ∂E/∂A; edges to other types, and those not on the grid, are left as they are."""
    value = np.empty(LANES)
    slope = np.empty(LANES)
    for i in range(types.shape[0]):
        tau = types[i]
        avg, scale_r, scale_a = center[tau, 0], center[tau, 1], center[tau, 2]
        for e in range(first[i], first[i + 1]):
            t = types[j[e]]
            if t < begin or t >= end:
                continue
            d, s, ds, q, dq = radial(r[e, 0], r[e, 1], r[e, 2], rs, rc, p)
            if d < r_close or not used[tau, t]:
                continue
            nx, ny, nz = r[e, 0] / d, r[e, 1] / d, r[e, 2] / d
            x = (s - avg) * scale_r
            b, u = interval(x, lo, inv_h, K)
            polynomial(VALUE, u, value)
            polynomial(SLOPE, u, slope)
            b += (t - begin) * K
            v0, vx, vy, vz, s0, sx, sy, sz = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0  # Σ_m value·gA and Σ_m slope·gA
            for m in range(WIDTH):
                g0, gx, gy, gz = gA[i, 0, b + m], gA[i, 1, b + m], gA[i, 2, b + m], gA[i, 3, b + m]
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
            along = (v0 + (s0 * x + sn * q * scale_a) * inv_h) * scale_r * ds + vn * scale_a * dq
            across = q * scale_a / d
            along -= across * vn
            g[e, 0] = along * nx + across * vx
            g[e, 1] = along * ny + across * vy
            g[e, 2] = along * nz + across * vz


@njit(**options)
def push(r, j, first, types, center, used, rs, rc, p, r_close, lo, inv_h, K, begin, end, u_edges, A):
    """The adjoint of pull: A += Σ_e ∂(B R̂)/∂r_e · u_e."""
    value = np.empty(LANES)
    slope = np.empty(LANES)
    for i in range(types.shape[0]):
        tau = types[i]
        avg, scale_r, scale_a = center[tau, 0], center[tau, 1], center[tau, 2]
        for e in range(first[i], first[i + 1]):
            t = types[j[e]]
            if t < begin or t >= end:
                continue
            d, s, ds, q, dq = radial(r[e, 0], r[e, 1], r[e, 2], rs, rc, p)
            if d < r_close or not used[tau, t]:
                continue
            nx, ny, nz = r[e, 0] / d, r[e, 1] / d, r[e, 2] / d
            ux, uy, uz = u_edges[e, 0], u_edges[e, 1], u_edges[e, 2]
            x = (s - avg) * scale_r
            b, u = interval(x, lo, inv_h, K)
            polynomial(VALUE, u, value)
            polynomial(SLOPE, u, slope)
            b += (t - begin) * K
            un = ux * nx + uy * ny + uz * nz
            dx = un * ds * scale_r
            across = q * scale_a / d
            along = (scale_a * dq - across) * un
            vx, vy, vz = along * nx + across * ux, along * ny + across * uy, along * nz + across * uz
            w = inv_h * dx
            w0, wx, wy, wz = w * x, w * q * scale_a * nx, w * q * scale_a * ny, w * q * scale_a * nz
            for m in range(WIDTH):
                A[i, 0, b + m] += slope[m] * w0 + value[m] * dx
                A[i, 1, b + m] += slope[m] * wx + value[m] * vx
                A[i, 2, b + m] += slope[m] * wy + value[m] * vy
                A[i, 3, b + m] += slope[m] * wz + value[m] * vz


@njit(**options)
def atoms_of_edges(i, j, g, out):
    """out_i += g_e, out_j −= g_e: what edges do to the atoms at their ends."""
    for e in range(i.shape[0]):
        a, b = i[e], j[e]
        for c in range(3):
            out[a, c] += g[e, c]
            out[b, c] -= g[e, c]


@njit(**options)
def edges_of_atoms(i, j, v, out):
    """The adjoint: out_e = v_i − v_j."""
    for e in range(i.shape[0]):
        a, b = i[e], j[e]
        for c in range(3):
            out[e, c] = v[a, c] - v[b, c]


@njit(**options)
def gram(X, Y, D):
    """D_n = X_nᵀ Y_n[:, :M2] + Y_nᵀ X_n[:, :M2] for X, Y (N, 4, M1), D (N, M1, M2)."""
    M1, M2 = D.shape[1], D.shape[2]
    x = np.empty((4, M2), dtype=X.dtype)  # the first M2 columns, close together
    y = np.empty((4, M2), dtype=X.dtype)
    row = np.empty(M2, dtype=X.dtype)
    for n in range(D.shape[0]):
        for c in range(4):
            for b in range(M2):
                x[c, b] = X[n, c, b]
                y[c, b] = Y[n, c, b]
        for a in range(M1):
            x0, x1, x2, x3 = X[n, 0, a], X[n, 1, a], X[n, 2, a], X[n, 3, a]
            y0, y1, y2, y3 = Y[n, 0, a], Y[n, 1, a], Y[n, 2, a], Y[n, 3, a]
            for b in range(M2):
                row[b] = (
                    x0 * y[0, b] + x1 * y[1, b] + x2 * y[2, b] + x3 * y[3, b]
                    + y0 * x[0, b] + y1 * x[1, b] + y2 * x[2, b] + y3 * x[3, b]
                )  # fmt: skip
            for b in range(M2):
                D[n, a, b] = row[b]


@njit(**options)
def gram_gradient(g, T, out):
    """out = ∂<g, TᵀT[:, :M2]>/∂T for g (N, M1, M2), T and out (N, 4, M1)."""
    M1, M2 = g.shape[1], g.shape[2]
    t = np.empty((4, M2), dtype=T.dtype)
    low = np.empty((4, M2), dtype=T.dtype)
    for n in range(g.shape[0]):
        for c in range(4):
            for b in range(M2):
                t[c, b] = T[n, c, b]
                low[c, b] = 0.0
        for a in range(M1):
            t0, t1, t2, t3 = T[n, 0, a], T[n, 1, a], T[n, 2, a], T[n, 3, a]
            s0, s1, s2, s3 = T.dtype.type(0), T.dtype.type(0), T.dtype.type(0), T.dtype.type(0)
            for b in range(M2):
                v = g[n, a, b]
                s0 += v * t[0, b]
                s1 += v * t[1, b]
                s2 += v * t[2, b]
                s3 += v * t[3, b]
            for b in range(M2):
                v = g[n, a, b]
                low[0, b] += v * t0
                low[1, b] += v * t1
                low[2, b] += v * t2
                low[3, b] += v * t3
            out[n, 0, a] = s0
            out[n, 1, a] = s1
            out[n, 2, a] = s2
            out[n, 3, a] = s3
        for c in range(4):
            for b in range(M2):
                out[n, c, b] += low[c, b]
