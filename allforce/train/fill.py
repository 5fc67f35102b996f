"""How many atoms fill a batch? Seconds of a step for several batch sizes: run by `dp init`.

    python -m allforce.train.fill input.json auto:32 auto:64      a line of JSON for each: {"batch": …, "seconds": …}

Weights, gradients and the optimizer's state are read and written once a step whatever the batch, so a few frames of few
atoms cost little more than one. A batch is full where the step begins to grow; beyond that, more steps are worth more
than more frames in each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from allforce.config.load import load_input
from allforce.config.schema import Input
from allforce.distributed import devices
from allforce.distributed.connect import join
from allforce.distributed.launch import detect
from allforce.errors import UserError
from allforce.train.dry_run import SILENT, timed
from allforce.train.source import Options
from allforce.train.start import prepare

SIZES = [f"auto:{atoms}" for atoms in (32, 64, 128, 256, 512)]  # that are tried
GROWN = 1.4  # times as long as the shortest step: the batch is more than full


def of_size(settings: Input, batch: str) -> Input:
    data = settings.training.training_data.model_copy(update={"batch_size": batch})
    training = settings.training.model_copy(update={**SILENT, "training_data": data})
    return settings.model_copy(update={"training": training})


def measure(path: str, sizes: list[str]) -> None:
    world = detect()
    device, _ = devices.setup(world)
    comm = join(world, "auto", device)
    settings, shortest, tried = load_input(path), float("inf"), []
    for batch in sizes:
        job = prepare(of_size(settings, batch), comm, Options(path, None, skip_neighbor_stat=True), device)
        frames = job.loader.dataset.batch_sizes, job.loader.dataset.mixed_batch
        if frames in tried:  # large frames: the same batch again
            continue
        tried.append(frames)
        seconds, _ = timed(job, comm, device)
        print(json.dumps({"batch": batch, "seconds": seconds}), flush=True)
        shortest = min(shortest, seconds)
        if seconds > GROWN * shortest:
            return


def full(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest batch, the last of the rows, whose step has not grown."""
    shortest = min(row["seconds"] for row in rows)
    return [row for row in rows if row["seconds"] <= GROWN * shortest][-1]


if __name__ == "__main__":
    try:
        measure(sys.argv[1], sys.argv[2:])
    except UserError as error:
        sys.exit(f"{error}")
