"""Does the learning follow DeePMD-kit's? Force error on unseen frames after 4,000 steps, over three seeds.

    python benchmarks/learning_curve.py --data WATER                ours, against DeePMD-kit's measured figures below
    python benchmarks/learning_curve.py --data WATER --with-peer    runs DeePMD-kit (TensorFlow), too

WATER is the folder of DeePMD-kit's water example (data_0 … data_3): all systems but the last are trained on, all
frames of the last are tested with `dp test`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import mean

from common import (
    LABEL,
    WATER,
    available,
    find_systems,
    lcurve,
    markdown_table,
    test_errors,
    train,
    water_input,
    write_result,
)

SEEDS = [(1, 10), (2, 20), (3, 30)]  # of the model, of the training
# DeePMD-kit 3.2.0, TensorFlow, its water, 4,000 steps, 80 frames of data_3: eV/Å and meV/atom of each pair of seeds.
MEASURED = {"force": [0.180, 0.195, 0.206], "energy": [1.96, 2.37, 2.19]}
BAR = 1.1


def one(name: str, seeds: tuple[int, int], args: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """Train, freeze, test: force RMSE (eV/Å) and energy RMSE per atom (meV)."""
    *training, unseen = find_systems(args.data)
    config = water_input(training, args.steps, display=args.steps // 8)
    config["model"]["descriptor"]["seed"] = config["model"]["fitting_net"]["seed"] = seeds[0]
    config["training"]["seed"] = seeds[1]
    config["training"]["save_freq"] = args.steps
    config["learning_rate"] |= {"decay_steps": 200, "start_lr": 0.001, "stop_lr": 1e-6}
    train(name, config, folder, args.threads)
    return test_errors(name, folder, unseen, args.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--with-peer", action="store_true", help="run DeePMD-kit instead of using its measured figures")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.steps != 4000 and not args.with_peer:
        parser.error("DeePMD-kit's figures are for 4000 steps; other lengths need --with-peer")
    names = available(["ours", "tf"] if args.with_peer else ["ours"])
    errors: dict[str, list[tuple[float, float]]] = {n: [] for n in names}
    curves: dict[str, list[list[float]]] = {n: [] for n in names}
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        for seeds in SEEDS:
            for n in names:
                folder = Path(tmp) / f"{n}-{seeds[0]}"
                errors[n].append(one(n, seeds, args, folder))
                curves[n].append(lcurve(folder / "lcurve.out")["rmse_f_trn"].tolist())
                force, energy = errors[n][-1]
                print(f"{LABEL[n]} seeds {seeds}: force {force:.3f} eV/Å, energy {energy:.2f} meV/atom", flush=True)
    if not args.with_peer:
        errors["tf"] = list(zip(MEASURED["force"], MEASURED["energy"], strict=True))
    rows = [
        [
            LABEL[n],
            *(f"{f:.3f} / {e:.2f}" for f, e in errors[n]),
            f"{mean(f for f, _ in errors[n]):.3f} / {mean(e for _, e in errors[n]):.2f}",
        ]
        for n in ("ours", "tf")
    ]
    ratio = mean(f for f, _ in errors["ours"]) / mean(f for f, _ in errors["tf"])
    body = markdown_table(
        ["force RMSE, eV/Å / energy RMSE, meV/atom", *(f"seeds {a}/{b}" for a, b in SEEDS), "mean"], rows
    )
    body += f"\n\n{args.steps} steps, batch 1, float64, all frames of the last system. "
    body += f"Mean force error, Allforce / DeePMD-kit: {ratio:.3f} (at most {BAR})."
    body += (
        ""
        if args.with_peer
        else "\nDeePMD-kit's figures: version 3.2.0, TensorFlow, its own water data, 4,000 steps, measured once."
    )
    write_result(
        "learning_curve",
        "Learning curve against DeePMD-kit",
        body,
        {"errors": errors, "ratio": ratio, "rmse_f_trn": curves},
        names,
    )
    if not ratio <= BAR:
        raise SystemExit(f"force error {ratio:.3f} times DeePMD-kit's, more than {BAR}")


if __name__ == "__main__":
    main()
