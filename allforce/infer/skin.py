"""Neighbours between the steps of a simulation: a list with a skin, kept as long as no pair within rcut can be missing.

The list holds the pairs within rcut + skin of a reference structure. Let the cell since have gone from H₀ to H, with
F = H₀⁻¹H, and let atoms have moved by at most d from where F alone would have put them. A pair that is not in the list
is now at least σ_min(F)·(rcut + skin) − 2d apart, so the list serves while that is not less than rcut.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from ase.geometry import complete_cell

from allforce.data.batch import Batch, Frame
from allforce.data.blocks import pairs_of_block, part_of
from allforce.data.loader import collate, collate_parts, float_tensor, int_tensor
from allforce.errors import UserError
from allforce.infer.evaluate import Evaluator
from allforce.infer.predict import DEFAULT
from allforce.infer.workers import divisible
from allforce.neighbors import TOUCHING, Pairs, check_distances, neighbor_list, pairs_within

LEAST = 1e-6  # Å, so that a list serves the frame it was made of in spite of rounding
PERIODIC = np.array([True, True, True])


class SkinList:
    """Pairs (i, j) of a frame sorted by type and their lattice shifts, for structures near the one it was made of."""

    def __init__(
        self, frame: Frame, pbc: np.ndarray, rcut: float, skin: float, block: tuple[int, int] = (0, 1), depth: int = 1
    ):
        self.frame, self.pbc, self.rcut, self.reach = frame, pbc.copy(), rcut, rcut + skin
        cell = search_cell(frame, pbc, self.reach)
        if block == (0, 1):
            self.own = self.centers = np.arange(len(frame.type))
            self.i, self.j, r = neighbor_list(frame.coord, cell, self.reach)
        else:  # a path of `depth` edges within rcut is one of edges within the list's reach
            self.own, self.centers, (self.i, self.j, r) = pairs_of_block(
                frame.coord, cell, self.reach, *block, depth, "the structure"
            )
        shift = r - (frame.coord[self.j] - frame.coord[self.i])
        self.shift = np.zeros_like(shift) if cell is None else np.rint(shift @ np.linalg.inv(cell))  # (E, 3) integers
        self.inverse = None if frame.cell is None or not pbc.all() else np.linalg.inv(frame.cell)

    def moved(self, frame: Frame, pbc: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Displacements (n, 3), whole lattice vectors left out, and F; None where the list does not serve at all."""
        old = self.frame
        if not np.array_equal(old.type, frame.type) or not np.array_equal(self.pbc, pbc):
            return None
        if self.inverse is None or frame.cell is None:  # not periodic everywhere: the cell must be the same
            same = old.cell is frame.cell or (
                old.cell is not None and frame.cell is not None and np.array_equal(old.cell, frame.cell)
            )
            return (frame.coord - old.coord, np.eye(3)) if same else None
        F = self.inverse @ frame.cell
        moved = frame.coord - old.coord @ F
        return moved - np.rint(moved @ np.linalg.inv(frame.cell)) @ frame.cell, F

    def pairs(self, frame: Frame, pbc: np.ndarray) -> tuple[Pairs, float] | None:
        """The pairs of the frame within rcut and the smallest distance; None when a pair could be missing."""
        found = self.moved(frame, pbc)
        if found is None:
            return None
        moved, F = found
        farthest = np.sqrt(np.einsum("na,na->n", moved, moved).max(initial=0.0))
        stretch = 1.0 if np.array_equal(F, np.eye(3)) else np.linalg.svd(F, compute_uv=False)[-1]
        if stretch * self.reach - 2 * farthest < self.rcut:
            return None
        coord = self.frame.coord @ F + moved
        cell = np.zeros((3, 3)) if frame.cell is None else np.ascontiguousarray(frame.cell)
        i, j, r, nearest = pairs_within(coord, cell, self.i, self.j, self.shift, self.rcut)
        if nearest < TOUCHING:
            check_distances(i, j, r, "the structure", frame.order)
        return (i, j, r), nearest


