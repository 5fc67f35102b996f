"""The energy fitting net (net_fitting.py).

e_i = net_τ(…) − [net_τ with D = 0, if atom_ener[τ] is given] + bias_τ
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from allforce.config.keys import per_type
from allforce.config.section import key
from allforce.data.batch import Batch
from allforce.data.sample import Sample
from allforce.errors import UserError
from allforce.models.bias import EnergyBias, energy_bias, fit_energy_bias
from allforce.models.fitting import EnergyFitting
from allforce.models.frozen_nets import FrozenNets, frozen
from allforce.models.net_fitting import NetConfig, NetFitting
from allforce.models.scalar_net import hidden_and_tangents, value_and_gradient
from allforce.models.serial import copy_array, to_numpy

ISOLATED = "isolated"  # as atom_ener: the data says


class EnerConfig(NetConfig):
    """Net from descriptor to atomic energy, one per type."""

    type: Literal["ener"] = key("ener", 'What is fitted: "ener", the energy.')
    trainable: bool | list[bool] = key(
        True,
        "Whether the net is trained; or a list, one for each hidden layer and one for the output layer.",
        free=True,
    )
    rcond: float | None = key(
        None,
        "Singular values below this fraction of the largest are dropped when the energy bias is fitted.",
        ge=0,
        free=True,
    )
    atom_ener: Literal["isolated"] | list[float | None] = key(
        [],
        "Energy of each type in vacuum, in eV (null: not given): the net gives exactly this for an atom "
        'without neighbours. "isolated": from frames of the training data that have one atom alone.',
    )
    use_aparam_as_mask: bool = key(False, "Atomic parameters are a mask, not an input of the net.")

    @property
    def vacuum_energies(self) -> list[float | None]:
        """atom_ener as far as it is known before the data are."""
        return list(self.atom_ener) if isinstance(self.atom_ener, list) else []

    def problems_with_types(self, ntypes: int) -> Iterator[tuple[str, str]]:
        yield from per_type("atom_ener", self.atom_ener, ntypes)

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.use_aparam_as_mask and self.numb_aparam == 0:
            yield "use_aparam_as_mask", "is true, but numb_aparam is 0"


class EnerFitting(NetFitting, EnergyFitting):
    """Atomic energies, and their gradient with respect to the descriptor."""

    Config = EnerConfig

    bias_atom_e: Tensor  # (nt,)

    def __init__(self, config: EnerConfig, ntypes: int, dim: int, dim_vectors: int = 0, mixed_types: bool = False):
        super().__init__(config, ntypes, dim, dim_vectors, mixed_types)
        known = config.vacuum_energies or [None] * ntypes
        self.vacuum = [config.atom_ener == ISOLATED or energy is not None for energy in known]
        self.register_buffer("bias_atom_e", torch.zeros(ntypes, dtype=torch.float64))
        self.frozen: FrozenNets | None = None

    @classmethod
    def complete(cls, config: EnerConfig, before: EnerConfig) -> EnerConfig:
        isolated = config.atom_ener == ISOLATED
        return config.model_copy(update={"atom_ener": before.atom_ener}) if isolated else config

    # ---- the equation

    def forward(self, D: Tensor, batch: Batch) -> Tensor:
        x, counts = self.inputs(D, batch)
        return self.with_constants(self.values(x, counts)[:, 0], x, batch)

    def with_gradient(self, D: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """e (N,) in float64, and ∂e_i/∂D_i (N, M) in the precision of D."""
        x, counts = self.inputs(D, batch)
        self.frozen = frozen(self.nets, counts, x, self.frozen)
        e, gradient = value_and_gradient(self.nets, counts, x) if self.frozen is None else self.frozen(x, counts)
        return self.with_constants(e, x, batch), gradient[:, : self.dim].to(D.dtype)

    def with_constants(self, e: Tensor, x: Tensor, batch: Batch) -> Tensor:
        if any(self.vacuum):
            e = e - self.in_vacuum(x, batch.type_counts)
        return e.double() + self.bias_atom_e.index_select(0, batch.type)

    @torch.no_grad()
    def hidden_and_tangents(self, D: Tensor, dots: Iterable[Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """What the last layers are given (N, H), and its tangents (p, N, H) for p of D (N, M)."""
        x, counts = self.inputs(D, batch)
        extra = x.new_zeros(len(x), x.shape[1] - D.shape[1])  # frame and atomic parameters stay
        whole = (torch.cat([dot.to(x.dtype), extra], 1) for dot in dots)
        return hidden_and_tangents(self.nets, counts, x, whole)

    def sums_of_frames(self, a: Tensor, batch: Batch) -> Tensor:
        """(…, B, nets·H) of refit.py from (…, N, H)."""
        *others, _, H = a.shape
        nets = len(self.nets)
        place = batch.frame * nets + (0 if self.mixed_types else batch.type)  # (N,) of frame and net
        sums = a.new_zeros(*others, batch.nframes * nets, H, dtype=torch.float64)
        return sums.index_add_(len(others), place, a.double()).view(*others, batch.nframes, nets * H)

    def last_layer(self) -> np.ndarray:
        """w (nets·H,)."""
        return np.concatenate([to_numpy(net.layers[-1].w)[:, 0] for net in self.nets])

    @torch.no_grad()
    def change_last_layer(self, delta: np.ndarray) -> None:
        """w ← w + δ (nets·H,)."""
        for net, part in zip(self.nets, np.split(delta, len(self.nets)), strict=True):
            w = net.layers[-1].w  # (H, 1)
            w.add_(torch.from_numpy(part[:, None]).to(w))

    def in_vacuum(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """The nets with D = 0, for types whose energy in vacuum is given; 0 for the others."""
        x = torch.cat([torch.zeros_like(x[:, : self.dim]), x[:, self.dim :]], dim=1)
        nets = [self.nets[0]] * self.ntypes if self.mixed_types else self.nets
        parts = zip(nets, x.split(counts), self.vacuum, strict=True)
        return torch.cat([net(part)[:, 0] if given else part.new_zeros(len(part)) for net, part, given in parts])

    # ---- from the data

    def fit_statistics(self, sample: Sample, section: Any) -> list[str]:
        if self.config.atom_ener == ISOLATED:
            self.config = self.config.model_copy(update={"atom_ener": isolated_energies(sample, section.type_map)})
        given = (section.preset_out_bias or {}).get("energy") or self.config.vacuum_energies or None
        known = sample.file.get("bias_atom_energy", "std_atom_energy")
        if known is None or given is not None:
            found = energy_bias(sample, given, self.config.rcond, section.atom_exclude_types)
            if known is None:
                sample.file.put(bias_atom_energy=found.bias[:, None], std_atom_energy=found.std[:, None])
        else:
            found = EnergyBias(known[0][:, 0], known[1][:, 0], None)
        self.bias_atom_e.copy_(torch.from_numpy(found.bias))
        super().fit_statistics(sample, section)
        if found.rmse is None:
            return []
        return [f"RMSE of energy per atom after linear regression is: {found.rmse} in the unit of energy."]

    def change_bias(self, counts: np.ndarray, missing: np.ndarray, excluded: list[int], mode: str) -> list[str]:
        """mode change: bias += least squares of what is missing; set: bias = that of the labels."""
        counts[:, excluded] = 0
        fit = fit_energy_bias(counts, missing, rcond=self.config.rcond)
        old = to_numpy(self.bias_atom_e).copy()
        self.set_bias(fit.bias + (old if mode == "change" else 0.0))
        changed = np.array2string(to_numpy(self.bias_atom_e) - old, precision=6)
        return [f"energy bias changed by {changed} eV, RMSE per atom now {fit.rmse} eV"]

    def set_bias(self, values: np.ndarray) -> None:
        if np.shape(values) != (self.ntypes,):
            raise UserError(
                f"energy bias: found {np.size(values)} value(s), expected {self.ntypes}, one for each type."
            )
        with torch.no_grad():
            self.bias_atom_e.copy_(torch.from_numpy(np.asarray(values, dtype=np.float64)))

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        out = super().to_tree(type_map)
        out["@variables"]["bias_atom_e"] = to_numpy(self.bias_atom_e)[:, None]
        c = self.config
        return out | {"var_name": "energy", "dim_out": 1, "rcond": c.rcond, "atom_ener": c.vacuum_energies}

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        section = super().section_from_tree(tree, source)
        energies = section.pop("atom_ener", None)  # DeePMD-kit writes null where none is given
        if energies is not None:
            section["atom_ener"] = [None if x is None else float(np.ravel(x)[0]) for x in energies]
        return section

    def load_variables(self, stored: dict[str, Any], out_bias: Any, source: str) -> None:
        """bias_τ = bias_atom_e[τ] + out_bias[τ], what DeePMD-kit's backends keep in two places."""
        super().load_variables(stored, out_bias, source)
        total = np.zeros(self.ntypes)
        for name, part in (("bias_atom_e", stored.get("bias_atom_e")), ("out_bias", out_bias)):
            if part is None:
                continue
            if np.size(part) != total.size:
                raise UserError(f"{source}: {name} has shape {np.shape(part)}, expected {total.size} values.")
            total += np.asarray(part, dtype=np.float64).reshape(total.size)
        copy_array(self.bias_atom_e, total, f"{source}: bias")


def isolated_energies(sample: Sample, type_map: list[str]) -> list[float]:
    """Energy of each type from frames with one atom alone; types without such a frame are an error."""
    found = sample.isolated_energies()
    if missing := [name for t, name in enumerate(type_map) if t not in found]:
        raise UserError(
            f'model/fitting_net/atom_ener: "isolated", but the training data has no frame with an energy and one atom '
            f"of {', '.join(missing)} alone, without neighbours. Add such frames, or give the energies as a list."
        )
    return [found[t] for t in range(len(type_map))]
