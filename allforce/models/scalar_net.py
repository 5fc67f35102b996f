"""A net with one output, together with its gradient, and the derivative of both written by hand.

    z_l = a_{l-1} w_l + b_l     a_l = idt_l φ(z_l) + residual(a_{l-1})     e = a_L w + b
    backwards:  g_l = G_l idt_l φ'(z_l),   G_{l-1} = g_l w_lᵀ + residualᵀ(G_l),   ∂e/∂x = G_0

Given the adjoints ē and v of e and of ∂e/∂x, what is differentiated is Σ ē e + <v, ∂e/∂x>, and the second term is
the tangent ė of e along ẋ = v. So one tangent sweep (ż, ȧ) and one adjoint sweep (z̄, ā) give everything:

    z̄_l = ā_l idt_l φ' + G_l idt_l φ'' ż_l        w̄_l = a_{l-1}ᵀ z̄_l + ȧ_{l-1}ᵀ g_l        x̄ = ā_0

Six products with each w in all (two of them for w̄), the least that energies and forces can be trained with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from allforce.models.layers import Layer, Net


def slopes(layer: Layer, z: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """φ, φ' and φ'' at z."""
    if layer.activation.lower() == "tanh":
        t = torch.tanh(z)
        d = 1.0 - t * t
        return t, d, -2.0 * t * d if second else None
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


def scale(layer: Layer, g: Tensor, d: Tensor) -> Tensor:
    return g * d if layer.idt is None else g * d * layer.idt


class ValueAndGradient(torch.autograd.Function):
    """(e (n,), ∂e/∂x (n, m)) of x (n, m); the arguments after net are its parameters, to be differentiated."""

    @staticmethod
    def forward(ctx, x: Tensor, net: Net, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        *hidden, last = net.layers
        second = any(ctx.needs_input_grad)
        inputs, curves, back = [], [], []
        a = x
        for layer in hidden:
            inputs.append(a)
            t, d, dd = slopes(layer, torch.addmm(layer.b, a, layer.w), second)
            curves.append((t, d, dd))
            a = add_residual(t.clone() if layer.idt is None else t * layer.idt, a, layer.copies)
        e = torch.addmm(last.b, a, last.w)[:, 0]
        G = last.w[:, 0].expand(len(x), -1)
        for layer, (_, d, _) in zip(reversed(hidden), reversed(curves), strict=True):
            g = scale(layer, G, d)
            back.append((G, g))
            G = add_residual_back(g @ layer.w.T, G, layer.copies)
        ctx.net, ctx.tape = net, (inputs, curves, back[::-1], a) if second else None
        return e, G

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, e_bar: Tensor, v: Tensor):
        *hidden, last = ctx.net.layers
        inputs, curves, back, a_last = ctx.tape
        dot, z_dots, a_dots = v, [], []
        for layer, (_, d, _) in zip(hidden, curves, strict=True):  # tangent sweep
            a_dots.append(dot)
            z_dots.append(dot @ layer.w)
            dot = add_residual(scale(layer, z_dots[-1], d), dot, layer.copies)
        gradients = [
            torch.mv(a_last.T, e_bar).add_(dot.sum(0))[:, None],
            e_bar.sum()[None],
        ]  # of w, b of the last layer
        a_bar = e_bar[:, None] * last.w[:, 0]
        for n in reversed(range(len(hidden))):  # adjoint sweep
            layer, (t, d, dd), (G, g) = hidden[n], curves[n], back[n]
            z_bar = scale(layer, a_bar, d).addcmul_(scale(layer, G, dd), z_dots[n])
            own = [torch.mm(inputs[n].T, z_bar).addmm_(a_dots[n].T, g), z_bar.sum(0)]
            if layer.idt is not None:
                own.append((a_bar * t).addcmul_(G, d * z_dots[n]).sum(0))
            gradients = own + gradients
            if n > 0 or ctx.needs_input_grad[0]:
                a_bar = add_residual_back(z_bar @ layer.w.T, a_bar, layer.copies)
        return a_bar if ctx.needs_input_grad[0] else None, None, *gradients


def value_and_gradient(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """e (n,) and ∂e/∂x (n, m) of a net with one output."""
    parameters = [p for layer in net.layers for p in (layer.w, layer.b, layer.idt) if p is not None]
    apply: Callable = ValueAndGradient.apply
    return apply(x, net, *parameters)
