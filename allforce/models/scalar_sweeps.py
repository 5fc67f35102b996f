"""The sweeps of scalar_net.py as compiled loops (scalar_kernels.py): how they are shared out, what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from allforce.models import scalar_kernels
from allforce.models.kernels import compiled
from allforce.models.layers import Net, Shape, Weights
from allforce.models.pool import threads
from allforce.models.products import TILE, WIDE, lanes, whole_strips

MANY = 16  # tiles, of which then each is one piece, so that a part of its rows serves all columns while in the cache
INPUTS = 16  # of a net, that take as long as an edge
HIGH = 64  # rows of w that a thread takes at least, on the way back


def suits(nets: Sequence[Net], x: Tensor) -> bool:
    """Whether the loops are written for these nets."""
    return nets[0].hidden_tanh and x.shape[0] > 0 and compiled(x)


@dataclass
class Plan:
    """Who does what, for rows of which counts[t] belong to net t; see scalar_kernels.py."""

    numbers: int  # of a row in all hidden layers
    layout: np.ndarray  # (layers, 4)
    starts: np.ndarray  # (nets + 1,)
    tiles: np.ndarray  # (tiles, 5) first row, row behind the last, net, place of its transposed, its padded rows
    of_net: np.ndarray  # (nets + 1,) first tile of each net
    there: np.ndarray  # (tasks, 3) tile, first column, column behind the last
    back: np.ndarray  # (tasks, 3) net, first row of w, row behind the last
    ends: np.ndarray  # (2, layers + 1) where the tasks of each layer begin, there and back

    @property
    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.layout, self.starts, self.tiles, self.of_net, self.there, self.back, self.ends


@lru_cache(maxsize=256)
def plan(counts: tuple[int, ...], shape: Shape, dtype: np.dtype) -> Plan:
    """The pieces of nets with many rows first: the small ones then fill up what is left."""
    widths = [whole_strips(out, dtype) for _, out, _ in shape[:-1]]
    places = np.cumsum([0, *widths])
    layout = np.array([(*layer, place) for layer, place in zip(shape, places, strict=True)])
    starts = np.cumsum([0, *counts])
    tiles, of_net, place, widest = [], [0], 0, max(out for _, out, _ in shape)
    for net, (first, end) in enumerate(pairwise(starts.tolist())):
        for low in range(first, end, TILE):
            high = min(low + TILE, end)
            tiles.append((low, high, net, place, -(-(high - low) // 8) * 8))
            place += widest * tiles[-1][-1]
        of_net.append(len(tiles))
    by_rows = sorted(range(len(tiles)), key=lambda k: tiles[k][0] - tiles[k][1])
    nets, strip = sorted(range(len(counts)), key=lambda t: -counts[t]), WIDE * lanes(dtype)
    wide = strip if len(tiles) < MANY else widest
    there = [[(k, *part) for k in by_rows for part in parts(out, wide)] for _, out, _ in shape[:-1]]
    back = [[(t, *part) for t in nets for part in parts(size_in, HIGH)] for size_in, _, _ in shape]
    ends = np.stack([np.cumsum([0, *(len(tasks) for tasks in kind)]) for kind in ([*there, []], back)])
    numbers, lists = int(places[-1]), [[task for tasks in kind for task in tasks] for kind in (there, back)]
    return Plan(
        numbers, layout, starts, np.array(tiles), np.array(of_net), np.array(lists[0]), np.array(lists[1]), ends
    )


def parts(columns: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, columns)) for first in range(0, columns, size)]


class Sweeps:
    """All four of one batch: x (N, m), rows counts[t] of net t."""

    def __init__(self, nets: Sequence[Net], counts: Sequence[int], x: Tensor):
        self.nets, self.x = [net.weights for net in nets], x.detach().contiguous()
        self.dtype, self.widest = self.x.numpy().dtype, max(out for _, out, _ in nets[0].shape)
        self.plan, self.pool = plan(tuple(counts), nets[0].shape, self.dtype), threads(x.numel() // INPUTS)
        self.weights = addresses(self.nets, ones(self.widest, x.dtype))
        self.kept = np.empty((3, x.shape[0] * self.plan.numbers), self.dtype)
        self.pairs = np.empty(2 * x.shape[0] * self.plan.numbers, self.dtype)

    def rows(self) -> Tensor:
        """An array like x, whose rows are whole registers."""
        return self.x.new_empty(self.x.shape[0], whole_strips(self.x.shape[1], self.dtype))

    def values_and_gradients(self) -> tuple[Tensor, Tensor]:
        """e (N,) and ∂e/∂x (N, m)."""
        e, gradient = self.x.new_empty(self.x.shape[0]), self.rows()
        given = self.x.numpy(), self.weights, self.plan.arguments, self.kept, self.pairs
        scalar_kernels.values_and_gradients(*given, e.numpy(), gradient.numpy(), self.pool)
        return e, gradient[:, : self.x.shape[1]]

    def hidden(self) -> Tensor:
        """What the last layer is given (N, H)."""
        scalar_kernels.layer_by_layer(self.x.numpy(), self.weights, self.plan.arguments, self.kept, self.pool)
        return last_hidden(self.kept[scalar_kernels.A], self.plan.arguments, len(self.x))

    def tangent(self, v: Tensor) -> Tensor:
        """Its tangent (N, H) along v (N, m), after `hidden`."""
        made = np.empty((3, self.kept.shape[1]), self.dtype)
        given = self.x.numpy(), v.contiguous().numpy(), self.weights, self.plan.arguments, self.kept
        scalar_kernels.tangents(*given, made, self.pool)
        return last_hidden(made[scalar_kernels.A_DOT], self.plan.arguments, len(self.x))

    def adjoints(self, e_bar: Tensor, v: Tensor, wanted: bool) -> tuple[Tensor | None, list[Tensor]]:
        """x̄ (N, m) if it is wanted, and the gradients of all parameters, net by net and layer by layer."""
        unused = self.x.new_empty(self.widest)
        found = gradients_of(self.nets)
        places = addresses(found, unused)
        x_bar = self.rows() if wanted else self.x[:0]
        given = self.x.numpy(), v.contiguous().numpy(), e_bar.contiguous().numpy(), self.weights, places
        rest = self.kept, self.pairs, wanted, x_bar.numpy(), self.pool
        scalar_kernels.adjoints(*given, self.plan.arguments, *rest)
        gradients = [g for net in found for layer in net for g in layer if g is not None]
        return x_bar[:, : self.x.shape[1]] if wanted else None, gradients


def last_hidden(numbers: np.ndarray, plan: tuple[np.ndarray, ...], rows: int) -> Tensor:
    """(N, H) of the last hidden layer, in an array for all of them."""
    _, width, _, place = plan[0][-2]
    return torch.from_numpy(numbers[place * rows :].reshape(rows, -1)[:, :width])


def parameters_of(nets: Sequence[Net]) -> list[Tensor]:
    """Net by net and layer by layer, as `adjoints` gives their gradients."""
    return [p for net in nets for layer in net.weights for p in layer if p is not None]


@lru_cache(maxsize=16)
def ones(length: int, dtype: torch.dtype) -> Tensor:
    """What stands for idt in layers without one; kept, as its address is used."""
    return torch.ones(length, dtype=dtype)


def gradients_of(nets: list[list[Weights]]) -> list[list[Weights]]:
    """Where those of w, b and idt of each layer of each net go."""
    return [
        [(target_or_new(w), target_or_new(b), None if idt is None else target_or_new(idt)) for w, b, idt in net]
        for net in nets
    ]


def target_or_new(parameter: Tensor) -> Tensor:
    target = gradient_target(parameter)
    return torch.empty_like(parameter) if target is None else target


def gradient_target(parameter: Tensor) -> Tensor | None:
    """Where the trainer wants this gradient to lie, so that it need not be moved there; None: anywhere."""
    target = getattr(parameter, "gradient_target", None)
    return None if target is None else target.take()


def addresses(nets: list[list[Weights]], other: Tensor) -> np.ndarray:
    """(layers, nets, 3) of w, b and idt, or of another tensor where there is no idt."""
    found = [
        (other if y is None else y).data_ptr() for layers in zip(*nets, strict=True) for layer in layers for y in layer
    ]
    return np.array(found).reshape(-1, len(nets), 3)
