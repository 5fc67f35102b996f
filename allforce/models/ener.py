"""The energy fitting net: one net per type of the centre atom, or one for all where the descriptor holds the type.

e_i = net_τ([D_i, (fparam − avg)/std, (aparam − avg)/std]) − [net_τ with D = 0, if atom_ener[τ] is given] + bias_τ
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from allforce.config.keys import (
    ACTIVATION_HELP,
    PRECISION_HELP,
    SEED_HELP,
    Activation,
    Int,
    Positive,
    Precision,
    Seed,
    per_type,
)
from allforce.config.section import Section, key
from allforce.data.batch import Batch
from allforce.data.sample import Sample
from allforce.errors import UserError
from allforce.models.bias import EnergyBias, energy_bias, fit_energy_bias
from allforce.models.fitting import EnergyFitting
from allforce.models.layers import DTYPES, Net, generator
from allforce.models.scalar_net import value_and_gradient
from allforce.models.serial import collection, copy_array, copy_nets, nets_from_pt, precision_of, refuse, to_numpy

ISOLATED = "isolated"  # as atom_ener: the data says
STATISTICS = ("fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std")


class EnerConfig(Section):
    """Net from descriptor to atomic energy, one per type."""

    type: Literal["ener"] = key("ener", 'What is fitted: "ener", the energy.')
    numb_fparam: Int = key(0, "Number of frame parameters (fparam.npy).", ge=0)
    numb_aparam: Int = key(0, "Number of atomic parameters (aparam.npy).", ge=0)
    default_fparam: list[float] | None = key(
        None, "Frame parameters of data that have none; numb_fparam numbers.", free=True
    )
    neuron: list[Positive] = key(
        [120, 120, 120],
        "Widths of the hidden layers. Layers of equal width get a skip connection.",
        aliases=("n_neuron",),
    )
    activation_function: Activation = key("tanh", ACTIVATION_HELP)
    precision: Precision = key("default", PRECISION_HELP)
    resnet_dt: bool = key(True, "A trained step width in the skip connections.")
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
    seed: Seed = key(None, SEED_HELP, free=True)
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
        layers = len(self.neuron) + 1
        if isinstance(self.trainable, list) and len(self.trainable) != layers:
            yield (
                "trainable",
                f"has {len(self.trainable)} entries; expected {layers}, one for each layer of neuron and one for the "
                f"output layer",
            )
        if self.default_fparam is not None and len(self.default_fparam) != self.numb_fparam:
            yield "default_fparam", f"has {len(self.default_fparam)} numbers, but numb_fparam is {self.numb_fparam}"
        if self.use_aparam_as_mask and self.numb_aparam == 0:
            yield "use_aparam_as_mask", "is true, but numb_aparam is 0"


class EnerFitting(EnergyFitting):
    """Atomic energies, and their gradient with respect to the descriptor."""

    Config = EnerConfig

    bias_atom_e: Tensor  # (nt,)
    fparam_avg: Tensor  # (numb_fparam,)
    fparam_inv_std: Tensor
    aparam_avg: Tensor  # (numb_aparam,)
    aparam_inv_std: Tensor

    def __init__(self, config: EnerConfig, ntypes: int, dim: int, dim_vectors: int = 0, mixed_types: bool = False):
        super().__init__(config, ntypes, dim, dim_vectors, mixed_types)
        self.dtype = DTYPES[config.precision]
        self.numb_fparam, self.numb_aparam = config.numb_fparam, config.numb_aparam
        self.default_fparam = config.default_fparam
        extra = config.numb_fparam + (0 if config.use_aparam_as_mask else config.numb_aparam)
        act, dt = config.activation_function, config.resnet_dt
        self.nets: list[Net] = nn.ModuleList(  # type: ignore[assignment]
            Net(dim + extra, config.neuron, act, dt, self.dtype, generator(config.seed, 1, t), 1)
            for t in range(1 if mixed_types else ntypes)
        )
        for net in self.nets:
            for layer, flag in zip(net.layers, self.trainable, strict=True):
                layer.requires_grad_(flag)
        known = config.vacuum_energies or [None] * ntypes
        self.vacuum = [config.atom_ener == ISOLATED or energy is not None for energy in known]

        def buffer(name: str, n: int, value: float) -> None:
            self.register_buffer(name, torch.full((n,), value, dtype=torch.float64))

        buffer("bias_atom_e", ntypes, 0.0)
        buffer("fparam_avg", config.numb_fparam, 0.0)
        buffer("fparam_inv_std", config.numb_fparam, 1.0)
        buffer("aparam_avg", config.numb_aparam, 0.0)
        buffer("aparam_inv_std", config.numb_aparam, 1.0)

    @classmethod
    def complete(cls, config: EnerConfig, before: EnerConfig) -> EnerConfig:
        isolated = config.atom_ener == ISOLATED
        return config.model_copy(update={"atom_ener": before.atom_ener}) if isolated else config

    @property
    def trainable(self) -> list[bool]:
        """Of each layer."""
        flags = self.config.trainable
        return list(flags) if isinstance(flags, list) else [flags] * (len(self.config.neuron) + 1)

    # ---- the equation

    def parameters_of_atoms(self, batch: Batch) -> list[Tensor]:
        """Normalised frame and atomic parameters, each (N, ·)."""
        out = []
        if self.config.numb_fparam:
            assert batch.fparam is not None
            out.append(((batch.fparam - self.fparam_avg) * self.fparam_inv_std)[batch.frame])
        if self.config.numb_aparam and not self.config.use_aparam_as_mask:
            assert batch.aparam is not None
            out.append((batch.aparam - self.aparam_avg) * self.aparam_inv_std)
        return [p.to(self.dtype) for p in out]

    def inputs(self, D: Tensor, batch: Batch) -> tuple[Tensor, tuple[int, ...]]:
        """What the nets take (N, ·), and how many rows belong to each net."""
        x = D.to(self.dtype)
        if extra := self.parameters_of_atoms(batch):
            x = torch.cat([x, *extra], dim=1)
        return x, (len(x),) if self.mixed_types else batch.type_counts

    def forward(self, D: Tensor, batch: Batch) -> Tensor:
        x, counts = self.inputs(D, batch)
        e = torch.cat([net(part)[:, 0] for net, part in zip(self.nets, x.split(counts), strict=True)])
        return self.with_constants(e, x, batch)

    def with_gradient(self, D: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """e (N,) in float64, and ∂e_i/∂D_i (N, M) in the precision of D."""
        x, counts = self.inputs(D, batch)
        e, gradient = value_and_gradient(self.nets, counts, x)
        return self.with_constants(e, x, batch), gradient[:, : self.dim].to(D.dtype)

    def with_constants(self, e: Tensor, x: Tensor, batch: Batch) -> Tensor:
        if any(self.vacuum):
            e = e - self.in_vacuum(x, batch.type_counts)
        return e.double() + self.bias_atom_e[batch.type]

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
        for name, width in (("fparam", self.numb_fparam), ("aparam", self.numb_aparam)):
            if width:
                self.fit_parameters(sample, name, width, section.data_stat_protect)
        if found.rmse is None:
            return []
        return [f"RMSE of energy per atom after linear regression is: {found.rmse} in the unit of energy."]

    def fit_parameters(self, sample: Sample, name: str, width: int, protect: float) -> None:
        """Mean and 1/deviation of the frame or atomic parameters."""
        sums = sample.file.once(name, lambda: parameter_sums(sample, name, width))
        mean, inverse = parameter_normalisation(sums, protect)
        getattr(self, f"{name}_avg").copy_(torch.from_numpy(mean))
        getattr(self, f"{name}_inv_std").copy_(torch.from_numpy(inverse))

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
        c = self.config
        shared = {"activation_function": c.activation_function.lower(), "precision": precision_of(self.nets)}
        settings = {"out_dim": 1, "neuron": list(c.neuron), "resnet_dt": c.resnet_dt, "bias_out": True, **shared}
        ndim = 0 if self.mixed_types else 1
        counts = {"fparam": c.numb_fparam, "aparam": c.numb_aparam}
        statistics = {n: to_numpy(getattr(self, n)) if counts[n[:6]] else None for n in STATISTICS}
        return {
            "@class": "Fitting",
            "type": "ener",
            "@version": 4,
            "var_name": "energy",
            "ntypes": self.ntypes,
            "dim_descrpt": self.dim,
            "mixed_types": self.mixed_types,
            "dim_out": 1,
            "neuron": list(c.neuron),
            "resnet_dt": c.resnet_dt,
            "numb_fparam": c.numb_fparam,
            "numb_aparam": c.numb_aparam,
            "dim_case_embd": 0,
            "default_fparam": c.default_fparam,
            "rcond": c.rcond,
            "tot_ener_zero": False,
            "trainable": self.trainable,
            "atom_ener": c.vacuum_energies,
            **shared,
            "layer_name": None,
            "use_aparam_as_mask": c.use_aparam_as_mask,
            "spin": None,
            "exclude_types": [],
            "nets": collection(self.nets, "fitting_network", ndim, self.ntypes, settings, self.trainable),
            "@variables": {"bias_atom_e": to_numpy(self.bias_atom_e)[:, None], **statistics, "case_embd": None},
            "type_map": type_map,
        }

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        refuse(tree, {"spin": None, "tot_ener_zero": False, "layer_name": None, "dim_case_embd": 0}, source)
        section = super().section_from_tree(tree, source)
        energies = section.pop("atom_ener", None)  # DeePMD-kit writes null where none is given
        if energies is not None:
            section["atom_ener"] = [None if x is None else float(np.ravel(x)[0]) for x in energies]
        return section

    def load_tree(self, tree: dict[str, Any], out_bias: Any, source: str) -> None:
        refuse(tree, {"mixed_types": self.mixed_types}, source)
        copy_nets(self.nets, tree["nets"]["networks"], f"{source}: fitting net")
        self.load_variables(tree["@variables"], out_bias, source)

    def load_pt(self, state: dict[str, Tensor], prefix: str, out_bias: Any, source: str) -> None:
        copy_nets(self.nets, nets_from_pt(state, f"{prefix}.filter_layers", source), f"{source}: fitting net")
        stored = {n: state.get(f"{prefix}.{n}") for n in ("bias_atom_e", *STATISTICS)}
        self.load_variables({n: None if x is None else to_numpy(x) for n, x in stored.items()}, out_bias, source)

    def load_variables(self, stored: dict[str, Any], out_bias: Any, source: str) -> None:
        """bias_τ = bias_atom_e[τ] + out_bias[τ], what DeePMD-kit's backends keep in two places."""
        total = np.zeros(self.ntypes)
        for name, part in (("bias_atom_e", stored.get("bias_atom_e")), ("out_bias", out_bias)):
            if part is None:
                continue
            if np.size(part) != total.size:
                raise UserError(f"{source}: {name} has shape {np.shape(part)}, expected {total.size} values.")
            total += np.asarray(part, dtype=np.float64).reshape(total.size)
        copy_array(self.bias_atom_e, total, f"{source}: bias")
        for name in STATISTICS:
            if stored.get(name) is not None:
                copy_array(getattr(self, name), stored[name], f"{source}: {name}")


