"""Everything a run is made of between two steps: step, model, optimizer. Written, read and broadcast whole."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from allforce.config.section import Section
from allforce.distributed.comm import Comm
from allforce.errors import UserError
from allforce.files.checkpoint import AVERAGE, Checkpoint
from allforce.models import Model
from allforce.optim import OPTIMIZERS
from allforce.train.average import Average
from allforce.train.flat import FlatParameters


class State:
    """A model with `step` updates behind it, and its optimizer; `config` is the section of that."""

    def __init__(
        self,
        model: Model,
        config: Section,
        n_sums: int,
        precision: str | None,
        comm: Comm,
        zero_stage: int = 0,
        ema_decay: float | None = None,
    ):
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(
                "model: descriptor and fitting net are both `trainable: false`, so there is nothing to train."
            )
        self.step, self.model = 0, model
        share = zero_stage > 0 and comm.size > 1
        self.flat = FlatParameters(model, n_sums, precision, comm.buffer, share)
        self.optimizer = OPTIMIZERS[config.type](self.flat, config, comm if share else None)  # type: ignore[attr-defined]
        self.average = Average(self.flat, ema_decay) if ema_decay is not None else None
        self._saved: dict[str, Tensor] = {}  # the optimizer's state in the checkpoint that is continued
        self._saved_average: dict[str, Tensor] = {}  # and its averaged weights

    def update(self, rate: float, max_norm: float | None = None) -> None:
        """One step of the optimizer with the gradients that lie in the flat buffer."""
        if max_norm:
            self.flat.clip(max_norm)
        self.optimizer.step(rate)
        self.step += 1
        if self.average is not None:
            self.average.update(self.step)

    def averaged(self, changing: bool = False) -> AbstractContextManager[None]:
        """The model as it is validated and frozen: with averaged weights if they are asked for."""
        return self.average.in_use(changing) if self.average is not None else nullcontext()

    def checkpoint(self, meta: dict[str, Any]) -> Checkpoint:
        """All of it, on every worker; all of them call this together."""
        tensors = {f"model/{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"optimizer/{k}": v for k, v in self.optimizer.tensors().items()}
        if self.average is not None:
            tensors |= {f"{AVERAGE}/{k}": v for k, v in self.average.tensors().items()}
        return Checkpoint(tensors, {**self._numbers(), "model": model_section(self.model), **meta})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue where the checkpoint was written; `broadcast` then gives the optimizer its state."""
        load_weights(self.model, checkpoint.part("model"), str(checkpoint.path))
        self._saved = checkpoint.part("optimizer")
        self._saved_average = checkpoint.part(AVERAGE)
        self._set_numbers(checkpoint.meta)

    @torch.no_grad()
    def broadcast(self, comm: Comm) -> None:
        """Rank 0's state to all: one collective for all tensors (float64 holds float32 exactly), one for numbers."""
        self._set_numbers(comm.gather(self._numbers())[0])
        state = self.optimizer.tensors()
        self._check_kinds(state)
        state |= {k: v for k, v in self._saved.items() if k in state}  # what was not trainable then starts with zero
        self._saved = {}
        if self.average is not None:
            self.average.restart(self._saved_average)
        if comm.size > 1:
            averages = self.average.values if self.average is not None else []
            tensors: list[Tensor] = [*self.model.state_dict().values(), *averages, *state.values()]
            flat = torch.cat([t.detach().reshape(-1).double() for t in tensors])
            comm.broadcast(flat)
            for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
        self.optimizer.load(state)

    def _check_kinds(self, state: dict[str, Tensor]) -> None:
        new, old = ({name.split("/")[0] for name in tensors} for tensors in (state, self._saved))
        if old and new != old:
            raise UserError(
                f"--restart: the checkpoint has the state of another optimizer ({', '.join(sorted(old))}), "
                f"optimizer/type asks for {', '.join(sorted(new))}. A restart continues with the same optimizer: use "
                "the one it was trained with, or begin a new run with its weights: --init-model."
            )

    def _numbers(self) -> dict[str, Any]:
        return {"step": self.step, **self.optimizer.numbers(), "model_numbers": self.model.numbers()}

    def _set_numbers(self, numbers: dict[str, Any]) -> None:
        self.step = int(numbers["step"])
        self.model.set_numbers(numbers["model_numbers"])
        self.optimizer.set_numbers(numbers)


def model_section(model: Model) -> dict[str, Any]:
    """The model's section of the input, complete enough to build it again."""
    return model.config.plain()


def load_weights(model: Model, weights: dict[str, Tensor], source: str) -> None:
    """Parameters and statistics by name; what does not fit is a UserError that names the first difference."""
    own = model.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        if name not in own or name not in weights or own[name].shape != weights[name].shape:
            has, wants = (tuple(t[name].shape) if name in t else "nothing" for t in (weights, own))
            raise UserError(
                f"{source}: this model does not fit the input's model section: {name} is {has} there, {wants} here. "
                "Use the descriptor, fitting_net and type_map with which it was trained."
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
