"""One frame cut into blocks of space, one for each worker of a group: whose atoms are whose, and their neighbours.

Recursive bisection: the atoms are cut in two across the longest side of what they fill, so that the halves have the
same number of neighbour pairs (as estimated, see `cost`), and so on. A block is computed from its own atoms and the
halo around it, which are all atoms, images included, within a margin of the box that its own atoms fill.

Every worker finds its own block by itself, by the same arithmetic from the same frame: nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allforce.neighbors import Pairs, check_size, neighbor_list

SLACK = 1e-6  # Å added to margins, so that no rounding loses a pair; and coordinates are told apart to this


@dataclass(frozen=True)
class Part:
    """What one worker computes of a frame."""

    atoms: np.ndarray  # (a,) places in the frame: the c centres, ascending, then other atoms that edges lead to
    centers: int  # c, atoms with edges of their own
    pairs: Pairs  # i, j: places in `atoms`
    own: np.ndarray | None = None  # (c,) bool: centres of the block itself; None: all of them


NOTHING = Part(np.arange(0), 0, (np.empty(0, np.int32), np.empty(0, np.int32), np.empty((0, 3))))  # of a frame


class Space:
    """Coordinates along the cell's vectors, wrapped into the cell; along x, y, z where there is no cell."""

    def __init__(self, coord: np.ndarray, cell: np.ndarray | None):
        self.cell = np.eye(3) if cell is None else cell
        self.periodic = cell is not None
        inverse = np.linalg.inv(self.cell)
        self.unit = 1.0 / np.linalg.norm(inverse, axis=0)  # (3,) Å between the faces of the cell
        u = coord @ inverse
        self.u = u - np.floor(u) if self.periodic else u  # (n, 3)

    def positions(self, atoms: np.ndarray, shifts: np.ndarray) -> np.ndarray:
        return (self.u[atoms] + shifts) @ self.cell


def cost(space: Space, rcut: float) -> np.ndarray:
    """(n,) atoms in the 27 bins, at least rcut wide, around every atom: in proportion to its neighbours."""
    low = np.zeros(3) if space.periodic else space.u.min(axis=0)
    extent = np.ones(3) if space.periodic else np.maximum(np.ptp(space.u, axis=0), SLACK)
    most = int(np.ceil(len(space.u) ** (1 / 3))) + 2  # a gas in a large box does not need more bins than atoms
    shape = np.clip(extent * space.unit / rcut, 1, most).astype(int)
    bins = tuple(np.clip(((space.u - low) / extent * shape).astype(int), 0, shape - 1).T)
    count = np.zeros(shape, dtype=np.int64)
    np.add.at(count, bins, 1)
    for axis, n in enumerate(shape):
        if space.periodic:
            count = sum(np.roll(count, s, axis) for s in {k % n for k in (-1, 0, 1)})  # type: ignore[assignment]
        else:
            padded = np.pad(count, [(1, 1) if a == axis else (0, 0) for a in range(3)])
            count = sum(np.take(padded, np.arange(n) + s, axis) for s in range(3))  # type: ignore[assignment]
    return count[bins]


def block(space: Space, rcut: float, part: int, parts: int) -> tuple[np.ndarray, list[int]]:
    """The atoms of a block, ascending, and the axes that were cut."""
    atoms, weight, axes = np.arange(len(space.u)), None, set()
    while parts > 1 and len(atoms):
        weight = cost(space, rcut) if weight is None else weight
        axis = int(np.argmax(np.round(np.ptp(space.u[atoms], axis=0) * space.unit, 6)))
        order = np.argsort(np.round(space.u[atoms, axis] * space.unit[axis], 6), kind="stable")
        total, left = np.cumsum(weight[atoms[order]]), parts // 2
        k = int(np.searchsorted(total * parts, total[-1] * left, side="right"))
        axes.add(axis)
        if part < left:
            atoms, parts = atoms[order[:k]], left
        else:
            atoms, part, parts = atoms[order[k:]], part - left, parts - left
    return np.sort(atoms), sorted(axes)


