"""The loss `dos`: how far densities of states, and their sums from the lowest energy on, are from their labels.

    L = p_dos <Δd²> + p_cdf <Δc²> + p_ados <Δd_i²> + p_acdf <Δc_i²>            c_k = Σ_{q ≤ k} d_q

d of a frame, d_i of an atom; <·> is the mean over frames or atoms, and over the grid of energies. A term is off for a
batch without its label.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from typing import Literal

from torch import Tensor

from allforce.config.section import Section, key
from allforce.data.batch import Batch
from allforce.errors import UserError
from allforce.losses.loss import Loss, Term

# term -> (output of the model, label of the data), in the order of DeePMD-kit's learning curve
TERMS = {
    "dos": ("dos", "dos"),
    "ados": ("atomic dos", "atom_dos"),
    "cdf": ("dos", "dos"),
    "acdf": ("atomic dos", "atom_dos"),
}


class DosLossConfig(Section):
    """Errors of densities of states, of frames and of atoms, and of their sums."""

    type: Literal["dos"] = key("dos", 'Kind of loss: "dos".')
    start_pref_dos: float = key(0.0, "Weight of the frames' densities (dos.npy) at the start.", ge=0)
    limit_pref_dos: float = key(0.0, "The same when the learning rate has fallen to nothing.", ge=0)
    start_pref_cdf: float = key(0.0, "Weight of the frames' cumulative sums at the start.", ge=0)
    limit_pref_cdf: float = key(0.0, "The same at the end.", ge=0)
    start_pref_ados: float = key(1.0, "Weight of the atoms' densities (atom_dos.npy) at the start.", ge=0)
    limit_pref_ados: float = key(1.0, "The same at the end.", ge=0)
    start_pref_acdf: float = key(0.0, "Weight of the atoms' cumulative sums at the start.", ge=0)
    limit_pref_acdf: float = key(0.0, "The same at the end.", ge=0)

    def on(self) -> list[str]:
        return [t for t in TERMS if getattr(self, f"start_pref_{t}") or getattr(self, f"limit_pref_{t}")]

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.on():
            yield "start_pref_dos", "and all other prefactors are 0, so there is nothing to fit"


class DosLoss(Loss):
    """Of a model that predicts densities of states."""

    Config = DosLossConfig

    def __init__(self, config: DosLossConfig, start_lr: float, outputs: Collection[str] = ()):
        super().__init__(config, start_lr, outputs)
        if "dos" not in outputs:
            raise UserError(
                f"loss/type 'dos' needs a model that predicts dos; model/fitting_net gives {', '.join(outputs)}."
            )
        self.terms = config.on()
        self.names = ["rmse"] + [f"rmse_{term}" for term in self.terms]
        self.wanted = tuple(dict.fromkeys(TERMS[term][0] for term in self.terms))

    def has(self, term: str, labels: Container[str]) -> bool:
        return TERMS[term][1] in labels

    def term(self, name: str, prediction: dict[str, Tensor], batch: Batch) -> Term:
        (output, label), found = TERMS[name], batch.labels[TERMS[name][1]]
        if found.shape != prediction[output].shape:
            raise UserError(
                f"{label}.npy has {found.shape[-1]} numbers, but model/fitting_net/numb_dos is "
                f"{prediction[output].shape[-1]}. Set numb_dos to that of all data."
            )
        delta = prediction[output] - found  # (B or N, numb_dos)
        if name.endswith("cdf"):
            delta = delta.cumsum(1)
        square = (delta**2).mean(1)
        if name in ("ados", "acdf"):
            return square.mean(), square.mean()
        return square.mean(), (square / batch.natoms**2).mean()
