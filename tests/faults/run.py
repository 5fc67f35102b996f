"""A small training under any launcher, with its ranks at hand: to be killed, stopped and looked after."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/integration"), str(ROOT / "tests/parallel")]
import slurm_cluster  # noqa: E402, F401
from conftest import COMMANDS  # noqa: E402
from tiny import write_data, write_input  # noqa: E402

from allforce.distributed.launch import scrubbed  # noqa: E402

RANKS = ("ALLFORCE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK", "SLURM_PROCID")
FULL = os.environ.get("ALLFORCE_FAULTS") == "full"  # make faults; else what CI has time for
SECONDS = 120.0  # that anything here may take on a busy machine


class Run:
    """`dp train` as `launcher` starts it; use it in a with statement: nothing of it is left at the end.

    The launcher `forked` is `--workers`, or a serial run, forked instead of started. `extra` are variables of the
    environment.
    """

    def __init__(
        self,
        folder: Path,
        launcher: str,
        ranks: int,
        *args: str,
        data: bool = True,
        extra: Mapping[str, str] = MappingProxyType({}),
        **changes: Any,
    ):
        self.folder, self.launcher, self.size = folder, launcher, ranks
        if data:
            write_data(folder)
            write_input(folder, **changes)
        dp = [sys.executable, "-m", "allforce", "train", "input.json", *args]
        if launcher in ("workers", "forked"):
            command = [*dp, "--workers", str(ranks)]
        elif launcher == "serial":
            command = dp
        else:
            command = [*map(str, COMMANDS[launcher]), str(ranks), *dp]
        environment = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | extra
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        environment["TMPDIR"] = str(self.temporary)
        self.before = in_memory()
        self.output = (folder / "output").open("a+")
        start: Any = subprocess.Popen
        if launcher == "forked":
            from forked import Forked as start
        self.process = start(
            command, cwd=folder, env=environment, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        self.tree()
        for process in (*self.seen.values(), self.process):
            try:
                process.kill()
            except (psutil.Error, OSError):
                continue
        self.process.wait()
        self.output.close()

    def text(self) -> str:
        return (self.folder / "output").read_text()

    def tree(self) -> list[psutil.Process]:
        """All processes of the run that live."""
        for pid in descendants(self.process.pid):
            with suppress(psutil.Error):
                self.seen.setdefault(pid, psutil.Process(pid))
        if self.launcher == "slurm":  # whose workers are children of slurmstepd
            self.seen |= {p.pid: p for p in elsewhere(self.folder) if p.pid not in self.seen}
        return [p for p in self.seen.values() if lives(p)]

    def ranks(self) -> dict[int, psutil.Process]:
        """The workers by rank."""
        if self.launcher == "serial" or (self.launcher == "forked" and self.size == 1):
            return {0: psutil.Process(self.process.pid)}
        if self.launcher == "forked":
            return {int(p.name().split()[1]): p for p in self.tree() if p.name().startswith("rank ")}
        found = {}
        for process in self.tree():
            try:
                words, env = process.cmdline(), process.environ()
            except psutil.Error:
                continue
            if "allforce" in words and "-m" in words[:3]:
                found.update({int(env[name]): process for name in RANKS[::-1] if name in env})
        return found

    def wait_for(self, words: str, seconds: float = SECONDS) -> str:
        """Until the output has these words."""
        deadline = time.monotonic() + seconds
        while words not in self.text():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text()}"
            assert time.monotonic() < deadline, self.text()
            self.tree()
            time.sleep(0.05)
        return self.text()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        self.ranks()[rank].send_signal(number)

    def wait(self, seconds: float = SECONDS) -> tuple[int, str]:
        """Exit code and output, when the command and all its processes have ended."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None or self.tree():
            assert time.monotonic() < deadline, f"{self.tree()} live on: {self.text()}"
            time.sleep(0.02)
        return self.process.returncode, self.text()

    def leftovers(self) -> list[str]:
        """What it left behind outside of its folder, that is ours or torch's."""
        temporary = [
            p for p in self.temporary.rglob("*") if p.is_file() and "allforce" in str(p.relative_to(self.folder))
        ]
        return [*map(str, temporary), *(name for name in in_memory() if name not in self.before)]


def descendants(pid: int) -> list[int]:
    """By the kernel's own list, a hundred times faster than by looking at every process of the machine."""
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError), open(path) as file:
            found += [int(word) for word in file.read().split()]
    return found + [further for child in found for further in descendants(child)]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # in between
        return False


def elsewhere(folder: Path) -> list[psutil.Process]:
    """Workers in a folder, whoever started them."""
    workers = [p for p in psutil.process_iter(["cmdline"]) if "allforce" in (p.info["cmdline"] or ())[:3]]
    found = []
    for process in workers:
        try:
            if process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def in_memory() -> set[str]:
    return {str(p) for p in Path("/dev/shm").glob("*") if p.name.startswith(("allforce", "torch_"))}
