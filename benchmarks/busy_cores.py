"""What does a training lose beside other programs? Wall time of short runs of the recipe, alone and beside busy ones.

    python benchmarks/busy_cores.py --data WATER/data_0 [--steps 220] [--busy 0 1 2]

With one thread, with as many as there are cores, and without a number of threads, in turn; the program takes fewer than
it is given while others use the cores (allforce/train/free_cores.py). A busy program is a loop of Python. More threads
must not be slower than fewer by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from common import WATER, command, environment, find_systems, markdown_table, water_input, write_result

LABELS = {1: "1 thread", 0: "no number"}


def wall_time(config: Path, folder: Path, threads: int) -> float:
    """Of `dp train --recipe`; threads 0: not given."""
    env = environment("ours", threads)
    if threads == 0:
        del env["OMP_NUM_THREADS"]
    begun = time.perf_counter()
    run = [*command("ours"), "train", "--recipe", str(config)]
    subprocess.run(run, cwd=folder, env=env, check=True, capture_output=True)
    return time.perf_counter() - begun


def beside(count: int, stack: ExitStack) -> None:
    """Start so many busy programs, which end with the stack."""
    for _ in range(count):
        program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(program.wait)
        stack.callback(program.kill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER)
    parser.add_argument("--type-map", nargs="+", default=["O", "H"])
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="busy_cores", help="of the result file")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    kinds = {**LABELS, cores: f"{cores} threads"}
    found: dict[tuple[int, int], list[float]] = {(b, t): [] for b in args.busy for t in kinds}
    config = water_input(find_systems(args.data), 30 * args.steps, 3000, args.batch, "float32")  # the recipe: a 30th
    config["model"]["type_map"] = args.type_map
    config["model"]["descriptor"]["sel"] = "auto"
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        path = Path(tmp) / "input.json"
        path.write_text(json.dumps(config))
        for _ in range(args.rounds):
            for busy in args.busy:
                with ExitStack() as stack:
                    beside(busy, stack)
                    for threads in kinds:
                        found[busy, threads].append(wall_time(path, Path(tmp), threads))
                        print(busy, kinds[threads], f"{found[busy, threads][-1]:.1f} s", flush=True)
    rows = [[str(b), *(f"{median(found[b, t]):.1f}" for t in kinds)] for b in args.busy]
    body = markdown_table(["busy programs", *(f"{label}, s" for label in kinds.values())], rows)
    body += f"\n\n{args.steps} steps of the recipe, float32, start included, medians of {args.rounds} rounds in turn."
    data = {"seconds": {f"{b} busy, {kinds[t]}": seconds for (b, t), seconds in found.items()}}
    write_result(args.name, "Training beside other programs", body, data, ["ours"])


if __name__ == "__main__":
    main()
