"""What training needs of an optimizer."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from allforce.config.section import Section


class Parameters(Protocol):
    """The trainable parameters of a model as flat tensors, one for each dtype (`train/flat.py`)."""

    flat: list[Tensor]

    def split(self, per_flat: list[Tensor]) -> dict[str, Tensor]: ...  # views of tensors like `flat`, by parameter name


class Optimizer:
    """Changes parameters in place. Its state between two steps is `tensors` and `numbers`, and nothing else."""

    Config: type[Section]  # its section of the input

    def __init__(self, parameters: Parameters, config: Any):
        raise NotImplementedError

    def step(self, gradients: list[Tensor], rate: float) -> None:
        """One update with the gradient of each flat tensor."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, `<what>/<parameter>`; the tensors themselves, so that copying into them restores it."""
        raise NotImplementedError

    def numbers(self) -> dict[str, Any]:
        """The rest of the state, JSON values."""
        raise NotImplementedError

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        raise NotImplementedError
