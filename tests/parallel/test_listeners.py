"""Nobody gets in: what listens while workers run, and what happens to a stranger who comes to the door."""

import base64
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import listeners
import psutil
import pytest
import torch.distributed as dist
from conftest import COMMANDS, ROOT, missing

from allforce.distributed.launch import scrubbed
from allforce.distributed.network import is_loopback

SUITE = Path(__file__).with_name("comm_suite.py")


def start(launcher: str, *command, request=None, folder: Path | None = None, **extra: str) -> subprocess.Popen:
    environment = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | extra
    if launcher == "slurm":
        environment["SLURM_CONF"] = request.getfixturevalue("slurm").environment["SLURM_CONF"]
    full = [str(word) for word in (*COMMANDS[launcher], 2, sys.executable, *command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(full, env=environment, cwd=folder, **pipes)


@pytest.mark.parametrize(
    "launcher, engine, also",
    [
        ("workers", "auto", "start_workers"),
        ("torchrun", "auto", ""),
        ("horovodrun", "auto", ""),
        ("horovodrun", "torch", ""),
    ],
)
def test_loopback_alone(request, launcher, engine, also):
    """On one host the workers listen on the loopback only. torchrun and horovodrun themselves do not, `--workers` does.

    Under mpirun the workers inherit mpirun's own listeners and MPI opens some: docs/parallel.md says which.
    """
    if reason := missing(launcher):
        pytest.skip(reason)
    with start(launcher, SUITE, "--engine", engine, request=request) as process:
        seen = set().union(*listeners.watch(process))
        output = process.stdout.read()
    assert process.returncode == 0, output
    ours = {s for s in seen if SUITE.name in s.command and ("start_workers" in s.command or " -np " not in s.command)}
    ours = {s for s in ours if "torchrun" not in s.command} | {s for s in seen if also and also in s.command}
    assert ours and all(is_loopback(s.ip) for s in ours), seen


def of_workers(process: subprocess.Popen, name: str) -> set[listeners.Listener]:
    """Listeners of all processes that run a program, wherever the launcher started them, until it ends."""
    seen, mine = set(), os.getpid()
    for found in listeners.watch(process):
        seen |= found
        for other in psutil.process_iter(["cmdline"]):
            if name in (other.info["cmdline"] or ()) and other.pid != mine:
                seen |= listeners.look(other.pid)
    return {s for s in seen if s.command.split()[:2] == [sys.executable, name]}


BARE = """
import time
from allforce.distributed.launch import detect
from allforce.distributed.mpi_comm import load_mpi
MPI = load_mpi(detect())
MPI.Init()
MPI.COMM_WORLD.Barrier()
time.sleep(1)
MPI.COMM_WORLD.Barrier()
MPI.Finalize()
"""


@pytest.mark.parametrize("launcher", ["slurm", "hydra", "openmpi"])
def test_srun_and_mpi(request, tmp_path, launcher):
    """Under srun workers listen on the loopback alone. Under mpirun no more listeners are reached from outside than a
    program of MPI has that does nothing."""
    if reason := missing(launcher):
        pytest.skip(reason)
    with start(launcher, SUITE, request=request) as process:
        ours = {s for s in of_workers(process, str(SUITE)) if not is_loopback(s.ip)}
        output = process.stdout.read()
    assert process.returncode == 0, output
    if launcher == "slurm":
        assert not ours, ours
        return
    assert ours  # else the comparison below is none
    program = tmp_path / "bare.py"
    program.write_text(BARE)
    with start(launcher, program, request=request) as process:
        bare = {s for s in of_workers(process, str(program)) if not is_loopback(s.ip)}
        output = process.stdout.read()
    assert process.returncode == 0, output
    assert len(ours) <= len(bare), (ours, bare)


PROGRAM = """
import os, time, torch
from allforce.distributed.connect import connect
from allforce.distributed.launch import detect
comm = connect(detect())
os.write(1, b"ready\\n")  # at once: two workers share the pipe
for _ in range(80):
    comm.all_reduce(torch.zeros(10))
    time.sleep(0.1)
os.write(1, b"unharmed\\n")
comm.close()
"""


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def put_bombs(ip: str, port: int, bomb: bytes) -> int:
    """Take what listens there for a store of torch's, and put the bomb into all its keys. How many there were."""
    try:
        store = dist.TCPStore(ip, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        keys = store.list_keys()
    except dist.DistError:
        return 0
    for key in keys:
        store.set(key, base64.b64encode(bomb))
    return len(keys)


def test_a_stranger_puts_a_pickle(tmp_path):
    """He finds no store: neither parent nor workers have one that listens. Their run goes on."""
    bomb = pickle.dumps(Bomb(tmp_path / "got-in"))
    outside = [a.address for nics in psutil.net_if_addrs().values() for a in nics if a.family == 2]
    with start("workers", "-c", PROGRAM) as process:
        try:
            assert process.stdout.readline() == "ready\n" == process.stdout.readline()
            ports = {s.port for s in listeners.look(process.pid)}
            put = {(ip, port): put_bombs(ip, port, bomb) for port in ports for ip in outside}
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert put and not any(put.values()), put
    assert process.returncode == 0 and output == "unharmed\n" * 2, output
    assert not (tmp_path / "got-in").exists()


def test_the_bomb_works(tmp_path):
    """The same attack on a store that does listen arrives there: the test above can fail."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert put_bombs("127.0.0.1", store.port, pickle.dumps(Bomb(tmp_path / "got-in"))) > 0
    pickle.loads(base64.b64decode(store.get("key")))
    assert (tmp_path / "got-in").exists()
