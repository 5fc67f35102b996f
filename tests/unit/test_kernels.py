"""Compiled loops: torch's threads, and numba's cache, which knows the file of a loop and not those of its constants."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from allforce.models import (
    atom_kernels,
    attention_kernels,
    curve_kernels,
    dense_kernels,
    frozen_nets,
    fused_kernels,
    kernels,
    pinet2_kernels,
    pinet_kernels,
    scalar_kernels,
    table_kernels,
    tanh,
    triple_kernels,
)
from allforce.models.pool import gomp_parallel, spread
from allforce.models.tanh import tanh_of_all
from allforce.optim import muon_kernels


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


def digest(name: str) -> str:
    """Of a file of models."""
    return hashlib.sha256((Path(kernels.__file__).parent / f"{name}.py").read_bytes()).hexdigest()[:8]


def test_loops_are_compiled_anew_with_the_code_that_they_include():
    """When this fails, write the digest that it shows: the file with the loops is then another one for numba."""
    assert digest("pool") == kernels.POOL
    multiplying = curve_kernels, dense_kernels, frozen_nets, muon_kernels, scalar_kernels, table_kernels
    including = (
        atom_kernels,
        attention_kernels,
        fused_kernels,
        pinet_kernels,
        pinet2_kernels,
        tanh,
        triple_kernels,
        *multiplying,
    )
    assert {module.KERNELS for module in including} == {digest("kernels")}
    assert {module.PRODUCTS for module in multiplying} == {digest("products")}
    assert {module.TANH for module in (dense_kernels, frozen_nets, scalar_kernels)} == {digest("tanh")}
    assert pinet_kernels.DENSE == digest("dense_kernels")
    assert {module.PLAIN for module in (curve_kernels, muon_kernels, scalar_kernels)} == {digest("plain_products")}
    assert curve_kernels.SCALAR == fused_kernels.SCALAR == digest("scalar_kernels")
    for name in ("atom", "curve", "table"):
        assert getattr(fused_kernels, name.upper()) == digest(f"{name}_kernels")


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_tanh_is_that_of_the_library(dtype):
    eps = np.finfo(dtype).eps
    x = np.concatenate([np.linspace(-25, 25, 100001), np.logspace(-30, 0, 1001), [0.0, 1e38, -1e38, np.inf, -np.inf]])
    x = x.astype(dtype)
    z = x.copy()
    tanh_of_all(z, (gomp_parallel(), 2))
    np.testing.assert_allclose(z, np.tanh(x.astype(np.longdouble)), rtol=2 * eps, atol=0)
    for n in range(1, 70):  # the last numbers do not fill a register: not another tanh for them
        rest = x[50123 : 50123 + n].copy()
        tanh_of_all(rest, (0, 1))
        np.testing.assert_array_equal(rest, z[50123 : 50123 + n])
    z = np.array([np.nan, 1.0, np.nan], dtype)
    tanh_of_all(z, (0, 1))
    assert np.isnan(z[[0, 2]]).all() and abs(z[1] - np.tanh(1.0)) < 2 * eps


PUSH = """
import sys
import numpy as np
from allforce.models.attention_kernels import norm_push
from allforce.models.dense_kernels import dense_adjoint
rng = np.random.default_rng(1)
given, results = [rng.normal(size=(40, 12)) for _ in range(3)], [np.empty((40, 12)), np.empty((40, 12)), np.empty(40)]
norm_push(given[0], rng.random(40), *given[1:], *results, (0, 1))
x, x_dot, y, y_hat, y_dot, y_bar, x_bar = rng.normal(size=(7, 40, 12))
w, w_bar, b_bar = rng.normal(size=(12, 12)), np.empty((12, 12)), np.empty((1, 12))
dense_adjoint(x, x_dot, w, y, y_hat, y_dot, y_bar, True, False, x_bar, w_bar, b_bar, (0, 1))
results += [x_bar, w_bar, b_bar]
sys.stdout.write(b"".join(x.tobytes() for x in results).hex())
"""


def test_a_loop_from_the_cache_gives_the_same_bits_as_one_just_compiled(tmp_path):
    """Else the first run on a machine would differ from all later ones, and workers from each other."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PUSH]
    compiled, cached = (
        subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout for _ in range(2)
    )
    assert list(tmp_path.rglob("*.nbc")) and compiled == cached and len(cached) == 2 * 8 * (40 * 25 + 12 * 53)


@njit
def _count(begin, end, scale, seen, who):
    for n in range(begin, end):
        seen[n] += scale
        for _ in range(100):
            who[n] = np.sin(who[n] + n)


@njit
def count(scale, seen, who, pool):
    return spread(_count, len(seen), (scale, seen, who), pool)


@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_atom_once_on_any_number_of_threads(size, n):
    alone, seen = np.zeros(n), np.zeros(n)
    count(2.0, np.zeros(n), alone, (0, 1))
    who = np.zeros(n)
    assert count(2.0, seen, who, (gomp_parallel(), size)) == 0
    np.testing.assert_array_equal(seen, 2.0)
    np.testing.assert_array_equal(who, alone)


def test_loops_have_no_threads_of_their_own():
    """They run on those that torch's operations have started."""
    assert gomp_parallel()
    code = f"""
import os, sys
import numpy as np, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_kernels import count
from allforce.models import pool
torch.set_num_threads(3)
count(2.0, np.zeros(9), np.zeros(9), (0, 1))
torch.rand(1000, 1000) @ torch.rand(1000, 1000)
torch.rand(1000, 1000).exp()
before = len(os.listdir("/proc/self/task"))
assert pool.threads(10**6)[1] == 3 and pool.threads(10)[1] == 1
count(2.0, np.zeros(9), np.zeros(9), pool.threads(10**6))
print(before, len(os.listdir("/proc/self/task")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    before, after = done.stdout.split()
    assert before == after and int(before) >= 3, done.stderr
