"""The fitting `property`: any quantity of a frame that does not change when the frame is turned (net_fitting.py).

y_i = σ_τ net_τ(…) + bias_τ      Y = Σ_i y_i, or with `intensive` the mean of y_i      task_dim numbers each
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from allforce.config.keys import MOST_WEIGHTS, Width
from allforce.config.section import Words, key
from allforce.data.batch import LABELS, NO_LABELS, Batch
from allforce.data.sample import Sample
from allforce.errors import UserError
from allforce.models.net_fitting import NetConfig, NetFitting
from allforce.models.serial import copy_array, to_numpy

ROUNDING = 1e-10  # of the largest label; a smaller deviation is none
FileName = Annotated[str, Field(pattern=r"^[\w.+-]+$"), Words("a file's name without .npy")]


class PropertyConfig(NetConfig):
    """Net from descriptor to what an atom adds to a property of the frame."""

    type: Literal["property"] = key("property", 'What is fitted: "property", any quantity of a frame.')
    property_name: FileName = key(..., 'Name of the property, which is also that of its labels: "gap" for gap.npy.')
    task_dim: Width = key(1, "Numbers of the property.")
    intensive: bool = key(False, "The property is the mean over the atoms, not the sum.")
    distinguish_types: bool = key(
        True, "Every type has a constant of its own, by least squares; else all have the mean of the data.", free=True
    )
    trainable: bool | list[bool] = key(
        True,
        "Whether the net is trained; or a list, one for each hidden layer and one for the output layer.",
        free=True,
    )

    def named_labels(self) -> dict[str, tuple[str, int]]:
        return {"property": (self.property_name, self.task_dim)}

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.neuron and (weights := self.neuron[-1] * self.task_dim) > MOST_WEIGHTS:
            yield "task_dim", f"makes a layer of {weights:.1e} weights, at most {MOST_WEIGHTS:.0e} are possible"
        if self.property_name in NO_LABELS:
            yield "property_name", f"{self.property_name}.npy holds no labels; call the property otherwise"
        for name, of_atoms in ((self.property_name, False), (f"atom_{self.property_name}", True)):
            per_atom, usual = LABELS.get(name, (of_atoms, 0))
            if per_atom != of_atoms or usual not in (0, self.task_dim):
                what = f"{usual or 'any'} number(s) of {'an atom' if per_atom else 'a frame'}"
                remedy = f"for {self.task_dim} of {'an atom' if of_atoms else 'a frame'} choose another name"
                yield "property_name", f"{name}.npy has {what} in all data; {remedy}"


class PropertyFitting(NetFitting):
    """The property of a frame, and what each atom adds to it."""

    Config = PropertyConfig
    # beside the property: atoms that it is a sum over (1 when it is a mean), and the deviation of the labels
    outputs = ("property", "atomic property", "property atoms", "property deviation")

    bias: Tensor  # (nt, task_dim)
    std: Tensor  # (nt, task_dim)
    keep: Tensor  # (nt,) 0 for types of model/atom_exclude_types

    def __init__(self, config: PropertyConfig, ntypes: int, dim: int, dim_vectors: int = 0, mixed_types: bool = False):
        super().__init__(config, ntypes, dim, dim_vectors, mixed_types)
        self.out_width = config.task_dim
        self.register_buffer("bias", torch.zeros(ntypes, config.task_dim, dtype=torch.float64))
        self.register_buffer("std", torch.ones(ntypes, config.task_dim, dtype=torch.float64))
        self.register_buffer("keep", torch.ones(ntypes, dtype=torch.float64), persistent=False)

    @property
    def net_width(self) -> int:
        return self.config.task_dim

    def exclude(self, types: list[int]) -> None:
        self.keep[types] = 0.0

    def predict(self, D: Tensor, vectors: Tensor | None, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
        net, kept = self.values(*self.inputs(D, batch)).double(), self.keep[batch.type]
        y = (net * self.std[batch.type] + self.bias[batch.type]) * kept[:, None]
        total = y.new_zeros(batch.nframes, y.shape[1]).index_add(0, batch.frame, y)
        atoms = torch.zeros_like(batch.natoms).index_add(0, batch.frame, kept).clamp(min=1.0)[:, None]  # (B, 1)
        if self.config.intensive:
            total, atoms = total / atoms, torch.ones_like(atoms)
        deviation = self.std[:1].expand(batch.nframes, -1)  # that of the first type, as DeePMD-kit has it
        return {"property": total, "atomic property": y, "property atoms": atoms, "property deviation": deviation}

    # ---- from the data

    def fit_statistics(self, sample: Sample, section: Any) -> list[str]:
        lines, name = super().fit_statistics(sample, section), self.config.property_name
        names = f"bias_atom_{name}", f"std_atom_{name}"
        found = sample.file.get(*names)
        if found is None:
            bias, std, rmse = self.bias_and_deviation(sample)
            sample.file.put(**dict(zip(names, (bias, std), strict=True)))
            per_atom = "" if self.config.intensive else "per atom "
            lines.append(f"RMSE of {name} {per_atom}after linear regression is: {rmse} in the unit of {name}.")
            found = [bias, std]
        for target, value, entry in zip((self.bias, self.std), found, names, strict=True):
            copy_array(target, value, f"training/stat_file: {entry}")
        return lines

    def bias_and_deviation(self, sample: Sample) -> tuple[np.ndarray, np.ndarray, float]:
        """bias and σ (nt, task_dim) of Y (F, task_dim), frames with c_τ atoms of the types, n = Σ c_τ; and √<δ²>.

        distinguish_types   least squares of Y = Σ_τ c_τ bias_τ (intensive: c_τ/n); σ is that of what is left of Y
        else                mean and σ of Y/n (intensive: of Y), for all types alike

        δ is what the constants leave of Y/n (intensive: of Y).
        """
        nt, width, keep = self.ntypes, self.config.task_dim, to_numpy(self.keep)
        frames = [
            np.concatenate([np.bincount(f.type[f.type >= 0], minlength=nt) * keep, f.labels["property"]])
            for f in sample.frames()
            if "property" in f.labels
        ]
        table = sample.rows(frames, nt + width)
        assert len(table), "a run whose data have no labels has ended before"
        counts, values = table[:, :nt], table[:, nt:]
        atoms = np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
        per_frame = 1.0 if self.config.intensive else atoms
        share = counts / atoms if self.config.intensive else counts
        if self.config.distinguish_types:
            bias = np.linalg.lstsq(share, values, rcond=None)[0]
            rest = values - share @ bias
        else:
            rest = values / per_frame
            bias = np.tile(rest.mean(axis=0), (nt, 1))
        std = rest.std(axis=0)
        std = np.where(std > ROUNDING * np.abs(values).max(axis=0), std, 1.0)  # of labels that are all the same
        left = (values - share @ bias) / per_frame
        return bias, np.tile(std, (nt, 1)), float(np.sqrt(np.mean(left**2)))

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        c = self.config
        own = {"var_name": c.property_name, "dim_out": c.task_dim, "task_dim": c.task_dim, "intensive": c.intensive}
        # DeePMD-kit takes the first type's constants for all when this is false
        by_type = c.distinguish_types or any(bool((x != x[:1]).any()) for x in (self.bias, self.std))
        return super().to_tree(type_map) | {"@version": 6, **own, "distinguish_types": by_type, "atom_ener": None}

    def out_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        return to_numpy(self.bias), to_numpy(self.std)

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        section = super().section_from_tree(tree, source)
        own = {"property_name": tree["var_name"], "task_dim": tree["dim_out"]}
        return section | own | {"distinguish_types": tree.get("distinguish_types", False)}  # before version 6: never

    def load_out_std(self, out_std: Any, source: str) -> None:
        if out_std is not None:
            self.std.copy_(self.shared(self.of_types(out_std, "out_std", source)))

    def load_variables(self, stored: dict[str, Any], out_bias: Any, source: str) -> None:
        """bias = σ·bias_atom_e + out_bias: DeePMD-kit adds bias_atom_e to what the net gives."""
        super().load_variables(stored, out_bias, source)
        bias = torch.zeros_like(self.bias)
        if out_bias is not None:
            bias += self.shared(self.of_types(out_bias, "out_bias", source))
        if stored.get("bias_atom_e") is not None:
            bias += self.std * self.of_types(stored["bias_atom_e"], "bias_atom_e", source)
        self.bias.copy_(bias)

    def of_types(self, values: Any, name: str, source: str) -> Tensor:
        """(nt, task_dim) from an array of a file."""
        if np.size(values) != self.bias.numel():
            raise UserError(
                f"{source}: {name} has shape {np.shape(values)}, expected {tuple(self.bias.shape)}, types and task_dim."
            )
        return torch.from_numpy(np.array(values, dtype=np.float64)).reshape(self.bias.shape)

    def shared(self, of_types: Tensor) -> Tensor:
        """Without distinguish_types the constants of the first type are those of all."""
        return of_types if self.config.distinguish_types else of_types[:1].expand_as(of_types)
