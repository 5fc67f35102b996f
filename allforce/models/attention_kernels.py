"""Compiled loops for CPUs (numba) of the attention among neighbours; equations and names in attention_core.py.

A row is all keys k of one query j of atom i. It is worked on in short loops that stay in the cache, each with few
arrays, so that the compiler makes vector instructions of them. What belongs to one atom is written by one thread
(pool.py). rule = (smooth, dotr).
"""

from __future__ import annotations

import numpy as np

from allforce.loops import njit
from allforce.models.kernels import inline, options
from allforce.models.pool import spread

KERNELS = "2726311b"  # numba takes a loop from its cache while its own file is the same: see POOL in kernels.py
SHIFT = 20.0  # of the smooth softmax
NEVER = -1e30  # score of a key that is not there


@njit(**inline)
def by_component(u, w, i, c):
    """Unit vectors and switch function of the neighbours of atom i: c (4, n)."""
    for k in range(c.shape[1]):
        c[0, k], c[1, k], c[2, k], c[3, k] = u[i, k, 0], u[i, k, 1], u[i, k, 2], w[i, k]


@njit(**inline)
def from_components(c, i, u, w):
    """The way back."""
    for k in range(c.shape[1]):
        u[i, k, 0], u[i, k, 1], u[i, k, 2], w[i, k] = c[0, k], c[1, k], c[2, k], c[3, k]


@njit(**inline)
def gates(c, j, dotr, W, d):
    """W = w_j w_k and d = u_j·u_k, or 1, of row j."""
    x, y, z, w = c[0, j], c[1, j], c[2, j], c[3, j]
    for k in range(W.shape[0]):
        W[k] = w * c[3, k]
        d[k] = x * c[0, k] + y * c[1, k] + z * c[2, k] if dotr else 1.0


@njit(**inline)
def gate_tangents(c, c_dot, j, dotr, W, d):
    """The same of two factors that change."""
    x, y, z, w = c[0, j], c[1, j], c[2, j], c[3, j]
    for k in range(W.shape[0]):
        W[k] = w * c_dot[3, k]
        d[k] = x * c_dot[0, k] + y * c_dot[1, k] + z * c_dot[2, k] if dotr else 0.0
    x, y, z, w = c_dot[0, j], c_dot[1, j], c_dot[2, j], c_dot[3, j]
    for k in range(W.shape[0]):
        W[k] += w * c[3, k]
        d[k] += x * c[0, k] + y * c[1, k] + z * c[2, k] if dotr else 0.0


@njit(**inline)
def gate_adjoints(c, j, dotr, W_bar, d_bar, c_bar):
    """c̄ += adjoints of W and d of row j."""
    w, s = c[3, j], W_bar.dtype.type(0)
    for k in range(W_bar.shape[0]):
        s += W_bar[k] * c[3, k]
        c_bar[3, k] += W_bar[k] * w
    c_bar[3, j] += s
    if dotr:
        x, y, z = c[0, j], c[1, j], c[2, j]
        sx, sy, sz = d_bar.dtype.type(0), d_bar.dtype.type(0), d_bar.dtype.type(0)
        for k in range(d_bar.shape[0]):
            sx += d_bar[k] * c[0, k]
            sy += d_bar[k] * c[1, k]
            sz += d_bar[k] * c[2, k]
            c_bar[0, k] += d_bar[k] * x
            c_bar[1, k] += d_bar[k] * y
            c_bar[2, k] += d_bar[k] * z
        c_bar[0, j] += sx
        c_bar[1, j] += sy
        c_bar[2, j] += sz


