"""Molecular dynamics of water: LAMMPS with Allforce and with DeePMD-kit's pair style in turn, ASE, and many frames.

    python benchmarks/md_speed.py --data WATER [--only lammps,ase,frames]

Allforce trains a model; DeePMD-kit converts and compresses the very same weights. In LAMMPS both run one script (NVE,
neighbour lists with a skin of 1 Å), each in its own process, and report LAMMPS's own loop time. DeePMD-kit runs on the
threads of one process and, beside it, on as many MPI ranks of one thread.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from ase import Atoms
from ase.io import write
from common import (
    WATER,
    available,
    command,
    environment,
    find_systems,
    markdown_table,
    peer_folder,
    python_of,
    spawn,
    train,
    water_input,
    write_result,
)

from allforce.train.recipe import FITTING, OPTIMIZER, RATE, TRAINING, with_loss

SCRIPT = """units metal
atom_style atomic
read_data {data}
{pair}
pair_coeff * * O H
neighbor 1.0 bin
velocity all create 300 7 loop geom
fix move all nve
timestep 0.0005
thermo 10
thermo_modify format float %.16g
run {warm}
run {steps}
"""
THEIRS = "plugin load libdeepmd_lmpplugin.so\npair_style deepmd compressed.pb"
# `dp compress` of DeePMD-kit 3.2.0 asks a converted model, which has no training section, for its learning rate.
COMPRESS = """
import importlib
from deepmd.main import main
c = importlib.import_module("deepmd.tf.entrypoints.compress")
update = c.update_deepmd_input
c.update_deepmd_input = lambda script: update({**script, "learning_rate": {"start_lr": 0.001}})
main()
"""
ASE = """
import sys, time
import numpy as np
from ase import units
from ase.io import read
from ase.md.verlet import VelocityVerlet
from allforce.infer.ase import DP
atoms = read("192.xyz")
momenta = np.random.default_rng(1).normal(size=(len(atoms), 3)) * np.sqrt(atoms.get_masses() * units.kB * 300)[:, None]
atoms.set_momenta(momenta)
atoms.calc = DP(sys.argv[1])
dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
dynamics.run(20)
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    dynamics.run(10)
    print("time", (time.perf_counter() - start) / 10, flush=True)
print("lists", atoms.calc.steps.rebuilds)
"""
FRAMES = """
import sys, time
import numpy as np, torch
from ase.io import read
from allforce.infer.predict import DeepPot
atoms, model, count = read("192.xyz"), DeepPot(sys.argv[1]), int(sys.argv[2])
x = atoms.positions + np.random.default_rng(0).normal(scale=0.02, size=(count, len(atoms), 3))
cells = np.tile(np.array(atoms.cell), (count, 1, 1))
types = [model.get_type_map().index(s) for s in atoms.symbols]
model.eval(x[:8], cells[:8], types)
for _ in range(3):
    for threads in (1, torch.get_num_threads()):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        start = time.perf_counter()
        model.eval(x, cells, types)
        print("time", threads, (time.perf_counter() - start) / count, flush=True)
        torch.set_num_threads(before)
