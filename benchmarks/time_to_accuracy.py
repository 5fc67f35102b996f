"""How long until the model is good? Wall time to the errors that DeePMD-kit reaches with its recipe.

    python benchmarks/time_to_accuracy.py --train data_0 data_1 data_2 --valid data_3            ours and DeePMD-kit
    python benchmarks/time_to_accuracy.py --train run.xyz --valid test.xyz --ladder 300,1000     files that ASE reads

DeePMD-kit (TensorFlow) trains by the recipe of its examples (Adam, exponential decay) for --peer-steps, and with
--best-steps also by the best it has (PyTorch, HybridMuon, a cosine from --best-rate to 0); Allforce by its own
(`dp train --recipe`) for the steps of --ladder, a run for each, because its rate ends at zero. All with the same nets,
data, precision and threads, in turn, as a user does: wall time is that of the whole process, start included. With
--own-neuron Allforce also trains fitting nets of other widths, such as those of `dp init`. The batch is part of the
recipe: --batch is DeePMD-kit's, --own-batch ours (left out: the same, or mixed for data of several compositions).
Errors are those of `dp test` on all validation frames. The time to an accuracy is that of the shortest run of the
ladder whose force and energy errors are both as small. Medians over the seeds; --long-steps of DeePMD-kit are run with
the first seed only.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from common import LABEL as PROGRAMS
from common import RESULTS, available, markdown_table, test_errors, train, water_input, write_result

from allforce.data.discover import open_systems
from allforce.train.recipe import FITTING, OPTIMIZER, RATE, TRAINING, mixed_batch, with_loss

LABELS = ("energy", "force", "virial")
OWN = ("ours", "narrow")  # Allforce with the same nets, and with those of --own-neuron
LABEL = {**PROGRAMS, "narrow": "Allforce, other nets"}


def as_npy(entries: list[str], folder: Path, type_map: list[str] | None) -> tuple[Path, list[str]]:
    """The systems in DeePMD-kit's layout, which both programs read, and their type map."""
    systems = open_systems(entries, type_map)
    for n, system in enumerate(systems):
        frames = [system.frame(k) for k in range(system.nframes)]
        place = folder / f"system{n:03d}" / "set.000"
        place.mkdir(parents=True)
        (place.parent / "type.raw").write_text("\n".join(map(str, frames[0].type)))
        (place.parent / "type_map.raw").write_text("\n".join(system.type_map))
        np.save(place / "coord.npy", np.stack([f.coord.ravel() for f in frames]))
        if system.periodic:
            np.save(place / "box.npy", np.stack([f.cell.ravel() for f in frames]))
        else:
            (place.parent / "nopbc").touch()
        for name in set(LABELS) & system.label_names:
            np.save(place / f"{name}.npy", np.stack([np.ravel(f.labels[name]) for f in frames]))
    return folder, systems[0].type_map


