"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_whole(path: str | Path, data: bytes, check: Callable[[bytes], bool] | None = None) -> None:
    """Write under a temporary name, flush to the disk, rename: the name always stands for a whole file.

    `check` looks at what can be read again before the name is given. An OSError has the path, and says when the disk is
    full what is needed and what is free.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # /dev/null is written to, not replaced
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if check is not None and not check(temporary.read_bytes()):
            raise OSError(errno.EIO, "what was written is read back differently")
        os.replace(temporary, path)
        flush_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}{_space_left(path, error, len(data))}", str(path)) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _space_left(path: Path, error: OSError, needed: int) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    try:
        return f" ({needed} bytes needed, {shutil.disk_usage(path.parent).free} free)"
    except OSError:
        return f" ({needed} bytes needed)"


def flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
