"""The fitting `dos`: densities of states on a grid of energies (net_fitting.py).

d_i = net_τ(…) + bias_τ      d = Σ_i d_i      numb_dos numbers each
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from allforce.config.keys import PRECISION_HELP, Int, Precision
from allforce.config.section import key
from allforce.data.batch import Batch
from allforce.data.sample import Sample
from allforce.errors import UserError
from allforce.models.net_fitting import NetConfig, NetFitting
from allforce.models.serial import copy_array, to_numpy


class DosConfig(NetConfig):
    """Net from descriptor to the density of states of an atom."""

    type: Literal["dos"] = key("dos", 'What is fitted: "dos", the density of states.')
    numb_dos: Int = key(300, "Numbers of a density of states (dos.npy, atom_dos.npy).", ge=1)
    precision: Precision = key("float64", PRECISION_HELP)
    trainable: bool = key(True, "Whether the net is trained.", free=True)
    rcond: float | None = key(
        None, "Singular values below this fraction of the largest are dropped when the bias is fitted.", ge=0, free=True
    )


class DosFitting(NetFitting):
    """The density of states of every atom, and of the frame."""

    Config = DosConfig
    outputs = ("dos", "atomic dos")

    bias: Tensor  # (nt, numb_dos)
    keep: Tensor  # (nt,) 0 for types of model/atom_exclude_types

    def __init__(self, config: DosConfig, ntypes: int, dim: int, dim_vectors: int = 0, mixed_types: bool = False):
        super().__init__(config, ntypes, dim, dim_vectors, mixed_types)
        self.out_width = config.numb_dos
        self.register_buffer("bias", torch.zeros(ntypes, config.numb_dos, dtype=torch.float64))
        self.register_buffer("keep", torch.ones(ntypes, dtype=torch.float64), persistent=False)

    @property
    def net_width(self) -> int:
        return self.config.numb_dos

    def exclude(self, types: list[int]) -> None:
        self.keep[types] = 0.0

    def predict(self, D: Tensor, vectors: Tensor | None, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
        d = (self.values(*self.inputs(D, batch)).double() + self.bias[batch.type]) * self.keep[batch.type][:, None]
        return {"dos": d.new_zeros(batch.nframes, d.shape[1]).index_add(0, batch.frame, d), "atomic dos": d}

    # ---- from the data

    def fit_statistics(self, sample: Sample, section: Any) -> list[str]:
        lines = super().fit_statistics(sample, section)
        self.bias.copy_(torch.from_numpy(sample.file.once("bias_atom_dos", lambda: self.mean_of_types(sample))))
        return lines

    def mean_of_types(self, sample: Sample) -> np.ndarray:
        """(nt, numb_dos) by least squares over frames; means over atoms of a type where atoms are labelled."""
        nt, width, keep = self.ntypes, self.config.numb_dos, to_numpy(self.keep)
        frames, atomic = [], np.zeros((nt, 1 + width))  # count, sum
        for frame in sample.frames():
            real = frame.type >= 0
            for label in {"dos", "atom_dos"} & frame.labels.keys():
                if frame.labels[label].shape[-1] != width:
                    raise UserError(
                        f"{frame.name}: {label}.npy has {frame.labels[label].shape[-1]} numbers, but "
                        f"model/fitting_net/numb_dos is {width}. Set numb_dos to that of the data."
                    )
            if "atom_dos" in frame.labels:
                values = frame.labels["atom_dos"][real]
                np.add.at(atomic, frame.type[real], np.hstack([np.ones((len(values), 1)), values]))
            if "dos" in frame.labels:
                counts = np.bincount(frame.type[real], minlength=nt) * keep
                frames.append(np.concatenate([counts, frame.labels["dos"].ravel()]))
        table = sample.rows(frames, nt + width)
        fit = np.linalg.lstsq(table[:, :nt], table[:, nt:], rcond=self.config.rcond)[0] if len(table) else 0.0
        count, total = np.split(sample.sum(atomic), [1], axis=1)
        return np.where(count > 0, total / np.maximum(count, 1), fit) * keep[:, None]

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        out = super().to_tree(type_map)
        out["@variables"]["bias_atom_e"] = to_numpy(self.bias)
        return out | {"var_name": "dos", "dim_out": self.config.numb_dos, "rcond": self.config.rcond, "atom_ener": None}

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        section = super().section_from_tree(tree, source)
        return section | {"numb_dos": tree["dim_out"], "trainable": bool(np.all(tree.get("trainable", True)))}

    def load_variables(self, stored: dict[str, Any], out_bias: Any, source: str) -> None:
        """bias = bias_atom_e + out_bias, what DeePMD-kit keeps in two places."""
        super().load_variables(stored, out_bias, source)
        shape = (self.ntypes, self.config.numb_dos)
        parts = [np.reshape(x, shape) for x in (stored.get("bias_atom_e"), out_bias) if x is not None]
        copy_array(self.bias, sum(parts, np.zeros(shape)), f"{source}: bias")
