"""Training speed of Allforce and DeePMD-kit on the same input and data, alternating in one run.

    python benchmarks/train_speed.py                               batch 1 and 8 in float64, batch 1 in float32
    python benchmarks/train_speed.py --cases float64:1,float64:4,float64:8,float64:16,float32:1,float32:8
    python benchmarks/train_speed.py --sweep atoms                 ours: cost against number of atoms (neighbors, types)

Every program runs as its own process through its command line with the same number of threads. Seconds per step: for
DeePMD-kit the `average training time` that it prints, which leaves out display rows; for Allforce the wall clock from
one display row to the next, which leaves out nothing. The first third of a run is warm-up. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
from common import LABEL, WATER, Run, available, find_systems, markdown_table, train, water_input, write_result

# Seconds per step to expect for 192 atoms in float64, batch 1: only to choose the number of steps of the first round.
GUESS = {"ours": 0.04, "tf": 0.25, "pt": 0.45}


def step_time(name: str, run: Run) -> float:
    """Each peer by its own, kinder figure; ours by the clock on the wall."""
    return run.wall_step if name == "ours" else run.own_step


def steps_for(seconds: float, per_step: float) -> tuple[int, int]:
    """Steps and display interval: three intervals, of which two are measured, in about `seconds`."""
    display = max(2, round(seconds / per_step / 3))
    return 3 * display, display


@dataclass
class Case:
    """One input that all programs train."""

    columns: dict[str, str | int]  # how the table calls it
    batch: int
    configure: Callable[[int, int], dict]  # steps, display interval -> input
    cost: float = 1.0  # of a step beside that of the water input, batch 1; only for the length of the first round


def water_case(args: argparse.Namespace, precision: str, batch: int) -> Case:
    """The water input, or the user's own with data, batch and length replaced."""

    def configure(steps: int, display: int) -> dict:
        config = water_input(find_systems(args.data), steps, display, batch, precision)
        if not args.input:
            return config
        own = json.loads(args.input.read_text())
        own["model"]["descriptor"]["precision"] = own["model"]["fitting_net"]["precision"] = precision
        own["training"] |= config["training"]
        own["training"].pop("validation_data", None)
        return own

    return Case({"precision": precision, "batch": batch}, batch, configure, batch)


def compare(names: list[str], cases: list[Case], args: argparse.Namespace, work: Path) -> list[dict[str, list[Run]]]:
    """The runs of every case by program, made in the order A B C A B C ..."""
    result: list[dict[str, list[Run]]] = [{n: [] for n in names} for _ in cases]
    for (c, case), round_, n in product(enumerate(cases), range(args.rounds), names):
        runs = result[c][n]
        steps, display = steps_for(args.seconds, step_time(n, runs[-1]) if runs else GUESS[n] * case.cost)
        options = ["--skip-neighbor-stat"] if round_ else []  # the first round shows the whole start
        run = train(n, case.configure(steps, display), work / f"{c}-{round_}-{n}", args.threads, options)
        runs.append(run)
        print(f"{' '.join(map(str, case.columns.values()))} round {round_ + 1} {LABEL[n]:22s} {run}", flush=True)
    return result


def report(names: list[str], cases: list[Case], result: list[dict[str, list[Run]]]) -> tuple[str, dict]:
    """The ratio table and what goes into the JSON file."""
    rows, data = [], []
    for case, of_program in zip(cases, result, strict=True):
        ours = median(step_time(names[0], r) for r in of_program[names[0]])
        for n, runs in of_program.items():
            times = [step_time(n, r) for r in runs]
            entry = {
                **case.columns,
                "program": LABEL[n],
                "ms per step": round(median(times) * 1e3, 1),
                "CPU ms per step": round(median(r.cpu_step for r in runs) * 1e3, 1),
                "range": f"{min(times) * 1e3:.1f}–{max(times) * 1e3:.1f}",
                "samples/s": round(case.batch / median(times), 2),
                f"{LABEL[names[0]]} is faster by": round(median(times) / ours, 1),
                "peak MB": round(max(r.peak_mb for r in runs)),
                "start to first row, s": round(runs[0].first_row, 1),
                "rmse_f at the end": round(median(r.rmse_f for r in runs), 2),
            }
            rows.append([str(v) for v in entry.values()])
            data.append({**entry, "runs": [asdict(r) for r in runs]})
    return markdown_table(list(entry), rows), {"rows": data}


def check_losses(names: list[str], result: list[dict[str, list[Run]]], factor: float = 2.0) -> str:
    """All learn the same thing: force errors of one size (runs differ in length, so the factor is wide)."""
    worst = 1.0
    for runs in result:
        ends = [median(r.rmse_f for r in runs[n]) for n in names]
        worst = max(worst, max(ends) / min(ends))
    if not worst < factor:
        raise SystemExit(f"the programs do not learn alike: force errors differ by a factor {worst:.2f}")
    return f"Force errors of the programs agree within a factor {worst:.2f} (allowed {factor:g})."


