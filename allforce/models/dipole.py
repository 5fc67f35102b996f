"""The fitting `dipole` (tensor.py).

μ_i = Σ_m net_τ(…)_m V_im      μ = Σ_i μ_i
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from allforce.config.section import key
from allforce.data.batch import Batch
from allforce.models.tensor import TensorConfig, TensorFitting, Types


class DipoleConfig(TensorConfig):
    """Net from descriptor to the dipole of an atom."""

    type: Literal["dipole"] = key("dipole", 'What is fitted: "dipole".')
    sel_type: Types = key(
        None, "Types whose atoms have a dipole; all when left out. Others count as zero.", aliases=("dipole_type",)
    )


class DipoleFitting(TensorFitting):
    """The dipole of every atom, and of the frame."""

    Config = DipoleConfig
    name = "dipole"
    out_width = 3

    @property
    def net_width(self) -> int:
        return self.dim_vectors

    def contract(self, y: Tensor, vectors: Tensor, batch: Batch) -> Tensor:
        return (y[:, None, :] @ vectors)[:, 0]

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        return super().to_tree(type_map) | {"r_differentiable": True, "c_differentiable": True}
