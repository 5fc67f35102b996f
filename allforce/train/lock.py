"""One run at a time in a folder: a lock that names its holder, and that a dead holder loses by itself."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from allforce.errors import UserError

NAME = ".allforce.lock"


@contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """Hold the folders until the end of the block; a UserError says who else does."""
    held: list[tuple[int, Path]] = []
    try:
        for folder in sorted({folder.resolve() for folder in folders}):
            if folder.is_dir():  # else nothing can be written there
                held.append((_take(folder / NAME), folder / NAME))
        yield
    finally:
        for file, path in held:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(file)


def _take(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 4096).decode(errors="replace")
            os.close(file)
            raise UserError(f"{path.parent}: another run is writing here ({_name(holder)}). {REMEDY}") from None
        except OSError:  # a file system without locks: what the file says must do
            holder = os.read(file, 4096).decode(errors="replace")
            if _lives_here(holder):
                os.close(file)
                raise UserError(f"{path.parent}: another run is writing here ({_name(holder)}). {REMEDY}") from None
        if _same(file, path):
            break
        os.close(file)  # its holder has just removed it
    os.ftruncate(file, 0)
    me = {"host": socket.gethostname(), "pid": os.getpid(), "start": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.pwrite(file, json.dumps(me).encode(), 0)
    return file


REMEDY = "Wait for its end, stop it, or train in a folder of its own."


def _same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _name(holder: str) -> str:
    try:
        who = json.loads(holder)
        return f"process {who['pid']} on {who['host']}, since {who['start']}"
    except (ValueError, TypeError, KeyError):
        return "it has just begun"


def _lives_here(holder: str) -> bool:
    try:
        who = json.loads(holder)
        return who["host"] == socket.gethostname() and os.path.exists(f"/proc/{int(who['pid'])}")
    except (ValueError, TypeError, KeyError):
        return False
