"""Compiled loops for CPUs (numba) of nets with one output, one for each type, while they are trained: see scalar_net.py
for the equations.

A sweep goes from layer to layer, and within a layer all nets are worked on together: strips of the columns of w there,
rows of w on the way back, are shared out to the threads. All rows of x meet a piece of w while it is in the cache, and
what follows the product (bias, tanh, slopes, residuals) is done for that piece at once. No sum is divided between
threads.

Nets have the same widths. Rows starts[t] … starts[t + 1] − 1 of all arrays belong to net t, of which at most TILE form
a tile. `weights` (nets, 3) has the addresses of w, b and idt of one layer, `gradients` those of their gradients.
`pairs` (2 N, out) has z̄ and below it g of each net, so that w̄ = aᵀ z̄ + ȧᵀ g is one product: z̄ of row i is in row
starts[t] + i, g in row starts[t + 1] + i. Numbers behind `out` in a row fill up the last register.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from allforce.loops import njit
from allforce.models.kernels import inline, options
from allforce.models.plain_products import add_plain_product, times_transposed
from allforce.models.pool import spread
from allforce.models.products import VECTOR, add_transposed_product
from allforce.models.tanh import tanh

# digests of other files, see atom_kernels.py
KERNELS, PRODUCTS, TANH, PLAIN = "2726311b", "a61d4448", "a50c7186", "abe0350c"

CHUNK = 256  # rows of `pairs` at a time
IN, OUT, COPIES, PLACE = range(
    4
)  # columns of `layout`: widths, copies of x that are added, where a layer's arrays begin
W, B, IDT = range(3)  # columns of `weights` and `gradients`
T, A, G_ = range(3)  # kept of each layer: φ(z), a and ∂e/∂a
Z_DOT, A_DOT, A_BAR = range(3)  # made on the way back


@intrinsic
def pointer_to(typingctx, address, like):
    """To numbers as in the array `like`."""
    kind = types.CPointer(like.dtype)

    def generate(context, builder, _, values):
        return builder.inttoptr(values[0], context.get_value_type(kind))

    return kind(types.int64, like), generate


@njit(**inline)
def vector_at(address, length, like):
    return carray(pointer_to(address, like), (length,))


@njit(**inline)
def matrix_at(address, rows, columns, like):
    return carray(pointer_to(address, like), (rows, columns))


@njit(**inline)
def filled(columns, itemsize):
    """Columns filled up to whole registers."""
    one = VECTOR // itemsize
    return -(-columns // one) * one


@njit(**options)
def of_layer(numbers, layout, layer, x):
    """(N, out) of a layer, in an array for all of them."""
    rows, wide = x.shape[0], filled(layout[layer, OUT], x.itemsize)
    begin = layout[layer, PLACE] * rows
    return numbers[begin : begin + rows * wide].reshape(rows, wide)


@njit(**options)
def pairs_of(numbers, layout, layer, x):
    """(2 N, out) of a layer, likewise."""
    rows, wide = 2 * x.shape[0], filled(layout[layer, OUT], x.itemsize)
    begin = layout[layer, PLACE] * rows
    return numbers[begin : begin + rows * wide].reshape(rows, wide)


@njit(**options)
def of_tile(numbers, tile, out):
    """xᵀ (out, rows filled up to a multiple of 8) of a tile, in an array for all tiles."""
    rows = tile[4]
    return numbers[tile[3] : tile[3] + out * rows].reshape(out, rows)


# ---- numbers in one row: short loops over few arrays, for which the compiler uses vector instructions


@njit(**options)
def copy(x, y):
    for c in range(y.shape[0]):
        y[c] = x[c]


@njit(**options)
def clear(x):
    """x = 0: as an assignment to a slice it would take a second to compile."""
    for c in range(x.shape[0]):
        x[c] = 0


@njit(**options)
def add(x, y):
    """y += x."""
    for c in range(y.shape[0]):
        y[c] += x[c]


@njit(**options)
def add_scaled(x, factor, y):
    """y += factor x."""
    for c in range(y.shape[0]):
        y[c] += factor * x[c]


@njit(**options)
def product(x, y, z):
    """z = x y."""
    for c in range(z.shape[0]):
        z[c] = x[c] * y[c]


@njit(**options)
def to_tanh(z):
    for c in range(z.shape[0]):
        z[c] = tanh(z[c])


@njit(**options)
def with_slope(x, idt, t, y):
    """y = x idt φ', with φ = t."""
    one = t.dtype.type(1)
    for c in range(y.shape[0]):
        y[c] = x[c] * idt[c] * (one - t[c] * t[c])