class Steps:
    """Batches of the frames of a simulation, one after the other, with as few neighbour lists as possible.

    wanted: what will be asked of them. Where that can be split, each of the evaluator's workers finds the neighbours of
    its own block; all of them give the same frame, to the bit.
    """

    def __init__(self, evaluator: Evaluator, skin: float = 1.0, wanted: Collection[str] = DEFAULT):
        if not isinstance(skin, (int, float, np.number)) or not 0 <= skin < np.inf:
            raise UserError(f"skin: found {skin!r}; expected a number of Å, 0 or more.")
        self.evaluator, self.skin, workers = evaluator, max(float(skin), LEAST), evaluator.workers
        self.splits = workers.size > 1 and divisible(evaluator.model, wanted)
        self.block = (workers.rank, workers.size) if self.splits else (0, 1)
        self.rebuilds = 0  # neighbour lists built so far
        self._list: SkinList | None = None
        self._last: tuple[Frame, Batch] | None = None

    def batch(self, frame: Frame, pbc: np.ndarray = PERIODIC) -> Batch:
        return self.evaluator.workers.attempt(lambda: self._batch(frame.by_type(), pbc)).to(self.evaluator.device)

    def _batch(self, frame: Frame, pbc: np.ndarray) -> Batch:
        found = None if self._list is None else self._list.pairs(frame, pbc)
        if found is None:
            limit = self.evaluator.needs.limit
            self._list = SkinList(frame, pbc, limit.rcut, self.skin, self.block, limit.depth)
            self.rebuilds += 1
            found = self._list.pairs(frame, pbc)
            assert found is not None, "a new list serves the frame that it was made of"
        pairs, nearest = found
        limited = self.evaluator.preparation.limited(*pairs, frame.type, "the structure")
        if not self.splits:
            return self._whole(frame, limited, nearest)
        assert self._list is not None
        part = part_of(self._list.own, self._list.centers, limited, len(frame.type))
        return collate_parts([frame], [part], self.evaluator.get_ntypes())

    def _whole(self, frame: Frame, pairs: Pairs, nearest: float) -> Batch:
        """The frame alone in a batch; all but places and edges is that of the step before, where that had its atoms."""
        if self._last is None or not same_atoms(self._last[0], frame):
            self._last = frame, collate([frame], [pairs], self.evaluator.get_ntypes())
        batch = self._last[1]
        first = int_tensor(np.searchsorted(pairs[0], np.arange(len(frame.type) + 1)))
        i, j, r = int_tensor(pairs[0]), int_tensor(pairs[1]), float_tensor(pairs[2])
        edges = replace(batch.edges, i=i, j=j, r=r, first=first, nearest=nearest)
        cell = None if frame.cell is None else float_tensor(frame.cell)[None]
        return replace(batch, coord=float_tensor(frame.coord), cell=cell, edges=edges)


def same_atoms(a: Frame, b: Frame) -> bool:
    """The same atoms in the same order, without parameters of their own."""
    parameters = (x for f in (a, b) for x in (f.fparam, f.aparam))
    same_order = a.order is b.order if a.order is None or b.order is None else np.array_equal(a.order, b.order)
    return all(x is None for x in parameters) and np.array_equal(a.type, b.type) and same_order and a.nfile == b.nfile


def search_cell(frame: Frame, pbc: np.ndarray, reach: float) -> np.ndarray | None:
    """The cell to look for neighbours in; a direction that is not periodic gets a vector longer than anyone sees."""
    if frame.cell is None or pbc.all():
        return frame.cell
    cell = np.where(pbc[:, None], frame.cell, 0.0)
    full = complete_cell(cell)  # unit vectors, normal to the periodic ones, where there was none
    height = frame.coord @ np.linalg.inv(full)  # (n, 3)
    extent = np.ptp(height, axis=0)
    full[~pbc] *= (extent + reach + 1.0)[~pbc, None]
    return full
