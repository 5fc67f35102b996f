"""Compiled loops for CPUs (numba) of embedding nets on the nodes of their table, and of the splines through them.

    z_l = a_{l-1} w_l + b_l     a_l = idt_l φ(z_l) + residual(a_{l-1})     a_0 = nodes (K, 1)     M C = a_L
    backwards:  Mᵀ ā_L = C̄     z̄_l = ā_l idt_l φ'     w̄_l = a_{l-1}ᵀ z̄_l     ā_{l-1} = z̄_l w_lᵀ + residualᵀ(ā_l)

M = L D U is solved within its band (spline.py). A thread takes whole nets, so no sum is divided between threads.
`weights` (layers, nets, 3) and `gradients` have addresses, `layout` widths, as in scalar_kernels.py.
"""

from __future__ import annotations

import numpy as np

from allforce.loops import njit
from allforce.models.kernels import options
from allforce.models.plain_products import add_plain_product, times_transposed
from allforce.models.pool import spread
from allforce.models.products import VECTOR, WIDE, add_transposed_product
from allforce.models.scalar_kernels import (
    COPIES,
    IDT,
    IN,
    OUT,
    PLACE,
    B,
    W,
    add,
    add_residual,
    add_scaled,
    clear,
    copy,
    filled,
    matrix_at,
    product,
    to_tanh,
    transpose,
    vector_at,
    with_slope,
)

# digests of other files, see atom_kernels.py
KERNELS, PRODUCTS, PLAIN, SCALAR = "2726311b", "a61d4448", "abe0350c", "21bb5c77"

T, A = range(2)  # kept of each layer: φ(z) and a


@njit(**options)
def of_layer(numbers, layout, layer, net, nets, rows, like):
    """(K, out) of a layer of one net, in an array for all of them."""
    wide = filled(layout[layer, OUT], like.itemsize)
    begin = (layout[layer, PLACE] * nets + net * wide) * rows
    return numbers[begin : begin + rows * wide].reshape(rows, wide)


@njit(**options)
def scaled(x, factor, y):
    """y = factor x."""
    for c in range(y.shape[0]):
        y[c] = factor * x[c]


@njit(**options)
def solve(factors, y):
    """y (K, n) ← (L D U)⁻¹ y; a row of `factors` has what stands in L before, in 1/D, and in U behind the diagonal."""
    rows, side = factors.shape[0], factors.shape[1] // 2
    for n in range(rows):
        for m in range(max(0, side - n), side):
            add_scaled(y[n - side + m], -factors[n, m], y[n])
    for n in range(rows - 1, -1, -1):
        scaled(y[n], factors[n, side], y[n])
        for m in range(1, min(side, rows - 1 - n) + 1):
            add_scaled(y[n + m], -factors[n, side + m], y[n])


@njit(**options)
def _curves(begin, end, nodes, weights, layout, factors, kept, C):
    rows, layers, nets = nodes.shape[0], layout.shape[0], C.shape[0]
    for net in range(begin, end):
        x = nodes
        for n in range(layers):
            size_in, size_out = layout[n, IN], layout[n, OUT]
            w = matrix_at(weights[n, net, W], size_in, size_out, nodes)
            b, idt = (
                vector_at(weights[n, net, B], size_out, nodes),
                vector_at(weights[n, net, IDT], size_out, nodes),
            )
            t = of_layer(kept[T], layout, n, net, nets, rows, nodes)
            a = of_layer(kept[A], layout, n, net, nets, rows, nodes)
            for i in range(rows):
                copy(b, t[i][:size_out])
                clear(t[i][size_out:])
            add_plain_product(x, w, 0, size_out, t)
            to_tanh(t.reshape(-1))
            for i in range(rows):
                product(t[i], idt, a[i][:size_out])
                clear(a[i][size_out:])
            add_residual(x, size_in, layout[n, COPIES], 0, size_out, a)
            x = a
        y = x.copy()
        solve(factors, y)
        for i in range(rows):
            copy(y[i], C[net, i])


@njit(**options)
def curves(nodes, weights, layout, factors, kept, C, pool):
    """C (nets, K, M); what the way back needs is left in `kept`."""
    spread(_curves, C.shape[0], (nodes, weights, layout, factors, kept, C), pool)


@njit(**options)
def activation_adjoint(a_bar, t, idt, z_bar, b_bar, idt_bar):
    """z̄ = ā idt φ', and the sums over rows of z̄ and of ā φ."""
    size, one = idt.shape[0], np.empty(idt.shape[0], t.dtype)
    clear(b_bar)
    clear(idt_bar)
    for i in range(t.shape[0]):
        with_slope(a_bar[i][:size], idt, t[i][:size], z_bar[i][:size])
        add(z_bar[i], b_bar)
        product(a_bar[i], t[i], one)
        add(one, idt_bar)


@njit(**options)
def weight_gradient(x, z_bar, w_bar):
    """w̄ = xᵀ z̄."""
    y = np.zeros((x.shape[1], z_bar.shape[1]), x.dtype)
    add_transposed_product(x, z_bar, y)
    for k in range(w_bar.shape[0]):
        copy(y[k], w_bar[k])


@njit(**options)
def layer_back(z_bar, w, copies, a_bar):
    """z̄ wᵀ + residualᵀ(ā), (K, in)."""
    (rows, _), (size_in, size_out) = z_bar.shape, w.shape
    strip = WIDE * (VECTOR // z_bar.itemsize)
    zT = np.zeros((size_out, -(-rows // strip) * strip), z_bar.dtype)
    transpose(z_bar, 0, rows, 0, size_out, zT)
    y = np.zeros((rows, filled(size_in, z_bar.itemsize)), z_bar.dtype)
    times_transposed(zT, w, 0, size_in, y)
    for i in range(rows):
        for number in range(copies):
            add(a_bar[i][number * size_in :], y[i][:size_in])
    return y


@njit(**options)
def _curves_back(begin, end, nodes, weights, gradients, layout, factors, kept, C_bar):
    rows, nets = nodes.shape[0], C_bar.shape[0]
    for net in range(begin, end):
        last = layout.shape[0] - 1
        a_bar = np.zeros((rows, filled(layout[last, OUT], nodes.itemsize)), nodes.dtype)
        for i in range(rows):
            copy(C_bar[net, i], a_bar[i][: C_bar.shape[2]])
        solve(factors, a_bar)
        for n in range(last, -1, -1):
            size_in, size_out = layout[n, IN], layout[n, OUT]
            t = of_layer(kept[T], layout, n, net, nets, rows, nodes)
            z_bar = np.zeros_like(t)
            activation_adjoint(
                a_bar,
                t,
                vector_at(weights[n, net, IDT], size_out, nodes),
                z_bar,
                vector_at(gradients[n, net, B], size_out, nodes),
                vector_at(gradients[n, net, IDT], size_out, nodes),
            )
            x = of_layer(kept[A], layout, n - 1, net, nets, rows, nodes) if n > 0 else nodes
            weight_gradient(x, z_bar, matrix_at(gradients[n, net, W], size_in, size_out, nodes))
            if n > 0:
                w = matrix_at(weights[n, net, W], size_in, size_out, nodes)
                a_bar = layer_back(z_bar, w, layout[n, COPIES], a_bar)


@njit(**options)
def curves_back(nodes, weights, gradients, layout, factors, kept, C_bar, pool):
    """The gradients of all parameters from C̄; `factors` are those of Mᵀ."""
    spread(_curves_back, C_bar.shape[0], (nodes, weights, gradients, layout, factors, kept, C_bar), pool)