@njit(**options)
def _gate(begin, end, s, w, u, beyond, rule, p, a):
    smooth, dotr = rule
    n = s.shape[1]
    c, W, d, t = np.empty((4, n), s.dtype), np.empty(n, s.dtype), np.empty(n, s.dtype), np.empty(n, s.dtype)
    for i in range(begin, end):
        by_component(u, w, i, c)
        for j in range(n):
            gates(c, j, dotr, W, d)
            top = s.dtype.type(-SHIFT if smooth else NEVER)
            for k in range(n):
                free = s[i, j, k] if c[3, k] > 0.0 else NEVER
                t[k] = (s[i, j, k] + SHIFT) * W[k] - SHIFT if smooth else free
                top = max(top, t[k])
            total = beyond * np.exp(-SHIFT - top) if smooth else 0.0
            for k in range(n):
                t[k] = np.exp(t[k] - top)
                total += t[k]
            f = 1.0 / total
            for k in range(n):
                p[i, j, k] = f * t[k]
                a[i, j, k] = f * t[k] * W[k] * d[k]


@njit(**options)
def gate(s, w, u, beyond, rule, p, a, pool):
    """p and a from s."""
    spread(_gate, s.shape[0], (s, w, u, beyond, rule, p, a), pool)


@njit(**options)
def _pull(begin, end, s, w, u, p, ga, rule, a, gs, gw, gu):
    smooth, dotr = rule
    n = s.shape[1]
    c, gc, W, d = np.empty((4, n), s.dtype), np.empty((4, n), s.dtype), np.empty(n, s.dtype), np.empty(n, s.dtype)
    gW, gd = np.empty(n, s.dtype), np.empty(n, s.dtype)
    for i in range(begin, end):
        by_component(u, w, i, c)
        gc[:] = 0.0
        for j in range(n):
            gates(c, j, dotr, W, d)
            m = s.dtype.type(0)
            for k in range(n):
                a[i, j, k] = p[i, j, k] * W[k] * d[k]
                m += ga[i, j, k] * a[i, j, k]
            for k in range(n):
                gt = p[i, j, k] * (ga[i, j, k] * W[k] * d[k] - m)
                gs[i, j, k] = gt * W[k] if smooth else gt
                gW[k] = p[i, j, k] * ga[i, j, k] * d[k] + gt * (s[i, j, k] + SHIFT)
                gd[k] = p[i, j, k] * ga[i, j, k] * W[k]
            gate_adjoints(c, j, dotr, gW, gd, gc)
        from_components(gc, i, gu, gw)


@njit(**options)
def pull(s, w, u, p, ga, rule, a, gs, gw, gu, pool):
    """gs, gw and gu from ga; and a once more."""
    spread(_pull, s.shape[0], (s, w, u, p, ga, rule, a, gs, gw, gu), pool)


