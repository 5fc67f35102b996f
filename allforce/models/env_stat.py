"""Mean and deviation of the environment matrix, with which descriptors normalise their input.

    davg (nt, 4) = (mean of s, 0, 0, 0)     dstd (nt, 4) = (σ of s, σ of the other three entries together, thrice)

of each centre type over all slots for neighbours: empty slots and excluded pairs count as zeros.
"""

from __future__ import annotations

import json
from hashlib import sha1
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allforce.data.sample import Sample
from allforce.errors import UserError
from allforce.models.envmat import environment
from allforce.models.serial import copy_array, to_numpy
from allforce.neighbors import visible_pairs

LEAST_STD = 0.01  # a smaller deviation is taken for this one
UNSEEN_STD = 0.1  # of a type without atoms in the data


def environment_statistics(
    sample: Sample, config: Any, sel: list[int] | int, kind: str = "se_a"
) -> tuple[np.ndarray, np.ndarray]:
    """davg, dstd (nt, 4) of the sample, or from the stat file. kind: DeePMD-kit's short name of the descriptor."""
    nt, slots = sample.ntypes, sel if isinstance(sel, int) else sum(sel)
    key = _hash(config, sel, [list(p) for p in sample.needs.excluded_pairs], nt, kind)
    names = [f"{key}/{part}_{t}" for t in range(nt) for part in "ra"]
    known = sample.file.get(*names)
    sums = environment_sums(sample, config, slots) if known is None else np.array(known).reshape(nt, 2, 3)
    if known is None:
        sample.file.put(**dict(zip(names, sums.reshape(-1, 3), strict=True)))
    return normalisation(sums, config.set_davg_zero)


def environment_sums(sample: Sample, config: Any, slots: int) -> np.ndarray:
    """(nt, 2, 3): of each centre type, for the radial and the pooled angular entries, [count, sum, sum of squares]."""
    nt = sample.ntypes
    visible = visible_pairs(nt, config.exclude_types).astype(np.float64)

    def rows():
        for frame, (i, j, r) in sample.prepared():
            R = environment(torch.from_numpy(r), config.rcut_smth, config.rcut, config.env_protection).numpy()
            centre = frame.type[i]
            if config.exclude_types:
                R = R * visible[centre, frame.type[j]][:, None]
            s, x, y, z = R.T  # (E,) each
            sums = np.zeros((nt, 2, 3))
            sums[:, :, 0] = np.bincount(frame.type, minlength=nt)[:, None] * slots * [1, 3]
            for part, total, squares in ((0, s, s * s), (1, x + y + z, x * x + y * y + z * z)):
                sums[:, part, 1] = np.bincount(centre, total, minlength=nt)
                sums[:, part, 2] = np.bincount(centre, squares, minlength=nt)
            yield sums.ravel()

    return sample.sum_rows(rows(), nt * 6).reshape(nt, 2, 3)


def normalisation(sums: np.ndarray, set_davg_zero: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """davg, dstd (nt, 4) of the sums."""
    count, total, squares = np.moveaxis(sums, 2, 0)  # (nt, 2) each
    n = np.maximum(count, 1)
    mean = total / n
    std = np.maximum(np.sqrt(np.maximum(squares / n - mean**2, 0)), LEAST_STD)
    std[count == 0] = UNSEEN_STD
    davg = np.zeros((len(sums), 4))
    if not set_davg_zero:
        davg[:, 0] = mean[:, 0]
    return davg, std[:, [0, 1, 1, 1]]


def _hash(config: Any, sel: list[int] | int, excluded: list[list[int]], ntypes: int, kind: str) -> str:
    """The name of DeePMD-kit's stat file for these statistics."""
    geometry: dict[str, Any] = {
        "type": kind,
        "ntypes": ntypes,
        "rcut": round(config.rcut, 2),
        "rcut_smth": round(config.rcut_smth, 2),
        "nsel": sel if isinstance(sel, int) else sum(sel),
        "sel": [sel] if isinstance(sel, int) else sel,
        "mixed_types": isinstance(sel, int),
    }
    # not part of DeePMD-kit's hash; the sums depend on them, so they are added where they are not the default
    if config.exclude_types or config.env_protection or excluded:
        geometry["exclude_types"] = sorted(sorted(p) for p in config.exclude_types)
        geometry["pair_exclude_types"] = np.argwhere(~visible_pairs(ntypes, excluded)).tolist()
        geometry["env_protection"] = config.env_protection
    return sha1(json.dumps(geometry).encode()).hexdigest()


def types_with_atoms(dstd: Tensor) -> list[bool]:
    """Which types had atoms in the data.

    A type without atoms has one default in all columns of dstd: 0.1, or 1/rcut by DeePMD-kit's TensorFlow backend.
    With atoms the radial and the angular deviation differ, unless both are at the floor for want of neighbours. The
    energy bias is no such sign: it may be given by hand, and without energies in the data it is 0.
    """
    radial, angular = to_numpy(dstd)[:, :2].T
    return list((radial != angular) | np.isclose(radial, LEAST_STD))


def slots(x: Tensor, count: int) -> np.ndarray:
    """(nt, 4) -> (nt, count, 4), as DeePMD-kit keeps statistics."""
    return np.repeat(to_numpy(x)[:, None, :], count, axis=1)


def load_slots(davg: Tensor, dstd: Tensor, stored: tuple[Any, Any], count: int, source: str) -> None:
    """(nt, count, 4) arrays of a file -> (nt, 4): equal in all slots, davg of x, y, z zero, their dstd equal."""
    mean, std = (np.asarray(x, dtype=np.float64) for x in stored)
    shape = (len(davg), count, 4)
    for name, found in (("davg", mean), ("dstd", std)):
        if found.shape != shape:
            raise UserError(f"{source}: {name} has shape {found.shape}, expected {shape}.")
        if not np.array_equal(found, np.broadcast_to(found[:, :1], shape)):
            raise UserError(f"{source}: {name} differs between neighbour slots, which is not supported.")
    if np.any(mean[..., 1:]) or np.any(std[..., 1] != std[..., 2]) or np.any(std[..., 1] != std[..., 3]):
        raise UserError(
            f"{source}: statistics that differ between x, y and z (davg {mean[:, 0].tolist()}, dstd "
            f"{std[:, 0].tolist()}) break the rotational symmetry and are not supported."
        )
    copy_array(davg, mean[:, 0], f"{source}: davg")
    copy_array(dstd, std[:, 0], f"{source}: dstd")
