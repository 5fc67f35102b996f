"""Run by every worker of a launcher: DeepPot, the calculator and a trajectory are those of one process.

infer_suite.py FOLDER: models and structures are there; rank 0 leaves what all of them found.
"""

import os
import sys
from pathlib import Path

import numpy as np
from ase import units
from ase.io import Trajectory, read
from ase.md.langevin import Langevin
from ase.md.verlet import VelocityVerlet
from ase.parallel import world

import allforce
import allforce.distributed as ad
from allforce.errors import UserError
from allforce.infer.ase import DP

STRUCTURES = ("triclinic", "thin", "cluster", "slab", "pair", "one")


def arrays(atoms):
    types = [{"O": 0, "H": 1}[s] for s in atoms.get_chemical_symbols()]
    return atoms.positions[None], None if not atoms.pbc.any() else np.array(atoms.cell)[None], types


def everything(folder: Path) -> dict[str, np.ndarray]:
    """Energies, forces, virials of every kind of structure, one by one, several at a time, and along a trajectory."""
    out = {}
    dp, pinet = (allforce.DeepPot(folder / f"{name}.dp") for name in ("m", "pinet"))
    for name in STRUCTURES:
        atoms = read(folder / f"{name}.xyz", parallel=False)
        if name != "slab":  # periodic in all directions, or in none
            for model, of in (("m", dp), ("pinet", pinet)):
                for k, value in enumerate(of.eval(*arrays(atoms), atomic=True)):
                    out[f"{name} {model} {k}"] = value
        out[f"{name} descriptor"] = dp.eval_descriptor(*arrays(atoms)) if name != "slab" else np.zeros(1)
        for model in ("m", "pinet"):
            atoms.calc = DP(folder / f"{model}.dp")
            out[f"{name} ase {model}"] = atoms.get_forces()
            out[f"{name} energies {model}"] = atoms.get_potential_energies()
            if atoms.pbc.all():
                out[f"{name} stress {model}"] = atoms.get_stress()
            atoms.positions += 0.3 * np.random.default_rng(3).normal(
                size=atoms.positions.shape
            )  # within the skin or not
            out[f"{name} moved {model}"] = atoms.get_forces()
    x, cell, types = arrays(read(folder / "triclinic.xyz", parallel=False))
    many = np.concatenate([x + 0.01 * k for k in range(7)]) + np.random.default_rng(1).normal(
        0, 0.02, (7, *x.shape[1:])
    )
    for k, value in enumerate(dp.eval(many, np.repeat(cell, 7, 0), types)):
        out[f"seven frames {k}"] = value
    dipoles = allforce.DeepDipole(folder / "dipole.dp")
    out["dipole"] = dipoles.eval(many[:1], cell, types, atomic=False)
    out["dipoles"] = dipoles.eval(many, np.repeat(cell, 7, 0), types, atomic=True)
    return out


def simulation(folder: Path, kind: str) -> None:
    """Momenta and random numbers that every worker draws for itself: one trajectory all the same, written once."""
    atoms = read(folder / "triclinic.xyz", parallel=False)
    atoms.calc = DP(folder / "m.dp")
    mine = np.random.default_rng(world.rank)
    atoms.set_momenta(mine.normal(scale=0.3, size=atoms.positions.shape))
    if kind == "langevin":
        dyn = Langevin(
            atoms,
            0.5 * units.fs,
            temperature_K=300,
            friction=0.02,
            rng=mine,
            fixcm=False,
            logfile=str(folder / "md.log"),
        )
    else:
        dyn = VelocityVerlet(atoms, 0.5 * units.fs, logfile=str(folder / "md.log"))
    with dyn, Trajectory(folder / f"{kind}.traj", "w", atoms) as file:
        dyn.attach(file, interval=1)
        dyn.run(5)
    if world.size > 1:
        assert np.ptp(ad.gather(atoms.positions.tolist()), axis=0).max() < 1e-9


def mistakes(folder: Path) -> None:
    """An error of one worker is one of all; another structure on one worker is an error."""
    dp = allforce.DeepPot(folder / "m.dp")
    x, cell, types = arrays(read(folder / "triclinic.xyz", parallel=False))
    close = x.copy()
    close[0, 0] = close[0, 1]
    for coords, of, words in (
        (close, types, "on one place"),
        (x + 0.1 * world.rank, types, "one structure together"),
        (x[:, world.rank :], types[world.rank :], "one structure together"),
    ):
        try:
            dp.eval(coords, cell, of)
            raise AssertionError("no error")
        except UserError as error:
            assert words in str(error), error
    own = x.copy()
    own[0, 0] += 0.1 * world.rank
    alone = allforce.DeepPot(folder / "m.dp", parallel=False).eval(own, cell, types)
    assert np.ptp([e[0][0] for e in ad.gather(alone[0].tolist())]) > 0


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    assert world.size == int(os.environ.get("EXPECTED", "1")), world.size
    found = everything(folder)
    for kind in ("langevin", "verlet"):
        simulation(folder, kind)
    if world.size > 1:
        mistakes(folder)
    world.barrier()
    assert world.sum_scalar(1) == world.size
    total = np.arange(3.0) + world.rank
    world.sum(total)
    assert np.array_equal(total, np.arange(3.0) * world.size + world.size * (world.size - 1) / 2)
    if world.rank == 0:
        np.savez(folder / f"found{world.size}.npz", **found)
        print(f"passed: {world.size} ranks")
