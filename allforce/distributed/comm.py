"""What the trainer needs of a group of workers: the Comm protocol, and the serial engine."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None: ...


class Comm(Protocol):
    """A group of `size` workers of which this process is number `rank`. Tensors are reduced in place."""

    rank: int
    size: int
    engine: str

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None: ...  # op: sum | max | min
    def all_reduce_start(self, tensor: Tensor) -> Work: ...  # sum; asynchronous where the engine allows
    def broadcast(self, tensor: Tensor, root: int = 0) -> None: ...
    def gather(self, value: Any) -> list[Any]: ...  # JSON values, one of each rank, on every rank
    def barrier(self) -> None: ...
    def split(self, color: int) -> Comm: ...  # sub-group of the ranks with the same color
    def abort(self, code: int = 1) -> None: ...  # end every worker of the job
    def close(self) -> None: ...


class Done:
    """A collective that is over already."""

    def wait(self) -> None:
        pass


class SerialComm:
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
