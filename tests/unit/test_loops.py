"""Loops that come from numba's cache, in processes that did not compile them."""

import subprocess
import sys

import numpy as np
import pytest
from numba.core.caching import FunctionCache

from allforce import loops

MODULE = """
import numpy as np
from allforce.loops import njit

@njit(cache=True, nogil=True)
def squares(x):
    if len(x) == 0:
        raise ValueError("nothing", 2)
    y = np.empty_like(x)
    for i in range(len(x)):
        y[i] = x[i] ** 2
    return y

@njit(cache=True)
def told(x):
    print("the first is", x[0])

@njit(cache=True)
def sum_of_squares(x):
    return squares(x).sum()
"""
USE = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from cached import squares, sum_of_squares, told
"""


@pytest.fixture
def use(tmp_path):
    """Runs lines in a new process; what it prints, in words."""
    (tmp_path / "cached.py").write_text(MODULE)

    def run(code: str) -> list[str]:
        command = [sys.executable, "-W", "error", "-c", USE + code, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


def test_loop_comes_from_the_cache_without_what_compiling_needs(use):
    code = (
        "print(*squares(np.arange(1.0, 4.0)), sum(squares.stats.cache_hits.values()))\n"
        "print('numba.np.arrayobj' in sys.modules, 'numba.typed.dictimpl' in sys.modules)"
    )
    assert use(code) == ["1.0", "4.0", "9.0", "0", "True", "True"]
    assert use(code) == ["1.0", "4.0", "9.0", "1", "False", "False"]


def test_loop_of_the_cache_raises_and_prints_as_before(use):
    code = (
        "told(np.ones(1))\n"
        "try: squares(np.ones(0))\n"
        "except ValueError as error: print(*error.args, sum(squares.stats.cache_hits.values()))"
    )
    assert use(code) == ["the", "first", "is", "1.0", "nothing", "2", "0"]
    assert use(code) == ["the", "first", "is", "1.0", "nothing", "2", "1"]


def test_new_loop_is_compiled_from_one_of_the_cache(use):
    assert use("squares(np.ones(3))") == []
    code = "print({}, *(sum(f.stats.cache_hits.values()) for f in (squares, sum_of_squares)))"
    code = "squares(np.ones(3))\n" + code.format("sum_of_squares(np.arange(4.0))")
    assert use(code) == ["14.0", "1", "0"]
    assert use(code) == ["14.0", "1", "1"]


def test_other_numba_has_its_own_cache(monkeypatch):
    def loop(x):
        return x

    assert type(loops.njit(cache=True)(loop)._cache) is loops.Cache
    monkeypatch.setattr(loops, "TRIED", "0.1.")
    assert type(loops.njit(cache=True)(loop)._cache) is FunctionCache
    assert loops.njit()(loop)(np.float64(2.0)) == 2.0
