"""Nets with one output, one for each type, together with their gradient, and the derivative of both written by hand.

    z_l = a_{l-1} w_l + b_l     a_l = idt_l φ(z_l) + residual(a_{l-1})     e = a_L w + b
    backwards:  g_l = G_l idt_l φ'(z_l),   G_{l-1} = g_l w_lᵀ + residualᵀ(G_l),   ∂e/∂x = G_0

Given the adjoints ē and v of e and of ∂e/∂x, what is differentiated is Σ ē e + <v, ∂e/∂x>, and the second term is
the tangent ė of e along ẋ = v. So one tangent sweep (ż, ȧ) and one adjoint sweep (z̄, ā) give everything:

    z̄_l = ā_l idt_l φ' + G_l idt_l φ'' ż_l        w̄_l = a_{l-1}ᵀ z̄_l + ȧ_{l-1}ᵀ g_l        x̄ = ā_0

Six products with each w in all (two of them for w̄), the least that energies and forces can be trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from allforce.models.layers import Layer, Net


def slopes(layer: Layer, z: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """φ, φ' and φ'' at z, which is overwritten."""
    if layer.activation.lower() == "tanh":
        t = z.tanh_()
        d = torch.rsub(t * t, 1.0)
        return t, d, (t * d).mul_(-2.0) if second else None
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


@dataclass
class Tape:
    """What the sweeps of one net leave for the next ones, a list entry for each hidden layer."""

    inputs: list[Tensor] = field(default_factory=list)  # a_{l-1}
    curves: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)  # φ, φ', φ''
    steep: list[Tensor] = field(default_factory=list)  # idt φ'
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # G_l, g_l
    last: Tensor | None = None  # a_L


def forward_and_back(net: Net, x: Tensor, second: bool, e: Tensor, gradient: Tensor) -> Tape:
    """Fill e (n,) and ∂e/∂x (n, m)."""
    *hidden, last = net.layers
    tape, a = Tape(), x
    for layer in hidden:
        tape.inputs.append(a)
        t, d, dd = slopes(layer, torch.addmm(layer.b, a, layer.w), second)
        tape.curves.append((t, d, dd))
        tape.steep.append(d if layer.idt is None else d * layer.idt)
        a = add_residual(t.clone() if layer.idt is None else t * layer.idt, a, layer.copies)
    tape.last = a
    e.copy_(torch.addmm(last.b, a, last.w)[:, 0])
    G = last.w[:, 0].expand(len(x), -1)
    for n in reversed(range(len(hidden))):
        layer = hidden[n]
        g = G * tape.steep[n]
        tape.back.insert(0, (G, g))
        G = add_residual_back(torch.mm(g, layer.w.T, out=gradient if n == 0 else None), G, layer.copies)
    return tape


def tangent_and_adjoint(net: Net, tape: Tape, e_bar: Tensor, v: Tensor, x_bar: Tensor | None) -> list[Tensor]:
    """Gradients of the parameters, in the order of `parameters`; fills x̄ (n, m) if it is wanted."""
    *hidden, last = net.layers
    assert tape.last is not None
    dot, z_dots, a_dots = v, [], []
    for layer, steep in zip(hidden, tape.steep, strict=True):
        a_dots.append(dot)
        z_dots.append(dot @ layer.w)
        dot = add_residual(z_dots[-1] * steep, dot, layer.copies)
    gradients = [torch.mv(tape.last.T, e_bar).add_(dot.sum(0))[:, None], e_bar.sum()[None]]  # of the last layer
    a_bar = e_bar[:, None] * last.w[:, 0]
    for n in reversed(range(len(hidden))):
        layer, (t, d, dd), (G, g) = hidden[n], tape.curves[n], tape.back[n]
        assert dd is not None
        bent = dd * z_dots[n]  # φ'' ż
        if layer.idt is not None:
            bent *= layer.idt
        z_bar = (a_bar * tape.steep[n]).addcmul_(G, bent)
        own = [torch.mm(tape.inputs[n].T, z_bar).addmm_(a_dots[n].T, g), z_bar.sum(0)]
        if layer.idt is not None:
            own.append((a_bar * t).addcmul_(G, d * z_dots[n]).sum(0))
        gradients = own + gradients
        if n > 0 or x_bar is not None:
            a_bar = add_residual_back(torch.mm(z_bar, layer.w.T, out=x_bar if n == 0 else None), a_bar, layer.copies)
    return gradients


class ValueAndGradient(torch.autograd.Function):
    """(e (N,), ∂e/∂x (N, m)) of x (N, m), rows counts[t] of net t; the last arguments are the nets' parameters."""

    @staticmethod
    def forward(ctx, x: Tensor, nets: Sequence[Net], counts: Sequence[int], *parameters: Tensor):
        e, gradient, second = x.new_empty(len(x)), torch.empty_like(x), any(ctx.needs_input_grad)
        parts = zip(nets, *(y.split(list(counts)) for y in (x, e, gradient)), strict=True)
        tapes = [forward_and_back(net, rows, second, value, slope) for net, rows, value, slope in parts]
        ctx.nets, ctx.counts, ctx.tapes = nets, list(counts), tapes if second else None
        return e, gradient

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, e_bar: Tensor, v: Tensor):
        x_bar = torch.empty_like(v) if ctx.needs_input_grad[0] else None
        wanted = x_bar.split(ctx.counts) if x_bar is not None else [None] * len(ctx.nets)
        parts = zip(ctx.nets, ctx.tapes, e_bar.split(ctx.counts), v.split(ctx.counts), wanted, strict=True)
        gradients = [g for net, tape, e, w, x in parts for g in tangent_and_adjoint(net, tape, e, w, x)]
        return x_bar, None, None, *gradients


def value_and_gradient(nets: Sequence[Net], counts: Sequence[int], x: Tensor) -> tuple[Tensor, Tensor]:
    """e (N,) and ∂e/∂x (N, m) of nets with one output, of which net t has counts[t] rows of x."""
    layers = [layer for net in nets for layer in net.layers]
    parameters = [p for layer in layers for p in (layer.w, layer.b, layer.idt) if p is not None]
    apply: Callable = ValueAndGradient.apply
    return apply(x, nets, counts, *parameters)
