"""`dp doctor`: what a training would find here. A list of points, each well, told or to be mended, with the remedy.

All workers call every check together; what it finds is the same on all of them, so that they end with one exit code.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from allforce.config.load import load_input, normalised
from allforce.config.schema import Input
from allforce.distributed import devices
from allforce.distributed.connect import join
from allforce.distributed.launch import SECRET_REMEDY, World, detect
from allforce.distributed.mpi_comm import LAUNCHERS as MPI_LAUNCHERS
from allforce.distributed.network import is_loopback
from allforce.distributed.profile import CountedComm, bounds
from allforce.distributed.shared import HostComm
from allforce.distributed.spawn import report, run_local_workers, worker_count
from allforce.errors import UserError
from allforce.train.datasets import fingerprint, open_data

PACKAGES = ("allforce", "torch", "numpy", "h5py", "mpi4py", "horovod")
MESSAGE = 2**20  # float64 numbers of the message by which the bandwidth is measured
SLOW, NARROW = 0.02, 20.0  # seconds of the smallest all-reduce, MB/s of a large one: beyond these something is wrong
APART = 1.0  # seconds between clocks: more makes times of files and lines of the log useless
DISK, MEMORY_DISK = 200e6, 64e6  # bytes: some checkpoints of a usual model; the gradients of all workers
OK, NOTE, RED = "ok", "--", "!!"
COLORS = {OK: "32", NOTE: "0", RED: "31"}


@dataclass
class Point:
    """One line of the list."""

    name: str
    text: str
    mark: str = OK
    remedy: str = ""


@dataclass
class Setting:
    """The workers, and where they are."""

    world: World
    comm: CountedComm
    device: torch.device
    threads: devices.Threads
    input: str | None

    def gather(self, value: Any) -> list[Any]:
        return self.comm.gather(value)


def doctor(args: Namespace) -> int:
    """Look at this process, at the workers that a launcher started, or at `--workers` of our own."""
    if args.workers is not None and (worker_count(args.workers) > 1 or detect().size > 1):
        words = [word for word in args.argv if not word.startswith("--workers=")]
        if "--workers" in words:
            del words[(at := words.index("--workers")) : at + 2]
        return run_local_workers(args.workers, [sys.executable, "-m", "allforce", *words])
    world = detect()
    device, threads = devices.setup(world)
    comm = join(world, args.engine, device)
    points = list(examine(Setting(world, comm, device, threads, args.INPUT)))
    bad = sum(point.mark == RED for point in points)
    if comm.rank == 0:
        show(points)
        if bad:
            summary = f"dp doctor: {bad} of {len(points)} points are to be mended."
            if not report(summary):
                print(summary, file=sys.stderr)
    comm.close()
    return 2 if bad else 0


def show(points: list[Point]) -> None:
    """On standard output, in colours where a person looks on."""
    colored = sys.stdout.isatty()
    for point in points:
        mark = f"\033[{COLORS[point.mark]}m{point.mark}\033[0m" if colored else point.mark
        print(f"{mark}  {point.name:<16}{point.text}")
        if point.remedy:
            print(f"    {'':<16}{point.remedy}")
    sys.stdout.flush()


def examine(setting: Setting) -> Iterator[Point]:
    for check in (
        launcher,
        versions,
        hardware,
        threads,
        all_reduce,
        clocks,
        listeners,
        secret,
        disk_space,
        input_and_data,
    ):
        yield from check(setting)


# ---- workers and machines


def launcher(setting: Setting) -> Iterator[Point]:
    world, comm = setting.world, setting.comm
    started = "none" if world.launcher == "none" else world.started_by
    yield Point("launcher", f"{started}, {world.size} worker(s) on {', '.join(world.hosts)}")
    shared = ", gradients in shared memory" if isinstance(comm.comm, HostComm) else ""
    yield Point("engine", f"{comm.engine}{shared}")
    for note in dict.fromkeys(filter(None, setting.gather(world.note))):
        yield Point("launcher", note, RED, "Unset what is left over, or start all workers with one launcher.")


def versions(setting: Setting) -> Iterator[Point]:
    own = {"python": platform.python_version()} | {name: v for name in PACKAGES if (v := _version(name))}
    reports = setting.gather(own)
    yield Point("versions", ", ".join(f"{name} {version}" for name, version in reports[0].items()))
    for rank, other in enumerate(reports):
        if other != reports[0]:
            yield Point(
                "versions",
                f"rank {rank} has {', '.join(f'{k} {v}' for k, v in other.items() if reports[0].get(k) != v)}",
                RED,
                "Use one environment on all machines: give the whole path of dp, or activate it in the job script.",
            )
            return


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def hardware(setting: Setting) -> Iterator[Point]:
    cuda = setting.device.type == "cuda"
    own = torch.cuda.get_device_name(setting.device) if cuda else f"CPU ({platform.machine()})"
    unused = not cuda and os.environ.get("DEVICE", "").lower() != "cpu" and Path("/dev/nvidia0").exists()
    reports = setting.gather([socket.gethostname(), own, unused, psutil.virtual_memory().available, _busy()])
    names = dict.fromkeys(name for _, name, *_ in reports)
    yield Point("devices", ", ".join(f"{sum(t[1] == n for t in reports)} x {n}" for n in names))
    if idle := sorted({host for host, _, unused, *_ in reports if unused}):
        remedy = "Install a torch with CUDA, look at CUDA_VISIBLE_DEVICES and nvidia-smi, or say DEVICE=cpu."
        yield Point("devices", f"{', '.join(idle)}: there is a GPU that torch does not see", RED, remedy)
    for host in dict.fromkeys(t[0] for t in reports):
        free, busy = next((t[3], t[4]) for t in reports if t[0] == host)
        yield Point("memory", f"{host}: {free / 1e9:.1f} GB free", OK if free > 1e9 else RED, _memory_remedy(free))
        yield Point("load", f"{host}: {100 * busy:.0f} % of the CPUs were in use before this began", NOTE)


def _memory_remedy(free: float) -> str:
    return "" if free > 1e9 else "End other programs, or start fewer workers."


def _busy() -> float:
    return min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def threads(setting: Setting) -> Iterator[Point]:
    crowded = devices.crowded(setting.threads, setting.comm) if setting.device.type == "cpu" else []
    counts = sorted(set(setting.gather(setting.threads.intra)))
    ends = counts[:: max(1, len(counts) - 1)]
    yield Point("threads", f"{' to '.join(map(str, ends))} a worker ({setting.threads.source})")
    for sentence in crowded:
        what, _, remedy = sentence.partition(". ")
        yield Point("threads", what, RED, remedy)


# ---- between the workers


def all_reduce(setting: Setting) -> Iterator[Point]:
    if setting.comm.size == 1:
        return
    few, many = (setting.comm.buffer(n, torch.float64, setting.device) for n in (1, MESSAGE))
    latency, bytes_ = _seconds(setting, few, 50), many.numel() * many.element_size()
    seconds = _seconds(setting, many, 5)
    many.fill_(1 + setting.comm.rank)
    setting.comm.all_reduce(many)
    size = setting.comm.size
    right = all(setting.gather(bool((many == size * (size + 1) / 2).all())))
    rate = bytes_ / seconds / 1e6
    slow = latency > SLOW or rate < NARROW
    yield Point(
        "all-reduce",
        f"{1e6 * latency:.0f} µs for one number, {rate:.0f} MB/s ({bytes_ / 1e6:.0f} MB in {1e3 * seconds:.1f} ms)",
        RED if slow else OK,
        "Something else uses these cores, or the network interface is the wrong one (GLOO_SOCKET_IFNAME, "
        "NCCL_SOCKET_IFNAME)."
        if slow
        else "",
    )
    if not right:
        remedy = "Try another --engine, and ALLFORCE_SHARED_MEMORY=0."
        yield Point("all-reduce", "the sum over all workers is wrong", RED, remedy)


def _seconds(setting: Setting, tensor: torch.Tensor, count: int) -> float:
    """Median time of a sum over all workers, the same on all."""
    times = []
    for _ in range(count + 2):
        setting.comm.barrier()
        begun = time.perf_counter()
        setting.comm.all_reduce(tensor.zero_())
        if setting.device.type == "cuda":
            torch.cuda.synchronize(setting.device)
        times.append(time.perf_counter() - begun)
    return max(setting.gather(median(times[2:])))


def clocks(setting: Setting) -> Iterator[Point]:
    """See CountedComm.compare_clocks: every barrier bounds the offset of a clock to that of rank 0."""
    if setting.comm.size == 1:
        return
    times = []
    for _ in range(20):
        came = time.time()
        setting.comm.barrier()
        times.append((came, time.time()))
    reports = setting.gather(times)
    offsets = [bounds(times, reports[0]) for times in reports]
    worst = max(range(len(offsets)), key=lambda r: _least(offsets[r]))
    least, high = _least(offsets[worst]), max(map(abs, offsets[worst]))
    bad = least > APART
    text = f"at most {1e3 * high:.1f} ms apart" if not bad else f"rank {worst} is {least:.1f} s or more off rank 0"
    yield Point("clocks", text, RED if bad else OK, "Let chronyd or ntpd set the clocks of all machines." * bad)


def _least(offset: tuple[float, float]) -> float:
    """The smallest distance that the bounds allow."""
    low, high = offset
    return 0.0 if low <= 0 <= high else min(abs(low), abs(high))


def listeners(setting: Setting) -> Iterator[Point]:
    """Ports of the workers and of their launcher that others can reach."""
    own = {("worker", *found) for found in _listening(os.getpid())}
    if setting.world.size > 1:
        own |= {("launcher", *found) for found in _listening(setting.world.launcher_pid)}
    reports = sorted({tuple(entry) for entries in setting.gather(sorted(own)) for entry in entries})
    open_ = [(who, ip, port) for who, ip, port in reports if not is_loopback(ip)]
    count = len(reports) - len(open_)
    yield Point("listeners", f"{count} on the loopback" if count or open_ else "none")
    if not open_:
        return
    text = ", ".join(f"{who} {ip}:{port}" for who, ip, port in open_[:8]) + " …" * (len(open_) > 8)
    avoidable = setting.world.one_host and setting.world.launcher not in MPI_LAUNCHERS
    remedy = "On one machine --workers opens no port that others reach." if avoidable else ""
    more = "" if avoidable else "; docs/parallel.md says whose they are. Use a network that strangers do not reach"
    yield Point("listeners", f"reached from outside: {text}{more}", RED if avoidable else NOTE, remedy)


def secret(setting: Setting) -> Iterator[Point]:
    """What keeps strangers from a worker's place; all workers have proved already that they have the same one."""
    if setting.world.exposed:
        yield Point("secret", f"strangers may get it: {setting.world.exposed}", NOTE, SECRET_REMEDY)
    elif setting.world.size > 1:
        yield Point("secret", "known to the workers of this job, and asked for where they meet")


