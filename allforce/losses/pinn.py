"""The losses of PiNN: errors of energy, forces and stress (`pinn`) or of dipoles (`pinn_dipole`).

    L = m_e <w (s ΔE)²> + m_f <w (s ΔF)²> + m_s <(s Δσ)²> + m_l2 <weights²>          s = e_scale, Δ in units of the data
    L = m_d <w (s Δμ)²> + <b²> + m_l2 Σ ½ weights²                                  s = d_scale, b bond charges

<·> is the mean over frames, components of forces, or components of the stress of all frames. Figures are shown in eV
(energies per atom), eV/Å, eV/Å³ and e·Å.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Literal

import torch
from torch import Tensor

from allforce.config.section import Section, key
from allforce.data.batch import Batch
from allforce.losses.loss import Loss, Term

MULTIPLIER = "Weight of the error of the "


class PinnLossConfig(Section):
    """The loss of PiNN's potential_model."""

    type: Literal["pinn"] = key("pinn", 'Kind of loss: "pinn".')
    e_scale: float = key(1.0, "Errors count times this. In PiNN it is the model's e_scale.", gt=0, own=True)
    e_unit: float = key(1.0, "Unit of the data's energies in eV, as in the model.", gt=0, own=True)
    max_energy: float | None = key(
        None, "Energies of frames larger than this are not learned; |E − Σ e_dress|·e_scale counts.", gt=0, own=True
    )
    use_e_per_atom: bool = key(False, "The error of the energy is that of E/N.", own=True)
    use_e_weight: bool = key(False, "Squares of energy errors count times e_weight.npy.", own=True)
    use_force: bool = key(False, "Learn forces.", own=True)
    max_force_comp: float | None = key(
        None, "Components of forces larger than this, times e_scale, are not learned.", gt=0, own=True
    )
    use_f_weights: bool = key(False, "Squares of force errors count times f_weights.npy.", own=True)
    use_stress: bool = key(False, "Learn stresses.", own=True)
    use_l2: bool = key(False, "Keep weights small: add the mean of the squares of all that are no biases.", own=True)
    e_loss_multiplier: float = key(1.0, MULTIPLIER + "energy.", ge=0, own=True)
    f_loss_multiplier: float = key(1.0, MULTIPLIER + "forces.", ge=0, own=True)
    s_loss_multiplier: float = key(1.0, MULTIPLIER + "stress.", ge=0, own=True)
    l2_loss_multiplier: float = key(1.0, "Weight of the mean square of the weights.", ge=0, own=True)


class PinnDipoleLossConfig(Section):
    """The loss of PiNN's dipole models."""

    type: Literal["pinn_dipole"] = key("pinn_dipole", 'Kind of loss: "pinn_dipole".')
    d_scale: float = key(1.0, "Errors count times this. In PiNN it is the model's d_scale.", gt=0, own=True)
    d_unit: float = key(1.0, "Unit of the data's dipoles in e·Å, as in the model.", gt=0, own=True)
    vector_dipole: bool = key(
        False, "Learn dipoles as vectors (dipole.npy); false: their lengths (dipole_norm.npy, or dipole.npy).", own=True
    )
    max_dipole: float | None = key(None, "Dipoles longer than this, times d_scale, are not learned.", gt=0, own=True)
    use_d_per_atom: bool = key(False, "The error is that of μ/N.", own=True)
    use_d_weight: bool = key(False, "Squares of errors count times d_weight.npy.", own=True)
    regularization: bool = key(
        False, "Add the mean of the squares of bond charges, for models that have them.", own=True
    )
    use_charge: bool = key(False, "Add the mean of the squares of the frames' charges, times d_scale.", own=True)
    use_l2: bool = key(False, "Keep weights small: add Σ ½ w² of all that are no biases.", own=True)
    d_loss_multiplier: float = key(1.0, MULTIPLIER + "dipole.", ge=0, own=True)
    l2_loss_multiplier: float = key(1.0, "Weight of Σ ½ w².", ge=0, own=True)


