"""Neighbour pairs within a cutoff, periodic images included, by the library vesin.

Edge vector r_e = r_j - r_i + S·H (neighbour minus centre). Any cell: smaller than the cutoff (an atom then sees its own
images), triclinic, left-handed, none at all. Atoms may lie anywhere, in or far outside the cell.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numba import njit
from vesin import NeighborList

from allforce.errors import UserError

Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]  # i (E,), j (E,), r (E, 3) of one frame, sorted by i
TOUCHING = 1e-3  # Å: closer than this, two atoms are on one place
FARTHEST = 1e9  # Å: beyond it the library counts its cells wrong
LONGEST = 1e4  # Å, of a cutoff
MOST_PAIRS = 5e7  # of one structure: a few GB

_calculators = threading.local()  # a vesin calculator keeps its buffers and must not be shared by threads


def _calculator(rcut: float, threads: int, once: bool) -> NeighborList:
    cache = _calculators.__dict__.setdefault("cache", {})
    if (rcut, threads, once) not in cache:
        cache[rcut, threads, once] = NeighborList(cutoff=rcut, full_list=not once, sorted=not once, n_threads=threads)
    return cache[rcut, threads, once]


def neighbor_list(
    coord: np.ndarray,
    cell: np.ndarray | None,
    rcut: float,
    threads: int = 1,
    where: str = "the structure",
    periodic: Sequence[bool] | None = None,
) -> Pairs:
    """All pairs with |r| <= rcut: i (E,) int32 ascending, j (E,) int32, r (E, 3) float64.

    coord (n, 3); cell (3, 3) with rows as lattice vectors, or None when not periodic; where: its name in messages;
    periodic: along which of the three, all when left out.
    """
    pairs, r = _pairs(coord, cell, rcut, threads, where, periodic)
    return pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32), r if r.flags.owndata else r.copy()


def _pairs(
    coord: np.ndarray,
    cell: np.ndarray | None,
    rcut: float,
    threads: int,
    where: str,
    periodic: Sequence[bool] | None = None,
    once: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """i, j (E, 2) and r (E, 3), valid until the next call; once: each pair in one direction only, in no order."""
    coord = np.ascontiguousarray(coord, dtype=np.float64).reshape(-1, 3)
    if len(coord) == 0:
        return np.empty((0, 2), np.uint64), np.empty((0, 3))
    box = np.zeros((3, 3)) if cell is None else np.ascontiguousarray(cell, dtype=np.float64).reshape(3, 3)
    if periodic is None:
        check_size(coord, box if cell is not None else None, rcut, where)
    along = cell is not None if periodic is None or cell is None else list(periodic)
    try:
        return _calculator(float(rcut), threads, once).compute(coord, box, along, "PD", copy=False)
    except RuntimeError as error:  # numbers that are not finite
        raise UserError(f"{where}: no neighbours can be found: {error}") from None


@njit(cache=True, nogil=True, error_model="numpy")
def pairs_within(coord, cell, i, j, shift, rcut):
    """Of a longer list (i, j (E,), shift (E, 3) in cells): i, j, r of the pairs within rcut, and the smallest distance.

    One pass over the list, for every step of a simulation.
    """
    kept_i, kept_j, kept_r = np.empty(len(i), np.int64), np.empty(len(i), np.int64), np.empty((len(i), 3))
    n, nearest = 0, np.inf
    for e in range(len(i)):
        a, b, sx, sy, sz = i[e], j[e], shift[e, 0], shift[e, 1], shift[e, 2]
        x = coord[b, 0] - coord[a, 0] + (sx * cell[0, 0] + sy * cell[1, 0] + sz * cell[2, 0])
        y = coord[b, 1] - coord[a, 1] + (sx * cell[0, 1] + sy * cell[1, 1] + sz * cell[2, 1])
        z = coord[b, 2] - coord[a, 2] + (sx * cell[0, 2] + sy * cell[1, 2] + sz * cell[2, 2])
        square = x * x + y * y + z * z
        kept_i[n], kept_j[n] = a, b  # overwritten by the next pair unless n goes on
        kept_r[n, 0], kept_r[n, 1], kept_r[n, 2] = x, y, z
        n += square <= rcut * rcut
        nearest = min(nearest, square)
    return kept_i[:n], kept_j[:n], kept_r[:n], np.sqrt(nearest)


def check_size(coord: np.ndarray, box: np.ndarray | None, rcut: float, where: str) -> None:
    """Numbers that cannot be right are refused before memory is asked for. The mean number of pairs in a periodic
    structure is n²/V · 4π rcut³/3, images included.
    """
    for what, values in (("coordinate", coord), ("cell vector", coord if box is None else box)):
        farthest = float(np.abs(values).max())
        if farthest > FARTHEST:
            raise UserError(f"{where}: a {what} of {farthest:.1e} Å cannot be right. Expected at most {FARTHEST:g} Å")
    if rcut > LONGEST:
        raise UserError(f"{where}: a cutoff of {rcut:.1e} Å cannot be right. Expected at most {LONGEST:g} Å")
    if box is None:
        return
    volume = abs(float(np.linalg.det(box)))
    if volume < 1e-9:
        raise UserError(f"{where}: the cell {box.tolist()} has no volume. Its three vectors must be independent")
    pairs = len(coord) ** 2 / volume * 4 / 3 * np.pi * rcut**3
    if pairs > MOST_PAIRS:
        raise UserError(
            f"{where}: about {pairs:.1e} pairs within {rcut} Å ({len(coord)} atoms in {volume:.1e} Å³). At most"
            f" {MOST_PAIRS:g} are possible. Check the cell and its units, or take a smaller cutoff"
        )


def _smallest(r: np.ndarray) -> tuple[int, float]:
    """Number and length of the shortest of the vectors r (E, 3); inf when there is none."""
    if len(r) == 0:
        return -1, np.inf
    d2 = np.einsum("ea,ea->e", r, r)
    closest = int(d2.argmin())
    return closest, float(np.sqrt(d2[closest]))


def check_distances(i: np.ndarray, j: np.ndarray, r: np.ndarray, where: str, order: np.ndarray | None = None) -> float:
    """The smallest distance (inf without pairs); atoms on one place are an error. `order` gives the file's numbers."""
    closest, d = _smallest(r)
    if d < TOUCHING:
        a, b = (int(x[closest] if order is None else order[x[closest]]) for x in (i, j))
        raise UserError(
            f"{where}: atoms {a} and {b} (counted from 0) are on one place, {d:.1e} Å apart. "
            f"Expected at least {TOUCHING} Å: remove the frame or one of the atoms, and check the units and the box"
        )
    return d


