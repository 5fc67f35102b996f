"""What does HybridMuon cost? Seconds per step with Adam and with HybridMuon, in turn.

python benchmarks/optimizer_cost.py --data WATER [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

from common import WATER, find_systems, markdown_table, train, water_input, write_result

CASES = [("float32", 1), ("float64", 1), ("float32", 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    system, found, rows = find_systems(args.data)[0], {}, []
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        for precision, batch in CASES:
            steps = max(30, args.steps // batch)
            times: dict[str, list[float]] = {"Adam": [], "HybridMuon": []}
            for round_ in range(args.rounds):
                for kind in times:
                    config = water_input([system], steps, display=steps // 3, batch=batch, precision=precision)
                    config["optimizer"] = {"type": kind}
                    folder = Path(tmp) / f"{precision}-{batch}-{kind}-{round_}"
                    times[kind].append(train("ours", config, folder, args.threads).wall_step)
            adam, muon = (median(t) * 1e3 for t in times.values())
            found[f"{precision}, batch {batch}"] = times
            rows.append([f"{precision}, batch {batch}", f"{adam:.1f}", f"{muon:.1f}", f"{muon / adam:.2f}"])
            print(rows[-1], flush=True)
    body = markdown_table(["", "Adam, ms/step", "HybridMuon, ms/step", "ratio"], rows)
    body += f"\n\nMedians of {args.rounds} runs of each, {args.threads} threads."
    write_result("optimizer_cost", "Cost of HybridMuon", body, {"seconds_per_step": found}, ["ours"])


if __name__ == "__main__":
    main()
