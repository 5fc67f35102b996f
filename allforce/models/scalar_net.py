"""Nets with one output, one for each type, together with their gradient, and the derivative of both written by hand.

    z_l = a_{l-1} w_l + b_l     a_l = idt_l φ(z_l) + residual(a_{l-1})     e = a_L w + b
    backwards:  g_l = G_l idt_l φ'(z_l),   G_{l-1} = g_l w_lᵀ + residualᵀ(G_l),   ∂e/∂x = G_0

Given the adjoints ē and v of e and of ∂e/∂x, what is differentiated is Σ ē e + <v, ∂e/∂x>, and the second term is
the tangent ė of e along ẋ = v. So one tangent sweep (ż, ȧ) and one adjoint sweep (z̄, ā) give everything:

    z̄_l = ā_l idt_l φ' + G_l idt_l φ'' ż_l        w̄_l = a_{l-1}ᵀ z̄_l + ȧ_{l-1}ᵀ g_l        x̄ = ā_0

Six products with each w in all (two of them for w̄), the least that energies and forces can be trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allforce.models.layers import Layer, Net
from allforce.models.scalar_sweeps import Sweeps, gradient_target, parameters_of, suits


@dataclass
class LayerRecord:
    """One layer after its product z: what the later sweeps need."""

    x: Tensor  # a_{l-1}, what came in
    a: Tensor  # a_l, what goes out
    t: Tensor  # φ(z)
    d: Tensor  # φ'(z)
    dd: Tensor | None  # φ''(z), None where no second derivative is asked for
    slope: Tensor  # idt φ'(z)
    G: Tensor | None = None  # ∂e/∂a_l
    g: Tensor | None = None  # ∂e/∂z


def activate(layer: Layer, z: Tensor, x: Tensor, second: bool) -> LayerRecord:
    """The layer from z = x w + b on; z is overwritten."""
    t, d, dd = slopes(layer, z, second)
    a, slope = (t.clone(), d) if layer.idt is None else (t * layer.idt, d * layer.idt)
    return LayerRecord(x, add_residual(a, x, layer.copies), t, d, dd, slope)


def activation_adjoint(layer: Layer, c: LayerRecord, a_bar: Tensor, z_dot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z̄ (n, out), and the gradients of b and of idt."""
    assert c.G is not None and c.dd is not None
    curved = c.dd * z_dot if layer.idt is None else c.dd * z_dot * layer.idt
    z_bar = (a_bar * c.slope).addcmul_(c.G, curved)
    return z_bar, z_bar.sum(0), (a_bar * c.t).addcmul_(c.G, c.d * z_dot).sum(0)