class PinnLoss(Loss):
    Config = PinnLossConfig
    judged_by = ("f", "e")

    def __init__(self, config: PinnLossConfig, start_lr: float, outputs: Collection[str] = ()):
        super().__init__(config, start_lr, outputs)
        on = {"e": True, "f": config.use_force, "s": config.use_stress, "l2": config.use_l2}
        self.terms = [term for term, used in on.items() if used]
        self.names = ["rmse"] + [f"rmse_{t}" for t in self.terms]
        outputs = {"e": "energy", "f": "forces", "s": "virial", "l2": "mean square of weights"}
        self.wanted = tuple(outputs[t] for t in self.terms) + (("dress energy",) if config.max_energy else ())

    def prefactor(self, term: str, lr: float) -> float:
        return getattr(self.config, f"{term}_loss_multiplier")

    def has(self, term: str, labels: Container[str]) -> bool:
        return term == "l2" or {"e": "energy", "f": "force", "s": "virial"}[term] in labels

    def learns_from(self, labels: Container[str]) -> bool:
        return any(self.has(term, labels) for term in self.terms if term != "l2")

    def term(self, name: str, prediction: dict[str, Tensor], batch: Batch) -> Term:
        return {"e": self.energy, "f": self.force, "s": self.stress, "l2": self.weights}[name](prediction, batch)

    def energy(self, p: dict[str, Tensor], batch: Batch) -> Term:
        c = self.config
        error = p["energy"] - batch.labels["energy"] * c.e_unit  # (B,) eV
        scaled = error * (c.e_scale / c.e_unit)
        weight = batch.labels["e_weight"] if c.use_e_weight else torch.ones_like(error)
        keep = None
        if c.max_energy is not None:
            undressed = batch.labels["energy"] * c.e_unit - p["dress energy"]
            keep = (undressed * (c.e_scale / c.e_unit)).abs() <= c.max_energy
        square = weight * (scaled / batch.natoms if c.use_e_per_atom else scaled) ** 2
        return mean(square, keep), ((error / batch.natoms) ** 2).mean()

    def force(self, p: dict[str, Tensor], batch: Batch) -> Term:
        c, label = self.config, batch.labels["force"]  # (N, 3)
        error = p["forces"] - label * c.e_unit
        square = (error * (c.e_scale / c.e_unit)) ** 2
        if c.use_f_weights:
            square = square * batch.labels["f_weights"]
        keep = None if c.max_force_comp is None else (label * c.e_scale).abs() <= c.max_force_comp
        return mean(square, keep), (error**2).mean()

    def stress(self, p: dict[str, Tensor], batch: Batch) -> Term:
        """σ = −Ξ/V; frames that are not periodic have none."""
        c = self.config
        assert batch.cell is not None
        volume = torch.linalg.det(batch.cell).abs()[:, None]  # (B, 1)
        error = torch.where(volume > 0, batch.labels["virial"] * c.e_unit - p["virial"], 0.0)
        error = error / torch.where(volume > 0, volume, 1.0)  # (B, 9) eV/Å³
        figure = (error**2).mean()
        return figure * (c.e_scale / c.e_unit) ** 2, figure

    def weights(self, p: dict[str, Tensor], batch: Batch) -> Term:
        value = p["mean square of weights"]
        return value, value


class PinnDipoleLoss(Loss):
    Config = PinnDipoleLossConfig

    def __init__(self, config: PinnDipoleLossConfig, start_lr: float, outputs: Collection[str] = ()):
        super().__init__(config, start_lr, outputs)
        on = {"d": True, "q": config.use_charge, "b": config.regularization, "l2": config.use_l2}
        self.terms = [term for term, used in on.items() if used]
        self.names = ["rmse"] + [f"rmse_{t}" for t in self.terms]
        outputs = {
            "d": "dipole" if config.vector_dipole else "dipole norm",
            "q": "charge",
            "b": "mean square of bond charges",
            "l2": "half square sum of weights",
        }
        self.wanted = tuple(outputs[t] for t in self.terms)

    def prefactor(self, term: str, lr: float) -> float:
        c = self.config
        return {"d": c.d_loss_multiplier, "l2": c.l2_loss_multiplier}.get(term, 1.0)

    def has(self, term: str, labels: Container[str]) -> bool:
        return term != "d" or "dipole" in labels or (not self.config.vector_dipole and "dipole_norm" in labels)

    def learns_from(self, labels: Container[str]) -> bool:
        return self.has("d", labels)

    def caveat(self, labels: Container[str]) -> str:
        if self.config.vector_dipole or "dipole" not in labels:
            return ""
        return (
            "The data have dipoles as vectors, but loss/vector_dipole is false, PiNN's default: only their lengths are "
            "learned, and the direction, for charges the sign, is left to chance. Set it to true to learn vectors."
        )

    def term(self, name: str, prediction: dict[str, Tensor], batch: Batch) -> Term:
        c = self.config
        if name == "d":
            return self.dipole(prediction, batch)
        if name == "q":
            charge = prediction["charge"]  # (B,)
            return ((charge * (c.d_scale / c.d_unit)) ** 2).mean(), (charge**2).mean()
        value = prediction["mean square of bond charges" if name == "b" else "half square sum of weights"]
        return value, value

    def dipole(self, p: dict[str, Tensor], batch: Batch) -> Term:
        c = self.config
        label = self.label(batch.labels)
        error = p["dipole" if c.vector_dipole else "dipole norm"].view_as(label) - label * c.d_unit  # (B, 3) or (B, 1)
        scaled = error * (c.d_scale / c.d_unit)
        square = (scaled / batch.natoms[:, None] if c.use_d_per_atom else scaled) ** 2
        if c.use_d_weight:
            square = square * batch.labels["d_weight"][:, None]
        keep = None if c.max_dipole is None else (label * c.d_scale).abs() <= c.max_dipole
        return mean(square, keep), (error**2).mean()

    def label(self, labels: dict[str, Tensor]) -> Tensor:
        """(B, 3), or (B, 1) for lengths."""
        if self.config.vector_dipole:
            return labels["dipole"]
        if "dipole_norm" in labels:
            return labels["dipole_norm"][:, None]
        return torch.linalg.vector_norm(labels["dipole"], dim=1, keepdim=True)


def mean(square: Tensor, keep: Tensor | None) -> Tensor:
    """The mean of those that count; 0 when none does."""
    if keep is None:
        return square.mean()
    return torch.where(keep, square, 0.0).sum() / keep.sum().clamp(min=1)
