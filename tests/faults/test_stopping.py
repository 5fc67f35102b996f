"""Signals and time limits: save, agree, end; and what goes on from there is what would have been."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from run import FULL, ROOT, SECONDS, Run
from tiny import write_data, write_input

from allforce.distributed.launch import scrubbed
from allforce.files import checkpoint

STEPS = {"training__numb_steps": 400, "training__disp_freq": 10, "training__save_freq": 100, "training__seed": 3}
NEVER = {**STEPS, "training__numb_steps": 10_000_000}


def final(folder: Path, step: int = 400) -> dict[str, torch.Tensor]:
    return checkpoint.read(folder / f"model.ckpt-{step}.safetensors").tensors


def same(a: Path, b: Path) -> None:
    assert (a / "lcurve.out").read_bytes() == (b / "lcurve.out").read_bytes()
    one, two = final(a), final(b)
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(ranks): the folder of a run that nobody disturbed."""
    done: dict[int, Path] = {}

    def folder(ranks: int) -> Path:
        if ranks not in done:
            done[ranks] = tmp_path_factory.mktemp(f"whole{ranks}")
            with Run(done[ranks], "forked", ranks, **STEPS) as run:
                code, text = run.wait()
            assert code == 0, text
        return done[ranks]

    return folder


@pytest.mark.parametrize(
    "launcher, ranks, number, code",
    [
        ("serial", 1, signal.SIGTERM, 143),
        ("workers", 2, signal.SIGINT, 130),
    ]
    + [("workers", 2, signal.SIGUSR1, 138)] * FULL,
)
def test_a_signal_saves_and_the_restart_ends_as_if_nothing_had_happened(tmp_path, whole, launcher, ranks, number, code):
    with Run(tmp_path, launcher, ranks, **STEPS) as run:
        run.wait_for("Batch     150")
        run.process.send_signal(number)
        got, text = run.wait()
    assert got == code and "Traceback" not in text, text
    assert f"stopped by {signal.Signals(number).name} at step" in text, text
    with Run(tmp_path, "forked", ranks, "--restart", "auto", data=False) as run:
        got, text = run.wait()
    assert got == 0 and "Continue at step" in text, text
    same(whole(ranks), tmp_path)


def test_a_signal_to_one_rank_ends_all(tmp_path):
    with Run(tmp_path, "forked", 2, **NEVER) as run:
        run.wait_for("Batch      50")
        run.kill(1, signal.SIGTERM)
        code, text = run.wait()
    assert code == 143 and "stopped by SIGTERM at step" in text, text


@pytest.mark.parametrize("launcher", ["hydra", "openmpi"] if FULL else ["hydra"])
def test_ctrl_c_under_mpirun(tmp_path, launcher):
    """mpirun passes it on, or ends the workers its own way; they print no traceback."""
    import conftest  # that of tests/parallel

    if reason := conftest.missing(launcher):
        pytest.skip(reason)
    with Run(tmp_path, launcher, 2, **NEVER) as run:
        run.wait_for("Batch      50")
        run.process.send_signal(signal.SIGINT)
        code, text = run.wait()
    assert code != 0 and "Traceback" not in text, text
    if launcher == "hydra":  # Open MPI's mpirun kills them
        assert "stopped by SIGINT at step" in text and checkpoint.numbered(tmp_path / "model.ckpt"), text


def test_the_time_limit(tmp_path):
    with Run(tmp_path, "forked", 1, "--max-wall-time", "0:05", **NEVER) as run:
        code, text = run.wait()
    assert code == 0 and "stopped by the time limit at step" in text, text
    assert checkpoint.numbered(tmp_path / "model.ckpt")


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_any_moment_and_restarted(tmp_path, whole, ranks):
    """Two kills of the whole run, then to the end: byte for byte the run that nobody disturbed."""
    for after, args in ((60, ()), (230, ("--restart", "auto"))):
        with Run(tmp_path, "forked", ranks, *args, data=not args, **STEPS) as run:
            run.wait_for(f"Batch {after:7d}")
            run.process.kill()
            run.wait()
    with Run(tmp_path, "forked", ranks, "--restart", "auto", data=False) as run:
        code, text = run.wait()
    assert code == 0, text
    same(whole(ranks), tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp") or name.startswith(".allforce")]


def test_a_lost_worker_is_restarted(tmp_path, whole):
    with Run(tmp_path, "workers", 2, "--max-restarts", "1", **STEPS) as run:
        run.wait_for("Batch     210")
        run.kill(1)
        code, text = run.wait()
    assert code == 0 and "restart 1 of 1" in text and "was ended by SIGKILL" in text, text
    assert "restart from model model.ckpt-200.safetensors" in text, text
    same(whole(2), tmp_path)


def test_nothing_left_to_do_changes_nothing(whole):
    folder = whole(1)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir() if p.name not in ("output", "tmp")}
    with Run(folder, "forked", 1, "--restart", ".", data=False) as run:
        code, text = run.wait()
    assert code == 0 and "is at step 400 of 400: nothing is left to do" in text, text
    after = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.iterdir() if p.name not in ("output", "tmp")}
    assert after == before


def test_a_second_run_in_the_folder_is_refused(tmp_path):
    with Run(tmp_path, "forked", 1, **NEVER) as first:
        first.wait_for("Batch      10")
        with Run(tmp_path, "forked", 1, data=False) as second:
            code, text = second.wait()
        assert code == 2 and f"another run is writing here (process {first.process.pid} on" in text, text
        first.process.kill()
        first.wait()
    with Run(tmp_path, "forked", 1, data=False) as third:  # a dead run has no lock
        third.wait_for("Batch      10")


