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
