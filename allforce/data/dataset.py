"""A data set: systems, how many frames of each make a batch, and how often each is drawn."""

from __future__ import annotations

import math
import re

import numpy as np

from allforce.data.system import System
from allforce.errors import UserError


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
        match = re.fullmatch(r"(auto)|(auto|max|filter|mixed):(\d+)", batch_size)
        if match is None:
            raise UserError(
                f'{key}: {batch_size!r} is not a number, a list, "auto", "auto:N", "max:N", "filter:N", "mixed:N"'
            )
        form, n = match[1] or match[2], int(match[3] or 32)
        if form == "filter":
            small = [s for s in systems if s.natoms <= n]
            if not small:
                raise UserError(
                    f"{key}: {batch_size!r} leaves no system: the smallest has {min(s.natoms for s in systems)} atoms"
                )
            systems = small
        mixed = n if form == "mixed" else 0
        sizes = [{"auto": -(-n // s.natoms), "mixed": 1}.get(form, max(1, n // s.natoms)) for s in systems]
        if n < 1:
            sizes = [0]
    if any(b < 1 for b in sizes):
        raise UserError(f"{key}: {batch_size!r} asks for a batch of less than 1 frame")
    return systems, sizes, mixed


def _probabilities(n_batches: np.ndarray, auto_prob: str, sys_probs: list[float] | None, name: str) -> np.ndarray:
    count = len(n_batches)
    if sys_probs is not None:
        return _given(n_batches, np.array(sys_probs, dtype=np.float64), f"training/{name}_data/sys_probs")
    form, *blocks = auto_prob.replace(" ", "").split(";")
    if form == "prob_uniform" and not blocks:
        return np.full(count, 1 / count)
    if form == "prob_sys_size":
        return _blocks(n_batches, blocks or [f"0:{count}:1.0"], f"training/{name}_data/auto_prob")
    raise UserError(
        f'training/{name}_data/auto_prob: {auto_prob!r} is none of "prob_uniform", "prob_sys_size", '
        '"prob_sys_size;start:end:weight;…"'
    )


def _given(n_batches: np.ndarray, p: np.ndarray, key: str) -> np.ndarray:
    if len(p) != len(n_batches):
        raise UserError(f"{key}: has {len(p)} entries for {len(n_batches)} systems. Give one number per system")
    rest = p < 0
    left = 1 - p[~rest].sum()
    if left < -1e-8 or (not rest.any() and abs(left) > 1e-8):
        raise UserError(
            f"{key}: the probabilities sum to {1 - left:g}, expected 1. Mend them; negative ones share the rest"
        )
    p[rest] = max(left, 0.0) * n_batches[rest] / max(n_batches[rest].sum(), 1)
    return p / p.sum()


def _blocks(n_batches: np.ndarray, blocks: list[str], key: str) -> np.ndarray:
    """start:end:weight → weight is shared by the systems of the block in proportion to their batches."""
    p = np.zeros(len(n_batches))
    for block in blocks:
        match = re.fullmatch(r"(\d+):(\d+):([^:]+)", block)
        try:
            start, end, weight = int(match[1]), int(match[2]), float(match[3])  # type: ignore[index]
        except (TypeError, ValueError):
            raise UserError(f"{key}: {block!r} is not start:end:weight, as in 0:2:0.3") from None
        if not 0 <= start < end <= len(n_batches) or not weight >= 0:
            raise UserError(
                f"{key}: block {block!r} does not fit {len(n_batches)} systems: 0 <= start < end, weight >= 0"
            )
        p[start:end] += weight * n_batches[start:end] / n_batches[start:end].sum()
    if p.sum() <= 0:
        raise UserError(f"{key}: all weights are zero")
    return p / p.sum()


def _same_labels(systems: list[System], batch_size: object) -> None:
    first = systems[0]
    for s in systems:
        if s.label_names != first.label_names:
            raise UserError(
                f"batch_size {batch_size!r} puts frames of all systems into one batch: they must have the same labels, "
                f"but {first.name} has {sorted(first.label_names)} and {s.name} has {sorted(s.label_names)}"
            )