@njit(cache=True, nogil=True)
def neighbor_counts(i, j, types, atoms, ntypes):
    """(atoms, ntypes) neighbours of each type that a centre has."""
    count = np.zeros((atoms, ntypes), np.int64)
    for e in range(len(i)):
        count[i[e], types[j[e]]] += 1
    return count


def crowding(
    coord: np.ndarray,
    cell: np.ndarray | None,
    rcut: float,
    types: np.ndarray,
    ntypes: int,
    where: str,
    order: np.ndarray | None = None,
) -> tuple[float, np.ndarray]:
    """The smallest distance (inf without pairs), and the most neighbours (ntypes,) of each type that an atom has.

    For this each pair is looked at once, in any order, which takes 0.6 of the time of a list for a model. Atoms on one
    place are an error.
    """
    pairs, r = _pairs(coord, cell, rcut, 1, where, once=True)
    _, nearest = _smallest(r)
    if nearest < TOUCHING:  # the full list says it, with the same atoms as everywhere
        check_distances(*neighbor_list(coord, cell, rcut, where=where), where, order)
    i, j = pairs.T
    count = neighbor_counts(i, j, types, len(types), ntypes) + neighbor_counts(j, i, types, len(types), ntypes)
    return nearest, count.max(axis=0, initial=0)


def limit_neighbors(
    i: np.ndarray, j: np.ndarray, r: np.ndarray, types: np.ndarray, most: Sequence[int] | np.ndarray | int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The nearest most[t] neighbours of each centre and neighbour type t, in the order given, and the number dropped.

    A single number counts neighbours of all types together.
    """
    if isinstance(most, int):
        most, types = [most], np.zeros_like(types)
    most = np.asarray(most, dtype=np.int64)
    count = neighbor_counts(i, j, types, len(types), len(most))
    if (count <= most).all():
        return i, j, r, 0
    group = i * np.int64(len(most)) + types[j]  # (E,) one number per centre and neighbour type
    order = np.lexsort((np.einsum("ea,ea->e", r, r), group))  # by group, then by distance
    first = np.cumsum(count.ravel()) - count.ravel()
    rank = np.empty(len(i), dtype=np.int64)
    rank[order] = np.arange(len(i)) - first[group[order]]
    keep = rank < most[types[j]]
    return i[keep], j[keep], r[keep], int(len(i) - keep.sum())


def visible_pairs(ntypes: int, excluded: Iterable[Sequence[int]]) -> np.ndarray:
    """(nt, nt) bool: does a centre of type a see neighbours of type b; excluded pairs do not see each other."""
    visible = np.ones((ntypes, ntypes), dtype=bool)
    for a, b in excluded:
        visible[a, b] = visible[b, a] = False
    return visible
