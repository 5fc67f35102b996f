"""`--workers N`: local workers without a launcher. No port and no file: they inherit the descriptors that they need.

    store   a nameless file in memory, one for all workers: the key-value store by which they find each other
    line    one end of a socket pair for each worker: what it has to say when it gives up

Workers die with their parent: the kernel kills them when it is gone, however it ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

from ..errors import UserError
from .launch import LOST, World, detect, scrubbed

LINE = "ALLFORCE_LINE_FD"
GRACE = 2.0  # seconds that the others have to end by themselves when one has failed
LOOK = 0.05  # seconds between two looks at the workers
LONGEST = 60_000  # characters of a report: what a socket takes without a reader
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)  # would happen again
AGAIN = (LOST, *(128 + s for s in CRASHES))
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def worker_count(text: str) -> int:
    """`auto`: one per GPU, or the cores divided by the threads each worker is to have (OMP_NUM_THREADS, else 1)."""
    if text == "auto":
        import torch  # here, because whoever waits for a given number of workers has no use for it

        from .devices import choose_threads, physical_cores

        if torch.cuda.device_count():
            return torch.cuda.device_count()
        cores = physical_cores(os.sched_getaffinity(0))
        return max(1, cores // choose_threads(World(), cores=1).intra)
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"--workers {text} should be a number of workers, 1 or more, or `auto`.")
    return int(text)


def run_local_workers(
    n: int | str, argv: list[str], restarts: int = 0, again: Callable[[], list[str]] | None = None
) -> int:
    """Run the command `argv` as `n` workers on this host; the exit code of the first that failed, or 0.

    The error a worker left with report() is shown once. Signals are passed on; a second ctrl-C kills all. When a worker
    was lost, the command that `again` gives is run, up to `restarts` times.
    """
    world = detect()
    if world.size > 1:
        raise UserError(
            f"--workers starts its own workers, but {world.started_by} started {world.size} already: use one of them."
        )
    for attempt in range(restarts + 1):
        team = Team(worker_count(str(n)), argv if attempt == 0 or again is None else again())
        try:
            code = team.wait()
        finally:
            team.close()
        if code not in AGAIN or attempt == restarts:
            return code
        print(f"restart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)
    raise AssertionError("unreachable")


class Worker:
    """One child, and this end of the line to it."""

    def __init__(self, rank: int, count: int, store: int, argv: list[str]):
        self.rank, self.ended, self.finished_off = rank, 0.0, False
        self.line, other = socket.socketpair()
        own = {"RANK": rank, "SIZE": count, "LOCAL_RANK": rank, "LOCAL_SIZE": count, "STORE_FD": store}
        env = scrubbed() | {f"ALLFORCE_{name}": str(value) for name, value in own.items()}
        self.process = subprocess.Popen(
            argv,
            env=env | {LINE: str(other.fileno())},
            stdin=subprocess.DEVNULL,
            pass_fds=(store, other.fileno()),
            start_new_session=True,  # ctrl-C reaches the parent alone, which passes it on
            preexec_fn=in_the_child,
        )
        other.close()
        self.line.setblocking(False)

    def look(self) -> bool:
        """Whether it runs."""
        if self.ended:
            return False
        if self.process.poll() is not None:
            self.ended = time.monotonic()
        return not self.ended

    def failure(self) -> tuple[float, str, int] | None:
        """(when, words, exit code) of a worker that failed. A signal comes before the complaints that follow from it,
        a bare exit code after them."""
        code = self.process.returncode
        if not code or (self.finished_off and code == -signal.SIGKILL):
            return None
        if report := self._report():
            return report["time"], report["message"], report["code"]
        if code > 0:
            return self.ended + GRACE, f"rank {self.rank} ended with exit code {code}; the others were stopped.", code
        name = f"rank {self.rank} (process {self.process.pid}) was ended by {signal.Signals(-code).name}"
        why = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
        return self.ended - LOOK, f"{name}{why}.", 128 - code if -code in CRASHES else LOST

    def _report(self) -> dict | None:
        text = b""
        try:
            while piece := self.line.recv(65536):
                text += piece
            return json.loads(text)
        except (OSError, ValueError):  # nothing said, or killed in the middle of it
            return None


class Team:
    """All workers of this parent."""

    def __init__(self, count: int, argv: list[str]):
        self.interrupts, self.signal, self.workers = 0, 0, list[Worker]()
        self.handlers = {s: signal.signal(s, self.pass_on) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        self.handlers[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, lambda number, _: self.send(number))  # a question
        store = os.memfd_create("allforce-store")
        try:
            for rank in range(count):
                self.workers.append(Worker(rank, count, store, argv))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(store)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.interrupts += number == signal.SIGINT
        self.send(signal.SIGKILL if self.interrupts > 1 else number)

    def send(self, number: int) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    def wait(self) -> int:
        """Until all have ended. Who is still there some time after the first failure is killed."""
        failed = 0.0
        while running := [worker for worker in self.workers if worker.look()]:
            now = time.monotonic()
            if not failed and any(worker.process.returncode for worker in self.workers if worker not in running):
                failed = now
            if failed and now > failed + GRACE:
                self.send(signal.SIGKILL)
                for worker in running:
                    worker.finished_off = True
            time.sleep(LOOK)
        failures = [found for worker in self.workers if (found := worker.failure())]
        if self.signal:
            print(f"stopped by {signal.Signals(self.signal).name}; all workers have ended", file=sys.stderr)
            return 128 + self.signal
        if not failures:
            return 0
        codes = {worker.process.returncode for worker in self.workers}
        if len(codes) == 1 and codes <= {128 + s for s in self.handlers}:  # one was asked to end, and all agreed
            return codes.pop()
        (_, words, code), *others = sorted(failures)
        witness = [text for _, text, other in others if other == LOST]  # the watch knows what it was doing
        print("\n".join([words, *witness[:1]]), file=sys.stderr, flush=True)
        return code

    def close(self) -> None:
        """Nothing stays behind, whatever happened."""
        self.send(signal.SIGKILL)
        for worker in self.workers:
            worker.process.wait()
            worker.line.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


def in_the_child() -> None:
    """Before it becomes another program: die with the parent, which only Linux has."""
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a question that comes before it can be answered does not end it


def report(message: str, code: int = 2) -> bool:
    """Leave the error of this worker to run_local_workers, which shows the first one once. False: show it yourself."""
    if LINE not in os.environ:
        return False
    text = json.dumps({"time": time.monotonic(), "message": message[:LONGEST], "code": code})
    with socket.socket(fileno=int(os.environ.pop(LINE))) as line:
        line.sendall(text.encode())
    return True
