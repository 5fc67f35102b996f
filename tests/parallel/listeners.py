"""Which sockets a tree of processes listens on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil


class Listener(NamedTuple):
    pid: int
    command: str
    ip: str
    port: int


def look(pid: int) -> set[Listener]:
    """The listeners of a process and of all its descendants, at this moment."""
    found = set()
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return found
    for process in tree:
        try:
            command = " ".join(process.cmdline())
            sockets = process.net_connections("inet")
        except psutil.Error:
            continue  # it has just ended
        found |= {Listener(process.pid, command, s.laddr.ip, s.laddr.port) for s in sockets if s.status == "LISTEN"}
    return found


def watch(process: subprocess.Popen, seconds: float = 120) -> Iterator[set[Listener]]:
    """Looks, one after another, until the process ends."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        assert time.monotonic() < deadline, "the command hangs"
        yield look(process.pid)
        time.sleep(0.02)
