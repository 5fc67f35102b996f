"""What the rest of the program knows of a model, which owns everything about itself: one file, one entry in MODELS."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from allforce.config.section import Section
from allforce.data.batch import Batch
from allforce.data.prepare import Needs
from allforce.data.sample import Sample
from allforce.errors import UserError
from allforce.models.serial import arrays_of, fill_arrays
from allforce.models.table import TableConfig

# (rcut, mixed) -> the smallest distance in the data (None without a pair), and the most neighbours of each type, or,
# with mixed, of all types together
CountNeighbors = Callable[[float, bool], tuple[float | None, np.ndarray]]

# outputs with a row for each atom, not for each frame
PER_ATOM = frozenset({"forces", "charges", "descriptor"})


def per_atom(name: str) -> bool:
    return name in PER_ATOM or name.startswith("atomic ")


class Sweep(Protocol):
    """A batch on its way through a model and back."""

    outputs: dict[str, Tensor]  # without gradients

    def adjoints(self, of_outputs: dict[str, Tensor], targets: list[Tensor]) -> None:
        """Write the gradient of each parameter of the model, all of them trained, in their order, given those of
        outputs by name."""


class Model(nn.Module):
    """Base of all models. `config` is complete: types known, nothing left to the data."""

    Config: ClassVar[type[Section]]  # the section `model` of the input
    outputs: tuple[str, ...]  # names of what it can predict: "energy", "forces", "virial", "dipole", …

    dim_descriptor: int = 0  # width of the output "descriptor", where it has one

    def __init__(self, config: Any):
        super().__init__()
        assert config.type_map is not None, "the types are known once the data are open"
        self.config, self.type_map = config, list(config.type_map)
        self.min_nbor_dist: float | None = None  # Å, the smallest distance in the training data, where it is known
        self.observed: list[str] | None = None  # types that had atoms in the training data, where they are known

    @classmethod
    def complete(cls, config: Any, count: CountNeighbors | None, before: Any = None) -> tuple[Any, list[str]]:
        """The section with what was left to the data ("auto") filled in, and warnings.

        count looks at the data, None when that was switched off; before: the section of the model that a run begins
        with, whose values go before counting.
        """
        return config, []

    @classmethod
    def is_complete(cls, config: Any) -> bool:
        """Whether the section leaves nothing to the data, so that neighbours need not be counted."""
        return True

    @property
    def needs(self) -> Needs:
        """What it needs to see of a frame."""
        raise NotImplementedError

    @property
    def label_units(self) -> dict[str, float]:
        """Units of the data in ours (eV, Å, e·Å), by label, where they differ."""
        return {}

    @property
    def precision(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def parts(self) -> dict[str, nn.Module]:
        """Its parts by the names that `dp show` gives them."""
        return {}

    # ---- from the data

    def fit_statistics(self, sample: Sample) -> list[str]:
        """Take mean values, biases, … from the data, before training; lines for the log."""
        return []

    def change_bias(self, sample: Sample, mode: str = "change") -> list[str]:
        """Fit the constant of each type anew, to what the model misses ("change") or to the labels ("set")."""
        raise UserError(f"A model of type {self.config.type!r} has no energy bias to change.")

    def refit(self, sample: Sample) -> list[str]:
        """After training: fit whatever is linear in its parameters to what the model misses; here the bias alone."""
        return self.change_bias(sample)

    def set_bias(self, values: np.ndarray) -> None:
        raise UserError(f"A model of type {self.config.type!r} has no energy bias to set.")

    def observed_types(self) -> list[str]:
        """Types that had atoms in the training data: as recorded, else as far as the model can tell."""
        return list(self.type_map) if self.observed is None else self.observed

    # ---- before and while training

    def prepare(self, table: TableConfig) -> None:
        """Called when weights and statistics are in place, before anything is evaluated."""

    def fit_input(self, sample: Sample) -> None:
        """Called after `prepare` when a run begins from scratch: weights may be changed by what the data give."""

    def refresh(self) -> str | None:
        """Called now and then while training, with equal weights on all workers; says what was changed."""
        return None

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the tensors of state_dict: plain JSON."""
        return {"min_nbor_dist": self.min_nbor_dist, "observed_types": self.observed}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        """Before `prepare`."""
        self.min_nbor_dist, self.observed = numbers.get("min_nbor_dist"), numbers.get("observed_types")

    # ---- the equation

    def forward(self, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
        """What is wanted, by name, in float64, frames and atoms in the batch's order; nothing else is computed.

        In grad mode the result can be differentiated with respect to the parameters.
        """
        raise NotImplementedError

    def sweep(self, batch: Batch, wanted: Collection[str]) -> Sweep | None:
        """What is wanted, with a way back to the gradients of all trained parameters that was written by hand; None
        where there is none for this model, device or batch, and `forward` is to be differentiated."""
        return None

    # ---- in files

    def to_tree(self) -> dict[str, Any]:
        """The entry `model` of a model file. Where DeePMD-kit has the model: as DeePMD-kit writes it."""
        return {
            "@class": "Model",
            "type": self.config.type,
            "@version": 1,
            "type_map": list(self.type_map),
            "config": self.config.plain(),
            "@variables": arrays_of(self),
        }

    def caveats(self) -> list[str]:
        """What DeePMD-kit, or one of its backends, makes otherwise of its tree; told when a model is frozen."""
        return []

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], script: dict[str, Any], source: str) -> dict[str, Any]:
        """The section `model` that describes the tree. script: the one that the file carries beside it, if any."""
        return tree["config"] | {"type_map": tree["type_map"]}

    def load_tree(self, tree: dict[str, Any], backend: str | None, source: str) -> None:
        """Weights and statistics of the tree; source names the file in messages, backend is who wrote it."""
        fill_arrays(self, tree["@variables"], source)

    @classmethod
    def section_from_pt(cls, params: dict[str, Any], source: str) -> dict[str, Any]:
        """The section `model` of a checkpoint of DeePMD-kit's PyTorch backend, as it is known here."""
        raise UserError(f"{source}: a model of type '{params.get('type')}' cannot be read from a .pt file.")

    def load_pt(self, state: dict[str, Tensor], source: str) -> None:
        """Weights and statistics of such a checkpoint, tensors by their path below the model."""
        raise NotImplementedError
