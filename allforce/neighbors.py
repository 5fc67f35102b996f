"""Neighbour pairs within a cutoff, periodic images included: of many atoms by the library vesin, of few by trying all.

Edge vector r_e = r_j - r_i + S·H (neighbour minus centre). Any cell: smaller than the cutoff (an atom then sees its own
images), triclinic, left-handed, none at all. Atoms may lie anywhere, in or far outside the cell.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from vesin import NeighborList

from allforce import all_pairs
from allforce.all_pairs import FARTHEST, LONGEST, MOST_PAIRS
from allforce.errors import UserError
from allforce.loops import njit

Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]  # i (E,), j (E,), r (E, 3) of one frame, sorted by i
TOUCHING = 1e-3  # Å: closer than this, two atoms are on one place
MOST_KEPT = 1_000_000  # pairs, 32 MB, for which a thread keeps memory
FEW = 400  # atoms: up to here trying all pairs is faster than sorting the atoms into cells first

_of_thread = threading.local()  # what each thread keeps for its next search


def _calculator(rcut: float, threads: int) -> NeighborList:
    """A vesin calculator keeps its buffers and must not be shared by threads."""
    cache = _of_thread.__dict__.setdefault("calculators", {})
    if (rcut, threads) not in cache:
        cache[rcut, threads] = NeighborList(cutoff=rcut, full_list=True, sorted=True, n_threads=threads)
    return cache[rcut, threads]


def _buffers(size: int) -> Pairs:
    """For `size` pairs or more: new memory would cost more than what is written to it."""
    kept = _of_thread.__dict__.get("buffers")
    if kept is None or len(kept[0]) < size:
        kept = np.empty(size, np.int32), np.empty(size, np.int32), np.empty((size, 3))
        if size <= MOST_KEPT:
            _of_thread.buffers = kept
    return kept


def _plain(x: np.ndarray) -> np.ndarray:
    """As compiled loops expect it: for other kinds of arrays they would be compiled once more."""
    return np.require(x, np.float64, ["C", "W"])


def neighbor_list(
    coord: np.ndarray,
    cell: np.ndarray | None,
    rcut: float,
    threads: int = 1,
    where: str = "the structure",
    periodic: Sequence[bool] | None = None,
) -> Pairs:
    """All pairs with |r| < rcut: i (E,) int32 ascending, j (E,) int32, r (E, 3) float64.

    coord (n, 3); cell (3, 3) with rows as lattice vectors, or None when not periodic; where: its name in messages;
    periodic: along which of the three, all when left out.
    """
    coord = _plain(coord).reshape(-1, 3)
    box = np.zeros((3, 3)) if cell is None else _plain(cell).reshape(3, 3)
    if len(coord) == 0:
        return np.empty(0, np.int32), np.empty(0, np.int32), np.empty((0, 3))
    if periodic is None:
        check_size(coord, box if cell is not None else None, rcut, where)
    along = [cell is not None] * 3 if periodic is None or cell is None else list(periodic)
    if len(coord) <= FEW:
        return pairs_of_few(coord, box, rcut, along, where)
    try:
        pairs, r = _calculator(float(rcut), threads).compute(coord, box, along, "PD", copy=False)
    except RuntimeError as error:
        raise UserError(f"{where}: no neighbours can be found: {error}") from None
    return pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32), r if r.flags.owndata else r.copy()


def pairs_of_few(coord: np.ndarray, box: np.ndarray, rcut: float, along: Sequence[bool], where: str) -> Pairs:
    """neighbor_list by trying all pairs of atoms."""
    periodic = np.array(along)
    if periodic.any() and not periodic.all():  # any vectors that are independent will do for the others
        box = box.copy()
        box[~periodic] = np.linalg.svd(box[periodic])[2][periodic.sum() :]
    rows, kind = np.arange(len(coord)), np.zeros(len(coord), np.int64)
    found = edges_of_frames(coord[None], box[None], periodic, rcut, rows, kind, 1, np.int32)
    if found.nearest[0] < 0:
        raise UserError(f"{where}: no neighbours can be found: a coordinate or the cell cannot be right")
    return found.i, found.j, found.r


class Found(NamedTuple):
    """Edges of frames of the same few atoms, sorted by centre, neighbour and image."""

    i: np.ndarray  # (E,)
    j: np.ndarray  # (E,)
    r: np.ndarray  # (E, 3)
    first: np.ndarray  # (N + 1,) int64 first edge of each centre
    nearest: np.ndarray  # (B,) the smallest distance in each frame, inf without edges, -1 where check_size complains
    most: np.ndarray  # (types,) int64 neighbours of a kind that an atom has


def edges_of_frames(
    coord: np.ndarray,
    box: np.ndarray,
    periodic: np.ndarray,
    rcut: float,
    rows: np.ndarray,
    kind: np.ndarray,
    nt: int,
    integer: type = np.int64,
) -> Found:
    """The edges of coord (B, n, 3) in box (B, 3, 3), atoms numbered as rows (N,) says: see all_pairs.find_edges."""
    given = coord, box, periodic, float(rcut), rows, kind
    first, nearest, most = np.empty(len(rows) + 1, np.int64), np.empty(len(coord)), np.zeros(nt, np.int64)
    i, j, r = _buffers(64 * len(rows))
    n = all_pairs.find_edges(*given, i, j, r, first, nearest, most)
    if n > len(i):
        i, j, r = _buffers(n)
        all_pairs.find_edges(*given, i, j, r, first, nearest, most)
    return Found(i[:n].astype(integer), j[:n].astype(integer), r[:n].copy(), first, nearest, most)


def crowding_of_frames(
    coord: np.ndarray, cell: np.ndarray | None, rcut: float, kind: np.ndarray, nt: int
) -> tuple[np.ndarray, np.ndarray]:
    """nearest (B,) and most (nt,) of Found for coord (B, n, 3) and cell (B, 3, 3) or none; no edge is written."""
    box, periodic = np.zeros((len(coord), 3, 3)) if cell is None else cell, np.full(3, cell is not None)
    rows, nothing = np.arange(coord[..., 0].size), (np.empty(0, np.int32), np.empty(0, np.int32), np.empty((0, 3)))
    first, nearest, most = np.empty(len(rows) + 1, np.int64), np.empty(len(coord)), np.zeros(nt, np.int64)
    all_pairs.find_edges(coord, box, periodic, float(rcut), rows, kind, *nothing, first, nearest, most)
    return nearest, most


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
    """Numbers that cannot be right are refused before memory is asked for."""
    coord, cell = _plain(coord), np.zeros((3, 3)) if box is None else _plain(box)
    found = all_pairs.flaw(coord, cell, np.full(3, box is not None), float(rcut))
    if found == all_pairs.NOT_FINITE:
        raise UserError(f"{where}: no neighbours can be found: a coordinate or the cell is not a finite number")
    if found in (all_pairs.FAR_ATOM, all_pairs.LONG_CELL):
        what, values = ("coordinate", coord) if found == all_pairs.FAR_ATOM else ("cell vector", cell)
        raise UserError(
            f"{where}: a {what} of {np.abs(values).max():.1e} Å cannot be right. Expected at most {FARTHEST:g} Å"
        )
    if found == all_pairs.LONG_CUTOFF:
        raise UserError(f"{where}: a cutoff of {rcut:.1e} Å cannot be right. Expected at most {LONGEST:g} Å")
    if found == all_pairs.NO_VOLUME:
        raise UserError(f"{where}: the cell {cell.tolist()} has no volume. Its three vectors must be independent")
    if found == all_pairs.CROWDED:
        volume = all_pairs.volume_of(cell)
        pairs = all_pairs.mean_pairs(len(coord), volume, rcut)
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
    """The smallest distance (inf without pairs), and the most neighbours (ntypes,) of each type that an atom has."""
    i, j, r = neighbor_list(coord, cell, rcut, where=where)
    nearest = check_distances(i, j, r, where, order)
    return nearest, neighbor_counts(i, j, types, len(types), ntypes).max(axis=0, initial=0)


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
