"""A data set: systems, how many frames of each make a batch, and how often each is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from allforce.config.drawing import auto_prob_blocks, batch_form, check_sys_probs
from allforce.data.system import System
from allforce.errors import UserError

Given = TypeVar("Given")
Meant = TypeVar("Meant")


class DataSet:
    """Systems with batch sizes and probabilities. `name` ("training", "validation") is used in messages and the table.

    batch_size   3 | [3, 1, …] one per system | "auto" | "auto:N" | "max:N" | "filter:N" | "mixed:N"
    auto_prob    "prob_uniform" | "prob_sys_size" | "prob_sys_size;0:2:0.3;2:5:0.7"
    sys_probs    one per system, overrides auto_prob; negative entries share what is left
    """

    def __init__(
        self,
        systems: list[System],
        batch_size: int | list[int] | str = "auto",
        auto_prob: str = "prob_sys_size",
        sys_probs: list[float] | None = None,
        name: str = "training",
    ):
        self.name = name
        self.systems, self.batch_sizes, self.mixed_batch = _batch_sizes(systems, batch_size, name)
        frames = np.array([s.nframes for s in self.systems])
        self.n_batches = -(-frames // np.array(self.batch_sizes))  # (systems,) a shorter last batch is used too
        self.probabilities = _probabilities(self.n_batches, auto_prob, sys_probs, name)
        if self.mixed_batch > 1:
            _same_labels(self.systems, batch_size)

    @property
    def type_map(self) -> list[str]:
        return self.systems[0].type_map

    @property
    def entries_per_epoch(self) -> int:
        """L = ceil(max n_batch_i / p_i): long enough for every system that is drawn to be seen whole."""
        drawn = self.probabilities > 0
        longest = float((self.n_batches[drawn] / self.probabilities[drawn]).max())
        return math.ceil(longest * (1 - 1e-12))  # rounding must not add a batch: n / (n / N) is N

    def total_batches(self) -> int:
        """Micro-batches of an epoch."""
        return -(-self.entries_per_epoch // max(self.mixed_batch, 1))

    def summary(self) -> list[str]:
        """The table of the log: one line per system."""
        sizes = [self.mixed_batch or b for b in self.batch_sizes]
        rows = zip(self.systems, sizes, self.n_batches, self.probabilities, strict=True)
        title = f"---Summary of DataSystem: {self.name.capitalize():13s}" + "-" * 47
        head = f"{'system':>42}  {'natoms':>6}  {'bch_sz':>6}  {'n_bch':>6}  {'prob':>9}  {'pbc':>3}"
        return [
            title,
            f"Found {len(self.systems)} System(s):",
            head,
            *(
                f"{_short(s.name):>42}  {s.natoms:6d}  {b:6d}  {n:6d}  {p:9.3e}  {'FT'[s.periodic]:>3}"
                for s, b, n, p in rows
            ),
            "-" * 86,
        ]


def _short(name: str, width: int = 42) -> str:
    return name if len(name) <= width else "-- " + name[-(width - 3) :]


def _batch_sizes(
    systems: list[System], batch_size: int | list[int] | str, name: str
) -> tuple[list[System], list[int], int]:
    """(systems kept, frames of a batch of each, N of "mixed:N" or 0)"""
    key = f"training/{name}_data/batch_size"
    if isinstance(batch_size, list):
        if len(batch_size) != len(systems):
            raise UserError(
                f"{key}: has {len(batch_size)} entries for {len(systems)} systems. Give one number per system"
            )
        sizes, mixed = batch_size, 0
    elif isinstance(batch_size, int):
        sizes, mixed = [batch_size] * len(systems), 0
    else:
        form, n = _understood(batch_form, batch_size, key)
        if form == "filter":
            small = [s for s in systems if s.natoms <= n]
            if not small:
                raise UserError(
                    f"{key}: {batch_size!r} leaves no system: the smallest has {min(s.natoms for s in systems)} atoms"
                )
            systems = small
        mixed = n if form == "mixed" else 0
        sizes = [{"auto": -(-n // s.natoms), "mixed": 1}.get(form, max(1, n // s.natoms)) for s in systems]
    if any(b < 1 for b in sizes):
        raise UserError(f"{key}: {batch_size!r} asks for a batch of less than 1 frame")
    return systems, sizes, mixed


def _probabilities(n_batches: np.ndarray, auto_prob: str, sys_probs: list[float] | None, name: str) -> np.ndarray:
    key = f"training/{name}_data/"
    if sys_probs is not None:
        return _given(n_batches, sys_probs, key + "sys_probs")
    blocks = _understood(auto_prob_blocks, auto_prob, key + "auto_prob")
    if blocks is None:
        return np.full(len(n_batches), 1 / len(n_batches))
    return _of_blocks(n_batches, blocks or [(0, len(n_batches), 1.0)], key + "auto_prob")


def _understood(parse: Callable[[Given], Meant], value: Given, key: str) -> Meant:
    try:
        return parse(value)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None


def _given(n_batches: np.ndarray, sys_probs: list[float], key: str) -> np.ndarray:
    if len(sys_probs) != len(n_batches):
        raise UserError(f"{key}: has {len(sys_probs)} entries for {len(n_batches)} systems. Give one number per system")
    _understood(check_sys_probs, sys_probs, key)
    p = np.array(sys_probs, dtype=np.float64)
    rest = p < 0
    p[rest] = max(1 - p[~rest].sum(), 0.0) * n_batches[rest] / max(n_batches[rest].sum(), 1)
    return p / p.sum()


def _of_blocks(n_batches: np.ndarray, blocks: list[tuple[int, int, float]], key: str) -> np.ndarray:
    """start:end:weight → weight is shared by the systems of the block in proportion to their batches."""
    p = np.zeros(len(n_batches))
    for start, end, weight in blocks:
        if end > len(n_batches):
            raise UserError(f"{key}: block {start}:{end}:{weight:g} does not fit {len(n_batches)} systems")
        p[start:end] += weight * n_batches[start:end] / n_batches[start:end].sum()
    return p / p.sum()


def _same_labels(systems: list[System], batch_size: object) -> None:
    first = systems[0]
    for s in systems:
        if s.label_names != first.label_names:
            raise UserError(
                f"batch_size {batch_size!r} puts frames of all systems into one batch: they must have the same labels, "
                f"but {first.name} has {sorted(first.label_names)} and {s.name} has {sorted(s.label_names)}"
            )
