"""`dp doctor` under launchers: it looks at all of them, and says what is to be mended once."""

import re
import sys

import pytest


@pytest.mark.parametrize("launcher, name", [("torchrun", "torchrun"), ("slurm", "srun")])
def test_doctor(launch, launcher, name):
    done = launch(launcher, 2, sys.executable, "-m", "allforce", "doctor")
    points = dict(re.findall(r"(?:ok|--|!!)  (\S+) +(\S.*)", done.stdout))
    assert points["launcher"].startswith(f"{name}, 2 worker(s)"), done.stdout
    assert points["engine"].startswith("torch") and "MB/s" in points["all-reduce"], done.stdout
    for what in ("versions", "devices", "memory", "threads", "clocks", "listeners", "secret", "disk", "/dev/shm"):
        assert what in points, (what, done.stdout)
    assert done.stdout.count("  versions") == 1, done.stdout
    mended = re.search(r"dp doctor: (\d+) of \d+ points are to be mended", done.stdout)
    assert (done.returncode != 0) == bool(mended), done.stdout
    bad = re.findall(r"^(?:\d+: )?!!", done.stdout, re.MULTILINE)
    assert len(bad) == (int(mended[1]) if mended else 0), done.stdout
    if launcher == "torchrun":  # whose own store others reach
        assert "reached from outside: launcher" in done.stdout and mended, done.stdout
        assert "torchrun's store, which has no password" in points["secret"], done.stdout
        assert "ALLFORCE_SECRET" in done.stdout
