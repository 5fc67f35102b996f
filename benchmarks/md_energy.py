"""Is the energy conserved? Water at constant energy over 2,000 steps, by `dp lammps` and by ASE.

    python benchmarks/md_energy.py --data WATER

Allforce trains a model and runs it from a frame of the data, with velocities of 300 K. Of the total energy the drift is
the slope of a straight line through it; what remains around the line is the error of the integrator, which goes with
the square of the time step (`--step`).
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path

import numpy as np
from common import WATER, command, environment, markdown_table, python_of, spawn, write_result
from md_speed import make_models

SCRIPT = """units metal
atom_style atomic
read_data 192.lmp
pair_style allforce
pair_coeff * * O H
neighbor 1.0 bin
velocity all create 300 7 loop geom
fix move all nve
timestep {step}
thermo_style custom step etotal temp
thermo_modify format float %.12g norm no
thermo 10
run {number}
"""
ASE = """
import sys
import numpy as np
from ase import units
from ase.io import read
from ase.md.verlet import VelocityVerlet
from allforce.infer.ase import DP
atoms = read("192.xyz")
momenta = np.random.default_rng(1).normal(size=(len(atoms), 3)) * np.sqrt(atoms.get_masses() * units.kB * 300)[:, None]
atoms.set_momenta(momenta)
atoms.calc = DP("model.dp")
dynamics = VelocityVerlet(atoms, float(sys.argv[1]) * 1e3 * units.fs)
dynamics.attach(lambda: print("row", dynamics.nsteps, atoms.get_total_energy(), atoms.get_temperature()), interval=10)
dynamics.run(int(sys.argv[2]))
"""


def by_lammps(step: float, number: int, folder: Path, threads: int) -> np.ndarray:
    (folder / "in.energy").write_text(SCRIPT.format(step=step, number=number))
    args = [*command("ours"), "lammps", "-m", "model.dp", "-in", "in.energy", "--lammps-log", "log.energy"]
    spawn(args, folder, environment("ours", threads))
    rows = re.findall(r"^ +(\d+) +(\S+) +(\S+) *$", (folder / "log.energy").read_text(), re.M)
    return np.array(rows, dtype=float)


def by_ase(step: float, number: int, folder: Path, threads: int) -> np.ndarray:
    args = [str(python_of("ours")), "-c", ASE, str(step), str(number)]
    lines, _ = spawn(args, folder, environment("ours", threads))
    return np.array([line.text.split()[1:] for line in lines if line.text.startswith("row ")], dtype=float)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER)
    parser.add_argument("--steps", type=int, default=300, help="of the training that makes the model")
    parser.add_argument("--number", type=int, default=2000, help="of steps of the simulations")
    parser.add_argument("--step", type=float, default=0.0005, help="time step in ps")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="with models of an earlier run, or for those of this one")
    args = parser.parse_args()
    rows, data = [], {}
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        folder = args.folder or Path(tmp)
        if not (folder / "192.xyz").exists():
            folder.mkdir(exist_ok=True)
            make_models(args.data, folder, args.steps, args.threads, theirs=False)
        for way, run in {"LAMMPS": by_lammps, "ASE": by_ase}.items():
            table = run(args.step, args.number, folder, args.threads)
            time, energy = table[:, 0] * args.step, table[:, 1] / 192 * 1e3  # ps, meV for an atom
            slope, start = np.polyfit(time, energy, 1)
            around = float(np.std(energy - slope * time - start))
            data[way] = table.tolist()
            temperature = f"{table[len(table) // 2 :, 2].mean():.0f}"
            rows.append([way, f"{args.step * 1e3:g}", f"{time[-1]:g}", f"{slope:+.4f}", f"{around:.4f}", temperature])
            print(*rows[-1], flush=True)
    header = ["by", "step, fs", "ps", "drift, meV per atom and ps", "around the line, meV per atom", "K"]
    body = markdown_table(header, rows) + f"\n\n192 atoms, float64, {args.number} steps."
    write_result("md_energy", "Energy conservation in molecular dynamics", body, data, ["ours"])


if __name__ == "__main__":
    main()
