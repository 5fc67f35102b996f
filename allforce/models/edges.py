"""Sums between edges and atoms, and between T and D: (bi)linear maps whose derivatives are of the same kind."""

from __future__ import annotations

import torch
from torch import Tensor

from allforce.data.batch import Edges
from allforce.models import atom_kernels
from allforce.models.kernels import compiled
from allforce.models.pool import Pool, threads


class AtomsOfEdges(torch.autograd.Function):
    """F_a = Σ_{e: i=a} g_e − Σ_{e: j=a} g_e from g (E, 3); its adjoint is v_i − v_j."""

    @staticmethod
    def forward(ctx, g: Tensor, edges: Edges, natoms: int) -> Tensor:
        ctx.edges = edges
        out = g.new_zeros(natoms, 3)
        if compiled(g):
            atom_kernels.atoms_of_edges(edges.i.numpy(), edges.j.numpy(), g.detach().contiguous().numpy(), out.numpy())
            return out
        return out.index_add_(0, edges.i, g).index_add_(0, edges.j, g, alpha=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, v: Tensor):
        edges = ctx.edges
        if not compiled(v):
            return v[edges.i] - v[edges.j], None, None
        out = v.new_empty(edges.i.shape[0], 3)
        atom_kernels.edges_of_atoms(edges.i.numpy(), edges.j.numpy(), v.contiguous().numpy(), out.numpy())
        return out, None, None


NUMBERS = 64  # of D, that take as long as an edge

# D of an atom is one row (M1·M2 + ·), because that is what a fitting takes; columns behind M1·M2 come from elsewhere.


def by_rows(D: Tensor, M1: int, M2: int) -> Tensor:
    """The product in D (N, M1·M2 + ·) as (N, M1, M2)."""
    return D[:, : M1 * M2].unflatten(1, (M1, M2))


def pool(D: Tensor) -> Pool:
    return threads(D.numel() // NUMBERS)


def symmetric_product(X: Tensor, Y: Tensor, M2: int, width: int) -> Tensor:
    """S(X, Y) = Xᵀ Y[:, :M2] + Yᵀ X[:, :M2] from two (N, 4, M1), as (N, width) with zeros behind."""
    N, _, M1 = X.shape
    D = X.new_empty(N, width)
    if width > M1 * M2:
        D[:, M1 * M2 :] = 0.0
    if compiled(X):
        atom_kernels.gram(X.contiguous().numpy(), Y.contiguous().numpy(), M2, D.numpy(), pool(D))
    else:
        by_rows(D, M1, M2).copy_(X.transpose(1, 2) @ Y[:, :, :M2] + Y.transpose(1, 2) @ X[:, :, :M2])
    return D


def product_gradient(g: Tensor, T: Tensor, M2: int) -> Tensor:
    """P(g, T) = ∂<g, ½S(T, T)>/∂T (N, 4, M1), linear in g (N, M1·M2 + ·) and in T."""
    if not compiled(T):
        g = by_rows(g, T.shape[2], M2)
        out = T[:, :, :M2] @ g.transpose(1, 2)
        out[:, :, :M2] += T @ g
        return out
    out = torch.empty_like(T)
    atom_kernels.gram_gradient(g.contiguous().numpy(), T.contiguous().numpy(), M2, out.numpy(), pool(g))
    return out


class Gram(torch.autograd.Function):
    """D = ½S(T, T) = TᵀT[:, :M2], and the columns behind it; the adjoint of D pulls back to P(D̄, T)."""

    @staticmethod
    def forward(ctx, T: Tensor, M2: int, *columns: Tensor) -> Tensor:
        ctx.save_for_backward(T)
        ctx.M2, ctx.widths = M2, [c.shape[1] for c in columns]
        N, _, M1 = T.shape
        D = T.new_empty(N, M1 * M2 + sum(ctx.widths))
        if compiled(T):
            atom_kernels.square(T.detach().contiguous().numpy(), M2, D.numpy(), pool(D))
        else:
            by_rows(D, M1, M2).copy_(T.transpose(1, 2) @ T[:, :, :M2])
        if columns:
            for target, column in zip(D[:, M1 * M2 :].split(ctx.widths, 1), columns, strict=True):
                target.copy_(column)
        return D

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, D: Tensor):
        T = ctx.saved_tensors[0].detach()
        behind = D[:, T.shape[2] * ctx.M2 :].split(ctx.widths, 1) if ctx.widths else ()
        return product_gradient(D, T, ctx.M2), None, *behind


class GramPull(torch.autograd.Function):
    """∂E/∂T = P(∂E/∂D, T); adjoints S(v, T) and P(∂E/∂D, v)."""

    @staticmethod
    def forward(ctx, g: Tensor, T: Tensor, M2: int) -> Tensor:
        ctx.save_for_backward(g, T)
        ctx.M2 = M2
        return product_gradient(g.detach(), T.detach(), M2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, v: Tensor):
        g, T = (x.detach() for x in ctx.saved_tensors)
        return symmetric_product(v, T, ctx.M2, g.shape[1]), product_gradient(g, v, ctx.M2), None