@njit(**options)
def curved_adjoint(a_bar, idt, t, curved, z_bar):
    """z̄ = idt (ā φ' + curved φ''/φ')."""
    one, two = t.dtype.type(1), t.dtype.type(2)
    for c in range(z_bar.shape[0]):
        z_bar[c] = idt[c] * (one - t[c] * t[c]) * (a_bar[c] - two * t[c] * curved[c])


@njit(**options)
def add_idt_adjoint(a_bar, t, curved, idt_bar):
    """idt̄ += ā φ + curved φ'."""
    one = t.dtype.type(1)
    for c in range(idt_bar.shape[0]):
        idt_bar[c] += a_bar[c] * t[c] + curved[c] * (one - t[c] * t[c])


# ---- there


@njit(**options)
def add_residual(x, wide, copies, left, right, y):
    """y[:, left:right] += those columns of x (n, wide), of [x, x], or nothing."""
    for number in range(copies):
        begin = number * wide
        first, last = max(left, begin), min(right, begin + wide)
        for i in range(y.shape[0] if first < last else 0):
            add(x[i][first - begin : last - begin], y[i][first:last])


@njit(**options)
def _layer(begin, end, tasks, tiles, x, shape, weights, t, a):
    size_in, size_out = shape[IN], shape[OUT]
    for n in range(begin, end):
        tile, left, right = tiles[tasks[n, 0]], tasks[n, 1], tasks[n, 2]
        first, last, net = tile[0], tile[1], tile[2]
        w = matrix_at(weights[net, W], size_in, size_out, x)
        b, idt = vector_at(weights[net, B], size_out, x), vector_at(weights[net, IDT], size_out, x)
        z = np.empty((last - first, filled(right - left, x.itemsize)), x.dtype)
        for i in range(last - first):
            copy(b[left:right], z[i][: right - left])
        add_plain_product(x[first:last], w, left, right, z)
        to_tanh(z.reshape(-1))
        for i in range(last - first):
            copy(z[i], t[first + i][left:right])
            product(z[i], idt[left:right], a[first + i][left:right])
        add_residual(x[first:last], size_in, shape[COPIES], left, right, a[first:last])


@njit(**options)
def _tangent(begin, end, tasks, tiles, x, shape, weights, t, z_dot, a_dot):
    size_in, size_out = shape[IN], shape[OUT]
    for n in range(begin, end):
        tile, left, right = tiles[tasks[n, 0]], tasks[n, 1], tasks[n, 2]
        first, last, net = tile[0], tile[1], tile[2]
        w, idt = matrix_at(weights[net, W], size_in, size_out, x), vector_at(weights[net, IDT], size_out, x)
        z = np.zeros((last - first, filled(right - left, x.itemsize)), x.dtype)
        add_plain_product(x[first:last], w, left, right, z)
        for i in range(last - first):
            copy(z[i], z_dot[first + i][left:right])
            with_slope(z[i], idt[left:right], t[first + i][left:right], a_dot[first + i][left:right])
        add_residual(x[first:last], size_in, shape[COPIES], left, right, a_dot[first:last])


# ---- and back


@njit(**options)
def transpose(x, first, last, left, right, xT):
    """Rows left … right − 1 of xT from those columns of x, rows first … last − 1."""
    for c in range(left, right):
        for i in range(last - first):
            xT[c, i] = x[first + i, c]


@njit(**options)
def times_slope(net, tile, left, right, weights, starts, t, G, pairs, gT):
    """g = G idt φ' of a tile, columns left … right − 1."""
    idt = vector_at(weights[net, IDT], right, t)[left:]
    for i in range(tile[0], tile[1]):
        with_slope(G[i][left:right], idt, t[i][left:right], pairs[starts[net + 1] + i][left:right])
    transpose(pairs, starts[net + 1] + tile[0], starts[net + 1] + tile[1], left, right, gT)


