"""Embedding nets as splines on a table, and the gradients of their parameters, as compiled loops (curve_kernels.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from allforce.models import curve_kernels
from allforce.models.kernels import compiled
from allforce.models.layers import CurveNets, Net
from allforce.models.pool import threads
from allforce.models.products import whole_strips
from allforce.models.scalar_sweeps import addresses, gradients_of
from allforce.models.spline import Grid

T_AND_A = 2  # arrays that are kept of each layer


def suits(nets: nn.Module, nodes: Tensor) -> TypeGuard[CurveNets]:
    """Whether the loops are written for these nets."""
    if not isinstance(nets, CurveNets) or not compiled(nodes):
        return False
    return all(layer.activation.lower() == "tanh" for layer in nets[0].layers)  # type: ignore[union-attr]


class Splines(torch.autograd.Function):
    """C (nets, K, M) of nets on the nodes (K, 1) of a grid, as the nets take them; last, the nets' parameters."""

    @staticmethod
    def forward(ctx, nets: list[Net], nodes: Tensor, grid: Grid, *parameters: Tensor):
        layers = [net.layers for net in nets]
        ctx.layers, ctx.nodes, ctx.grid = layers, nodes.numpy(), grid
        dtype, K, M = ctx.nodes.dtype, len(nodes), layers[0][-1].w.shape[1]
        widths = [whole_strips(layer.w.shape[1], dtype) for layer in layers[0]]
        places = np.cumsum([0, *widths])
        ctx.layout = np.array(
            [(*y.w.shape, y.copies, place) for y, place in zip(layers[0], places[:-1], strict=True)], dtype=np.int64
        )
        ctx.one = nodes.new_ones(max(widths))  # idt of layers without one; lives as long as its address
        ctx.weights = addresses([[(y.w, y.b, ctx.one if y.idt is None else y.idt) for y in net] for net in layers])
        ctx.kept = np.empty((T_AND_A, len(nets) * K * places[-1]), dtype)
        ctx.pool = threads(len(nets) * K * int(places[-1]) // 64)  # numbers take a 64th of the time of an edge
        C = nodes.new_empty(len(nets), K, M)
        given = ctx.nodes, ctx.weights, ctx.layout, grid.factors(dtype), ctx.kept
        curve_kernels.curves(*given, C.numpy(), ctx.pool)
        return C

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, C_bar: Tensor):
        unused = torch.empty_like(ctx.one)
        found = [[gradients_of(layer) for layer in net] for net in ctx.layers]
        places = addresses([[(w, b, unused if idt is None else idt) for w, b, idt in net] for net in found])
        factors = ctx.grid.factors(ctx.nodes.dtype, transposed=True)
        given = ctx.nodes, ctx.weights, places, ctx.layout, factors, ctx.kept
        curve_kernels.curves_back(*given, C_bar.contiguous().numpy(), ctx.pool)
        return None, None, None, *(g for net in found for layer in net for g in layer if g is not None)


def splines(nets: CurveNets, nodes: Tensor, grid: Grid) -> Tensor:
    """C (nets, K, M)."""
    layers = [layer for net in nets for layer in net.layers]  # type: ignore[union-attr]
    parameters = [p for layer in layers for p in (layer.w, layer.b, layer.idt) if p is not None]
    apply: Callable = Splines.apply
    return apply(list(nets), nets.variable(nodes), grid, *parameters)
