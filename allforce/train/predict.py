"""`dp scaling-test --predict`: the rate of many workers from what a step costs here (calibrate.py).

    T(W, S) = [k·(t₀ + t₁·p(S)) + u]·(1 + σ·m(W)) + k·A(S, predictions) + A(W, gradients)
    A(n, B) = a·⌈log₂ n⌉ + 2·(n − 1)/n·B/b                          all-reduce: latency a, bandwidth b

W workers, S of which split each frame; t₀ + t₁·p the gradient of a block with p neighbour pairs, u the update, σ the
relative spread of the times of a step, m(W) how many of it the slowest of W is above the mean, k = acc_freq. Workers
that share cores share their time. The rate is k·W/S micro-batches in T.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import NormalDist, mean, median, stdev
from typing import Any

import numpy as np

from allforce.distributed.devices import physical_cores
from allforce.errors import UserError

SPLITS = (1, 2, 8, 64, 512)  # S of the rows, as far as they divide W and leave a block of LEAST atoms
LEAST = 16


@dataclass(frozen=True)
class Link:
    """What a message costs: a second for each stage, and bytes a second."""

    latency: float
    bandwidth: float

    def all_reduce(self, workers: int, nbytes: float) -> float:
        stages = math.ceil(math.log2(workers)) if workers > 1 else 0
        return self.latency * stages + 2 * (workers - 1) / workers * nbytes / self.bandwidth


NETWORK = Link(5e-6, 1e10)  # between machines, unless something else is said


@dataclass(frozen=True)
class Costs:
    """What a step is made of, in seconds and bytes; the docstring of this file has the equation."""

    atoms: int
    frames: int  # of a micro-batch
    micro: int  # k, micro-batches of a worker in a step
    fixed: float  # t₀
    per_pair: float  # t₁, beside a busy neighbour
    pairs: float  # of a whole micro-batch
    splits: bool  # frames of this model can be split
    halo: float  # pairs of all blocks of the finest cut that was measured, more than of the whole, relative
    alone: float  # how much faster one worker is without a neighbour
    update: float
    spread: float
    gradient_bytes: float
    prediction_bytes: float
    gradients: Link  # within this machine
    predictions: Link
    cores: int  # of this machine, divided by the threads of a worker

    def step(self, workers: int, split: int, network: Link | None = None) -> dict[str, float]:
        """Seconds of the parts of a step; network: of machines with as many cores as this; None: all of it here."""
        more = 1.0 + self.halo * (1 - 1 / split) if split > 1 else 1.0
        compute = self.micro * (self.fixed + self.per_pair * self.pairs * more / split)
        compute = (self.alone if workers == 1 else 1.0) * compute + self.update
        if network is None:
            compute *= max(1.0, workers / self.cores)
        group = self.predictions if network is None or split <= self.cores else network
        everybody = self.gradients if network is None or workers <= self.cores else network
        sums = self.micro * group.all_reduce(split, self.prediction_bytes)
        sums += everybody.all_reduce(workers, self.gradient_bytes)
        return {"compute": compute, "waiting": compute * self.spread * above_mean(workers), "messages": sums}

    def rate(self, workers: int, split: int, network: Link | None = None) -> float:
        """Frames a second."""
        return workers / split * self.micro * self.frames / sum(self.step(workers, split, network).values())


def above_mean(workers: int) -> float:
    """Of W normal numbers the largest, on average, in standard deviations (Blom)."""
    return NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25)) if workers > 1 else 0.0


def costs_from(facts: dict[str, Any], cores: int) -> Costs:
    """From what calibrate.py measured: t₀ and t₁ by a straight line through the blocks, links from two messages."""
    blocks = facts["blocks"]
    pairs = np.array([b["pairs"] for b in blocks], dtype=float)
    times = np.array([median(b["seconds"]) for b in blocks])
    slope = times[0] / max(pairs[0], 1.0)
    if len(blocks) > 1:
        slope = min(np.polyfit(pairs, times, 1, w=1 / times)[0], slope)  # nothing is saved below zero atoms
    whole = blocks[0]["seconds"]
    finest = blocks[-1]
    return Costs(
        atoms=facts["atoms"],
        frames=facts["frames"],
        micro=facts["acc_freq"],
        fixed=times[0] - slope * pairs[0],
        per_pair=slope,
        pairs=pairs[0],
        splits=len(blocks) > 1,
        halo=max(0.0, finest["pairs"] * finest["size"] / max(pairs[0], 1.0) - 1.0),
        alone=min(1.0, facts["alone"] / times[0]),
        update=facts["update"],
        spread=stdev(whole) / mean(whole) if len(whole) > 1 else 0.0,
        gradient_bytes=facts["gradient_bytes"],
        prediction_bytes=facts["prediction_bytes"],
        gradients=_link(facts, "gradient"),
        predictions=_link(facts, "prediction"),
        cores=max(1, cores // facts["threads"]) if facts["device"] == "cpu" else cores,
    )


def average(costs: Sequence[Costs]) -> Costs:
    """Of measurements at several times: the machine may be shared, and then its speed changes."""
    first = costs[0]

    def middle_of(field: str) -> Any:
        values = [getattr(c, field) for c in costs]
        if isinstance(values[0], Link):
            return Link(median(v.latency for v in values), median(v.bandwidth for v in values))
        return median(values) if isinstance(values[0], float) else values[0]

    return replace(first, **{f.name: middle_of(f.name) for f in fields(first)})


def _link(facts: dict[str, Any], name: str) -> Link:
    """Two workers: one stage, and as many bytes as the message has."""
    short, long = median(facts[f"{name}_short"]), median(facts[name])
    return Link(short, facts[f"{name}_bytes"] / max(long - short, 1e-7))


def measure_costs(folder: str, env: dict[str, str]) -> Costs:
    """Let two workers measure the input in this folder."""
    start = (
        "import sys; from allforce.distributed.spawn import run_local_workers as run; sys.exit(run(2, sys.argv[1:]))"
    )
    command = [sys.executable, "-m", "allforce.train.calibrate", "input.json", "costs.json"]
    done = subprocess.run([sys.executable, "-c", start, *command], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-5:])
        raise UserError(f"--predict: the costs of a step could not be measured (exit code {done.returncode}):\n{tail}")
    facts = json.loads((Path(folder) / "costs.json").read_text())
    return costs_from(facts, physical_cores(os.sched_getaffinity(0)))


def network_of(latency: float, bandwidth: float) -> Link:
    if latency < 0 or bandwidth <= 0:
        raise UserError(f"--latency {latency} and --bandwidth {bandwidth}: microseconds ≥ 0 and GB/s > 0 are expected.")
    return Link(latency * 1e-6, bandwidth * 1e9)


def table(costs: Costs, workers: list[int], network: Link) -> str:
    """Markdown: what is predicted for every number of workers and some ways to split frames."""
    lines = [
        "| Workers | Split a frame | Seconds a step | Samples per second | Efficiency | Waiting | Communication |",
        "|  --  | -- | -- | -- | -- | -- | -- |",
    ]
    one = costs.rate(1, 1)
    most = costs.atoms / costs.frames / LEAST if costs.splits else 1
    for count in workers:
        for split in [s for s in SPLITS if count % s == 0 and (s == 1 or s <= most)]:
            parts, rate = costs.step(count, split, network), costs.rate(count, split, network)
            step = sum(parts.values())
            lines.append(
                f"| {count} | {split} | {step:.4g} | {rate:.4g} | {100 * rate / one / count:.0f} % "
                f"| {100 * parts['waiting'] / step:.1f} % | {100 * parts['messages'] / step:.1f} % |"
            )
    return "\n".join(lines)


def against(costs: Costs, measured: list[tuple[int, int, float]]) -> list[str]:
    """(workers, split, samples a second) as measured on this machine beside what the model says for it."""
    lines = []
    for workers, split, rate in measured:
        guess = costs.rate(workers, split)
        shared = f", which share {costs.cores} cores" if workers > costs.cores else ""
        lines.append(
            f"predicted for {workers} worker(s) here{f', {split} a frame' if split > 1 else ''}{shared}: {guess:.2f} "
            f"samples/s, {100 * (guess / rate - 1):+.0f} % of what was measured"
        )
    return lines


def words(costs: Costs, network: Link) -> list[str]:
    """What the prediction rests on."""
    here, far, atom = costs.gradients, network, costs.per_pair * costs.pairs / costs.atoms
    return [
        f"a step here: gradient {costs.fixed * 1e3:.3g} ms + {atom * 1e6:.3g} µs an atom "
        f"({costs.atoms} atoms), update {costs.update * 1e3:.3g} ms, spread ±{100 * costs.spread:.1f} %",
        f"messages here: gradients of {costs.gradient_bytes / 1e6:.3g} MB with {here.latency * 1e6:.3g} µs and "
        f"{here.bandwidth / 1e9:.3g} GB/s, predictions of {costs.prediction_bytes / 1e6:.3g} MB with "
        f"{costs.predictions.latency * 1e6:.3g} µs and {costs.predictions.bandwidth / 1e9:.3g} GB/s: measured",
        f"beyond {costs.cores} workers: {far.latency * 1e6:.3g} µs and {far.bandwidth / 1e9:.3g} GB/s between machines "
        "like this one, each worker with cores of its own: assumed (--latency, --bandwidth), not measured",
    ]
