"""A stale rank in a shell, told from hand-made workers: lines typed into a real bash on a real terminal."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allforce.distributed.launch import scrubbed

ROOT = Path(__file__).resolve().parents[2]
TERMINAL = "import pty, sys; pty.spawn(sys.argv[1:])"
PROGRAM = """\
import os
from allforce.distributed.launch import detect
from allforce.errors import UserError
try:
    found = detect().size
except UserError:
    found = "error"
os.write(1, f"found: {found} ".encode())  # in one piece: several may write at once
"""

# what is typed, what the program finds each time
CASES = {
    "exported": ("export RANK=1 WORLD_SIZE=4\n{run}\n", ["1"]),
    "of this command alone": ("RANK=1 WORLD_SIZE=4 {run}\n", ["1"]),
    "output into a pipe": ("export RANK=3 WORLD_SIZE=4\n{run} 2>&1 | cat\n", ["1"]),
    "a launcher's job beside it": ("export RANK=1 WORLD_SIZE=4\n(RANK=0 sleep 100; true) &\n{run}\nkill %1\n", ["1"]),
    "in a script": ("export RANK=1 WORLD_SIZE=4\nsh -c '{run}; true'\n", ["error"]),
    "in the background": ("RANK=1 WORLD_SIZE=4 {run} &\nwait\n", ["error"]),
    "the last of several": ("RANK=0 WORLD_SIZE=2 sleep 100 &\nRANK=1 WORLD_SIZE=2 {run}\nkill %1\n", ["error"]),
    "a loop": ("for r in 1 2 3; do RANK=$r WORLD_SIZE=4 {run} & done; wait\n", ["error"] * 3),
    "a loop in a script": ("sh -c 'for r in 1 2; do RANK=$r WORLD_SIZE=4 {run} & done; wait'\n", ["error"] * 2),
    "on several hosts": ("export RANK=1 WORLD_SIZE=2 MASTER_ADDR=node07\n{run}\n", ["error"]),
}


@pytest.mark.parametrize("name", CASES)
def test_typed(tmp_path, name):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    lines, expected = CASES[name]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    typed = lines.format(run=f"{sys.executable} {program}") + "exit\n"
    environment = scrubbed(os.environ) | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
    terminal = [sys.executable, "-c", TERMINAL, "bash", "--noprofile", "--norc", "-i"]
    result = subprocess.run(terminal, input=typed, env=environment, capture_output=True, text=True, timeout=60)
    assert re.findall(r"found: (\w+)", result.stdout) == expected, result.stdout
