"""A worker ends with its launcher from the first moment on: while torch is being loaded nobody else would notice.

Later the watch (watch.py) sees to it, and says more.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time

from .launch import LASTING, LOST, detect

GRACE = 0.6  # seconds in which the watch, when there is one, ends this worker itself


def end_with_launcher() -> None:
    """Call it before anything that takes long. Does nothing for a process without a launcher."""
    world = detect()
    if world.launcher not in LASTING or world.launcher_pid <= 1 or not hasattr(os, "pidfd_open"):
        return
    try:
        handle = os.pidfd_open(world.launcher_pid)
    except OSError:  # gone already: who started this worker is not who it seems to be
        return
    words = f"The launcher (process {world.launcher_pid}) has ended: rank {world.rank} ends."
    threading.Thread(target=_wait, args=(handle, words), name="allforce-launcher", daemon=True).start()


def _wait(handle: int, words: str) -> None:
    select.select([handle], [], [])
    time.sleep(GRACE)
    try:
        print(words, file=sys.stderr, flush=True)
    finally:  # also when nobody reads any more
        os._exit(LOST)
