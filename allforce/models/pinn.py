"""The models of PiNN on its networks: potentials, and dipoles from charges, atomic dipoles and bond charges.

    energy   E = e_unit · (Σ_i out_i / e_scale + Σ_i dress_i)
    dipole   μ = d_unit / d_scale · (AC Σ_i q_i r_i + AD Σ_i p_i + BC Σ_pairs b_ij (r_j − r_i) + OS Σ_i o_i r_i)

out, q: the scalar output of the network; p: its output p3; b = i1 + i3·i3; o: given oxidation states (aparam).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

import ase.data
import numpy as np
import torch
from torch import Tensor, nn

from allforce.config.keys import (
    ACTIVATION_HELP,
    PRECISION_HELP,
    SEED_HELP,
    Activation,
    Int,
    Name,
    Positive,
    Precision,
    Seed,
    Width,
    Widths,
    precision_name,
)  # fmt: skip
from allforce.config.section import Section, Words, key
from allforce.data.batch import Batch
from allforce.data.prepare import Limit, Needs
from allforce.data.sample import Sample
from allforce.errors import UserError
from allforce.models.bias import fit_energy_bias
from allforce.models.kernels import compiled
from allforce.models.layers import DTYPES, generator
from allforce.models.model import CountNeighbors, Model
from allforce.models.pinet import Elements, Maker, PiNet
from allforce.models.pinet2 import PiNet2
from allforce.models.pinet_steps import Tape
from allforce.models.potential import Potential

Numbers = list[float]
Dress = Annotated[dict[str, float], Words('{"element": energy}, elements by symbol or atomic number')]
Extra = Annotated[dict[Literal["p1", "p3", "i1", "i3", "dotted_p3"], Positive], Words('{"p3": 1, …}')]
Cutoff = Literal["f1", "f2", "hip"]
NODES = "Widths of the layers of "
SMALL = 1e-6  # under the root of a dipole's length, whose derivative at 0 would not exist


class NetworkKeys(Section):
    """What all models on PiNet share."""

    type: str = key("pinet", "Kind of model.")
    type_map: list[Name] | None = key(
        None, "Elements, by symbol; taken from the data when left out.", min_length=1, free=True, own=True
    )
    atom_types: list[Positive] | None = key(
        None,
        "Atomic numbers that the network tells apart; all of type_map when left out. Others look alike to it.",
        min_length=1,
        own=True,
    )
    rc: float = key(4.0, "Cutoff radius in Å.", gt=0, own=True)
    cutoff_type: Cutoff = key("f1", "Cutoff function: f1, f2 or hip.", own=True)
    basis_type: Literal["polynomial", "gaussian"] = key(
        "polynomial", "Radial basis: powers of the cutoff function, or Gaussians times it.", own=True
    )
    n_basis: Width | list[Width] = key(
        4, "Number of basis functions; or, for the polynomial basis, a list of the powers.", own=True
    )
    gamma: float | Numbers = key(3.0, "1/width² of the Gaussians in Å⁻², one for all or one for each.", own=True)
    center: Numbers | None = key(
        None, "Centres of the Gaussians in Å; n_basis ones from 0 to rc when left out.", min_length=1, own=True
    )
    pp_nodes: Widths = key([16, 16], NODES + "PP, from properties to properties.", min_length=1, own=True)
    pi_nodes: Widths = key(
        [16, 16], NODES + "PI, from properties to interactions; the last one for each basis function.", min_length=1,
        own=True,
    )  # fmt: skip
    ii_nodes: Widths = key([16, 16], NODES + "II, from interactions to interactions.", min_length=1, own=True)
    out_nodes: Widths = key([16, 16], NODES + "the output, which have no activation.", own=True)
    act: Activation = key("tanh", ACTIVATION_HELP, own=True)
    depth: Width = key(4, "Number of blocks.", own=True)
    precision: Precision = key("default", PRECISION_HELP, free=True, own=True)
    seed: Seed = key(None, SEED_HELP, free=True, own=True)
    data_stat_nbatch: Int = key(10, "Batches of each system to which e_dress is fitted.", ge=1, free=True, own=True)
    data_bias_nsample: Int = key(10, "Batches of each system used when e_dress is changed.", ge=1, free=True, own=True)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.basis_type == "gaussian" and isinstance(self.n_basis, list):
            yield "n_basis", "a list of powers belongs to basis_type polynomial; give a number, or `center`"
        if isinstance(self.gamma, list) and self.basis_type == "gaussian":
            n = len(self.center) if self.center is not None else self.n_basis
            if len(self.gamma) != n:
                yield "gamma", f"has {len(self.gamma)} numbers, but there are {n} Gaussians"
        for name in self.type_map or []:
            if ase.data.atomic_numbers.get(name, 0) < 1:
                yield "type_map", f"{name} is not the symbol of an element"
        for number in self.atom_types or []:
            if number >= len(ase.data.chemical_symbols):
                yield "atom_types", f"{number} is not an atomic number"


class Vectors(Section):
    """What PiNet2 has besides."""

    rank: Literal[1, 3] = key(3, "1: scalars only; 3: scalars and vectors.", own=True)
    weighted: bool = key(
        False, "Matrices on the vectors of both atoms of a pair, and in products of vectors.", own=True
    )
    out_extra: Extra = key(
        {}, "Further outputs and their numbers; those that a dipole needs are there anyway.", own=True
    )


class PotentialKeys(Section):
    e_dress: Dress | None = key(
        None,
        "Energy of each element, in units of the data, that the network does not learn. Fitted to the data when left "
        "out; {}: none, as in PiNN.",
        own=True,
    )
    e_scale: float = key(1.0, "The network gives energies times this.", gt=0, own=True)
    e_unit: float = key(1.0, "Unit of the data's energies in eV: predictions are multiplied by it.", gt=0, own=True)


class DipoleKeys(Section):
    d_scale: float = key(1.0, "The network gives dipoles times this.", gt=0, own=True)
    d_unit: float = key(1.0, "Unit of the data's dipoles in e·Å: predictions are multiplied by it.", gt=0, own=True)
    charge_neutrality: bool = key(True, "Charges are shifted so that their sum is 0.", own=True)
    neutral_unit: Literal["system", "water_molecule"] = key(
        "system", "Whose sum is 0: that of the frame, or of every three consecutive atoms.", own=True
    )


class PiNetConfig(NetworkKeys, PotentialKeys):
    """PiNet: a network on atoms and pairs that gives atomic energies."""

    type: Literal["pinet"] = key("pinet", 'Kind of model: "pinet".')


class PiNet2Config(NetworkKeys, Vectors, PotentialKeys):
    """PiNet2: PiNet with vectors beside scalars."""

    type: Literal["pinet2"] = key("pinet2", 'Kind of model: "pinet2".')

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        yield from _equal_widths(self)


class PiNetDipoleConfig(NetworkKeys, DipoleKeys):
    """Dipoles from PiNet's charges."""

    type: Literal["pinet_dipole"] = key("pinet_dipole", 'Kind of model: "pinet_dipole".')
    kind: Literal["AC", "dipole"] = key(
        "AC", 'What makes the dipole: "AC", charges; "dipole", charges whose sum is not shifted but punished.', own=True
    )


