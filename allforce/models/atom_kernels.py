"""Compiled loops for CPUs (numba) over atoms: forces from edges, the descriptor from T."""

from __future__ import annotations

import numpy as np

from allforce.loops import njit
from allforce.models.kernels import options
from allforce.models.pool import spread

KERNELS = "2726311b"  # numba takes a loop from its cache while its own file is the same: see POOL in kernels.py


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
def outputs_of_edges(i, j, frame, r, q, forces, virial):
    """Forces (N, 3) += and virials (B, 9) −= of q_e = ∂E/∂r_e; virials if there are rows for them."""
    atoms_of_edges(i, j, q, forces)
    for e in range(i.shape[0] if virial.shape[0] > 0 else 0):
        of_frame = virial[frame[i[e]]]
        for a in range(3):
            for b in range(3):
                of_frame[3 * a + b] -= q[e, a] * r[e, b]


@njit(**options)
def adjoint_of_edges(i, j, frame, r, forces, virial, u):
    """Its adjoint: u_e = F̄_i − F̄_j − Ξ̄ r_e."""
    edges_of_atoms(i, j, forces, u)
    for e in range(i.shape[0] if virial.shape[0] > 0 else 0):
        of_frame = virial[frame[i[e]]]
        for a in range(3):
            for b in range(3):
                u[e, a] -= of_frame[3 * a + b] * r[e, b]


@njit(**options)
def _square(begin, end, T, M2, D):
    M1 = T.shape[2]
    t = np.empty((4, M2), dtype=T.dtype)  # the first M2 columns, close together
    row = np.empty(M2, dtype=T.dtype)
    for n in range(begin, end):
        for c in range(4):
            for b in range(M2):
                t[c, b] = T[n, c, b]
        for a in range(M1):
            t0, t1, t2, t3 = T[n, 0, a], T[n, 1, a], T[n, 2, a], T[n, 3, a]
            for b in range(M2):
                row[b] = t0 * t[0, b] + t1 * t[1, b] + t2 * t[2, b] + t3 * t[3, b]
            for b in range(M2):
                D[n, a * M2 + b] = row[b]


@njit(**options)
def square(T, M2, D, pool):
    """D_n = T_nᵀ T_n[:, :M2] for T (N, 4, M1), in the first M1·M2 columns of D."""
    spread(_square, D.shape[0], (T, M2, D), pool)


@njit(**options)
def _gram(begin, end, X, Y, M2, D):
    M1 = X.shape[2]
    x = np.empty((4, M2), dtype=X.dtype)  # the first M2 columns, close together
    y = np.empty((4, M2), dtype=X.dtype)
    row = np.empty(M2, dtype=X.dtype)
    for n in range(begin, end):
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
                D[n, a * M2 + b] = row[b]


@njit(**options)
def gram(X, Y, M2, D, pool):
    """D_n = X_nᵀ Y_n[:, :M2] + Y_nᵀ X_n[:, :M2] for X, Y (N, 4, M1), in the first M1·M2 columns of D."""
    spread(_gram, D.shape[0], (X, Y, M2, D), pool)


@njit(**options)
def _gram_gradient(begin, end, g, T, M2, out):
    M1 = T.shape[2]
    t = np.empty((4, M2), dtype=T.dtype)
    low = np.empty((4, M2), dtype=T.dtype)
    for n in range(begin, end):
        for c in range(4):
            for b in range(M2):
                t[c, b] = T[n, c, b]
                low[c, b] = 0.0
        for a in range(M1):
            t0, t1, t2, t3 = T[n, 0, a], T[n, 1, a], T[n, 2, a], T[n, 3, a]
            s0, s1, s2, s3 = T.dtype.type(0), T.dtype.type(0), T.dtype.type(0), T.dtype.type(0)
            for b in range(M2):
                v = g[n, a * M2 + b]
                s0 += v * t[0, b]
                s1 += v * t[1, b]
                s2 += v * t[2, b]
                s3 += v * t[3, b]
            for b in range(M2):
                v = g[n, a * M2 + b]
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


@njit(**options)
def gram_gradient(g, T, M2, out, pool):
    """out = ∂<g, TᵀT[:, :M2]>/∂T for T and out (N, 4, M1), g in the first M1·M2 columns of an array."""
    spread(_gram_gradient, g.shape[0], (g, T, M2, out), pool)
