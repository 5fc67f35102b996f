"""One frame over several workers: what each of them holds, and how much faster a step of training becomes.

    python benchmarks/spatial.py holds      # pairs, time to find them, peak memory of a worker, S = 1, 2, 4
    python benchmarks/spatial.py speed      # S = 2 beside S = 1, one thread each, at 1,536 and 12,000 atoms

Frames are cells of the water example side by side, every atom moved by its own 0.02 Å; the model is DeePMD-kit's for
water. Times of `holds` are those of one block after the other in one process, so that more workers than cores do
not disturb; its memory is that of real workers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import ROOT, WATER, command, environment, find_systems, markdown_table, water_input, write_result

sys.path.insert(0, str(ROOT))

SIZES = {1536: (4, 2, 2), 12000: (5, 5, 5)}  # atoms: cells of 96 atoms along a, b, c


def make_system(folder: Path, repeat: tuple[int, int, int], frames: int) -> Path:
    """A DeePMD system of so many cells; labels are those of one cell, repeated: their values cost nothing."""
    source, rng = find_systems(WATER)[0], np.random.default_rng(1)
    coord, box, force = (np.load(source / f"set.000/{x}.npy")[0].reshape(-1, 3) for x in ("coord", "box", "force"))
    places = np.array(list(np.ndindex(repeat))) @ box
    x = (coord[:, None] + places).reshape(-1, 3)  # an atom, then its images: types stay together
    count = len(places)
    (folder / "set.000").mkdir(parents=True)
    types = np.repeat(np.array((source / "type.raw").read_text().split(), int), count)
    (folder / "type.raw").write_text(" ".join(map(str, types)))
    (folder / "type_map.raw").write_text((source / "type_map.raw").read_text())
    arrays = {
        "coord": x.ravel() + rng.normal(scale=0.02, size=(frames, x.size)),
        "box": np.tile((box * np.array(repeat)[:, None]).ravel(), (frames, 1)),
        "energy": np.full(frames, np.load(source / "set.000/energy.npy").ravel()[0] * count),
        "force": np.tile(np.repeat(force, count, axis=0).ravel(), (frames, 1)),
    }
    for name, value in arrays.items():
        np.save(folder / f"set.000/{name}.npy", value)
    return folder


def config_of(system: Path, steps: int, workers: int, every: int) -> dict:
    config = water_input([system], steps, every)
    config["model"]["descriptor"]["sel"] = [60, 110]
    config["training"] |= {"spatial_workers": workers, "metrics_file": "metrics.jsonl"}
    return config


# --- what a worker holds -------------------------------------------------------------------------------------------
def block_figures(system: Path, size: int) -> dict[str, float]:
    """Of the largest block: own atoms, those with the halo, pairs, ms of processor time to find and arrange them."""
    from allforce.data.discover import open_systems
    from allforce.data.loader import collate_parts
    from allforce.data.prepare import Limit, Needs, Preparation

    frame = open_systems(str(system), ["O", "H"])[0].frame(0)
    prepare = Preparation(Needs(2, Limit(6.0, [60, 110])))
    found = []
    for block in range(size):
        times = []
        for _ in range(7):
            start = time.process_time()
            whole, part = prepare.part(frame, "water", block, size)
            collate_parts([whole], [part], 2)
            times.append(time.process_time() - start)
        found.append((part.centers, len(part.atoms), len(part.pairs[0]), min(times) * 1e3))
    return dict(zip(("own", "with_halo", "pairs", "milliseconds"), map(max, zip(*found, strict=True)), strict=True))


def peak_memory(system: Path, size: int, folder: Path) -> list[float]:
    """MiB of each worker at its highest, of a training of four steps, read while it runs."""
    folder.mkdir()
    (folder / "input.json").write_text(json.dumps(config_of(system, 4, size, 4)))
    options = ["--workers", str(size)] if size > 1 else []
    args = [*command("ours"), "train", "--skip-neighbor-stat", *options, "input.json"]
    child = subprocess.Popen(
        args, cwd=folder, env=environment("ours", 1), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    peaks: dict[int, float] = {}
    while child.poll() is None:
        for pid in [child.pid] if size == 1 else children(child.pid):
            try:
                match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            except OSError:
                continue
            if match:
                peaks[pid] = int(match[1]) / 1024
        time.sleep(0.05)
    if child.returncode:
        raise SystemExit(child.stderr.read()[-2000:] if child.stderr else "failed")
    return sorted(peaks.values())[-size:]


def children(pid: int) -> list[int]:
    return [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]


def holds(folder: Path) -> None:
    system = make_system(folder / "water", SIZES[12000], 2)
    small = peak_memory(make_system(folder / "small", (1, 1, 1), 2), 1, folder / "empty")[0]
    rows, data = [], {"a_frame_of_96_atoms_MiB": small, "rows": []}
    for size in (1, 2, 4):
        figures = block_figures(system, size)
        memory = peak_memory(system, size, folder / f"peak{size}")
        data["rows"].append({"S": size, **figures, "peak_MiB": memory})
        own = max(memory) - small
        rows.append(
            [str(size), f"{figures['own']:,}", f"{figures['with_halo']:,}", f"{figures['pairs']:,}"]
            + [f"{figures['milliseconds']:.0f} ms", f"{max(memory):,.0f} MiB", f"{own:,.0f} MiB"]
        )
        print(rows[-1], flush=True)
    head = ["S", "own atoms", "with halo", "pairs", "neighbours and geometry", "peak memory", "of it for the frame"]
    body = (
        markdown_table(head, rows)
        + "\n\n12,000 atoms of water, float64, the largest of all workers. The frame's memory is"
    )
    body += f" the peak less that of a training on 96 atoms ({small:,.0f} MiB)."
    write_result("spatial_holds", "What one of S workers holds of a frame", body, data, ["ours"])


# --- speed ---------------------------------------------------------------------------------------------------------
def worker(folder: Path, rounds: int) -> None:
    """One of two workers: in turns rank 0 makes a step alone, and both make it together.

    Times are the wall clock of rank 0, and the processor time of the worker that used more of it.
    """
    from allforce.config.load import load_input
    from allforce.distributed import devices
    from allforce.distributed.comm import SerialComm
    from allforce.distributed.connect import join
    from allforce.distributed.launch import detect
    from allforce.train.source import Options
    from allforce.train.start import Job, prepare

    world = detect()
    device, _ = devices.setup(world)
    comm = join(world, "auto", device)
    settings = load_input(str(folder / "input.json"))
    alone = settings.model_copy(update={"training": settings.training.model_copy(update={"spatial_workers": 1})})
    jobs = {
        1: prepare(alone, SerialComm(), Options(output=None), device),
        2: prepare(settings, comm, Options(output=None), device),
    }

    def step(job: Job, whole: Any, number: int) -> None:
        batch = job.loader.batch(number)  # kept since the first time, as in a training
        job.learn(batch, 1e-3, 1.0, first=True)
        job.state.flat.reduce_finish(job.state.flat.reduce_start(whole), whole)
        job.state.update(1e-4)

    for job in jobs.values():
        job.state.flat.write_directly()
    times: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for _ in range(rounds + 1):
        for size, job in jobs.items():
            comm.barrier()
            start, used = time.perf_counter(), time.process_time()
            if size == 2 or comm.rank == 0:
                for number in range(2):  # the two frames of the system
                    step(job, comm if size == 2 else SerialComm(), number)
            used = time.process_time() - used
            comm.barrier()
            times[size].append(((time.perf_counter() - start) / 2, max(comm.gather(used)) / 2))
    if comm.rank == 0:
        (folder / "times.json").write_text(json.dumps({size: t[1:] for size, t in times.items()}))
    comm.barrier()
    comm.close()


def speed(folder: Path, rounds: int, atoms: list[int]) -> None:
    start = (
        "import sys; from allforce.distributed.spawn import run_local_workers as run; sys.exit(run(2, sys.argv[1:]))"
    )
    rows, data = [], []
    for n in atoms:
        here, count = folder / str(n), rounds * (1 if n > 5000 else 4)
        system = make_system(here / "water", SIZES[n], 2)
        (here / "input.json").write_text(json.dumps(config_of(system, 100, 2, 100)))
        args = [
            sys.executable,
            "-c",
            start,
            sys.executable,
            __file__,
            "worker",
            "--rounds",
            str(count),
            "--folder",
            here,
        ]
        done = subprocess.run(args, env=environment("ours", 1), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        times = json.loads((here / "times.json").read_text())
        one, two = (np.array(times[size]).T for size in ("1", "2"))  # (2, rounds): wall clock, processor
        data.append({"atoms": n, "seconds": times})
        wall, processor = one[0] / two[0], one[1] / two[1]
        rows.append([f"{n:,}", f"{median(one[0]):.3f} s", f"{median(two[0]):.3f} s", f"{median(wall):.2f}"])
        rows[-1] += [f"{one[0].min() / two[0].min():.2f}", f"{median(processor):.2f}"]
        print(rows[-1], flush=True)
    head = ["atoms", "a step, S = 1", "a step, S = 2", "speed up", "of the fastest turns", "by processor time"]
    body = (
        markdown_table(head, rows)
        + "\n\nTraining, float64, one frame a step, one thread a worker. Two workers, in turns: "
    )
    body += (
        "the first makes two steps alone while the other waits, then both make them together. Medians of the turns and "
    )
    body += (
        "of the ratios of neighbouring turns; the ratio of the fastest turns; the ratio of the processor times, of the "
    )
    body += "worker that used more, which other programs on the machine disturb least."
    write_result("spatial_speed", "One frame over two workers", body, {"rows": data}, ["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["holds", "speed", "worker"])  # worker: what speed starts twice
    parser.add_argument(
        "--rounds", type=int, default=8, help="turns of the largest frame; four times as many of others"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--atoms", type=int, nargs="+", choices=list(SIZES), default=list(SIZES))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="allforce-bench-") as tmp:
        if args.question == "holds":
            holds(Path(tmp))
        elif args.question == "speed":
            speed(Path(tmp), args.rounds, args.atoms)
        else:
            worker(args.folder, args.rounds)


if __name__ == "__main__":
    main()
