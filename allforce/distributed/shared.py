"""Workers of one host add up their gradients in memory that all of them see.

The buffer of every worker lies in one shared block. To add them up, worker r of W sums part r of all buffers, in the
order of the ranks, and writes the sum into part r of every buffer: nothing is sent, nothing is copied twice, and the
result is the same bits on every worker. Everything else goes through the engine that found the workers.

A worker tells that its numbers are there by a counter behind them. On x86 processors others see both in that order;
on other processors they need not, and the engine is used for gradients as well.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
from typing import Any

import torch
from torch import Tensor

from .comm import Comm, Work, wait_until

ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686")  # stores are seen in the order they were made
LINE = 64  # bytes of a cache line: counters and buffers of two workers never share one


class HostComm:
    """A Comm of workers on one host, whose buffers are added up in shared memory."""

    def __init__(self, comm: Comm):
        self.comm = comm
        self.rank, self.size, self.engine = comm.rank, comm.size, comm.engine
        self.blocks: dict[int, Block] = {}  # by the address of this worker's buffer

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Zeros that all_reduce_start adds up in shared memory; every worker asks for the same."""
        block = Block.open(self.comm, count, dtype)
        if block is None:
            return self.comm.buffer(count, dtype, device)
        own = block.buffers[self.rank]
        self.blocks[own.data_ptr()] = block
        return own

    def all_reduce_start(self, tensor: Tensor) -> Work:
        block = self.blocks.get(tensor.data_ptr())
        if block is None or tensor.numel() != block.buffers[self.rank].numel():
            return self.comm.all_reduce_start(tensor)
        block.arrive()
        return block

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        self.comm.all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.comm.broadcast(tensor, root)

    def gather(self, value: Any) -> list[Any]:
        return self.comm.gather(value)

    def barrier(self) -> None:
        self.comm.barrier()

    def split(self, color: int) -> Comm:
        return HostComm(self.comm.split(color))

    def abort(self, code: int = 1) -> None:
        self.comm.abort(code)

    def close(self) -> None:
        self.comm.close()


class Block:
    """Shared memory: one counter for each worker, then one buffer for each worker."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, count: int, dtype: torch.dtype):
        self.rank, self.turn = rank, 0
        self.counters = torch.frombuffer(memory, dtype=torch.int64, count=size * LINE // 8).view(size, -1)[:, 0].numpy()
        offsets = [size * LINE + k * padded(count, dtype) for k in range(size)]
        self.buffers = [torch.frombuffer(memory, dtype=dtype, count=count, offset=p) for p in offsets]
        edges = [count * r // size for r in range(size + 1)]
        self.parts = [buffer[edges[rank] : edges[rank + 1]] for buffer in self.buffers]

    @classmethod
    def open(cls, comm: Comm, count: int, dtype: torch.dtype) -> Block | None:
        """None on every worker when one of them cannot have it: no such memory, too little of it, another container."""
        length = comm.size * (LINE + padded(count, dtype))
        name = f"allforce-{secrets.token_hex(16)}"
        file, memory = reserve(name, length) if comm.rank == 0 else (None, None)
        pid, number, name = comm.gather([os.getpid(), file, name])[0]
        if comm.rank > 0 and number is not None:
            memory = attach(f"/proc/{pid}/fd/{number}", name, length)
        there = comm.gather(memory is not None)
        if file is not None:
            os.close(file)  # the memory lives as long as somebody has it mapped
        return cls(memory, comm.rank, comm.size, count, dtype) if memory is not None and all(there) else None

    def arrive(self) -> None:
        self.turn += 1
        self.counters[self.rank] = self.turn

    def wait(self) -> None:
        """Add up my part of all buffers when all have arrived; done when all have done so."""
        self._all_there()
        first, *others = self.parts
        for part in others:
            first.add_(part)
        for part in others:
            part.copy_(first)
        self.arrive()
        self._all_there()

    def _all_there(self) -> None:
        wait_until(lambda: bool((self.counters >= self.turn).all()))


def padded(count: int, dtype: torch.dtype) -> int:
    """Bytes of a buffer, up to whole cache lines."""
    return -(-count * dtype.itemsize // LINE) * LINE


def reserve(name: str, length: int) -> tuple[int | None, mmap.mmap | None]:
    """A file without a place in any folder: nothing stays behind, whoever dies."""
    if not hasattr(os, "memfd_create"):
        return None, None
    file = os.memfd_create(name)
    try:
        os.posix_fallocate(file, 0, length)  # fails now where writing would later end the process
        return file, mmap.mmap(file, length)
    except OSError:
        os.close(file)
        return None, None


def attach(path: str, name: str, length: int) -> mmap.mmap | None:
    """The memory of another worker, through the descriptor that it has of it."""
    try:
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            return None  # in another container the same number is another process
        file = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(file, length)
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None
