"""The two-body embedding descriptor se_e2_a.

    R̂_e = (R_e − davg)/dstd  of the centre type,    G_e = net_{τ_j}(R̂_e0)   (or net_{τ_i τ_j})
    T_i = (1/nnei) Σ_e R̂_e ⊗ G_e  over all nnei = Σ sel slots, an empty slot counting as R = 0        4 × M1
    D_i = T_iᵀ T_i[:, :M2]                                                                          M1 × M2

G is a curve of one scalar, so it is trained on a table (table.py, moments.py); `exact` evaluates the net for every
neighbour. `forward` is the equation; `with_pull` is the same with derivatives written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from allforce.config.keys import (
    ACTIVATION_HELP,
    PRECISION_HELP,
    SEED_HELP,
    Activation,
    Int,
    Pair,
    Positive,
    Precision,
    Seed,
    Sel,
    known_types,
    per_type,
)
from allforce.config.section import Section, key
from allforce.data.batch import Batch
from allforce.data.prepare import Limit
from allforce.data.sample import Sample
from allforce.models.descriptor import Descriptor, Pull, by_autograd
from allforce.models.edges import Gram, GramPull
from allforce.models.env_stat import environment_statistics, load_slots, slots, types_with_atoms
from allforce.models.envmat import environment
from allforce.models.layers import DTYPES, NOT_SMOOTH, Net, generator
from allforce.models.moments import Geometry, TablePull, TableSum
from allforce.models.sel import complete_sel
from allforce.models.serial import collection, copy_nets, nets_from_pt, precision_of, refuse, tensor_of, to_numpy
from allforce.models.spline import Grid
from allforce.models.table import SplineTable, TableConfig
from allforce.neighbors import visible_pairs

Curve = Callable[[Tensor], Tensor]  # x (P, 1) -> G (P, M1)
NEAREST = 0.7  # Å, the table's near end when the data's smallest distance is not known


class SeE2AConfig(Section):
    """Deep Potential, smooth edition: full relative coordinates, embedding of two atoms."""

    type_aliases = ("se_a",)
    type_required = True

    type: Literal["se_e2_a"] = key("se_e2_a", 'Kind of descriptor (required): "se_e2_a".')
    sel: Sel = key(
        "auto",
        'Largest number of neighbours kept of each type, one integer per type; or "auto:f": the largest '
        'number in the training data times f ("auto" is "auto:1.1").',
    )
    rcut: float = key(6.0, "Cutoff radius in Å.", gt=0)
    rcut_smth: float = key(0.5, "Where the smooth switching of 1/r begins, in Å; smaller than rcut.", ge=0)
    neuron: list[Positive] = key(
        [10, 20, 40],
        "Widths of the embedding net. A layer as wide as, or twice as wide as, the one before gets a skip connection.",
        min_length=1,
    )
    axis_neuron: Int = key(
        4,
        "Columns of the embedding matrix used for the second factor; at most the last of neuron.",
        ge=1,
        aliases=("n_axis_neuron",),
    )
    activation_function: Activation = key("tanh", ACTIVATION_HELP)
    resnet_dt: bool = key(False, "A trained step width in the skip connections.")
    type_one_side: bool = key(
        False, "true: one embedding net per type of neighbour; false: one per pair (centre, neighbour)."
    )
    precision: Precision = key("default", PRECISION_HELP)
    trainable: bool = key(True, "Whether the embedding nets are trained.", free=True)
    seed: Seed = key(None, SEED_HELP, free=True)
    exclude_types: list[Pair] = key([], "Pairs of types that do not see each other, for example [[0, 1]].")
    env_protection: float = key(0.0, "Added to distances in denominators, against division by zero.", ge=0)
    set_davg_zero: bool = key(
        False, "Use zero for the mean of the environment matrix. Set it together with atom_ener.", free=True
    )

    def problems_with_types(self, ntypes: int) -> Iterator[tuple[str, str]]:
        yield from per_type("sel", self.sel, ntypes)
        yield from known_types("exclude_types", self.exclude_types, ntypes)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.rcut_smth >= self.rcut:
            yield "rcut_smth", f"{self.rcut_smth} must be smaller than rcut, {self.rcut}"
        if self.axis_neuron > self.neuron[-1]:
            yield "axis_neuron", f"{self.axis_neuron} must not exceed the last of neuron, {self.neuron[-1]}"
        if isinstance(self.sel, list) and sum(self.sel) == 0:
            yield "sel", f'{self.sel} keeps no neighbour at all; give the number of neighbours per type, or "auto"'
        if isinstance(self.sel, str) and ":" in self.sel and float(self.sel.split(":")[1]) < 1:
            yield "sel", f'the factor of "{self.sel}" must be at least 1'


class EmbeddingNets(nn.ModuleList):
    """One net for each neighbour type, or for each pair: place of (centre, neighbour) is centre + ntypes·neighbour."""

    def __init__(self, config: SeE2AConfig, count: int, dtype: torch.dtype):
        act, dt = config.activation_function, config.resnet_dt
        super().__init__(Net(1, config.neuron, act, dt, dtype, generator(config.seed, 0, n)) for n in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """(P, nets, M1) from x (P, 1)."""
        return torch.stack([net(x) for net in self], dim=1)


class SeE2A(Descriptor):
    """D (N, M1·M2) of a batch."""

    Config = SeE2AConfig

    davg: Tensor  # (nt, 4) only component 0 is not zero
    dstd: Tensor  # (nt, 4) radial, and three times the angular
    sel: Tensor  # (nt,)
    used: Tensor  # (nt, nt)

    def __init__(self, config: SeE2AConfig, ntypes: int):
        super().__init__(config, ntypes)
        assert isinstance(config.sel, list), "sel is a list once the neighbours have been counted"
        self.nnei = float(sum(config.sel))
        self.dtype = DTYPES[config.precision]
        self.M1, self.M2 = config.neuron[-1], config.axis_neuron
        self.dim, self.dim_vectors = self.M1 * self.M2, self.M1
        self.one_side = config.type_one_side
        self.nets = EmbeddingNets(config, ntypes if self.one_side else ntypes**2, self.dtype)
        self.requires_grad_(config.trainable)
        self.register_buffer("davg", torch.zeros(ntypes, 4, dtype=torch.float64))
        self.register_buffer("dstd", torch.ones(ntypes, 4, dtype=torch.float64))
        self.register_buffer("sel", torch.tensor(config.sel, dtype=torch.float64), persistent=False)
        used = torch.from_numpy(visible_pairs(ntypes, config.exclude_types))
        self.register_buffer("used", used, persistent=False)
        self.table = SplineTable(self.dtype)
        self.nodes: int | None = None  # of the table of the run that is continued, 0: it had gone over to exact
        self.r_close = 0.0  # closer neighbours are beyond the table

    # ---- from the data, before and while training

    @property
    def limit(self) -> Limit:
        return Limit(self.config.rcut, list(self.config.sel), "model/descriptor/sel")

    @classmethod
    def complete(cls, config: SeE2AConfig, count: Any, before: Any = None) -> tuple[SeE2AConfig, list[str]]:
        return complete_sel(config, count, before, mixed=False)

    def fit_statistics(self, sample: Sample) -> None:
        davg, dstd = environment_statistics(sample, self.config, self.config.sel)
        self.davg.copy_(torch.from_numpy(davg))
        self.dstd.copy_(torch.from_numpy(dstd))

    def observed(self) -> list[bool]:
        return types_with_atoms(self.dstd)

    def prepare(self, table: TableConfig, nearest: float | None) -> None:
        """Lay the grid from s = 0 to the s of the nearest neighbours; call again when davg or dstd change."""
        self.table.tolerance = table.tolerance or self.table.default_tolerance
        smooth = self.config.activation_function.lower().partition(":")[0] not in NOT_SMOOTH
        if table.mode == "exact" or not smooth or self.nodes == 0:
            self.table.lay(None)
            return
        self.r_close = 0.95 * (nearest or NEAREST)
        s = environment(torch.tensor([[self.r_close, 0.0, 0.0]], dtype=torch.float64), *self.radii())[0, 0]
        davg, dstd = self.davg[:, 0].cpu(), self.dstd[:, 0].cpu()
        lo, hi = float((-davg / dstd).min()), float(((s - davg) / dstd).max())
        self.table.lay(Grid(lo, hi, self.nodes or table.nodes))

    def refresh(self) -> str | None:
        return self.table.refresh(self.nets)

    def numbers(self) -> dict[str, Any]:
        return {"table_nodes": self.table.K if self.table.laid else self.nodes}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        self.nodes = numbers.get("table_nodes")

    def radii(self) -> tuple[float, float, float]:
        return self.config.rcut_smth, self.config.rcut, self.config.env_protection

    # ---- the equation

    def forward(self, batch: Batch, r: Tensor) -> Tensor:
        return self.contract(self.embedding(batch, r))

    def contract(self, T: Tensor) -> Tensor:
        return (T.transpose(1, 2) @ T[:, :, : self.M2]).flatten(1)

    def with_vectors(self, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors are the columns of T without its first row."""
        T = self.embedding(batch, r) if self.table.grid is None else self.embed_table(batch, r)[0]
        return self.contract(T), T[:, 1:].transpose(1, 2)

    def embedding(self, batch: Batch, r: Tensor) -> Tensor:
        """T (N, 4, M1)."""
        if self.table.grid is None:
            T = self.sum_of_edges(batch, r, self.nets) + self.sum_of_empty_slots(batch, self.nets)
        else:
            splines = self.splines()
            close = torch.linalg.vector_norm(r.detach(), dim=1) < self.r_close  # beyond the table
            T = self.sum_of_edges(batch, r, splines, ~close) + self.sum_of_empty_slots(batch, splines)
            if batch.edges.nearest < self.r_close:
                T = T + self.sum_of_edges(batch, r, self.nets, close)
        return T / self.nnei

    def splines(self) -> list[Curve]:
        C = self.table.coefficients(self.nets)  # (K, nets, M1)
        return [lambda x, n=n: self.table.interpolate(C[:, n], x[:, 0]) for n in range(len(self.nets))]  # type: ignore[misc]

    def sum_of_edges(self, batch: Batch, r: Tensor, curves: Iterable[Curve], subset: Tensor | None = None) -> Tensor:
        """Σ_e R̂_e ⊗ G_e (N, 4, M1), of all edges or of a subset (E,)."""
        i, j = batch.edges.i, batch.edges.j
        if subset is not None:
            i, j, r = i[subset], j[subset], r[subset]
        center, neighbor = batch.type[i], batch.type[j]
        R = environment(r, *self.radii())
        R = ((R - self.davg[center]) / self.dstd[center] * self.used[center, neighbor][:, None]).to(self.dtype)
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
            0, i * nt + batch.type[batch.edges.j], torch.ones_like(i, dtype=torch.float64)
        )
        empty = (self.sel - count.view(N, nt)).clamp(min=0.0).to(self.dtype)  # (N, nt)
        p = (-self.davg / self.dstd).to(self.dtype)  # (nt, 4)
        G = torch.stack([curve(p[:, :1]) for curve in curves])  # (nets, centre, M1)
        if self.one_side:
            G = G.transpose(0, 1)  # (centre, neighbour, M1)
        else:  # of (neighbour, centre, ·) each at its own centre
            G = torch.stack([G.view(nt, nt, nt, -1)[:, c, c] for c in range(nt)])
        return p[batch.type][:, :, None] * (empty[:, :, None] * G[batch.type]).sum(1)[:, None, :]

    # ---- the same, with derivatives written by hand

    def with_pull(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        exact = self.table.grid is None
        T, pull_T = by_autograd(lambda x: self.embedding(batch, x), r) if exact else self.embed_table(batch, r)
        D = Gram.apply(T, self.M2)  # (N, M1, M2)
        return D.flatten(1), lambda gD: pull_T(GramPull.apply(gD.view_as(D), T))

    def alone(self, batch: Batch) -> Tensor:
        return self.with_pull(batch, batch.edges.r)[0]

    def embed_table(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        """T (N, 4, M1), and the map from ∂E/∂T to ∂E/∂r_e."""
        grid = self.table.grid
        assert grid is not None
        center = torch.stack([self.davg[:, 0], 1.0 / self.dstd[:, 0], 1.0 / self.dstd[:, 1]], 1)
        geometry = Geometry(
            r, batch.edges, batch.type, batch.type_counts, center, self.used, self.sel, *self.radii(), self.r_close,
            grid, self.dtype,
        )  # fmt: skip
        C = self.table.coefficients(self.nets).transpose(0, 1) / self.nnei  # (nets, K, M1)
        if not self.one_side:  # centre before neighbour
            C = C.view(self.ntypes, self.ntypes, grid.K, self.M1).transpose(0, 1)
        C = C.reshape(-1, self.ntypes * grid.K, self.M1)
        T = TableSum.apply(C, geometry)
        if batch.edges.nearest >= self.r_close:
            return T, lambda gT: TablePull.apply(gT, C, geometry)
        close = torch.linalg.vector_norm(r, dim=1) < self.r_close
        T_close, pull_close = by_autograd(lambda x: self.sum_of_edges(batch, x, self.nets, close) / self.nnei, r)
        return T + T_close, lambda gT: TablePull.apply(gT, C, geometry) + pull_close(gT)

    # ---- in files

    def caveats(self) -> list[str]:
        if not self.config.exclude_types or not self.davg.any():
            return []
        return [
            "exclude_types with a mean of the environment that is not zero: as .pb (TensorFlow) the model gives other "
            "energies, since empty places of excluded types count as zero there. With set_davg_zero they are equal"
        ]

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        c = self.config
        sel, count = [int(n) for n in c.sel], int(self.nnei)
        shared = {"activation_function": c.activation_function.lower(), "precision": precision_of(self.nets)}
        settings = {"neuron": list(c.neuron), "resnet_dt": c.resnet_dt, "bias": True, **shared}
        flags = [c.trainable] * len(c.neuron)
        return {
            "@class": "Descriptor",
            "type": "se_e2_a",
            "@version": 2,
            "rcut": float(c.rcut),
            "rcut_smth": float(c.rcut_smth),
            "sel": sel,
            "neuron": list(c.neuron),
            "axis_neuron": c.axis_neuron,
            "resnet_dt": c.resnet_dt,
            "trainable": c.trainable,
            "type_one_side": c.type_one_side,
            "exclude_types": [list(pair) for pair in c.exclude_types],
            "env_protection": c.env_protection,
            "set_davg_zero": c.set_davg_zero,
            **shared,
            "embeddings": collection(
                self.nets, "embedding_network", 1 if c.type_one_side else 2, self.ntypes, settings, flags
            ),
            "env_mat": {
                "rcut": float(c.rcut),
                "rcut_smth": float(c.rcut_smth),
                "protection": c.env_protection,
                "use_exp_switch": False,
            },
            "@variables": {"davg": slots(self.davg, count), "dstd": slots(self.dstd, count)},
            "type_map": type_map,
            "spin": None,
        }

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        refuse(tree, {"spin": None}, source)
        refuse(tree.get("env_mat") or {}, {"use_exp_switch": False}, source)
        return super().section_from_tree(tree, source)

    def load_tree(self, tree: dict[str, Any], source: str) -> None:
        copy_nets(self.nets, tree["embeddings"]["networks"], f"{source}: embedding net")
        stored = tree["@variables"]["davg"], tree["@variables"]["dstd"]
        load_slots(self.davg, self.dstd, stored, int(self.nnei), source)

    def load_pt(self, state: dict[str, Tensor], prefix: str, source: str) -> None:
        copy_nets(self.nets, nets_from_pt(state, f"{prefix}.sea.filter_layers", source), f"{source}: embedding net")
        stored = tuple(to_numpy(tensor_of(state, f"{prefix}.sea.{name}", source)) for name in ("mean", "stddev"))
        load_slots(self.davg, self.dstd, stored, int(self.nnei), source)  # type: ignore[arg-type]
