"""tanh in vector instructions, for compiled loops (numba) on CPUs.

    tanh z = (e²ᶻ − 1)/(e²ᶻ + 1),   e²ᶻ = 2ᵏ eʳ,   |r| ≤ ½ ln 2,   eʳ − 1 = r + r² Σ_n rⁿ/(n + 2)!

with a relative error below 2 ε, in the arithmetic of z: float32 has ε = 1.2e-7, half the terms, and twice the
numbers in a register. Files with loops that call it hold the digest of this one, see tests/unit/test_kernels.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from allforce.loops import njit
from allforce.models.kernels import options
from allforce.models.pool import spread

KERNELS = "2726311b"  # numba takes a loop from its cache while its own file is the same: see POOL in kernels.py

# Not all of fastmath: what is subtracted below must not be put together before.
exact: Any = {"fastmath": {"contract"}, "error_model": "numpy"}

LOG2E = 1.0 / math.log(2.0)
LN2, LN2_REST = 0.693147180369123816490, 1.90821492927058770002e-10  # their sum is ln 2; k·LN2 is exact
TERMS = np.array([1.0 / math.factorial(n) for n in range(13, 1, -1)])
ROUND = 1.5 * 2.0**52  # a number plus this is a whole one, which the last bits hold

LOG2E_32 = np.float32(LOG2E)
LN2_32, LN2_REST_32 = np.float32(0.693359375), np.float32(-2.12194440054690583e-4)
TERMS_32 = TERMS[6:].astype(np.float32)
ROUND_32 = np.float32(1.5 * 2.0**23)
ONE_32, TWO_32, MOST_32 = np.float32(1.0), np.float32(2.0), np.float32(20.0)


def tanh(z: float) -> float:
    """Of one number; in a compiled loop it is one of the two below."""
    return math.tanh(z)


@overload(tanh, jit_options=exact)
def _compiled(z):
    return single if z == types.float32 else double


def double(z):
    v = min(max(2.0 * z, -40.0), 40.0)  # tanh is ±1 beyond; what is not a number stays so
    rounded = np.float64(v * LOG2E + ROUND)
    k = rounded - ROUND
    r = (v - k * LN2) - k * LN2_REST
    p = TERMS[0]
    for n in range(1, len(TERMS)):
        p = p * r + TERMS[n]
    power = np.int64((rounded.view(np.int64) + 1023) << 52).view(np.float64)
    above = power * (r + r * r * p) + (power - 1.0)  # e²ᶻ − 1
    return above / (above + 2.0)


def single(z):
    v = min(max(TWO_32 * z, -MOST_32), MOST_32)
    rounded = np.float32(v * LOG2E_32 + ROUND_32)
    k = rounded - ROUND_32
    r = (v - k * LN2_32) - k * LN2_REST_32
    p = TERMS_32[0]
    for n in range(1, len(TERMS_32)):
        p = p * r + TERMS_32[n]
    power = np.int32((rounded.view(np.int32) + 127) << 23).view(np.float32)
    above = power * (r + r * r * p) + (power - ONE_32)
    return above / (above + TWO_32)


@njit(**options)
def _tanh_of_all(begin, end, z):
    part = z[begin:end]
    for n in range(len(part)):
        part[n] = tanh(part[n])


@njit(**options)
def tanh_of_all(z, pool):
    """z = tanh(z) of numbers in one row."""
    spread(_tanh_of_all, z.shape[0], (z,), pool)
