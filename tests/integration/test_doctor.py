"""`dp doctor` and `dp train --dry-run`: what they say, their exit code, and that nothing is written."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from tiny import ROOT, dp, write_data, write_input

from allforce.cli import main
from allforce.data.dataset import DataSet
from allforce.data.discover import open_systems
from allforce.train.datasets import fingerprint

PROGRAM = """
import os, sys
os.chdir(os.environ["ALLFORCE_RANK"])
from allforce.cli import main
sys.exit(main(["doctor", "input.json"]))
"""


def files(folder: Path) -> set[str]:
    return {str(p) for p in folder.rglob("*")}


def test_workers_that_see_other_data_and_have_too_many_threads(tmp_path):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
        write_data(tmp_path / rank)
        write_input(tmp_path / rank)
    energies = np.load(tmp_path / "1/small/set.000/energy.npy")
    np.save(tmp_path / "1/small/set.000/energy.npy", energies + 1)
    command = [sys.executable, str(ROOT / "tests/parallel/start_workers.py"), "2", sys.executable, "-c", PROGRAM]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "64"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    points = [line[:20].split(maxsplit=1) for line in done.stdout.splitlines()]
    marks = [(name.strip(), mark) for mark, name in (p for p in points if len(p) == 2)]
    assert ("threads", "!!") in marks and ("data", "!!") in marks and ("input", "ok") in marks, done.stdout
    assert ("all-reduce", "ok") in marks or ("all-reduce", "!!") in marks, done.stdout  # a busy machine may be slow
    assert "give them fewer threads (OMP_NUM_THREADS)" in done.stdout
    assert "points are to be mended" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_what_is_compared_of_the_data(tmp_path):
    """A difference far behind the first frame is noticed; another time of a file is none."""
    write_data(tmp_path)
    path = tmp_path / "small/set.000/force.npy"

    def mark() -> str:
        return fingerprint(DataSet(open_systems([str(tmp_path / "small")], ["A", "B"])))

    first = mark()
    os.utime(path, (1, 1))
    assert mark() == first
    forces = np.load(path)
    forces[-1, -1] += 1e-12
    np.save(path, forces)
    assert mark() != first


def test_a_launcher_of_mpi(tmp_path):
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "-launcher=fork", "-hosts=localhost", "-np", "2", sys.executable, "-m", "allforce"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "doctor"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 2), done.stderr  # 2 where a busy machine is slow
    for words in ("mpirun of MPICH", "ok  engine          mpi", "MB/s", "at most", "listeners", "/dev/shm"):
        assert words in done.stdout, done.stdout
    assert done.stdout.count("ok  versions") == 1, done.stdout


def test_a_dry_run_tells_much_and_writes_nothing(tmp_path):
    write_data(tmp_path)
    write_input(tmp_path, learning_rate__scale_by_worker="linear", training__tensorboard=True, training__stat_file="s")
    before = files(tmp_path)
    done = dp(tmp_path, "train", "input.json", "--dry-run", "--world-size", "4")
    assert done.returncode == 0, done.stderr
    for words in (
        "fitting.nets.0.layers.0.w                                24 x 12  float64",
        "parameters: 1058 (1058 trainable)",
        "epoch: 70 frames of 2 systems, 35 micro-batches, 8.8 steps",
        "global batch: 8 frames a step",
        "learning rate: 5.00e-03 x 4 (linear) = 2.00e-02 at the start",
        "ms a step with 1 worker(s)",
        "20 steps and 4 validations",
        "nothing was written",
    ):
        assert words in done.stderr, done.stderr
    assert files(tmp_path) == before


def test_a_world_size_without_a_dry_run(capsys):
    assert main(["train", "input.json", "--world-size", "4"]) == 2
    assert "--world-size belongs to --dry-run" in capsys.readouterr().err
