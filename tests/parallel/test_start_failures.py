"""Accidents get words, and nobody waits for the dead. A hang shows as a time-out of the command."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import COMMANDS, ROOT

from allforce.distributed import rendezvous
from allforce.distributed.connect import connect
from allforce.distributed.launch import detect, scrubbed
from allforce.errors import UserError

PROGRAM = Path(__file__).with_name("misfortune.py")


@pytest.mark.parametrize("launcher", ["torchrun", "openmpi", "horovodrun", "workers"])
def test_dead_at_start(launch, launcher):
    """These launchers end the others and name the dead themselves."""
    result = launch(launcher, 2, sys.executable, PROGRAM, "dies before", timeout=60)
    assert result.returncode != 0 and "unharmed" not in result.stdout


@pytest.mark.parametrize("launcher", ["slurm", "hydra"])
def test_dead_at_start_named(launch, launcher):
    """srun and MPICH's mpirun leave the others alone: they notice."""
    command = [sys.executable, PROGRAM, "dies before"]
    result = launch(launcher, 3, *command, timeout=60, ALLFORCE_TIMEOUT="8")
    assert result.returncode != 0 and "unharmed" not in result.stdout
    assert "rank 1 did not appear within 8 s" in result.stdout and "started this process as rank" in result.stdout
    assert "ALLFORCE_TIMEOUT=300" in result.stdout and "MASTER_ADDR" not in result.stdout


def test_killed_later_is_named(launch):
    result = launch("slurm", 3, sys.executable, PROGRAM, "is killed", timeout=60)
    assert result.returncode != 0 and "unharmed" not in result.stdout
    assert re.search(r"rank 1 \(process \d+ on \S+\) has ended; it was in the start", result.stdout), result.stdout


@pytest.mark.parametrize("launcher", ["slurm", "hydra", "horovodrun"])
def test_abort_ends_everyone(launch, launcher):
    result = launch(launcher, 2, sys.executable, PROGRAM, "gives up", timeout=60)
    assert result.returncode != 0 and "unharmed" not in result.stdout
    if launcher == "slurm":
        assert re.search(r"rank 1 \(process \d+ on \S+\) stopped the job", result.stdout), result.stdout


def test_port_taken(launch):
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = str(other.getsockname()[1])
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ENGINE": "torch", "ALLFORCE_TIMEOUT": "5"}
        result = launch("hydra", 2, sys.executable, PROGRAM, "nothing", timeout=60, **environment)
    assert result.returncode != 0 and "unharmed" not in result.stdout
    assert f"Port {port}" in result.stdout and "in use by another program" in result.stdout


def test_workers_show_an_error_once(launch):
    result = launch("workers", 3, sys.executable, PROGRAM, "has a wrong input", timeout=60)
    assert result.returncode == 2
    assert result.stdout.count("training/numb_steps is -1") == 1 and "Traceback" not in result.stdout


def test_ctrl_c_ends_the_workers():
    command = [*map(str, COMMANDS["workers"]), "2", sys.executable, str(PROGRAM), "sleeps"]
    environment = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as parent:
        try:
            assert [parent.stdout.readline() for _ in range(2)] == ["asleep\n"] * 2
            parent.send_signal(signal.SIGINT)
            rest, _ = parent.communicate(timeout=60)  # the pipe closes when the last worker has ended
        finally:
            parent.kill()
    assert parent.returncode == 128 + signal.SIGINT, rest


ALONE = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": f"test-{os.getpid()}"}


ADD = ("rank 0 was not found", "mpirun -x MASTER_ADDR=", "ALLFORCE_LAUNCHER=none")


@pytest.mark.parametrize("rank, words", [(0, ("rank 1, 2, 3 did not appear", "ALLFORCE_TIMEOUT=300")), (2, ADD)])
def test_never_a_silent_copy(monkeypatch, rank, words):
    """The launcher's variables say 4, one process is there: an error in time, with the launcher and what to do."""
    monkeypatch.setenv("ALLFORCE_TIMEOUT", "1")
    local = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
    with pytest.raises(UserError) as error:
        connect(detect(ALONE | local | {"PMIX_NAMESPACE": f"alone-{os.getpid()}-{rank}"}), "torch")
    for part in (*words, "Open MPI's mpirun", f"rank {rank} of 4"):
        assert part in str(error.value)


def test_old_record_is_not_believed(monkeypatch, tmp_path):
    """A record of a dead rank 0 in the local store leads nowhere and is not waited for."""
    monkeypatch.setattr(rendezvous.tempfile, "tempdir", str(tmp_path))
    world = detect(ALONE | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    first = detect(ALONE | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    deadline = time.monotonic() + 5
    old = {"address": "127.0.0.1", "port": 1, "size": 4, "secret": "of the old job"}
    rendezvous._file_announce(first)(old, deadline)
    with pytest.raises(UserError, match="leads nowhere") as error:
        rendezvous.open_store(world, 0.5)
    assert "of the old job" not in str(error.value)
    folder = next(tmp_path.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o700 and next(folder.iterdir()).stat().st_mode & 0o777 == 0o600
    folder.chmod(0o755)
    with pytest.raises(UserError, match="0700"):
        rendezvous.open_store(world, 0.5)


def test_records_of_dead_jobs_are_removed(tmp_path):
    """And of nobody else: a living owner, one of another machine, a file that is no record."""
    dead = subprocess.Popen(["sleep", "60"])
    owner = rendezvous._owner(dead.pid)
    (tmp_path / "living").write_text(json.dumps({"owner": owner}))
    rendezvous.remove_stale(tmp_path)
    assert (tmp_path / "living").exists()
    dead.kill()
    dead.wait()
    (tmp_path / "elsewhere").write_text(json.dumps({"owner": ["another machine", *owner[1:]]}))
    (tmp_path / "mine").write_text(json.dumps({"owner": rendezvous._owner(os.getpid())}))
    (tmp_path / "reused").write_text(json.dumps({"owner": [owner[0], os.getpid(), 12345.0]}))
    (tmp_path / "other").write_text("no record")
    rendezvous.remove_stale(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"elsewhere", "mine", "other"}


def test_serial_engine_under_a_launcher():
    local = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(UserError, match="overwrite"):
        connect(detect(ALONE | local), "serial")


def test_horovod_without_mpi_under_mpirun():
    """The launcher's fault is named, not that the workers do not find each other."""
    hvd = pytest.importorskip("horovod.torch")
    if hvd.mpi_built():
        pytest.skip("this Horovod was built with MPI")
    local = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(UserError, match="built without MPI.*horovodrun -np 4"):
        connect(detect(ALONE | local), "horovod")
