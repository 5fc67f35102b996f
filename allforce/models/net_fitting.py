"""What fittings by nets have in common: one net per type of the centre atom, or one for all where the descriptor
holds the type, and the frame and atomic parameters beside the descriptor.

    y_i = net_τ([D_i, (fparam − avg)/std, (aparam − avg)/std])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from allforce.config.keys import (
    ACTIVATION_HELP,
    PRECISION_HELP,
    SEED_HELP,
    Activation,
    Int,
    Precision,
    Seed,
    Widths,
)
from allforce.config.section import WIDEST, Section, key
from allforce.data.batch import Batch
from allforce.data.sample import Sample
from allforce.models.fitting import Fitting
from allforce.models.layers import DTYPES, Net, generator
from allforce.models.serial import collection, copy_array, copy_nets, nets_from_pt, precision_of, refuse, to_numpy

STATISTICS = ("fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std")
LARGEST = 100.0  # factor of a first layer: where all descriptors are alike, there is nothing to make larger


class NetConfig(Section):
    """Keys of every fitting by nets."""

    type: str = key(..., "What is fitted.")
    numb_fparam: Int = key(0, "Number of frame parameters (fparam.npy).", ge=0, le=WIDEST)
    numb_aparam: Int = key(0, "Number of atomic parameters (aparam.npy).", ge=0, le=WIDEST)
    default_fparam: list[float] | None = key(
        None, "Frame parameters of data that have none; numb_fparam numbers.", free=True
    )
    neuron: Widths = key(
        [120, 120, 120],
        "Widths of the hidden layers. Layers of equal width get a skip connection.",
        aliases=("n_neuron",),
    )
    activation_function: Activation = key("tanh", ACTIVATION_HELP)
    precision: Precision = key("default", PRECISION_HELP)
    resnet_dt: bool = key(True, "A trained step width in the skip connections.")
    seed: Seed = key(None, SEED_HELP, free=True)
    input_scale: float | None = key(
        None,
        "Before training, the first layer is changed so that its products with the descriptors of the training data "
        "have mean 0 and this deviation; left out: it stays as drawn.",
        gt=0,
        free=True,
        own=True,
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        flags, layers = getattr(self, "trainable", True), len(self.neuron) + 1
        if isinstance(flags, list) and len(flags) != layers:
            yield (
                "trainable",
                f"has {len(flags)} entries; expected {layers}, one for each layer of neuron and one for the output "
                f"layer",
            )
        if self.default_fparam is not None and len(self.default_fparam) != self.numb_fparam:
            yield "default_fparam", f"has {len(self.default_fparam)} numbers, but numb_fparam is {self.numb_fparam}"


class NetFitting(Fitting):
    """The nets and their input."""

    nets: list[Net]
    fparam_avg: Tensor  # (numb_fparam,)
    fparam_inv_std: Tensor
    aparam_avg: Tensor  # (numb_aparam,)
    aparam_inv_std: Tensor

    def __init__(self, config: Any, ntypes: int, dim: int, dim_vectors: int = 0, mixed_types: bool = False):
        super().__init__(config, ntypes, dim, dim_vectors, mixed_types)
        self.dtype = DTYPES[config.precision]
        self.numb_fparam, self.numb_aparam = config.numb_fparam, config.numb_aparam
        self.default_fparam = config.default_fparam
        extra = config.numb_fparam + (0 if self.aparam_is_mask else config.numb_aparam)
        act, dt = config.activation_function, config.resnet_dt
        self.nets = nn.ModuleList(  # type: ignore[assignment]
            Net(dim + extra, config.neuron, act, dt, self.dtype, generator(config.seed, 1, t), self.net_width)
            for t in range(1 if mixed_types else ntypes)
        )
        for net in self.nets:
            for layer, flag in zip(net.layers, self.trainable, strict=True):
                layer.requires_grad_(flag)
        for name, n in (("fparam", self.numb_fparam), ("aparam", self.numb_aparam)):
            self.register_buffer(f"{name}_avg", torch.zeros(n, dtype=torch.float64))
            self.register_buffer(f"{name}_inv_std", torch.ones(n, dtype=torch.float64))

    @property
    def net_width(self) -> int:
        """Outputs of a net."""
        return 1

    @property
    def aparam_is_mask(self) -> bool:
        return getattr(self.config, "use_aparam_as_mask", False)

    @property
    def trainable(self) -> list[bool]:
        """Of each layer."""
        flags = getattr(self.config, "trainable", True)
        return list(flags) if isinstance(flags, list) else [flags] * (len(self.config.neuron) + 1)

    # ---- the equation

    def parameters_of_atoms(self, batch: Batch) -> list[Tensor]:
        """Normalised frame and atomic parameters, each (N, ·)."""
        out = []
        if self.numb_fparam:
            assert batch.fparam is not None
            out.append(((batch.fparam - self.fparam_avg) * self.fparam_inv_std)[batch.frame])
        if self.numb_aparam and not self.aparam_is_mask:
            assert batch.aparam is not None
            out.append((batch.aparam - self.aparam_avg) * self.aparam_inv_std)
        return [p.to(self.dtype) for p in out]

    def inputs(self, D: Tensor, batch: Batch) -> tuple[Tensor, tuple[int, ...]]:
        """What the nets take (N, ·), and how many rows belong to each net."""
        x = D.to(self.dtype)
        if extra := self.parameters_of_atoms(batch):
            x = torch.cat([x, *extra], dim=1)
        return x, (len(x),) if self.mixed_types else batch.type_counts

    def values(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """y (N, net_width)."""
        return torch.cat([net(part) for net, part in zip(self.nets, x.split(counts), strict=True)])

    # ---- from the data

    @torch.no_grad()
    def fit_input(self, sample: Sample, describe: Callable[[Batch], Tensor]) -> None:
        """The first layer x w + b with mean b and deviation input_scale: w ← f w, b ← b − mean(D) w.

        As w ~ N(0, 1/√(in + out)), the deviation of D w is √(Σ variances of D / (in + out)).
        """
        if self.config.input_scale is None:
            return
        rows = (self.input_sums(describe(batch), batch) for _, batch in sample.groups())
        sums = sample.sum_rows(rows, len(self.nets) * (1 + 2 * self.dim)).reshape(len(self.nets), -1)
        for net, (count, *rest) in zip(self.nets, sums, strict=True):
            first, (mean, squares) = net.layers[0], np.reshape(rest, (2, self.dim)) / max(count, 1.0)
            deviation = np.sqrt(np.maximum(squares - mean**2, 0.0).sum() / sum(first.w.shape))
            if deviation > 0:
                w = first.w[: self.dim]
                w.mul_(min(self.config.input_scale / deviation, LARGEST))
                first.b.sub_(torch.from_numpy(mean).to(w) @ w)
        self.config = self.config.model_copy(update={"input_scale": None})  # done: not a property of the model

    def input_sums(self, D: Tensor, batch: Batch) -> np.ndarray:
        """Count, Σ D and Σ D² of the rows of each net, one after the other."""
        parts = [D] if self.mixed_types else D.split(batch.type_counts)
        sums = [torch.cat([x.new_tensor([len(x)]), x.sum(0), (x * x).sum(0)]) for x in (p.double() for p in parts)]
        return to_numpy(torch.cat(sums))

    def fit_statistics(self, sample: Sample, section: Any) -> list[str]:
        """Mean and 1/deviation of the frame and atomic parameters."""
        for name, width in (("fparam", self.numb_fparam), ("aparam", self.numb_aparam)):
            if width:
                sums = sample.file.once(name, partial(parameter_sums, sample, name, width))
                mean, inverse = parameter_normalisation(sums, section.data_stat_protect)
                getattr(self, f"{name}_avg").copy_(torch.from_numpy(mean))
                getattr(self, f"{name}_inv_std").copy_(torch.from_numpy(inverse))
        return []

    # ---- in files

    def to_tree(self, type_map: list[str]) -> dict[str, Any]:
        """What the trees of all of them have; the derived class adds its own."""
        c, width = self.config, self.net_width
        shared = {"activation_function": c.activation_function.lower(), "precision": precision_of(self.nets)}
        settings = {"out_dim": width, "neuron": list(c.neuron), "resnet_dt": c.resnet_dt, "bias_out": True, **shared}
        counts = {"fparam": self.numb_fparam, "aparam": self.numb_aparam}
        statistics = {n: to_numpy(getattr(self, n)) if counts[n[:6]] else None for n in STATISTICS}
        ndim = 0 if self.mixed_types else 1
        return {
            "@class": "Fitting",
            "type": c.type,
            "@version": 4,
            "ntypes": self.ntypes,
            "dim_descrpt": self.dim,
            "mixed_types": self.mixed_types,
            "neuron": list(c.neuron),
            "resnet_dt": c.resnet_dt,
            "numb_fparam": self.numb_fparam,
            "numb_aparam": self.numb_aparam,
            "dim_case_embd": 0,
            "default_fparam": c.default_fparam,
            "rcond": None,
            "tot_ener_zero": False,
            "trainable": self.trainable,
            **shared,
            "layer_name": None,
            "use_aparam_as_mask": self.aparam_is_mask,
            "spin": None,
            "exclude_types": [],
            "nets": collection(self.nets, "fitting_network", ndim, self.ntypes, settings, self.trainable),
            "@variables": {"bias_atom_e": np.zeros((self.ntypes, width)), **statistics, "case_embd": None},
            "type_map": type_map,
        }

    @classmethod
    def section_from_tree(cls, tree: dict[str, Any], source: str) -> dict[str, Any]:
        refuse(tree, {"spin": None, "tot_ener_zero": False, "layer_name": None, "dim_case_embd": 0}, source)
        return super().section_from_tree(tree, source)

    def load_tree(self, tree: dict[str, Any], out_bias: Any, source: str) -> None:
        refuse(tree, {"mixed_types": self.mixed_types}, source)
        copy_nets(self.nets, tree["nets"]["networks"], f"{source}: fitting net")
        self.load_variables(tree["@variables"], out_bias, source)

    def load_pt(self, state: dict[str, Tensor], prefix: str, out_bias: Any, source: str) -> None:
        copy_nets(self.nets, nets_from_pt(state, f"{prefix}.filter_layers", source), f"{source}: fitting net")
        names = ("bias_atom_e", "scale", "constant_matrix", *STATISTICS)
        stored = {n: state.get(f"{prefix}.{n}") for n in names}
        self.load_variables({n: None if x is None else to_numpy(x) for n, x in stored.items()}, out_bias, source)

    def load_variables(self, stored: dict[str, Any], out_bias: Any, source: str) -> None:
        """out_bias: what DeePMD-kit keeps beside the fitting."""
        for name in STATISTICS:
            if stored.get(name) is not None:
                copy_array(getattr(self, name), stored[name], f"{source}: {name}")


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
