"""One GPU per local rank, or a fair share of the CPU cores."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ..errors import UserError
from .comm import Comm
from .launch import World

Env = Mapping[str, str]
INTRA = ("DP_INTRA_OP_PARALLELISM_THREADS", "TF_INTRA_OP_PARALLELISM_THREADS", "OMP_NUM_THREADS")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
THRESHOLDS = (2**30, 2**25)  # bytes; glibc before 2.35 refuses more than 32 MiB
INTER = ("DP_INTER_OP_PARALLELISM_THREADS", "TF_INTER_OP_PARALLELISM_THREADS")


@dataclass(frozen=True)
class Threads:
    intra: int  # within one operation
    inter: int  # operations at a time
    source: str  # the variable that set `intra`, or how it was computed

    @property
    def fixed(self) -> bool:
        """Whether fewer would be against the user's will: OpenMP's own word for it, beside a number of threads."""
        return self.source in INTRA and os.environ.get("OMP_DYNAMIC", "").strip().lower() in ("false", "0")


def setup(world: World) -> tuple[torch.device, Threads]:
    """Choose the device of this rank and set torch's threads. Call it before the first tensor operation."""
    device, threads = choose_device(world), choose_threads(world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(threads.intra)
    if torch.get_num_interop_threads() != threads.inter:
        torch.set_num_interop_threads(threads.inter)
    keep_freed_memory()
    return device, threads


def keep_freed_memory(mallopt: Callable[[int, int], int] | None = None) -> int | None:
    """Let malloc keep freed blocks up to a size, which is returned, for the next step. Given back, they come again page
    by page as page faults, which cost a fifth of a step on CPUs. Only glibc has mallopt; elsewhere, and where it grants
    nothing, all stays as it is: any threshold that is set ends its own search for a good one."""
    mallopt = mallopt or getattr(ctypes.CDLL(None), "mallopt", None)
    granted = next((n for n in THRESHOLDS if mallopt(M_MMAP_THRESHOLD, n)), None) if mallopt is not None else None
    if mallopt is not None and granted is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # any value is granted
    return granted


def choose_device(world: World, env: Env = os.environ, count: int | None = None) -> torch.device:
    """Of the `count` GPUs this process sees (CUDA_VISIBLE_DEVICES) the one of its local rank; DEVICE=cpu takes none."""
    count = torch.cuda.device_count() if count is None else count
    if count == 0 or env.get("DEVICE", "").lower() == "cpu":
        return torch.device("cpu")
    if world.local_size <= count:
        return torch.device("cuda", world.local_rank)
    # Schedulers may show each task its own GPU only; connect() checks that no two ranks hold the same one.
    if "SLURM_GPUS_PER_TASK" in env or (count == 1 and env.get("CUDA_VISIBLE_DEVICES")):
        return torch.device("cuda", 0)
    visible = env.get("CUDA_VISIBLE_DEVICES", "not set")
    raise UserError(
        f"{world.local_size} workers on this host but only {count} visible GPU(s) (CUDA_VISIBLE_DEVICES {visible}):"
        f" each worker needs its own. Start {count} worker(s) per host, or set DEVICE=cpu to train on the CPUs."
    )


def choose_threads(world: World, env: Env = os.environ, cores: int | None = None) -> Threads:
    """What the user set, else this rank's share of the cores."""
    inter = next((n for name in INTER if (n := _threads(name, env))), 1)
    for name in INTRA:
        if n := _threads(name, env):
            return Threads(n, inter, name)
    cores = physical_cores(os.sched_getaffinity(0)) if cores is None else cores
    if world.size == 1 or bound_by_launcher(world):
        return Threads(cores, inter, f"{cores} cores of this worker")
    return Threads(max(1, cores // world.local_size), inter, f"{cores} cores / {world.local_size} workers")


def crowded(threads: Threads, comm: Comm) -> list[str]:
    """A sentence for each host whose workers have more threads than they have CPUs; all workers call it."""
    gathered = comm.gather([socket.gethostname(), threads.intra, sorted(os.sched_getaffinity(0))])
    sentences = []
    for host in dict.fromkeys(name for name, _, _ in gathered):
        counts = [n for name, n, _ in gathered if name == host]
        cpus = {cpu for name, _, own in gathered if name == host for cpu in own}
        if sum(counts) > len(cpus):
            sentences.append(
                f"{host}: {len(counts)} worker(s) with {sum(counts)} threads share {len(cpus)} CPUs, which makes steps"
                " much slower. Start fewer workers, or give them fewer threads (OMP_NUM_THREADS)."
            )
    return sentences


def bound_by_launcher(world: World) -> bool:
    """mpirun may have given this rank cores of its own: fewer than the launcher's process itself may use."""
    try:
        return (
            len(os.sched_getaffinity(0)) < len(os.sched_getaffinity(world.launcher_pid)) and world.launcher != "slurm"
        )
    except OSError:
        return False


def physical_cores(cpus: set[int]) -> int:
    """Cores among these logical CPUs: two hardware threads of one core count once."""
    cores = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            return min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))
    return len(cores)


def _threads(name: str, env: Env) -> int:
    """0 and unset mean: choose."""
    text = env.get(name, "").split(",")[0]  # OMP_NUM_THREADS may list nested levels
    try:
        number = int(text or 0)
    except ValueError:
        number = -1
    if number < 0:
        raise UserError(f"{name}={env[name]} should be a number of threads, 0 or more.")
    return number