@njit(**options)
def _push(begin, end, s, w, u, p, ga, s_dot, w_dot, u_dot, b, rule, a, a_dot, gs, s_bar, w_bar, u_bar):
    smooth, dotr = rule
    n = s.shape[1]
    c, c_dot, c_bar = np.empty((4, n), s.dtype), np.empty((4, n), s.dtype), np.empty((4, n), s.dtype)
    W, d, W_dot, d_dot = np.empty(n, s.dtype), np.empty(n, s.dtype), np.empty(n, s.dtype), np.empty(n, s.dtype)
    t_dot, gp, p_bar, gt = np.empty(n, s.dtype), np.empty(n, s.dtype), np.empty(n, s.dtype), np.empty(n, s.dtype)
    gW, gd, W_bar, d_bar = np.empty(n, s.dtype), np.empty(n, s.dtype), np.empty(n, s.dtype), np.empty(n, s.dtype)
    for i in range(begin, end):
        by_component(u, w, i, c)
        by_component(u_dot, w_dot, i, c_dot)
        c_bar[:] = 0.0
        for j in range(n):
            gates(c, j, dotr, W, d)
            gate_tangents(c, c_dot, j, dotr, W_dot, d_dot)
            m, mean_dot = s.dtype.type(0), s.dtype.type(0)
            for k in range(n):
                t_dot[k] = s_dot[i, j, k] * W[k] + (s[i, j, k] + SHIFT) * W_dot[k] if smooth else s_dot[i, j, k]
                gp[k] = ga[i, j, k] * W[k] * d[k]
                mean_dot += p[i, j, k] * t_dot[k]
                m += p[i, j, k] * gp[k]
            mean_bar = s.dtype.type(0)
            for k in range(n):
                q, q_dot = p[i, j, k], p[i, j, k] * (t_dot[k] - mean_dot)
                both = W_dot[k] * d[k] + W[k] * d_dot[k]
                gt[k] = q * (gp[k] - m)
                a[i, j, k] = q * W[k] * d[k]
                a_dot[i, j, k] = q_dot * W[k] * d[k] + q * both
                p_bar[k] = ga[i, j, k] * both + b[i, j, k] * W[k] * d[k] + gp[k] * (t_dot[k] - mean_dot) - m * t_dot[k]
                mean_bar += q * p_bar[k]
            for k in range(n):
                q, q_dot = p[i, j, k], p[i, j, k] * (t_dot[k] - mean_dot)
                t_bar = q * (p_bar[k] - mean_bar)
                gs[i, j, k] = gt[k] * W[k] if smooth else gt[k]
                s_bar[i, j, k] = t_bar * W[k] + gt[k] * W_dot[k] if smooth else t_bar
                gW[k] = gt[k] * (s[i, j, k] + SHIFT) + q * ga[i, j, k] * d[k]
                gd[k] = q * ga[i, j, k] * W[k]
                W_bar[k] = t_bar * (s[i, j, k] + SHIFT) + gt[k] * s_dot[i, j, k]
                W_bar[k] += ga[i, j, k] * (q_dot * d[k] + q * d_dot[k]) + b[i, j, k] * q * d[k]
                d_bar[k] = ga[i, j, k] * (q_dot * W[k] + q * W_dot[k]) + b[i, j, k] * q * W[k]
            gate_adjoints(c, j, dotr, W_bar, d_bar, c_bar)
            gate_adjoints(c_dot, j, dotr, gW, gd, c_bar)
        from_components(c_bar, i, u_bar, w_bar)


@njit(**options)
def push(s, w, u, p, ga, s_dot, w_dot, u_dot, b, rule, a, a_dot, gs, s_bar, w_bar, u_bar, pool):
    """a and gs once more, the tangent of a, and the adjoints of s, w and u of Σ ga ȧ + b a."""
    arguments = (s, w, u, p, ga, s_dot, w_dot, u_dot, b, rule, a, a_dot, gs, s_bar, w_bar, u_bar)
    spread(_push, s.shape[0], arguments, pool)


@njit(**options)
def _unit_rows(begin, end, z, normalize, y, f):
    for r in range(begin, end):
        for m in range(3):
            s = z.dtype.type(0)
            for k in range(z.shape[2]):
                s += z[r, m, k] * z[r, m, k]
            f[r, m] = 1.0 / max(np.sqrt(s), 1e-12) if normalize else 1.0
            for k in range(z.shape[2]):
                y[m, r, k] = f[r, m] * z[r, m, k]


@njit(**options)
def unit_rows(z, normalize, y, f, pool):
    """y = f z, f = 1/|z| or 1, for z (rows, 3, h), f (rows, 3), y (3, rows, h)."""
    spread(_unit_rows, z.shape[0], (z, normalize, y, f), pool)


@njit(**options)
def _unit_pull(begin, end, y, f, normalize, gy, gf, gz, along):
    for r in range(begin, end):
        for m in range(3):
            s = y.dtype.type(0)
            for k in range(y.shape[2]):
                s += y[m, r, k] * gy[m, r, k]
            s = s if normalize else y.dtype.type(0)
            along[r, m] = s
            s += f[r, m] * gf[r, m]
            for k in range(y.shape[2]):
                gz[r, m, k] = f[r, m] * (gy[m, r, k] - s * y[m, r, k])


@njit(**options)
def unit_pull(y, f, normalize, gy, gf, gz, along, pool):
    """gz = f (gy − y (y·gy + f gf)); along = y·gy, or 0."""
    spread(_unit_pull, f.shape[0], (y, f, normalize, gy, gf, gz, along), pool)


