"""The energy of an atom of each type: least squares of the energies of frames over their numbers of atoms."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from allforce.data.sample import Sample


@dataclass
class EnergyBias:
    bias: np.ndarray  # (nt,) eV
    std: np.ndarray  # (nt,)
    rmse: float | None  # eV per atom, of the regression; None without energies


def energy_bias(
    sample: Sample,
    preset: Sequence[float | None] | None = None,
    rcond: float | None = None,
    excluded: Collection[int] = (),
) -> EnergyBias:
    """By least squares over frames; atomic energies, where labelled, go before it.

    preset: energies that are given, None where they are not. excluded: types without energy.
    """
    nt = sample.ntypes
    atomic = np.zeros((3, nt))  # count, sum, sum of squares of the atomic labels
    rows = []  # atoms of each type, energy
    for frame in sample.frames():
        real = frame.type >= 0
        if "atom_ener" in frame.labels:
            value = frame.labels["atom_ener"][real, 0]
            atomic += [np.bincount(frame.type[real], w, minlength=nt) for w in (np.ones_like(value), value, value**2)]
        if "energy" in frame.labels:
            rows.append(np.append(np.bincount(frame.type[real], minlength=nt), frame.labels["energy"].item()))
    table = sample.rows(rows, nt + 1)
    table[:, list(excluded)] = 0
    fit = fit_energy_bias(table[:, :nt], table[:, nt], preset, rcond)
    count, total, squares = sample.sum(atomic)
    known = count > 0
    if preset is not None:
        known &= np.array([v is None for v in preset])
    mean = total / np.maximum(count, 1)
    std = np.sqrt(np.maximum(squares / np.maximum(count, 1) - mean**2, 0))
    return EnergyBias(np.where(known, mean, fit.bias), np.where(known, std, fit.std), fit.rmse)


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
