"""What a step of a training is made of, in seconds: run by two workers for `dp scaling-test --predict`.

A block of a frame is computed without the other blocks, so one worker can measure what one of S workers would compute.
The two workers measure the same at the same time, because a core is slower beside a busy one, and rank 0 once alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

import torch

from allforce.config.load import load_input
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
STEPS, WARM_UP = 24, 4  # of every measurement; the latter do not count
SECONDS = 5.0  # of every measurement, about
SMALL = 1e-12  # learning rate: weights stay as they are
T = TypeVar("T")


class Stopwatch:
    """Seconds of the parts of a step, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: dict[str, list[float]] = {}

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        value = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.setdefault(name, []).append(time.perf_counter() - start)
        return value

    def seconds(self, name: str) -> list[float]:
        return self.times[name][WARM_UP:]


def steps_of(job: Job, comm: Comm, loader: Loader, device: torch.device) -> tuple[Stopwatch, float]:
    """Steps as in training, a part at a time, and the mean number of neighbour pairs.

    One after the other, because each leaves the cache full of what the next one does not need; with the loader beside
    them, which takes its share of the cores.
    """
    watch, pairs = Stopwatch(device), []
    lr, most = job.schedule.loss_lr(0), job.input.training.gradient_max_norm
    flat = job.state.flat

    def gradient() -> None:
        batch = loader.next()
        pairs.append(len((batch if batch.part is None else batch.part).edges.i))
        job.learn(batch, lr, 1.0, first=True)

    def step() -> None:
        watch("gradient", gradient)
        comm.barrier()
        watch("sum", lambda: flat.reduce_finish(flat.reduce_start(comm), comm))
        watch("update", lambda: job.state.update(SMALL, most))

    loader.start(comm.rank, comm.size)
    begun = time.perf_counter()
    for _ in range(WARM_UP):
        step()
    one = (time.perf_counter() - begun) / WARM_UP
    for _ in range(comm.gather(max(3, min(STEPS, int(SECONDS / one))))[0]):
        step()
    loader.close()
    return watch, mean(pairs)


def blocks_of(job: Job, comm: Comm, device: torch.device) -> tuple[list[dict[str, Any]], Stopwatch]:
    """Pairs of a block, and the seconds of its share of the gradient, for frames in 1, 2, 4, 8 blocks; whole steps."""
    found: list[dict[str, Any]] = []
    can_split = "energy" in job.state.model.outputs and SUMS.issuperset(job.loss.wanted)
    whole = None
    for size in BLOCKS if can_split else BLOCKS[:1]:
        if size > 1 and len(job.loader.batch(0).type) / size < LEAST:
            break
        old = job.loader
        loader = Loader(old.dataset, old.sampler, old.needs, device, None, (comm.rank % size, size))
        watch, pairs = steps_of(job, comm, loader, device)
        whole = whole or watch
        found.append({"size": size, "pairs": pairs, "seconds": watch.seconds("gradient")})
    assert whole is not None
    return found, whole


def messages(comm: Comm, job: Job, device: torch.device) -> dict[str, Any]:
    """Seconds of a sum over two workers, short and long, as predictions go, and short as gradients go."""
    flat, watch = job.state.flat, Stopwatch(device)
    predicted = job.predict(job.loader.batch(0))
    outputs = sum(v.numel() for name, v in predicted.items() if name in job.loss.wanted)
    buffer = comm.buffer(8, flat.wire.dtype, device)
    long, short = (torch.zeros(n, dtype=torch.float64, device=device) for n in (outputs, 8))
    for _ in range(WARM_UP + STEPS):
        watch("gradient_short", lambda: comm.all_reduce_start(buffer).wait())
        watch("prediction", lambda: comm.all_reduce(long))
        watch("prediction_short", lambda: comm.all_reduce(short))
    sizes = {"gradient_bytes": flat.wire.numel() * flat.wire.dtype.itemsize, "prediction_bytes": 8 * outputs}
    return sizes | {name: watch.seconds(name) for name in watch.times}


def calibrate(path: str, output: str) -> None:
    world = detect()
    device, threads = devices.setup(world)
    comm = join(world, "auto", device)
    settings = load_input(path)
    settings = settings.model_copy(update={"training": settings.training.model_copy(update={"spatial_workers": 1})})
    job = prepare(settings, comm, Options(path, None, skip_neighbor_stat=True), device)
    job.state.flat.write_directly()
    if comm.rank == 0:
        alone, _ = steps_of(job, SerialComm(), job.loader, device)
    comm.barrier()
    blocks, whole = blocks_of(job, comm, device)
    sent = messages(comm, job, device) | {"gradient": whole.seconds("sum")}
    batch = job.loader.batch(0)
    if comm.rank == 0:
        facts = {"atoms": len(batch.type), "frames": batch.nframes, "threads": threads.intra, "device": device.type}
        facts["acc_freq"] = settings.training.acc_freq
        facts |= {"alone": median(alone.seconds("gradient")), "blocks": blocks}
        facts |= {"update": median(whole.seconds("update")), **sent}
        Path(output).write_text(json.dumps(facts))
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    calibrate(*sys.argv[1:])
