"""Samples per second with more workers: 1, 2 and 4 ranks of one thread, and one process with as many threads as cores.

    python benchmarks/scaling.py --data WATER --batch 1

The same as `dp scaling-test`, with one process of many threads beside the ranks, and alternating over several rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

from common import WATER, find_systems, markdown_table, train, water_input, write_result


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", default="float64")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=480)  # long enough that every worker has met most frames
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="scaling", help="of the result file")
    args = parser.parse_args()
    config = water_input(find_systems(args.data), args.steps, args.steps // 4, args.batch, args.precision)
    cases = [(w, 1) for w in args.workers] + [(1, cores)] * (cores > 1)
    speed: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        for round_ in range(args.rounds):
            for workers, threads in cases:
                options = ["--skip-neighbor-stat", *(["--workers", str(workers)] if workers > 1 else [])]
                run = train("ours", config, Path(tmp) / f"{workers}-{threads}-{round_}", threads, options)
                speed[workers, threads].append(workers * args.batch / run.wall_step)
                print(f"{workers} × {threads}: {speed[workers, threads][-1]:.1f} samples/s", flush=True)
    middle = {case: median(s) for case, s in speed.items()}
    base = middle[cases[0]]
    rows = [
        [
            str(w),
            str(t),
            f"{100 / middle[w, t]:.2f}",
            f"{middle[w, t]:.1f}",
            f"{middle[w, t] / base:.2f}",
            f"{middle[w, t] / base / (w * t):.0%}",
        ]
        for w, t in cases
    ]
    body = markdown_table(
        ["workers", "threads each", "seconds every 100 samples", "samples per second", "speed up", "efficiency"], rows
    )
    body += f"\n\n{args.precision}, batch {args.batch} a worker, {args.rounds} rounds, alternating. "
    body += "Efficiency counts threads, not the cores that exist."
    data = {"rows": [{"workers": w, "threads": t, "samples_per_s": speed[w, t]} for w, t in cases]}
    write_result(args.name, "Scaling with workers", body, data, ["ours"])


if __name__ == "__main__":
    main()
