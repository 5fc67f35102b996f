"""Two steps of PiNet over pairs, each with its derivative and the derivative of that written out.

    tanh          y = tanh(z)                     ẑ = ŷ (1 − y²)
    interaction   I_c = Σ_b tanh(z_bc) e_b        ẑ_bc = Î_c e_b (1 − w_bc²),   ê_b = Σ_c Î_c w_bc,   w = tanh(z)

A loss on forces differentiates these twice. Written out, each takes one pass over the (E, n_basis, c) numbers, which
are most of what a step of PiNet touches; left to autograd it takes ten. On CPUs the passes are compiled loops.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from allforce.loops import njit
from allforce.models import pinet_kernels
from allforce.models.kernels import compiled, options
from allforce.models.pool import threads
from allforce.models.tanh import tanh_of_all

SMALL = 2**19  # bytes


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor) -> Tensor:
        y = _tanh(z)
        ctx.save_for_backward(z, y)
        return y

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        z, y = ctx.saved_tensors
        return TanhPull.apply(z, y.detach(), g)


class TanhPull(torch.autograd.Function):
    """g (1 − y²); with an adjoint u: u (1 − y²) for g, −2 y g u (1 − y²) for z."""

    @staticmethod
    def forward(ctx, z: Tensor, y: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(y, g)
        return torch.ops.aten.tanh_backward(g, y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u: Tensor):
        y, g = ctx.saved_tensors
        if compiled(u):
            of_z, of_g = torch.empty_like(y), torch.empty_like(y)
            _tanh_adjoint(_flat(y), _flat(g), _flat(u), _flat(of_z), _flat(of_g))
            return of_z, None, of_g
        of_g = torch.ops.aten.tanh_backward(u, y)
        return -2.0 * y * g * of_g, None, of_g


class Interaction(torch.autograd.Function):
    """I (E, c) from z (E, n_basis, c) and e (E, n_basis)."""

    @staticmethod
    def forward(ctx, z: Tensor, e: Tensor) -> Tensor:
        w = _tanh(z)
        ctx.save_for_backward(z, e, w)
        if not compiled(w):
            return (w * e[:, :, None]).sum(1)
        out = w.new_empty(w.shape[0], w.shape[2])
        pinet_kernels.interaction(w.numpy(), _array(e), out.numpy(), threads(w.numel() // 64))
        return out

    @staticmethod
    def backward(ctx, g: Tensor):
        z, e, w = ctx.saved_tensors
        return InteractionPull.apply(z, w.detach(), e, g)


class InteractionPull(torch.autograd.Function):
    """ẑ and ê from g = Î; its own derivative is the last one that a loss on forces needs."""

    @staticmethod
    def forward(ctx, z: Tensor, w: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(w, e, g)
        if not compiled(w):
            return g[:, None, :] * e[:, :, None] * (1.0 - w * w), (w * g[:, None, :]).sum(2)
        of_z, of_e = torch.empty_like(w), torch.zeros_like(e, memory_format=torch.contiguous_format)
        arrays = (w.numpy(), _array(e), _array(g), of_z.numpy(), of_e.numpy())
        pinet_kernels.interaction_back(*arrays, threads(w.numel() // 64))
        return of_z, of_e

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u: Tensor, v: Tensor):
        """Adjoints u of ẑ and v of ê: with s = 1 − w², u s e + v w for g, u s g for e, s g (v − 2 w e u) for z."""
        w, e, g = ctx.saved_tensors
        if not compiled(w):
            s, g, e, v = 1.0 - w * w, g[:, None, :], e[:, :, None], v[:, :, None]
            us = u * s
            return s * g * (v - 2.0 * w * e * u), None, (us * g).sum(2), (us * e + v * w).sum(1)
        of_z = torch.empty_like(w)
        of_e, of_g = w.new_empty(w.shape[:2]), w.new_empty(w.shape[0], w.shape[2])
        arrays = (w.numpy(), _array(e), _array(g), _array(u), _array(v), of_z.numpy(), of_e.numpy(), of_g.numpy())
        _interaction_adjoint(*arrays)
        return of_z, None, of_e, of_g


def tanh(z: Tensor) -> Tensor:
    """Written out where that saves more than the calls from autograd into Python cost."""
    return Tanh.apply(z) if z.numel() * z.element_size() > SMALL else torch.tanh(z)


def interaction(z: Tensor, e: Tensor) -> Tensor:
    return Interaction.apply(z, e)


def _tanh(z: Tensor) -> Tensor:
    if not compiled(z):
        return torch.tanh(z)
    y = z.detach().clone(memory_format=torch.contiguous_format)
    tanh_of_all(y.view(-1).numpy(), threads(y.numel() // 64))
    return y


def _array(x: Tensor) -> np.ndarray:
    return x.detach().contiguous().numpy()


def _flat(x: Tensor) -> np.ndarray:
    return _array(x).reshape(-1)


@njit(**options)
def _tanh_adjoint(y, g, u, of_z, of_g):
    one, two = y.dtype.type(1), y.dtype.type(2)
    for k in range(y.shape[0]):
        v = u[k] * (one - y[k] * y[k])
        of_g[k] = v
        of_z[k] = -two * y[k] * g[k] * v


@njit(**options)
def _interaction_adjoint(w, e, g, u, v, of_z, of_e, of_g):
    zero, one, two = w.dtype.type(0), w.dtype.type(1), w.dtype.type(2)
    for p in range(w.shape[0]):
        for c in range(w.shape[2]):
            of_g[p, c] = zero
        for b in range(w.shape[1]):
            total, eb, vb = zero, e[p, b], v[p, b]
            for c in range(w.shape[2]):
                x = w[p, b, c]
                s = one - x * x
                us = u[p, b, c] * s
                of_g[p, c] += us * eb + vb * x
                total += us * g[p, c]
                of_z[p, b, c] = g[p, c] * (s * vb - two * x * eb * us)
            of_e[p, b] = total
