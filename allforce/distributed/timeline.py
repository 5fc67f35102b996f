"""The timeline: one file in Chrome's trace format with the phases of all workers, for chrome://tracing and Perfetto.

Rank 0 writes it, in a thread of its own. Events are appended to a part file; whenever that is cheap, the part is copied
and closed under a temporary name which then becomes the timeline. So the timeline is complete JSON at every moment.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
from collections.abc import Callable
from errno import EINVAL
from pathlib import Path
from time import perf_counter
from typing import Any

LIMIT = 2_000_000  # events of all ranks: a browser shows not many more
Event = tuple[str, str, float, float]  # thread, name, begin, end (s)


def packed(events: list[Event], origin: float) -> dict[str, Any]:
    """Events for the way to rank 0: names by number, times in µs since `origin`."""
    names = sorted({e[1] for e in events})
    threads = sorted({e[0] for e in events}, key=lambda t: (t != "main", t))
    number = {n: k for k, n in enumerate(names)} | {("thread", t): k for k, t in enumerate(threads)}
    rows = []
    for thread, name, a, b in events:  # both ends are rounded: a phase then ends no later than the one around it
        begin, end = round(1e6 * (a - origin), 1), round(1e6 * (b - origin), 1)
        rows.append([number["thread", thread], number[name], begin, end - begin])
    return {"names": names, "threads": threads, "events": rows}


class Timeline:
    """The file of rank 0; what cannot be written is said once, by `warn`, and training goes on."""

    HEAD, TAIL = b'{"displayTimeUnit":"ms","traceEvents":[\n', b"\n]}\n"

    def __init__(self, path: str, hosts: list[str], warn: Callable[[str], object]):
        self.path, self.part, self.warn = Path(path), Path(f"{path}.part"), warn
        self.queue: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self.threads: dict[tuple[int, str], int] = {}
        self.published, self.cost, self.fresh = 0.0, 0.0, False
        rows = [_meta("process_name", r, name=f"rank {r} ({host})") for r, host in enumerate(hosts)]
        rows += [_meta("process_sort_index", r, sort_index=r) for r in range(len(hosts))]
        if self.path.exists() and not self.path.is_file():  # renaming onto a device would take its place
            raise OSError(EINVAL, "it is not a regular file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.part, "wb")
        self.file.write(self.HEAD + b",\n".join(rows))
        self._publish()
        self.thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self.thread.start()

    def add(self, ranks: list[dict[str, Any]]) -> None:
        """Packed events of every rank."""
        self.queue.put(ranks)

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()

    def _run(self) -> None:
        try:
            while (ranks := self.queue.get()) is not None:
                self._append(ranks)
                if perf_counter() - self.published > 50 * self.cost:  # at most 2 % of the time of this thread
                    self._publish()
            if self.fresh:
                self._publish()
            self.file.close()
            self.part.unlink()
        except OSError as error:
            self.warn(f"the timeline {self.path} is not continued: {error.strerror}")
            while self.queue.get() is not None:
                pass

    def _append(self, ranks: list[dict[str, Any]]) -> None:
        lines: list[bytes] = []
        for rank, sent in enumerate(ranks):
            tids = [self._tid(rank, thread, lines) for thread in sent["threads"]]
            names = sent["names"]
            for thread, name, begin, lasted in sent["events"]:
                lines.append(
                    b'{"ph":"X","pid":%d,"tid":%d,"name":"%s","ts":%.1f,"dur":%.1f}'
                    % (rank, tids[thread], names[name].encode(), begin, lasted)
                )
        if lines:
            self.file.write(b",\n" + b",\n".join(lines))
            self.fresh = True

    def _tid(self, rank: int, thread: str, lines: list[bytes]) -> int:
        if (rank, thread) not in self.threads:
            tid = self.threads[rank, thread] = 1 + len(self.threads)  # Perfetto wants them different in all processes
            lines.append(_meta("thread_name", rank, tid, name=thread))
            lines.append(_meta("thread_sort_index", rank, tid, sort_index=tid))  # else by name, the loader first
        return self.threads[rank, thread]

    def _publish(self) -> None:
        begun = perf_counter()
        self.file.flush()
        temporary = Path(f"{self.path}.tmp")
        try:
            shutil.copyfile(self.part, temporary)
            with open(temporary, "ab") as file:
                file.write(self.TAIL)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self.fresh, self.published = False, perf_counter()
        self.cost = self.published - begun


def _meta(what: str, rank: int, tid: int = 0, **args: Any) -> bytes:
    event = {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}
    return json.dumps(event, separators=(",", ":")).encode()


def open_timeline(path: str, hosts: list[str], warn: Callable[[str], object]) -> Timeline | None:
    try:
        return Timeline(path, hosts, warn)
    except OSError as error:
        warn(f"no timeline: {path} cannot be written ({error.strerror})")
        return None
