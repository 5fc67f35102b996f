"""Embedding nets as splines on a table, and the gradients of their parameters, as compiled loops (curve_kernels.py)."""

from __future__ import annotations

from collections.abc import Callable
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
from allforce.models.scalar_sweeps import addresses, gradients_of, ones
from allforce.models.spline import Grid

T_AND_A = 2  # arrays that are kept of each layer


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


class Splines(torch.autograd.Function):
    """C (nets, K, M) of nets on the nodes (K, 1) of a grid, as the nets take them; last, the nets' parameters."""

    @staticmethod
    def forward(ctx, nets: list[Net], nodes: Tensor, grid: Grid, *parameters: Tensor):
        ctx.nets, ctx.nodes, ctx.grid = [net.weights for net in nets], nodes.numpy(), grid
        dtype, K, M = ctx.nodes.dtype, nodes.shape[0], nets[0].shape[-1][1]
        ctx.layout, numbers, ctx.widest = layout(nets[0].shape, dtype)
        ctx.weights = addresses(ctx.nets, ones(ctx.widest, nodes.dtype))
        ctx.kept = np.empty((T_AND_A, len(nets) * K * numbers), dtype)
        ctx.pool = threads(len(nets) * K * numbers // 64)  # numbers take a 64th of the time of an edge
        C = nodes.new_empty(len(nets), K, M)
        given = ctx.nodes, ctx.weights, ctx.layout, grid.factors(dtype), ctx.kept
        curve_kernels.curves(*given, C.numpy(), ctx.pool)
        return C

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, C_bar: Tensor):
        unused = C_bar.new_empty(ctx.widest)
        found = gradients_of(ctx.nets)
        places = addresses(found, unused)
        factors = ctx.grid.factors(ctx.nodes.dtype, transposed=True)
        given = ctx.nodes, ctx.weights, places, ctx.layout, factors, ctx.kept
        curve_kernels.curves_back(*given, C_bar.contiguous().numpy(), ctx.pool)
        return None, None, None, *(g for net in found for layer in net for g in layer if g is not None)


def splines(nets: CurveNets, nodes: Tensor, grid: Grid) -> Tensor:
    """C (nets, K, M)."""
    parameters = [p for net in nets for layer in net.weights for p in layer if p is not None]  # type: ignore[union-attr]
    apply: Callable = Splines.apply
    return apply(list(nets), nets.variable(nodes), grid, *parameters)
