"""Data that the recipe was not made with: does it hold there? Labels from GFN-xTB and effective medium theory.

    python3 -m venv venv && venv/bin/pip install tblite ase rdkit    # an environment of its own, without Allforce
    OMP_NUM_THREADS=1 venv/bin/python benchmarks/other_data.py FOLDER               all sets, a quarter of an hour
    OMP_NUM_THREADS=1 venv/bin/python benchmarks/other_data.py FOLDER ethanol alloy
    python benchmarks/recipe_search.py --train FOLDER/ethanol/train.xyz --valid FOLDER/ethanol/valid.xyz \
        --own-batch auto:32 --steps 140,300 --rates 0.034

Writes FOLDER/<set>/train.xyz and valid.xyz: frames of Langevin dynamics with the method itself, those for validation
from runs of their own. Hydrogen has 4 u, which allows a step of 1 fs and leaves the distribution of positions as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution

SMALL = ["CO", "CC(N)=O", "OC=O", "COC", "CC#N", "NCC(=O)O", "CC(C)=O", "CN", "CC=C", "CC(=O)O"]
METAL_KELVIN = [300, 800, 1400, 2000]  # above 1400 K the metal is melted first
SALT_KELVIN = [300, 600, 900]

Start = tuple[Atoms, float]  # with a calculator; temperature in K


@dataclass
class Data:
    """A run is a start of its own; run n of `start(n, rng)` may choose what to simulate by n."""

    start: Callable[[int, np.random.Generator], Start]
    runs: tuple[int, int]  # training, validation
    frames: tuple[int, int]  # of a run
    femtoseconds: float  # a step
    every: int  # steps between frames
    settle: int  # steps before the first


def tblite(method: str) -> object:
    from tblite.ase import TBLite

    return TBLite(method=method, verbosity=0)


def molecule(smiles: str, rng: np.random.Generator) -> Atoms:
    """A conformer by chance, relaxed with MMFF."""
    from rdkit import Chem
    from rdkit.Chem import AllChem

    found = Chem.AddHs(Chem.MolFromSmiles(smiles))
    AllChem.EmbedMolecule(found, randomSeed=int(rng.integers(1, 10**6)))
    AllChem.MMFFOptimizeMolecule(found)
    atoms = Atoms([a.GetSymbol() for a in found.GetAtoms()], found.GetConformer().GetPositions())
    atoms.set_masses(np.where(atoms.numbers == 1, 4.0, atoms.get_masses()))
    atoms.calc = tblite("GFN2-xTB")
    return atoms


def strained(atoms: Atoms, rng: np.random.Generator, most: float) -> None:
    """Every element of the strain between -most and most."""
    strain = rng.uniform(-most, most, (3, 3))
    atoms.set_cell(atoms.cell[:] @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)


def alloy(n: int, rng: np.random.Generator) -> Start:
    """Cu24Au8, fcc, dealt out by chance."""
    atoms = bulk("Cu", "fcc", a=3.74, cubic=True).repeat(2)
    atoms.symbols[:] = ["Cu"] * 24 + ["Au"] * 8
    atoms.positions[:] = rng.permutation(atoms.positions)
    strained(atoms, rng, 0.03)
    atoms.calc = EMT()
    kelvin = METAL_KELVIN[n % len(METAL_KELVIN)]
    if kelvin > 1400:
        atoms.set_cell(atoms.cell[:] * 1.03, scale_atoms=True)
        dynamics(atoms, 4000, 4.0, rng).run(500)
    return atoms, kelvin


def salt(n: int, rng: np.random.Generator) -> Start:
    """Sodium chloride, 16 ions."""
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True).repeat((1, 1, 2))
    strained(atoms, rng, 0.03)
    atoms.rattle(0.1, rng=rng)
    atoms.calc = tblite("GFN1-xTB")
    return atoms, SALT_KELVIN[n % len(SALT_KELVIN)]


SETS = {
    "ethanol": Data(lambda n, rng: (molecule("CCO", rng), 500), (4, 1), (125, 150), 1.0, 20, 200),
    "peptide": Data(lambda n, rng: (molecule("CC(=O)NC(CS)C(=O)NC", rng), 500), (5, 2), (100, 75), 1.0, 15, 200),
    "molecules": Data(lambda n, rng: (molecule(SMALL[n % 10], rng), 500), (10, 10), (50, 15), 1.0, 20, 200),
    "alloy": Data(alloy, (16, 8), (30, 20), 4.0, 5, 100),
    "salt": Data(salt, (6, 3), (50, 33), 5.0, 2, 8),
}


def dynamics(atoms: Atoms, kelvin: float, femtoseconds: float, rng: np.random.Generator) -> Langevin:
    MaxwellBoltzmannDistribution(atoms, temperature_K=kelvin, rng=rng)
    return Langevin(
        atoms, femtoseconds * units.fs, temperature_K=kelvin, friction=0.02 / units.fs, rng=rng, fixcm=False
    )


def labelled(atoms: Atoms) -> Atoms:
    """A copy that keeps energy, forces and, of a crystal, stress."""
    frame = Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    stress = {"stress": atoms.get_stress()} if atoms.pbc.all() else {}
    frame.calc = SinglePointCalculator(
        frame, energy=atoms.get_potential_energy(), forces=atoms.get_forces(apply_constraint=False), **stress
    )
    return frame


def frames_of(data: Data, run: int, seed: int, count: int) -> list[Atoms]:
    rng = np.random.default_rng(seed)
    atoms, kelvin = data.start(run, rng)
    moving = dynamics(atoms, kelvin, data.femtoseconds, rng)
    moving.run(data.settle)
    frames = []
    for _ in range(count):
        moving.run(data.every)
        frames.append(labelled(atoms))
    return frames


def main() -> None:
    folder, *wanted = sys.argv[1:] or sys.exit(__doc__)
    for name in wanted or SETS:
        data = SETS[name]
        for part, runs, count, seeds in zip(("train", "valid"), data.runs, data.frames, (100, 200), strict=True):
            frames = [f for run in range(runs) for f in frames_of(data, run, seeds + run, count)]
            path = Path(folder) / name / f"{part}.xyz"
            path.parent.mkdir(parents=True, exist_ok=True)
            ase.io.write(path, frames, format="extxyz")
            forces = np.concatenate([f.get_forces().ravel() for f in frames])
            print(f"{path}: {len(frames)} frames, forces {forces.std():.2f} eV/Å", flush=True)


if __name__ == "__main__":
    main()
