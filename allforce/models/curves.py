"""Embedding nets as splines on a table, and the gradients of their parameters, as compiled loops (curve_kernels.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from allforce.models import curve_kernels
from allforce.models.kernels import compiled
from allforce.models.layers import CurveNets, Net, Shape
from allforce.models.pool import threads
from allforce.models.products import whole_strips
from allforce.models.scalar_sweeps import addresses, gradients_of, ones, parameters_of
from allforce.models.spline import Grid

T_AND_A = 2  # arrays that are kept of each layer
NUMBERS = 64  # of a net, that take as long as an edge


def suits(nets: nn.Module, nodes: Tensor) -> TypeGuard[CurveNets]:
    """Whether the loops are written for these nets."""
    return isinstance(nets, CurveNets) and compiled(nodes) and nets[0].hidden_tanh  # type: ignore[return-value]


@lru_cache(maxsize=16)
def layout(shape: Shape, dtype: np.dtype) -> tuple[np.ndarray, int, int]:
    """(layers, 4) as in scalar_kernels.py, the numbers of a node in all layers, and the most in one."""
    widths = [whole_strips(out, dtype) for _, out, _ in shape]
    places = np.cumsum([0, *widths])
    rows = [(*layer, place) for layer, place in zip(shape, places[:-1], strict=True)]
    return np.array(rows, dtype=np.int64), int(places[-1]), max(widths)


class Sweep:
    """C (nets, K, M) of nets on the nodes (K, 1) of a grid, as the nets take them, and the way back to the nets."""

    def __init__(self, nets: Sequence[Net], nodes: Tensor, grid: Grid):
        self.nets, self.nodes, self.grid = [net.weights for net in nets], nodes, grid
        self.dtype = nodes.numpy().dtype
        self.layout, numbers, self.widest = layout(nets[0].shape, self.dtype)
        self.ones = ones(self.widest, nodes.dtype)  # kept, as its address is used
        self.weights = addresses(self.nets, self.ones)
        size = len(nets) * nodes.shape[0] * numbers
        self.kept, self.work = np.empty((T_AND_A, size), self.dtype), size // NUMBERS

    def splines(self) -> Tensor:
        """C (nets, K, M)."""
        C = self.nodes.new_empty(len(self.nets), self.nodes.shape[0], self.nets[0][-1][0].shape[1])
        given = self.nodes.numpy(), self.weights, self.layout, self.grid.factors(self.dtype), self.kept
        curve_kernels.curves(*given, C.numpy(), threads(self.work))
        return C

    def adjoints(self, C_bar: Tensor) -> list[Tensor]:
        """The gradients of all parameters, net by net and layer by layer."""
        found, unused = gradients_of(self.nets), C_bar.new_empty(self.widest)
        places = addresses(found, unused)
        factors = self.grid.factors(self.dtype, transposed=True)
        given = self.nodes.numpy(), self.weights, places, self.layout, factors, self.kept
        curve_kernels.curves_back(*given, C_bar.contiguous().numpy(), threads(self.work))
        return [g for net in found for layer in net for g in layer if g is not None]


class Splines(torch.autograd.Function):
    """C (nets, K, M); last, the nets' parameters."""

    @staticmethod
    def forward(ctx, nets: list[Net], nodes: Tensor, grid: Grid, *parameters: Tensor):
        ctx.sweep = Sweep(nets, nodes, grid)
        return ctx.sweep.splines()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, C_bar: Tensor):
        return None, None, None, *ctx.sweep.adjoints(C_bar)


def splines(nets: CurveNets, nodes: Tensor, grid: Grid) -> Tensor:
    """C (nets, K, M)."""
    parameters = parameters_of(nets)  # type: ignore[arg-type]
    apply: Callable = Splines.apply
    return apply(list(nets), nets.variable(nodes), grid, *parameters)
