"""The torch engine: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the group of all workers as a default value, fixed when it is imported. torch.optim imports it at
# its first use: after the workers have met, that would keep the group, with its threads, until the process ends.
import torch.distributed.nn.functional  # noqa: F401
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from .comm import Comm, Done, LostContact, OwnMemory, Work, placed
from .launch import World
from .network import LOOPBACK, interface_of, is_loopback, source_address
from .rendezvous import Announce, call_the_roll, no_contact, open_store
from .secret import prove

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
PATIENCE = timedelta(
    hours=24
)  # one rank may read or count much longer than the others; who died or hangs is noticed by the watch
LAST: list[Tensor] = []  # see TorchComm.close


class TorchComm(OwnMemory):
    """Workers joined by torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, secret: str, store: dist.Store | None = None):
        self.group, self.device, self.secret = group, device, secret
        self.store = store  # kept for the groups that are made of it; None of a part, whose whole has it
        self.rank, self.size = group.rank(), group.size()
        self.engine = "torch"
        self.backend = "nccl" if device.type == "cuda" else "gloo"

    @classmethod
    def start(cls, world: World, device: torch.device, limit: float, announce: Announce | None = None) -> TorchComm:
        store, host = open_store(world, limit, announce)
        roll = call_the_roll(world, store, _entry(host), limit)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(world, roll))
        prefix = dist.PrefixStore("group", store)
        options: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # else a thread of NCCL's asks the store every second
        try:
            dist.init_process_group(
                backend,
                store=prefix,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=limit),
                **options,
            )
        except (RuntimeError, OSError) as error:
            raise no_contact(world, f"{backend} could not connect them ({str(error).splitlines()[0]}).") from None
        group = dist.group.WORLD
        assert group is not None
        _set_pg_timeout(PATIENCE, group)
        return cls(group, device, world.secret, store)

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
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with self._named("gather"):
            dist.all_gather(parts, padded, group=self.group)
        return [json.loads(p[:n].cpu().numpy().tobytes()) for p, n in zip(parts, lengths.tolist(), strict=True)]

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self.device))
        if self.backend == "nccl":
            torch.cuda.synchronize(self.device)

    def split(self, color: int) -> Comm:
        colors = self.gather(color)
        members = [dist.get_global_rank(self.group, rank) for rank, c in enumerate(colors) if c == color]
        group = dist.new_group(members, timeout=PATIENCE, use_local_synchronization=True)
        part = TorchComm(group, self.device, self.secret)
        prove(part, self.secret)  # its connections are new ones
        return part

    def abort(self, code: int = 1) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the others notice

    def close(self) -> None:
        """The last call, once, and of a part made by split() before the whole.

        A group joins its threads when the last reference to it is gone. A thread that still lets go of a tensor while
        Python shuts down would end the process with "terminate called without an active exception". So the tensor of
        the last collective is kept, for the case that somebody else holds the group (DistributedDataParallel does).
        """
        if self.store is not None:
            LAST.append(torch.zeros(1, device=self.device))
            self.all_reduce(LAST[-1])
        group = self.group
        del self.group
        dist.destroy_process_group(group)
        self.store = None

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """torch reports a closed connection."""
        try:
            yield
        except RuntimeError as error:
            raise LostContact(f"rank {self.rank} lost contact during {what} ({str(error).splitlines()[0]})") from error


class TorchWork:
    def __init__(self, comm: TorchComm, work: Any):
        self.comm, self.work = comm, work

    def wait(self) -> None:
        with self.comm._named("all_reduce"):
            self.work.wait()


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
