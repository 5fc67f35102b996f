"""Attention among the neighbours of an atom and the normalisation of rows, with derivatives written by hand.

    y = z/|z|: q, k, v          s_jk = α q_j·k_k          W_jk = w_j w_k          d_jk = u_j·u_k, or 1
    t = (s + 20) W − 20 if smooth, else s          p = softmax_k t          a = p W d          o = a v

Where it is not smooth w is 1 for a neighbour and 0 for none, and keys of w = 0 are not in the sum.

Pull, from go = ∂E/∂o:   ga = go vᵀ,  gp = ga W d,  gt = p (gp − Σ_k p gp),  gs = gt W (or gt),
                         gq = α gs k,  gk = α gsᵀ q,  gv = aᵀ go,  gz = (gy − y (y·gy))/|z|

Its derivative is that of <ż, gz> + <ẇ, gw> + <u̇, gu>, with adjoints ż, ẇ, u̇ of what it gives; this is <go, ȯ>, where
ȯ is the tangent of o along them. So ȯ is the adjoint of go, and with b = go v̇ᵀ the others are those of Σ ga ȧ + b a.

Each function gives its intermediate values too (y, s and 1/|z|), and its pull depends on these instead of z: adjoints
from there meet those of the function itself before they go further back. Of what is large y, s, p, ga and gz are kept
between the sweeps; all else is computed once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from allforce.models import attention_kernels as loops
from allforce.models.pool import Pool, threads


@dataclass(frozen=True)
class Rule:
    """Which of the equations holds."""

    alpha: float
    smooth: bool
    dotr: bool
    normalize: bool

    @property
    def flags(self) -> tuple[bool, bool]:
        return self.smooth, self.dotr


def arrays(*tensors: Tensor):
    return (x.detach().contiguous().numpy() for x in tensors)


def pool(x: Tensor) -> Pool:
    return threads(x.numel() // 64)  # a number takes a 64th of the time of an edge


def like(x: Tensor) -> Tensor:
    """Room for a result: loops write into contiguous arrays only."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def or_zero(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x


