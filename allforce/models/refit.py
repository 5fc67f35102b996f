"""The last layer of energy fitting nets by linear least squares, when the layers before it have been trained.

    E = Σ_τ w_τ · x_τ + …,   x_τ = Σ_{i of type τ} a_i       a_i (H,): what the last layer is given for atom i

Energies are linear in w, and so are their derivatives along displacements v of all atoms. What the model misses, ΔE of
a frame and v · ΔF for some random v of signs, gives equations for a change δ of w; biases β are unknown as well:

    x · δ + n · β = ΔE        ẋ · δ = −v · ΔF        ẋ = ∂x/∂v, one tangent sweep for each v

A gradient step sees one number for the energy of a frame, here each frame gives a whole equation, at the cost of
evaluating it. Equations of a kind count by the inverse of their mean square (those of energies ENERGIES times), and
|δ|² is held small by as much as the evidence says (D. J. C. MacKay, Neural Computation 4, 415 (1992)):

    δ = argmin η |M δ − t|² + α |δ|²      γ = Σ η s²/(η s² + α)      α = γ/|δ|²      η = (n − γ)/|M δ − t|²

but at least so much that the change is expected to be smaller than w itself, α ≥ TIGHT/<w²>. The data alone would often
like weights a hundred times as large, which cancel each other: errors on other frames of the same kind are then smaller
still, but molecular dynamics leaves the places where they cancel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

PROBES = 2  # displacements v of a frame
ENERGIES = 3.0
TIGHT = 3.0
ROUNDS, SETTLED = 1000, 1e-4  # of the iteration for α and η, at most, and the change of their ratio that ends it
SMALLEST = 1e-12  # of the largest eigenvalue: less is rounding


@dataclass
class Equations:
    """Rows of all frames: energies and derivatives along displacements."""

    counts: np.ndarray  # (F, nt) atoms of each type
    x: np.ndarray  # (F, unknowns)
    missing: np.ndarray  # (F,) ΔE
    x_dot: np.ndarray  # (F·PROBES, unknowns)
    missing_dot: np.ndarray  # (F·PROBES,) −v·ΔF

    @staticmethod
    def width(ntypes: int, unknowns: int) -> int:
        """Numbers of a row of the table that workers exchange."""
        return 1 + ntypes + unknowns + 1

    @staticmethod
    def rows(counts: np.ndarray, x: np.ndarray, missing: np.ndarray) -> Iterator[np.ndarray]:
        """Rows of that table: counts (·, nt) is zero for derivatives."""
        kind = counts.any(axis=1)
        yield from np.column_stack([kind, counts, x, missing])

    @classmethod
    def of_table(cls, table: np.ndarray, ntypes: int) -> Equations:
        energies = table[:, 0] > 0
        counts, x, missing = table[:, 1 : 1 + ntypes], table[:, 1 + ntypes : -1], table[:, -1]
        return cls(counts[energies], x[energies], missing[energies], x[~energies], missing[~energies])

    def solve(self, w: np.ndarray) -> np.ndarray:
        """δ (unknowns,) of w."""
        x, missing = without_bias(self.counts, self.x), without_bias(self.counts, self.missing)
        parts = [weighted(x, missing, ENERGIES), weighted(self.x_dot, self.missing_dot, 1.0)]
        M, t = (np.concatenate(part) for part in zip(*parts, strict=True))
        return by_evidence(M, t, TIGHT / max(float(np.mean(w**2)), SMALLEST))


def without_bias(counts: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What is left of y (F, ·) when the best constants for each type are taken away: then these are no unknowns."""
    return y - counts @ np.linalg.lstsq(counts, y, rcond=None)[0] if len(y) else y


def weighted(x: np.ndarray, y: np.ndarray, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Equations of one kind, such that the mean square of what is missing is `weight`."""
    size = float(np.sqrt(np.mean(y**2))) if len(y) else 0.0
    factor = np.sqrt(weight) / size if size > 0 else 0.0
    return factor * x, factor * y


def by_evidence(M: np.ndarray, t: np.ndarray, least: float) -> np.ndarray:
    """δ of the equations M δ = t with α ≥ least, see the head of this file; zero where nothing speaks for another."""
    n, unknowns = M.shape
    tall = n >= unknowns
    squares, vectors = eigenvectors(M.T if tall else M)  # s²
    kept = squares > SMALLEST * max(squares[-1], 0.0) if n else np.zeros(0, dtype=bool)
    if not kept.any():
        return np.zeros(unknowns)
    squares, vectors = squares[kept], vectors[:, kept]
    basis = vectors if tall else M.T @ vectors / np.sqrt(squares)  # (unknowns, ·), orthonormal columns
    along, alpha, eta = basis.T @ (M.T @ t), max(least, 1e-2 * squares.mean()), 1.0
    for _ in range(ROUNDS):
        delta = eta * along / (eta * squares + alpha)
        gamma = float((eta * squares / (eta * squares + alpha)).sum())
        left = float(t @ t - 2 * delta @ along + squares @ delta**2)
        length = float(delta @ delta)
        if not (left > 0 and length > 0 and gamma < n):
            break
        before, alpha, eta = alpha / eta, max(least, gamma / length), (n - gamma) / left
        if abs(alpha / eta / before - 1) < SETTLED:
            break
    return basis @ delta


def eigenvectors(M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, ascending, and eigenvectors of M Mᵀ, on torch's threads: numpy's own would fight with them for the
    cores, for seconds where others use these too."""
    A = torch.from_numpy(np.ascontiguousarray(M))
    values, vectors = torch.linalg.eigh(A @ A.mT)
    return values.numpy(), vectors.numpy()
