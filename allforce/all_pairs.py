"""Edges of few atoms by trying all pairs, in one frame or in many at once: compiled, without Python's lock."""

from __future__ import annotations

import numpy as np

from allforce.loops import njit

FARTHEST = 1e9  # Å: beyond it the library that serves many atoms counts its cells wrong
LONGEST = 1e4  # Å, of a cutoff
MOST_PAIRS = 5e7  # of one structure: a few GB
FINE, NOT_FINITE, FAR_ATOM, LONG_CELL, LONG_CUTOFF, NO_VOLUME, CROWDED = range(7)  # what flaw finds


@njit(cache=True, nogil=True, error_model="numpy")
def find_edges(coord, box, periodic, rcut, rows, kind, i, j, r, first, nearest, most):
    """Edges within rcut of frames of n atoms, sorted by centre, then by neighbour, then by image; how many there are.

    coord (B, n, 3), box (B, 3, 3), periodic (3,): along which vectors; where not, the vector only has to be independent
    rows (N,): which atom, counted over all frames, is number 0, 1, … of i and j; those of a frame ascend
    kind (n,): types from 0; filled are
    i, j (·,), r (·, 3): as far as there is space, none for counting
    first (N + 1,): the first edge of each centre
    nearest (B,): the smallest distance in each frame, inf without edges, -1 for a frame with a flaw, which gets none
    most (types,): neighbours of a kind that an atom has
    """
    frames, atoms = coord.shape[0], coord.shape[1]
    place, xyz = np.empty(len(rows), np.int64), np.empty((frames, 3, atoms))
    to, reach = np.zeros((frames, 3, 3)), np.zeros((frames, 3))
    for f in range(frames):
        nearest[f] = np.inf if flaw(coord[f], box[f], periodic, rcut) == FINE else -1.0
        xyz[f] = coord[f].T
        to_fractions(xyz[f], box[f], periodic, rcut, to[f], reach[f])
    for row in range(len(rows)):
        place[rows[row]] = row
    n, count, space, near = 0, np.zeros(len(most), np.int64), np.empty((4, atoms)), np.empty(atoms, np.int64)
    for row in range(len(rows)):
        f = rows[row] // atoms
        a, there = rows[row] - f * atoms, place[f * atoms : (f + 1) * atoms]
        first[row] = n
        if nearest[f] < 0.0:
            continue
        count[:] = 0
        if (reach[f] < 0.5 - 1e-9).all():
            n, least = nearest_images(xyz[f], a, box[f], to[f], rcut, there, kind, n, j, r, count, space, near)
        else:
            n, least = all_images(xyz[f], a, box[f], to[f], reach[f], rcut, there, kind, n, j, r, count)
        i[first[row] : n] = row
        nearest[f] = min(nearest[f], np.sqrt(least))
        for t in range(len(most)):
            most[t] = max(most[t], count[t])
    first[len(rows)] = n
    return n


@njit(cache=True, nogil=True, error_model="numpy")
def flaw(coord, box, periodic, rcut):
    """Which number of a structure cannot be right; coord (n, 3), box (3, 3) where it is periodic, along all three.

    The mean number of pairs in a periodic structure is n²/V · 4π rcut³/3, images included.
    """
    farthest = np.abs(coord).max() if len(coord) else 0.0
    longest = np.abs(box).max() if periodic.any() else 0.0
    if not (np.isfinite(coord).all() and (np.isfinite(box).all() or not periodic.any())):
        return NOT_FINITE
    if farthest > FARTHEST:
        return FAR_ATOM
    if longest > FARTHEST:
        return LONG_CELL
    if rcut > LONGEST:
        return LONG_CUTOFF
    if not periodic.all():
        return FINE
    volume = volume_of(box)
    if volume < 1e-9:
        return NO_VOLUME
    return CROWDED if mean_pairs(len(coord), volume, rcut) > MOST_PAIRS else FINE


@njit(cache=True, nogil=True)
def volume_of(box):
    """|a · (b × c)|"""
    a, b, c = box[0], box[1], box[2]
    return abs(
        a[0] * (b[1] * c[2] - b[2] * c[1]) + a[1] * (b[2] * c[0] - b[0] * c[2]) + a[2] * (b[0] * c[1] - b[1] * c[0])
    )


@njit(cache=True, nogil=True)
def mean_pairs(atoms, volume, rcut):
    return atoms**2 / volume * 4.0 / 3.0 * np.pi * rcut**3


