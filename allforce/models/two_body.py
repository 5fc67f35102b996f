"""What descriptors of the environment matrix have in common: its statistics, `sel`, and the table of their nets.

    R̂_e = (R_e − davg)/dstd  of the centre type,  x_e = R̂_e0;  an empty slot of `sel` counts as R = 0

Those whose embedding is a curve of x for each pair of types are trained on a table (table.py, moments.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from allforce.config.keys import (
    ACTIVATION_HELP,
    PRECISION_HELP,
    SEED_HELP,
    Activation,
    Int,
    Pair,
    Precision,
    Seed,
    Widths,
    known_types,
)
from allforce.config.section import Section, key
from allforce.data.batch import Batch
from allforce.data.prepare import Limit
from allforce.data.sample import Sample
from allforce.models.descriptor import Descriptor
from allforce.models.edges import Gram, GramPull
from allforce.models.env_stat import environment_statistics, types_with_atoms
from allforce.models.envmat import environment
from allforce.models.layers import DTYPES, NOT_SMOOTH
from allforce.models.moments import Geometry, Row
from allforce.models.pull import Pull, by_autograd
from allforce.models.sel import complete_sel
from allforce.models.serial import nets_from_pt, refuse, tensor_of, to_numpy
from allforce.models.spline import Grid
from allforce.models.table import SplineTable, TableConfig
from allforce.neighbors import visible_pairs

Curve = Callable[[Tensor], Tensor]  # x (P, 1) -> G (P, M)
SEL_HELP = (
    'Largest number of neighbours kept of each type, one integer per type; or "auto:f": the largest '
    'number in the training data times f ("auto" is "auto:1.1").'
)
NEAREST = 0.7  # Å, the table's near end when the data's smallest distance is not known


class TwoBodyConfig(Section):
    """Keys of every descriptor of the environment matrix."""

    type_required = True

    type: str = key(..., "Kind of descriptor.")
    sel: Any = key("auto", "Slots for neighbours.")
    rcut: float = key(6.0, "Cutoff radius in Å.", gt=0)
    rcut_smth: float = key(0.5, "Where the smooth switching of 1/r begins, in Å; smaller than rcut.", ge=0)
    neuron: Widths = key(
        [10, 20, 40],
        "Widths of the embedding net. A layer as wide as, or twice as wide as, the one before gets a skip connection.",
        min_length=1,
    )
    activation_function: Activation = key("tanh", ACTIVATION_HELP)
    resnet_dt: bool = key(False, "A trained step width in the skip connections.")
    precision: Precision = key("default", PRECISION_HELP)
    trainable: bool = key(True, "Whether the embedding nets are trained.", free=True)
    seed: Seed = key(None, SEED_HELP, free=True)
    exclude_types: list[Pair] = key([], "Pairs of types that do not see each other, for example [[0, 1]].")
    env_protection: float = key(0.0, "Added to distances in denominators, against division by zero.", ge=0)
    set_davg_zero: bool = key(
        False, "Use zero for the mean of the environment matrix. Set it together with atom_ener.", free=True
    )

    @property
    def slots(self) -> int:
        """nnei, once the neighbours have been counted."""
        return int(self.sel) if isinstance(self.sel, int) else sum(self.sel)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.rcut_smth >= self.rcut:
            yield "rcut_smth", f"{self.rcut_smth} must be smaller than rcut, {self.rcut}"
        if isinstance(self.sel, list | int) and self.slots == 0:
            yield "sel", f'{self.sel} keeps no neighbour at all; give the number of neighbours, or "auto"'
        if isinstance(self.sel, str) and ":" in self.sel and float(self.sel.split(":")[1]) < 1:
            yield "sel", f'the factor of "{self.sel}" must be at least 1'

    def problems_with_types(self, ntypes: int) -> Iterator[tuple[str, str]]:
        yield from known_types("exclude_types", self.exclude_types, ntypes)


class MomentsConfig(TwoBodyConfig):
    """Keys of those whose descriptor is the product of two matrices, see Moments."""

    axis_neuron: Int = key(
        4,
        "Columns of the embedding matrix used for the second factor; at most the last of neuron.",
        ge=1,
        aliases=("n_axis_neuron",),
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.axis_neuron > self.neuron[-1]:
            yield "axis_neuron", f"{self.axis_neuron} must not exceed the last of neuron, {self.neuron[-1]}"


class TwoBody(Descriptor):
    """A descriptor of the environment matrix."""

    stat_kind: ClassVar[str] = "se_a"  # DeePMD-kit's short name, in files of statistics
    mixed_sel: ClassVar[bool] = False  # slots are for neighbours of any type
    pt_part: ClassVar[str] = ""  # where DeePMD-kit's PyTorch backend keeps nets and statistics, below the descriptor
    nets: nn.Module

    davg: Tensor  # (nt, 4) only component 0 is not zero
    dstd: Tensor  # (nt, 4) radial, and three times the angular
    center: Tensor  # (nt, 3) davg, 1/dstd radial, 1/dstd angular, for the table
    used: Tensor  # (nt, nt)

    def __init__(self, config: Any, ntypes: int):
        super().__init__(config, ntypes)
        assert not isinstance(config.sel, str), "sel is a number once the neighbours have been counted"
        self.nnei = float(config.slots)
        self.dtype = DTYPES[config.precision]
        self.register_buffer("davg", torch.zeros(ntypes, 4, dtype=torch.float64))
        self.register_buffer("dstd", torch.ones(ntypes, 4, dtype=torch.float64))
        self.register_buffer("center", torch.zeros(ntypes, 3, dtype=torch.float64), persistent=False)
        used = torch.from_numpy(visible_pairs(ntypes, config.exclude_types))
        self.register_buffer("used", used, persistent=False)
        self.table = SplineTable(self.dtype)
        self.nodes: int | None = None  # of the table of the run that is continued, 0: it had gone over to exact
        self.r_close = 0.0  # closer neighbours are beyond the table

    # ---- from the data, before and while training

    @property
    def limit(self) -> Limit:
        most = self.config.slots if self.mixed_sel else list(self.config.sel)
        return Limit(self.config.rcut, most, "model/descriptor/sel")

    @classmethod
    def complete(cls, config: Any, count: Any, before: Any = None) -> tuple[Any, list[str]]:
        return complete_sel(config, count, before, cls.mixed_sel)

    @classmethod
    def is_complete(cls, config: Any) -> bool:
        return not isinstance(config.sel, str)

    def fit_statistics(self, sample: Sample) -> None:
        davg, dstd = environment_statistics(sample, self.config, self.config.sel, self.stat_kind)
        self.davg.copy_(torch.from_numpy(davg))
        self.dstd.copy_(torch.from_numpy(dstd))

    def observed(self) -> list[bool]:
        return types_with_atoms(self.dstd)

    def prepare(self, table: TableConfig, nearest: float | None) -> None:
        """Lay the grid over the range of x; call again when davg or dstd change."""
        self.table.tolerance = table.tolerance or self.table.default_tolerance
        self.table.most = (table if self.nodes_are_cheap else TableConfig).most
        smooth = self.config.activation_function.lower().partition(":")[0] not in NOT_SMOOTH
        if table.mode == "exact" or not smooth or self.nodes == 0 or not self.has_curves:
            self.table.set_grid(None)
            return
        self.center = torch.stack([self.davg[:, 0], 1.0 / self.dstd[:, 0], 1.0 / self.dstd[:, 1]], 1)
        self.r_close = (table.reach if self.far_is_cheap else TableConfig.reach) * (nearest or NEAREST)
        s = environment(torch.tensor([[self.r_close, 0.0, 0.0]], dtype=torch.float64), *self.radii())[0, 0]
        self.table.set_grid(Grid(*self.range_of_curves(float(s)), self.nodes or table.nodes))

    has_curves: bool = True  # whether the embedding is a curve of one scalar
    far_is_cheap: ClassVar[bool] = False  # whether a table costs little where there are no neighbours
    nodes_are_cheap: ClassVar[bool] = False  # whether one that is not trained costs little with many nodes

    def range_of_curves(self, s: float) -> tuple[float, float]:
        """From the x of s(rcut) = 0 to that of the nearest neighbours."""
        davg, dstd = self.davg[:, 0].cpu(), self.dstd[:, 0].cpu()
        return float((-davg / dstd).min()), float(((s - davg) / dstd).max())

    def refresh(self) -> str | None:
        return self.table.refresh(self.nets)

    def numbers(self) -> dict[str, Any]:
        return {"table_nodes": self.table.K if self.table.decided else self.nodes} if self.has_curves else {}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        self.nodes = numbers.get("table_nodes")

    # ---- the equation

    def radii(self) -> tuple[float, float, float]:
        return self.config.rcut_smth, self.config.rcut, self.config.env_protection

    def rows(self, batch: Batch, r: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """R̂ (E, 4) of the edges r (E, 3) from i to j, 0 for excluded pairs of types."""
        center, neighbor = batch.type[i], batch.edges.type[j]
        R = environment(r, *self.radii())
        return ((R - self.davg[center]) / self.dstd[center] * self.used[center, neighbor][:, None]).to(self.dtype)

    def beyond(self, r: Tensor) -> Tensor:
        """(E,) bool: edges that are shorter than the table reaches."""
        return torch.linalg.vector_norm(r, dim=1) < self.r_close

    def splines(self) -> list[Curve]:
        """The nets as they are on the table."""
        C = self.table.coefficients(self.nets)  # (K, nets, M)
        return [lambda x, n=n: self.table.interpolate(C[:, n], x[:, 0]) for n in range(C.shape[1])]  # type: ignore[misc]

    def geometry(
        self, batch: Batch, r: Tensor, counts: tuple[int, ...], sel: Tensor, row: Row = "R", group: Tensor | None = None
    ) -> Geometry:
        """For moments.py. counts: atoms of each centre type that has a table of its own."""
        assert self.table.grid is not None
        return Geometry(
            r, batch.edges, batch.type, counts, self.center, self.used, sel, *self.radii(), self.r_close,
            self.table.grid, self.dtype, row, group,  # type: ignore[arg-type]
        )  # fmt: skip

    # ---- in files

    def caveats(self) -> list[str]:
        if not self.config.exclude_types or not self.davg.any():
            return []
        return [
            "exclude_types with a mean of the environment that is not zero: as .pb (TensorFlow) the model gives other "
            "energies, since empty places of excluded types count as zero there. With set_davg_zero they are equal"
        ]

    def common_tree(self, kind: str, type_map: list[str]) -> dict[str, Any]:
        """What the trees of all of them have."""
        c = self.config
        return {
            "@class": "Descriptor",
            "type": kind,
            "@version": 2,
            "rcut": float(c.rcut),
            "rcut_smth": float(c.rcut_smth),
            "sel": [c.slots] if self.mixed_sel else [int(n) for n in c.sel],
            "neuron": list(c.neuron),
            "resnet_dt": c.resnet_dt,
            "trainable": c.trainable,
            "exclude_types": [list(pair) for pair in c.exclude_types],
            "env_protection": c.env_protection,
            "set_davg_zero": c.set_davg_zero,
            "activation_function": c.activation_function.lower(),
            "precision": str(self.dtype).removeprefix("torch."),
            "env_mat": {
                "rcut": float(c.rcut),
                "rcut_smth": float(c.rcut_smth),
                "protection": c.env_protection,
                "use_exp_switch": False,
            },
            "type_map": type_map,
            "spin": None,
        }

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        refuse(tree, {"spin": None}, source)
        refuse(tree.get("env_mat") or {}, {"use_exp_switch": False}, source)
        return super().section_from_tree(tree, source)

    def load_pt(self, state: dict[str, Tensor], prefix: str, source: str) -> None:
        self.load_tree(self.tree_from_pt(state, prefix, source), source)

    def tree_from_pt(self, state: dict[str, Tensor], prefix: str, source: str) -> dict[str, Any]:
        """What `load_tree` takes, from the tensors of a .pt checkpoint."""
        part = f"{prefix}{self.pt_part}"
        statistics = {"davg": f"{part}.mean", "dstd": f"{part}.stddev"}
        return {
            "embeddings": {"networks": nets_from_pt(state, f"{part}.filter_layers", source)},
            "@variables": {name: to_numpy(tensor_of(state, key, source)) for name, key in statistics.items()},
        }


class Moments(TwoBody):
    """D = TᵀT[:, :M2] of a T (N, 4, M1) that `embedding` gives, or `embed_table` with its derivative."""

    M1: int
    M2: int
    far_is_cheap = True

    def embedding(self, batch: Batch, r: Tensor) -> Tensor:
        """T (N, 4, M1) of the equation, by the nets or their splines for every edge."""
        raise NotImplementedError

    def embedding_of(self, batch: Batch, r: Tensor, subset: Tensor) -> Tensor:
        """What a subset (E,) of the edges adds to T, by the nets."""
        raise NotImplementedError

    def embed_table(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        """T of the edges on the table and of empty slots, and the map from ∂E/∂T to ∂E/∂r_e."""
        raise NotImplementedError

    def embed(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        """T, and the map from ∂E/∂T to ∂E/∂r_e."""
        if not self.on_table(batch):
            return by_autograd(lambda x: self.embedding(batch, x), r)
        T, pull = self.embed_table(batch, r)
        if batch.edges.nearest >= self.r_close:
            return T, pull
        close = self.beyond(r)
        T_close, pull_close = by_autograd(lambda x: self.embedding_of(batch, x, close), r)
        return T + T_close, lambda gT: pull(gT) + pull_close(gT)

    def on_table(self, batch: Batch) -> bool:
        return self.table.grid is not None

    def of_types(self, batch: Batch) -> list[Tensor]:
        """Further columns of D that depend on the type alone, each (N, ·)."""
        return []

    def forward(self, batch: Batch, r: Tensor) -> Tensor:
        return self.contract(self.embedding(batch, r), batch)

    def alone(self, batch: Batch) -> Tensor:
        return self.contract(self.embed(batch, batch.edges.r)[0], batch)

    def contract(self, T: Tensor, batch: Batch) -> Tensor:
        D = (T.transpose(1, 2) @ T[:, :, : self.M2]).flatten(1)
        columns = self.of_types(batch)
        return torch.cat([D, *columns], 1) if columns else D

    def with_vectors(self, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors are the columns of T without its first row."""
        T, _ = self.embed(batch, r)
        return self.contract(T, batch), T[:, 1:].transpose(1, 2)

    def with_pull(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        T, pull_T = self.embed(batch, r)
        D = Gram.apply(T, self.M2, *self.of_types(batch))
        return D, lambda gD: pull_T(GramPull.apply(gD, T, self.M2))


def sum_over_edges(i: Tensor, R: Tensor, G: Tensor, natoms: int) -> Tensor:
    """Σ_e R_e ⊗ G_e (N, 4, M1) of edges with centres i."""
    T = torch.zeros(natoms, 4, G.shape[1], dtype=G.dtype, device=G.device)
    return T.index_add(0, i, R[:, :, None] * G[:, None, :])
