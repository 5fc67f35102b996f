"""The radial two-body descriptor se_e2_r.

    D_i = 1/(5 nnei) Σ_e net_{τ_j}(x_e)   (or net_{τ_i τ_j}) over all nnei = Σ sel slots          x_e: see two_body.py

An empty slot counts as R = 0, a neighbour of an excluded pair of types as x = 0. The nets are curves of one scalar and
are trained on a table, as those of se_e2_a.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from allforce.config.keys import Sel, per_type
from allforce.config.section import key
from allforce.data.batch import Batch
from allforce.errors import UserError
from allforce.models.moments import TablePull, TableSum
from allforce.models.pull import Pull, by_autograd
from allforce.models.se_e2_a import EmbeddingNets
from allforce.models.serial import collection, copy_array, copy_nets, to_numpy
from allforce.models.two_body import SEL_HELP, Curve, TwoBody, TwoBodyConfig

RESCALE = 0.2


class SeE2RConfig(TwoBodyConfig):
    """Deep Potential, smooth edition: distances alone, embedding of two atoms."""

    type_aliases = ("se_r",)

    type: Literal["se_e2_r"] = key("se_e2_r", 'Kind of descriptor (required): "se_e2_r".')
    sel: Sel = key("auto", SEL_HELP)
    type_one_side: bool = key(
        False, "true: one embedding net per type of neighbour; false: one per pair (centre, neighbour)."
    )

    def problems_with_types(self, ntypes: int) -> Iterator[tuple[str, str]]:
        yield from super().problems_with_types(ntypes)
        yield from per_type("sel", self.sel, ntypes)


class SeE2R(TwoBody):
    """D (N, M) of a batch."""

    Config = SeE2RConfig
    stat_kind = "se_r"
    nets: EmbeddingNets

    sel: Tensor  # (nt,)

    def __init__(self, config: SeE2RConfig, ntypes: int):
        super().__init__(config, ntypes)
        self.dim, self.one_side = config.neuron[-1], config.type_one_side
        self.nets = EmbeddingNets(config, ntypes if self.one_side else ntypes**2, self.dtype)
        self.requires_grad_(config.trainable)
        self.register_buffer("sel", torch.tensor(config.sel, dtype=torch.float64), persistent=False)

    def range_of_curves(self, s: float) -> tuple[float, float]:
        """With x = 0, where neighbours of excluded types are."""
        lo, hi = super().range_of_curves(s)
        return min(lo, 0.0), max(hi, 0.0)

    # ---- the equation

    def forward(self, batch: Batch, r: Tensor) -> Tensor:
        if self.table.grid is None:
            return self.sum_of_edges(batch, r, self.nets) + self.constant(batch, self.nets)
        close, splines = self.beyond(r.detach()), self.splines()
        D = self.sum_of_edges(batch, r, splines, ~close) + self.constant(batch, splines)
        return D + self.sum_of_edges(batch, r, self.nets, close) if batch.edges.nearest < self.r_close else D

    def sum_of_edges(self, batch: Batch, r: Tensor, curves: Iterable[Curve], subset: Tensor | None = None) -> Tensor:
        """The part of D that depends on r, of all edges or of a subset (E,)."""
        i, j = batch.edges.i, batch.edges.j
        if subset is not None:
            i, j, r = i[subset], j[subset], r[subset]
        center, neighbor = batch.type[i], batch.edges.type[j]
        x = self.rows(batch, r, i, j)[:, :1]
        D = torch.zeros(len(batch.type), self.dim, dtype=self.dtype, device=r.device)
        for n, curve in enumerate(curves):
            c, t = (None, n) if self.one_side else (n % self.ntypes, n // self.ntypes)
            of_net = (neighbor == t) & self.used[center, neighbor] & ((center == c) if c is not None else True)
            e = of_net.nonzero()[:, 0]
            D = D.index_add(0, i[e], curve(x[e]))
        return D * (RESCALE / self.nnei)

    def constant(self, batch: Batch, curves: Iterable[Curve]) -> Tensor:
        """What empty slots and excluded neighbours add: Σ_t (sel_t − n_it) net_t(p_0) and Σ_t n_it net_t(0)."""
        i, neighbor = batch.edges.i, batch.edges.type[batch.edges.j]
        N, nt = len(batch.type), self.ntypes
        count = torch.zeros(N * nt, dtype=torch.float64, device=i.device)
        count = count.index_add_(0, i * nt + neighbor, torch.ones_like(i, dtype=torch.float64)).view(N, nt)
        p = (-self.davg[:, :1] / self.dstd[:, :1]).to(self.dtype)  # (nt, 1)
        empty = self.of_slots((self.sel - count).clamp(min=0.0), p, curves, batch)
        if self.config.exclude_types:
            empty = empty + self.of_slots(count * ~self.used[batch.type], torch.zeros_like(p), curves, batch)
        return empty * (RESCALE / self.nnei)

    def of_slots(self, count: Tensor, x: Tensor, curves: Iterable[Curve], batch: Batch) -> Tensor:
        """Σ_t count_it net_t(x of the centre type i) from count (N, nt), x (nt, 1)."""
        nt, G = self.ntypes, torch.stack([curve(x) for curve in curves], 1)  # (centre, nets, M)
        if not self.one_side:  # the net of (centre, neighbour) at its own centre
            own = torch.arange(nt, device=x.device)
            G = G.view(nt, nt, nt, -1)[own, :, own]  # (centre, neighbour, M)
        count = count.to(self.dtype)
        parts = zip(count.split(batch.type_counts), G, strict=True)
        return torch.cat([rows @ g for rows, g in parts])

    def alone(self, batch: Batch) -> Tensor:
        return self.with_pull(batch, batch.edges.r)[0]

    # ---- the same on the table, with derivatives written by hand

    def with_pull(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        grid, nt = self.table.grid, self.ntypes
        if grid is None:
            return by_autograd(lambda x: self(batch, x), r)
        geometry = self.geometry(batch, r, batch.type_counts, self.sel, "1")
        C = self.table.coefficients(self.nets).transpose(0, 1) * (RESCALE / self.nnei)  # (nets, K, M)
        if not self.one_side:  # centre before neighbour
            C = C.view(nt, nt, grid.K, self.dim).transpose(0, 1)
        C = C.reshape(-1, nt * grid.K, self.dim)
        D = TableSum.apply(C, geometry)[:, 0]
        if batch.edges.nearest >= self.r_close:
            return D, lambda gD: TablePull.apply(gD[:, None], C, geometry)
        close = self.beyond(r)
        D_close, pull_close = by_autograd(lambda x: self.sum_of_edges(batch, x, self.nets, close), r)
        return D + D_close, lambda gD: TablePull.apply(gD[:, None], C, geometry) + pull_close(gD)

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        c, out = self.config, self.common_tree("se_r", type_map)
        names = ("neuron", "resnet_dt", "activation_function", "precision")
        settings = {"bias": True, **{name: out[name] for name in names}}
        ndim, flags = 1 if self.one_side else 2, [c.trainable] * len(c.neuron)
        count = c.slots
        return out | {
            "type_one_side": c.type_one_side,
            "embeddings": collection(self.nets, "embedding_network", ndim, self.ntypes, settings, flags),
            "@variables": {
                name: np.repeat(to_numpy(x)[:, None, :1], count, axis=1)
                for name, x in (("davg", self.davg), ("dstd", self.dstd))
            },
        }

    def load_tree(self, tree: dict[str, Any], source: str) -> None:
        copy_nets(self.nets, tree["embeddings"]["networks"], f"{source}: embedding net")
        shape = (self.ntypes, self.config.slots, 1)
        for name, target in (("davg", self.davg), ("dstd", self.dstd)):
            found = np.asarray(tree["@variables"][name], dtype=np.float64)
            if found.shape != shape or not np.array_equal(found, np.broadcast_to(found[:, :1], shape)):
                raise UserError(
                    f"{source}: {name} has shape {found.shape}; expected {shape}, with equal values in all slots."
                )
            copy_array(target[:, 0], found[:, 0], f"{source}: {name}")
