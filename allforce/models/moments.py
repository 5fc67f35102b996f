"""The fast path: spline moments of the neighbourhood of every atom, with closed-form derivatives.

    A_i,t,k = Σ_{e of i, type t} B_k(x_e) R̂_e  + (sel_t − n_it) B_k(p_0) p     x_e = R̂_e0,  p = −davg/dstd of the centre
    ∂E/∂r_e = pull(∂E/∂A),   and for losses on forces its adjoint push(v): both are linear in their argument

A holds geometry only, no parameters. So the embedding nets are evaluated on the K nodes of a grid instead of on
every neighbour: T_i = (1/nnei) Σ_tk A_itk ⊗ C_tk with C the spline coefficients of the nets (se_e2_a.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from allforce.data.batch import Edges
from allforce.models import kernels
from allforce.models.envmat import environment
from allforce.models.spline import WIDTH, Grid


@dataclass
class Geometry:
    """The edges of a batch, and how a descriptor looks at them."""

    edges: Edges
    type: Tensor  # (N,)
    center: Tensor  # (nt, 3) davg, 1/dstd radial, 1/dstd angular of the centre type
    used: Tensor  # (nt, nt) bool, False for excluded (centre, neighbour) types
    sel: Tensor  # (nt,) float64 slots
    rs: float
    rc: float
    protection: float
    r_close: float  # closer neighbours are beyond the grid and are left to the exact path
    grid: Grid
    dtype: torch.dtype

    def new_moments(self) -> Tensor:
        shape = (len(self.type), 4, len(self.sel) * self.grid.K)
        return torch.zeros(shape, dtype=self.dtype, device=self.type.device)


class Pull(torch.autograd.Function):
    """∂E/∂r_e (E, 3) from ∂E/∂A (N, 4, nt·K): linear, and its adjoint is push."""

    @staticmethod
    def forward(ctx, gA: Tensor, r: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(r)
        ctx.geometry = geometry
        return backend(r).pull(gA, r, geometry)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u: Tensor):
        r = ctx.saved_tensors[0]
        return backend(r).push(u, r, ctx.geometry), None, None


class Compiled:
    """CPU: one compiled pass over the edges."""

    @staticmethod
    def arguments(r: Tensor, g: Geometry) -> list:
        return [x.numpy() for x in (r, g.edges.j, g.edges.first, g.type, g.center, g.used)]

    @staticmethod
    def constants(g: Geometry) -> tuple:
        return g.rs, g.rc, g.protection, g.r_close, g.grid.lo, 1.0 / g.grid.h, g.grid.K

    @classmethod
    def moments(cls, r: Tensor, g: Geometry) -> Tensor:
        A = g.new_moments()
        kernels.moments(*cls.arguments(r, g), g.sel.numpy(), *cls.constants(g), A.numpy())
        return A

    @classmethod
    def pull(cls, gA: Tensor, r: Tensor, g: Geometry) -> Tensor:
        out = torch.empty_like(r)
        kernels.pull(*cls.arguments(r, g), *cls.constants(g), gA.detach().contiguous().numpy(), out.numpy())
        return out

    @classmethod
    def push(cls, u: Tensor, r: Tensor, g: Geometry) -> Tensor:
        A = g.new_moments()
        kernels.push(*cls.arguments(r, g), *cls.constants(g), u.contiguous().numpy(), A.numpy())
        return A


class Eager:
    """Any device: the same with tensor operations; also the reference for Compiled in the tests."""

    @staticmethod
    def rows(r: Tensor, g: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """R̂ (E, 4) of the edges in use (rows of zeros elsewhere), their places in A, spline values and slopes."""
        e, tau = g.edges, g.type[g.edges.i]
        t = g.type[e.j]
        keep = g.used[tau, t] & (torch.linalg.vector_norm(r, dim=1) >= g.r_close)
        shift, scale = g.center[tau, 0], g.center[tau][:, [1, 2, 2, 2]]
        R = environment(r, g.rs, g.rc, g.protection)
        R = torch.cat([R[:, :1] - shift[:, None], R[:, 1:]], 1) * scale
        b, value, slope = g.grid.weights(R[:, 0].clamp(max=g.grid.hi).detach())
        mask = keep[:, None].to(R.dtype)
        place = ((e.i * 4 * len(g.sel) + t) * g.grid.K + b)[:, None] + torch.arange(WIDTH, device=r.device)
        return R, place, value * mask, slope * mask, torch.arange(4, device=r.device) * (len(g.sel) * g.grid.K)

    @classmethod
    def scatter(cls, place: Tensor, component: Tensor, values: Tensor, g: Geometry) -> Tensor:
        A = g.new_moments()
        index = place[:, :, None] + component  # (E, WIDTH, 4)
        A.view(-1).index_add_(0, index.reshape(-1), values.reshape(-1).to(A.dtype))
        return A

    @classmethod
    def moments(cls, r: Tensor, g: Geometry) -> Tensor:
        R, place, value, _, component = cls.rows(r, g)
        A = cls.scatter(place, component, value[:, :, None] * R[:, None, :], g)
        N, nt, K = len(g.type), len(g.sel), g.grid.K
        count = torch.zeros(N * nt, dtype=g.sel.dtype, device=r.device)
        count.index_add_(0, g.edges.i * nt + g.type[g.edges.j], torch.ones_like(r[:, 0]))
        empty = (g.sel - count.view(N, nt)).clamp(min=0.0)  # (N, nt)
        p0 = -g.center[:, 0] * g.center[:, 1]  # (nt,) of the centre type
        b, value, _ = g.grid.weights(p0)
        slots = (b[:, None] + torch.arange(WIDTH, device=r.device))[g.type]  # (N, WIDTH)
        amount = empty[:, :, None] * (value * p0[:, None])[g.type][:, None, :]  # (N, nt, WIDTH)
        A.view(N, 4, nt, K)[:, 0].scatter_add_(2, slots[:, None, :].expand(-1, nt, -1), amount.to(A.dtype))
        return A

    @classmethod
    def pull(cls, gA: Tensor, r: Tensor, g: Geometry) -> Tensor:
        with torch.enable_grad():
            r = r.detach().requires_grad_()
            R, place, value, slope, component = cls.rows(r, g)
            ga = gA.detach().reshape(-1)[place[:, :, None] + component].to(r.dtype)  # (E, WIDTH, 4)
            gR = (value[:, :, None] * ga).sum(1)
            gR[:, 0] += (slope[:, :, None] * ga * R.detach()[:, None, :]).sum((1, 2))
            return torch.autograd.grad(R, r, gR)[0]

    @classmethod
    def push(cls, u: Tensor, r: Tensor, g: Geometry) -> Tensor:
        R, dR = torch.autograd.functional.jvp(lambda x: cls.rows(x, g)[0], r.detach(), u.detach())
        _, place, value, slope, component = cls.rows(r.detach(), g)
        values = slope[:, :, None] * dR[:, None, :1] * R[:, None, :] + value[:, :, None] * dR[:, None, :]
        return cls.scatter(place, component, values, g)


BACKENDS: dict[str, type[Compiled] | type[Eager]] = {"cpu": Compiled}


def backend(r: Tensor) -> type[Compiled] | type[Eager]:
    return BACKENDS.get(r.device.type, Eager)


def moments(r: Tensor, geometry: Geometry) -> Tensor:
    """A (N, 4, nt·K) of the edge vectors r (E, 3)."""
    return backend(r).moments(r, geometry)
