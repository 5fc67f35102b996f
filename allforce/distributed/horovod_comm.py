"""The horovod engine: horovod.torch under horovodrun."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from .comm import Comm, Done, LostContact, OwnMemory, Work
from .launch import World
from .rendezvous import exposed, no_contact
from .secret import prove
from .torch_comm import TorchComm

WIRE = {torch.bfloat16: torch.float32}  # Horovod has no bfloat16: sent as float32


class HorovodComm(OwnMemory):
    """Workers joined by Horovod."""

    def __init__(self, hvd: Any, world: World, limit: float):
        self.hvd, self.world, self.limit = hvd, world, limit
        self.rank, self.size = world.rank, world.size
        self.engine = "horovod"
        self.ops = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
        self.calls: Counter[str] = Counter()
        self.groups: TorchComm | None = None

    @classmethod
    def start(cls, world: World, limit: float) -> HorovodComm:
        import horovod.torch as hvd

        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", f"{max(1, limit):.0f}")
        try:
            hvd.init()
        except Exception as error:  # HorovodInternalError and plain RuntimeErrors of its C++ side
            raise no_contact(world, f"Horovod did not start ({str(error).splitlines()[0]}).") from None
        if hvd.size() != world.size or hvd.rank() != world.rank:
            raise no_contact(world, f"Horovod sees rank {hvd.rank()} of {hvd.size()}.")
        exposed(world, "it travels through Horovod, whose store has no password")
        return cls(hvd, world, limit)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        self._start(tensor, op).wait()

    def all_reduce_start(self, tensor: Tensor) -> Work:
        return self._start(tensor, "sum")

    def _start(self, tensor: Tensor, op: str) -> Work:
        if not tensor.numel():
            return Done()
        wire = tensor.detach().to(WIRE.get(tensor.dtype, tensor.dtype)).view(-1)
        # Horovod pairs requests by name and remembers names it has seen: few names, never one twice at a time.
        kind = f"{op}.{wire.dtype}.{wire.numel()}"
        self.calls[kind] += 1
        handle = self.hvd.allreduce_async_(wire, op=self.ops[op], name=f"{kind}.{self.calls[kind] % 8}")
        return HorovodWork(self.hvd, handle, tensor.detach().view(-1), wire)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if tensor.numel():
            wire = tensor.detach().to(WIRE.get(tensor.dtype, tensor.dtype)).view(-1)
            self.hvd.broadcast_(wire, root, name="broadcast")
            tensor.detach().view(-1).copy_(wire)

    def gather(self, value: Any) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.hvd.allgather(torch.tensor([len(text)]), name="lengths").tolist()
        everything = self.hvd.allgather(text, name="texts")
        return [json.loads(part.numpy().tobytes()) for part in everything.split(lengths)]

    def barrier(self) -> None:
        self.hvd.barrier()

    def split(self, color: int) -> Comm:
        # Horovod's process sets need every worker of the job at each split; gloo's groups only their members.
        if self.groups is None:
            self.groups = TorchComm.start(self.world, torch.device("cpu"), self.limit)
            prove(self.groups, self.world.secret)
        return self.groups.split(color)

    def abort(self, code: int = 1) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # horovodrun ends the others

    def close(self) -> None:
        self.barrier()
        if self.groups is not None:
            self.groups.close()
        self.hvd.shutdown()


class HorovodWork:
    def __init__(self, hvd: Any, handle: int, target: Tensor, wire: Tensor):
        self.hvd, self.handle, self.target, self.wire = hvd, handle, target, wire

    def wait(self) -> None:
        try:
            self.hvd.synchronize(self.handle)
        except RuntimeError as error:  # HorovodInternalError
            raise LostContact(f"Horovod lost contact ({str(error).splitlines()[0]})") from error
        if self.wire.dtype != self.target.dtype:
            self.target.copy_(self.wire)
