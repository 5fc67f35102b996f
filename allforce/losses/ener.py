"""The loss `ener`: how far energies, forces and virials are from their labels.

    L = p_e <N^(2-q) (ΔE/N)²> + p_f <ΔF²> + p_v <N^(2-q) (ΔΞ/N)²> + p_ae <Δe_i²> + p_pf <pref_i ΔF²>

    p_x = limit_pref_x + (start_pref_x - limit_pref_x)·lr/start_lr        q = 1, or 2 with intensive_ener_virial

<·> is the mean over frames (or atoms) and components, N the atoms of the frame, lr the unscaled learning rate. A term
is on when its start or its limit is non-zero, and off for a batch whose data has no such label.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from allforce.config.section import Section, key
from allforce.data.batch import Batch
from allforce.losses.loss import Loss, Term

# term -> the label it needs, the output of the model that it looks at
TERMS = {
    "ae": ("atom_ener", "atomic energy"),
    "e": ("energy", "energy"),
    "f": ("force", "forces"),
    "pf": ("force", "forces"),
    "v": ("virial", "virial"),
}
HUBER_PLACE = {"e": 0, "ae": 0, "f": 1, "v": 2}  # which entry of a list huber_delta belongs to the term


class EnerLossConfig(Section):
    """Weighted sum of the errors of energy, force, virial, atomic energies and weighted forces.

    The weight of a term is limit + (start − limit) · lr(t) / start_lr; a term is on when start or limit is not 0.
    """

    type_aliases = ("ener_hess",)

    type: Literal["ener"] = key("ener", 'Kind of loss: "ener".')
    schedule: Literal["lr", "step"] = key(
        "lr",
        "What lr(t) / start_lr of the weights is. lr: that of the learning rate; step: 1000^(−t / numb_steps), "
        "whatever the rate does.",
        own=True,
    )
    start_pref_e: float = key(0.02, "Weight of the energy at the beginning.", ge=0)
    limit_pref_e: float = key(1.0, "Weight of the energy when the rate has gone to 0.", ge=0)
    start_pref_f: float = key(1000.0, "Weight of the forces at the beginning.", ge=0)
    limit_pref_f: float = key(1.0, "Weight of the forces at the end.", ge=0)
    start_pref_v: float = key(0.0, "Weight of the virial at the beginning.", ge=0)
    limit_pref_v: float = key(0.0, "Weight of the virial at the end.", ge=0)
    start_pref_ae: float = key(0.0, "Weight of the atomic energies at the beginning.", ge=0)
    limit_pref_ae: float = key(0.0, "Weight of the atomic energies at the end.", ge=0)
    start_pref_pf: float = key(0.0, "Weight, at the beginning, of the forces weighted by atom_pref.npy.", ge=0)
    limit_pref_pf: float = key(0.0, "Weight, at the end, of the forces weighted by atom_pref.npy.", ge=0)
    use_default_pf: bool = key(False, "Data without atom_pref.npy count as if it were 1.")
    relative_f: float | None = key(None, "Divide the force error of an atom by |force| + this number, in eV/Å.", gt=0)
    enable_atom_ener_coeff: bool = key(False, "The energy is Σ c_i e_i with c_i from atom_ener_coeff.npy.")
    use_huber: bool = key(False, "Huber's loss: quadratic for small errors, linear beyond huber_delta.")
    huber_delta: float | list[float] = key(
        0.01, "Where Huber's loss becomes linear; or three numbers for energy, force, virial."
    )
    loss_func: Literal["mse", "mae"] = key("mse", "Mean of squares, or of absolute values.")
    f_use_norm: bool = key(
        False, "Use the length of the force error instead of its components (with mae or Huber's loss)."
    )
    intensive_ener_virial: bool = key(
        False, "Divide the terms of energy and virial by N² instead of N, the number of atoms."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        deltas = self.huber_delta if isinstance(self.huber_delta, list) else [self.huber_delta] * 3
        if len(deltas) != 3 or min(deltas) <= 0:
            yield (
                "huber_delta",
                f"{self.huber_delta} must be one number or three (energy, force, virial), greater than 0",
            )
        if self.use_huber and self.loss_func == "mae":
            yield "use_huber", 'goes with loss_func "mse" only'
        if self.use_huber and self.relative_f is not None:
            yield "relative_f", "and use_huber exclude each other"
        if self.use_huber and (self.start_pref_pf or self.limit_pref_pf):
            yield "start_pref_pf", "and limit_pref_pf must be 0 with use_huber"
        if self.f_use_norm and not (self.use_huber or self.loss_func == "mae"):
            yield "f_use_norm", 'needs loss_func "mae" or use_huber true'
        if not any(
            getattr(self, f"{when}_pref_{what}") for when in ("start", "limit") for what in ("e", "f", "v", "ae", "pf")
        ):
            yield "start_pref_e", "and all other prefactors are 0, so there is nothing to fit"


class EnerLoss(Loss):
    """Loss of one micro-batch together with the sums from which the displayed figures follow."""

    Config = EnerLossConfig
    judged_by = ("f",)

    def __init__(self, config: EnerLossConfig, start_lr: float, outputs: Collection[str] = ()):
        super().__init__(config, start_lr, outputs)
        self.terms = [t for t in TERMS if any(getattr(config, f"{end}_pref_{t}") for end in ("start", "limit"))]
        mean = "mae" if config.loss_func == "mae" else "rmse"
        self.names = ["rmse"] + [f"{mean}_{t}" for t in self.terms]
        self.wanted = tuple(dict.fromkeys(["energy", *(TERMS[t][1] for t in self.terms)]))
        if config.enable_atom_ener_coeff and "atomic energy" not in self.wanted:
            self.wanted += ("atomic energy",)
        special = config.use_huber or config.f_use_norm or config.relative_f or config.enable_atom_ener_coeff
        self.only_squares = mean == "rmse" and not special and {"e", "f", "v"}.issuperset(self.terms)
        delta = config.huber_delta
        self.huber_delta = list(delta) if isinstance(delta, list | tuple) else [delta] * 3

    def has(self, term: str, labels: Container[str]) -> bool:
        if term == "pf" and "atom_pref" not in labels and not self.config.use_default_pf:
            return False
        return TERMS[term][0] in labels

    def term(self, name: str, prediction: dict[str, Tensor], batch: Batch) -> Term:
        return self.mean(name, *self.residual(name, prediction, batch))

    def residual(self, name: str, prediction: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor | None]:
        residual = {"e": self.energy, "f": self.force, "v": self.virial, "ae": self.atomic_energy, "pf": self.weighted}
        return residual[name](prediction, batch)

    def mean(self, term: str, d: Tensor, weight: Tensor | None) -> Term:
        """(what is minimised, what is displayed: the mean square, or the mean with mae) of the residual d."""
        c = self.config
        if c.f_use_norm and term == "f":
            d = torch.linalg.vector_norm(d, dim=1)  # (N,)
        if c.loss_func == "mae":
            cost = d.abs().mean()
            return cost, cost
        square = d * d
        figure = square.mean()
        if c.use_huber:
            return huber_loss(d, torch.zeros_like(d), delta=self.huber_delta[HUBER_PLACE[term]]), figure
        return figure if weight is None else (weight * square).mean(), figure

    def with_adjoints(
        self, prediction: dict[str, Tensor], batch: Batch, lr: float, scale: float
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """∂<w d²>/∂d = 2 w d / count, where squares are all that there is."""
        if not self.only_squares:
            return super().with_adjoints(prediction, batch, lr, scale)
        loss = nothing = batch.natoms.new_zeros(())
        figures, present, adjoints = [], [], {}
        for name in self.terms:
            present.append(self.has(name, batch.labels))
            if not present[-1]:
                figures.append(nothing)
                continue
            d, weight = self.residual(name, prediction, batch)
            cost, figure = self.mean(name, d, weight)
            factor = self.prefactor(name, lr)
            loss = loss + factor * cost
            figures.append(figure)
            slope = d * (2.0 * scale * factor / d.numel())
            if name != "f" and weight is None:  # d is per atom, and the weight N that it has else takes this back
                slope = slope / (batch.natoms if d.dim() == 1 else batch.natoms[:, None])
            adjoints[TERMS[name][1]] = slope
        return loss, self.sums(loss, figures, present, batch), adjoints

    # ---- residuals, each with the weight of its square where it has one

    def per_atom(self, delta: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Residual per atom of a frame quantity, and the weight N of its square unless intensive."""
        natoms = batch.natoms if delta.dim() == 1 else batch.natoms[:, None]
        return delta / natoms, None if self.config.intensive_ener_virial else natoms

    def energy(self, p: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor | None]:
        energy = p["energy"]
        if self.config.enable_atom_ener_coeff and "atom_ener_coeff" in batch.labels:
            weighted = p["atomic energy"] * batch.labels["atom_ener_coeff"]
            energy = torch.zeros_like(energy).index_add(0, batch.frame, weighted)
        return self.per_atom(energy - batch.labels["energy"], batch)  # (B,)

    def virial(self, p: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor | None]:
        return self.per_atom(p["virial"] - batch.labels["virial"], batch)  # (B, 9)

    def atomic_energy(self, p: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor | None]:
        return p["atomic energy"] - batch.labels["atom_ener"], None  # (N,)

    def force(self, p: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor | None]:
        label = batch.labels["force"]
        delta = p["forces"] - label  # (N, 3)
        if self.config.relative_f is not None:
            delta = delta / (torch.linalg.vector_norm(label, dim=1, keepdim=True) + self.config.relative_f)
        return delta, None

    def weighted(self, p: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor | None]:
        delta = p["forces"] - batch.labels["force"]  # (N, 3)
        if "atom_pref" in batch.labels:
            delta = delta * batch.labels["atom_pref"].sqrt()[:, None]
        return delta, None