def _listening(pid: int) -> set[tuple[str, int]]:
    try:
        sockets = psutil.Process(pid).net_connections("inet")
    except psutil.Error:  # of another user
        return set()
    return {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}


# ---- files


def disk_space(setting: Setting) -> Iterator[Point]:
    folder = Path.cwd()
    if setting.input is not None:
        try:
            training = load_input(setting.input).training
            folder = (Path(training.save_dir or ".") / training.save_ckpt).parent
        except (UserError, OSError):
            pass  # told by the check of the input
    folder = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
    own = [socket.gethostname(), _free("/dev/shm"), _free(str(folder)), os.access(folder, os.W_OK)]
    reports = setting.gather(own)
    free, writable = reports[0][2:]  # rank 0 alone writes
    yield Point(
        "disk",
        f"{folder}: {free / 1e9:.1f} GB free" + ("" if writable else ", and no right to write"),
        OK if writable and free > DISK else RED,
        "" if writable and free > DISK else "Free some space, or set training/save_dir to a folder with room.",
    )
    for host in dict.fromkeys(t[0] for t in reports):
        shm = next(t[1] for t in reports if t[0] == host)
        if shm is not None:
            bad = shm < MEMORY_DISK
            remedy = "Remove old files there (in a container: --shm-size=1g), or set ALLFORCE_SHARED_MEMORY=0." * bad
            yield Point("/dev/shm", f"{host}: {shm / 1e9:.2f} GB free", RED if bad else OK, remedy)


