"""Files of a small MiMiC run: four waters and two ions, as GROMACS, MiMiCPy and CPMD write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from allforce.data.mimic import MimicFiles
from allforce.data.mpt import Molecule, write_mpt
from allforce.data.trr import write_trr

WATER = Molecule(
    ["O", "H", "H"], ["OW", "HW1", "HW2"], ["ow", "hw", "hw"], ["SOL"] * 3, [1] * 3, [-0.8, 0.4, 0.4], [16.0, 1.0, 1.0]
)
SODIUM = Molecule(["NA"], ["NA"], ["Na"], ["NA"], [1], [1.0], [23.0])
ELEMENTS = ["O", "H", "H"] * 3 + ["Na"] + ["O", "H", "H"] + ["Na"]  # water comes twice in the system's order


def run_frames(steps=range(1, 6), natoms=14, seed=0) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [
        {
            "step": step,
            "time": 0.5 * step,
            "box": np.diag([1.0, 1.1, 1.2]) + 0.01 * step,
            "x": rng.uniform(0, 1, (natoms, 3)),
            "v": rng.normal(size=(natoms, 3)),
            "f": 1000 * rng.normal(size=(natoms, 3)),
        }
        for step in steps
    ]


def energy(step: int) -> float:
    return -68.0 - 0.001 * step  # Hartree


def energies_text(steps=range(1, 6)) -> str:
    return "".join(
        f"{n:10d} {0.01:12.6f} {300 + n:12.3f} {energy(n):16.9f} {energy(n) + 0.05:16.9f} {energy(n) + 0.06:16.9f} "
        f"{0.1:12.5f} {1.5:9.2f}\n"
        for n in steps
    )


def write_run(folder: Path, name: str = "run", frames=None, energies=None, double=False, **how) -> MimicFiles:
    mpt, trr, text = (folder / f"{name}{end}" for end in (".mpt", ".trr", ".energies"))
    write_mpt(mpt, [("SOL", 3), ("NA", 1), ("SOL", 1), ("NA", 1)], {"SOL": WATER, "NA": SODIUM})
    write_trr(trr, run_frames() if frames is None else frames, double)
    text.write_text(energies_text() if energies is None else energies)
    return MimicFiles(str(mpt), str(trr), str(text), **how)
