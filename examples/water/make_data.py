"""Make the water data of this example: 32 molecules, labels from GFN1-xTB.

    pip install tblite ase        # in an environment of its own; training does not need tblite
    OMP_NUM_THREADS=1 python make_data.py

Each trajectory starts from its own liquid, equilibrated with a flexible TIP3P force field (a minute), and goes on with
Langevin dynamics on GFN1-xTB (C. Bannwarth, S. Ehlert, S. Grimme et al.; periodic, about a second a step on one core).
Hydrogen has 4 u, which allows a step of 2 fs and leaves the distribution of positions as it is. A frame is kept every
four steps. Training and validation frames come from different trajectories at different temperatures.

Labels: energy (eV), force (eV/Å), virial (eV), where virial = -dE/dstrain = -stress·volume; `check_virial` compares it
with a finite strain before anything is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.calculators.tip3p import TIP3P, angleHOH, rOH
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from tblite.ase import TBLite

HERE = Path(__file__).parent
MOLECULES = 32
DENSITY = 1.0  # g/cm³
# folder, temperature in K, frames, seed
TRAJECTORIES = [
    ("train/280K", 280, 72, 1),
    ("train/330K", 330, 72, 2),
    ("train/400K", 400, 72, 3),
    ("valid/300K", 300, 20, 4),
    ("valid/370K", 370, 20, 5),
]
CLASSICAL_STEPS, QUANTUM_STEPS = 3000, 30  # of equilibration
EVERY = 4  # steps between frames


def lattice_of_water(rng: np.random.Generator) -> Atoms:
    """32 molecules in random orientation on an fcc lattice (2 × 2 × 2 cells of 4), order O H H O H H …"""
    volume = MOLECULES * 18.015 / (units._Nav * 1e-24 * DENSITY)
    length = volume ** (1 / 3)
    basis = np.array([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    cells = np.array([[i, j, k] for i in range(2) for j in range(2) for k in range(2)])
    sites = (cells[:, None] + basis[None]).reshape(-1, 3) * length / 2
    box = Atoms(cell=[length] * 3, pbc=True)
    for site in sites:
        water = molecule("H2O")
        water.set_distance(0, 1, rOH, fix=0)
        water.set_distance(0, 2, rOH, fix=0)
        water.set_angle(1, 0, 2, angleHOH)
        water.translate(-water.positions[0])
        water.euler_rotate(*rng.uniform(0, 360, 3))
        water.translate(site)
        box += water
    box.set_masses(np.where(box.numbers == 1, 4.0, 15.999))
    return box


class FlexibleTIP3P(TIP3P):
    """TIP3P between molecules, springs on O-H, O-H and H-H inside each: E = Σ k/2 (d - d0)², k = 40 eV/Å²."""

    def calculate(self, atoms, properties, system_changes):
        super().calculate(atoms, properties, system_changes)
        sites = atoms.positions.reshape(-1, 3, 3)  # molecule, (O H H), xyz
        force = self.results["forces"].reshape(sites.shape)
        for a, b, length in ((0, 1, rOH), (0, 2, rOH), (1, 2, 2 * rOH * np.sin(np.radians(angleHOH / 2)))):
            bond = sites[:, b] - sites[:, a]
            distance = np.linalg.norm(bond, axis=1)
            pull = (40.0 * (distance - length) / distance)[:, None] * bond
            force[:, a] += pull
            force[:, b] -= pull
            self.results["energy"] += 20.0 * np.sum((distance - length) ** 2)


def liquid(temperature: float, rng: np.random.Generator) -> Atoms:
    """A classical liquid: melted from the lattice at 600 K, then cooled to the temperature."""
    box = lattice_of_water(rng)
    box.calc = FlexibleTIP3P(rc=4.5, width=1.0)
    for step_fs, target, steps in (
        (0.5, 300, 400),
        (2.0, 600, CLASSICAL_STEPS // 2),
        (2.0, temperature, CLASSICAL_STEPS),
    ):
        Langevin(box, step_fs * units.fs, temperature_K=target, friction=0.02 / units.fs, rng=rng, fixcm=False).run(
            steps
        )
    return box


def check_virial(box: Atoms, strain: float = 1e-3) -> None:
    """virial_ab = -dE/dstrain_ab at one diagonal and one off-diagonal element."""
    virial = -box.get_stress(voigt=False) * box.get_volume()
    for a, b in ((0, 0), (0, 1)):
        energies = []
        for sign in (1, -1):
            deform = np.eye(3)
            deform[b, a] += sign * strain  # row vectors: r' = r·deform, r_a → r_a + strain·r_b
            strained = box.copy()
            strained.set_cell(box.cell[:] @ deform, scale_atoms=True)
            strained.calc = TBLite(method="GFN1-xTB", verbosity=0, accuracy=0.1)
            energies.append(strained.get_potential_energy())
        slope = -(energies[0] - energies[1]) / (2 * strain)
        print(f"virial {a}{b}: {virial[a, b]:.4f} eV, from finite strain {slope:.4f} eV", flush=True)
        assert abs(virial[a, b] - slope) < 0.02, "the virial label does not follow -dE/dstrain"


def trajectory(folder: str, temperature: float, frames: int, seed: int) -> None:
    """Langevin dynamics on GFN1-xTB; the kept frames as a DeePMD npy system."""
    rng = np.random.default_rng(seed)
    box = liquid(temperature, rng)
    box.calc = TBLite(method="GFN1-xTB", verbosity=0, accuracy=0.3)
    MaxwellBoltzmannDistribution(box, temperature_K=temperature, rng=rng)
    Langevin(box, 1.0 * units.fs, temperature_K=temperature, friction=0.05 / units.fs, rng=rng, fixcm=False).run(
        QUANTUM_STEPS
    )
    if seed == 1:
        check_virial(box)
    dynamics = Langevin(box, 2.0 * units.fs, temperature_K=temperature, friction=0.01 / units.fs, rng=rng, fixcm=False)
    kept: dict[str, list[np.ndarray]] = {name: [] for name in ("coord", "box", "energy", "force", "virial")}
    for k in range(frames):
        dynamics.run(EVERY)
        kept["coord"].append(box.positions.ravel().copy())
        kept["box"].append(box.cell[:].ravel().copy())
        kept["energy"].append(np.array(box.get_potential_energy()))
        kept["force"].append(box.get_forces().ravel().copy())
        kept["virial"].append((-box.get_stress(voigt=False) * box.get_volume()).ravel())
        print(
            f"{folder} {k + 1}/{frames}: {box.get_potential_energy():.4f} eV, {box.get_temperature():.0f} K", flush=True
        )
    write(HERE / "data" / folder, box, kept)


def write(folder: Path, box: Atoms, kept: dict[str, list[np.ndarray]]) -> None:
    (folder / "set.000").mkdir(parents=True, exist_ok=True)
    names = ["O", "H"]
    (folder / "type_map.raw").write_text("\n".join(names) + "\n")
    (folder / "type.raw").write_text("\n".join(str(names.index(s)) for s in box.get_chemical_symbols()) + "\n")
    for name, values in kept.items():
        # energies are large sums, so they stay in double precision; a force needs no more than seven digits
        kind = np.float32 if name in ("force", "virial") else np.float64
        np.save(folder / "set.000" / f"{name}.npy", np.array(values, dtype=kind))


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for name, temperature, frames, seed in TRAJECTORIES:
        if not wanted or name in wanted:
            trajectory(name, temperature, frames, seed)
