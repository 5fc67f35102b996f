"""`dp scaling-test`: how many samples a second one, two, … workers train, as a table and a picture."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allforce.config.load import load_input, normalised
from allforce.errors import UserError

TIME = re.compile(r"average training time: ([\d.e+-]+) s/batch")
SHARE = re.compile(r"time of training: .*communication ([\d.]+) %")
FRAMES = re.compile(r"global batch: +(\d+)(?: to (\d+))? frames")


@dataclass
class Measurement:
    workers: int
    seconds: float  # a step
    frames: float  # of a step, all workers together
    communication: float  # share of the time

    @property
    def rate(self) -> float:
        """Samples a second of all workers together."""
        return self.frames / self.seconds


def scaling_test(path: str, workers: list[int], steps: int, picture: str, engine: str = "auto") -> list[Measurement]:
    """Train the input for 2·steps steps with each number of workers; the first half warms up."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    measured = []
    with tempfile.TemporaryDirectory(prefix="allforce-scaling-") as folder:
        plan, skip = _plan(path, steps)
        (Path(folder) / "input.json").write_text(json.dumps(plan))
        for count in workers:
            measured.append(_measure(folder, count, engine, threads, skip))
            print(f"{count} worker(s): {measured[-1].rate:.2f} samples/s", file=sys.stderr, flush=True)
    print(table(measured))
    _draw(measured, picture)
    return measured


def _plan(path: str, steps: int) -> tuple[dict[str, Any], bool]:
    """The input without validation and checkpoints on the way, its paths absolute; and whether sel is given."""
    plan = normalised(load_input(path))
    training = plan["training"]
    training.pop("validation_data", None)
    training.pop("numb_epoch", None)
    training.pop("stat_file", None)
    training.pop("save_dir", None)
    systems = training["training_data"]["systems"]
    systems = [systems] if isinstance(systems, str) else systems
    training["training_data"]["systems"] = [os.path.abspath(s) for s in systems]
    # two measured intervals, so that the fixed costs of the first are left out
    training |= {"numb_steps": 2 * steps, "disp_freq": steps, "save_freq": 2 * steps, "save_ckpt": "model.ckpt"}
    training |= {"disp_file": "lcurve.out", "tensorboard": False, "scale_steps_by_worker": False}
    return plan, isinstance(plan["model"]["descriptor"]["sel"], list)


def _measure(folder: str, workers: int, engine: str, threads: str, skip: bool) -> Measurement:
    command = [sys.executable, "-m", "allforce", "train", "input.json", *(["--skip-neighbor-stat"] if skip else [])]
    if workers > 1 and engine == "mpi":
        command = ["mpirun", "-np", str(workers), *command, "--engine", "mpi"]
    elif workers > 1:
        command += ["--workers", str(workers), "--engine", engine]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    found = [pattern.search(done.stderr) for pattern in (TIME, SHARE, FRAMES)]
    if done.returncode != 0 or None in found:
        tail = "\n".join(done.stderr.splitlines()[-5:])
        raise UserError(f"The run with {workers} worker(s) failed with exit code {done.returncode}:\n{tail}")
    time, share, frames = (match.groups() for match in found if match is not None)
    size = (int(frames[0]) + int(frames[1] or frames[0])) / 2
    return Measurement(workers, float(time[0]), size, float(share[0]) / 100)


def table(measured: list[Measurement]) -> str:
    """Markdown; seconds for 100 samples of each worker, as in DeePMD-kit's manual."""
    first = measured[0]
    lines = [
        "| Workers | Seconds every 100 samples | Samples per second | Speed up | Efficiency | Communication |",
        "|  --  | -- | -- | -- | -- | -- |",
    ]
    for m in measured:
        per_worker = m.rate / m.workers
        speed_up = m.rate / (first.rate / first.workers)
        each = f"{per_worker:.2f}" + (f"*{m.workers}" if m.workers > 1 else "")
        lines.append(
            f"| {m.workers} | {100 / per_worker:.4f} | {each} | {speed_up:.2f} | {100 * speed_up / m.workers:.0f} % "
            f"| {100 * m.communication:.1f} % |"
        )
    return "\n".join(lines)


def _draw(measured: list[Measurement], picture: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install allforce[plot])", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 4))
    workers, base = [m.workers for m in measured], measured[0].rate / measured[0].workers
    axes.plot(workers, workers, "--", color="grey", label="ideal")
    axes.plot(workers, [m.rate / base for m in measured], "o-", label="measured")
    axes.set(xlabel="workers", ylabel="speed up", xticks=workers)
    axes.legend()
    figure.savefig(picture, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    print(f"picture: {picture}", file=sys.stderr)
