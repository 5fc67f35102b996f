"""Neighbour pairs within a cutoff, periodic images included: of many atoms by the library vesin, of few by trying all.

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
MOST_KEPT = 1_000_000  # pairs, 32 MB, for which a thread keeps memory
FEW = 400  # atoms: up to here trying all periodic pairs is faster than sorting the atoms into cells first

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
    coord = np.ascontiguousarray(coord, dtype=np.float64).reshape(-1, 3)
    box = np.zeros((3, 3)) if cell is None else np.ascontiguousarray(cell, dtype=np.float64).reshape(3, 3)
    if len(coord) == 0:
        return np.empty(0, np.int32), np.empty(0, np.int32), np.empty((0, 3))
    if periodic is None:
        check_size(coord, box if cell is not None else None, rcut, where)
    along = [cell is not None] * 3 if periodic is None or cell is None else list(periodic)
    if len(coord) <= FEW and any(along):
        return pairs_of_few(coord, box, rcut, along, where)
    try:
        pairs, r = _calculator(float(rcut), threads).compute(coord, box, along, "PD", copy=False)
    except RuntimeError as error:  # numbers that are not finite
        raise UserError(f"{where}: no neighbours can be found: {error}") from None
    return pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32), r if r.flags.owndata else r.copy()


def pairs_of_few(coord: np.ndarray, box: np.ndarray, rcut: float, along: Sequence[bool], where: str) -> Pairs:
    """neighbor_list of a periodic structure by trying all pairs of atoms."""
    if not (np.isfinite(coord).all() and np.isfinite(box).all()):
        raise UserError(f"{where}: no neighbours can be found: a coordinate or the cell is not a finite number")
    periodic, n = np.array(along, dtype=np.bool_), len(coord)
    to_fractions = np.linalg.inv(box) if periodic.all() else np.linalg.pinv(box * periodic[:, None])
    rounding = 1e-9 * rcut + 1e-14 * np.abs(coord).max(initial=0.0)  # Å: candidates may be too many, never too few
    reach = (rcut + rounding) * np.linalg.norm(to_fractions, axis=0)  # two planes are 1/|column of the inverse| apart
    volume = volume_of(box) if periodic.all() else np.inf
    size = int(min(n * n / volume * 6.0 * rcut**3, MOST_PAIRS)) + 16 * n  # 4.19 on average, so nearly always enough
    while True:
        i, j, r = _buffers(size)
        if (reach[periodic] < 0.5 - 1e-9).all():
            found = try_nearest_images(coord, box, to_fractions, rcut, i, j, r)
        else:
            found = try_all_pairs(coord, box, to_fractions, reach, periodic, rcut, i, j, r)
        if found <= len(i):
            return i[:found].copy(), j[:found].copy(), r[:found].copy()
        size = found


@njit(cache=True, nogil=True, error_model="numpy")
def try_all_pairs(coord, box, to_fractions, reach, periodic, rcut, i, j, r):
    """Fill i, j, r with the pairs within rcut, sorted by i, as far as there is space for them; how many there are.

    reach (3,): rcut in distances of lattice planes. An image S of a pair with the fractional vector f can be within
    rcut only if |f + S| <= reach in all three.
    """
    n, low, high = 0, np.zeros(3, np.int64), np.zeros(3, np.int64)
    for a in range(len(coord)):
        for b in range(len(coord)):
            x, y, z = coord[b, 0] - coord[a, 0], coord[b, 1] - coord[a, 1], coord[b, 2] - coord[a, 2]
            for d in range(3):
                if periodic[d]:
                    f = x * to_fractions[0, d] + y * to_fractions[1, d] + z * to_fractions[2, d]
                    low[d], high[d] = np.ceil(-reach[d] - f), np.floor(reach[d] - f)
            for sx in range(low[0], high[0] + 1):
                for sy in range(low[1], high[1] + 1):
                    for sz in range(low[2], high[2] + 1):
                        rx = x + (sx * box[0, 0] + sy * box[1, 0] + sz * box[2, 0])
                        ry = y + (sx * box[0, 1] + sy * box[1, 1] + sz * box[2, 1])
                        rz = z + (sx * box[0, 2] + sy * box[1, 2] + sz * box[2, 2])
                        if rx * rx + ry * ry + rz * rz >= rcut * rcut or (a == b and sx == 0 and sy == 0 and sz == 0):
                            continue
                        if n < len(i):
                            i[n], j[n], r[n, 0], r[n, 1], r[n, 2] = a, b, rx, ry, rz
                        n += 1
    return n


@njit(cache=True, nogil=True, error_model="numpy")
def try_nearest_images(coord, box, to_fractions, rcut, i, j, r):
    """try_all_pairs where rcut is less than half a distance of lattice planes: one image of a pair, the nearest, can be
    within rcut. Vectors from one atom to all others are computed together, in vector instructions."""
    n, atoms = 0, len(coord)
    xs, ys, zs = coord[:, 0].copy(), coord[:, 1].copy(), coord[:, 2].copy()
    to, rx, ry, rz, square = to_fractions, np.empty(atoms), np.empty(atoms), np.empty(atoms), np.empty(atoms)
    for a in range(atoms):
        for b in range(atoms):
            x, y, z = xs[b] - xs[a], ys[b] - ys[a], zs[b] - zs[a]
            sx = -np.floor(x * to[0, 0] + y * to[1, 0] + z * to[2, 0] + 0.5)  # 0 along what is not periodic
            sy = -np.floor(x * to[0, 1] + y * to[1, 1] + z * to[2, 1] + 0.5)
            sz = -np.floor(x * to[0, 2] + y * to[1, 2] + z * to[2, 2] + 0.5)
            rx[b] = x + (sx * box[0, 0] + sy * box[1, 0] + sz * box[2, 0])
            ry[b] = y + (sx * box[0, 1] + sy * box[1, 1] + sz * box[2, 1])
            rz[b] = z + (sx * box[0, 2] + sy * box[1, 2] + sz * box[2, 2])
            square[b] = rx[b] * rx[b] + ry[b] * ry[b] + rz[b] * rz[b]
        square[a] = np.inf
        for b in range(atoms):
            if square[b] < rcut * rcut:
                if n < len(i):
                    i[n], j[n], r[n, 0], r[n, 1], r[n, 2] = a, b, rx[b], ry[b], rz[b]
                n += 1
    return n


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


def volume_of(box: np.ndarray) -> float:
    """|a · (b × c)|; np.linalg.det takes ten times as long."""
    (ax, ay, az), (bx, by, bz), (cx, cy, cz) = box.tolist()
    return abs(ax * (by * cz - bz * cy) + ay * (bz * cx - bx * cz) + az * (bx * cy - by * cx))


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
    volume = volume_of(box)
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
