"""Sums of errors, from which MAE and RMSE of any number of systems follow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Errors:
    """Σ w|d|, Σ w d² and Σ w of one quantity."""

    absolute: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def add(self, difference: np.ndarray, weight: np.ndarray | None = None) -> None:
        w = np.ones_like(difference) if weight is None else weight
        self.absolute += float(np.sum(w * np.abs(difference)))
        self.square += float(np.sum(w * difference**2))
        self.weight += float(np.sum(w))

    def __add__(self, other: Errors) -> Errors:
        return Errors(self.absolute + other.absolute, self.square + other.square, self.weight + other.weight)

    @property
    def mae(self) -> float:
        return self.absolute / self.weight

    @property
    def rmse(self) -> float:
        return float(np.sqrt(self.square / self.weight))
