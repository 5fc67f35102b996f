"""Compiled loops and numba's cache, which knows the file of a loop and not the files its constants come from."""

import subprocess
import sys


def test_a_change_of_the_splines_cannot_meet_old_loops():
    """With other polynomials kernels.py refuses to be imported, until it is changed itself and so compiled anew."""
    code = """
import importlib
from allforce.models import kernels, spline
right = spline.polynomials()
spline.polynomials = lambda: right * 2
try:
    importlib.reload(kernels)
except AssertionError as error:
    assert "spline.py has changed" in str(error)
else:
    raise SystemExit("imported")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