def common_options(doc: str | None, name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER, help="folder with DeePMD systems of water")
    parser.add_argument("--programs", default="ours,tf,pt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=9.0, help="length of the training in each run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--name", default=name, help="of the result file")
    return parser


def run(title: str, cases: list[Case], args: argparse.Namespace) -> None:
    """Train all cases with all programs and keep the result."""
    names = available(args.programs.split(","))
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        result = compare(names, cases, args, Path(tmp))
    table, data = report(names, cases, result)
    table += f"\n\n{check_losses(names, result)}\n{args.threads} threads each, {args.rounds} rounds, alternating."
    write_result(args.name, title, table, data, names)


# --- sweeps over the size of the problem, ours only ----------------------------------------------------------------
def repeated(source: Path, times: tuple[int, int, int], folder: Path, split: int = 1, frames: int = 4) -> Path:
    """A system whose cell is repeated, energies and forces with it; `split` deals each type out over so many types."""
    first = min(source.glob("set.*"))
    coord, box, force, energy = (np.load(first / f"{k}.npy")[:frames] for k in ("coord", "box", "force", "energy"))
    types, n = np.loadtxt(source / "type.raw", dtype=int), int(np.prod(times))
    cell = box.reshape(-1, 3, 3)
    shift = np.stack(np.meshgrid(*map(np.arange, times), indexing="ij"), -1).reshape(-1, 3) @ cell  # (frames, n, 3)
    target = folder / "set.000"
    target.mkdir(parents=True)
    np.save(target / "coord.npy", (coord.reshape(len(coord), 1, -1, 3) + shift[:, :, None]).reshape(len(coord), -1))
    np.save(target / "box.npy", (cell * np.array(times)[:, None]).reshape(-1, 9))
    np.save(target / "force.npy", np.tile(force, (1, n)))
    np.save(target / "energy.npy", energy * n)
    np.savetxt(folder / "type.raw", np.tile(types * split + np.arange(len(types)) % split, n), fmt="%d")
    return folder


def sweep(kind: str, args: argparse.Namespace, work: Path) -> tuple[str, dict]:
    """Seconds per step against atoms, cutoff or number of types."""
    source = find_systems(args.data)[0]
    one = len(np.loadtxt(source / "type.raw"))
    points: list[tuple[str, tuple[int, int, int], float, int]]  # label, repeats, rcut, types per element
    if kind == "atoms":
        repeats = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 2), (4, 4, 2), (4, 4, 4)]
        points = [(str(one * int(np.prod(r))), r, 6.0, 1) for r in repeats]
    elif kind == "neighbors":
        points = [(f"{rcut:g}", (1, 1, 1), rcut, 1) for rcut in (4.0, 5.0, 6.0, 7.0, 8.0, 9.0)]
    else:
        points = [(str(2 * s), (1, 1, 1), 6.0, s) for s in (1, 2, 4, 8)]
    rows, data = [], []
    for label, times, rcut, split in points:
        system = repeated(source, times, work / f"data-{label}", split)
        expected = GUESS["ours"] * np.prod(times) * max(1.0, (rcut / 6) ** 3) * split**0.5
        config = water_input([system], *steps_for(args.seconds, float(expected)))
        sel = [
            int(np.ceil(s * (rcut / 6) ** 3 * 1.1 / split)) + 4 * (split > 1) for s in (46, 92) for _ in range(split)
        ]
        config["model"]["descriptor"] |= {"rcut": rcut, "sel": sel}
        config["model"]["type_map"] = [f"{e}{k}" if split > 1 else e for e in "OH" for k in range(split)]
        run = train("ours", config, work / f"run-{label}", args.threads)
        atoms = one * int(np.prod(times))
        rows.append(
            [
                label,
                str(atoms),
                f"{run.wall_step * 1e3:.1f}",
                f"{run.wall_step / atoms * 1e6:.0f}",
                f"{run.peak_mb:.0f}",
            ]
        )
        data.append({kind: label, "atoms": atoms, "step_s": run.wall_step, "peak_mb": run.peak_mb})
        print(*rows[-1], flush=True)
    name = {"atoms": "atoms", "neighbors": "rcut, Å", "types": "types"}[kind]
    return markdown_table([name, "atoms in the cell", "ms per step", "µs per step and atom", "peak MB"], rows), {
        "rows": data
    }


def main() -> None:
    parser = common_options(__doc__, "train_speed")
    parser.add_argument(
        "--input", type=Path, help="another input.json; its data, batch and number of steps are replaced"
    )
    parser.add_argument("--cases", default="float64:1,float64:8,float32:1", help="precision:batch, ...")
    parser.add_argument("--sweep", choices=["atoms", "neighbors", "types"])
    args = parser.parse_args()
    if not args.sweep:
        chosen = (case.split(":") for case in args.cases.split(","))
        return run("Training speed", [water_case(args, precision, int(batch)) for precision, batch in chosen], args)
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        body, data = sweep(args.sweep, args, Path(tmp))
    title = f"Cost of a training step against {args.sweep}"
    write_result(f"{args.name}_{args.sweep}", title, body, data, ["ours"])


if __name__ == "__main__":
    main()