def by_row(z: Tensor) -> Tensor:
    """(N, n, 3h) as (N·n, 3, h)."""
    return z.unflatten(2, (3, z.shape[2] // 3)).flatten(0, 1)


class Attend(torch.autograd.Function):
    """o (N, n, h) from z (N, n, 3h), w (N, n), u (N, n, 3); beyond: empty slots that are not among the n.

    Also y (3, N, n, h), f = 1/|z| (N, n, 3) and s (N, n, n).
    """

    @staticmethod
    def forward(ctx, z: Tensor, w: Tensor, u: Tensor, beyond: float, rule: Rule):
        N, n, width = z.shape
        y, f = z.new_empty(3, N, n, width // 3), z.new_empty(N, n, 3)
        loops.unit_rows(*arrays(by_row(z)), rule.normalize, *arrays(y.flatten(1, 2), f.flatten(0, 1)), pool(z))
        q, k, v = y
        s, p, a = (z.new_empty(N, n, n) for _ in range(3))
        torch.baddbmm(s, q, k.transpose(1, 2), beta=0.0, alpha=rule.alpha, out=s)
        loops.gate(*arrays(s, w, u), beyond, rule.flags, *arrays(p, a), pool(s))
        ctx.save_for_backward(y, f, s, w, u, p)
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        return torch.bmm(a, v), y, f, s

    @staticmethod
    def backward(ctx, go, y_bar, f_bar, s_bar):
        y, f, s, w, u, p = ctx.saved_tensors
        if torch.is_grad_enabled():
            assert y_bar is None and s_bar is None, "attention can be differentiated twice, not three times"
            return *AttendPull.apply(go, y, f, s, w, u, p, ctx.rule), None, None
        gz, gw, gu, *_ = attend_pull(or_zero(go, y[0]), y, f, s, w, u, p, ctx.rule, y_bar, f_bar, s_bar)
        return gz, gw, gu, None, None


def attend_pull(go, y, f, s, w, u, p, rule, y_bar=None, f_bar=None, s_bar=None):
    """gz, gw, gu; ga and y·gy. Adjoints of y, f and s from elsewhere are added to those from go; ȳ is overwritten."""
    q, k, v = y
    ga = torch.bmm(go, v.transpose(1, 2))
    a, gs, gw, gu = (like(x) for x in (s, s, w, u))
    loops.pull(*arrays(s, w, u, p, ga), rule.flags, *arrays(a, gs, gw, gu), pool(s))
    if s_bar is not None:
        gs += s_bar
    add = y_bar is not None
    gy = y_bar if add else like(y)
    products = (gs, k, rule.alpha), (gs.transpose(1, 2), q, rule.alpha), (a.transpose(1, 2), go, 1.0)
    for out, (left, right, factor) in zip(gy, products, strict=True):
        torch.baddbmm(out, left, right, beta=float(add), alpha=factor, out=out)
    gz, along = y.new_empty(*f.shape[:2], 3 * y.shape[3]), like(f)
    loops.unit_pull(
        *arrays(y.flatten(1, 2), f.flatten(0, 1)),
        rule.normalize,
        *arrays(gy.flatten(1, 2), or_zero(f_bar, f).flatten(0, 1), by_row(gz), along.flatten(0, 1)),
        pool(y),
    )
    return gz, gw, gu, ga, along


class AttendPull(torch.autograd.Function):
    """∂E/∂z, ∂E/∂w and ∂E/∂u from go = ∂E/∂o."""

    @staticmethod
    def forward(ctx, go, y, f, s, w, u, p, rule):
        go = go.contiguous()
        gz, gw, gu, ga, along = attend_pull(go, y, f, s, w, u, p, rule)
        ctx.save_for_backward(go, y, f, s, w, u, p, gz, ga, along)
        ctx.rule = rule
        return gz, gw, gu

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, z_dot, w_dot, u_dot):
        (go, y, f, s, w, u, p, gz, ga, along), rule = ctx.saved_tensors, ctx.rule
        y_dot, y_bar, f_bar = (like(x) for x in (y, y, f))
        loops.unit_push(
            *arrays(y.flatten(1, 2), f.flatten(0, 1)),
            rule.normalize,
            *arrays(by_row(gz), along.flatten(0, 1), by_row(z_dot)),
            *arrays(y_dot.flatten(1, 2), y_bar.flatten(1, 2), f_bar.flatten(0, 1)),
            pool(y),
        )
        (q, k, v), (q_dot, k_dot, v_dot) = y, y_dot
        s_dot = torch.bmm(q_dot, k.transpose(1, 2))
        s_dot.baddbmm_(q, k_dot.transpose(1, 2), beta=rule.alpha, alpha=rule.alpha)
        b = torch.bmm(go, v_dot.transpose(1, 2))
        a, a_dot, gs, s_bar, w_bar, u_bar = (like(x) for x in (s, s, s, s, w, u))
        given = (s, w, u, p, ga, s_dot, w_dot, u_dot, b)
        loops.push(*arrays(*given), rule.flags, *arrays(a, a_dot, gs, s_bar, w_bar, u_bar), pool(s))
        o_dot = torch.bmm(a_dot, v).baddbmm_(a, v_dot)
        y_bar[0].baddbmm_(gs, k_dot, alpha=rule.alpha)
        y_bar[1].baddbmm_(gs.transpose(1, 2), q_dot, alpha=rule.alpha)
        y_bar[2].baddbmm_(a_dot.transpose(1, 2), go)
        return o_dot, y_bar, f_bar, s_bar, w_bar, u_bar, None, None


class Norm(torch.autograd.Function):
    """y = f (x − mean x) of rows x (…, M), and f = 1/√(var x + eps)."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float):
        y, f = like(x), x.new_empty(x.shape[:-1])
        loops.norm_rows(*arrays(x.flatten(0, -2)), eps, *arrays(y.flatten(0, -2), f.flatten()), pool(x))
        ctx.save_for_backward(y, f)
        ctx.set_materialize_grads(False)
        return y, f

    @staticmethod
    def backward(ctx, gy, gf):
        y, f = ctx.saved_tensors
        if torch.is_grad_enabled():
            assert gf is None, "the normalisation can be differentiated twice, not three times"
            return NormPull.apply(gy, y, f), None
        return norm_pull(or_zero(gy, y), or_zero(gf, f), y, f), None


def norm_pull(gy: Tensor, gf: Tensor, y: Tensor, f: Tensor) -> Tensor:
    gx = like(y)
    rows = y.flatten(0, -2), f.flatten(), gy.flatten(0, -2), gf.flatten(), gx.flatten(0, -2)
    loops.norm_pull(*arrays(*rows), pool(y))
    return gx


class NormPull(torch.autograd.Function):
    """∂E/∂x from gy = ∂E/∂y."""

    @staticmethod
    def forward(ctx, gy: Tensor, y: Tensor, f: Tensor) -> Tensor:
        ctx.save_for_backward(gy, y, f)
        return norm_pull(gy, torch.zeros_like(f), y, f)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, x_dot: Tensor):
        gy, y, f = ctx.saved_tensors
        y_dot, y_bar, f_bar = (like(x) for x in (y, y, f))
        given = (y.flatten(0, -2), f.flatten(), gy.flatten(0, -2), x_dot.flatten(0, -2))
        loops.norm_push(*arrays(*given, y_dot.flatten(0, -2), y_bar.flatten(0, -2), f_bar.flatten()), pool(y))
        return y_dot, y_bar, f_bar
