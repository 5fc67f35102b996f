"""What fittings of tensors have in common: an atomic tensor from nets and the descriptor's vectors, and their sum.

X_i = contract(net_τ(…), V_i)      V_i (M1, 3) rotate with the atoms       X = Σ_i X_i over atoms of selected types
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from allforce.config.keys import NonNegative, known_types
from allforce.config.section import key
from allforce.data.batch import Batch
from allforce.errors import UserError
from allforce.models.net_fitting import NetConfig, NetFitting

Types = NonNegative | list[NonNegative] | None


class TensorConfig(NetConfig):
    """Keys of every fitting of tensors."""

    sel_type: Types = key(None, "Types whose atoms have the quantity; all when left out. Others count as zero.")

    def selected(self, ntypes: int) -> list[int]:
        if self.sel_type is None:
            return list(range(ntypes))
        return [self.sel_type] if isinstance(self.sel_type, int) else sorted(self.sel_type)

    def problems_with_types(self, ntypes: int) -> Iterator[tuple[str, str]]:
        yield from known_types("sel_type", self.selected(ntypes), ntypes)


class TensorFitting(NetFitting):
    """Derive from it and write `name`, `out_width`, `net_width` and `contract`."""

    vectors = True
    name: str  # of the output

    keep: Tensor  # (nt,) 1 for types whose atoms have the quantity

    def __init__(self, config: Any, ntypes: int, dim: int, dim_vectors: int = 0, mixed_types: bool = False):
        if not dim_vectors:
            raise UserError(
                f"model/fitting_net/type: {config.type!r} needs a descriptor with directions, as se_e2_a and se_atten "
                "have them; that of model/descriptor knows distances and angles only."
            )
        self.dim_vectors = dim_vectors
        super().__init__(config, ntypes, dim, dim_vectors, mixed_types)
        self.outputs = (self.name, f"atomic {self.name}", "atomic selection")
        keep = torch.zeros(ntypes, dtype=torch.float64)
        keep[config.selected(ntypes)] = 1.0
        self.register_buffer("keep", keep, persistent=False)

    def exclude(self, types: list[int]) -> None:
        self.keep[types] = 0.0

    def contract(self, y: Tensor, vectors: Tensor, batch: Batch) -> Tensor:
        """X (N, out_width) from y (N, net_width) and vectors (N, M1, 3)."""
        raise NotImplementedError

    def predict(self, D: Tensor, vectors: Tensor | None, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
        assert vectors is not None
        y = self.values(*self.inputs(D, batch))
        selected = self.keep[batch.type]
        X = self.contract(y, vectors.to(y.dtype), batch).double() * selected[:, None]
        total = X.new_zeros(batch.nframes, X.shape[1]).index_add(0, batch.frame, X)
        return {self.name: total, f"atomic {self.name}": X, "atomic selection": selected}

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        excluded = [t for t in range(self.ntypes) if t not in self.config.selected(self.ntypes)]
        out = super().to_tree(type_map)
        return out | {"var_name": self.name, "embedding_width": self.dim_vectors, "exclude_types": excluded}

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        excluded = tree.get("exclude_types") or []
        section = super().section_from_tree(tree, source)
        return section | {"sel_type": [t for t in range(tree["ntypes"]) if t not in excluded] if excluded else None}