@njit(**options)
def _value(begin, end, tiles, shape, weights, last_weights, starts, t, a, G, pairs, g, e):
    """e, and g of the last hidden layer, of some tiles."""
    for n in range(begin, end):
        tile, size = tiles[n], shape[OUT]
        net = tile[2]
        w, b = vector_at(last_weights[net, W], size, t), vector_at(last_weights[net, B], 1, t)
        for i in range(tile[0], tile[1]):
            copy(w, G[i][:size])
            total = b[0]
            for c in range(size):
                total += a[i, c] * w[c]
            e[i] = total
        times_slope(net, tile, 0, size, weights, starts, t, G, pairs, of_tile(g, tile, size))


@njit(**options)
def product_back(tile, task, shape, weights, above, g, y):
    """y[:, r] = g w[r]ᵀ + residualᵀ(above) for the rows r of a task, of a tile."""
    size_in, size_out = shape[IN], shape[OUT]
    net, begin, end, first, last = task[0], task[1], task[2], tile[0], tile[1]
    w = matrix_at(weights[net, W], size_in, size_out, y)
    times_transposed(of_tile(g, tile, size_out), w, begin, end, y[first:last])
    for number in range(shape[COPIES]):
        for i in range(first, last):
            add(above[i][number * size_in + begin : number * size_in + end], y[i][begin:end])


@njit(**options)
def _back(begin, end, tasks, tiles, of_net, shape, weights, below, starts, above, g, y, inner, t, pairs, g_next):
    for n in range(begin, end):
        task = tasks[n]
        for k in range(of_net[task[0]], of_net[task[0] + 1]):
            product_back(tiles[k], task, shape, weights, above, g, y)
            if inner:
                gT = of_tile(g_next, tiles[k], shape[IN])
                times_slope(task[0], tiles[k], task[1], task[2], below, starts, t, y, pairs, gT)


@njit(**options)
def activation_adjoint(net, left, right, weights, gradients, starts, t, G, z_dot, a_bar, pairs):
    """z̄ = ā idt φ' + G idt φ'' ż, its sums b̄ over the rows, and those of idt: ā φ + G φ' ż."""
    idt, curved = vector_at(weights[net, IDT], right, t)[left:], np.empty(right - left, t.dtype)
    b_bar, idt_bar = vector_at(gradients[net, B], right, t)[left:], vector_at(gradients[net, IDT], right, t)[left:]
    clear(b_bar)
    clear(idt_bar)
    for i in range(starts[net], starts[net + 1]):
        phi, a, z_bar = t[i][left:right], a_bar[i][left:right], pairs[starts[net] + i][left:right]
        product(G[i][left:right], z_dot[i][left:right], curved)
        curved_adjoint(a, idt, phi, curved, z_bar)
        add(z_bar, b_bar)
        add_idt_adjoint(a, phi, curved, idt_bar)


@njit(**options)
def transpose_tiles(net, left, right, tiles, of_net, starts, out, pairs, z):
    """z̄ᵀ of the tiles of a net, columns left … right − 1."""
    for k in range(of_net[net], of_net[net + 1]):
        first, last = starts[net] + tiles[k, 0], starts[net] + tiles[k, 1]
        transpose(pairs, first, last, left, right, of_tile(z, tiles[k], out))


@njit(**options)
def _value_adjoint(
    begin, end, tasks, tiles, of_net, shape, weights, gradients, last_weights, last_gradients, starts,
    t, a, G, z_dot, a_dot, a_bar, pairs, z, e_bar,
):  # fmt: skip
    """Gradients of the last layer, ā and z̄ of the last hidden one, for some of its columns."""
    for n in range(begin, end):
        net, left, right = tasks[n, 0], tasks[n, 1], tasks[n, 2]
        w, w_bar = vector_at(last_weights[net, W], right, t)[left:], vector_at(last_gradients[net, W], right, t)[left:]
        b_bar = vector_at(last_gradients[net, B], 1, t)
        clear(w_bar)
        total = t.dtype.type(0)
        for i in range(starts[net], starts[net + 1]):
            total += e_bar[i]
            add_scaled(a[i][left:right], e_bar[i], w_bar)
            add(a_dot[i][left:right], w_bar)
            clear(a_bar[i][left:right])
            add_scaled(w, e_bar[i], a_bar[i][left:right])
        if left == 0:
            b_bar[0] = total
        activation_adjoint(net, left, right, weights, gradients, starts, t, G, z_dot, a_bar, pairs)
        transpose_tiles(net, left, right, tiles, of_net, starts, shape[OUT], pairs, z)