def config_of(name: str, steps: int, seed: int, type_map: list[str], data: Path, args: argparse.Namespace) -> dict:
    """DeePMD-kit's example, or the recipe in its place."""
    systems = sorted(p.parent for p in data.rglob("type.raw"))
    batch = args.batch
    if name in OWN:
        batch = args.own_batch or mixed_batch(open_systems([str(s) for s in systems], type_map)) or args.batch
    config = water_input(systems, steps, display=max(1, steps // 4), batch=batch, precision=args.precision)
    config["model"]["type_map"] = type_map
    config["model"]["descriptor"]["sel"] = "auto"
    config["model"]["descriptor"]["seed"] = config["model"]["fitting_net"]["seed"] = seed
    config["training"] |= {"seed": 10 * seed, "save_freq": steps}
    config["learning_rate"] |= {"decay_steps": max(1, steps // 20), "start_lr": 0.001, "stop_lr": 1e-6}
    if name in OWN:
        config |= {"learning_rate": dict(RATE), "optimizer": dict(OPTIMIZER), "loss": with_loss(config["loss"])}
        config["training"] |= TRAINING
        config["model"]["fitting_net"] |= FITTING
        if name == "narrow":
            config["model"]["fitting_net"]["neuron"] = [int(n) for n in args.own_neuron.split(",")]
    if name == "pt":  # as it is documented there, but for the rate
        config["learning_rate"] = {"type": "cosine", "start_lr": args.best_rate, "stop_lr": 1e-8}
        config["optimizer"] = {"type": "HybridMuon"}
    return config


def one(name: str, config: dict, folder: Path, unseen: Path, threads: int) -> dict[str, float]:
    """Wall time of the training, errors of the model."""
    program, begun = "ours" if name in OWN else name, time.perf_counter()
    train(program, config, folder, threads)
    wall = time.perf_counter() - begun
    force, energy = test_errors(program, folder, unseen, threads)
    steps = config["training"]["numb_steps"]
    print(
        f"{LABEL[name]}, {steps} steps: {wall:.1f} s, force {force:.4f} eV/Å, energy {energy:.2f} meV/atom", flush=True
    )
    return {"steps": steps, "wall": wall, "force": force, "energy": energy}


def reached(runs: list[dict[str, float]], target: dict[str, float]) -> dict[str, float] | None:
    """The shortest run that is as good."""
    good = [r for r in runs if r["force"] <= target["force"] and r["energy"] <= target["energy"]]
    return min(good, key=lambda r: r["wall"], default=None)


def middle(runs: list[dict[str, float]], steps: int) -> dict[str, float]:
    """The median of all seeds."""
    same = [r for r in runs if r["steps"] == steps]
    return {key: median(r[key] for r in same) for key in ("steps", "wall", "force", "energy")}


def row(name: str, run: dict[str, float], medians: dict[str, list[dict[str, float]]]) -> list[str]:
    cells = [LABEL[name], f"{run['steps']:.0f}", f"{run['wall']:.1f}", f"{run['force']:.4f}", f"{run['energy']:.2f}"]
    for own in (n for n in OWN if n in medians):
        first = reached(medians[own], run) if name not in OWN else None
        cells.append(
            f"{first['steps']:.0f} steps, {first['wall']:.1f} s, 1/{run['wall'] / first['wall']:.0f}" if first else ""
        )
    return cells


def draw(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Force error against wall time, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 4), layout="constrained")
    for name, runs in found.items():
        axes.loglog([r["wall"] for r in runs], [r["force"] for r in runs], "o", label=LABEL[name])
    axes.set(xlabel="wall time / s", ylabel="force RMSE / (eV/Å)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", required=True, help="training data")
    parser.add_argument("--valid", nargs="+", required=True, help="data for the errors")
    parser.add_argument("--name", default="time_to_accuracy", help="of the result")
    parser.add_argument("--precision", default="float32", choices=["float32", "float64"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--own-batch", type=lambda text: int(text) if text.isdigit() else text, help="auto:256 or so")
    parser.add_argument("--own-neuron", default="", help="also fitting nets of these widths, such as 128,128,128")
    parser.add_argument("--ladder", default="150,300,600,1200,2400", help="steps of Allforce")
    parser.add_argument("--peer-steps", default="4000", help="steps of DeePMD-kit")
    parser.add_argument("--long-steps", default="", help="more steps of DeePMD-kit, for one seed")
    parser.add_argument("--best-steps", default="", help="steps of DeePMD-kit with PyTorch and HybridMuon")
    parser.add_argument("--best-rate", type=float, default=0.001)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    peer = ",".join(filter(None, [args.peer_steps, args.long_steps]))
    lengths = {"ours": args.ladder, "tf": peer, "pt": args.best_steps}
    names = available([n for n, steps in lengths.items() if steps])
    if args.own_neuron:
        names, lengths["narrow"] = [*OWN, *names[1:]], args.ladder
    once = args.long_steps.split(",")
    found: dict[str, list[dict[str, float]]] = {n: [] for n in names}
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        data, type_map = as_npy(args.train, Path(tmp) / "train", None)
        unseen, _ = as_npy(args.valid, Path(tmp) / "valid", type_map)
        for seed in range(1, args.seeds + 1):
            for n in names:
                for steps in (int(s) for s in lengths[n].split(",") if seed == 1 or s not in once):
                    config = config_of(n, steps, seed, type_map, data, args)
                    folder = Path(tmp) / f"{n}-{seed}-{steps}"
                    found[n].append({"seed": seed, **one(n, config, folder, unseen, args.threads)})
    medians = {n: [middle(found[n], int(steps)) for steps in lengths[n].split(",")] for n in names}
    rows = [row(n, r, medians) for n in names for r in medians[n]]
    header = ["program", "steps", "wall, s", "force RMSE, eV/Å", "energy RMSE, meV/atom"]
    header += [f"{LABEL[n]}: as good after" for n in OWN if n in names]
    body = markdown_table(header, rows)
    batches = f"batch {args.batch}" + (f" (Allforce: {args.own_batch})" if args.own_batch else "")
    batches += f", other nets: fitting {args.own_neuron}" if args.own_neuron else ""
    body += f"\n\n{args.precision}, {batches}, {args.threads} threads, medians of {args.seeds} seed(s)."
    programs = [n for n in names if n in PROGRAMS]
    write_result(args.name, "Wall time to an accuracy", body, {"runs": found}, programs)
    draw(found, RESULTS / f"{args.name}.png")


if __name__ == "__main__":
    main()
