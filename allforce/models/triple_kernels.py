"""Compiled loops for CPUs over pairs of neighbours of an atom (se_e3.py); see kernels.py.

v (E, 3) a vector for each edge, `first` the edges of each atom, `kind` (E,) the type of the neighbour,
`net_index` (nt, nt) the net of two neighbour types; grid = (lo, inv_h, K): K splines from lo on, inv_h intervals to a
unit.
What is written belongs to the central atom or to its edges, so they run on torch's threads (pool.py).
"""

from __future__ import annotations

import numpy as np

from allforce.loops import njit
from allforce.models.kernels import LANES, SLOPE, VALUE, inline, options, polynomial
from allforce.models.pool import spread
from allforce.models.spline import WIDTH

KERNELS = "2726311b"  # numba takes a loop from its cache while its own file is the same: see POOL in kernels.py


@njit(**inline)
def arsinh(g):
    """Odd, so that no digits are lost for negative g."""
    a = abs(g)
    x = np.log(a + np.sqrt(a * a + 1.0))
    return x if g >= 0.0 else -x


@njit(**inline)
def pair(v, kind, net_index, grid, j, k, value):
    """Of the edges j and k: g, its place in A, how often it counts; the splines at arsinh g, and where in the interval.

    Two neighbours of one type count twice: as (j, k) and as (k, j).
    """
    lo, inv_h, K = grid
    g = v[j, 0] * v[k, 0] + v[j, 1] * v[k, 1] + v[j, 2] * v[k, 2]
    z = (arsinh(g) - lo) * inv_h
    b = min(max(int(z), 0), K - WIDTH)
    polynomial(VALUE, z - b, value)
    w = 2.0 if kind[j] == kind[k] and j != k else 1.0
    return g, net_index[kind[j], kind[k]] * K + b, w, z - b


@njit(**inline)
def slope_of(g, u, grid, value, slope):
    """value = ∂(g B(arsinh g))/∂g."""
    polynomial(SLOPE, u, slope)
    steep = g * grid[1] / np.sqrt(1.0 + g * g)
    for m in range(WIDTH):
        value[m] += steep * slope[m]


@njit(**options)
def _moments(begin, end, v, first, kind, net_index, grid, A):
    value = np.empty(LANES)
    for i in range(begin, end):
        for j in range(first[i], first[i + 1]):
            for k in range(j, first[i + 1]):
                g, at, w, _ = pair(v, kind, net_index, grid, j, k, value)
                for m in range(WIDTH):
                    A[i, at + m] += w * g * value[m]


@njit(**options)
def moments(v, first, kind, net_index, grid, A, pool):
    """A[i, n·K + k] += g B_k(arsinh g), g = v_j·v_k, over pairs of edges of i; n the net of their neighbour types."""
    spread(_moments, first.shape[0] - 1, (v, first, kind, net_index, grid, A), pool)


@njit(**options)
def _pull(begin, end, v, first, kind, net_index, grid, gA, gv):
    value = np.empty(LANES)
    slope = np.empty(LANES)
    for i in range(begin, end):
        for j in range(first[i], first[i + 1]):
            for k in range(j, first[i + 1]):
                g, at, w, u = pair(v, kind, net_index, grid, j, k, value)
                slope_of(g, u, grid, value, slope)
                s = 0.0
                for m in range(WIDTH):
                    s += value[m] * gA[i, at + m]
                s *= w
                for c in range(3):
                    gv[j, c] += s * v[k, c]
                    gv[k, c] += s * v[j, c]


@njit(**options)
def pull(v, first, kind, net_index, grid, gA, gv, pool):
    """gv = ∂E/∂v from gA = ∂E/∂A."""
    spread(_pull, first.shape[0] - 1, (v, first, kind, net_index, grid, gA, gv), pool)


@njit(**options)
def _push(begin, end, v, first, kind, net_index, grid, u, A):
    value = np.empty(LANES)
    slope = np.empty(LANES)
    for i in range(begin, end):
        for j in range(first[i], first[i + 1]):
            for k in range(j, first[i + 1]):
                g, at, w, z = pair(v, kind, net_index, grid, j, k, value)
                slope_of(g, z, grid, value, slope)
                dg = 0.0
                for c in range(3):
                    dg += u[j, c] * v[k, c] + v[j, c] * u[k, c]
                for m in range(WIDTH):
                    A[i, at + m] += value[m] * w * dg


@njit(**options)
def push(v, first, kind, net_index, grid, u, A, pool):
    """The adjoint of pull: A += ∂(g B)/∂g (u_j·v_k + v_j·u_k)."""
    spread(_push, first.shape[0] - 1, (v, first, kind, net_index, grid, u, A), pool)