def halo(space: Space, own: np.ndarray, axes: list[int], margin: float) -> tuple[np.ndarray, np.ndarray]:
    """Atoms (h,) and shifts (h, 3) of the images within the margin of the box that `own` fills, without `own` itself.

    Along an axis that is not cut the block goes through the whole cell: images along it are left to the neighbour list.
    """
    atoms, shifts = np.arange(len(space.u)), np.zeros((len(space.u), 3), dtype=np.int64)
    wide = (margin + SLACK) / space.unit
    low, high = space.u[own].min(axis=0) - wide, space.u[own].max(axis=0) + wide
    for axis in axes if space.periodic else range(3):
        x = space.u[atoms, axis]
        if space.periodic:
            first, last = np.ceil(low[axis] - x).astype(np.int64), np.floor(high[axis] - x).astype(np.int64)
        else:
            first, last = np.zeros(len(x), np.int64), np.where((x >= low[axis]) & (x <= high[axis]), 0, -1)
        count = np.maximum(last - first + 1, 0)
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)  # 0, 1, … of each atom
        atoms, shifts = np.repeat(atoms, count), np.repeat(shifts, count, axis=0)
        shifts[:, axis] = np.repeat(first, count) + number
    is_own = np.zeros(len(space.u), dtype=bool)
    is_own[own] = True
    other = ~(is_own[atoms] & (shifts == 0).all(axis=1))
    return atoms[other], shifts[other]


def pairs_of_block(
    coord: np.ndarray, cell: np.ndarray | None, rcut: float, part: int, parts: int, depth: int, where: str
) -> tuple[np.ndarray, np.ndarray, Pairs]:
    """The block's own atoms, the atoms that are centres of edges, and these edges, all as places in the frame.

    depth: how many edges away an atom has an influence. With 1 the centres are the block's own atoms. Beyond, they are
    also all others within (depth − 1)·rcut, each in one image, and the atoms around them as centres without edges.
    """
    if len(coord) == 0:
        return np.arange(0), np.arange(0), NOTHING.pairs
    check_size(coord, cell, rcut, where)
    space = Space(coord, cell)
    own, axes = block(space, rcut, part, parts)
    if len(own) == 0:
        return own, own, NOTHING.pairs
    others, shifts = halo(space, own, axes, depth * rcut)
    if axes and depth == 1:  # vesin takes up to twice as long where only some directions are periodic
        around = halo(space, own, [0, 1, 2], rcut)
        if len(own) + len(around[0]) < 1.5 * (len(own) + len(others)):
            axes, (others, shifts) = [0, 1, 2], around
    atoms = np.concatenate([own, others])
    shifts = np.concatenate([np.zeros((len(own), 3), dtype=np.int64), shifts])
    periodic = [space.periodic and axis not in axes for axis in range(3)]
    box = cell if any(periodic) else None
    i, j, r = neighbor_list(space.positions(atoms, shifts), box, rcut, where=where, periodic=periodic)
    if depth == 1:  # sorted by i, and own atoms come first
        end = np.searchsorted(i, len(own))
        return own, own, (own[i[:end]], atoms[j[:end]], r[:end].copy())
    inner, inner_shifts = halo(space, own, axes, (depth - 1) * rcut)
    centers = np.concatenate([own, inner])
    near = np.isin(_keys(atoms, shifts), _keys(centers, np.concatenate([shifts[: len(own)], inner_shifts])))
    first = np.zeros(len(atoms), dtype=bool)
    images = np.flatnonzero(near)
    first[images[np.unique(atoms[images], return_index=True)[1]]] = True  # of every near atom its first image
    keep = np.flatnonzero(first[i])
    keep = keep[np.argsort(atoms[i[keep]], kind="stable")]
    return own, np.unique(atoms), (atoms[i[keep]], atoms[j[keep]], r[keep])


def _keys(atoms: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """One number for each image."""
    s = shifts + 512
    return ((atoms.astype(np.int64) * 1024 + s[:, 0]) * 1024 + s[:, 1]) * 1024 + s[:, 2]


def part_of(own: np.ndarray, centers: np.ndarray, pairs: Pairs, natoms: int) -> Part:
    """The part of a frame with these edges: atoms numbered anew."""
    i, j, r = pairs
    seen = np.zeros(natoms, dtype=bool)
    seen[j] = True
    seen[centers] = False
    atoms = np.concatenate([centers, np.flatnonzero(seen)])
    index = np.zeros(natoms, dtype=np.int32)
    index[atoms] = np.arange(len(atoms), dtype=np.int32)
    mask = None if len(own) == len(centers) else np.isin(centers, own)
    return Part(atoms, len(centers), (index[i], index[j], r), mask)
