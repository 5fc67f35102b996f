"""Statistics of the training data: neighbours, environment matrix, energy bias, frame and atomic parameters.

Every rank takes its share of the frames (r, r + W, …) and sums are reduced, so that nothing is done twice and the
result is the serial one to rounding. With sharding "partition" a rank takes all frames of its systems (`split` false).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from allforce.data.dataset import DataSet
from allforce.data.loader import Loader
from allforce.data.stat_file import StatFile
from allforce.data.system import System
from allforce.distributed.comm import Comm
from allforce.models.envmat import environment
from allforce.neighbors import check_distances, neighbor_list

ITEM = TypeVar("ITEM")
Sample = list[tuple[int, int]]  # (system, frame)
Predict = Callable[[Sample], Iterable[float]]  # energies of these frames

LEAST_STD = 0.01  # a smaller deviation is taken for this one
UNSEEN_STD = 0.1  # of a type without atoms in the data


class EnvironmentConfig(Protocol):
    """What the environment matrix needs of a descriptor's section of the input."""

    rcut: float
    rcut_smth: float
    env_protection: float
    exclude_types: Any
    set_davg_zero: bool


def stat_sample(dataset: DataSet, nbatch: int) -> Sample:
    """The first nbatch batches of every system (all, if it has fewer), frames as they are stored."""
    sizes = [min(s.nframes, nbatch * b) for s, b in zip(dataset.systems, dataset.batch_sizes, strict=True)]
    return [(i, k) for i, n in enumerate(sizes) for k in range(n)]


def share(items: Sequence[ITEM], comm: Comm, split: bool = True) -> Sequence[ITEM]:
    return items[comm.rank :: comm.size] if split else items


def _reduce(sums: np.ndarray, comm: Comm, op: str = "sum") -> np.ndarray:
    tensor = torch.from_numpy(np.ascontiguousarray(sums, dtype=np.float64))
    comm.all_reduce(tensor, op)
    return tensor.numpy()


def gather_rows(rows: np.ndarray, comm: Comm) -> np.ndarray:
    """The rows of all ranks, in an order that does not depend on who had which."""
    counts = comm.gather(len(rows))
    table = np.zeros((sum(counts), rows.shape[1]))
    start = sum(counts[: comm.rank])
    table[start : start + len(rows)] = rows
    table = _reduce(table, comm)
    return table[np.lexsort(table.T)]


# ---- neighbours


def neighbor_stat(
    systems: list[System], rcut: float, comm: Comm, split: bool = True, mixed: bool = False
) -> tuple[float | None, np.ndarray]:
    """Over all frames: the smallest distance (None without a pair) and the most neighbours of each type in rcut.

    mixed: of all types together.
    """
    frames = [(s, k) for s in systems for k in range(s.nframes)]
    ntypes = 1 if mixed else len(systems[0].type_map)
    least, most = np.inf, np.zeros(ntypes)
    for system, k in share(frames, comm, split):
        frame = system.frame(k).by_type()
        where = f"{system.name}, frame {k}"
        i, j, r = neighbor_list(frame.coord, frame.cell, rcut, where=where)
        least = min(least, check_distances(i, j, r, where, frame.order))
        neighbor = np.zeros_like(j) if mixed else frame.type[j]
        count = np.bincount(i * np.int64(ntypes) + neighbor, minlength=len(frame.type) * ntypes)
        most = np.maximum(most, count.reshape(-1, ntypes).max(axis=0, initial=0))
    most = _reduce(most, comm, "max").astype(np.int64)
    least = float(_reduce(np.array([least]), comm, "min")[0])
    return (least if np.isfinite(least) else None), most


