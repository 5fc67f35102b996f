"""The loss `tensor`: how far dipoles or polarizabilities are from their labels.

    L = pref <ΔX²> + pref_atomic <(w_i ΔX_i)²>

X of a frame, X_i of an atom; <·> is the mean over frames, or over the atoms of the types that have the quantity, and
over components. w_i is atom_weight.npy with enable_atomic_weight, else 1. A term is off for a batch without its label.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from typing import Literal

import torch
from torch import Tensor

from allforce.config.section import Section, key
from allforce.data.batch import Batch
from allforce.errors import UserError
from allforce.losses.loss import Loss, Term

LABEL = {"dipole": "dipole", "polar": "polarizability"}  # output of the model -> label of the data


class TensorLossConfig(Section):
    """Errors of a dipole or a polarizability, of frames and of atoms."""

    type: Literal["tensor"] = key("tensor", 'Kind of loss: "tensor".')
    pref: float = key(..., "Weight of the frames' tensors (dipole.npy, polarizability.npy).", ge=0)
    pref_atomic: float = key(..., "Weight of the atoms' tensors (atomic_dipole.npy, atomic_polarizability.npy).", ge=0)
    enable_atomic_weight: bool = key(False, "Multiply the errors of atoms by atom_weight.npy.")

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.pref == 0 and self.pref_atomic == 0:
            yield "pref", "and pref_atomic are 0, so there is nothing to fit"


class TensorLoss(Loss):
    """Of whichever tensor the model predicts."""

    Config = TensorLossConfig

    def __init__(self, config: TensorLossConfig, start_lr: float, outputs: Collection[str] = ()):
        super().__init__(config, start_lr, outputs)
        self.name = next((name for name in LABEL if name in outputs), "")
        if not self.name:
            raise UserError(
                f"loss/type 'tensor' needs a model that predicts {' or '.join(LABEL)}; model/fitting_net gives "
                f"{', '.join(outputs)}."
            )
        self.weights = {"lc": config.pref_atomic, "gl": config.pref}
        self.terms = [term for term, weight in self.weights.items() if weight > 0]
        self.names = ["rmse"] + [f"rmse_{term}" for term in self.terms]
        self.wanted = (self.name, f"atomic {self.name}", "atomic selection")

    def prefactor(self, term: str, lr: float) -> float:
        return self.weights[term]

    def has(self, term: str, labels: Container[str]) -> bool:
        return (f"atom_{LABEL[self.name]}" if term == "lc" else LABEL[self.name]) in labels

    def term(self, name: str, prediction: dict[str, Tensor], batch: Batch) -> Term:
        label, selected = LABEL[self.name], prediction["atomic selection"]  # (N,) 1 where an atom has the quantity
        if name == "gl":
            delta = prediction[self.name] - batch.labels[label].view_as(prediction[self.name])  # (B, width)
            atoms = torch.zeros_like(batch.natoms).index_add(0, batch.frame, selected).clamp(min=1.0)
            return (delta**2).mean(), ((delta / atoms[:, None]) ** 2).mean()
        X = prediction[f"atomic {self.name}"]
        delta = (X - batch.labels[f"atom_{label}"].view_as(X)) * selected[:, None]  # (N, width)
        if self.config.enable_atomic_weight and "atom_weight" in batch.labels:
            delta = delta * batch.labels["atom_weight"].view(-1, 1)
        mean = (delta**2).mean(1).sum() / selected.sum().clamp(min=1.0)
        return mean, mean
