"""Frames and batches that are ready, kept in memory: one budget for all loaders of a worker, a share of its host's."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import psutil

Kept = TypeVar("Kept")


class Cache:
    """Keeps up to `size` bytes; the least recently used go first. Threads may share it."""

    def __init__(self, size: int):
        self.free = size
        self._items: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def kept(self, key: Hashable, make: Callable[[], Kept], size: Callable[[Kept], int]) -> Kept:
        """The item of this key, or made and kept; `size` counts its bytes."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key][0]
        made = make()
        nbytes = size(made)
        with self._lock:
            if key not in self._items:
                self._items[key] = made, nbytes
                self.free -= nbytes
            while self.free < 0:
                _, (_, freed) = self._items.popitem(last=False)
                self.free += freed
        return made


def memory_of_host() -> int:
    """Bytes that all processes of this job may use on this host: what it has, or what its control group allows."""
    return min([psutil.virtual_memory().total, *_group_limits()])


def _group_limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Limits of the control groups (version 2) that this process is in, from its own up to the root."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:  # not Linux
        return []
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    limits = []
    for group in (root / own, *(root / own).parents):
        limit = group / "memory.max"
        if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
            limits.append(int(text))
    return limits
