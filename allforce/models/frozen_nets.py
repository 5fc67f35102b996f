"""Nets with one output that are not trained: values and gradients of a tile of rows at a time (see scalar_net.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from allforce.loops import njit
from allforce.models.kernels import compiled, options
from allforce.models.layers import Net
from allforce.models.pool import spread, threads
from allforce.models.products import add_product, highest, packed, tiles_of, whole_strips
from allforce.models.tanh import tanh

KERNELS, PRODUCTS, TANH = "2726311b", "a61d4448", "a50c7186"  # digests of other files, see atom_kernels.py

IN, OUT, COPIES, THERE, BACK, B, IDT = range(7)  # columns of `layout`


class FrozenNets:
    """Nets of the same shape, packed: all numbers of a net in one row, and where each layer has its own there."""

    def __init__(self, nets: Sequence[Net], types: Sequence[int]):
        self.types = sorted(types)  # those of the nets that are packed: a model may know many more than are there
        self.parameters = [p for t in self.types for p in nets[t].parameters()]
        self.state = self.now()
        rows = []
        for t in self.types:
            self.layout, parts, place = np.zeros((len(nets[t].layers), 7), dtype=np.int64), [], 0
            for n, layer in enumerate(nets[t].layers):
                w, b = (p.detach().numpy() for p in (layer.w, layer.b))
                idt = np.ones_like(b) if layer.idt is None else layer.idt.detach().numpy()
                pieces = [packed(w), packed(w.T), b, idt]
                places = place + np.cumsum([0, *(len(p) for p in pieces)])
                self.layout[n] = *w.shape, layer.copies, *places[:-1]
                parts += pieces
                place = places[-1]
            rows.append(np.concatenate(parts))
        self.weights = np.stack(rows)
        self.width = whole_strips(int(self.layout[:-1, OUT].max()), self.weights.dtype)  # of the widest hidden layer

    def now(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), p._version) for p in self.parameters]

    def serves(self, counts: Sequence[int]) -> bool:
        """For rows of these nets, as long as their parameters are what they were."""
        return sum(counts[t] for t in self.types) == sum(counts) and self.now() == self.state

    def __call__(self, x: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """e (N,) and ∂e/∂x (N, m) of x (N, m), rows counts[t] of net t."""
        rows, pool = x.detach().contiguous().numpy(), threads(x.numel() // 16)
        e, gradient = x.new_empty(len(x)), x.new_empty(len(x), whole_strips(x.shape[1], rows.dtype))
        tiles = tiles_of(tuple(counts[t] for t in self.types), pool[1])
        arguments = rows, self.weights, self.layout, self.width, e.numpy(), gradient.numpy(), pool
        values_and_gradients(tiles, *arguments)
        return e, gradient[:, : x.shape[1]]


def frozen(nets: Sequence[Net], counts: Sequence[int], x: Tensor, kept: FrozenNets | None) -> FrozenNets | None:
    """The nets, packed anew unless `kept` still serves; None where they are trained, or not of this kind."""
    if torch.is_grad_enabled() or not compiled(x):
        return None
    if kept is not None and kept.serves(counts):
        return kept
    hidden = [layer for net in nets for layer in net.layers[:-1]]
    alike = bool(hidden) and all(layer.activation.lower() == "tanh" for layer in hidden)
    trained = any(p.requires_grad for net in nets for p in net.parameters())
    present = {t for t, count in enumerate(counts) if count}
    if not alike or trained or not present:
        return None
    return FrozenNets(nets, [*present.union(kept.types if kept is not None else ())])


@njit(**options)
def forward(x, weights, layout, a, slope, e):
    """a_l and idt·φ'(z_l) of all hidden layers, and e."""
    rows, hidden = x.shape[0], layout.shape[0] - 1
    for n in range(hidden):
        size_in, size_out, copies = layout[n, IN], layout[n, OUT], layout[n, COPIES]
        b, idt = layout[n, B], layout[n, IDT]
        y = a[n, :rows]
        for i in range(rows):
            for k in range(size_out):
                y[i, k] = weights[b + k]
        source = x if n == 0 else a[n - 1, :rows]
        add_product(source, 0, size_in, weights[layout[n, THERE] :], size_in, size_out, y)
        for i in range(rows):
            for k in range(size_out):
                y[i, k] = tanh(y[i, k])
            for k in range(size_out):
                slope[n, i, k] = (1.0 - y[i, k] * y[i, k]) * weights[idt + k]
                y[i, k] *= weights[idt + k]
            for copy in range(copies):
                for k in range(size_in):
                    y[i, copy * size_in + k] += source[i, k]
    last = layout[hidden]
    for i in range(rows):
        total = weights[last[B]]
        for k in range(last[IN]):
            total += a[hidden - 1, i, k] * weights[last[BACK] + k]
        e[i] = total


@njit(**options)
def backward(weights, layout, slope, G, gradient):
    """∂e/∂x; slope becomes ∂e/∂z."""
    rows, hidden = gradient.shape[0], layout.shape[0] - 1
    for i in range(rows):
        for k in range(layout[hidden, IN]):
            G[hidden % 2, i, k] = weights[layout[hidden, BACK] + k]
    for n in range(hidden - 1, -1, -1):
        size_in, size_out, copies = layout[n, IN], layout[n, OUT], layout[n, COPIES]
        g, above = slope[n, :rows], G[(n + 1) % 2]
        target = G[n % 2, :rows] if n > 0 else gradient
        for i in range(rows):
            for k in range(size_out):
                g[i, k] *= above[i, k]
            for k in range(target.shape[1]):
                target[i, k] = 0.0
            for copy in range(copies):
                for k in range(size_in):
                    target[i, k] += above[i, copy * size_in + k]
        add_product(g, 0, size_out, weights[layout[n, BACK] :], size_out, size_in, target)


@njit(**options)
def _values_and_gradients(begin, end, tiles, x, weights, layout, width, e, gradient):
    hidden = layout.shape[0] - 1
    most = highest(tiles, begin, end)
    a, slope = np.empty((hidden, most, width), x.dtype), np.empty((hidden, most, width), x.dtype)
    G = np.empty((2, most, width), x.dtype)
    for tile in range(begin, end):
        first, last, net = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
        forward(x[first:last], weights[net], layout, a, slope, e[first:last])
        backward(weights[net], layout, slope, G, gradient[first:last])


@njit(**options)
def values_and_gradients(tiles, x, weights, layout, width, e, gradient, pool):
    """e and ∂e/∂x of tiles of rows: each of one net, whose numbers are weights[net]."""
    spread(_values_and_gradients, tiles.shape[0], (tiles, x, weights, layout, width, e, gradient), pool)
