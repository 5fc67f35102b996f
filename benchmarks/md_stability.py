"""Does dynamics hold with a model? Langevin runs from the first frame of some data, at several temperatures.

    python benchmarks/md_stability.py --data train.xyz --temperatures 300,400,500 model.dp another.dp

A run is given up when two atoms come closer than 0.5 Å, a force exceeds 60 eV/Å, or the atoms are five times as hot as
they should be. A run that goes on may have fallen into a hole all the same: the change of the potential energy tells.
"""

from __future__ import annotations

import argparse

import ase.io
import numpy as np
from ase import Atoms, units
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution

from allforce.infer.ase import DP

EVERY = 20  # steps between two looks
CLOSE, STRONG, HOT = 0.5, 60.0, 5.0


def holds(atoms: Atoms, kelvin: float) -> bool:
    nearest = atoms.get_all_distances(mic=True)[np.triu_indices(len(atoms), 1)].min()
    calm = np.isfinite(atoms.get_potential_energy()) and np.abs(atoms.get_forces()).max() < STRONG
    return bool(calm and nearest > CLOSE and atoms.get_temperature() < HOT * kelvin)


def run(start: Atoms, model: str, kelvin: float, steps: int, femtoseconds: float) -> str:
    """How far it went, and how much potential energy it won."""
    atoms = start.copy()
    atoms.calc = DP(model)
    MaxwellBoltzmannDistribution(atoms, temperature_K=kelvin, rng=np.random.default_rng(1))
    rng = np.random.default_rng(0)
    dynamics = Langevin(atoms, femtoseconds * units.fs, temperature_K=kelvin, friction=0.01 / units.fs, rng=rng)
    before = atoms.get_potential_energy()
    for done in range(EVERY, steps + 1, EVERY):
        dynamics.run(EVERY)
        if not holds(atoms, kelvin):
            return f"given up after {done} steps"
    return f"holds, {atoms.get_potential_energy() - before:+.2f} eV"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", required=True, help="a file that ASE reads; its first frame is the start")
    parser.add_argument("--temperatures", default="300,400,500")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--femtoseconds", type=float, default=1.0, help="of a step")
    args = parser.parse_args()
    start = ase.io.read(args.data, index=0)
    for model in args.models:
        for kelvin in map(float, args.temperatures.split(",")):
            print(f"{model} {kelvin:g} K: {run(start, model, kelvin, args.steps, args.femtoseconds)}", flush=True)


if __name__ == "__main__":
    main()
