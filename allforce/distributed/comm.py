"""What the trainer needs of a group of workers: the Comm protocol, and the serial engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class LostContact(Exception):
    """The engine lost a worker. Which one, the watch knows."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None: ...


class Comm(Protocol):
    """A group of `size` workers of which this process is number `rank`. Tensors are reduced in place."""

    rank: int
    size: int
    engine: str

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor: ...  # see OwnMemory
    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None: ...  # op: sum | max | min
    def all_reduce_start(self, tensor: Tensor) -> Work: ...  # sum; asynchronous where the engine allows
    def broadcast(self, tensor: Tensor, root: int = 0) -> None: ...
    def gather(self, value: Any) -> list[Any]: ...  # JSON values, one of each rank, on every rank
    def barrier(self) -> None: ...
    def split(self, color: int) -> Comm: ...  # sub-group of the ranks with the same color
    def abort(self, code: int = 1) -> None: ...  # end every worker of the job
    def close(self) -> None: ...


class OwnMemory:
    """Mixin of engines whose buffers are ordinary memory."""

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Zeros for a tensor that is all-reduced again and again, where the engine likes it best."""
        return torch.zeros(count, dtype=dtype, device=device)


def wait_until(done: Callable[[], bool]) -> None:
    """Wait, the first 0.3 ms busily, then with short sleeps: a core that spins is one that a rank waited for, or this
    rank's own loader, may need. The sleeps stay below a twentieth of the time waited. The watch looks for the dead.
    """
    start = time.perf_counter()
    while not done():
        waited = time.perf_counter() - start
        if waited > 3e-4:
            time.sleep(min(2e-4, waited / 20))


@contextmanager
def placed(tensor: Tensor, device: torch.device | str) -> Iterator[Tensor]:
    """The tensor where the engine works on it: itself, or a copy on that device that is written back."""
    if tensor.device.type == torch.device(device).type:
        yield tensor
    else:
        copy = tensor.detach().to(device)
        yield copy
        tensor.detach().copy_(copy)


def partition(items: Sequence[Any], rank: int, size: int) -> Any:
    """The contiguous share of a rank; the first len % size ranks have one more."""
    q, r = divmod(len(items), size)
    return items[rank * q + min(rank, r) : (rank + 1) * q + min(rank + 1, r)]


class Done:
    """A collective that is over already."""

    def wait(self) -> None:
        pass


class SerialComm(OwnMemory):
    """One worker: every collective is the identity."""

    rank, size, engine = 0, 1, "serial"

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        pass

    def all_reduce_start(self, tensor: Tensor) -> Work:
        return Done()

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass

    def split(self, color: int) -> Comm:
        return self

    def abort(self, code: int = 1) -> None:
        raise SystemExit(code)

    def close(self) -> None:
        pass
