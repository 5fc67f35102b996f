"""`dp train --dry-run`: what a training would be, and how long, by a few timed steps. Nothing is written."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from datetime import timedelta
from time import perf_counter

import torch

from allforce.config.schema import Input
from allforce.distributed.profile import CountedComm
from allforce.errors import UserError
from allforce.logs import log
from allforce.schedule import Schedule
from allforce.train.groups import choose_groups
from allforce.train.monitor import Monitor
from allforce.train.source import Options
from allforce.train.start import Job, prepare, scaled_steps
from allforce.train.trainer import Trainer

SILENT = {
    "disp_training": False,
    "tensorboard": False,
    "metrics_file": None,
    "stat_file": None,
    "stat_file_mode": "update",
    "enable_profiler": False,
}  # of training: files that steps would write
SECONDS = 5.0  # that the timed steps may take, at least LEAST of them
LEAST, MOST = 3, 30


def dry_run(
    settings: Input, options: Options, comm: CountedComm, device: torch.device, world_size: int | None = None
) -> Job:
    """Prepare, make some steps, tell. `world_size`: tell it for so many workers instead of these."""
    spatial = settings.training.spatial_workers
    workers = world_size or comm.size
    if spatial != "auto" and workers % spatial:
        raise UserError(f"--world-size {workers} is no multiple of training/spatial_workers {spatial}.")
    silent = settings.model_copy(
        update={
            "training": settings.training.model_copy(update=SILENT),
            "validating": settings.validating.model_copy(update={"full_validation": False}),
        }
    )
    options.output = None
    job = prepare(silent, comm, options, device)
    if spatial == "auto":
        spatial, why = choose_groups(job.loader.dataset, job.state.model, comm, device, workers)
        if comm.rank == 0 and workers != comm.size:
            log.info(f"with {workers} workers: {why}")
    lines = [*shapes_of(job), *plan_of(job, settings, workers, workers // spatial)]
    lines += times_of(job, settings, workers, workers // spatial, *timed(job, comm, device))
    memory = max(comm.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    if comm.rank == 0:
        for line in [*lines, f"memory: {memory:.0f} MB of the largest worker, after these steps"]:
            log.info(line)
        if device.type == "cuda":
            log.info(f"memory of the GPU: {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MB of this worker")
        log.info("dry run: nothing was written")
    job.mesh.close()
    return job


def shapes_of(job: Job) -> Iterator[str]:
    """The first batch of this worker, and the parameters."""
    batch = job.loader.batch(job.first_and_stride(job.first)[0])
    own = batch if batch.part is None else batch.part
    yield f"first batch: {batch.nframes} frames, {len(own.type)} atoms, {len(own.edges.i)} edges, of {batch.name}"
    for name, parameter in job.state.model.named_parameters():
        shape = " x ".join(map(str, parameter.shape)) or "1"
        yield f"    {name:<48}{shape:>16}  {str(parameter.dtype).removeprefix('torch.')}" + (
            "" if parameter.requires_grad else "  (fixed)"
        )
    count = sum(p.numel() for p in job.state.model.parameters())
    bytes_ = sum(p.numel() * p.element_size() for p in job.state.model.parameters())
    state = sum(t.numel() * t.element_size() for t in job.state.optimizer.tensors().values())
    yield f"parameters: {count} ({job.state.flat.size} trainable)"
    yield f"memory: {bytes_ / 1e6:.2f} MB parameters, as much for gradients, {state / 1e6:.2f} MB of the optimizer"


def plan_of(job: Job, settings: Input, workers: int, groups: int) -> Iterator[str]:
    """Epoch, batch, steps and rates for a number of workers; all workers call it together."""
    training, data = settings.training, job.loader.dataset
    scaled, steps = scaled_steps(settings, data, job.comm, groups)
    schedule = Schedule(scaled.learning_rate, steps, groups, getattr(settings.loss, "schedule", "lr"))
    sizes = [data.mixed_batch] if data.mixed_batch else data.batch_sizes
    low, high = (f(sizes) * groups * training.acc_freq for f in (min, max))
    counts = job.comm.gather([data.total_batches(), sum(s.nframes for s in data.systems), len(data.systems)])
    own = training.sharding == "partition"  # every worker has systems of its own
    batches, frames, systems = map(sum, zip(*(counts if own else counts[:1]), strict=True))
    yield f"with {workers} worker(s):"
    yield f"    epoch: {frames} frames of {systems} systems, {batches} micro-batches" + (
        f", {batches / (groups * training.acc_freq):.1f} steps"
    )
    yield f"    global batch: {low}{f' to {high}' if high > low else ''} frames a step"
    yield f"    steps: {steps} ({steps * groups * training.acc_freq / batches:.1f} epochs)"
    rule = scaled.learning_rate.scale_by_worker
    scaling = f"{schedule.start:.2e} x {schedule.factor:g} ({rule})"
    yield f"    learning rate: {scaling} = {schedule.rate(0):.2e} at the start"
    yield f"    learning rate at the end: {schedule.rate(steps):.2e}"


def timed(job: Job, comm: CountedComm, device: torch.device) -> tuple[float, float]:
    """Seconds of a step and of a validation, the mean of a few after a first; as slow as the slowest worker."""
    monitor = Monitor(job.input.training, comm, device, {})
    trainer = Trainer(job, comm, monitor)

    def seconds(what, count: int) -> float:
        begun = perf_counter()
        for _ in range(count):
            what(job.state.step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max(comm.gather((perf_counter() - begun) / count))

    def step(number: int) -> None:
        trainer.gradients(number)
        trainer.update(number)

    job.loader.start(*job.first_and_stride(job.first))
    try:
        seconds(step, 1)  # compilation, caches
        count = int(max(LEAST, min(MOST, SECONDS / max(seconds(step, 1), 1e-6))))
        return seconds(step, count), seconds(trainer.validate, 1) if job.validation is not None else 0.0
    finally:
        job.loader.close()
        trainer.display.close()


def times_of(job: Job, settings: Input, workers: int, groups: int, step: float, validation: float) -> Iterator[str]:
    """How long it takes, for steps as long as those of the present workers."""
    scaled, steps = scaled_steps(settings, job.loader.dataset, job.comm, groups)
    left = steps - job.first
    shown = left // scaled.training.disp_freq
    seconds = left * step + shown * validation
    total = str(timedelta(seconds=round(seconds))) if seconds > 60 else f"{seconds:.1f} s"
    also = f" and {shown} validations of {1e3 * validation:.1f} ms" if validation else ""
    note = "" if workers == job.comm.size else f", if a step with {workers} takes as long"
    yield f"time: {1e3 * step:.2f} ms a step with {job.comm.size} worker(s)"
    yield f"{left} steps{also} take about {total}{note}"
