"""`python -m allforce` without the three seconds in which a new interpreter loads torch: forked from this process.

A forked command has what a started one would have: environment, descriptors, signals, session and exit. `dp train
--workers N` forks its workers in the same way. Everything after the start is the code that users run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiny import write_data, write_input

import allforce.train.entry  # noqa: F401 - so that no child has to load it
from allforce import cli, logs
from allforce.distributed import spawn
from allforce.train.torch_calls import check_torch

PR_SET_NAME = 15  # linux/prctl.h
RANK = "ALLFORCE_RANK"
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
warmed: list[bool] = []
check_torch()


def warm_up() -> None:
    """Train once in this process: what is compiled or loaded at first use is then there for all children."""
    if warmed:
        return
    warmed.append(True)
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        write_input(Path(folder), training__numb_steps=2, training__disp_freq=1)
        here = os.getcwd()
        os.chdir(folder)
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, *STOPPING)}
        try:
            with open("output", "w") as output, contextlib.redirect_stderr(output):
                assert cli.main(["train", "input.json"]) == 0
        finally:
            logs.close()
            os.chdir(here)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert threading.active_count() == 1, threading.enumerate()


class Forked:
    """What subprocess.Popen is, for `python -m allforce …` alone."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = subprocess.STDOUT,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = True,
        preexec_fn: Callable[[], None] | None = None,
    ):
        assert list(args[1:3]) == ["-m", "allforce"] and stdin == subprocess.DEVNULL and start_new_session
        self.returncode: int | None = None
        warm_up()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                become(env, cwd, None if stdout is None else stdout.fileno(), pass_fds, preexec_fn)
                code = run(["dp", *args[3:]])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def become(env: Mapping[str, str], cwd: Path | None, output: int | None, pass_fds: Sequence[int], last) -> None:
    """What fork and exec do to a process beside changing its program."""
    os.setsid()
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if cwd is not None:
        os.chdir(cwd)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    edges = [2, *sorted(pass_fds), os.sysconf("SC_OPEN_MAX")]
    for low, high in zip(edges, edges[1:], strict=False):
        os.closerange(low + 1, high)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    warnings.resetwarnings()  # pytest makes errors of them, and has streams of its own
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
    if last is not None:
        last()
    if RANK in env:  # by which it is found
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank {env[RANK]}".encode(), 0, 0, 0)


def run(argv: list[str]) -> int:
    """The command and the end of its interpreter; the exit code."""
    sys.argv = argv
    spawn.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)  # for its workers
    try:
        code = cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
