"""A script of PiNN with its two changed lines, on two workers of real launchers."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from conftest import ROOT

from allforce.files import checkpoint

SCRIPT = ROOT / "examples/mimic/train_pinet.py"


@pytest.mark.parametrize("launcher", ["hydra", "torchrun"])
def test_two_workers(launch, tmp_path, monkeypatch, launcher):
    monkeypatch.chdir(tmp_path)
    result = launch(launcher, 2, sys.executable, SCRIPT, 10)
    assert result.returncode == 0, result.stdout
    told = re.findall(r"INFO    parallel: (\w+)", result.stdout)
    assert told == ["only", "learning", "initial", "gradients", "one"]
    assert "sharding:             partition" in result.stdout
    loss = float(re.search(r"evaluation: .*\bloss = (\S+),", result.stdout)[1])
    first = checkpoint.read(tmp_path / "pinet_run/model.ckpt-10.safetensors")
    assert first.meta["step"] == 10 and loss < 100
    result = launch(launcher, 2, sys.executable, SCRIPT, 12)  # goes on from its folder
    assert result.returncode == 0, result.stdout
    assert "broadcast from rank 0 (restored from pinet_run/model.ckpt-10" in result.stdout
    after = checkpoint.read(tmp_path / "pinet_run/model.ckpt-12.safetensors")
    assert not any(torch.equal(after.tensors[k], v) for k, v in first.tensors.items() if k.endswith("kernel"))


WAYS = {  # how rank 1 fails -> (lines of its script, steps, what is said)
    "killed": (
        "threading.Thread(target=kill_soon, daemon=True).start()",
        10**7,
        r"rank 1 \(process .* it was in step \d",
    ),
    "wrong": ("after = lambda: 1 / 0", 10, "rank 1 on .*\n.*ZeroDivisionError"),
}
SCRIPT_OF_RANK_1 = """
import os, runpy, signal, sys, threading, time
from pathlib import Path

from allforce.distributed.watch import INTERVAL

def kill_soon():
    curve = Path("pinet_run/lcurve.out")
    while not curve.exists() or curve.read_text().count("\\n") < 4:
        time.sleep(0.05)
    time.sleep(5 * INTERVAL)  # these steps are done within a sign of life: let the other hear of them
    os.kill(os.getpid(), signal.SIGKILL)

after = lambda: None
if os.environ["ALLFORCE_RANK"] == "1":
    {}
sys.argv = [{!r}, "{}"]
runpy.run_path(sys.argv[0], run_name="__main__")
after()
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_fails_ends_all(launch, tmp_path, monkeypatch, way):
    monkeypatch.chdir(tmp_path)
    line, steps, words = WAYS[way]
    (tmp_path / "script.py").write_text(SCRIPT_OF_RANK_1.format(line, str(SCRIPT), steps))
    result = launch("workers", 2, sys.executable, "script.py", timeout=100)
    assert result.returncode != 0 and re.search(words, result.stdout, re.DOTALL), result.stdout
