"""What a descriptor is: a differentiable function of the edge vectors. One file each, one entry in DESCRIPTORS."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from allforce.config.section import Section
from allforce.data.batch import Batch
from allforce.data.prepare import Limit
from allforce.data.sample import Sample
from allforce.errors import UserError
from allforce.models.pull import Pull, by_autograd
from allforce.models.serial import fill_arrays, part_tree
from allforce.models.table import TableConfig


class Descriptor(nn.Module):
    """D_i of every atom from the vectors r_e of its edges."""

    Config: ClassVar[type[Section]]  # the section `model/descriptor` of the input
    dim: int  # width of D
    dim_vectors: int = 0  # number of vectors that `with_vectors` gives for each atom; 0: it has none
    mixed_types: bool = False  # one fitting net for all types, the type being part of D

    def __init__(self, config: Any, ntypes: int):
        super().__init__()
        self.config, self.ntypes = config, ntypes

    # ---- the equation

    def forward(self, batch: Batch, r: Tensor) -> Tensor:
        """D (N, dim) of the edge vectors r (E, 3), twice differentiable by r. Use r, not batch.edges.r."""
        raise NotImplementedError

    def with_vectors(self, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor]:
        """D (N, dim) and vectors (N, dim_vectors, 3) that rotate with the atoms, for fittings of tensors."""
        raise UserError(f"The descriptor {self.config.type!r} has no vectors, which this fitting needs.")

    def with_pull(self, batch: Batch, r: Tensor) -> tuple[Tensor, Pull]:
        """D, and the map that pulls ∂E/∂D back to ∂E/∂r_e; both differentiable by the parameters in grad mode.

        Here by automatic differentiation. A faster one, written by hand, may take its place.
        """
        return by_autograd(lambda x: self(batch, x), r)

    def alone(self, batch: Batch) -> Tensor:
        """D of the batch where no derivative by r is asked for: a place for a shorter way."""
        return self(batch, batch.edges.r)

    # ---- from the data, before and while training

    @property
    def limit(self) -> Limit:
        """Which neighbours it sees."""
        raise NotImplementedError

    @classmethod
    def complete(cls, config: Any, count: Any, before: Any = None) -> tuple[Any, list[str]]:
        """See Model.complete."""
        return config, []

    @classmethod
    def is_complete(cls, config: Any) -> bool:
        """See Model.is_complete."""
        return True

    def fit_statistics(self, sample: Sample) -> None:
        """Mean and deviation of its input."""

    def prepare(self, table: TableConfig, nearest: float | None) -> None:
        """See Model.prepare; nearest: the smallest distance in the training data, where it is known."""

    def refresh(self) -> str | None:
        return None

    def numbers(self) -> dict[str, Any]:
        return {}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        pass

    def observed(self) -> list[bool]:
        """Which types had atoms in the training data, as its statistics tell where no file says it."""
        return [True] * self.ntypes

    # ---- in files

    def caveats(self) -> list[str]:
        """What DeePMD-kit, or one of its backends, makes otherwise of its tree."""
        return []

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        return part_tree("Descriptor", self, type_map)

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        """The keys of the input that are in the tree; what the tree has besides and cannot be met is refused."""
        return {k: v for k, v in tree.items() if k in cls.Config.model_fields}

    def load_tree(self, tree: dict[str, Any], source: str) -> None:
        fill_arrays(self, tree["@variables"], source)

    @classmethod
    def section_from_pt(cls, params: dict[str, Any], source: str) -> dict[str, Any]:
        """The same from the section of DeePMD-kit's PyTorch backend."""
        fields = cls.Config.model_fields
        return {k: v for k, v in params.items() if k in fields} | {"type": fields["type"].default}

    def load_pt(self, state: dict[str, Tensor], prefix: str, source: str) -> None:
        """Tensors of DeePMD-kit's PyTorch backend whose names begin with prefix."""
        raise UserError(f"{source}: the descriptor {self.config.type!r} cannot be read from a .pt file.")