@njit(cache=True, nogil=True, error_model="numpy")
def to_fractions(xyz, box, periodic, rcut, to, reach):
    """Fill to (3, 3), the inverse of the box, zeros for what is not periodic, and reach (3,), rcut in distances of
    lattice planes, which are 1/|column of the inverse| apart; xyz (3, n)."""
    rounding = 1e-9 * rcut + 1e-14 * np.abs(xyz).max()  # Å: candidates may be too many, never too few
    for d in range(3):
        if periodic[d]:
            normal = np.cross(box[(d + 1) % 3], box[(d + 2) % 3])
            to[:, d] = normal / np.dot(box[d], normal)
            reach[d] = (rcut + rounding) * np.sqrt((to[:, d] ** 2).sum())


@njit(cache=True, nogil=True, error_model="numpy")
def all_images(xyz, a, box, to, reach, rcut, place, kind, n, j, r, count):
    """Put the edges of atom a behind the n that are there, as far as there is space, and count their kinds; how many
    there are then, and the smallest square of a distance.

    An image S of a pair with the fractional vector f can be within rcut only if |f + S| <= reach in all three.
    """
    least, (mx, my, mz) = np.inf, reach
    for b in range(len(place)):
        x, y, z = xyz[0, b] - xyz[0, a], xyz[1, b] - xyz[1, a], xyz[2, b] - xyz[2, a]
        fx = x * to[0, 0] + y * to[1, 0] + z * to[2, 0]  # 0 along what is not periodic, as is the reach
        fy = x * to[0, 1] + y * to[1, 1] + z * to[2, 1]
        fz = x * to[0, 2] + y * to[1, 2] + z * to[2, 2]
        for sx in range(int(np.ceil(-mx - fx)), int(np.floor(mx - fx)) + 1):
            for sy in range(int(np.ceil(-my - fy)), int(np.floor(my - fy)) + 1):
                for sz in range(int(np.ceil(-mz - fz)), int(np.floor(mz - fz)) + 1):
                    rx = x + (sx * box[0, 0] + sy * box[1, 0] + sz * box[2, 0])
                    ry = y + (sx * box[0, 1] + sy * box[1, 1] + sz * box[2, 1])
                    rz = z + (sx * box[0, 2] + sy * box[1, 2] + sz * box[2, 2])
                    square = rx * rx + ry * ry + rz * rz
                    if square >= rcut * rcut or (a == b and sx == 0 and sy == 0 and sz == 0):
                        continue
                    if n < len(j):
                        j[n], r[n, 0], r[n, 1], r[n, 2] = place[b], rx, ry, rz
                    n += 1
                    count[kind[b]] += 1
                    least = min(least, square)
    return n, least


@njit(cache=True, nogil=True, error_model="numpy")
def nearest_images(xyz, a, box, to, rcut, place, kind, n, j, r, count, space, near):
    """all_images where rcut is less than half a distance of lattice planes, or nothing is periodic: one image of a
    pair, the nearest, can be within rcut. Vectors to all atoms are computed together, in vector instructions."""
    xs, ys, zs, rx, ry, rz, square = xyz[0], xyz[1], xyz[2], space[0], space[1], space[2], space[3]
    (ux, uy, uz), (vx, vy, vz), (wx, wy, wz) = to[0], to[1], to[2]  # plain numbers: nothing below can write to them
    (ax, ay, az), (bx, by, bz), (cx, cy, cz) = box[0], box[1], box[2]
    least, m, x0, y0, z0 = np.inf, 0, xs[a], ys[a], zs[a]
    for b in range(len(place)):
        x, y, z = xs[b] - x0, ys[b] - y0, zs[b] - z0
        sa = -np.floor(x * ux + y * vx + z * wx + 0.5)  # 0 along what is not periodic
        sb = -np.floor(x * uy + y * vy + z * wy + 0.5)
        sc = -np.floor(x * uz + y * vz + z * wz + 0.5)
        x, y, z = (
            x + (sa * ax + sb * bx + sc * cx),
            y + (sa * ay + sb * by + sc * cy),
            z + (sa * az + sb * bz + sc * cz),
        )
        rx[b], ry[b], rz[b], square[b] = x, y, z, x * x + y * y + z * z
    square[a] = np.inf
    for b in range(len(place)):
        near[m] = b  # overwritten by the next one unless m goes on: a branch would be guessed wrong too often
        m += square[b] < rcut * rcut
    for b in near[:m]:
        if n < len(j):
            j[n], r[n, 0], r[n, 1], r[n, 2] = place[b], rx[b], ry[b], rz[b]
        n += 1
        count[kind[b]] += 1
        least = min(least, square[b])
    return n, least
