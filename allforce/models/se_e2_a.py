"""The two-body embedding descriptor se_e2_a.

    R̂_e = (R_e − davg)/dstd  of the centre type,    G_e = net_{τ_j}(R̂_e0)   (or net_{τ_i τ_j})
    T_i = (1/nnei) Σ_e R̂_e ⊗ G_e  over all nnei = Σ sel slots, an empty slot counting as R = 0        4 × M1
    D_i = T_iᵀ T_i[:, :M2]                                                                          M1 × M2

G is a curve of one scalar, so it is trained on a table (two_body.py, table.py, moments.py); `exact` evaluates the net
for every neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from allforce.config.keys import Sel, per_type
from allforce.config.section import key
from allforce.data.batch import Batch
from allforce.models.env_stat import load_slots, slots
from allforce.models.layers import CurveNets, Net, generator
from allforce.models.moments import Geometry, TablePull, TableSum
from allforce.models.pull import Pull
from allforce.models.serial import collection, copy_nets
from allforce.models.two_body import SEL_HELP, Curve, Moments, MomentsConfig


class SeE2AConfig(MomentsConfig):
    """Deep Potential, smooth edition: full relative coordinates, embedding of two atoms."""

    type_aliases = ("se_a",)

    type: Literal["se_e2_a"] = key("se_e2_a", 'Kind of descriptor (required): "se_e2_a".')
    sel: Sel = key("auto", SEL_HELP)
    type_one_side: bool = key(
        False, "true: one embedding net per type of neighbour; false: one per pair (centre, neighbour)."
    )

    def problems_with_types(self, ntypes: int) -> Iterator[tuple[str, str]]:
        yield from per_type("sel", self.sel, ntypes)
        yield from super().problems_with_types(ntypes)


class EmbeddingNets(CurveNets):
    """One net for each neighbour type, or for each pair: place of (centre, neighbour) is centre + ntypes·neighbour."""

    def __init__(self, config: Any, count: int, dtype: torch.dtype):
        act, dt = config.activation_function, config.resnet_dt
        super().__init__(Net(1, config.neuron, act, dt, dtype, generator(config.seed, 0, n)) for n in range(count))


class SeE2A(Moments):
    """D (N, M1·M2) of a batch."""

    Config = SeE2AConfig
    pt_part = ".sea"
    nodes_are_cheap = True
    nets: EmbeddingNets

    sel: Tensor  # (nt,)

    def __init__(self, config: SeE2AConfig, ntypes: int):
        super().__init__(config, ntypes)
        self.M1, self.M2 = config.neuron[-1], config.axis_neuron
        self.dim, self.dim_vectors = self.M1 * self.M2, self.M1
        self.one_side = config.type_one_side
        self.nets = EmbeddingNets(config, ntypes if self.one_side else ntypes**2, self.dtype)
        self.requires_grad_(config.trainable)
        self.register_buffer("sel", torch.tensor(config.sel, dtype=torch.float64), persistent=False)

    # ---- the equation

    def embedding(self, batch: Batch, r: Tensor) -> Tensor:
        if self.table.grid is None:
            T = self.sum_of_edges(batch, r, self.nets) + self.sum_of_empty_slots(batch, self.nets)
        else:
            splines = self.splines()
            close = self.beyond(r.detach())
            T = self.sum_of_edges(batch, r, splines, ~close) + self.sum_of_empty_slots(batch, splines)
            if batch.edges.nearest < self.r_close:
                T = T + self.sum_of_edges(batch, r, self.nets, close)
        return T / self.nnei

    def embedding_of(self, batch: Batch, r: Tensor, subset: Tensor) -> Tensor:
        return self.sum_of_edges(batch, r, self.nets, subset) / self.nnei

    def sum_of_edges(self, batch: Batch, r: Tensor, curves: Iterable[Curve], subset: Tensor | None = None) -> Tensor:
        """Σ_e R̂_e ⊗ G_e (N, 4, M1), of all edges or of a subset (E,)."""
        i, j = batch.edges.i, batch.edges.j
        if subset is not None:
            i, j, r = i[subset], j[subset], r[subset]
        center, neighbor = batch.type[i], batch.edges.type[j]
        R = self.rows(batch, r, i, j)
        T = torch.zeros(len(batch.type) * 4, self.M1, dtype=self.dtype, device=r.device)
        net = neighbor if self.one_side else neighbor * self.ntypes + center  # (E,)
        counts = torch.bincount(net, minlength=len(self.nets)).tolist()  # the one place where a device is waited for
        for curve, e in zip(curves, net.argsort(stable=True).split(counts), strict=True):
            product = R[e][:, :, None] * curve(R[e][:, :1])[:, None, :]  # (edges of the net, 4, M1)
            T = T.index_add(0, (i[e][:, None] * 4 + torch.arange(4, device=r.device)).flatten(), product.flatten(0, 1))
        return T.view(-1, 4, self.M1)

    def sum_of_empty_slots(self, batch: Batch, curves: Iterable[Curve]) -> Tensor:
        """Σ_t (sel_t − n_it) p ⊗ net_t(p_0), p = −davg/dstd of the centre: what the padding of `sel` adds."""
        N, nt, i = len(batch.type), self.ntypes, batch.edges.i
        count = torch.zeros(N * nt, dtype=torch.float64, device=i.device).index_add_(
            0, i * nt + batch.edges.type[batch.edges.j], torch.ones_like(i, dtype=torch.float64)
        )
        empty = (self.sel - count.view(N, nt)).clamp(min=0.0).to(self.dtype)  # (N, nt)
        p = (-self.davg / self.dstd).to(self.dtype)  # (nt, 4)
        G = torch.stack([curve(p[:, :1]) for curve in curves])  # (nets, centre, M1)
        if self.one_side:
            G = G.transpose(0, 1)  # (centre, neighbour, M1)
        else:  # of (neighbour, centre, ·) each at its own centre
            G = torch.stack([G.view(nt, nt, nt, -1)[:, c, c] for c in range(nt)])
        return p[batch.type][:, :, None] * (empty[:, :, None] * G[batch.type]).sum(1)[:, None, :]

    # ---- the same on the table, with derivatives written by hand

    def embed_table(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        geometry = self.geometry_of(batch, r)
        C = self.table.coefficients(self.nets, self.by_center)
        return TableSum.apply(C, geometry), lambda gT: TablePull.apply(gT, C, geometry)

    def geometry_of(self, batch: Batch, r: Tensor) -> Geometry:
        return self.geometry(batch, r, batch.type_counts, self.sel)

    def by_center(self, C: Tensor) -> Tensor:
        """C / nnei as one table for all centres, or one for each type: (tables, nt·K, M1) from (K, nets, M1)."""
        K, C = len(C), C.transpose(0, 1) / self.nnei
        if not self.one_side:  # centre before neighbour
            C = C.view(self.ntypes, self.ntypes, K, self.M1).transpose(0, 1)
        return C.reshape(-1, self.ntypes * K, self.M1)

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        c, out = self.config, self.common_tree("se_e2_a", type_map)
        names = ("neuron", "resnet_dt", "activation_function", "precision")
        settings = {"bias": True, **{name: out[name] for name in names}}
        ndim, flags = 1 if c.type_one_side else 2, [c.trainable] * len(c.neuron)
        return out | {
            "axis_neuron": c.axis_neuron,
            "type_one_side": c.type_one_side,
            "embeddings": collection(self.nets, "embedding_network", ndim, self.ntypes, settings, flags),
            "@variables": {"davg": slots(self.davg, c.slots), "dstd": slots(self.dstd, c.slots)},
        }

    def load_tree(self, tree: dict[str, Any], source: str) -> None:
        copy_nets(self.nets, tree["embeddings"]["networks"], f"{source}: embedding net")
        stored = tree["@variables"]["davg"], tree["@variables"]["dstd"]
        load_slots(self.davg, self.dstd, stored, int(self.nnei), source)
