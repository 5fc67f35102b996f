"""Molecular dynamics of water with a trained model, to md.extxyz: python run_md.py [model.dp [steps]]"""

import sys
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.io import write
from ase.md.langevin import Langevin

from allforce.infer.ase import DP

START, TEMPERATURE = Path(__file__).parent / "data/valid/300K", 300


def first_frame(system: Path) -> Atoms:
    names, types = (system / "type_map.raw").read_text().split(), (system / "type.raw").read_text().split()
    coord, box = (np.load(system / "set.000" / f"{name}.npy")[0].reshape(-1, 3) for name in ("coord", "box"))
    return Atoms([names[int(t)] for t in types], positions=coord, cell=box, pbc=True)


def main(model: str = "model.dp", steps: str = "500") -> None:
    atoms = first_frame(START)
    atoms.calc = DP(model)
    rng = np.random.default_rng(1)
    spread = np.sqrt(atoms.get_masses() * units.kB * TEMPERATURE)  # of the momenta, Maxwell and Boltzmann
    atoms.set_momenta(spread[:, None] * rng.normal(size=(len(atoms), 3)))
    dynamics = Langevin(
        atoms, 0.5 * units.fs, temperature_K=TEMPERATURE, friction=0.01 / units.fs, rng=rng, fixcm=False
    )
    write("md.extxyz", atoms)
    for _ in range(0, int(steps), 50):
        dynamics.run(50)
        write("md.extxyz", atoms, append=True)
        temperature = atoms.get_temperature()
        print(f"{dynamics.nsteps:6d} steps  {atoms.get_potential_energy():.4f} eV  {temperature:5.0f} K", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