def slopes(layer: Layer, z: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """φ, φ' and φ'' at z by differentiation."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        t = layer.phi(z) + 0.0 * z  # also a linear φ has a graph
        (d,) = torch.autograd.grad(t.sum(), z, create_graph=second)
        dd = torch.autograd.grad(d.sum(), z, allow_unused=True)[0] if second and d.requires_grad else None
    return t.detach(), d.detach(), torch.zeros_like(d) if second and dd is None else dd


def add_residual(y: Tensor, x: Tensor, copies: int) -> Tensor:
    """y + x, y + [x, x] or y."""
    return y if copies == 0 else y.add_(x if copies == 1 else torch.cat([x, x], 1))


def add_residual_back(y: Tensor, g: Tensor, copies: int) -> Tensor:
    """The transpose of add_residual: y + g, y + g_left + g_right or y."""
    if copies == 2:
        left, right = g.chunk(2, 1)
        return y.add_(left).add_(right)
    return y.add_(g) if copies == 1 else y


def forward_and_back(net: Net, x: Tensor, second: bool, e: Tensor, gradient: Tensor) -> list[LayerRecord]:
    """Fill e (n,) and ∂e/∂x (n, m)."""
    *hidden, last = net.layers
    tape: list[LayerRecord] = []
    for layer in hidden:
        tape.append(activate(layer, torch.addmm(layer.b, x, layer.w), x, second))
        x = tape[-1].a
    e.copy_(torch.addmm(last.b, x, last.w)[:, 0])
    G = last.w[:, 0].expand(len(x), -1)
    if not hidden:
        gradient.copy_(G)
    for n in reversed(range(len(hidden))):
        layer, c = hidden[n], tape[n]
        c.G, c.g = G, G * c.slope
        G = add_residual_back(torch.mm(c.g, layer.w.T, out=gradient if n == 0 else None), G, layer.copies)
    return tape


def tangent_and_adjoint(net: Net, tape: list[LayerRecord], e_bar: Tensor, v: Tensor, x: Tensor, x_bar: Tensor | None):
    """Gradients of the parameters, in the order of `parameters`; fills x̄ (n, m) if it is wanted."""
    *hidden, last = net.layers
    dot, z_dots, a_dots = v, [], []
    for layer, c in zip(hidden, tape, strict=True):
        a_dots.append(dot)
        z_dots.append(dot @ layer.w)
        dot = add_residual(z_dots[-1] * c.slope, dot, layer.copies)
    out = tape[-1].a if tape else x
    gradients = [torch.mv(out.T, e_bar).add_(dot.sum(0))[:, None], e_bar.sum()[None]]  # of the last layer
    a_bar = e_bar[:, None] * last.w[:, 0]
    if not hidden and x_bar is not None:
        x_bar.copy_(a_bar)
    for n in reversed(range(len(hidden))):
        layer, c = hidden[n], tape[n]
        assert c.g is not None
        z_bar, b_bar, idt_bar = activation_adjoint(layer, c, a_bar, z_dots[n])
        w_bar = torch.mm(c.x.T, z_bar, out=gradient_target(layer.w)).addmm_(a_dots[n].T, c.g)
        gradients = [w_bar, b_bar, *([] if layer.idt is None else [idt_bar]), *gradients]
        if n > 0 or x_bar is not None:
            a_bar = add_residual_back(torch.mm(z_bar, layer.w.T, out=x_bar if n == 0 else None), a_bar, layer.copies)
    return gradients


def hidden_and_tangents(
    nets: Sequence[Net], counts: Sequence[int], x: Tensor, dots: Iterable[Tensor]
) -> tuple[Tensor, Tensor]:
    """What the last layers are given (N, H) for x (N, m), rows counts[t] of net t, and its tangents (p, N, H) along p
    dots (N, m), which are taken one after the other: all of them may be large."""
    if suits(nets, x):
        sweeps = Sweeps(nets, counts, x)
        return sweeps.hidden(), torch.stack([sweeps.tangent(v) for v in dots])
    tapes = [records(net, rows) for net, rows in zip(nets, x.split(list(counts)), strict=True)]
    tangents = [
        torch.cat([tangent(net, *part) for net, *part in zip(nets, tapes, v.split(list(counts)), strict=True)])
        for v in dots
    ]
    return torch.cat([tape[-1].a for tape in tapes]), torch.stack(tangents)


def records(net: Net, x: Tensor) -> list[LayerRecord]:
    """Of the hidden layers."""
    tape: list[LayerRecord] = []
    for layer in net.layers[:-1]:
        tape.append(activate(layer, torch.addmm(layer.b, x, layer.w), x, second=False))
        x = tape[-1].a
    return tape


def tangent(net: Net, tape: list[LayerRecord], dot: Tensor) -> Tensor:
    """Of what the last layer is given, along dot (n, m)."""
    for layer, c in zip(net.layers[:-1], tape, strict=True):
        dot = add_residual(dot @ layer.w * c.slope, dot, layer.copies)
    return dot


class ValueAndGradient(torch.autograd.Function):
    """(e (N,), ∂e/∂x (N, m)) of x (N, m), rows counts[t] of net t; the last arguments are the nets' parameters."""

    @staticmethod
    def forward(ctx, x: Tensor, nets: Sequence[Net], counts: Sequence[int], *parameters: Tensor):
        second = any(ctx.needs_input_grad)
        if suits(nets, x):
            sweeps = Sweeps(nets, counts, x)
            ctx.sweeps = sweeps if second else None
            return sweeps.values_and_gradients()
        ctx.sweeps = None
        e, gradient = x.new_empty(len(x)), torch.empty_like(x)
        parts = zip(nets, *(y.split(list(counts)) for y in (x, e, gradient)), strict=True)
        tapes = [forward_and_back(net, rows, second, value, slope) for net, rows, value, slope in parts]
        ctx.nets, ctx.counts, ctx.tapes = nets, list(counts), tapes if second else None
        if second:
            ctx.save_for_backward(x)
        return e, gradient

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, e_bar: Tensor, v: Tensor):
        if ctx.sweeps is not None:
            x_bar, gradients = ctx.sweeps.adjoints(e_bar, v, ctx.needs_input_grad[0])
            return x_bar, None, None, *gradients
        x_bar = torch.empty_like(v) if ctx.needs_input_grad[0] else None
        wanted = x_bar.split(ctx.counts) if x_bar is not None else [None] * len(ctx.nets)
        rows = (y.split(ctx.counts) for y in (e_bar, v.contiguous(), ctx.saved_tensors[0].detach()))
        parts = zip(ctx.nets, ctx.tapes, *rows, wanted, strict=True)
        gradients = [g for net, tape, *part in parts for g in tangent_and_adjoint(net, tape, *part)]
        return x_bar, None, None, *gradients


def value_and_gradient(nets: Sequence[Net], counts: Sequence[int], x: Tensor) -> tuple[Tensor, Tensor]:
    """e (N,) and ∂e/∂x (N, m) of nets with one output, of which net t has counts[t] rows of x."""
    apply: Callable = ValueAndGradient.apply
    return apply(x, nets, counts, *parameters_of(nets))
