"""The fitting `polar`: polarizabilities (tensor.py).

α_i = V_iᵀ F_i V_i + shift      F_i = scale_τ diag(net_τ(…)), or, without fit_diag, scale_τ times the symmetric part
shift = scale_τ c_τ I           of a full matrix; c_τ: the mean diagonal element of an atom of that type in the data
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from allforce.config.section import key
from allforce.data.batch import Batch
from allforce.data.sample import Sample
from allforce.models.serial import copy_array, to_numpy
from allforce.models.tensor import TensorConfig, TensorFitting, Types

DIAGONAL = (0, 4, 8)  # of 3 × 3, row-major


class PolarConfig(TensorConfig):
    """Net from descriptor to the polarizability of an atom."""

    type: Literal["polar"] = key("polar", 'What is fitted: "polar", the polarizability.')
    sel_type: Types = key(
        None, "Types whose atoms have a polarizability; all when left out. Others count as zero.", aliases=("pol_type",)
    )
    fit_diag: bool = key(True, "The net gives the diagonal of a matrix; false: all of it.")
    scale: float | list[float] = key(1.0, "Factor of the output; or a list, one for each type (of sel_type).")
    shift_diag: bool = key(True, "Add the mean diagonal element of each type in the data.")

    def scales(self, ntypes: int) -> list[float]:
        if not isinstance(self.scale, list):
            return [self.scale] * ntypes
        if len(self.scale) == ntypes:
            return self.scale
        given = dict(zip(self.selected(ntypes), self.scale, strict=True))
        return [given.get(t, 1.0) for t in range(ntypes)]

    def problems_with_types(self, ntypes: int) -> Iterator[tuple[str, str]]:
        yield from super().problems_with_types(ntypes)
        if isinstance(self.scale, list) and len(self.scale) not in (ntypes, len(self.selected(ntypes))):
            yield "scale", f"{self.scale} has {len(self.scale)} entries; expected {ntypes}, one for each type"


class PolarFitting(TensorFitting):
    """The polarizability of every atom, and of the frame; 3 × 3, row-major."""

    Config = PolarConfig
    name = "polar"
    out_width = 9

    scale: Tensor  # (nt,)
    constant_matrix: Tensor  # (nt,) c

    def __init__(self, config: PolarConfig, ntypes: int, dim: int, dim_vectors: int = 0, mixed_types: bool = False):
        super().__init__(config, ntypes, dim, dim_vectors, mixed_types)
        self.register_buffer("scale", torch.tensor(config.scales(ntypes), dtype=torch.float64))
        self.register_buffer("constant_matrix", torch.zeros(ntypes, dtype=torch.float64))

    @property
    def net_width(self) -> int:
        return self.dim_vectors if self.config.fit_diag else self.dim_vectors**2

    def contract(self, y: Tensor, vectors: Tensor, batch: Batch) -> Tensor:
        scale = self.scale[batch.type]
        y = y * scale[:, None].to(y.dtype)
        if self.config.fit_diag:
            right = y[:, :, None] * vectors
        else:
            F = y.view(len(y), self.dim_vectors, self.dim_vectors)
            right = 0.5 * (F + F.transpose(1, 2)) @ vectors
        out = vectors.transpose(1, 2) @ right  # (N, 3, 3)
        if self.config.shift_diag:
            shift = (scale * self.constant_matrix[batch.type]).to(y.dtype)
            out = out + shift[:, None, None] * torch.eye(3, dtype=y.dtype, device=y.device)
        return out.flatten(1)

    def fit_statistics(self, sample: Sample, section: Any) -> list[str]:
        """c by least squares over frames; means over atoms of a type go before it where atoms are labelled."""
        lines = super().fit_statistics(sample, section)
        if self.config.shift_diag:
            found = sample.file.once("bias_atom_polarizability", lambda: self.mean_diagonal(sample)[:, None])
            self.constant_matrix.copy_(torch.from_numpy(found[:, 0]))
        return lines

    def mean_diagonal(self, sample: Sample) -> np.ndarray:
        nt, keep = self.ntypes, to_numpy(self.keep)
        frames, atomic = [], np.zeros((2, nt))
        for frame in sample.frames():
            real = frame.type >= 0
            if "atom_polarizability" in frame.labels:
                value = frame.labels["atom_polarizability"][real][:, DIAGONAL].mean(1)
                atomic += [np.bincount(frame.type[real], w, minlength=nt) for w in (np.ones_like(value), value)]
            if "polarizability" in frame.labels:
                counts = np.bincount(frame.type[real], minlength=nt) * keep
                frames.append(np.append(counts, frame.labels["polarizability"].ravel()[list(DIAGONAL)].mean()))
        table = sample.rows(frames, nt + 1)
        fit = np.linalg.lstsq(table[:, :nt], table[:, nt], rcond=None)[0] if len(table) else np.zeros(nt)
        count, total = sample.sum(atomic)
        return np.where(count > 0, total / np.maximum(count, 1), fit) * keep

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        out = super().to_tree(type_map)
        out["@variables"] |= {"scale": to_numpy(self.scale)[:, None], "constant_matrix": to_numpy(self.constant_matrix)}
        return out | {"@version": 5, "fit_diag": self.config.fit_diag, "shift_diag": self.config.shift_diag}

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        scale = np.ravel(tree["@variables"].get("scale", 1.0)).tolist()
        return super().section_from_tree(tree, source) | {"scale": scale if len(scale) > 1 else scale[0]}

    def load_variables(self, stored: dict[str, Any], out_bias: Any, source: str) -> None:
        """c = constant_matrix + mean diagonal of out_bias, what DeePMD-kit keeps in two places."""
        super().load_variables(stored, out_bias, source)
        if stored.get("scale") is not None:
            copy_array(self.scale, stored["scale"], f"{source}: scale")
        total = np.zeros(self.ntypes)
        if stored.get("constant_matrix") is not None:
            total += np.reshape(stored["constant_matrix"], self.ntypes)
        if out_bias is not None:
            total += np.reshape(out_bias, (self.ntypes, 9))[:, DIAGONAL].mean(1)
        copy_array(self.constant_matrix, total, f"{source}: constant_matrix")
