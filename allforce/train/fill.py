"""How many atoms fill a batch? Seconds of a step against the atoms of its batch: run by `dp init`.

    python -m allforce.train.fill input.json          a line of JSON for each size: {"atoms": 64, "seconds": 0.0081}

Weights, gradients and the optimizer's state are read and written once a step whatever the batch, so a few frames of few
atoms cost little more than one. A batch is full where the step begins to grow; beyond that, more steps are worth more
than more frames in each.
"""

from __future__ import annotations

import json
import sys

from allforce.config.load import load_input
from allforce.config.schema import Input
from allforce.distributed import devices
from allforce.distributed.connect import join
from allforce.distributed.launch import detect
from allforce.errors import UserError
from allforce.train.dry_run import SILENT, timed
from allforce.train.source import Options
from allforce.train.start import prepare

SIZES = (32, 64, 128, 256, 512)  # atoms of a batch, at least
GROWN = 1.4  # times as long as the shortest step: the batch is more than full


def of_size(settings: Input, atoms: int) -> Input:
    data = settings.training.training_data.model_copy(update={"batch_size": f"auto:{atoms}"})
    training = settings.training.model_copy(update={**SILENT, "training_data": data})
    return settings.model_copy(update={"training": training})


def measure(path: str) -> None:
    world = detect()
    device, _ = devices.setup(world)
    comm = join(world, "auto", device)
    settings, frames, shortest = load_input(path), None, float("inf")
    for atoms in SIZES:
        job = prepare(of_size(settings, atoms), comm, Options(path, None, skip_neighbor_stat=True), device)
        if job.loader.dataset.batch_sizes == frames:  # large frames: the same batch again
            continue
        frames = job.loader.dataset.batch_sizes
        seconds, _ = timed(job, comm, device)
        print(json.dumps({"atoms": atoms, "seconds": seconds}), flush=True)
        shortest = min(shortest, seconds)
        if seconds > GROWN * shortest:
            return


def full(rows: list[dict[str, float]]) -> dict[str, float]:
    """The largest batch whose step has not grown."""
    shortest = min(row["seconds"] for row in rows)
    return max((row for row in rows if row["seconds"] <= GROWN * shortest), key=lambda row: row["atoms"])


if __name__ == "__main__":
    try:
        measure(sys.argv[1])
    except UserError as error:
        sys.exit(f"{error}")
