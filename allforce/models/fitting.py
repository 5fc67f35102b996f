"""What a fitting is: from the descriptor of an atom to what is predicted. One file each, one entry in FITTINGS."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from allforce.config.section import Section
from allforce.data.batch import Batch
from allforce.data.sample import Sample
from allforce.errors import UserError
from allforce.models.potential import OUTPUTS
from allforce.models.pull import by_autograd
from allforce.models.serial import fill_arrays, part_tree


class Fitting(nn.Module):
    """Common to all fittings. A fitting of energies derives from EnergyFitting."""

    Config: ClassVar[type[Section]]  # the section `model/fitting_net` of the input
    outputs: tuple[str, ...]
    out_width: int = 1  # numbers that it predicts for an atom
    vectors: bool = False  # whether `predict` needs the descriptor's vectors
    numb_fparam: int = 0  # frame and atomic parameters that it takes
    numb_aparam: int = 0
    default_fparam: list[float] | None = None

    def __init__(self, config: Any, ntypes: int, dim: int, dim_vectors: int = 0, mixed_types: bool = False):
        """dim: width of the descriptor. mixed_types: the descriptor tells the types apart, one net serves all."""
        super().__init__()
        self.config, self.ntypes, self.dim, self.mixed_types = config, ntypes, dim, mixed_types

    @classmethod
    def complete(cls, config: Any, before: Any) -> Any:
        """The section with what is left to the data as the model has it that a run begins with."""
        return config

    def predict(self, D: Tensor, vectors: Tensor | None, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
        """What is wanted from D (N, dim) and vectors (N, dim_vectors, 3); an energy fitting has no use for it."""
        raise NotImplementedError

    def exclude(self, types: list[int]) -> None:
        """Atoms of these types (model/atom_exclude_types) have none of what `predict` gives."""

    # ---- from the data

    def fit_statistics(self, sample: Sample, section: Any) -> list[str]:
        """section: the whole section `model`. Lines for the log."""
        return []

    def fit_input(self, sample: Sample, describe: Callable[[Batch], Tensor]) -> None:
        """See Model.fit_input; describe: D (N, dim) of a batch."""

    def change_bias(self, counts: np.ndarray, missing: np.ndarray, excluded: list[int], mode: str) -> list[str]:
        """counts (F, nt): atoms of each type in every frame; missing (F,): label − prediction, or the label ("set")."""
        raise UserError(f"A fitting of type {self.config.type!r} has no bias to change.")

    def set_bias(self, values: np.ndarray) -> None:
        raise UserError(f"A fitting of type {self.config.type!r} has no bias to set.")

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        return part_tree("Fitting", self, type_map)

    def out_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """(nt, out_width) each: what is added to the output of the nets, and before that their factor, which
        DeePMD-kit keeps beside the fitting. A fitting that holds its bias itself has 0 and 1 here."""
        return np.zeros((self.ntypes, self.out_width)), np.ones((self.ntypes, self.out_width))

    def load_out_std(self, out_std: Any, source: str) -> None:
        """The factor, before `load_tree` or `load_pt`. Only a property has a use for it."""

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        return {k: v for k, v in tree.items() if k in cls.Config.model_fields}

    def load_tree(self, tree: dict[str, Any], out_bias: Any, source: str) -> None:
        """out_bias: what DeePMD-kit keeps beside the fitting and adds to it."""
        fill_arrays(self, tree["@variables"], source)

    def load_pt(self, state: dict[str, Tensor], prefix: str, out_bias: Any, source: str) -> None:
        raise UserError(f"{source}: a fitting of type {self.config.type!r} cannot be read from a .pt file.")


class EnergyFitting(Fitting):
    """Atomic energies: a differentiable function of the descriptor."""

    outputs: tuple[str, ...] = OUTPUTS

    def forward(self, D: Tensor, batch: Batch) -> Tensor:
        """e (N,) in float64 from D (N, dim), twice differentiable by D."""
        raise NotImplementedError

    def with_gradient(self, D: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """e, and ∂e_i/∂D_i (N, dim); both differentiable by parameters and D in grad mode.

        Here by automatic differentiation. A faster one, written by hand, may take its place.
        """
        e, pull = by_autograd(lambda x: self(x, batch), D)
        return e, pull(torch.ones_like(e))
