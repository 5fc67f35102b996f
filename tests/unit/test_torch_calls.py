"""torch's private calls: tested at the start, all of them, and bounded in pyproject.toml."""

import re
from pathlib import Path

import pytest
import torch

from allforce.cli import main
from allforce.later import UNUSED
from allforce.train.torch_calls import NAMES, VERSIONS, check_torch

ROOT = Path(__file__).resolve().parents[2]


def test_this_torch_has_them():
    check_torch()


def test_all_that_are_used_are_tested():
    source = "".join(path.read_text() for path in (ROOT / "allforce").rglob("*.py") if path.name != "torch_calls.py")
    named = {name for module, needed in UNUSED.items() for name in (module, *needed)}  # no calls: see test_starting.py
    used = set(re.findall(r"\btorch\.(_[a-z]\w+)", source)) - {name.removeprefix("torch.") for name in named}
    assert used <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["gone", "other arguments", "other result"])
def test_another_torch_is_told(name, change, monkeypatch, tmp_path, capsys):
    if change == "gone":
        monkeypatch.delattr(torch, name)
    else:
        other = (lambda *_, **__: None) if change == "other result" else (lambda: None)
        monkeypatch.setattr(torch, name, other)
    assert main(["train", str(tmp_path / "input.json")]) == 2
    error = capsys.readouterr().err
    assert f"Install torch {VERSIONS}." in error and "Traceback" not in error


def test_bounds_are_those_of_the_package():
    (bound,) = re.findall(r'"(torch>=[^"]*)"', (ROOT / "pyproject.toml").read_text())
    first, last = VERSIONS.split(" to ")
    assert bound == f"torch>={first},<2.{int(last.split('.')[1]) + 1}"
