"""What a run is asked for while it trains: its end, by signals and the time limit, and the table of its time.

Who is asked tells all workers in the collective of the step.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from types import FrameType
from typing import Any

import psutil

from allforce.errors import UserError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REASONS = ("the time limit", *(s.name for s in SIGNALS))  # in the order of the flags
CODES = (0, *(128 + s for s in SIGNALS))
TABLE = signal.SIGUSR2
FLAGS = len(REASONS) + 1  # the last one asks for the table


class Requests:
    """Within `with`, signals are remembered instead of ending the process; a second ctrl-C ends it at once."""

    def __init__(self, wall_time: float | None = None):
        start = psutil.Process().create_time()
        self.deadline = None if wall_time is None else start + wall_time
        self.asked = [False] * FLAGS
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Requests:
        if threading.current_thread() is threading.main_thread():
            self.handlers = {s: signal.signal(s, self._remember) for s in (*SIGNALS, TABLE)}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked[1 + (*SIGNALS, TABLE).index(signal.Signals(number))] = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def any(self) -> bool:
        if self.deadline is not None and time.time() > self.deadline:
            self.asked[0] = True
        return any(self.asked)


def seconds_of(text: str) -> float:
    """11:50:00, 2-00:00:00, 90:00 (minutes, seconds) or plain seconds."""
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if found:
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
    if re.fullmatch(r"\d+(\.\d*)?", text):
        return float(text)
    raise UserError(f"--max-wall-time {text} should be hours:minutes:seconds such as 11:50:00, or seconds.")
