"""`dp train` from its arguments to the end: workers, log, input, training; no worker waits for a dead one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import torch
from numba.core.event import install_listener

from allforce import __version__, logs
from allforce.config.load import load_input, normalised
from allforce.config.schema import Input
from allforce.distributed import devices
from allforce.distributed.comm import Comm, LostContact
from allforce.distributed.connect import agree, join
from allforce.distributed.launch import LOST, SECRET_REMEDY, World, detect
from allforce.distributed.mpi_profile import write_profile
from allforce.distributed.profile import CountedComm
from allforce.distributed.shared import HostComm
from allforce.distributed.spawn import report
from allforce.errors import UserError, file_problem
from allforce.files import checkpoint
from allforce.logs import CollectHandler, log
from allforce.train.compiling import COMPILE, TellOnce
from allforce.train.datasets import Given
from allforce.train.dry_run import dry_run
from allforce.train.free_cores import FreeCores
from allforce.train.lock import locked
from allforce.train.monitor import Monitor
from allforce.train.recipe import with_recipe
from allforce.train.source import Options
from allforce.train.start import Job, NothingToDo, prepare
from allforce.train.stopping import TABLE, seconds_of
from allforce.train.trainer import Trainer

DYNAMIC = "DYNAMIC"  # a value of HOROVOD_TIMELINE


def train(args: Namespace) -> int:
    """Be one of the workers that a launcher or `local.py` started, or train alone."""
    signal.signal(TABLE, signal.SIG_IGN)  # a question before there is an answer does not end the run
    world = detect()
    device, threads = devices.setup(world)
    wants_profile = args.comm_profile or os.environ.get("ALLFORCE_COMM_PROFILE", "0") != "0"
    comm = join(world, args.engine, device, exact=wants_profile)
    collector = None
    try:
        collector = logs.setup(args.log_level, args.log_path, args.mpi_log, comm, args.json_log)
        code = work(args, world, comm, device, threads, collector)
        if wants_profile and not args.dry_run:
            tell_profile(comm)
    except BaseException as error:
        if comm.size == 1:
            raise
        return give_up(error, comm, collector)
    comm.close()
    args.alone = comm.size == 1 and world.launcher == "none" and device.type == "cpu"  # no library has to say goodbye
    return code


def work(
    args: Namespace,
    world: World,
    comm: CountedComm,
    device: torch.device,
    threads: devices.Threads,
    collector: CollectHandler | None,
) -> int:
    begun = time.perf_counter()
    if comm.rank == 0:
        log.info(f"Allforce version: {__version__}")
        log.info(f"Configuration path: {args.INPUT}")
        if world.note:
            log.warning(world.note)
        if world.exposed and not world.one_host:
            log.info(f"strangers may get the secret of this job: {world.exposed}. {SECRET_REMEDY}")
    settings = load_input(args.INPUT)
    if args.recipe:
        settings, lines = with_recipe(settings, args.INPUT)
        if comm.rank == 0:
            log.info(f"the recipe changes {len(lines)} keys of {args.INPUT}:")
            for line in lines:
                log.info(f"    {line}")
    agree(comm, f"the input {args.INPUT}", hashlib.sha256(json.dumps(normalised(settings)).encode()).hexdigest()[:16])
    names = ("output", "restart", "init_model", "init_frz_model", "finetune", "skip_neighbor_stat")
    options = Options(args.INPUT, **{name: getattr(args, name) for name in (*names, "use_pretrain_script")})
    options.wall_time = None if args.max_wall_time is None else seconds_of(args.max_wall_time)
    try:
        if args.dry_run:
            code = dry_run(settings, options, comm, device, args.world_size).exit_code
        else:
            code = run(settings, options, world, comm, device, threads, collector, timeline=args.timeline).exit_code
    except NothingToDo as reason:
        code = 0
        if comm.rank == 0:
            log.info(str(reason))
    log.info(f"wall time: {time.perf_counter() - begun:.3f} s")
    if collector is not None:
        collector.flush_all()
    return code


def run(
    settings: Input,
    options: Options,
    world: World,
    comm: CountedComm,
    device: torch.device,
    threads: devices.Threads,
    collector: CollectHandler | None,
    data: Given | None = None,
    timeline: str | None = None,
) -> Job:
    """Prepare and train, alone in the folder; data: systems that are open already, in the place of those that the input
    names."""
    if settings.training.parallel is False and comm.size > 1:
        raise UserError(
            f"{options.input}: {comm.size} workers were started, but `parallel` is not true, and {comm.size} copies of "
            "one training are of no use. Set parallel: true, or start one worker."
        )
    if comm.watch is not None:
        comm.watch.limit = settings.training.distributed_timeout
        if comm.rank == 0 and collector is None:  # collected lines are shown later, when these are of no use
            comm.watch.warn = log.warning
    prefix = Path(settings.training.save_dir or ".") / settings.training.save_ckpt
    folders = {prefix.parent, Path(settings.training.disp_file).parent} if comm.rank == 0 else set()
    if comm.rank == 0:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    cores = None
    if device.type == "cpu" and world.local_size == 1 and threads.intra > 1 and not threads.fixed:
        cores = FreeCores(threads.intra, len(os.sched_getaffinity(0)), log.info)
        cores.begin()
    with locked(folders), install_listener(COMPILE, TellOnce()) if comm.rank == 0 else nullcontext():
        if comm.rank == 0:
            checkpoint.sweep(prefix)
        if options.restart == "auto":  # the newest intact checkpoint, or none when there is none
            there = comm.rank == 0 and checkpoint.numbered(prefix)
            options.restart = comm.gather(str(checkpoint.find(prefix)) if there else None)[0]
        job = prepare(settings, comm, options, device, data)
        tell_job(job, options, world, comm, device, threads, collector)
        facts = dict(summary_rows(job, world, comm, device, threads)) | {"input": options.input, "version": __version__}
        facts["host"] = socket.gethostname()
        monitor = Monitor(job.input.training, comm, device, facts, timeline_of(timeline, job, comm), job.restarted)
        job.exit_code = Trainer(job, comm, monitor, collector, options.wall_time, cores).run()
        job.mesh.close()
    return job


def tell_job(
    job: Job,
    options: Options,
    world: World,
    comm: CountedComm,
    device: torch.device,
    threads: devices.Threads,
    collector: CollectHandler | None,
) -> None:
    """What the log says before the first step."""
    for line in logs.summary(summary_rows(job, world, comm, device, threads), comm.size > 1):
        log.info(line)
    warnings = devices.crowded(threads, comm) if device.type == "cpu" else []
    if comm.rank == 0:
        for line in warnings:
            log.warning(line)
        tell_start(job)
    if job.input.training.parallel and comm.size > 1:
        tell_parallel(job, comm, device, options)
    if collector is not None:
        collector.flush_all()


def tell_parallel(job: Job, comm: Comm, device: torch.device, options: Options) -> None:
    """What the workers do together, in the order in which it is done."""
    names = comm.gather(f"gpu:{device.index}" if device.type == "cuda" else "cpu")
    if comm.rank > 0:
        return
    schedule, start = job.schedule, options.source
    factor = f"{schedule.start:.2e} x {schedule.factor:g} = {schedule.start * schedule.factor:.2e}"
    for line in (
        "only rank 0 writes checkpoints and the learning curve",
        f"learning rate scaled by the number of workers: {factor}",
        f"initial state broadcast from rank 0 ({f'restored from {start}' if start else 'from scratch'})",
        f"gradients averaged over {comm.size} workers in every step, by one all-reduce",
        f"one device for each worker, by its local rank: {', '.join(names)}",
    ):
        log.info(f"parallel: {line}")


def summary_rows(
    job: Job, world: World, comm: CountedComm, device: torch.device, threads: devices.Threads
) -> list[tuple[str, str]]:
    """What the block "Summary of the training" says."""
    config, schedule = job.input.training, job.schedule
    shared = isinstance(comm.comm, HostComm) and comm.comm.blocks
    sizes = [job.loader.dataset.mixed_batch] if job.loader.dataset.mixed_batch else job.loader.dataset.batch_sizes
    factor = job.mesh.groups * config.acc_freq
    frames = f"{factor * min(sizes)}" + (f" to {factor * max(sizes)}" if min(sizes) < max(sizes) else "")
    mesh = job.mesh
    how = f"{mesh.groups} groups of {mesh.size} workers" if mesh.size > 1 else f"{comm.size} workers"
    how += f", {config.acc_freq} batches each" if config.acc_freq > 1 else ""
    return [
        ("world size", str(comm.size)),
        ("my rank", str(comm.rank)),
        ("node list", str(world.hosts)),
        ("running on", socket.gethostname()),
        ("computing device", f"gpu:{device.index}" if device.type == "cuda" else "cpu:0"),
        ("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "unset")),
        ("Count of visible GPU", str(torch.cuda.device_count())),
        ("num_intra_threads", f"{threads.intra} ({threads.source})"),
        ("num_inter_threads", str(threads.inter)),
        ("engine", comm.engine + (", gradients in shared memory" if shared else "")),
        ("launcher", "none (--workers)" if world.launcher == "workers" else world.launcher),
        ("sharding", config.sharding),
        ("global batch", f"{frames} frames a step ({how})"),
        ("learning rate", f"{schedule.start:.2e} x {schedule.factor:g} ({job.input.learning_rate.scale_by_worker})"),
        ("scaled rate", f"{schedule.start * schedule.factor:.2e}"),
    ]


def timeline_of(option: str | None, job: Job, comm: Comm) -> str | None:
    """Its file, by option, input or Horovod's variable (unless Horovod itself is there to write that)."""
    config = job.input.training
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path and comm.rank == 0 and (why := no_timeline(path, comm.engine)):
        log.warning(f"HOROVOD_TIMELINE={path}: nothing will be written, {why}")
    if option or config.profiling:
        return option or config.profiling_file
    return path if path and path != DYNAMIC and comm.engine != "horovod" else None


