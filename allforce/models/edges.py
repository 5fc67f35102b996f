"""Sums between edges and atoms, and between T and D: (bi)linear maps whose derivatives are of the same kind."""

from __future__ import annotations

import torch
from torch import Tensor

from allforce.data.batch import Edges
from allforce.models import kernels


class AtomsOfEdges(torch.autograd.Function):
    """F_a = Σ_{e: i=a} g_e − Σ_{e: j=a} g_e from g (E, 3); its adjoint is v_i − v_j."""

    @staticmethod
    def forward(ctx, g: Tensor, edges: Edges, natoms: int) -> Tensor:
        ctx.edges = edges
        out = g.new_zeros(natoms, 3)
        if kernels.compiled(g):
            kernels.atoms_of_edges(edges.i.numpy(), edges.j.numpy(), g.detach().contiguous().numpy(), out.numpy())
            return out
        return out.index_add_(0, edges.i, g).index_add_(0, edges.j, g, alpha=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, v: Tensor):
        edges = ctx.edges
        if not kernels.compiled(v):
            return v[edges.i] - v[edges.j], None, None
        out = v.new_empty(len(edges.i), 3)
        kernels.edges_of_atoms(edges.i.numpy(), edges.j.numpy(), v.contiguous().numpy(), out.numpy())
        return out, None, None


def symmetric_product(X: Tensor, Y: Tensor, M2: int) -> Tensor:
    """S(X, Y) = Xᵀ Y[:, :M2] + Yᵀ X[:, :M2], (N, M1, M2) from two (N, 4, M1)."""
    if not kernels.compiled(X):
        return X.transpose(1, 2) @ Y[:, :, :M2] + Y.transpose(1, 2) @ X[:, :, :M2]
    D = X.new_empty(len(X), X.shape[2], M2)
    kernels.gram(X.contiguous().numpy(), Y.contiguous().numpy(), D.numpy())
    return D


def product_gradient(g: Tensor, T: Tensor) -> Tensor:
    """P(g, T) = ∂<g, ½S(T, T)>/∂T (N, 4, M1), linear in g (N, M1, M2) and in T."""
    if not kernels.compiled(T):
        out = T[:, :, : g.shape[2]] @ g.transpose(1, 2)
        out[:, :, : g.shape[2]] += T @ g
        return out
    out = torch.empty_like(T)
    kernels.gram_gradient(g.contiguous().numpy(), T.contiguous().numpy(), out.numpy())
    return out


class Gram(torch.autograd.Function):
    """D = ½S(T, T) = TᵀT[:, :M2]; the adjoint of D pulls back to P(D̄, T)."""

    @staticmethod
    def forward(ctx, T: Tensor, M2: int) -> Tensor:
        ctx.save_for_backward(T)
        T = T.detach()
        if not kernels.compiled(T):
            return T.transpose(1, 2) @ T[:, :, :M2]
        D = T.new_empty(len(T), T.shape[2], M2)
        kernels.square(T.contiguous().numpy(), D.numpy())
        return D

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, D: Tensor):
        return product_gradient(D, ctx.saved_tensors[0].detach()), None


class GramPull(torch.autograd.Function):
    """∂E/∂T = P(∂E/∂D, T); adjoints S(v, T) and P(∂E/∂D, v)."""

    @staticmethod
    def forward(ctx, g: Tensor, T: Tensor) -> Tensor:
        ctx.save_for_backward(g, T)
        return product_gradient(g.detach(), T.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, v: Tensor):
        g, T = (x.detach() for x in ctx.saved_tensors)
        return symmetric_product(v, T, g.shape[2]), product_gradient(g, v)
