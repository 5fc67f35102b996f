"""A small training under any launcher, with its ranks at hand: to be killed, stopped and looked after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
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
    """`dp train` as `launcher` starts it; use it in a with statement: nothing of it is left at the end."""

    def __init__(self, folder: Path, launcher: str, ranks: int, *args: str, data: bool = True, **changes: Any):
        self.folder, self.launcher, self.size = folder, launcher, ranks
        if data:
            write_data(folder)
            write_input(folder, **changes)
        dp = [sys.executable, "-m", "allforce", "train", "input.json", *args]
        if launcher == "workers":
            command = [*dp, "--workers", str(ranks)]
        elif launcher == "serial":
            command = dp
        else:
            command = [*map(str, COMMANDS[launcher]), str(ranks), *dp]
        environment = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        environment["TMPDIR"] = str(self.temporary)
        self.before = in_memory()
        self.output = (folder / "output").open("a+")
        self.process = subprocess.Popen(
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
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(child.pid, child)
        except psutil.Error:
            pass
        return [p for p in self.seen.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def ranks(self) -> dict[int, psutil.Process]:
        """The workers by rank."""
        if self.launcher == "serial":
            return {0: psutil.Process(self.process.pid)}
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


def in_memory() -> set[str]:
    return {str(p) for p in Path("/dev/shm").glob("*") if p.name.startswith(("allforce", "torch_"))}
