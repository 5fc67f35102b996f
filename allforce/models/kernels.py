"""Compiled loops over edges for CPUs (numba): the moments, their derivative and its adjoint in one pass each.

Everything is recomputed from the edge vector, which is cheaper than reading it back. Edges are sorted by centre,
so the threads share out the centres and never write to the same place. Arguments: see moments.Geometry.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from allforce.models.spline import WIDTH, polynomials

VALUE = polynomials()  # (WIDTH, WIDTH) ascending powers
SLOPE = np.zeros_like(VALUE)
SLOPE[:, :-1] = VALUE[:, 1:] * np.arange(1, WIDTH)

options = {"parallel": True, "fastmath": True, "cache": True, "error_model": "numpy", "nogil": True}
inline = {"inline": "always", "fastmath": True, "error_model": "numpy"}


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
def splines(x, lo, inv_h, intervals, value, slope):
    """Interval of x; fills the WIDTH values and slopes there."""
    v = (x - lo) * inv_h
    b = min(max(int(v), 0), intervals - 1)
    u = v - b
    for m in range(WIDTH):
        a = VALUE[m, WIDTH - 1]
        d = SLOPE[m, WIDTH - 2]
        for k in range(WIDTH - 2, -1, -1):
            a = a * u + VALUE[m, k]
        for k in range(WIDTH - 3, -1, -1):
            d = d * u + SLOPE[m, k]
        value[m] = a
        slope[m] = d * inv_h
    return b


@njit(**options)
def moments(r, j, first, types, center, used, sel, rs, rc, p, r_close, lo, inv_h, K, A):
    """A[i, :, t·K + k] += B_k(x_e) R̂_e over the edges of i, and the empty slots of `sel`."""
    ntypes = sel.shape[0]
    for i in prange(types.shape[0]):
        tau = types[i]
        avg, scale_r, scale_a = center[tau, 0], center[tau, 1], center[tau, 2]
        value = np.empty(WIDTH)
        slope = np.empty(WIDTH)
        empty = sel.copy()
        for e in range(first[i], first[i + 1]):
            t = types[j[e]]
            empty[t] -= 1.0
            d, s, _, q, _ = radial(r[e, 0], r[e, 1], r[e, 2], rs, rc, p)
            if d < r_close or not used[tau, t]:
                continue
            x = (s - avg) * scale_r
            b = splines(x, lo, inv_h, K - WIDTH + 1, value, slope) + t * K
            v = q * scale_a / d
            vx, vy, vz = v * r[e, 0], v * r[e, 1], v * r[e, 2]
            for m in range(WIDTH):
                A[i, 0, b + m] += value[m] * x
                A[i, 1, b + m] += value[m] * vx
                A[i, 2, b + m] += value[m] * vy
                A[i, 3, b + m] += value[m] * vz
        x = -avg * scale_r
        b = splines(x, lo, inv_h, K - WIDTH + 1, value, slope)
        for t in range(ntypes):
            for m in range(WIDTH):
                A[i, 0, t * K + b + m] += max(empty[t], 0.0) * value[m] * x


@njit(**options)
def pull(r, j, first, types, center, used, rs, rc, p, r_close, lo, inv_h, K, gA, g):
    """g_e = ∂E/∂r_e from gA = ∂E/∂A."""
    for i in prange(types.shape[0]):
        tau = types[i]
        avg, scale_r, scale_a = center[tau, 0], center[tau, 1], center[tau, 2]
        value = np.empty(WIDTH)
        slope = np.empty(WIDTH)
        for e in range(first[i], first[i + 1]):
            t = types[j[e]]
            d, s, ds, q, dq = radial(r[e, 0], r[e, 1], r[e, 2], rs, rc, p)
            if d < r_close or not used[tau, t]:
                g[e, 0] = 0.0
                g[e, 1] = 0.0
                g[e, 2] = 0.0
                continue
            nx, ny, nz = r[e, 0] / d, r[e, 1] / d, r[e, 2] / d
            x = (s - avg) * scale_r
            b = splines(x, lo, inv_h, K - WIDTH + 1, value, slope) + t * K
            v0, vx, vy, vz, s0, sn = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0  # Σ_m value·gA and Σ_m slope·gA
            for m in range(WIDTH):
                g0, gx, gy, gz = gA[i, 0, b + m], gA[i, 1, b + m], gA[i, 2, b + m], gA[i, 3, b + m]
                v0 += value[m] * g0
                vx += value[m] * gx
                vy += value[m] * gy
                vz += value[m] * gz
                s0 += slope[m] * g0
                sn += slope[m] * (gx * nx + gy * ny + gz * nz)
            vn = vx * nx + vy * ny + vz * nz
            along = (v0 + s0 * x + sn * q * scale_a) * scale_r * ds + vn * scale_a * dq
            across = q * scale_a / d
            along -= across * vn
            g[e, 0] = along * nx + across * vx
            g[e, 1] = along * ny + across * vy
            g[e, 2] = along * nz + across * vz


@njit(**options)
def push(r, j, first, types, center, used, rs, rc, p, r_close, lo, inv_h, K, u, A):
    """The adjoint of pull: A += Σ_e ∂(B R̂)/∂r_e · u_e."""
    for i in prange(types.shape[0]):
        tau = types[i]
        avg, scale_r, scale_a = center[tau, 0], center[tau, 1], center[tau, 2]
        value = np.empty(WIDTH)
        slope = np.empty(WIDTH)
        for e in range(first[i], first[i + 1]):
            t = types[j[e]]
            d, s, ds, q, dq = radial(r[e, 0], r[e, 1], r[e, 2], rs, rc, p)
            if d < r_close or not used[tau, t]:
                continue
            nx, ny, nz = r[e, 0] / d, r[e, 1] / d, r[e, 2] / d
            x = (s - avg) * scale_r
            b = splines(x, lo, inv_h, K - WIDTH + 1, value, slope) + t * K
            un = u[e, 0] * nx + u[e, 1] * ny + u[e, 2] * nz
            dx = un * ds * scale_r
            across = q * scale_a / d
            along = scale_a * dq * un - across * un
            vx, vy, vz = along * nx + across * u[e, 0], along * ny + across * u[e, 1], along * nz + across * u[e, 2]
            rx, ry, rz = q * scale_a * nx, q * scale_a * ny, q * scale_a * nz
            for m in range(WIDTH):
                w = slope[m] * dx
                A[i, 0, b + m] += w * x + value[m] * dx
                A[i, 1, b + m] += w * rx + value[m] * vx
                A[i, 2, b + m] += w * ry + value[m] * vy
                A[i, 3, b + m] += w * rz + value[m] * vz


@njit(fastmath=True, cache=True, nogil=True)
def scatter(i, j, g, out):
    """out_i += g_e, out_j −= g_e: what edges do to the atoms at their ends."""
    for e in range(i.shape[0]):
        a, b = i[e], j[e]
        for c in range(3):
            out[a, c] += g[e, c]
            out[b, c] -= g[e, c]