@njit(**options)
def weight_gradient(task, shape, gradients, starts, x, x_dot, pairs):
    """w̄ = xᵀ z̄ + ẋᵀ g, rows of a task."""
    net, begin, end, size_out = task[0], task[1], task[2], shape[OUT]
    first, rows, wide = starts[net], starts[net + 1] - starts[net], pairs.shape[1]
    w_bar = matrix_at(gradients[net, W], shape[IN], size_out, x)
    y = w_bar[begin:end] if wide == size_out else np.empty((end - begin, wide), x.dtype)
    clear(y.reshape(-1))
    for low in range(0, 2 * rows, CHUNK):
        high = min(low + CHUNK, 2 * rows)
        piece = np.empty((high - low, end - begin), x.dtype)
        for k in range(low, high):
            source = x[first + k] if k < rows else x_dot[first + k - rows]
            copy(source[begin:end], piece[k - low])
        add_transposed_product(piece, pairs[2 * first + low : 2 * first + high], y)
    if wide != size_out:
        for k in range(begin, end):
            copy(y[k - begin][:size_out], w_bar[k])


@njit(**options)
def _adjoint(
    begin, end, tasks, tiles, of_net, shape, weights, gradients, below, gradients_below, starts, x, x_dot, above, pairs,
    z, wanted, y, inner, t, G, z_dot, pairs_next, z_next,
):  # fmt: skip
    for n in range(begin, end):
        task = tasks[n]
        weight_gradient(task, shape, gradients, starts, x, x_dot, pairs)
        if wanted:
            for k in range(of_net[task[0]], of_net[task[0] + 1]):
                product_back(tiles[k], task, shape, weights, above, z, y)
        if inner:
            net, left, right = task[0], task[1], task[2]
            activation_adjoint(net, left, right, below, gradients_below, starts, t, G, z_dot, y, pairs_next)
            transpose_tiles(net, left, right, tiles, of_net, starts, shape[IN], pairs_next, z_next)


# ---- all layers; plan: see scalar_sweeps.py


@njit(**options)
def layer_by_layer(x, weights, plan, kept, pool):
    layout, _, tiles, _, there, _, ends = plan
    for n in range(layout.shape[0] - 1):
        tasks = there[ends[0, n] : ends[0, n + 1]]
        t, a = of_layer(kept[T], layout, n, x), of_layer(kept[A], layout, n, x)
        source = x if n == 0 else of_layer(kept[A], layout, n - 1, x)
        spread(_layer, tasks.shape[0], (tasks, tiles, source, layout[n], weights[n], t, a), pool)


@njit(**options)
def values(x, weights, plan, kept, pairs, g, e, pool):
    layout, starts, tiles = plan[0], plan[1], plan[2]
    n = layout.shape[0] - 2
    t, a, G = of_layer(kept[T], layout, n, x), of_layer(kept[A], layout, n, x), of_layer(kept[G_], layout, n, x)
    both = pairs_of(pairs, layout, n, x)
    given = (tiles, layout[n], weights[n], weights[n + 1], starts, t, a, G, both, g[n % 2], e)
    spread(_value, tiles.shape[0], given, pool)