def sel_auto(most: Iterable[int], sel: str) -> list[int]:
    """ "auto:f": f times the most neighbours of a type, truncated, then up to a multiple of 4; "auto" is "auto:1.1"."""
    factor = float(sel.partition(":")[2] or 1.1)
    return [4 * ((int(factor * int(n)) + 3) // 4) for n in most]


def sel_too_small(most: Iterable[int], sel: Sequence[int]) -> list[int]:
    """Types whose sel is below the most neighbours seen; sel 0 means that the type is left out on purpose."""
    return [t for t, (n, s) in enumerate(zip(most, sel, strict=True)) if 0 < s < n]


# ---- environment matrix


def envmat_sums(
    loader: Loader, config: EnvironmentConfig, sample: Sample, comm: Comm, split: bool = True
) -> np.ndarray:
    """(nt, 2, 3): of each centre type, for the radial and the pooled angular entries, [count, sum, sum of squares].

    Empty slots of sel and excluded pairs count as zeros.
    """
    assert loader.sel is not None
    nt = loader.ntypes
    seen = np.ones((nt, nt))
    for a, b in config.exclude_types:
        seen[a, b] = seen[b, a] = 0.0
    rows = []  # of each frame, so that the sum does not depend on who had which
    for system, k in share(sample, comm, split):
        frame, (i, j, r) = loader.frame(system, k)
        R = environment(torch.from_numpy(r), config.rcut_smth, config.rcut, config.env_protection).numpy()
        centre = frame.type[i]
        R = R * seen[centre, frame.type[j]][:, None]  # (E, 4)
        slots = np.bincount(frame.type, minlength=nt) * sum(loader.sel)
        sums = np.zeros((nt, 2, 3))
        for part, values in enumerate((R[:, :1], R[:, 1:])):
            sums[:, part, 0] = slots * values.shape[1]
            sums[:, part, 1] = np.bincount(centre, values.sum(axis=1), minlength=nt)
            sums[:, part, 2] = np.bincount(centre, (values**2).sum(axis=1), minlength=nt)
        rows.append(sums.ravel())
    return gather_rows(np.array(rows).reshape(-1, nt * 6), comm).sum(axis=0).reshape(nt, 2, 3)


def envmat_normalisation(sums: np.ndarray, set_davg_zero: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """davg (nt, 4) = (mean of s, 0, 0, 0) and dstd (nt, 4) = (σ_r, σ_a, σ_a, σ_a) of the sums."""
    count, total, squares = np.moveaxis(sums, 2, 0)  # (nt, 2) each
    n = np.maximum(count, 1)
    mean = total / n
    std = np.maximum(np.sqrt(np.maximum(squares / n - mean**2, 0)), LEAST_STD)
    std[count == 0] = UNSEEN_STD
    davg = np.zeros((len(sums), 4))
    if not set_davg_zero:
        davg[:, 0] = mean[:, 0]
    return davg, std[:, [0, 1, 1, 1]]


def envmat_stat(
    loader: Loader, config: EnvironmentConfig, sample: Sample, comm: Comm, split: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """davg, dstd (nt, 4) of the environment matrix."""
    return envmat_normalisation(envmat_sums(loader, config, sample, comm, split), config.set_davg_zero)


# ---- energy bias


@dataclass
class EnergyBias:
    bias: np.ndarray  # (nt,) eV
    std: np.ndarray  # (nt,)
    rmse: float | None  # eV per atom, of the regression; None without energies


def energy_bias(
    systems: list[System],
    sample: Sample,
    comm: Comm,
    preset: Sequence[float | None] | None = None,
    rcond: float | None = None,
    split: bool = True,
    atom_exclude: Sequence[int] = (),
) -> EnergyBias:
    """Energy of an atom of each type, by least squares over frames; atomic energies, where labelled, go before it.

    preset: energies that are given, None where they are not. atom_exclude: types without energy.
    """
    nt = len(systems[0].type_map)
    mine = share(sample, comm, split)
    atomic = np.zeros((3, nt))  # count, sum, sum of squares of the atomic labels
    for i, k in mine:
        if "atom_ener" in systems[i].label_names:
            frame = systems[i].frame(k)
            real = frame.type >= 0
            value = frame.labels["atom_ener"][real, 0]
            atomic += [np.bincount(frame.type[real], w, minlength=nt) for w in (np.ones_like(value), value, value**2)]
    fit = fit_frames(systems, mine, comm, preset, rcond, atom_exclude)
    count, total, squares = _reduce(atomic, comm)
    known = count > 0
    if preset is not None:
        known &= np.array([v is None for v in preset])
    mean = total / np.maximum(count, 1)
    std = np.sqrt(np.maximum(squares / np.maximum(count, 1) - mean**2, 0))
    return EnergyBias(np.where(known, mean, fit.bias), np.where(known, std, fit.std), fit.rmse)


def fit_frames(
    systems: list[System],
    mine: Sequence[tuple[int, int]],
    comm: Comm,
    preset: Sequence[float | None] | None = None,
    rcond: float | None = None,
    atom_exclude: Sequence[int] = (),
    predict: Predict | None = None,
) -> EnergyBias:
    """Least squares of the energies of all workers' (system, frame) pairs, or of what `predict` misses of them."""
    nt = len(systems[0].type_map)
    mine = [(i, k) for i, k in mine if "energy" in systems[i].label_names]
    rows = np.zeros((len(mine), nt + 1))  # atoms of each type, energy
    for row, (i, k) in zip(rows, mine, strict=True):
        frame = systems[i].frame(k)
        row[:nt], row[nt] = np.bincount(frame.type[frame.type >= 0], minlength=nt), frame.labels["energy"].item()
    if predict is not None:
        rows[:, nt] -= list(predict(mine))
    table = gather_rows(rows, comm)
    table[:, list(atom_exclude)] = 0
    return fit_energy_bias(table[:, :nt], table[:, nt], preset, rcond)


def fit_energy_bias(
    counts: np.ndarray, energy: np.ndarray, preset: Sequence[float | None] | None = None, rcond: float | None = None
) -> EnergyBias:
    """Least squares of energy (F,) = counts (F, nt) · bias, of smallest norm where the compositions leave it open."""
    nt = counts.shape[1]
    given = np.array([np.nan if v is None else v for v in preset or [None] * nt], dtype=np.float64)
    fixed = np.isfinite(given)
    bias = np.where(fixed, given, 0.0)
    if len(energy) == 0:
        return EnergyBias(bias, np.ones(nt), None)
    solved = np.linalg.lstsq(np.where(fixed, 0.0, counts), energy - counts @ bias, rcond=rcond)[0]
    bias = np.where(fixed, bias, solved)
    residual = energy - counts @ bias
    rmse = float(np.sqrt(np.mean((residual / np.maximum(counts.sum(axis=1), 1)) ** 2)))
    return EnergyBias(bias, np.full(nt, residual.std()), rmse)


# ---- frame and atomic parameters


def fparam_sums(loader: Loader, sample: Sample, comm: Comm, split: bool = True) -> np.ndarray:
    """(numb_fparam, 3): [count, sum, sum of squares] over frames."""
    return _parameter_sums(loader, sample, comm, split, "fparam", loader.numb_fparam)


def aparam_sums(loader: Loader, sample: Sample, comm: Comm, split: bool = True) -> np.ndarray:
    """(numb_aparam, 3): [count, sum, sum of squares] over atoms."""
    return _parameter_sums(loader, sample, comm, split, "aparam", loader.numb_aparam)


def _parameter_sums(loader: Loader, sample: Sample, comm: Comm, split: bool, name: str, width: int) -> np.ndarray:
    rows = []
    for i, k in share(sample, comm, split):
        value = getattr(loader.frame(i, k)[0], name).reshape(-1, width)
        rows.append(np.stack([np.full(width, len(value)), value.sum(axis=0), (value**2).sum(axis=0)], axis=1).ravel())
    return gather_rows(np.array(rows).reshape(-1, width * 3), comm).sum(axis=0).reshape(width, 3)


def parameter_normalisation(sums: np.ndarray, protect: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """(mean, 1/std) of parameters; a deviation below `protect` is taken for it."""
    count, total, squares = sums.T
    mean = total / np.maximum(count, 1)
    std = np.sqrt(np.maximum(squares / np.maximum(count, 1) - mean**2, 0))
    return mean, 1 / np.maximum(std, protect)


def fparam_stat(
    loader: Loader, sample: Sample, comm: Comm, protect: float = 0.01, split: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """(mean, 1/std) of the frame parameters, (numb_fparam,) each."""
    return parameter_normalisation(fparam_sums(loader, sample, comm, split), protect)


def aparam_stat(
    loader: Loader, sample: Sample, comm: Comm, protect: float = 0.01, split: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """(mean, 1/std) of the atomic parameters, (numb_aparam,) each."""
    return parameter_normalisation(aparam_sums(loader, sample, comm, split), protect)


# ---- all of them, with the cache file


@dataclass
class Statistics:
    davg: np.ndarray  # (nt, 4)
    dstd: np.ndarray  # (nt, 4)
    energy: EnergyBias
    fparam: tuple[np.ndarray, np.ndarray] | None  # mean and 1/std, (numb_fparam,) each
    aparam: tuple[np.ndarray, np.ndarray] | None


def statistics(
    loader: Loader, model: Any, comm: Comm, stat_file: str | None = None, split: bool = True, read_only: bool = False
) -> Statistics:
    """What a model takes from the data before training. model: the section `model` of the input, sel resolved.

    A given stat_file is read where it has an entry, and gets the entries that it did not have, unless read_only.
    """
    descriptor, fitting, dataset = model.descriptor, model.fitting_net, loader.dataset
    sample = stat_sample(dataset, model.data_stat_nbatch)
    file = StatFile(stat_file, dataset.type_map, comm)
    unseen = [] if loader.seen is None else np.argwhere(~loader.seen).tolist()
    sums = file.environment(
        descriptor, loader.sel, unseen, lambda: envmat_sums(loader, descriptor, sample, comm, split)
    )
    preset = (model.preset_out_bias or {}).get("energy") or fitting.atom_ener or None
    energy = file.get("bias_atom_energy", "std_atom_energy")
    if energy is None or preset is not None:
        found = energy_bias(dataset.systems, sample, comm, preset, fitting.rcond, split, model.atom_exclude_types)
        if energy is None:
            file.put(bias_atom_energy=found.bias[:, None], std_atom_energy=found.std[:, None])
    else:
        found = EnergyBias(energy[0][:, 0], energy[1][:, 0], None)
    fparam = aparam = None
    if loader.numb_fparam:
        table = file.once("fparam", lambda: fparam_sums(loader, sample, comm, split))
        fparam = parameter_normalisation(table, model.data_stat_protect)
    if loader.numb_aparam:
        table = file.once("aparam", lambda: aparam_sums(loader, sample, comm, split))
        aparam = parameter_normalisation(table, model.data_stat_protect)
    file.save(read_only)
    return Statistics(*envmat_normalisation(sums, descriptor.set_davg_zero), found, fparam, aparam)
