"""A curve on a table: B-splines of degree 5 on a uniform grid, linear in the node values.

f(x) ≈ Σ_k B_k(x) C_k ,   C = M⁻¹ f(nodes),   M the fixed collocation matrix
on interval b only B_b … B_{b+5} are non-zero, each a polynomial of u = (x − lo)/h − b
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

DEGREE = 5
WIDTH = DEGREE + 1  # splines that overlap one interval


@cache
def polynomials() -> np.ndarray:
    """(WIDTH, WIDTH) coefficients, ascending powers of u, of the splines on an interval: Cox–de Boor recursion."""
    w = [np.poly1d([1.0])]
    for p in range(1, DEGREE + 1):
        left = [np.poly1d([1.0, p - m]) * w[m - 1] if m > 0 else np.poly1d([0.0]) for m in range(p + 1)]
        right = [np.poly1d([-1.0, m + 1]) * w[m] if m < p else np.poly1d([0.0]) for m in range(p + 1)]
        w = [(a + b) / p for a, b in zip(left, right, strict=True)]
    return np.array([np.pad(q.coeffs[::-1], (0, WIDTH - len(q.coeffs))) for q in w])


@lru_cache(maxsize=64)
def on_device(dtype: torch.dtype, device: torch.device, h: float) -> tuple[Tensor, Tensor]:
    """The polynomials of values and of slopes, kept where they are used: a step copies nothing to a device."""
    value = torch.as_tensor(polynomials(), dtype=dtype, device=device)
    slope = torch.zeros_like(value)
    slope[:, :-1] = value[:, 1:] * torch.arange(1.0, WIDTH, dtype=dtype, device=device) / h
    return value, slope


@dataclass(frozen=True)
class Grid:
    """K splines over [lo, hi]; the same grid serves every net of a model."""

    lo: float
    hi: float
    K: int

    @property
    def h(self) -> float:
        return (self.hi - self.lo) / (self.K - DEGREE)

    def nodes(self) -> np.ndarray:
        """(K,) break points, and the mid-points of the two outer intervals at both ends."""
        n = self.K - DEGREE
        return self.lo + self.h * np.sort(np.r_[np.arange(n + 1.0), 0.5, 1.5, n - 1.5, n - 0.5])

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Interval (E,), values and slopes (E, WIDTH) of the splines that are not zero at x (E,)."""
        z = (x - self.lo) / self.h
        b = z.floor().clamp(0, self.K - DEGREE - 1)
        u = z - b
        powers = [torch.ones_like(u), u]  # by products: u ** k has no second derivative at u = 0
        while len(powers) < WIDTH:
            powers.append(powers[-1] * u)
        columns = torch.stack(powers, 1)  # (E, WIDTH)
        value, slope = on_device(x.dtype, x.device, self.h)
        return b.long(), columns @ value.T, columns @ slope.T

    def collocation(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """M_nk = B_k(node n): rows (K, 1), columns and values (K, WIDTH) of what is not zero; |n - k| < WIDTH."""
        first, splines, _ = self.weights(torch.from_numpy(self.nodes()))
        return np.arange(self.K)[:, None], first.numpy()[:, None] + np.arange(WIDTH), splines.numpy()

    def solve(self, values: np.ndarray) -> np.ndarray:
        """C (K, n) of the curves with these values (K, n) at the nodes: M C = values."""
        # scipy.linalg.lapack.dgbsv where it lives: the rest of scipy.linalg takes a tenth of a second to be imported
        dgbsv = import_module("scipy.linalg._flapack").dgbsv

        node, spline, splines = self.collocation()
        side = WIDTH - 1  # diagonals on each side of the main one, and as many rows above them for LAPACK's own use
        band = np.zeros((3 * side + 1, self.K))
        band[2 * side + node - spline, spline] = splines
        *_, C, failed = dgbsv(side, side, band, np.asarray_chkfinite(values), overwrite_ab=True)
        assert failed == 0
        return C

    def collocation_inverse(self) -> np.ndarray:
        """(K, K) M⁻¹ with M_nk = B_k(node n)."""
        return self.solve(np.eye(self.K))

    @lru_cache(maxsize=4)  # noqa: B019
    def factors(self, dtype: np.dtype, transposed: bool = False) -> np.ndarray:
        """(K, 2 WIDTH - 1) of M = L D U, or of Mᵀ: entries of L before, 1/D, and entries of U behind the diagonal.

        Without a search for pivots: M is totally positive, so that elimination in its order is as exact as any.
        """
        node, spline, splines = self.collocation()
        node, spline = (spline, node) if transposed else (node, spline)
        rows, side = np.zeros((self.K, 2 * WIDTH - 1)), WIDTH - 1
        rows[node, side + spline - node] = splines
        for n in range(self.K):
            for k in range(max(0, n - side), n):
                factor = rows[n, side + k - n]  # L_nk D_k
                rows[n, side + k - n + 1 : 2 * side + k - n + 1] -= factor * rows[k, side + 1 :]
                rows[n, side + k - n] = factor * rows[k, side]
            rows[n, side] = 1.0 / rows[n, side]
            rows[n, side + 1 :] *= rows[n, side]
        return rows.astype(dtype)

    def interpolate(self, coefficients: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Value and slope (E, M) at x (E,) from C (K, M)."""
        b, value, slope = self.weights(x)
        rows = coefficients[b[:, None] + torch.arange(WIDTH, device=x.device)]  # (E, WIDTH, M)
        return (value[:, :, None] * rows).sum(1), (slope[:, :, None] * rows).sum(1)