"""


def make_models(data: Path, folder: Path, steps: int, threads: int, theirs: bool) -> None:
    """model.dp by the recipe, the same as compressed.pb, single.dp in float32, structures of 192 and 1,536 atoms."""
    for name, precision in (("model.dp", "float64"), ("single.dp", "float32")):
        work = folder / precision
        config = water_input(find_systems(data), steps, display=steps // 3, precision=precision)
        config |= {"learning_rate": dict(RATE), "optimizer": dict(OPTIMIZER), "loss": with_loss(config["loss"])}
        config["training"] |= TRAINING
        config["model"]["fitting_net"] |= FITTING
        train("ours", config, work, threads)
        spawn([*command("ours"), "freeze", "-o", str(folder / name)], work, environment("ours", threads))
    if theirs:
        env = environment("tf", threads)
        spawn([*command("tf"), "convert-backend", "model.dp", "model.pb"], folder, env)
        spawn(
            [str(python_of("tf")), "-c", COMPRESS, "--tf", *"compress -i model.pb -o compressed.pb".split()],
            folder,
            env,
        )
    atoms = one_frame(data)
    for copies in (1, 2) if len(atoms) == 192 else (1,):
        several = atoms * ((copies,) * 3)
        write(folder / f"{len(several)}.xyz", several)
        write(folder / f"{len(several)}.lmp", several, format="lammps-data", specorder=["O", "H"], masses=True)


def one_frame(data: Path) -> Atoms:
    """The first frame of the first system; the shipped example of 96 atoms is doubled."""
    system = find_systems(data)[0]
    first = min(system.glob("set.*"))
    names = np.array((system / "type_map.raw").read_text().split())[np.loadtxt(system / "type.raw", dtype=int)]
    coord, box = (np.load(first / f"{x}.npy")[0].astype(float).reshape(-1, 3) for x in ("coord", "box"))
    atoms = Atoms(names, positions=coord, cell=box, pbc=True)
    return atoms * (2, 1, 1) if len(atoms) == 96 else atoms


# --- LAMMPS --------------------------------------------------------------------------------------------------------
def lammps(who: str, atoms: int, steps: int, folder: Path, threads: int) -> tuple[float, float]:
    """Seconds per step of the second run, and the energy at its end."""
    values = {"data": f"{atoms}.lmp", "warm": max(5, steps // 4), "steps": steps}
    script, log = folder / f"in.{who}", folder / f"log.{who}"
    script.write_text(SCRIPT.format(pair="pair_style allforce" if who == "ours" else THEIRS, **values))
    if who == "ours":
        args = [*command("ours"), "lammps", "-m", "model.dp", "-in", script.name, "--lammps-log", log.name]
        spawn(args, folder, environment("ours", threads))
    else:
        programs = peer_folder("tf") / "bin"
        ranks = threads if who == "ranks" else 1
        mpi = [str(programs / "mpirun"), "-np", str(ranks)] if ranks > 1 else []
        args = [*mpi, str(programs / "lmp"), "-in", script.name, "-log", log.name, "-screen", "none"]
        spawn(args, folder, environment("tf", threads // ranks))
    text = log.read_text()
    loops = re.findall(r"Loop time of (\S+) on", text)
    rows = re.findall(r"^ +\d+ .*$", text, re.M)
    return float(loops[1]) / steps, float(rows[-1].split()[4])  # total energy


def compare_lammps(args: argparse.Namespace, folder: Path, names: list[str]) -> tuple[str, dict]:
    who = {"ours": "Allforce, `dp lammps`"}
    if "tf" in names:
        who |= {"threads": f"DeePMD-kit, compressed, {args.threads} threads"}
        who |= {"ranks": f"DeePMD-kit, compressed, {args.threads} MPI ranks"}
    times: dict[str, dict[str, list[float]]] = {}
    energies: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob("*.lmp"), key=lambda p: int(p.stem)):
        atoms = int(path.stem)
        steps = max(10, args.lammps_steps * 192 // atoms)
        times[path.stem] = {w: [] for w in who}
        energies[path.stem] = {}
        for _ in range(args.rounds):
            for w in who:
                seconds, energies[path.stem][w] = lammps(w, atoms, steps, folder, args.threads)
                times[path.stem][w].append(seconds)
                print(atoms, w, f"{seconds * 1e3:.1f} ms, {energies[path.stem][w]:.9f} eV", flush=True)
    rows = []
    for w, label in who.items():
        cells = [label]
        for n, t in times.items():
            cells += [f"{median(t[w]) * 1e3:.1f}", f"{median(t[w]) / median(t['ours']):.1f}", f"{energies[n][w]:.8f}"]
        rows.append(cells)
    header = ["LAMMPS, NVE"]
    for n in times:
        header += [f"{n} atoms: ms a step", "by", "energy at the end, eV"]
    return markdown_table(header, rows), {"lammps": times, "energy": energies}


# --- ASE and many frames -------------------------------------------------------------------------------------------
def python_times(code: str, arguments: list[str], folder: Path, threads: int) -> list[list[str]]:
    lines, _ = spawn([str(python_of("ours")), "-c", code, *arguments], folder, environment("ours", threads))
    return [line.text.split() for line in lines]


def in_ms(label: str, t: list[float]) -> list[str]:
    return [label, f"{median(t) * 1e3:.1f}", f"{min(t) * 1e3:.1f}–{max(t) * 1e3:.1f}"]


def measure_ase(args: argparse.Namespace, folder: Path) -> tuple[str, dict]:
    times: dict[str, list[float]] = {"model.dp": [], "single.dp": []}
    for _ in range(args.rounds):
        for model, found in times.items():
            lines = python_times(ASE, [model, "15"], folder, args.threads)
            found.append(median(float(line[1]) for line in lines if line[0] == "time"))
            print("ase", model, f"{found[-1] * 1e3:.2f} ms", lines[-1], flush=True)
    label = {"model.dp": "float64", "single.dp": "float32"}
    rows = [in_ms(label[model], t) for model, t in times.items()]
    return markdown_table(["ASE, 192 atoms, NVE", "ms a step", "range"], rows), {"ase": times}


def measure_frames(args: argparse.Namespace, folder: Path) -> tuple[str, dict]:
    lines = [x for x in python_times(FRAMES, ["model.dp", "64"], folder, args.threads) if x[0] == "time"]
    times = {n: [float(x[2]) for x in lines if x[1] == n] for n in dict.fromkeys(x[1] for x in lines)}
    rows = [in_ms(n, t) for n, t in times.items()]
    return markdown_table(["DeepPot.eval of 64 frames, threads", "ms a frame", "range"], rows), {"frames": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER)
    parser.add_argument("--only", default="lammps,ase,frames")
    parser.add_argument("--steps", type=int, default=300, help="of the training that makes the model")
    parser.add_argument("--lammps-steps", type=int, default=80, help="of a run with 192 atoms, fewer with more atoms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="with models of an earlier run, or for those of this one")
    args = parser.parse_args()
    names = available(["ours", "tf"])
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        folder = args.folder or Path(tmp)
        if not (folder / "192.xyz").exists():
            folder.mkdir(exist_ok=True)
            make_models(args.data, folder, args.steps, args.threads, "tf" in names)
        parts = {"lammps": compare_lammps, "ase": measure_ase, "frames": measure_frames}
        bodies, data = [], {}
        for part in args.only.split(","):
            text, found = parts[part](args, folder, *([names] if part == "lammps" else []))  # type: ignore[operator]
            bodies.append(text)
            data |= found
    bodies.append(
        f"Water, {args.threads} threads, medians of {args.rounds} processes each, in turn; float64 where not said."
    )
    write_result("md_speed", "Molecular dynamics of water", "\n\n".join(bodies), data, names)


if __name__ == "__main__":
    main()
