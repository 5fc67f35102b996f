"""The loss `ener`: how far energies, forces and virials are from their labels.

    L = p_e <N^(2-q) (ΔE/N)²> + p_f <ΔF²> + p_v <N^(2-q) (ΔΞ/N)²> + p_ae <Δe_i²> + p_pf <pref_i ΔF²>

    p_x = limit_pref_x + (start_pref_x - limit_pref_x)·lr/start_lr        q = 1, or 2 with intensive_ener_virial

<·> is the mean over frames (or atoms) and components, N the atoms of the frame, lr the unscaled learning rate. A term
is on when its start or its limit is non-zero, and off for a batch whose data has no such label.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from math import nan, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from allforce.data.batch import Batch

if TYPE_CHECKING:
    from allforce.config.schema import LossEner
    from allforce.models.potential import Prediction

# term -> the label it needs
TERMS = {"ae": "atom_ener", "e": "energy", "f": "force", "pf": "force", "v": "virial"}
HUBER_PLACE = {"e": 0, "ae": 0, "f": 1, "v": 2}  # which entry of a list huber_delta belongs to the term


class Loss:
    """Loss of one micro-batch together with the sums from which the displayed figures follow."""

    def __init__(self, config: LossEner, start_lr: float):
        self.config, self.start_lr = config, start_lr
        self.terms = [t for t in TERMS if self._pref(t, "start") != 0 or self._pref(t, "limit") != 0]
        mean = "mae" if config.loss_func == "mae" else "rmse"
        self.names = ["rmse"] + [f"{mean}_{t}" for t in self.terms]
        delta = config.huber_delta
        self.huber_delta = list(delta) if isinstance(delta, list | tuple) else [delta] * 3
        self._weights: dict[tuple, Tensor] = {}

    def _pref(self, term: str, end: str) -> float:
        return getattr(self.config, f"{end}_pref_{term}")

    def prefactor(self, term: str, lr: float) -> float:
        start, limit = self._pref(term, "start"), self._pref(term, "limit")
        return limit + (start - limit) * lr / self.start_lr

    def __call__(self, prediction: Prediction, batch: Batch, lr: float) -> tuple[Tensor, Tensor]:
        """The loss, and sums (2·names,): atoms·value² of every displayed quantity, then the atoms as their weights."""
        loss = prediction.energy.new_zeros(())
        values, present = [loss], [True]
        for term in self.terms:
            present.append(self._has(term, batch.labels))
            if not present[-1]:
                values.append(loss.new_zeros(()))
                continue
            residual, weight = RESIDUALS[term](self, prediction, batch)
            cost, figure = self._mean(term, residual, weight)
            loss = loss + self.prefactor(term, lr) * cost
            values.append(figure.detach())
        if not any(present[1:]):  # nothing to learn from this batch: a gradient of zero, not none
            loss = 0.0 * prediction.energy.sum()
        values[0] = loss.detach().abs()
        weights = self._present(tuple(present), loss.device)
        return loss, torch.cat([torch.stack(values) * weights, weights]) * batch.type.shape[0]

    def metric(self, sums: Tensor) -> dict[str, float]:
        """Displayed figures from sums over any number of micro-batches; nan where no data has the label."""
        n = len(self.names)
        totals = sums.tolist()
        means = [v / w if w > 0 else nan for v, w in zip(totals[:n], totals[n:], strict=True)]
        return {name: m if name.startswith("mae") else sqrt(m) for name, m in zip(self.names, means, strict=True)}

    def learns_from(self, labels: Container[str]) -> bool:
        """Whether data with these labels have anything that the loss looks at."""
        return any(self._has(term, labels) for term in self.terms)

    def _has(self, term: str, labels: Container[str]) -> bool:
        if term == "pf" and "atom_pref" not in labels and not self.config.use_default_pf:
            return False
        return TERMS[term] in labels

    def _present(self, present: tuple[bool, ...], device: torch.device) -> Tensor:
        """Which quantities count, kept on the device so that a step copies nothing to it."""
        key = (present, device)
        if key not in self._weights:
            self._weights[key] = torch.tensor(present, dtype=torch.float64, device=device)
        return self._weights[key]

    def _mean(self, term: str, d: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
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

    def _per_frame(self, delta: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Residual per atom of a frame quantity, and the weight N of its square unless intensive."""
        natoms = batch.natoms if delta.dim() == 1 else batch.natoms[:, None]
        return delta / natoms, None if self.config.intensive_ener_virial else natoms

    def _energy(self, p: Prediction, batch: Batch) -> tuple[Tensor, Tensor | None]:
        energy = p.energy
        if self.config.enable_atom_ener_coeff and "atom_ener_coeff" in batch.labels:
            weighted = p.atom_energy * batch.labels["atom_ener_coeff"]
            energy = torch.zeros_like(energy).index_add(0, batch.frame, weighted)
        return self._per_frame(energy - batch.labels["energy"], batch)  # (B,)

    def _virial(self, p: Prediction, batch: Batch) -> tuple[Tensor, Tensor | None]:
        assert p.virial is not None
        return self._per_frame(p.virial - batch.labels["virial"], batch)  # (B, 9)

    def _atom_energy(self, p: Prediction, batch: Batch) -> tuple[Tensor, Tensor | None]:
        return p.atom_energy - batch.labels["atom_ener"], None  # (N,)

    def _force(self, p: Prediction, batch: Batch) -> tuple[Tensor, Tensor | None]:
        label = batch.labels["force"]
        delta = p.force - label  # (N, 3)
        if self.config.relative_f is not None:
            delta = delta / (torch.linalg.vector_norm(label, dim=1, keepdim=True) + self.config.relative_f)
        return delta, None

    def _weighted_force(self, p: Prediction, batch: Batch) -> tuple[Tensor, Tensor | None]:
        delta = p.force - batch.labels["force"]  # (N, 3)
        if "atom_pref" in batch.labels:
            delta = delta * batch.labels["atom_pref"].sqrt()[:, None]
        return delta, None


RESIDUALS: dict[str, Callable[[Loss, Prediction, Batch], tuple[Tensor, Tensor | None]]] = {
    "e": Loss._energy,
    "f": Loss._force,
    "v": Loss._virial,
    "ae": Loss._atom_energy,
    "pf": Loss._weighted_force,
}
