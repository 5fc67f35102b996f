"""How far is the table from the nets? Values and slopes against K, energies and forces, and the learning itself.

    python benchmarks/table_error.py --data WATER

1. Largest error of a table of K splines over its whole range, relative to the largest value (slope), for weights as
   initialised, doubled, four times as large, and trained.
2. Energies and forces of the trained model on the table against the nets themselves, on frames it has not seen.
3. The same training on the table and with the exact nets: force error on those frames after so many steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import WATER, find_systems, markdown_table, test_errors, train, water_input, write_result

from allforce.data.batch import Batch
from allforce.data.discover import open_systems
from allforce.data.loader import collate
from allforce.files.model_file import load_model
from allforce.models.standard import StandardModel
from allforce.models.table import TableConfig
from allforce.neighbors import neighbor_list

NODES = [32, 64, 128, 256, 512, 1024]


def scaled(folder: Path, factor: float) -> StandardModel:
    """The untrained model with all weights and biases of its embedding nets multiplied."""
    model = load_model(folder / "start.dp")
    with torch.no_grad():
        for p in model.descriptor.nets.parameters():
            p.mul_(factor)
    return model


def curve_error(model: StandardModel, nodes: int) -> tuple[float, float]:
    """Largest relative error of value and slope at 20,000 places of the table's range, over all nets."""
    descriptor = model.descriptor
    model.prepare(TableConfig(tolerance=1e9, nodes=nodes))
    grid = descriptor.table.grid
    assert grid is not None
    x = torch.linspace(grid.lo, grid.hi, 20001, dtype=torch.float64)
    value, slope = 0.0, 0.0
    coefficients = descriptor.table.coefficients(descriptor.nets).detach()  # (K, nets, M1)
    for net, C in zip(descriptor.nets, coefficients.unbind(1), strict=True):
        with torch.no_grad():
            exact = torch.func.jvp(net, (x[:, None],), (torch.ones_like(x)[:, None],))
        near = grid.interpolate(C, x)
        off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(near, exact, strict=True)]
        value, slope = max(value, off[0]), max(slope, off[1])
    return value, slope


def frames(system: Path, model: StandardModel, count: int = 4) -> Batch:
    """The first frames of a system as one batch."""
    found = [open_systems([str(system)], model.type_map)[0].frame(k) for k in range(count)]
    return collate(found, [neighbor_list(f.coord, f.cell, model.needs.limit.rcut) for f in found], len(model.type_map))


def model_error(model: StandardModel, batch: Batch, nodes: int) -> tuple[float, float]:
    """Largest difference of energies per atom (eV) and forces (eV/Å) between table and nets."""
    with torch.no_grad():
        model.prepare(TableConfig(mode="exact"))
        exact = model(batch, ("energy", "forces"))
        model.prepare(TableConfig(tolerance=1e9, nodes=nodes))
        table = model(batch, ("energy", "forces"))
    energy = ((table["energy"] - exact["energy"]).abs() / batch.natoms).max()
    return float(energy), float((table["forces"] - exact["forces"]).abs().max())


def learn(mode: str, args: argparse.Namespace, folder: Path, steps: int) -> tuple[float, float]:
    """Train with `training.table.mode`; force and energy error on the last system."""
    *training, unseen = find_systems(args.data)
    config = water_input(training, steps, display=max(1, steps // 5))
    config["training"]["table"] = {"mode": mode}
    config["learning_rate"] |= {"decay_steps": 50, "stop_lr": 1e-5}
    train("ours", config, folder, args.threads)
    return test_errors("ours", folder, unseen, args.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    unseen = find_systems(args.data)[-1]
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        folder = Path(tmp)
        learnt = {mode: learn(mode, args, folder / mode, args.steps) for mode in ("table", "exact")}
        print(f"force and energy error: {learnt}", flush=True)
        learn("table", args, folder / "start", 5)  # five steps: statistics of the data, weights all but untouched
        (folder / "start/model.dp").rename(folder / "start.dp")
        trained = load_model(folder / "table/model.dp")
        models = {f"initial × {k:g}": scaled(folder, k) for k in (1.0, 2.0, 4.0)} | {f"{args.steps} steps": trained}
        curve = {label: [curve_error(model, n) for n in NODES] for label, model in models.items()}
        batch = frames(unseen, trained)
        whole = [model_error(trained, batch, n) for n in NODES]
    header = ["weights", *(f"K = {n}" for n in NODES)]
    rows = [[label, *(f"{v:.0e} / {s:.0e}" for v, s in errors)] for label, errors in curve.items()]
    rows.append(["energy, eV/atom / force, eV/Å", *(f"{e:.0e} / {f:.0e}" for e, f in whole)])
    ratio = learnt["table"][0] / learnt["exact"][0]
    body = "Largest relative error, value / slope; last row: trained model on frames not seen.\n\n"
    body += markdown_table(header, rows)
    body += f"\n\nForce RMSE after {args.steps} steps: table {learnt['table'][0]:.4f} eV/Å, "
    body += f"exact {learnt['exact'][0]:.4f} eV/Å; ratio {ratio:.4f}."
    data = {"nodes": NODES, "curve": curve, "model": whole, "learnt": learnt}
    write_result("table_error", "Error of the table", body, data, ["ours"])
    if not np.isclose(ratio, 1.0, atol=0.01):
        raise SystemExit(f"learning on the table and with the exact nets differ by more than 1 %: {ratio:.4f}")


if __name__ == "__main__":
    main()