def _free(path: str) -> int | None:
    return shutil.disk_usage(path).free if os.path.isdir(path) else None


def input_and_data(setting: Setting) -> Iterator[Point]:
    if setting.input is None:
        yield Point("input and data", "not looked at: `dp doctor input.json` does", NOTE)
        return
    settings, problem = _tried(lambda: load_input(setting.input or ""))
    yield from _compared(setting, "input", _digest(settings) if settings else "", problem)
    if settings is None or any(setting.gather(settings is None)):
        return
    yield from _compared(setting, "data", *_data(setting, settings))


def _digest(settings: Input) -> str:
    return hashlib.sha256(json.dumps(normalised(settings)).encode()).hexdigest()[:16]


def _data(setting: Setting, settings: Input) -> tuple[str, str]:
    from allforce.distributed.comm import SerialComm  # every rank looks for itself; they are compared afterwards

    found, problem = _tried(lambda: open_data(settings, None, SerialComm()))
    return ("+".join(fingerprint(d) for d in found if d is not None) if found else ""), problem


def _tried(what: Any) -> tuple[Any, str]:
    try:
        return what(), ""
    except (UserError, OSError) as error:
        return None, str(error)


def _compared(setting: Setting, name: str, value: str, problem: str) -> Iterator[Point]:
    reports = setting.gather([value, problem])
    for rank, (_, words) in enumerate(reports):
        if words:
            yield Point(
                name, f"rank {rank}: {words}", RED, f"See `dp train {setting.input} --dry-run` when it is mended."
            )
            return
    others = [rank for rank, (found, _) in enumerate(reports) if found != reports[0][0]]
    if others:
        names = ", ".join(map(str, others[:8])) + " …" * (len(others) > 8)
        remedy = "Put it where all machines see the same files, or copy it anew to all of them."
        yield Point(name, f"rank 0 has {reports[0][0]}, others have not: rank {names}", RED, remedy)
    else:
        yield Point(name, f"{reports[0][0]}" + ", the same on all workers" * (len(reports) > 1))
