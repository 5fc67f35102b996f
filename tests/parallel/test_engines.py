"""Every engine under its own launcher passes the one suite (comm_suite.py)."""

import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("comm_suite.py")

# launcher, ranks, --engine, engine expected
CASES = [
    ("torchrun", 2, "auto", "torch"),
    ("torchrun", 4, "auto", "torch"),
    ("hydra", 2, "auto", "mpi"),
    ("hydra", 4, "auto", "mpi"),
    ("hydra", 3, "torch", "torch"),  # an odd number, and gloo through the local store
    ("openmpi", 2, "auto", "mpi"),
    ("openmpi", 4, "auto", "mpi"),
    ("horovodrun", 2, "auto", "horovod"),
    ("horovodrun", 4, "auto", "horovod"),
    ("horovodrun", 2, "torch", "torch"),  # gloo through Horovod's own store
    ("slurm", 2, "auto", "torch"),
    ("slurm", 4, "auto", "torch"),
    ("workers", 2, "auto", "torch"),
]


@pytest.mark.parametrize("launcher, ranks, engine, expected", CASES)
def test_suite(launch, launcher, ranks, engine, expected):
    result = launch(launcher, ranks, sys.executable, SUITE, "--engine", engine, "--expect", expected, launcher)
    assert result.returncode == 0, result.stdout
    assert f"passed: {expected} under {launcher}, {ranks} ranks" in result.stdout


def test_mpi_library_of_another_mpirun(launch):
    """Open MPI's mpirun with MPICH's library: MPI would see 2 worlds of one; gloo joins them instead."""
    library = Path(sys.prefix) / "lib/libmpi.so.12"
    if not library.exists():
        pytest.skip("the mpich wheel is not installed")
    command = [sys.executable, SUITE, "--expect", "torch", "openmpi"]
    result = launch("openmpi", 2, *command, MPI4PY_LIBMPI=str(library))
    assert result.returncode == 0 and "passed: torch under openmpi" in result.stdout, result.stdout


def test_batch_script_is_serial(launch, request, tmp_path):
    """A batch script of a 2-task job is one process, though Slurm shows 2 tasks."""
    import os
    import subprocess

    import slurm_cluster

    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    cluster = request.getfixturevalue("slurm")
    script, output = tmp_path / "job.sh", tmp_path / "out"
    code = "from allforce.distributed.launch import detect; print(detect())"
    script.write_text(f'#!/bin/sh\ncd {os.getcwd()}\n{sys.executable} -c "{code}"\n')
    command = ["sbatch", "--wait", "-n", "2", f"--output={output}", str(script)]
    subprocess.run(command, env=cluster.environment, check=True, capture_output=True, timeout=100)
    assert "size=1" in output.read_text(), output.read_text()