class PiNet2DipoleConfig(NetworkKeys, Vectors, DipoleKeys):
    """Dipoles from PiNet2's charges, atomic dipoles and bond charges."""

    type: Literal["pinet2_dipole"] = key("pinet2_dipole", 'Kind of model: "pinet2_dipole".')
    kind: Literal["AC", "AD", "AC_AD", "BC_R", "AC_BC_R", "AD_BC_R", "AD_OS", "dipole"] = key(
        "AC_AD",
        "What makes the dipole: charges (AC), atomic dipoles (AD), bond charges (BC_R), oxidation states that the data "
        'gives as aparam (OS); "dipole": charges whose sum is not shifted but punished.',
        own=True,
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        yield from _equal_widths(self)
        if self.rank < 3 and self.kind not in ("AC", "dipole"):
            yield "rank", f"1 has no vectors, which kind {self.kind} needs; use rank 3"


def _equal_widths(config: Any) -> Iterator[tuple[str, str]]:
    if config.rank >= 3 and config.pp_nodes[-1] != config.ii_nodes[-1]:
        yield "pp_nodes", f"{config.pp_nodes} must end as ii_nodes does, {config.ii_nodes}, when rank is 3"
    if config.rank < 3 and any("3" in name for name in config.out_extra):
        yield "out_extra", f"{config.out_extra} has vectors, which rank 1 has not"


class PinnModel(Model):
    """A network of PiNN and what its models share."""

    network: PiNet | PiNet2
    elements: Tensor  # (nt, n_types) which element of atom_types a type is

    def build(self, network: type[PiNet | PiNet2], extra: dict[str, int] | None = None) -> None:
        config = self.config
        if extra:
            config = config.model_copy(update={"out_extra": {**config.out_extra, **extra}})
        numbers = np.array([ase.data.atomic_numbers[name] for name in self.type_map])
        known = np.array(config.atom_types or numbers)
        dtype = DTYPES[precision_name(config.precision)]
        self.network = network(config, len(known), Maker(generator(config.seed, 0), dtype))
        onehot = torch.from_numpy(numbers[:, None] == known[None, :]).to(dtype)
        self.register_buffer("elements", onehot, persistent=False)

    @classmethod
    def complete(cls, config: Any, count: CountNeighbors | None, before: Any = None) -> tuple[Any, list[str]]:
        known = {ase.data.chemical_symbols[n] for n in config.atom_types or ()} or set(config.type_map)
        others = [name for name in config.type_map if name not in known]
        text = f"model/atom_types: {', '.join(others)} are not among them: to the network they look alike"
        return config, [text] if len(others) > 1 else []

    @property
    def needs(self) -> Needs:
        return Needs(len(self.type_map), Limit(self.config.rc, None, "model/rc", self.config.depth))

    def parts(self) -> dict[str, nn.Module]:
        return {"network": self.network}

    def outputs_of(self, batch: Batch, r: Tensor) -> dict[str, Tensor]:
        """What the network gives, of atoms and of pairs, in float64."""
        elements = Elements(self.elements, batch.type)
        return {name: value.double() for name, value in self.network(elements, batch.edges, r).items()}

    def weights(self) -> Tensor:
        """All weights that are not biases, side by side."""
        return torch.cat([p.flatten() for name, p in self.named_parameters() if not name.endswith(".bias")])


class PiNetPotential(PinnModel, Potential):
    """Energies and forces."""

    Config: ClassVar[Any] = PiNetConfig
    Network: ClassVar[type[PiNet | PiNet2]] = PiNet
    outputs = (*Potential.outputs, "dress energy", "mean square of weights")
    dress: Tensor  # (nt,) e_dress of each type

    def __init__(self, config: Any):
        super().__init__(config)
        self.build(self.Network)
        self.register_buffer("dress", torch.zeros(len(self.type_map), dtype=torch.float64))
        given = {element(name): value for name, value in (config.e_dress or {}).items()}
        # single precision, as in PiNN: another rounding would change energies by some 1e-6
        self.dress[:] = torch.tensor([np.float32(given.get(name, 0.0)) for name in self.type_map])

    @property
    def label_units(self) -> dict[str, float]:
        unit = self.config.e_unit
        return {} if unit == 1 else dict.fromkeys(("energy", "force", "virial", "atom_ener"), unit)

    def energies(self, batch: Batch, r: Tensor) -> Tensor:
        out = self.outputs_of(batch, r)["out"]
        return self.in_unit(out, batch)

    def in_unit(self, out: Tensor, batch: Batch) -> Tensor:
        return (out / self.config.e_scale + self.dress[batch.type]) * self.config.e_unit

    def energies_and_gradient(self, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor]:
        """By hand on CPUs, for networks with tanh."""
        if not compiled(r) or self.config.act.lower() != "tanh":
            return super().energies_and_gradient(batch, r)
        tape = Tape(batch.edges, r, batch.own, len(batch.type), self.elements, self.network.basis)
        self.network.record(tape, Elements(self.elements, batch.type))
        out, gradient = tape.results()
        e = self.in_unit(out, batch)
        return e if batch.own is None else e * batch.own, gradient * (self.config.e_unit / self.config.e_scale)

    def forward(self, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
        out = super().forward(batch, wanted)
        if "dress energy" in wanted:
            dress = self.dress[batch.type] * self.config.e_unit
            out["dress energy"] = torch.zeros_like(batch.natoms).index_add(0, batch.frame, dress)
        if "mean square of weights" in wanted:
            out["mean square of weights"] = (self.weights() ** 2).mean().double()
        return out

    # ---- e_dress from the data

    def fit_statistics(self, sample: Sample) -> list[str]:
        if self.config.e_dress is not None:
            return []
        return self._fit_dress(sample, predicted=False)

    def change_bias(self, sample: Sample, mode: str = "change") -> list[str]:
        return self._fit_dress(sample, predicted=mode == "change")

    def set_bias(self, values: np.ndarray) -> None:
        self.dress.copy_(torch.from_numpy(values) / self.config.e_unit)

    def _fit_dress(self, sample: Sample, predicted: bool) -> list[str]:
        """Least squares of the labels, or of what the model misses of them, over the numbers of atoms."""
        rows, unit = [], self.config.e_unit
        for batch in sample.batches():
            if "energy" in batch.labels:
                with torch.no_grad():
                    model = self(batch, ("energy",))["energy"] / unit if predicted else 0.0
                rows.append(np.append(batch.type_counts, (batch.labels["energy"] - model).cpu().numpy()))
        nt = len(self.type_map)
        table = sample.rows(rows, nt + 1)
        if len(table) == 0:
            if predicted:
                raise UserError("e_dress cannot be fitted: no system has energy labels.")
            return []
        fit = fit_energy_bias(table[:, :nt], table[:, nt])
        found = torch.from_numpy(fit.bias).to(self.dress.device)
        self.dress.copy_(self.dress + found if predicted else found)
        values = ", ".join(f"{x} {v:.6g}" for x, v in zip(self.type_map, self.dress.tolist(), strict=True))
        return [f"e_dress fitted to the data: {values}; RMSE per atom {fit.rmse:.6g}"]


class PiNet2Potential(PiNetPotential):
    Config = PiNet2Config
    Network = PiNet2


class PiNetDipole(PinnModel):
    """Dipoles; `kind` says of what."""

    Config: ClassVar[Any] = PiNetDipoleConfig
    Network: ClassVar[type[PiNet | PiNet2]] = PiNet

    def __init__(self, config: Any):
        super().__init__(config)
        parts = config.kind.split("_")
        self.charged, self.bonded = config.kind == "dipole" or "AC" in parts, "BC" in parts
        extra = {"p3": 1} if "AD" in parts else {}
        self.build(self.Network, extra | ({"i1": 1, "i3": 1} if self.bonded else {}))
        self.parts_of = parts
        names = ["dipole", "dipole norm", "half square sum of weights"]
        names += ["charges", "charge"] if self.charged or "OS" in parts else []
        self.outputs = (*names, "mean square of bond charges") if self.bonded else tuple(names)

    @property
    def needs(self) -> Needs:
        return Needs(
            len(self.type_map), Limit(self.config.rc, None, "model/rc", self.config.depth),
            numb_aparam=int("OS" in self.parts_of), parameters_key="model/kind",
        )  # fmt: skip

    @property
    def label_units(self) -> dict[str, float]:
        unit = self.config.d_unit
        return {} if unit == 1 else dict.fromkeys(("dipole", "dipole_norm"), unit)

    def forward(self, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
        net, config = self.outputs_of(batch, batch.edges.r), self.config
        unit = config.d_unit / config.d_scale
        moment, out = batch.coord.new_zeros(batch.nframes, 3), {}
        charges = self.charges(net["out"], batch) if self.charged else None
        if "OS" in self.parts_of:
            assert batch.aparam is not None
            charges = batch.aparam[:, 0]
        if charges is not None:
            moment = moment.index_add(0, batch.frame, charges[:, None] * batch.coord)
            out["charges"] = charges * unit
            out["charge"] = torch.zeros_like(batch.natoms).index_add(0, batch.frame, charges) * unit
        if "AD" in self.parts_of:
            moment = moment.index_add(0, batch.frame, net["p3"][:, :, 0])
        if self.bonded:
            bond = net["i1"][:, 0] + (net["i3"][:, :, 0] ** 2).sum(1)  # (E,)
            moment = moment.index_add(0, batch.frame[batch.edges.i], bond[:, None] * batch.edges.r)
            out["mean square of bond charges"] = (bond**2).mean() if len(bond) else bond.sum()
        out["dipole"] = moment * unit
        out["dipole norm"] = torch.sqrt((moment**2).sum(1) + SMALL) * unit
        if "half square sum of weights" in wanted:
            out["half square sum of weights"] = 0.5 * (self.weights() ** 2).sum().double()
        return {name: value for name, value in out.items() if name in wanted}

    def charges(self, q: Tensor, batch: Batch) -> Tensor:
        """(N,) without the mean of the frame, or of every three atoms as they are in the file."""
        config = self.config
        if config.kind == "dipole" or not config.charge_neutrality:
            return q
        if config.neutral_unit == "water_molecule":
            position = batch.order.argsort().argsort()  # among the atoms of all frames, as the files have them
            group, count = torch.div(position, 3, rounding_mode="floor"), (len(q) + 2) // 3
        else:
            group, count = batch.frame, batch.nframes
        total = q.new_zeros(count).index_add(0, group, q)
        size = q.new_zeros(count).index_add(0, group, torch.ones_like(q))
        return q - (total / size)[group]


class PiNet2Dipole(PiNetDipole):
    Config = PiNet2DipoleConfig
    Network = PiNet2


def element(name: str) -> str:
    """The symbol of an element that is given by symbol or atomic number."""
    if name.isdecimal() and int(name) < len(ase.data.chemical_symbols):
        return ase.data.chemical_symbols[int(name)]
    return name
