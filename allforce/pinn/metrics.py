"""PiNN's metrics: of each error E, F, S, D, … mean and root mean square in scaled units, and its part of the loss."""

from __future__ import annotations

from collections.abc import Collection
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from allforce.data.batch import Batch
from allforce.distributed.comm import Comm
from allforce.errors import UserError
from allforce.losses import Loss

LOSS_TAGS = {"e": "E", "f": "F", "s": "S", "d": "D", "q": "Q", "b": "ipred", "l2": "L2"}


class Metrics:
    """Sums over batches: for a tag Σ|d|, Σd² and the number of them; Σ and number of batches for a part of the loss."""

    def __init__(self, loss: Loss, params: dict[str, Any]):
        self.loss, self.config, self.params = loss, loss.config, params
        self.sums: dict[str, Tensor] = {}

    def wanted(self, outputs: Collection[str]) -> tuple[str, ...]:
        return tuple({*self.loss.wanted, *({"charge"} & set(outputs))})

    def add(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        for tag, d in self.errors(prediction, batch).items():
            self._sum(f"{tag}|error", torch.stack([d.abs().sum(), (d * d).sum(), d.new_tensor(d.numel())]))
        total = torch.zeros((), dtype=torch.float64)
        for name in self.loss.terms:
            if self.loss.has(name, batch.labels):
                cost = self.loss.term(name, prediction, batch)[0].detach().cpu() * self.loss.prefactor(name, 1.0)
                total = total + cost
                self._sum(f"{self._loss_tag(name)}|loss", torch.stack([cost, torch.ones_like(cost)]))
        self._sum("loss", torch.stack([total, torch.ones_like(total)]))

    def errors(self, p: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Label − prediction in scaled units, of the labels that there are."""
        c, labels, out = self.config, batch.labels, {}
        if c.type == "pinn":
            s = c.e_scale / c.e_unit
            if "energy" in labels:
                out["E"] = labels["energy"] * c.e_scale - p["energy"] * s
                if self.params.get("log_e_per_atom"):
                    out["E_PER_ATOM"] = out["E"] / batch.natoms
            if c.use_force and "force" in labels:
                out["F"] = labels["force"] * c.e_scale - p["forces"] * s
            if c.use_stress and batch.cell is not None and "virial" in labels:
                volume = torch.linalg.det(batch.cell).abs()[:, None]
                out["S"] = (p["virial"] * s - labels["virial"] * c.e_scale) / volume
            return out
        if not self.loss.has("d", labels):
            return out
        label = self.loss.label(labels)  # type: ignore[attr-defined]
        mu = p["dipole" if c.vector_dipole else "dipole norm"].view_as(label)
        out["D"] = label * c.d_scale - mu * (c.d_scale / c.d_unit)
        if self.params.get("log_d_per_atom"):
            out["D_PER_ATOM"] = out["D"] / batch.natoms[:, None]
        if "charge" in p:
            out["Q" if c.use_charge else "Total q"] = -p["charge"] * (c.d_scale / c.d_unit)
        return out

    def _loss_tag(self, term: str) -> str:
        per_atom = getattr(self.config, f"use_{term}_per_atom", False)
        return LOSS_TAGS[term] + ("_PER_ATOM" if per_atom else "")

    def _sum(self, name: str, values: Tensor) -> None:
        values = values.detach().cpu().double()
        self.sums[name] = self.sums[name] + values if name in self.sums else values

    def result(self, comm: Comm) -> dict[str, float]:
        """Over the batches of all workers."""
        names = sorted(set().union(*comm.gather(sorted(self.sums))))
        if not any(name.endswith("|error") for name in names):
            raise UserError("evaluate: the data have no frames with a label that the loss uses.")
        flat = torch.cat([self.sums.get(n, torch.zeros(3 if n.endswith("error") else 2)).double() for n in names])
        comm.all_reduce(flat)
        out: dict[str, float] = {}
        start = 0
        for name in names:
            tag, _, kind = name.partition("|")
            size = 3 if kind == "error" else 2
            values = flat[start : start + size].tolist()
            start += size
            if kind == "error":
                out |= {f"METRICS/{tag}_MAE": values[0] / values[2], f"METRICS/{tag}_RMSE": sqrt(values[1] / values[2])}
            else:
                out[f"METRICS/{tag}_LOSS" if kind else "loss"] = values[0] / values[1]
        return out
