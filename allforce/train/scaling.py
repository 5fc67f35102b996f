"""`dp scaling-test`: how many samples a second one, two, … workers train, as a table and a picture.

Every number comes from metrics.jsonl of a real run: intervals after a warm-up, their mean and spread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import psutil

from allforce.config.load import load_input, normalised
from allforce.errors import UserError
from allforce.logs import log
from allforce.models import MODELS
from allforce.report.plot import plot
from allforce.train.predict import NETWORK, Costs, Link, against, average, measure_costs, words
from allforce.train.predict import table as predicted
from allforce.writing import write_whole

INTERVALS = 5  # of every run, after as many steps to warm up
BUSY = 0.2  # of the machine's CPUs, before anything has started


@dataclass
class Measurement:
    workers: int
    engine: str
    rates: list[float]  # samples a second of all workers together, one for each interval
    communication: float  # share of the time
    waiting: float  # share of the time, part of the former
    device: str
    warnings: list[str]

    @property
    def rate(self) -> float:
        return mean(self.rates)

    @property
    def spread(self) -> float:
        """Standard deviation of the intervals relative to their mean."""
        return stdev(self.rates) / self.rate if len(self.rates) > 1 else 0.0


def scaling_test(
    path: str,
    workers: list[int],
    steps: int,
    picture: str,
    engines: list[str],
    strong: bool = False,
    predict: Sequence[int] = (),
    network: Link = NETWORK,
) -> list[Measurement]:
    """Train the input for 2·steps steps with each number of workers and each engine; the first half warms up.

    predict: numbers of workers whose rate is then predicted, for machines that `network` joins.
    """
    _check_picture(picture)
    for line in busy():
        log.warning(line)
    measured: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="allforce-scaling-") as folder:
        plan, skip = _plan(path, steps)
        plans = {
            count: _shared(plan, count) if strong else _grouped(plan, count) for count in workers
        }  # mistakes first
        costs = [_costs(folder, plan)] if predict else []
        for engine in engines:
            for count in workers:
                if count == 1 and any(m.workers == 1 for m in measured):
                    continue  # one worker has no engine
                (Path(folder) / "input.json").write_text(json.dumps(plans[count]))
                one = _measure(folder, count, engine, skip)
                measured.append(one)
                log.info(f"{_name(one)}: {one.rate:.2f} samples/s")
                for line in one.warnings:
                    log.warning(f"{_name(one)}: {line}")
                if predict:
                    costs.append(_costs(folder, plan))
    print(table(measured))
    if predict:
        tell_prediction(average(costs), measured, plans, predict, network)
    title = f"{Path(path).name}, {'strong' if strong else 'weak'} scaling, {measured[0].device}"
    _write(measured, picture, title)
    return measured


def _costs(folder: str, plan: dict[str, Any]) -> Costs:
    """Of a step, measured before the first run and after each: a shared machine changes its speed within a minute."""
    (Path(folder) / "input.json").write_text(json.dumps(plan))
    return measure_costs(folder, _environment())


def tell_prediction(
    costs: Costs, measured: list[Measurement], plans: dict[int, Any], predict: Sequence[int], network: Link
) -> None:
    """What it rests on, how it fits what was measured, and the table."""
    there = [(m.workers, plans[m.workers]["training"].get("spatial_workers", 1), m.rate) for m in measured]
    known = [(workers, split, rate) for workers, split, rate in there if split != "auto"]
    for line in [*words(costs, network), *against(costs, known)]:
        log.info(line)
    print(f"\npredicted, not measured:\n{predicted(costs, list(predict), network)}")


def _grouped(plan: dict[str, Any], workers: int) -> dict[str, Any]:
    """With frames split as the input says, where the workers can be grouped so."""
    size = plan["training"].get("spatial_workers", 1)
    fits = size == "auto" or workers % size == 0
    return plan if fits else {**plan, "training": {**plan["training"], "spatial_workers": 1}}


def _check_picture(picture: str) -> None:
    """Now, not after minutes of measuring."""
    target = Path(picture)
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"-o {picture}: a picture's name should end in .png, .svg or .pdf.")
    if target.is_dir() or not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
        raise UserError(f"-o {picture}: cannot be written. Choose another file.")


def busy(seconds: float = 0.5) -> list[str]:
    """A word when something else computes on this machine."""
    used = psutil.cpu_percent(seconds) / 100
    if used <= BUSY:
        return []
    return [f"other programs use {100 * used:.0f} % of this machine's CPUs; what is measured now is too slow."]


def _plan(path: str, steps: int) -> tuple[dict[str, Any], bool]:
    """The input without validation and checkpoints on the way, its paths absolute; and whether neighbours need not be
    counted."""
    if steps < INTERVALS:
        raise UserError(f"--steps {steps}: at least {INTERVALS}, better 100 or more.")
    settings = load_input(path)
    plan = normalised(settings)
    training = plan["training"]
    for name in ("validation_data", "numb_epoch", "stat_file", "save_dir"):
        training.pop(name, None)
    systems = training["training_data"]["systems"]
    systems = [systems] if isinstance(systems, str) else systems
    training["training_data"]["systems"] = [_absolute(s) for s in systems]
    each = steps // INTERVALS
    training |= {"numb_steps": 2 * INTERVALS * each, "disp_freq": each, "save_freq": 2 * INTERVALS * each}
    training |= {"disp_file": "lcurve.out", "metrics_file": "metrics.jsonl", "save_ckpt": "model.ckpt"}
    training |= {"tensorboard": False, "scale_steps_by_worker": False, "profiling": False, "enable_profiler": False}
    return plan, MODELS[settings.model.type].is_complete(settings.model)


def _absolute(system: Any) -> Any:
    return {**system, "file": os.path.abspath(system["file"])} if isinstance(system, dict) else os.path.abspath(system)


def _shared(plan: dict[str, Any], workers: int) -> dict[str, Any]:
    """Strong scaling: the batch of the input dealt out to the workers."""
    size = plan["training"]["training_data"]["batch_size"]
    if not isinstance(size, int) or size % workers:
        raise UserError(
            f"--strong deals training_data/batch_size out to the workers, but {size!r} is no multiple of {workers}. "
            "Give a number of frames that all of --workers divide."
        )
    shared = json.loads(json.dumps(plan))
    shared["training"]["training_data"]["batch_size"] = size // workers
    return shared


def _measure(folder: str, workers: int, engine: str, skip: bool) -> Measurement:
    command = [sys.executable, "-m", "allforce", "train", "input.json", *(["--skip-neighbor-stat"] if skip else [])]
    if workers > 1 and engine == "mpi":
        command = ["mpirun", "-np", str(workers), *command, "--engine", "mpi"]
    elif workers > 1:
        command += ["--workers", str(workers), "--engine", engine]
    metrics = Path(folder) / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True)
    if done.returncode != 0 or not metrics.exists():
        tail = "\n".join(done.stderr.splitlines()[-5:])
        raise UserError(f"The run with {workers} worker(s) failed with exit code {done.returncode}:\n{tail}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    warnings = [line.partition("WARNING")[2].strip() for line in done.stderr.splitlines() if " WARNING " in line]
    return from_metrics(workers, lines, warnings)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": path}


def from_metrics(workers: int, lines: list[dict[str, Any]], warnings: list[str]) -> Measurement:
    """The second half of the intervals."""
    facts = lines[0]["run"]
    rows = [line for line in lines if line.get("steps")]
    rows = rows[-(len(rows) // 2) or None :]
    seconds = sum(row["seconds"] for row in rows)
    waiting = sum(mean(row["waiting"]) for row in rows)
    parts = [row["phases"].get("waiting", 0.0) + row["phases"].get("transfer", 0.0) for row in rows]
    rates = [row["samples"] / row["training_seconds"] for row in rows]
    shares = sum(parts) / seconds, waiting / seconds
    return Measurement(workers, facts["engine"].partition(",")[0], rates, *shares, facts["computing device"], warnings)


def base_of(measured: list[Measurement]) -> float:
    """Samples a second of one worker; without such a row, of one of the fewest workers."""
    fewest = min(measured, key=lambda m: m.workers)
    return fewest.rate / fewest.workers


def table(measured: list[Measurement]) -> str:
    """Markdown; seconds for 100 samples of each worker, as in DeePMD-kit's manual."""
    lines = [
        "| Workers | Engine | Seconds every 100 samples | Samples per second | Spread | Speed up | Efficiency "
        "| Communication | of it waiting |",
        "|  --  | -- | -- | -- | -- | -- | -- | -- | -- |",
    ]
    base = base_of(measured)
    for m in measured:
        per_worker, speed_up = m.rate / m.workers, m.rate / base
        each = f"{per_worker:.2f}" + (f"*{m.workers}" if m.workers > 1 else "")
        lines.append(
            f"| {m.workers} | {m.engine} | {100 / per_worker:.4f} | {each} | ±{100 * m.spread:.1f} % | {speed_up:.2f} "
            f"| {100 * speed_up / m.workers:.0f} % | {100 * m.communication:.1f} % | {100 * m.waiting:.1f} % |"
        )
    return "\n".join(lines)


def _name(m: Measurement) -> str:
    return f"{m.workers} worker(s), {m.engine}" if m.workers > 1 else "1 worker"


def as_rows(measured: list[Measurement]) -> list[dict[str, Any]]:
    """For scaling.json, which dp plot and dp report read."""
    base = base_of(measured)
    return [asdict(m) | {"rate": m.rate, "spread": m.spread, "speed_up": m.rate / base} for m in measured]


def _write(measured: list[Measurement], picture: str, title: str) -> None:
    numbers = Path(picture).with_suffix(".json")
    write_whole(numbers, (json.dumps({"title": title, "scaling": as_rows(measured)}, indent=1) + "\n").encode())
    try:
        log.info(f"picture: {plot([str(numbers)], picture)}")
    except UserError as error:  # no matplotlib
        log.warning(f"no picture: {error}")
