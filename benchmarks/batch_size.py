"""How far does a batch fill up for nothing? Milliseconds per step and samples per second against the batch.

    python benchmarks/batch_size.py --data FILE.xyz --type-map C H O [--optimizer HybridMuon]

Weights, their gradients and the optimizer's state are read and written once a step whatever the batch, so small batches
of small systems cost nearly the same: the step begins to grow where the products of the atoms take longer than that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

from common import WATER, find_systems, markdown_table, train, water_input, write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER, help="a file that ASE reads, or a folder with systems")
    parser.add_argument("--type-map", nargs="+", default=["O", "H"])
    parser.add_argument("--atoms", type=int, default=192, help="of a frame")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--optimizer", nargs="+", default=["Adam", "HybridMuon"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each training, about")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--name", default="batch_size", help="of the result file")
    args = parser.parse_args()
    systems = [args.data.resolve()] if args.data.is_file() else find_systems(args.data)[:1]
    times: dict[tuple[str, int], list[float]] = {(o, b): [] for b in args.batch for o in args.optimizer}
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        for round_ in range(args.rounds):
            for (kind, batch), found in times.items():
                display = max(5, round(args.seconds / 3 / (found[-1] if found else 0.01 + 1e-4 * args.atoms * batch)))
                config = water_input(systems, 3 * display, display, batch, args.precision)
                config["model"]["type_map"] = args.type_map
                config["model"]["descriptor"]["sel"] = "auto"
                config["optimizer"] = {"type": kind}
                folder = Path(tmp) / f"{kind}-{batch}-{round_}"
                found.append(train("ours", config, folder, args.threads).wall_step)
                print(kind, batch, f"{found[-1] * 1e3:.1f} ms", flush=True)
    rows = []
    for batch in args.batch:
        rows.append([str(batch), str(batch * args.atoms)])
        for kind in args.optimizer:
            step = median(times[kind, batch])
            rows[-1] += [f"{step * 1e3:.1f}", f"{batch / step:.0f}"]
    header = ["batch", "atoms", *(f"{kind}, {what}" for kind in args.optimizer for what in ("ms/step", "samples/s"))]
    body = markdown_table(header, rows)
    body += f"\n\n{args.precision}, {args.threads} threads, medians of {args.rounds} rounds."
    data = {"seconds_per_step": {f"{kind} {batch}": found for (kind, batch), found in times.items()}}
    write_result(args.name, "Cost of a step against the batch", body, data, ["ours"])


if __name__ == "__main__":
    main()