def no_timeline(path: str, engine: str) -> str:
    """Why Horovod's variable leads to no file: Horovod itself says nothing, or nothing that is seen."""
    if path == DYNAMIC:
        return "for that means that a program starts the timeline itself, which dp train does not. Name a file."
    folder = Path(path).absolute().parent
    if engine == "horovod" and not (folder.is_dir() and os.access(folder, os.W_OK)):
        return f"for {folder} is no folder that can be written to. Make it, or name a file in another."
    return ""


def tell_start(job: Job) -> None:
    schedule, step = job.schedule, job.state.step
    parameters = sum(p.numel() for p in job.state.model.parameters())
    log.info(f"Model Params:  {parameters / 1e6:.3f} M   (Trainable: {job.state.flat.size / 1e6:.3f} M)")
    log.info(
        f"Start to train {job.numb_steps} steps." if step == 0 else f"Continue at step {step} of {job.numb_steps}."
    )
    log.info(
        f"start training at lr {schedule.rate(step):.2e} (== {schedule.start * schedule.factor:.2e}), "
        f"final lr will be {schedule.rate(job.numb_steps):.2e}"
    )


def tell_profile(comm: CountedComm) -> None:
    """The files of --comm-profile; one that cannot be written does not spoil the training."""
    try:
        name = write_profile(comm)
    except OSError as error:
        log.warning(f"--comm-profile: {file_problem(error)}")
    else:
        log.info(f"communication of this rank: {name}")


def give_up(error: BaseException, comm: CountedComm, collector: CollectHandler | None) -> int:
    """One of several workers cannot go on: say why, once, and end all of them."""
    if collector is not None:
        collector.rescue()
    if isinstance(error, KeyboardInterrupt):
        report(f"rank {comm.rank} was interrupted.", 130)
        comm.abort(130)
        return 130
    if isinstance(error, LostContact):
        if comm.watch is not None:
            comm.watch.wait_for_word()
        text, code = f"{error}. All workers end.", LOST
    elif isinstance(error, UserError):
        text, code = f"dp train: error: rank {comm.rank} on {socket.gethostname()}: {error}", 2
    elif isinstance(error, OSError) and error.filename is not None:
        text, code = f"dp train: error: rank {comm.rank} on {socket.gethostname()}: {file_problem(error)}", 2
    else:
        import traceback

        text, code = f"rank {comm.rank} on {socket.gethostname()}:\n{''.join(traceback.format_exception(error))}", 1
    if comm.rank > 0:
        time.sleep(1.0)  # mostly all ranks have the same complaint: let the first say it
    if not report(text, code):
        print(text, file=sys.stderr, flush=True)
    comm.abort(code)
    return code
