"""What training needs of an optimizer."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from allforce.config.section import Section
from allforce.distributed.comm import Comm

TYPE_HELP = 'Kind of optimizer: "Adam", "AdamW", "HybridMuon" or "KerasAdam".'


class Parameters(Protocol):
    """The trainable parameters of a model as flat tensors, one for each dtype (`train/flat.py`)."""

    flat: list[Tensor]
    gradient: Tensor  # of all, in one buffer
    gradient_views: dict[str, Tensor]  # where the gradient of each parameter lies, by its name

    def gradients(self) -> list[Tensor]: ...  # of each flat tensor
    def split(self, per_flat: list[Tensor]) -> dict[str, Tensor]: ...  # views of tensors like `flat`, by parameter name


class Optimizer:
    """Changes parameters in place. Its state between two steps is `tensors` and `numbers`, and nothing else."""

    Config: type[Section]  # its section of the input
    shards = False  # whether workers can share it out: training/zero_stage 1

    def __init__(self, parameters: Parameters, config: Any, comm: Comm | None = None):
        """`comm`: the workers that share the optimizer out, None when each has all of it."""
        raise NotImplementedError

    def step(self, rate: float) -> None:
        """One update with the gradients that lie in their buffer."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by name, `<what>/<parameter>`. All workers call it together."""
        raise NotImplementedError

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from such a state."""
        raise NotImplementedError

    def numbers(self) -> dict[str, Any]:
        """The rest of the state, JSON values."""
        raise NotImplementedError

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        raise NotImplementedError
