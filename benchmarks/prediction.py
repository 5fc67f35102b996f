"""How far is `dp scaling-test --predict` from what is measured, for 1, 2, 4 workers and for frames split over them?

    python benchmarks/prediction.py --data WATER

Costs of a step and real runs are measured in turn, several times over, because a machine that others share changes its
speed within a minute. The prediction is that of the median costs of all rounds, held against the median of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median

from common import WATER, find_systems, markdown_table, water_input, write_result

from allforce.train.predict import average, measure_costs
from allforce.train.scaling import _environment, _measure, _plan

CASES = ((1, 1), (2, 1), (4, 1), (2, 2))  # workers, and over how many of them a frame is split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER)
    parser.add_argument("--precision", default="float64")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="prediction")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    costs, rates = [], {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as folder:
        path = Path(folder) / "input.json"
        path.write_text(json.dumps(water_input(find_systems(args.data), 100, 100, args.batch, args.precision)))
        plan, skip = _plan(str(path), args.steps)
        for _ in range(args.rounds):
            for workers, split in CASES:
                path.write_text(json.dumps(plan))
                costs.append(measure_costs(folder, _environment()))
                divided = {**plan, "training": {**plan["training"], "spatial_workers": split}}
                path.write_text(json.dumps(divided))
                rates[workers, split].append(_measure(folder, workers, "auto", skip).rate)
                print(
                    workers,
                    split,
                    f"{rates[workers, split][-1]:.2f}",
                    f"{costs[-1].rate(workers, split):.2f}",
                    flush=True,
                )
    said = average(costs)
    rows = []
    for (workers, split), found in rates.items():
        rate, guess = median(found), said.rate(workers, split)
        span = f"{min(found):.1f}–{max(found):.1f}"
        rows.append(
            [str(workers), str(split), f"{rate:.1f}", span, f"{guess:.1f}", f"{100 * (guess / rate - 1):+.0f} %"]
        )
    head = ["workers", "split a frame", "samples/s, measured", "range", "predicted", "off by"]
    body = (
        markdown_table(head, rows) + f"\n\nBatch {args.batch}, {args.precision}, {args.rounds} rounds, one thread each."
    )
    data = {"rates": {f"{w}x{s}": r for (w, s), r in rates.items()}, "predicted": [c.rate(1, 1) for c in costs]}
    write_result(args.name, "Predicted and measured speed of workers", body, data, ["ours"])


if __name__ == "__main__":
    main()
