"""World → Comm: choose the engine, join the workers, and check that all of them are really there."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
from typing import Any

import torch

from ..errors import UserError
from . import ENGINES
from .comm import Comm, SerialComm
from .horovod_comm import HorovodComm
from .launch import World
from .mpi_comm import LAUNCHERS as MPI_LAUNCHERS
from .mpi_comm import MpiComm, NoMpi, load_mpi
from .profile import CountedComm
from .rendezvous import no_contact, time_limit
from .secret import prove
from .shared import ORDERED, HostComm
from .torch_comm import TorchComm
from .watch import Watch


def connect(world: World, engine: str = "auto", device: torch.device | str = "cpu") -> Comm:
    """Join the workers of `world`: all of them are there, or a UserError within ALLFORCE_TIMEOUT says why not."""
    device, limit = torch.device(device), time_limit()
    if engine not in ENGINES:
        raise UserError(f"--engine {engine} is unknown. Choose one of: {', '.join(ENGINES)}.")
    if world.size == 1:
        return SerialComm()
    if engine == "serial":
        raise UserError(
            f"--engine serial, but {world.started_by} started {world.size} workers: they would all train the same model"
            " and overwrite each other's files. Start one process, or leave --engine out."
        )
    comm = START[choose(world, device) if engine == "auto" else engine](world, device, limit)
    check(world, comm, device)
    prove(comm, world.secret)
    return HostComm(comm) if shares_memory(world, comm, device) else comm


def join(world: World, engine: str = "auto", device: torch.device | str = "cpu", exact: bool = False) -> CountedComm:
    """connect, with the collectives counted and all workers watched."""
    comm = CountedComm(connect(world, engine, device), exact)
    if comm.size > 1:
        watch = Watch(comm, world)
        if watch.problem:
            reason = f"workers are not watched, so a dead or hanging one may not be noticed: {watch.problem}"
            world.note = f"{world.note} {reason}.".strip()
        else:
            comm.watch = watch
    return comm


def shares_memory(world: World, comm: Comm, device: torch.device) -> bool:
    """Gradients of one host's CPU workers are added up in shared memory; who asked for Horovod gets Horovod."""
    wanted = comm.engine != "horovod" and os.environ.get("ALLFORCE_SHARED_MEMORY") != "0"
    return wanted and ORDERED and world.one_host and device.type == "cpu"


def choose(world: World, device: torch.device) -> str:
    """Horovod under horovodrun, MPI under mpirun on CPUs, torch (NCCL, gloo) otherwise."""
    if world.launcher == "horovodrun" and importlib.util.find_spec("horovod"):
        import horovod.torch as hvd

        return "horovod" if device.type == "cpu" or hvd.nccl_built() else "torch"
    if world.launcher in MPI_LAUNCHERS and device.type == "cpu":
        try:
            load_mpi(world)
            return "mpi"
        except NoMpi as reason:
            world.note = f"engine torch instead of mpi: {reason}."
    return "torch"


def _torch(world: World, device: torch.device, limit: float) -> Comm:
    if world.meeting or world.launcher not in MPI_LAUNCHERS:
        return TorchComm.start(world, device, limit)
    try:
        mpi = MpiComm.start(world, limit)
    except NoMpi as reason:
        raise no_contact(world, f"nothing in the environment leads to rank 0, and {reason}.") from None
    world.hosts = list(dict.fromkeys(mpi.gather(socket.gethostname())))
    records: list[Any] = []

    def announce(record: Any) -> Any:
        if not records:  # all ranks together, so once: who asks again gets the same
            records.extend(mpi.gather(record))
        return records[0]

    comm = TorchComm.start(world, device, limit, announce)
    comm.barrier()  # all have met: nobody asks rank 0's store while MPI_Finalize holds its interpreter
    mpi.close()  # it has led to rank 0; Open MPI's mpirun takes a worker that ends without it for a dead one
    return comm


def _mpi(world: World, device: torch.device, limit: float) -> Comm:
    try:
        return MpiComm.start(world, limit)
    except NoMpi as reason:
        raise UserError(
            f"--engine mpi cannot be used: {reason}. Install it with pip install 'allforce[mpi]'."
        ) from None


def _horovod(world: World, device: torch.device, limit: float) -> Comm:
    if importlib.util.find_spec("horovod") is None:
        raise UserError(
            "--engine horovod, but Horovod is not installed: build it with `make horovod`, or leave --engine out."
        )
    import horovod.torch as hvd

    if world.launcher != "horovodrun" and not hvd.mpi_built():
        raise UserError(
            f"--engine horovod under {world.started_by}, but this Horovod was built without MPI: its workers find each"
            f" other under horovodrun alone. Start `horovodrun -np {world.size} dp train …`, leave --engine out, or"
            " build Horovod with MPI (HOROVOD_WITH_MPI=1)."
        )
    return HorovodComm.start(world, limit)


START = {"torch": _torch, "mpi": _mpi, "horovod": _horovod}


def check(world: World, comm: Comm, device: torch.device) -> None:
    """Every rank is there once, on its own GPU, where it thinks it is. Completes world.hosts and world.secret.

    An engine that met without a secret (MPI) carries one of rank 0's to all.
    """
    drawn = "" if world.secret else secrets.token_hex(32)
    entries = comm.gather([world.rank, world.size, socket.gethostname(), _gpu(device), drawn])
    if [entry[:2] for entry in entries] != [[rank, world.size] for rank in range(world.size)]:
        raise no_contact(world, f"the workers answer as {[tuple(entry[:2]) for entry in entries]} (rank, size).")
    hosts = [entry[2] for entry in entries]
    if world.local_assumed and len(set(hosts)) > 1:
        raise UserError(
            f"{world.started_by} does not tell the local rank, and the workers are on {len(set(hosts))} hosts."
            " Export ALLFORCE_RANK, ALLFORCE_SIZE, ALLFORCE_LOCAL_RANK and ALLFORCE_LOCAL_SIZE for every worker."
        )
    owner: dict[Any, int] = {}
    world.secret = world.secret or entries[0][4]
    for rank, (_, _, host, gpu, _) in enumerate(entries):
        if gpu and owner.setdefault((host, gpu), rank) != rank:
            raise UserError(
                f"Ranks {owner[host, gpu]} and {rank} on {host} would share one GPU ({gpu}). Start one worker per GPU,"
                " or let every worker see its own: check CUDA_VISIBLE_DEVICES and the GPU options of the scheduler."
            )
    if not world.hosts or len(world.hosts) < len(set(hosts)):
        world.hosts = list(dict.fromkeys(hosts))


def agree(comm: Comm, what: str, value: Any) -> None:
    """All ranks hold the same `value` (a hash of the input, of the data), or stop with both values."""
    values = comm.gather(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise UserError(f"The workers disagree about {what}: rank 0 has {values[0]}, rank {rank} has {other}.")


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
