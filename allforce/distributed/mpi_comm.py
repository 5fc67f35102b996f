"""The mpi engine: mpi4py, on the memory of the tensors themselves."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .comm import Comm, Done, OwnMemory, Work, placed, wait_until
from .launch import World, scrubbed
from .rendezvous import call_the_roll, no_contact, open_store

HALVES = (torch.bfloat16, torch.float16)  # MPI does not know them: sent as 16 bits, added by torch
LAUNCHERS = ("openmpi", "mvapich2", "hydra", "pals", "jsrun", "flux", "pmi")  # those that wire up MPI by themselves


class NoMpi(Exception):
    """mpi4py cannot serve this world; the text says why."""


def load_mpi(world: World) -> Any:
    """mpi4py's MPI module, not initialised, over the library that belongs to the launcher."""
    if world.mpi_library and "MPI4PY_LIBMPI" not in os.environ and "mpi4py.MPI" not in sys.modules:
        os.environ["MPI4PY_LIBMPI"] = world.mpi_library
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False  # a crash must not wait for the others in MPI_Finalize
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise NoMpi(f"mpi4py cannot be loaded ({str(error).splitlines()[0]})") from None
    library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip()
    is_open_mpi = "Open MPI" in library
    if world.launcher == "openmpi" and not is_open_mpi or world.launcher == "hydra" and is_open_mpi:
        raise NoMpi(
            f"mpi4py uses {library}, which {world.started_by} does not wire up"
            " (export MPI4PY_LIBMPI=<the libmpi.so of that mpirun>)"
        )
    return MPI


class MpiComm(OwnMemory):
    """Workers joined by MPI."""

    def __init__(self, MPI: Any, comm: Any, whole: bool = False):
        self.MPI, self.comm, self.whole = MPI, comm, whole
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.engine = "mpi"
        self.ops = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
        self.half_ops: dict[tuple[torch.dtype, str], Any] = {}

    @classmethod
    def start(cls, world: World, limit: float) -> MpiComm:
        MPI = load_mpi(world)
        if not MPI.Is_initialized():
            initialise(MPI, world, limit)
        if MPI.COMM_WORLD.Get_size() != world.size or MPI.COMM_WORLD.Get_rank() != world.rank:
            found = f"rank {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()}"
            raise no_contact(world, f"its MPI library ({MPI.get_vendor()[0]}) sees {found}.")
        return cls(MPI, MPI.COMM_WORLD.Dup(), whole=True)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        if tensor.numel():
            with placed(tensor, "cpu") as host:
                finish(self.comm.Iallreduce(self.MPI.IN_PLACE, bits(host), self._op(tensor.dtype, op)))

    def all_reduce_start(self, tensor: Tensor) -> Work:
        if not tensor.numel():
            return Done()
        if tensor.device.type != "cpu":
            self.all_reduce(tensor)
            return Done()
        buffer = bits(tensor)
        return MpiWork(self.comm.Iallreduce(self.MPI.IN_PLACE, buffer, self._op(tensor.dtype, "sum")), buffer)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if tensor.numel():
            with placed(tensor, "cpu") as host:
                finish(self.comm.Ibcast(bits(host), root))

    def gather(self, value: Any) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        lengths = np.empty(self.size, dtype=np.int64)
        finish(self.comm.Iallgather(np.array([len(text)], dtype=np.int64), lengths))
        everything = np.empty(lengths.sum(), dtype=np.uint8)
        finish(self.comm.Iallgatherv(text, [everything, lengths, self.MPI.BYTE]))
        return [json.loads(part.tobytes()) for part in np.split(everything, np.cumsum(lengths)[:-1])]

    def barrier(self) -> None:
        finish(self.comm.Ibarrier())

    def split(self, color: int) -> Comm:
        return MpiComm(self.MPI, self.comm.Split(color, self.rank))

    def abort(self, code: int = 1) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.MPI.COMM_WORLD.Abort(code)

    def close(self) -> None:
        if self.whole and not self.MPI.Is_finalized():  # a part made by split() leaves MPI alive
            self.MPI.Finalize()

    def _op(self, dtype: torch.dtype, op: str) -> Any:
        if dtype not in HALVES:
            return self.ops[op]
        if (dtype, op) not in self.half_ops:
            combine: Any = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]

            def function(left: Any, right: Any, datatype: Any) -> None:
                a, b = torch.frombuffer(left, dtype=dtype), torch.frombuffer(right, dtype=dtype)
                combine(a, b, out=b)

            self.half_ops[dtype, op] = self.MPI.Op.Create(function, commute=True)
        return self.half_ops[dtype, op]


def initialise(MPI: Any, world: World, limit: float) -> None:
    """MPI_Init waits for all ranks without an end, so the roll is called before where that is easy: on one host."""
    store = None  # rank 0 serves it until MPI_Init is over everywhere
    if world.meeting == "local":
        store, host = open_store(world, limit)
        call_the_roll(world, store, {}, limit)
    words = no_contact(world, f"MPI did not start within {limit:g} s; a worker may have died at its start.")
    with watchdog(limit, str(words)):
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    del store


class MpiWork:
    def __init__(self, request: Any, buffer: np.ndarray):
        self.request, self.buffer = request, buffer  # the buffer must live until MPI is done

    def wait(self) -> None:
        finish(self.request)


def finish(request: Any) -> None:
    wait_until(request.Test)


def bits(tensor: Tensor) -> np.ndarray:
    """The tensor's own memory as an array."""
    flat = tensor.detach().view(-1)
    return flat.view(torch.int16).numpy() if flat.dtype in HALVES else flat.numpy()


@contextmanager
def watchdog(seconds: float, words: str) -> Iterator[None]:
    """End this process with `words` when the block takes longer: MPI_Init holds the interpreter, so a shell counts.

    The shell reads a pipe of this process: whatever ends it, or the block, closes the pipe and ends the shell, which
    never signals another process that has got the same number.
    """
    alarm = f"printf '%s\\n' {shlex.quote(words)} >&4; kill -TERM {os.getpid()}"
    script = (
        f"exec 3<&0 4>&2 2>/dev/null; sleep {seconds} & sleep=$!; (read -r line <&3; kill $sleep) & reader=$!;"
        f" if wait $sleep; then kill $reader; {alarm}; fi; wait"
    )
    shell = subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, env=scrubbed(), start_new_session=True)
    assert shell.stdin is not None
    try:
        yield
    finally:
        shell.stdin.close()
        shell.wait()
