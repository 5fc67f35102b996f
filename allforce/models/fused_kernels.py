"""Compiled loops for CPUs (numba): what fused.py computes, there and back, in one call each.

What Python does between two loops takes as long as the loops where atoms are few. Tuples: `curve` (nodes, weights,
layout, factors, kept) of curve_kernels.py, `edges` what all loops over edges take (moments.Geometry.for_loops), `net`
(weights, plan, kept, pairs) of scalar_kernels.py, `pools` for the curves, the edges, D and the nets.
"""

from __future__ import annotations

import numpy as np

from allforce.loops import njit
from allforce.models.atom_kernels import adjoint_of_edges, edges_of_atoms, gram, gram_gradient, outputs_of_edges, square
from allforce.models.curve_kernels import curves, curves_back
from allforce.models.kernels import options
from allforce.models.scalar_kernels import adjoints, filled, tangents, values_and_gradients
from allforce.models.table_kernels import places_of_lists, table_gradient, table_pull, table_push, table_sum

# digests of other files, see atom_kernels.py
KERNELS, ATOM, CURVE, SCALAR, TABLE = "2726311b", "a294abc7", "c2f971aa", "21bb5c77", "762b146b"


@njit(**options)
def by_center(of_nets, factor, tables):
    """tables (centres, neighbours·K, M) = factor · of_nets (neighbours·centres, K, M)."""
    (nets, K, M), centers = of_nets.shape, tables.shape[0]
    for n in range(nets):
        source, target = of_nets[n].reshape(-1), tables[n % centers].reshape(-1)[n // centers * K * M :]
        for k in range(source.shape[0]):
            target[k] = factor * source[k]


@njit(**options)
def by_net(tables, factor, of_nets):
    """The transpose of by_center."""
    (nets, K, M), centers = of_nets.shape, tables.shape[0]
    for n in range(nets):
        target, source = of_nets[n].reshape(-1), tables[n % centers].reshape(-1)[n // centers * K * M :]
        for k in range(target.shape[0]):
            target[k] = factor * source[k]


@njit(**options)
def forward(curve, C, tiles, i, frame, edges, nnei, M2, sel, net, bias, energy, forces, virial, pools):
    """Energies (B,), forces (N, 3) and virials (B, 9), or (0, 9), are added to zeros; what the way back needs."""
    nodes, curve_weights, layout, factors, curves_kept = curve
    r, j, first, types, center, used, group, grid, weighted = edges
    weights, plan, kept, pairs = net
    N, M = forces.shape[0], C.shape[2]
    of_nets = np.empty((curve_weights.shape[1], nodes.shape[0], M), C.dtype)
    curves(nodes, curve_weights, layout, factors, curves_kept, of_nets, pools[0])
    by_center(of_nets, C.dtype.type(1 / nnei), C)
    at = places_of_lists(first, sel.shape[0], C.shape[1])
    met, size, A = np.empty(at[-1], np.int64), np.empty(N, np.int64), np.empty(4 * at[-1], C.dtype)
    T, G = np.empty((N, 4, M), C.dtype), np.empty((N, 4, M), C.dtype)
    table_sum(tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, sel, T, A, pools[1])
    D, e, g = np.empty((N, M * M2), C.dtype), np.empty(N, C.dtype), np.empty((N, filled(M * M2, C.itemsize)), C.dtype)
    square(T, M2, D, pools[2])
    values_and_gradients(D, weights, plan, kept, pairs, e, g, pools[3])
    gram_gradient(g, T, M2, G, pools[2])
    q = np.zeros_like(r)
    table_pull(tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, G, q, pools[1])
    for n in range(N):
        energy[frame[n]] += np.float64(e[n]) + bias[types[n]]
    outputs_of_edges(i, j, frame, r, q, forces, virial)
    return at, met, size, A, T, D, g, G


@njit(**options)
def backward(
    curve, C, tiles, strips, i, frame, edges, nnei, M2, net, of_forward, of_energy, of_forces, of_virial, of_curves,
    of_nets, pools,
):  # fmt: skip
    """The gradients of all parameters, to the addresses of_curves and of_nets."""
    nodes, curve_weights, layout, factors, curves_kept = curve
    r, j, first, types, center, used, group, grid, weighted = edges
    weights, plan, kept, pairs = net
    at, met, size, A, T, D, g, G = of_forward
    N = T.shape[0]
    u, G_bar, A_dot = np.empty_like(r), np.empty_like(T), np.empty_like(A)
    adjoint_of_edges(i, j, frame, r, of_forces, of_virial, u)
    table_push(
        tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, u, G_bar, A_dot, pools[1]
    )
    e_bar, g_bar, D_bar = np.empty(N, T.dtype), np.empty_like(D), np.empty_like(g)
    for n in range(N):
        e_bar[n] = of_energy[frame[n]]
    gram(G_bar, T, M2, g_bar, pools[2])
    adjoints(D, g_bar, e_bar, weights, of_nets, plan, kept, pairs, True, D_bar, pools[3])
    T_bar, part = np.empty_like(T), np.empty_like(T)
    gram_gradient(g, G_bar, M2, T_bar, pools[2])
    gram_gradient(D_bar, T, M2, part, pools[2])
    total, more = T_bar.reshape(-1), part.reshape(-1)
    for n in range(total.shape[0]):
        total[n] += more[n]
    C_bar = np.zeros_like(C)
    table_gradient(strips, at, met, size, A, T_bar, C_bar, pools[1])
    table_gradient(strips, at, met, size, A_dot, G, C_bar, pools[1])
    of_net = np.empty((curve_weights.shape[1], nodes.shape[0], C.shape[2]), C.dtype)
    by_net(C_bar, C.dtype.type(1 / nnei), of_net)
    curves_back(nodes, curve_weights, of_curves, layout, factors, curves_kept, of_net, pools[0])


@njit(**options)
def tangent(C, tiles, i, frame, edges, nnei, M2, net, of_forward, of_forces, made, pools):
    """Of all hidden layers, to `made`, along displacements −of_forces (N, 3)."""
    r, j, first, types, center, used, group, grid, weighted = edges
    weights, plan, kept = net
    at, met, size, A, T, D, g, G = of_forward
    u, T_dot, A_dot, D_dot = np.empty_like(r), np.empty_like(T), np.empty_like(A), np.empty_like(D)
    edges_of_atoms(i, j, of_forces, u)
    table_push(
        tiles, r, j, first, types, center, used, group, grid, weighted, at, met, size, C, u, T_dot, A_dot, pools[1]
    )  # fmt: skip
    gram(T_dot, T, M2, D_dot, pools[2])
    tangents(D, D_dot, weights, plan, kept, made, pools[3])
