"""The torch engine: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from ..errors import UserError
from .comm import Comm, Done, OwnMemory, Work, placed
from .launch import World
from .network import LOOPBACK, interface_of, is_loopback, source_address
from .rendezvous import Announce, call_the_roll, open_store

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
PATIENCE = timedelta(
    hours=1
)  # one rank may read or count much longer than the others; a closed connection shows at once


class TorchComm(OwnMemory):
    """Workers joined by torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, roll: list[dict[str, Any]], store: dist.Store):
        self.group, self.device, self.roll, self.store = group, device, roll, store
        self.rank, self.size = group.rank(), group.size()
        self.engine = "torch"
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.watch: Watch | None = None

    @classmethod
    def start(cls, world: World, device: torch.device, limit: float, announce: Announce | None = None) -> TorchComm:
        store, host = open_store(world, limit, announce)
        roll = call_the_roll(world, store, _entry(host), limit)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(world, roll))
        prefix = dist.PrefixStore("group", store)
        options: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
        try:
            dist.init_process_group(
                backend,
                store=prefix,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=limit),
                **options,
            )
        except (RuntimeError, dist.DistError) as error:
            raise UserError(_lost(roll, world.rank, "setting up the connections", error)) from None
        group = dist.group.WORLD
        assert group is not None
        _set_pg_timeout(PATIENCE, group)
        comm = cls(group, device, roll, store)
        comm.watch = Watch(store, world.rank)
        return comm

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        if tensor.numel():
            with self._named("all_reduce"), placed(tensor, self.device) as there:
                dist.all_reduce(there, OPS[op], group=self.group)

    def all_reduce_start(self, tensor: Tensor) -> Work:
        if not tensor.numel():
            return Done()
        with self._named("all_reduce"):
            return TorchWork(self, dist.all_reduce(tensor, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if tensor.numel():
            with self._named("broadcast"), placed(tensor, self.device) as there:
                dist.broadcast(there, group=self.group, group_src=root)

    def gather(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(text)
        self.all_reduce(lengths)
        longest = int(lengths.max())
        mine = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with self._named("gather"):
            dist.all_gather(parts, mine, group=self.group)
        return [json.loads(p[:n].cpu().numpy().tobytes()) for p, n in zip(parts, lengths.tolist(), strict=True)]

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self.device))
        if self.backend == "nccl":
            torch.cuda.synchronize(self.device)

    def split(self, color: int) -> Comm:
        colors = self.gather(color)
        members = [dist.get_global_rank(self.group, rank) for rank, c in enumerate(colors) if c == color]
        group = dist.new_group(members, timeout=PATIENCE, use_local_synchronization=True)
        return TorchComm(
            group, self.device, [self.roll[rank] for rank, c in enumerate(colors) if c == color], self.store
        )

    def abort(self, code: int = 1) -> None:
        self.store.set("abort", json.dumps([dist.get_rank(), code]))
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(2 * Watch.INTERVAL)  # the store may live in this process: let the others read it
        os._exit(code)

    def close(self) -> None:
        """The last call, once, and of a part made by split() before the whole.

        A group joins its threads when the last reference to it is gone. A thread that still lets go of a tensor while
        Python shuts down would end the process with "terminate called without an active exception".
        """
        if self.watch is not None:  # the whole
            self.watch.stop()
            self.barrier()
        group = self.group
        del self.group
        dist.destroy_process_group(group)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """torch reports a closed connection; say which worker has ended."""
        try:
            yield
        except RuntimeError as error:
            raise UserError(_lost(self.roll, self.rank, what, error)) from error


class TorchWork:
    def __init__(self, comm: TorchComm, work: Any):
        self.comm, self.work = comm, work

    def wait(self) -> None:
        with self.comm._named("all_reduce"):
            self.work.wait()


class Watch:
    """A thread that ends this process when another rank calls abort(), whatever this one waits for."""

    INTERVAL = 0.5  # seconds

    def __init__(self, store: dist.Store, rank: int):
        # An own connection: the main thread may block on the other one.
        self.store, self.rank = store.clone(), rank  # type: ignore[attr-defined]
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, name="allforce-watch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.done.wait(self.INTERVAL):
            try:
                if not self.store.check(["abort"]):
                    continue
                rank, code = json.loads(self.store.get("abort"))
            except RuntimeError:
                return  # the store's process has ended; the next collective names it
            if rank != self.rank:
                print(f"rank {self.rank}: rank {rank} stopped the job.", file=sys.stderr, flush=True)
                os._exit(code)

    def stop(self) -> None:
        self.done.set()
        self.thread.join()


def _entry(store_host: str) -> dict[str, Any]:
    """What a rank says about itself: its address is the one from which it reaches the store."""
    address = source_address(store_host) if store_host else ""
    return {"host": socket.gethostname(), "pid": os.getpid(), "address": address}


def _interface(world: World, roll: list[dict[str, Any]]) -> str:
    """gloo's network interface: the loopback on one host, else the one that leads to the other hosts.

    Left alone, gloo takes the address of the host's name, which many machines resolve to a loopback address.
    """
    address = LOOPBACK if world.surely_one_host else roll[world.rank]["address"]
    if not world.surely_one_host and (not address or is_loopback(address)):
        others = [e["address"] for e in roll if e["address"] and not is_loopback(e["address"])]
        address = source_address(others[0]) if others else LOOPBACK if world.one_host else ""
    return interface_of(address)


def _lost(roll: list[dict[str, Any]], rank: int, what: str, error: BaseException) -> str:
    """Name the workers of this host that have ended; of other hosts only the connection is known."""
    time.sleep(0.5)  # a dying process closes its sockets before it is gone
    here = roll[rank]["host"]
    gone = [r for r, e in enumerate(roll) if e["host"] == here and r != rank and not alive(e["pid"])]
    named = ", ".join(f"rank {r} (process {roll[r]['pid']} on {here})" for r in gone)
    who = f"{named} has ended" if gone else "a worker has ended or cannot be reached"
    first = str(error).splitlines()[0]
    return f"rank {rank} lost contact during {what}: {who}. Its own output says why. ({first})"


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
