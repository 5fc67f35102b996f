"""A model of type `standard`: a descriptor with a fitting net, as DeePMD-kit has it.

e_i = fitting(descriptor(r_e of i))       or another quantity of the fitting
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from allforce.config.keys import Int, Name, NonNegative, Pair, known_types, per_type
from allforce.config.section import Section, Words, key, one_of
from allforce.data.batch import Batch
from allforce.data.prepare import Needs
from allforce.data.sample import Sample
from allforce.errors import UserError
from allforce.models.descriptor import Descriptor
from allforce.models.descriptors import PLAIN
from allforce.models.dipole import DipoleFitting
from allforce.models.dos import DosFitting
from allforce.models.edges import AtomsOfEdges
from allforce.models.ener import EnerFitting
from allforce.models.fitting import EnergyFitting, Fitting
from allforce.models.fused import Fused, Sweep
from allforce.models.hybrid import Hybrid
from allforce.models.model import CountNeighbors
from allforce.models.polar import PolarFitting
from allforce.models.potential import Potential
from allforce.models.property import PropertyFitting
from allforce.models.refit import PROBES, Equations
from allforce.models.serial import part_named, to_numpy
from allforce.models.table import TableConfig

UNKNOWNS = 10_000  # weights of all last layers: with more, the equations would take more than 100 MB

DESCRIPTORS: dict[str, type[Descriptor]] = {**PLAIN, "hybrid": Hybrid}
FITTINGS: dict[str, type[Fitting]] = {
    "ener": EnerFitting,
    "dipole": DipoleFitting,
    "polar": PolarFitting,
    "dos": DosFitting,
    "property": PropertyFitting,
}

if TYPE_CHECKING:
    AnyDescriptor = Any
    AnyFitting = Any
else:
    AnyDescriptor = one_of(DESCRIPTORS)
    AnyFitting = one_of(FITTINGS)

OutBias = Annotated[dict[Literal["energy"], list[float | None]], Words('{"energy": [number or null for each type]}')]


class StandardConfig(Section):
    """Descriptor and fitting net."""

    type: Literal["standard"] = key("standard", 'Kind of model: "standard", a descriptor with a fitting net.')
    type_map: list[Name] | None = key(
        None, 'Names of the types, for example ["O", "H"]; taken from the data when left out.', min_length=1, free=True
    )
    descriptor: AnyDescriptor = key(..., "The descriptor, by its type.")
    fitting_net: AnyFitting = key(..., "The fitting net, by its type.")
    data_stat_nbatch: Int = key(
        10, "Batches of each system used for the statistics of the descriptor.", ge=1, free=True
    )
    data_stat_protect: float = key(
        0.01, "Smallest standard deviation used for frame and atomic parameters.", gt=0, free=True
    )
    data_bias_nsample: Int = key(
        10, "Batches of each system used when the energy bias is changed (at least 50 frames in all).", ge=1, free=True
    )
    pair_exclude_types: list[Pair] = key([], "Pairs of types that do not interact, in the whole model.")
    atom_exclude_types: list[NonNegative] = key([], "Types whose atoms have no energy of their own.")
    preset_out_bias: OutBias | None = key(
        None,
        'Energy bias given by hand, {"energy": [value or null for each type]}, in eV; null: from the data.',
        free=True,
    )

    def named_labels(self) -> dict[str, tuple[str, int]]:
        return self.fitting_net.named_labels()

    def problems(self) -> Iterator[tuple[str, str]]:
        names = self.type_map or []
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            yield "type_map", f"has {', '.join(twice)} more than once; every name must be there once"
        if not names:
            return
        preset = (self.preset_out_bias or {}).get("energy", [])
        yield from per_type("preset_out_bias/energy", preset, len(names))
        yield from known_types("pair_exclude_types", self.pair_exclude_types, len(names))
        yield from known_types("atom_exclude_types", self.atom_exclude_types, len(names))
        for part in ("descriptor", "fitting_net"):
            for name, what in getattr(self, part).problems_with_types(len(names)):
                yield f"{part}/{name}", what


class StandardModel(Potential):
    """A descriptor and a fitting."""

    Config = StandardConfig

    keep: Tensor  # (nt,) 0 for atom_exclude_types

    def __init__(self, config: StandardConfig):
        super().__init__(config)
        ntypes = len(self.type_map)
        self.descriptor = DESCRIPTORS[config.descriptor.type](config.descriptor, ntypes)
        d = self.descriptor
        self.fitting = FITTINGS[config.fitting_net.type](
            config.fitting_net, ntypes, d.dim, d.dim_vectors, d.mixed_types
        )
        self.dim_descriptor = d.dim
        self.fitting.exclude(config.atom_exclude_types)
        self.outputs = (*self.fitting.outputs, "descriptor")
        keep = torch.ones(ntypes, dtype=torch.float64)
        keep[config.atom_exclude_types] = 0.0
        self.register_buffer("keep", keep, persistent=False)

    @classmethod
    def complete(
        cls, config: StandardConfig, count: CountNeighbors | None, before: Any = None
    ) -> tuple[StandardConfig, list[str]]:
        part = config.descriptor
        same = before is not None and before.descriptor.type == part.type
        part, warnings = DESCRIPTORS[part.type].complete(part, count, before.descriptor if same else None)
        config = config.model_copy(update={"descriptor": part})
        if before is not None and before.fitting_net.type == config.fitting_net.type:
            fitting = FITTINGS[config.fitting_net.type].complete(config.fitting_net, before.fitting_net)
            config = config.model_copy(update={"fitting_net": fitting})
        return config, warnings

    @classmethod
    def is_complete(cls, config: StandardConfig) -> bool:
        return DESCRIPTORS[config.descriptor.type].is_complete(config.descriptor)

    @property
    def needs(self) -> Needs:
        f = self.fitting
        pairs = tuple((a, b) for a, b in self.config.pair_exclude_types)
        return Needs(len(self.type_map), self.descriptor.limit, pairs, f.numb_fparam, f.numb_aparam, f.default_fparam)

    def parts(self) -> dict[str, nn.Module]:
        return {"descriptor": self.descriptor, "fitting-net": self.fitting}

    # ---- from the data, before and while training

    def fit_statistics(self, sample: Sample) -> list[str]:
        self.descriptor.fit_statistics(sample)
        lines = self.fitting.fit_statistics(sample, self.config)
        self.config = self.config.model_copy(update={"fitting_net": self.fitting.config})  # with what the data gave
        return lines

    def fit_input(self, sample: Sample) -> None:
        self.fitting.fit_input(sample, self.descriptor.alone)
        self.config = self.config.model_copy(update={"fitting_net": self.fitting.config})

    def change_bias(self, sample: Sample, mode: str = "change") -> list[str]:
        if "energy" not in self.outputs:
            raise UserError(f"A fitting of type {self.fitting.config.type!r} has no energy bias to change.")
        rows = []
        for batch in sample.batches():
            if "energy" in batch.labels:
                with torch.no_grad():
                    predicted = self(batch, ("energy",))["energy"] if mode == "change" else 0.0
                rows.append(np.append(batch.type_counts, (batch.labels["energy"] - predicted).cpu().numpy()))
        nt = len(self.type_map)
        table = sample.rows(rows, nt + 1)
        if len(table) == 0:
            raise UserError("The energy bias cannot be fitted: no system has energy labels.")
        return self.fitting.change_bias(table[:, :nt], table[:, nt], self.config.atom_exclude_types, mode)

    def refit(self, sample: Sample) -> list[str]:
        """The last layer of the fitting nets and the bias, see refit.py."""
        f = self.fitting
        if not isinstance(f, EnerFitting) or not f.config.neuron:
            return self.change_bias(sample)
        nt, unknowns = len(self.type_map), len(f.nets) * f.config.neuron[-1]
        if any(f.vacuum) or self.config.atom_exclude_types or not f.trainable[-1] or unknowns > UNKNOWNS:
            return self.change_bias(sample)
        rows = [row for group, batch in sample.groups() for row in self.linear_rows(group, batch)]
        table = sample.rows(rows, Equations.width(nt, unknowns))
        if not np.isfinite(table).all():
            raise UserError("the model, or a label of the data, is not finite: nothing is fitted.")
        equations = Equations.of_table(table, nt)
        delta = equations.solve(f.last_layer())
        f.change_last_layer(delta)
        lines = [f"last layer fitted to {len(equations.x)} energies and {len(equations.x_dot)} derivatives of them"]
        if len(equations.x) > 0:
            lines += f.change_bias(equations.counts, equations.missing - equations.x @ delta, [], "change")
        return lines

    def linear_rows(self, group: list[tuple[int, int]], batch: Batch) -> Iterator[np.ndarray]:
        """Rows of Equations of the frames of a batch."""
        assert isinstance(self.fitting, EnerFitting)
        v, sweep = signs(group, batch), self.sweep(batch, ("energy", "forces"))  # v (p, N, 3)
        if sweep is not None:
            energy, forces, (a, a_dot) = sweep.outputs["energy"], sweep.outputs["forces"], sweep.hidden_and_tangents(v)
        else:
            energy, forces, a, a_dot = self.linear_terms(batch, v)
        x, x_dot = self.fitting.sums_of_frames(a, batch), self.fitting.sums_of_frames(a_dot, batch)
        counts = torch.zeros(batch.nframes, len(self.type_map), dtype=torch.float64, device=energy.device)
        of_type = batch.frame * counts.shape[1] + batch.type
        counts.view(-1).index_add_(0, of_type, energy.new_ones(len(of_type)))
        if "energy" in batch.labels:
            missing = batch.labels["energy"] - energy
            yield from Equations.rows(*(to_numpy(y) for y in (counts, x, missing)))
        if "force" in batch.labels:
            lacking = batch.labels["force"] - forces
            for one, u in zip(x_dot, v, strict=True):
                of_frame = energy.new_zeros(batch.nframes).index_add_(0, batch.frame, -(lacking * u).sum(1))
                yield from Equations.rows(*(to_numpy(y) for y in (torch.zeros_like(counts), one, of_frame)))

    def linear_terms(self, batch: Batch, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """E (B,), F (N, 3), what the last layer is given (N, H) and its tangents (p, N, H) along displacements v."""
        assert isinstance(self.fitting, EnerFitting)
        i, j = batch.edges.i, batch.edges.j
        with torch.enable_grad(), not_trained(self):
            D, pull = self.descriptor.with_pull(batch, batch.edges.r)
            e, gradient = self.fitting.with_gradient(D.detach(), batch)
            slope = pull(gradient.detach())  # ∂E/∂r_e
            any_gradient = torch.zeros_like(D).requires_grad_()
            linear = pull(any_gradient)  # whose transpose is the tangent of D
            along = [(linear * (u[j] - u[i])).sum() for u in v]  # plain numbers: for others torch imports a compiler
            dots = (torch.autograd.grad(one, any_gradient, retain_graph=True)[0] for one in along)
            a, a_dot = self.fitting.hidden_and_tangents(D.detach(), dots, batch)
        energy = e.new_zeros(batch.nframes).index_add_(0, batch.frame, e.detach())
        return energy, AtomsOfEdges.apply(slope.detach(), batch.edges, len(batch.type)), a, a_dot

    def set_bias(self, values: np.ndarray) -> None:
        self.fitting.set_bias(values)

    def observed_types(self) -> list[str]:
        if self.observed is not None:
            return self.observed
        return [name for name, seen in zip(self.type_map, self.descriptor.observed(), strict=True) if seen]

    def prepare(self, table: TableConfig) -> None:
        self.descriptor.prepare(table, self.min_nbor_dist)

    def refresh(self) -> str | None:
        return self.descriptor.refresh()

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), **self.descriptor.numbers()}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        super().set_numbers(numbers)
        self.descriptor.set_numbers(numbers)

    # ---- the equation

    def forward(self, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
        if "descriptor" in wanted:
            D = self.descriptor.alone(batch).double()
            rest = [name for name in wanted if name != "descriptor"]
            return {"descriptor": D, **(self(batch, rest) if rest else {})}
        if isinstance(self.fitting, EnergyFitting):
            return super().forward(batch, wanted)
        if self.fitting.vectors:
            D, vectors = self.descriptor.with_vectors(batch, batch.edges.r)
        else:
            D, vectors = self.descriptor.alone(batch), None
        return self.fitting.predict(D, vectors, batch, wanted)

    def energies(self, batch: Batch, r: Tensor) -> Tensor:
        assert isinstance(self.fitting, EnergyFitting)
        return self.kept(self.fitting(self.descriptor(batch, r), batch), batch)

    def energies_alone(self, batch: Batch) -> Tensor:
        assert isinstance(self.fitting, EnergyFitting)
        return self.kept(self.fitting(self.descriptor.alone(batch), batch), batch)

    @cached_property
    def fused(self) -> Fused | None:
        return Fused(self) if Fused.suits(self) else None

    def sweep(self, batch: Batch, wanted: Collection[str]) -> Sweep | None:
        return None if self.fused is None else self.fused.sweep(batch, wanted)

    def kept(self, e: Tensor, batch: Batch) -> Tensor:
        return e * self.keep[batch.type] if self.config.atom_exclude_types else e

    def energies_and_gradient(self, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.fitting, EnergyFitting)
        D, pull = self.descriptor.with_pull(batch, r)
        e, gradient = self.fitting.with_gradient(D, batch)
        if self.config.atom_exclude_types:
            keep = self.keep[batch.type]
            e, gradient = e * keep, gradient * keep[:, None].to(gradient.dtype)
        return e, pull(gradient)

    # ---- in files

    def to_tree(self) -> dict[str, Any]:
        """bias_τ goes to the fitting, with out_bias = 0 and out_std = 1, unless the fitting says otherwise."""
        config, (out_bias, out_std) = self.config, self.fitting.out_statistics()
        return {
            "@class": "Model",
            "type": "standard",
            "@version": 2,
            "type_map": list(self.type_map),
            "descriptor": self.descriptor.to_tree(list(self.type_map)),
            "fitting": silenced(self.fitting.to_tree(list(self.type_map)), config.atom_exclude_types),
            "atom_exclude_types": list(config.atom_exclude_types),
            "pair_exclude_types": [list(pair) for pair in config.pair_exclude_types],
            "rcond": getattr(config.fitting_net, "rcond", None),
            "preset_out_bias": config.preset_out_bias,
            "@variables": {"out_bias": out_bias[None], "out_std": out_std[None]},
        }

    def caveats(self) -> list[str]:
        found = self.descriptor.caveats()
        if self.config.pair_exclude_types:
            found.append("pair_exclude_types: DeePMD-kit's TensorFlow backend (.pb) does not have it")
        if self.config.atom_exclude_types and self.fitting.mixed_types:
            found.append("atom_exclude_types: as .pb (TensorFlow) the model has the energies of these atoms too")
        return found

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], script: dict[str, Any], source: str) -> dict[str, Any]:
        parts = {
            "descriptor": cls.section_of("descriptor", tree["descriptor"], DESCRIPTORS, source),
            "fitting_net": cls.section_of("fitting_net", tree["fitting"], FITTINGS, source),
        }
        for name, part in parts.items():
            seed = (script.get(name) or {}).get("seed")
            if seed is not None:
                part["seed"] = seed
        excluded = set(tree["fitting"].get("exclude_types") or ()) - set(tree.get("atom_exclude_types") or ())
        if excluded and "sel_type" not in parts["fitting_net"]:
            raise UserError(
                f"{source}: 'exclude_types' of the fitting is not supported; use the model's atom_exclude_types."
            )
        section = {k: v for k, v in script.items() if k.startswith("data_") and k in cls.Config.model_fields}
        for name in ("type_map", "pair_exclude_types", "atom_exclude_types", "preset_out_bias"):
            if tree.get(name) is not None:
                section[name] = tree[name]
        return {"type": "standard", **section, **parts}

    @staticmethod
    def section_of(key: str, tree: dict[str, Any], parts: Any, source: str) -> dict[str, Any]:
        part = part_named(key, tree.get("type"), parts, source)
        return part.section_from_tree(tree, source) | {"type": part.Config.model_fields["type"].default}

    def load_tree(self, tree: dict[str, Any], backend: str | None, source: str) -> None:
        out = tree.get("@variables") or {}
        out_std = out.get("out_std")
        if backend == "TensorFlow" and out_std is not None and not np.all(out_std == 1.0):
            raise UserError(
                f"{source}: written by DeePMD-kit's TensorFlow backend with out_std = {np.ravel(out_std).tolist()}. "
                "Only out_std = 1 can be read, because the backends disagree on its meaning."
            )
        self.descriptor.load_tree(tree["descriptor"], source)
        self.fitting.load_out_std(out_std, source)
        self.fitting.load_tree(tree["fitting"], out.get("out_bias"), source)

    @classmethod
    def section_from_pt(cls, params: dict[str, Any], source: str) -> dict[str, Any]:
        """The keys of the section that are known here; the parts have to be of known types."""
        if "descriptor" not in params:
            raise UserError(f"{source}: model type '{params.get('type')}' is not supported. Supported: standard.")
        for name in ("spin", "use_srtab", "modifier", "type_embedding"):
            if params.get(name):
                raise UserError(f"{source}: model/{name} is not supported.")
        section = {k: v for k, v in params.items() if k in cls.Config.model_fields}
        descriptor = part_named("descriptor", params["descriptor"].get("type"), DESCRIPTORS, source)
        section["descriptor"] = descriptor.section_from_pt(params["descriptor"], source)
        fitting = part_named("fitting_net", params["fitting_net"].get("type", "ener"), FITTINGS, source)
        section["fitting_net"] = {k: v for k, v in params["fitting_net"].items() if k in fitting.Config.model_fields}
        if params["fitting_net"].get("dim_case_embd"):
            raise UserError(f"{source}: model/fitting_net/dim_case_embd is not supported.")
        return section

    def load_pt(self, state: dict[str, Tensor], source: str) -> None:
        self.descriptor.load_pt(state, "atomic_model.descriptor", source)
        found = (state.get(f"atomic_model.{name}") for name in ("out_bias", "out_std"))
        out_bias, out_std = (None if x is None else x.detach().cpu().numpy() for x in found)
        self.fitting.load_out_std(out_std, source)
        self.fitting.load_pt(state, "atomic_model.fitting_net", out_bias, source)
        distance = state.get("min_nbor_dist")
        self.min_nbor_dist = None if distance is None or float(distance) <= 0.0 else float(distance)


@contextmanager
def not_trained(model: nn.Module) -> Iterator[None]:
    """Nobody reads the gradients of its parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def signs(group: list[tuple[int, int]], batch: Batch) -> Tensor:
    """(PROBES, N, 3) of ±1 at random, the same whenever these frames come together."""
    rng = np.random.default_rng(group[0])
    return batch.edges.r.new_tensor(rng.choice([-1.0, 1.0], (PROBES, len(batch.type), 3)))


def silenced(fitting: dict[str, Any], excluded: list[int]) -> dict[str, Any]:
    """The tree of an energy fitting with zeros for the types that are left out.

    DeePMD-kit's TensorFlow backend adds their energies, all others (and we) leave them out: with zeros they agree.
    """
    bias = fitting["@variables"].get("bias_atom_e")
    if not excluded or bias is None or fitting.get("mixed_types") or "nets" not in fitting:
        return fitting
    for t in excluded:
        last = fitting["nets"]["networks"][t]["layers"][-1]["@variables"]
        last |= {name: np.zeros_like(last[name]) for name in ("w", "b")}
    left = np.isin(np.arange(len(bias)), excluded, invert=True)
    return {**fitting, "@variables": {**fitting["@variables"], "bias_atom_e": bias * left[:, None]}}
