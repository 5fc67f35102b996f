"""allforce.distributed under real launchers (api_suite.py), and what happens when one worker fails."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

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
