"""allforce.distributed under real launchers (api_suite.py), and what happens when one worker fails."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from allforce.distributed.watch import LOST

SUITE = Path(__file__).with_name("api_suite.py")


@pytest.mark.parametrize(
    "launcher, ranks, engine, shared",
    [
        ("torchrun", 2, "torch", "1"),
        ("torchrun", 3, "torch", "0"),
        ("hydra", 2, "mpi", "1"),
        ("horovodrun", 2, "", "1"),
    ],
)
def test_suite(launch, tmp_path, launcher, ranks, engine, shared):
    result = launch(launcher, ranks, sys.executable, SUITE, tmp_path, engine, ALLFORCE_SHARED_MEMORY=shared)
    assert result.returncode == 0, result.stdout
    assert f"passed: {ranks} ranks" in result.stdout


FAILURES = {
    "exception": ('if ad.rank() == 1: raise RuntimeError("out of paper")', "RuntimeError: out of paper"),
    "mistake": ("ad.scale_lr(0.1, how='cubic') if ad.rank() == 1 else None", "error: rank 1 on"),
    "arithmetic": ("1 / (1 - ad.rank())", "ZeroDivisionError"),
}


@pytest.mark.parametrize(
    "launcher, failure",
    [("torchrun", "exception"), ("torchrun", "mistake"), ("hydra", "mistake"), ("hydra", "arithmetic")],
)
def test_a_worker_that_fails_ends_all(launch, tmp_path, launcher, failure):
    """The others wait in a backward pass; the reason is shown, and nobody is left behind."""
    action, words = FAILURES[failure]
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch, allforce.distributed as ad\n"
        "ad.init()\n"
        "net = torch.nn.Linear(3, 1)\n"
        "optimizer = ad.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net)\n"
        "for step in range(3):\n"
        "    loss = net(torch.ones(2, 3)).sum()\n"
        f"    if step == 1:\n        {action}\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    result = launch(launcher, 2, sys.executable, script, timeout=60)
    assert result.returncode != 0 and words in result.stdout, result.stdout
    traceback = 'fails.py", line' in result.stdout  # torchrun names the script in a report of its own
    assert traceback == (failure != "mistake"), "a traceback only for what is not the user's mistake"


STEPS = (
    "import os, signal, sys, time, torch, allforce.distributed as ad\n"
    "ad.init({arguments})\n"
    "net = torch.nn.Linear(3, 1)\n"
    "optimizer = ad.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net)\n"
    "for step in range(4):\n"
    "    loss = net(torch.ones(2, 3)).sum()\n"
    "    if step == 2 and ad.rank() == {rank}:\n        {action}\n"
    "    loss.backward()\n"
    "    optimizer.step()\n"
    "print('came to the end', flush=True)\n"
)
LOSSES = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "has ended; it was in the program"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "has given no sign of life for"),
    "left": ("sys.exit()", "has left its program, but the others still need it"),
}


@pytest.mark.parametrize("loss, rank", [("killed", 0), ("killed", 1), ("stopped", 1), ("left", 0), ("left", 1)])
def test_a_lost_worker_ends_all(tmp_path, loss, rank):
    """Whichever worker it is: the other one says who was lost, and ends as `dp train` does.

    Each is started by itself, so that no launcher does it.
    """
    action, words = LOSSES[loss]
    script = tmp_path / "loses.py"
    script.write_text(STEPS.format(rank=rank, action=action, arguments="timeout=3" if loss == "stopped" else ""))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"SIZE": "2", "LOCAL_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    workers = []
    for r in range(2):
        who = {f"ALLFORCE_{name}": x for name, x in {**common, "RANK": str(r), "LOCAL_RANK": str(r)}.items()}
        pipes: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        workers.append(subprocess.Popen([sys.executable, script], env={**os.environ, **who, **meeting}, **pipes))
    try:
        text = workers[1 - rank].communicate(timeout=60)[0]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert workers[1 - rank].returncode == LOST, text
    told = [line for line in text.splitlines() if line.startswith(f"rank {rank} (process {workers[rank].pid} on ")]
    assert len(told) == 1 and words in told[0], text
    assert "Traceback" not in text and "came to the end" not in text, text


def test_long_steps_are_no_loss(launch, tmp_path):
    """The limit is for signs of life, not for the time between collectives."""
    script = tmp_path / "slow.py"
    script.write_text(STEPS.format(rank=1, action="time.sleep(5)", arguments="timeout=2"))
    result = launch("torchrun", 2, sys.executable, script, timeout=60)
    assert result.returncode == 0 and result.stdout.count("came to the end") == 2, result.stdout


def test_a_start_that_fails(launch, tmp_path):
    """An engine that is not there: one paragraph of each worker, no traceback."""
    script = tmp_path / "start.py"
    script.write_text("import allforce.distributed as ad\nad.init(engine='serial')\n")
    result = launch("torchrun", 2, sys.executable, script, timeout=60)
    assert result.returncode != 0 and "they would all train the same model" in result.stdout, result.stdout
    assert 'start.py", line' not in result.stdout


def test_communication_profile(launch, tmp_path, monkeypatch):
    """ALLFORCE_COMM_PROFILE counts the calls of one's own model as well, HOROVOD_TIMELINE shows them and its phases."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "steps.py"
    script.write_text(
        "import torch, allforce.distributed as ad\n"
        "from allforce.trace import phase\n"
        "ad.init()\n"
        "net = torch.nn.Linear(30, 10)\n"
        "optimizer = ad.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net)\n"
        "for _ in range(25):\n"
        "    with phase('forward'):\n"
        "        loss = net(torch.ones(2, 30)).sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    result = launch("torchrun", 2, sys.executable, script, ALLFORCE_COMM_PROFILE="1", HOROVOD_TIMELINE="t.json")
    assert result.returncode == 0, result.stdout
    profiles = sorted(tmp_path.glob("mpi_profile.*"))
    assert len(profiles) == 2
    (row,) = [line.split() for line in profiles[0].read_text().splitlines() if line.split()[:1] == ["MPI_Allreduce"]][
        :1
    ]
    assert row[1] == "25" and float(row[2]) == 4 * (310 + 2)
    spans = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in (0, 1):
        names = Counter(e["name"] for e in spans if e["pid"] == rank)
        assert names["forward"] == 25 and names["communication"] >= 25 and names["transfer"] >= 25


EXAMPLE = Path(__file__).resolve().parents[2] / "examples/own_model.py"


@pytest.fixture(scope="module")
def serial_example(tmp_path_factory):
    """One worker that accumulates two batches."""
    import subprocess

    folder = tmp_path_factory.mktemp("serial")
    options = ["--images", "512", "--epochs", "2", "--accumulate", "2", "--workers-like", "2"]
    subprocess.run([sys.executable, EXAMPLE, *options], cwd=folder, check=True, env=environment(), timeout=150)
    return folder / "own_model.safetensors"


def environment() -> dict[str, str]:
    import os

    from allforce.distributed.launch import scrubbed

    return scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}


