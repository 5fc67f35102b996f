"""Real launchers: how each starts n copies of a command, or why it cannot here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import slurm_cluster

from allforce.distributed.launch import scrubbed

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
OPEN_MPI = ROOT / ".cache/openmpi/bin/mpirun"

COMMANDS = {
    "torchrun": [BIN / "torchrun", "--no-python", "--nproc-per-node"],
    "hydra": [BIN / "mpirun", "-l", "-launcher=fork", "-hosts=localhost", "-np"],
    "openmpi": [OPEN_MPI, "--allow-run-as-root", "--oversubscribe", "-np"],
    "horovodrun": [BIN / "horovodrun", "-np"],
    "slurm": ["srun", "--overcommit", "-n"],
    "workers": [sys.executable, ROOT / "tests/parallel/start_workers.py"],
}


def missing(launcher: str) -> str:
    if launcher == "openmpi" and not OPEN_MPI.exists():
        return "Open MPI is not there (make openmpi)"
    if launcher == "horovodrun" and importlib.util.find_spec("horovod") is None:
        return "Horovod is not there (make horovod)"
    if launcher == "hydra" and not (BIN / "mpirun").exists():
        return "the mpich wheel is not installed"
    return slurm_cluster.why_not() if launcher == "slurm" else ""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    with slurm_cluster.SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def launch(request):
    """launch(launcher, n, *command, **environment) → CompletedProcess with stdout and stderr as one text."""

    def run(launcher: str, n: int, *command, timeout: float = 150, **extra: str) -> subprocess.CompletedProcess[str]:
        if reason := missing(launcher):
            pytest.skip(reason)
        environment = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if launcher == "slurm":
            environment["SLURM_CONF"] = request.getfixturevalue("slurm").environment["SLURM_CONF"]
        full = [str(word) for word in (*COMMANDS[launcher], n, *command)]
        return subprocess.run(
            full, env=environment | extra, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
        )

    return run
