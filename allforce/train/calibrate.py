"""What a step of a training is made of, in seconds: run by two workers for `dp scaling-test --predict`.

A block of a frame is computed without the other blocks, so one worker can measure what one of S workers would compute.
The two workers measure the same at the same time, because a core is slower beside a busy one, and rank 0 once alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch

from allforce.config.load import load_input
from allforce.data.batch import Batch
from allforce.data.loader import Loader
from allforce.distributed import devices
from allforce.distributed.comm import Comm, SerialComm
from allforce.distributed.connect import join
from allforce.distributed.launch import detect
from allforce.models.parts import SUMS
from allforce.train.source import Options
from allforce.train.start import Job, prepare

BLOCKS = (1, 2, 4, 8)  # how many blocks a frame is cut into, as far as it has
LEAST = 16  # atoms of a block
TURNS, SECONDS = 9, 4.0  # of every measurement


def seconds_of(work: Callable[[], object], device: torch.device, limit: float = inf) -> list[float]:
    """Of TURNS turns, after one to warm up; fewer when they take longer than the limit."""
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < TURNS + 1 and (len(times) < 4 or time.perf_counter() - begun < limit):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times[1:]


def blocks_of(job: Job, place: int, device: torch.device, sizes: Sequence[int] = BLOCKS) -> list[dict[str, Any]]:
    """Pairs of a block, and the seconds of its share of the gradient, for frames in 1, 2, 4, 8 blocks."""
    found: list[dict[str, Any]] = []
    lr = job.schedule.loss_lr(0)
    can_split = "energy" in job.state.model.outputs and SUMS.issuperset(job.loss.wanted)
    for size in sizes if can_split else sizes[:1]:
        loader = Loader(job.loader.dataset, job.loader.sampler, job.loader.needs, device, None, (place % size, size))
        batch = loader.batch(0)
        if size > 1 and len(batch.type) / size < LEAST:
            break

        def gradient(batch: Batch = batch) -> None:
            loss, sums = job.loss(job.predict(batch), batch, lr)
            job.state.flat.differentiate(loss, sums, 1.0, first=True)

        edges = (batch if batch.part is None else batch.part).edges
        found.append({"size": size, "pairs": len(edges.i), "seconds": seconds_of(gradient, device, SECONDS)})
    return found


def messages(comm: Comm, job: Job, device: torch.device) -> dict[str, Any]:
    """Seconds of a sum over two workers, short and long, as gradients and as predictions go."""
    count, dtype = job.state.flat.wire.numel(), job.state.flat.wire.dtype
    batch = job.loader.batch(0)
    outputs = sum(v.numel() for name, v in job.predict(batch).items() if name in job.loss.wanted)
    out: dict[str, Any] = {"gradient_bytes": count * dtype.itemsize, "prediction_bytes": 8 * outputs}
    for name, length in (("gradient", count), ("gradient_short", 8)):
        buffer = comm.buffer(length, dtype, device)
        out[name] = seconds_of(partial(_sum, comm, buffer), device)
    for name, length in (("prediction", outputs), ("prediction_short", 8)):
        tensor = torch.zeros(length, dtype=torch.float64, device=device)
        out[name] = seconds_of(partial(comm.all_reduce, tensor), device)
    return out


def _sum(comm: Comm, buffer: torch.Tensor) -> None:
    comm.all_reduce_start(buffer).wait()


def calibrate(path: str, output: str) -> None:
    world = detect()
    device, threads = devices.setup(world)
    comm = join(world, "auto", device)
    settings = load_input(path)
    settings = settings.model_copy(update={"training": settings.training.model_copy(update={"spatial_workers": 1})})
    job = prepare(settings, SerialComm(), Options(path, None, skip_neighbor_stat=True), device)
    job.state.flat.land()
    comm.barrier()
    alone = blocks_of(job, 0, device, (1,)) if comm.rank == 0 else []
    comm.barrier()
    beside = blocks_of(job, comm.rank, device)
    update = seconds_of(lambda: job.state.update(1e-12, settings.training.gradient_max_norm), device)
    comm.barrier()
    sent = messages(comm, job, device)
    batch = job.loader.batch(0)
    if comm.rank == 0:
        facts = {"atoms": len(batch.type), "frames": batch.nframes, "threads": threads.intra, "device": device.type}
        facts["acc_freq"] = settings.training.acc_freq
        facts |= {"alone": median(alone[0]["seconds"]), "blocks": beside, "update": median(update), **sent}
        Path(output).write_text(json.dumps(facts))
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    calibrate(*sys.argv[1:])