@pytest.mark.parametrize("launcher", ["torchrun", "hydra"])
def test_example_equals_serial(launch, serial_example, tmp_path, monkeypatch, launcher):
    """Two workers write the checkpoint of one worker that accumulates two batches, to the bit."""
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    result = launch(launcher, 2, sys.executable, EXAMPLE, "--images", "512", "--epochs", "2")
    assert result.returncode == 0 and "epoch 2: loss" in result.stdout, result.stdout
    one, two = load_file(serial_example), load_file(tmp_path / "own_model.safetensors")
    assert one.keys() == two.keys() and len(one) > 20  # weights and both moments of Adam
    assert all(one[name].equal(two[name]) for name in one)


def test_example_goes_on_from_its_checkpoint(launch, tmp_path, monkeypatch):
    """Three epochs in one go, or two and one more by other launchers: the same."""
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    options = ["--images", "512", "--epochs", "3", "--checkpoint"]
    assert launch("torchrun", 2, sys.executable, EXAMPLE, *options, "whole").returncode == 0
    code = EXAMPLE.read_text().replace("range(done, args.epochs)", "range(done, min(done + 2, args.epochs))")
    (tmp_path / "part.py").write_text(code)
    assert launch("hydra", 2, sys.executable, "part.py", *options, "parts").returncode == 0
    result = launch("torchrun", 2, sys.executable, "part.py", *options, "parts", "--restart")
    assert result.returncode == 0 and "epoch 3" in result.stdout and "epoch 2" not in result.stdout
    one, two = load_file(tmp_path / "whole"), load_file(tmp_path / "parts")
    assert all(one[name].equal(two[name]) for name in one)