def isolated_energies(sample: Sample, type_map: list[str]) -> list[float]:
    """Energy of each type from frames with one atom alone; types without such a frame are an error."""
    found = sample.isolated_energies()
    if missing := [name for t, name in enumerate(type_map) if t not in found]:
        raise UserError(
            f'model/fitting_net/atom_ener: "isolated", but the training data has no frame with an energy and one atom '
            f"of {', '.join(missing)} alone, without neighbours. Add such frames, or give the energies as a list."
        )
    return [found[t] for t in range(len(type_map))]


def parameter_sums(sample: Sample, name: str, width: int) -> np.ndarray:
    """(width, 3): [count, sum, sum of squares] of the parameters, over frames (fparam) or atoms (aparam)."""

    def rows() -> Iterator[np.ndarray]:
        for frame, _ in sample.prepared():
            value = getattr(frame, name).reshape(-1, width)
            yield np.stack([np.full(width, len(value)), value.sum(axis=0), (value**2).sum(axis=0)], axis=1).ravel()

    return sample.sum_rows(rows(), width * 3).reshape(width, 3)


def parameter_normalisation(sums: np.ndarray, protect: float) -> tuple[np.ndarray, np.ndarray]:
    """(mean, 1/std) of parameters; a deviation below `protect` is taken for it."""
    count, total, squares = sums.T
    mean = total / np.maximum(count, 1)
    std = np.sqrt(np.maximum(squares / np.maximum(count, 1) - mean**2, 0))
    return mean, 1 / np.maximum(std, protect)
