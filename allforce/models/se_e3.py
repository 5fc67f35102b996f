"""The three-body descriptor se_e3: angles between the neighbours of an atom.

    v_e = (R̂_e1, R̂_e2, R̂_e3),   g_jk = v_j·v_k   of two neighbours j, k of i, also j = k           R̂: see two_body.py
    D_i = Σ_{a ≤ b} 1/(sel_a sel_b) Σ_{j of type a, k of type b} g_jk net_ab(g_jk)

An empty slot has v = 0 and adds nothing. The nets are curves of one scalar and are trained on a table whose variable is
x = arsinh(g): g spans three orders of magnitude, and a net changes over lengths that grow with |g|.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from allforce.config.keys import Sel, per_type
from allforce.config.section import key
from allforce.data.batch import Batch, Edges
from allforce.models import kernels, triple_kernels
from allforce.models.env_stat import load_slots, slots
from allforce.models.envmat import switch
from allforce.models.layers import CurveNets, Net, generator
from allforce.models.pool import Pool, threads
from allforce.models.pull import Pull, by_autograd
from allforce.models.serial import collection, copy_nets
from allforce.models.spline import Grid
from allforce.models.two_body import SEL_HELP, Curve, TwoBody, TwoBodyConfig


class SeE3Config(TwoBodyConfig):
    """Deep Potential, smooth edition: embedding of three atoms, by the angle at the central one."""

    type_aliases = ("se_t", "se_at", "se_a_3be")

    type: Literal["se_e3"] = key("se_e3", 'Kind of descriptor (required): "se_e3".')
    sel: Sel = key("auto", SEL_HELP)

    def problems_with_types(self, ntypes: int) -> Iterator[tuple[str, str]]:
        yield from per_type("sel", self.sel, ntypes)
        yield from super().problems_with_types(ntypes)


class PairNets(CurveNets):
    """A net for each pair of neighbour types a ≤ b, in the order of `pairs`."""

    def __init__(self, config: SeE3Config, pairs: list[tuple[int, int]], ntypes: int, dtype: torch.dtype):
        act, dt = config.activation_function, config.resnet_dt
        seeds = (generator(config.seed, 0, a + ntypes * b) for a, b in pairs)
        super().__init__(Net(1, config.neuron, act, dt, dtype, seed) for seed in seeds)

    @staticmethod
    def variable(x: Tensor) -> Tensor:
        """g = sinh(x)."""
        return torch.sinh(x)


@dataclass
class Triples:
    """What the sums over pairs of neighbours need."""

    v: Tensor  # (E, 3) float64
    edges: Edges
    neighbor: Tensor  # (E,) type of the neighbour
    net_index: Tensor  # (nt, nt) number of the net of two neighbour types
    grid: Grid
    count: int  # nets
    dtype: torch.dtype

    def arguments(self) -> tuple:
        arrays = (x.numpy() for x in (self.v, self.edges.first, self.neighbor, self.net_index))
        return *arrays, (self.grid.lo, 1.0 / self.grid.h, self.grid.K)

    @property
    def pool(self) -> Pool:
        return threads(len(self.v) ** 2 // (2 * len(self.edges.first)))  # pairs, each about as long as an edge

    def new_moments(self) -> Tensor:
        return torch.zeros(len(self.edges.first) - 1, self.count * self.grid.K, dtype=self.dtype)


class TripleSum(torch.autograd.Function):
    """D (N, M) = A·C, A_i,ab,k = Σ_jk g_jk B_k(x_jk), for C (nets·K, M); linear in C."""

    @staticmethod
    def forward(ctx, C: Tensor, t: Triples) -> Tensor:
        A = t.new_moments()
        triple_kernels.moments(*t.arguments(), A.numpy(), t.pool)
        ctx.save_for_backward(A)
        return A @ C

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, D_bar: Tensor):
        return ctx.saved_tensors[0].T @ D_bar, None


class TriplePull(torch.autograd.Function):
    """∂E/∂v (E, 3) = pull(gD·Cᵀ) from gD = ∂E/∂D (N, M); linear in gD and in C."""

    @staticmethod
    def forward(ctx, gD: Tensor, C: Tensor, t: Triples) -> Tensor:
        ctx.save_for_backward(gD, C)
        ctx.triples = t
        out = torch.zeros_like(t.v)
        triple_kernels.pull(*t.arguments(), (gD @ C.T).contiguous().numpy(), out.numpy(), t.pool)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u: Tensor):
        gD, C = ctx.saved_tensors
        t: Triples = ctx.triples
        A_dot = t.new_moments()
        triple_kernels.push(*t.arguments(), u.contiguous().numpy(), A_dot.numpy(), t.pool)
        return A_dot @ C, A_dot.T @ gD, None


class SeE3(TwoBody):
    """D (N, M) of a batch."""

    Config = SeE3Config
    pt_part = ".seat"
    nets: PairNets

    net_index: Tensor  # (nt, nt) int64
    scale: Tensor  # (nets,) 1/(sel_a sel_b)

    def __init__(self, config: SeE3Config, ntypes: int):
        super().__init__(config, ntypes)
        self.dim = config.neuron[-1]
        self.pairs = [(a, b) for a in range(ntypes) for b in range(a, ntypes)]
        self.nets = PairNets(config, self.pairs, ntypes, self.dtype)
        self.requires_grad_(config.trainable)
        net_index = torch.zeros(ntypes, ntypes, dtype=torch.int64)
        for n, (a, b) in enumerate(self.pairs):
            net_index[a, b] = net_index[b, a] = n
        self.register_buffer("net_index", net_index, persistent=False)
        sel = [int(n) for n in config.sel]
        scale = [1.0 / max(sel[a] * sel[b], 1) for a, b in self.pairs]
        self.register_buffer("scale", torch.tensor(scale, dtype=self.dtype), persistent=False)

    def range_of_curves(self, s: float) -> tuple[float, float]:
        """± arsinh of the largest |v|²."""
        most = float(np.arcsinh((s / float(self.dstd[:, 1].min())) ** 2))
        return -most, most

    # ---- the equation

    def forward(self, batch: Batch, r: Tensor) -> Tensor:
        i, neighbor = batch.edges.i, batch.edges.type[batch.edges.j]
        v = self.rows(batch, r, i, batch.edges.j)[:, 1:]
        exact = self.table.grid is None or batch.edges.nearest < self.r_close
        curves: Iterable[Curve] = self.nets if exact else self.splines()
        D = torch.zeros(len(batch.type), self.dim, dtype=self.dtype, device=r.device)
        j, k = pairs_of_edges(batch.edges)  # (P,) edges of the same centre, all ordered pairs
        for n, (curve, (a, b)) in enumerate(zip(curves, self.pairs, strict=True)):
            chosen = ((neighbor[j] == a) & (neighbor[k] == b)).nonzero()[:, 0]
            g = (v[j[chosen]] * v[k[chosen]]).sum(1, keepdim=True)
            D = D.index_add(0, i[j[chosen]], self.scale[n] * g * curve(g if exact else torch.asinh(g)))
        return D

    def alone(self, batch: Batch) -> Tensor:
        return self.with_pull(batch, batch.edges.r)[0]

    # ---- the same on the table, with derivatives written by hand

    def with_pull(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        grid = self.table.grid
        if grid is None or batch.edges.nearest < self.r_close or not kernels.compiled(r):
            return by_autograd(lambda x: self(batch, x), r)
        unit, q, dq = self.length_of_v(batch, r)
        neighbor = batch.edges.type[batch.edges.j]
        triples = Triples(q * unit, batch.edges, neighbor, self.net_index, grid, len(self.pairs), self.dtype)
        C = self.table.coefficients(self.nets) * self.scale[:, None]  # (K, nets, M)
        C = C.transpose(0, 1).reshape(-1, self.dim)
        across = q / torch.linalg.vector_norm(r, dim=1, keepdim=True)

        def pull(gD: Tensor) -> Tensor:
            gv = TriplePull.apply(gD, C, triples)
            return across * gv + (dq - across) * (gv * unit).sum(1, keepdim=True) * unit

        return TripleSum.apply(C, triples), pull

    def length_of_v(self, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """v = q n: the unit vectors n (E, 3), q and its derivative by the distance (E, 1)."""
        rs, rc, p = self.radii()
        center, neighbor = batch.type[batch.edges.i], batch.edges.type[batch.edges.j]
        scale = (self.used[center, neighbor] / self.dstd[center, 1])[:, None]
        with torch.enable_grad():
            d = torch.linalg.vector_norm(r.detach(), dim=1, keepdim=True).requires_grad_()
            q = switch(d, rs, rc) * d / (d + p) ** 2 * scale
            (dq,) = torch.autograd.grad(q.sum(), d)
        return r / d.detach(), q.detach(), dq

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        c, nt, out = self.config, self.ntypes, self.common_tree("se_e3", type_map)
        out.pop("spin")  # unknown to DeePMD-kit's reader of this one
        names = ("neuron", "resnet_dt", "activation_function", "precision")
        settings = {"bias": True, **{name: out[name] for name in names}}
        stored = collection(self.nets, "embedding_network", 2, nt, settings, [c.trainable] * len(c.neuron))
        nets = dict(zip(self.pairs, stored["networks"], strict=True))
        # place a + nt·b for every pair; those with b < a are not used
        stored["networks"] = [nets[a, b] if a <= b else unused(nets[b, a]) for b in range(nt) for a in range(nt)]
        return out | {
            "embeddings": stored,
            "@variables": {"davg": slots(self.davg, c.slots), "dstd": slots(self.dstd, c.slots)},
        }

    def load_tree(self, tree: dict[str, Any], source: str) -> None:
        stored = tree["embeddings"]["networks"]
        copy_nets(self.nets, [stored[a + self.ntypes * b] for a, b in self.pairs], f"{source}: embedding net")
        mean, std = tree["@variables"]["davg"], tree["@variables"]["dstd"]
        load_slots(self.davg, self.dstd, (mean, std), self.config.slots, source)


def pairs_of_edges(edges: Edges) -> tuple[Tensor, Tensor]:
    """All ordered pairs (j, k) of edges with the same centre, also j = k."""
    count = edges.first.diff()[edges.i]  # (E,) edges of the centre of each edge
    j = torch.repeat_interleave(torch.arange(len(edges.i), device=count.device), count)
    start = torch.repeat_interleave(count.cumsum(0) - count, count)
    return j, edges.first[edges.i[j]] + torch.arange(len(j), device=count.device) - start


def unused(net: dict[str, Any]) -> dict[str, Any]:
    """The same net with zeros for weights."""
    layers = [
        layer | {"@variables": {k: None if x is None else np.zeros_like(x) for k, x in layer["@variables"].items()}}
        for layer in net["layers"]
    ]
    return net | {"layers": layers}
