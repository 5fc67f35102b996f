"""Files as a MiMiC run leaves them, made of the frames of ../water: a topology (.mpt), trajectories (.trr), ENERGIES.

Run in this folder: python make_files.py
"""

from pathlib import Path

import numpy as np

from allforce.data.mimic import HARTREE, KJ_PER_MOL_NM, NM
from allforce.data.mpt import Molecule, write_mpt
from allforce.data.trr import write_trr

HERE = Path(__file__).resolve().parent
WATER = Molecule(
    elements=["O", "H", "H"],
    names=["OW", "HW1", "HW2"],
    types=["OW", "HW", "HW"],
    residues=["SOL"] * 3,
    residue_ids=[1] * 3,
    charges=[-0.82, 0.41, 0.41],
    masses=[15.999, 1.008, 1.008],
)
STRIDE = 10  # steps between frames; CPMD writes a line for every step


def make(source: Path, name: str, frames: int, double: bool) -> None:
    """One run: the first frames of a system, at steps 0, 10, 20, …; step 0 has no line in ENERGIES, as CPMD has it."""
    arrays = {key: np.load(source / f"set.000/{key}.npy")[:frames] for key in ("coord", "box", "energy", "force")}
    energies = arrays["energy"] / HARTREE
    write_trr(
        HERE / f"{name}.trr",
        [
            {
                "step": STRIDE * k,
                "time": 0.005 * k,
                "box": arrays["box"][k].reshape(3, 3) / NM,
                "x": arrays["coord"][k].reshape(-1, 3) / NM,
                "f": arrays["force"][k].reshape(-1, 3) / KJ_PER_MOL_NM,
            }
            for k in range(frames)
        ],
        double,
    )
    steps = np.arange(1, STRIDE * (frames - 1) + 1)
    between = np.interp(steps, STRIDE * np.arange(frames), energies)
    lines = [f"{n:10d}{0.012:14.8f}{300.0:12.3f}{e:20.10f}{e + 0.13:20.10f}{e + 0.142:20.10f}{0.0:14.6e}{1.0:10.2f}\n"
             for n, e in zip(steps, between, strict=True)]  # fmt: skip
    (HERE / f"{name}.energies").write_text("".join(lines))


if __name__ == "__main__":
    data = HERE.parent / "water/data"
    write_mpt(HERE / "water.mpt", [("SOL", 32)], {"SOL": WATER})
    make(data / "train/280K", "run1", 25, double=False)
    make(data / "train/400K", "run2", 25, double=True)
    make(data / "valid/300K", "run3", 13, double=False)
