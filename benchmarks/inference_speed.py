"""Energy-and-force calls through ASE: Allforce against DeePMD-kit (TensorFlow), plain and compressed, alternating.

    python benchmarks/inference_speed.py --data WATER

DeePMD-kit trains some steps, freezes and compresses; Allforce opens the very same weights (.dp), so the forces are
compared, too. Each program stays in its own process and is asked in turn. Between calls atoms move as in molecular
dynamics (a random walk of 0.01 Å a step), so neighbour lists may be reused as far as the program knows how.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from common import (
    LABEL,
    WATER,
    available,
    command,
    environment,
    find_systems,
    markdown_table,
    python_of,
    spawn,
    train,
    water_input,
    write_result,
)

IMPORT = {"ours": "from allforce.infer.ase import DP", "tf": "from deepmd.calculator import DP"}
# Reads a number of calls from each line, answers with their times and the forces of the first frame.
WORKER = """
import json, sys, time
import numpy as np
from ase import Atoms
{importing}
data = np.load(sys.argv[2])
atoms = Atoms([str(s) for s in data["symbols"]], positions=data["coord"], cell=data["cell"], pbc=True)
atoms.calc = DP(sys.argv[1])
forces = atoms.get_forces().tolist()
for line in sys.stdin:
    rng, times = np.random.default_rng(0), []
    for _ in range(int(line)):
        atoms.positions += rng.normal(scale=0.01, size=atoms.positions.shape)
        start = time.perf_counter()
        atoms.get_potential_energy(), atoms.get_forces()
        times.append(time.perf_counter() - start)
    atoms.positions = data["coord"]
    print("answer " + json.dumps([times, forces]), flush=True)
"""


class Caller:
    """One program in its own process, holding one model."""

    def __init__(self, name: str, model: str, frame: Path, folder: Path, threads: int) -> None:
        args = [python_of(name), "-c", WORKER.format(importing=IMPORT[name]), model, str(frame)]
        self.errors = open(folder / f"{name}-{model}.log", "w+")
        self.child = subprocess.Popen(
            args,
            cwd=folder,
            env=environment(name, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def ask(self, calls: int) -> tuple[list[float], np.ndarray]:
        """Times of so many calls, and the forces of the undisturbed frame."""
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write(f"{calls}\n")
        self.child.stdin.flush()
        for line in self.child.stdout:
            if line.startswith("answer "):
                times, forces = json.loads(line[7:])
                return times, np.array(forces)
        self.errors.seek(0)
        raise SystemExit(f"{self.child.args[0]} ended:\n{self.errors.read()[-3000:]}")

    def close(self) -> None:
        assert self.child.stdin
        self.child.stdin.close()
        self.child.wait()
        self.errors.close()


def make_models(args: argparse.Namespace, folder: Path) -> None:
    """model.pb, compressed.pb and model.dp with the same weights."""
    config = water_input(find_systems(args.data), args.steps, display=args.steps // 3)
    config["training"]["save_freq"] = args.steps // 3
    train("tf", config, folder, args.threads)
    env = environment("tf", args.threads)
    for options in (
        ["freeze", "-o", "model.pb"],
        ["compress", "-i", "model.pb", "-o", "compressed.pb"],
        ["convert-backend", "model.pb", "model.dp"],
    ):
        spawn([*command("tf"), *options], folder, env)


def one_frame(data: Path, target: Path) -> int:
    """The first frame of the first system for the workers; returns its number of atoms."""
    system = find_systems(data)[0]
    first = min(system.glob("set.*"))
    names = (system / "type_map.raw").read_text().split()
    symbols = np.array(names)[np.loadtxt(system / "type.raw", dtype=int)]
    coord, cell = np.load(first / "coord.npy")[0].reshape(-1, 3), np.load(first / "box.npy")[0].reshape(3, 3)
    np.savez(target, symbols=symbols, coord=coord.astype(float), cell=cell.astype(float))
    return len(symbols)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER)
    parser.add_argument("--steps", type=int, default=60, help="of the training that makes the model")
    parser.add_argument("--calls", type=int, default=20, help="in each turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    names = available(["ours", "tf"])
    if "tf" not in names:
        raise SystemExit("DeePMD-kit makes the model: run `make peers` first")
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        folder = Path(tmp)
        make_models(args, folder)
        atoms = one_frame(args.data, folder / "frame.npz")
        models = {
            "Allforce": ("ours", "model.dp"),
            f"{LABEL['tf']}, plain": ("tf", "model.pb"),
            f"{LABEL['tf']}, compressed": ("tf", "compressed.pb"),
        }
        callers = {label: Caller(n, m, folder / "frame.npz", folder, args.threads) for label, (n, m) in models.items()}
        times: dict[str, list[float]] = {label: [] for label in models}
        forces = {label: caller.ask(args.calls)[1] for label, caller in callers.items()}  # warm-up
        for _ in range(args.rounds):
            for label, caller in callers.items():
                times[label].append(median(caller.ask(args.calls)[0]))
        for caller in callers.values():
            caller.close()
    middle, exact = {label: median(t) for label, t in times.items()}, forces[f"{LABEL['tf']}, plain"]
    apart = {label: float(np.abs(f - exact).max()) for label, f in forces.items()}
    rows = [
        [
            label,
            f"{t * 1e3:.1f}",
            f"{min(times[label]) * 1e3:.1f}–{max(times[label]) * 1e3:.1f}",
            f"{t / middle['Allforce']:.1f}",
            f"{apart[label]:.0e}",
        ]
        for label, t in middle.items()
    ]
    body = markdown_table(["program", "ms per call", "range", "Allforce is faster by", "forces off plain, eV/Å"], rows)
    body += f"\n\n{atoms} atoms, energy and forces, float64, {args.threads} threads; "
    body += f"{args.rounds} rounds of {args.calls} calls, alternating."
    write_result(
        "inference_speed", "Inference speed through ASE", body, {"seconds": times, "force_difference": apart}, names
    )


if __name__ == "__main__":
    main()
