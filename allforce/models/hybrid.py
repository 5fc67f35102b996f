"""The descriptor `hybrid`: several descriptors side by side.

D_i = [D_i of the first, D_i of the second, …], each with its own cutoff and its own slots for neighbours
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from allforce.config.section import Section, key, one_of
from allforce.data.batch import Batch
from allforce.data.prepare import Limit, Pairs
from allforce.data.sample import Sample
from allforce.models.descriptor import Descriptor
from allforce.models.descriptors import PLAIN
from allforce.models.pull import Pull
from allforce.models.serial import part_named
from allforce.models.table import TableConfig
from allforce.neighbors import limit_neighbors

if TYPE_CHECKING:
    AnyPart = Any
else:
    AnyPart = one_of(PLAIN)
Parts = list[AnyPart]


class HybridConfig(Section):
    """Several descriptors, the results of which are put side by side."""

    type_required = True

    type: Literal["hybrid"] = key("hybrid", 'Kind of descriptor (required): "hybrid".')
    list: Parts = key(..., "The descriptors, each by its type and with its own keys.", min_length=1)

    def problems_with_types(self, ntypes: int) -> Iterator[tuple[str, str]]:
        for n, part in enumerate(self.list):
            for name, what in part.problems_with_types(ntypes):
                yield f"list/{n}/{name}", what


class Hybrid(Descriptor):
    """The parts, and what each of them sees of a batch."""

    Config = HybridConfig

    def __init__(self, config: HybridConfig, ntypes: int):
        super().__init__(config, ntypes)
        self.members: list[Descriptor] = nn.ModuleList(  # type: ignore[assignment]
            PLAIN[part.type](part, ntypes) for part in config.list
        )
        self.dims = [d.dim for d in self.members]
        self.dim, self.dim_vectors = sum(self.dims), sum(d.dim_vectors for d in self.members)
        self.mixed_types = any(d.mixed_types for d in self.members)

    # ---- from the data, before and while training

    @property
    def limit(self) -> Limit:
        return reduce(or_, (d.limit for d in self.members))

    @classmethod
    def complete(cls, config: HybridConfig, count: Any, before: Any = None) -> tuple[HybridConfig, list[str]]:
        parts, warnings = [], []
        old = before.list if before is not None else []
        for n, part in enumerate(config.list):
            same = n < len(old) and old[n].type == part.type
            part, found = PLAIN[part.type].complete(part, count, old[n] if same else None)
            parts.append(part)
            warnings += [f"model/descriptor/list/{n}: {line}" for line in found]
        return config.model_copy(update={"list": parts}), warnings

    @classmethod
    def is_complete(cls, config: HybridConfig) -> bool:
        return all(PLAIN[part.type].is_complete(part) for part in config.list)

    def fit_statistics(self, sample: Sample) -> None:
        for d in self.members:
            d.fit_statistics(SeenBy(sample, d.limit, self.limit))  # type: ignore[arg-type]

    def observed(self) -> list[bool]:
        return [any(flags) for flags in zip(*(d.observed() for d in self.members), strict=True)]

    def prepare(self, table: TableConfig, nearest: float | None) -> None:
        for d in self.members:
            d.prepare(table, nearest)

    def refresh(self) -> str | None:
        lines = [f"{d.config.type}: {line}" for d in self.members if (line := d.refresh()) is not None]
        return "; ".join(lines) or None

    def numbers(self) -> dict[str, Any]:
        return {"hybrid": [d.numbers() for d in self.members]}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        for d, own in zip(self.members, numbers.get("hybrid") or [{}] * len(self.dims), strict=True):
            d.set_numbers(own)

    # ---- the equation

    def seen(self, batch: Batch, r: Tensor) -> Iterator[tuple[Descriptor, Batch, Tensor, Tensor | None]]:
        """Of each part the batch with the edges that it sees, their vectors and their numbers (None: all edges)."""
        for d in self.members:
            if d.limit == self.limit:
                yield d, batch, r, None
                continue
            e = within(batch, r.detach(), d.limit, self.ntypes).nonzero()[:, 0]
            edges = batch.edges
            first = torch.zeros_like(edges.first)
            first[1:] = torch.bincount(edges.i[e], minlength=len(batch.type)).cumsum(0)
            few = replace(edges, i=edges.i[e], j=edges.j[e], r=edges.r[e], first=first)
            yield d, replace(batch, edges=few), r[e], e

    def forward(self, batch: Batch, r: Tensor) -> Tensor:
        return torch.cat([d(few, x) for d, few, x, _ in self.seen(batch, r)], 1)

    def alone(self, batch: Batch) -> Tensor:
        return torch.cat([d.alone(few) for d, few, _, _ in self.seen(batch, batch.edges.r)], 1)

    def with_vectors(self, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor]:
        D, vectors = [], []
        for d, few, x, _ in self.seen(batch, r):
            if d.dim_vectors:
                part, own = d.with_vectors(few, x)
                vectors.append(own)
            else:
                part = d(few, x)
            D.append(part)
        return torch.cat(D, 1), torch.cat(vectors, 1)

    def with_pull(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        parts = [(*d.with_pull(few, x), e) for d, few, x, e in self.seen(batch, r)]

        def pull(gradient: Tensor) -> Tensor:
            total = torch.zeros_like(r)
            for (_, own, e), g in zip(parts, gradient.split(self.dims, 1), strict=True):
                total = total + own(g) if e is None else total.index_add(0, e, own(g))
            return total

        return torch.cat([D for D, _, _ in parts], 1), pull

    # ---- in files

    def caveats(self) -> list[str]:
        return [line for d in self.members for line in d.caveats()]

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        parts = [d.to_tree(type_map) for d in self.members]
        return {"@class": "Descriptor", "type": "hybrid", "@version": 1, "list": parts}

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        parts = []
        for entry in tree["list"]:
            part = part_named("descriptor", entry.get("type"), PLAIN, source)
            kind = part.Config.model_fields["type"].default
            parts.append(part.section_from_tree(entry, source) | {"type": kind})
        return {"list": parts}

    def load_tree(self, tree: dict[str, Any], source: str) -> None:
        for n, (d, entry) in enumerate(zip(self.members, tree["list"], strict=True)):
            d.load_tree(entry, f"{source}: part {n}")

    @classmethod
    def section_from_pt(cls, params: dict[str, Any], source: str) -> dict[str, Any]:
        parts = [part_named("descriptor", entry.get("type"), PLAIN, source) for entry in params["list"]]
        known = [part.section_from_pt(entry, source) for part, entry in zip(parts, params["list"], strict=True)]
        return {"type": "hybrid", "list": known}

    def load_pt(self, state: dict[str, Tensor], prefix: str, source: str) -> None:
        for n, d in enumerate(self.members):
            d.load_pt(state, f"{prefix}.descrpt_list.{n}", source)


def within(batch: Batch, r: Tensor, limit: Limit, ntypes: int) -> Tensor:
    """(E,) bool: edges within a limit, the nearest of each centre (and neighbour type) where there are more."""
    d = torch.linalg.vector_norm(r, dim=1)
    keep = d <= limit.rcut
    if limit.most is None:
        return keep
    i, j = batch.edges.i, batch.edges.j
    most = torch.as_tensor(limit.most, dtype=torch.int64, device=r.device).expand(ntypes)
    group = i if isinstance(limit.most, int) else i * ntypes + batch.edges.type[j]
    order = torch.argsort(d, stable=True)
    order = order[torch.argsort(group[order], stable=True)]  # by group, then by distance
    count = torch.bincount(group, minlength=len(batch.type) * (1 if isinstance(limit.most, int) else ntypes))
    first = count.cumsum(0) - count
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=r.device) - first[group[order]]
    return keep & (rank < most[batch.edges.type[j]])


class SeenBy:
    """A sample whose frames have the neighbours that one part sees."""

    def __init__(self, sample: Sample, limit: Limit, whole: Limit):
        self.sample, self.limit, self.whole = sample, limit, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sample, name)

    def prepared(self) -> Iterator[tuple[Any, Pairs]]:
        for frame, (i, j, r) in self.sample.prepared():
            if self.limit != self.whole:
                keep = np.linalg.norm(r, axis=1) <= self.limit.rcut
                i, j, r = i[keep], j[keep], r[keep]
                if self.limit.most is not None:
                    i, j, r, _ = limit_neighbors(i, j, r, frame.type, self.limit.most)
            yield frame, (i, j, r)