@pytest.fixture
def disk(tmp_path):
    """A file system of 300 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mount is not permitted here: {made.stderr}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk, left):
    with suppress(OSError):  # the run writes, too, and what is left may be less by now
        (disk / "other").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - left))


def test_full_disk(tmp_path, disk):
    """The run goes on without checkpoints, and fails at the end with the older one intact."""
    changes = {**STEPS, "training__save_dir": "disk", "training__numb_steps": 40, "training__save_freq": 10}
    with Run(tmp_path, "forked", 1, **changes) as run:
        run.wait_for("Start to train")
        first = time.monotonic()
        while not checkpoint.numbered(disk / "model.ckpt") and time.monotonic() < first + 60:
            time.sleep(0.01)
        fill(disk, left=4096)
        code, text = run.wait()
    assert code == 2 and "Traceback" not in text, text
    assert "No space left on device" in text and "bytes needed" in text, text
    assert checkpoint.read(checkpoint.find(disk / "model.ckpt")).step >= 10


@pytest.mark.parametrize("when", ["before", "later"])
def test_a_disk_too_full_for_what_a_run_tells(tmp_path, disk, when):
    """metrics, timeline, boards, traces and log are missed, each with one warning; the training is not touched."""
    pytest.importorskip("tensorboard")
    changes = {
        "training__numb_steps": 40 if when == "before" else 400,
        "training__metrics_file": "disk/metrics.jsonl",
        "training__tensorboard": True,
        "training__tensorboard_log_dir": "disk/board",
        "training__enable_profiler": when == "before",
    }
    if when == "before":
        fill(disk, left=0)
    with Run(tmp_path, "forked", 1, "--timeline", "disk/t.json", "-l", "disk/train.log", **changes) as run:
        if when == "later":
            run.wait_for("Batch      10")
            fill(disk, left=0)
        code, text = run.wait()
    assert code == 0 and "finished training" in text and "Traceback" not in text, text
    told = ["training/metrics_file", "timeline", "ensorboard|TensorBoard", "--log-path"]
    for what in told + ["training/enable_profiler"] * (when == "before"):
        lines = [line for line in text.splitlines() if "WARNING" in line and re.search(what, line)]
        assert len(lines) == 1, (what, text)


@pytest.mark.parametrize("when", ["before", "later"])
def test_a_disk_too_full_for_wandb(tmp_path, disk, monkeypatch, when):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(disk))
    if when == "before":
        fill(disk, left=0)
    with Run(tmp_path, "serial", 1, **STEPS, training__wandb_project="water") as run:
        if when == "later":
            run.wait_for("Batch      10")
            fill(disk, left=0)
        code, text = run.wait()
    assert code == 0 and "finished training" in text and "Traceback" not in text, text
    assert len(re.findall("WARNING.*(?:wandb|WandB)", text)) == 1, text


def test_a_disk_too_full_for_the_profile(tmp_path, disk):
    """Room for the pointer to the last checkpoint only, one page; then for nothing."""
    write_data(tmp_path)
    systems = {"training__training_data__systems": [str(tmp_path / "small")], "training__validation_data": None}
    paths = {"save_dir": "out", "disp_file": "lcurve.out", "metrics_file": "metrics.jsonl"}
    paths = {f"training__{key}": str(tmp_path / name) for key, name in paths.items()}
    write_input(tmp_path, training__numb_steps=20, training__save_freq=100, **systems, **paths)
    fill(disk, left=os.sysconf("SC_PAGE_SIZE"))
    command = [
        sys.executable,
        "-m",
        "allforce",
        "train",
        tmp_path / "input.json",
        "--comm-profile",
        "-o",
        tmp_path / "o",
    ]
    environment = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=disk, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 and "finished training" in done.stderr and "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "WARNING" in line and "--comm-profile" in line]
    assert "mpi_profile" in line and "No space left on device" in line


def test_no_sample_lost_or_seen_twice_at_another_number_of_workers(tmp_path):
    """1 worker for 10 steps, then 2: micro-batches 0-9, then 10, 11, …"""
    program = """
import json, os, sys
from allforce.train import start
seen = []
plain = start.Job.first_and_stride
def place(self, step):
    first = plain(self, step)
    seen.append([self.comm.rank, *first])
    return first
start.Job.first_and_stride = place
from allforce.cli import main
code = main(sys.argv[1:])
os.write(1, f"PLACE {json.dumps(seen[0])}\\n".encode())  # in one piece: two workers write at the same time
sys.exit(code)
"""
    (tmp_path / "program.py").write_text(program)
    with Run(tmp_path, "forked", 1, **STEPS | {"training__numb_steps": 10}) as run:
        assert run.wait()[0] == 0

    write_input(tmp_path, **STEPS | {"training__numb_steps": 20})
    workers = [sys.executable, str(ROOT / "tests/parallel/start_workers.py"), "2"]
    command = [*workers, sys.executable, "program.py", "train", "input.json", "--restart", "."]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    places = sorted(line for line in done.stdout.splitlines() if line.startswith("PLACE"))
    assert places == ["PLACE [0, 10, 2]", "PLACE [1, 11, 2]"]