@njit(**options)
def _unit_push(begin, end, y, f, normalize, gz, along, z_dot, y_dot, y_bar, f_bar):
    for r in range(begin, end):
        for m in range(3):
            b, c, e = along[r, m], y.dtype.type(0), y.dtype.type(0)
            for k in range(y.shape[2]):
                c += y[m, r, k] * z_dot[r, m, k]
                e += gz[r, m, k] * z_dot[r, m, k]
            c = c if normalize else y.dtype.type(0)
            f_bar[r, m] = e / f[r, m] if normalize else 0.0
            for k in range(y.shape[2]):
                y_dot[m, r, k] = f[r, m] * (z_dot[r, m, k] - c * y[m, r, k])
                y_bar[m, r, k] = -f[r, m] * b * (z_dot[r, m, k] + c * y[m, r, k]) - c * gz[r, m, k]


@njit(**options)
def unit_push(y, f, normalize, gz, along, z_dot, y_dot, y_bar, f_bar, pool):
    """Of <ż, gz> at gf = 0: the adjoints ẏ of gy, and those of y and f."""
    spread(_unit_push, f.shape[0], (y, f, normalize, gz, along, z_dot, y_dot, y_bar, f_bar), pool)


@njit(**options)
def _norm_rows(begin, end, x, eps, y, f):
    n = x.shape[1]
    for r in range(begin, end):
        mean, square = x.dtype.type(0), x.dtype.type(0)
        for k in range(n):
            mean += x[r, k]
        mean /= n
        for k in range(n):
            y[r, k] = x[r, k] - mean
            square += y[r, k] * y[r, k]
        f[r] = 1.0 / np.sqrt(square / n + eps)
        for k in range(n):
            y[r, k] *= f[r]


@njit(**options)
def norm_rows(x, eps, y, f, pool):
    """y = f (x − mean x), f = 1/√(var x + eps) for x (rows, M), f (rows,)."""
    spread(_norm_rows, x.shape[0], (x, eps, y, f), pool)


@njit(**options)
def _norm_pull(begin, end, y, f, gy, gf, gx):
    n = y.shape[1]
    for r in range(begin, end):
        mean, along = y.dtype.type(0), y.dtype.type(0)
        for k in range(n):
            mean += gy[r, k]
            along += gy[r, k] * y[r, k]
        mean, along = mean / n, (along + f[r] * gf[r]) / n
        for k in range(n):
            gx[r, k] = f[r] * (gy[r, k] - mean - along * y[r, k])


@njit(**options)
def norm_pull(y, f, gy, gf, gx, pool):
    """gx = f (gy − mean gy − y mean(y gy + f gf/M))."""
    spread(_norm_pull, y.shape[0], (y, f, gy, gf, gx), pool)


@njit(**options)
def _norm_push(begin, end, y, f, gy, x_dot, y_dot, y_bar, f_bar):
    n = y.shape[1]
    for r in range(begin, end):
        mean, m, c, b, e = (y.dtype.type(0), y.dtype.type(0), y.dtype.type(0), y.dtype.type(0), y.dtype.type(0))
        for k in range(n):
            mean += x_dot[r, k]
            m += gy[r, k]
            c += y[r, k] * x_dot[r, k]
            b += y[r, k] * gy[r, k]
            e += gy[r, k] * x_dot[r, k]
        f_bar[r] = e - (m * mean + b * c) / n
        mean, c, b = mean / n, c / n, b / n
        for k in range(n):
            y_dot[r, k] = f[r] * (x_dot[r, k] - mean - c * y[r, k])
            y_bar[r, k] = -f[r] * (b * x_dot[r, k] + c * gy[r, k])


@njit(**options)
def norm_push(y, f, gy, x_dot, y_dot, y_bar, f_bar, pool):
    """Of <ẋ, gx> at gf = 0: the adjoints ẏ of gy, and those of y and f."""
    spread(_norm_push, y.shape[0], (y, f, gy, x_dot, y_dot, y_bar, f_bar), pool)