@njit(**options)
def values_and_gradients(x, weights, plan, kept, pairs, e, gradient, pool):
    """e and ∂e/∂x; what the way back needs is left in `kept` and `pairs`."""
    layout, starts, tiles, of_net, _, back, ends = plan
    layer_by_layer(x, weights, plan, kept, pool)
    g = np.empty((2, tiles[-1, 3] + layout[:, OUT].max() * tiles[-1, 4]), x.dtype)
    values(x, weights, plan, kept, pairs, g, e, pool)
    for n in range(layout.shape[0] - 2, -1, -1):
        tasks, low = back[ends[1, n] : ends[1, n + 1]], max(0, n - 1)
        t, G, both = (
            of_layer(kept[T], layout, low, x),
            of_layer(kept[G_], layout, n, x),
            pairs_of(pairs, layout, low, x),
        )
        y = of_layer(kept[G_], layout, low, x) if n > 0 else gradient
        given = (tasks, tiles, of_net, layout[n], weights[n], weights[low], starts)
        spread(_back, tasks.shape[0], given + (G, g[n % 2], y, n > 0, t, both, g[(n + 1) % 2]), pool)


@njit(**options)
def tangents(x, v, weights, plan, kept, made, pool):
    layout, _, tiles, _, there, _, ends = plan
    for n in range(layout.shape[0] - 1):
        tasks, t = there[ends[0, n] : ends[0, n + 1]], of_layer(kept[T], layout, n, x)
        z_dot, a_dot = of_layer(made[Z_DOT], layout, n, x), of_layer(made[A_DOT], layout, n, x)
        source = v if n == 0 else of_layer(made[A_DOT], layout, n - 1, x)
        spread(_tangent, tasks.shape[0], (tasks, tiles, source, layout[n], weights[n], t, z_dot, a_dot), pool)


@njit(**options)
def value_adjoints(x, e_bar, weights, gradients, plan, kept, made, pairs, z, pool):
    layout, starts, tiles, of_net, _, back, ends = plan
    n = layout.shape[0] - 2
    tasks = back[ends[1, n + 1] : ends[1, n + 2]]
    t, a, G = of_layer(kept[T], layout, n, x), of_layer(kept[A], layout, n, x), of_layer(kept[G_], layout, n, x)
    z_dot, a_dot = of_layer(made[Z_DOT], layout, n, x), of_layer(made[A_DOT], layout, n, x)
    a_bar, both = of_layer(made[A_BAR], layout, n, x), pairs_of(pairs, layout, n, x)
    given = (tasks, tiles, of_net, layout[n], weights[n], gradients[n], weights[n + 1], gradients[n + 1], starts)
    spread(_value_adjoint, tasks.shape[0], given + (t, a, G, z_dot, a_dot, a_bar, both, z[n % 2], e_bar), pool)


@njit(**options)
def adjoints(x, v, e_bar, weights, gradients, plan, kept, pairs, wanted, x_bar, pool):
    """x̄ if it is wanted, and the gradients of all parameters, from ē and v."""
    layout, starts, tiles, of_net, _, back, ends = plan
    made = np.empty((3, kept.shape[1]), x.dtype)
    z = np.empty((2, tiles[-1, 3] + layout[:, OUT].max() * tiles[-1, 4]), x.dtype)
    tangents(x, v, weights, plan, kept, made, pool)
    value_adjoints(x, e_bar, weights, gradients, plan, kept, made, pairs, z, pool)
    for n in range(layout.shape[0] - 2, -1, -1):
        tasks, low = back[ends[1, n] : ends[1, n + 1]], max(0, n - 1)
        t, G, z_dot = (
            of_layer(kept[T], layout, low, x),
            of_layer(kept[G_], layout, low, x),
            of_layer(made[Z_DOT], layout, low, x),
        )
        a = of_layer(kept[A], layout, low, x) if n > 0 else x
        a_dot = of_layer(made[A_DOT], layout, low, x) if n > 0 else v
        a_bar, y = of_layer(made[A_BAR], layout, n, x), of_layer(made[A_BAR], layout, low, x) if n > 0 else x_bar
        both, both_below = pairs_of(pairs, layout, n, x), pairs_of(pairs, layout, low, x)
        given = (tasks, tiles, of_net, layout[n], weights[n], gradients[n], weights[low], gradients[low], starts)
        paths = (a, a_dot, a_bar, both, z[n % 2], wanted or n > 0, y, n > 0)
        spread(_adjoint, tasks.shape[0], given + paths + (t, G, z_dot, both_below, z[(n + 1) % 2]), pool)
