"""Neighbour lists against ASE's, an independent code, over a grid of cells."""

import ase.neighborlist
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk

from allforce import all_pairs
from allforce.errors import UserError
from allforce.neighbors import check_distances, crowding, limit_neighbors, neighbor_counts, neighbor_list

CELLS = {
    "cubic": np.eye(3) * 7.0,
    "small": np.diag([2.1, 2.4, 2.0]),  # many images
    "flat": np.diag([2.0, 9.0, 15.0]),
    "triclinic": np.array([[5.0, 0.0, 0.0], [2.3, 4.1, 0.0], [-1.9, 1.2, 3.7]]),
    "skewed": np.array([[3.0, 0.0, 0.0], [8.0, 3.0, 0.0], [-7.0, 5.0, 3.0]]),
    "left-handed": np.array([[0.0, 4.5, 0.3], [5.0, 0.1, 0.0], [0.2, 0.4, 4.0]]),
    "none": None,
}


def table(i, j, r):
    """Edges as rows in one fixed order."""
    rows = np.column_stack([i, j, np.round(r, 6) + 0.0])
    return rows[np.lexsort(rows.T[::-1])]


@pytest.mark.parametrize("rcut", [1.5, 4.2])
@pytest.mark.parametrize("natoms", [1, 2, 9])
@pytest.mark.parametrize("name", CELLS)
def test_same_as_ase(name, natoms, rcut):
    cell = CELLS[name]
    rng = np.random.default_rng(natoms)
    coord = rng.random((natoms, 3)) @ (np.eye(3) * 5 if cell is None else cell)
    i, j, r = neighbor_list(coord, cell, rcut)
    atoms = Atoms(f"H{natoms}", coord, cell=cell, pbc=cell is not None)
    expected = ase.neighborlist.neighbor_list("ijD", atoms, rcut)
    np.testing.assert_allclose(table(i, j, r), table(*expected), atol=2e-6)
    assert (np.diff(i) >= 0).all()
    assert i.dtype == j.dtype == np.int32


@pytest.mark.parametrize("name", [n for n in CELLS if n != "none"])
def test_images_of_atoms_do_not_matter(name):
    cell = CELLS[name]
    rng = np.random.default_rng(3)
    coord = rng.random((6, 3)) @ cell
    far = coord + rng.integers(-40, 40, (6, 3)) @ cell
    near_edges, far_edges = neighbor_list(coord, cell, 3.3), neighbor_list(far, cell, 3.3)
    assert len(near_edges[0]) > 0
    np.testing.assert_allclose(table(*near_edges), table(*far_edges), atol=2e-6)


@pytest.mark.parametrize("periodic", [None, (True, True, False), (False, True, False)])
@pytest.mark.parametrize("natoms", [1, 30, 150])
@pytest.mark.parametrize("size", [1.0, 2.0])
def test_few_atoms_have_the_pairs_of_many(natoms, periodic, size, monkeypatch):
    """All pairs tried (with all images, or with the nearest in a large cell), and atoms sorted into cells by vesin,
    also far outside of a cell that leans."""
    rng = np.random.default_rng(5)
    cell = np.array([[7.0, 0.5, -3.0], [2.5, 8.0, 1.0], [-4.0, 3.0, 9.0]]) * size
    coord = rng.random((natoms, 3)) @ cell + (rng.integers(-30, 30, (natoms, 3)) @ cell if periodic is None else 0.0)
    few = table(*neighbor_list(coord, cell, 5.0, periodic=periodic))
    monkeypatch.setattr("allforce.neighbors.FEW", 0)
    many = table(*neighbor_list(coord, cell, 5.0, periodic=periodic))
    assert len(few) >= (natoms > 1) * natoms / size**3 and np.array_equal(few[:, :2], many[:, :2])
    np.testing.assert_allclose(few, many, atol=2e-6)


def test_nearest_images_give_the_bits_of_all_images():
    """Whether a frame's box is large enough for the nearest images must not be seen in its edges."""
    rng = np.random.default_rng(7)
    cell = np.array([[14.0, 0.5, -3.0], [2.5, 16.0, 1.0], [-4.0, 3.0, 18.0]])
    coord = rng.random((120, 3)) @ cell + rng.integers(-3, 3, (120, 3)) @ cell
    xyz, to, reach = coord.T.copy(), np.zeros((3, 3)), np.zeros(3)
    all_pairs.to_fractions(xyz, cell, np.ones(3, dtype=bool), 5.0, to, reach)
    np.testing.assert_allclose(to, np.linalg.inv(cell), atol=1e-14)
    assert (reach < 0.5).all()
    place, kind = np.arange(120), np.zeros(120, np.int64)
    j, r = np.empty(20_000, np.int32), np.empty((20_000, 3))
    n = 0
    for a in range(120):
        n, _ = all_pairs.all_images(xyz, a, cell, to, reach, 5.0, place, kind, n, j, r, np.zeros(1, np.int64))
    _, nearest_j, nearest_r = neighbor_list(coord, cell, 5.0)
    assert n > 1000 and np.array_equal(nearest_j, j[:n]) and np.array_equal(nearest_r, r[:n])


def test_more_pairs_than_expected():
    """Atoms in a heap in a large cell have more neighbours than their density says."""
    coord = np.random.default_rng(6).random((60, 3)) * 2 + 1
    i, j, r = neighbor_list(coord, np.eye(3) * 50, 6.0)
    assert len(i) == 60 * 59 and (np.diff(i) >= 0).all() and r.flags.owndata
    np.testing.assert_allclose(r, coord[j] - coord[i])


def test_edge_vector_is_neighbour_minus_centre():
    i, j, r = neighbor_list(np.array([[0.5, 0, 0], [9.8, 0, 0]]), np.eye(3) * 10, 2.0)
    assert i.tolist() == [0, 1] and j.tolist() == [1, 0]
    np.testing.assert_allclose(r, [[-0.7, 0, 0], [0.7, 0, 0]], atol=1e-12)


def test_one_atom_without_cell_and_no_atom():
    for coord in (np.zeros((1, 3)), np.zeros((0, 3))):
        i, j, r = neighbor_list(coord, None, 5.0)
        assert len(i) == len(j) == 0 and r.shape == (0, 3)


def test_results_do_not_share_memory_with_the_calculator():
    coord = np.array([[0.0, 0, 0], [1.0, 0, 0]])
    first = neighbor_list(coord, None, 2.0)
    neighbor_list(coord * 1.5, None, 2.0)
    np.testing.assert_allclose(first[2], [[1, 0, 0], [-1, 0, 0]])


def test_cell_without_volume():
    with pytest.raises(UserError, match="no volume"):
        neighbor_list(np.zeros((1, 3)), np.diag([1.0, 1.0, 0.0]), 3.0)


def test_atoms_on_one_place():
    coord = np.array([[0.0, 0, 0], [5.0, 5, 5], [9.9999, 0, 0]])
    edges = neighbor_list(coord, np.eye(3) * 10, 3.0)
    with pytest.raises(UserError, match="box, frame 7: atoms 12 and 10 .*1.0e-04 Å"):
        check_distances(*edges, "box, frame 7", order=np.array([12, 11, 10]))
    assert check_distances(*neighbor_list(coord[:2], None, 9.0), "") == pytest.approx(75**0.5)


@pytest.mark.parametrize("rcut", [1.5, 4.2])
@pytest.mark.parametrize("natoms", [1, 2, 9, 40])
@pytest.mark.parametrize("name", CELLS)
def test_crowding_is_that_of_the_full_list(name, natoms, rcut):
    """To the last bit, also where atoms see their own images: what a run tells of its data is written to models."""
    rng = np.random.default_rng(natoms)
    coord, types = rng.uniform(-3, 9, (natoms, 3)), rng.integers(0, 3, natoms)
    i, j, r = neighbor_list(coord, CELLS[name], rcut)
    most = neighbor_counts(i, j, types, natoms, 3).max(axis=0)
    nearest, found = crowding(coord, CELLS[name], rcut, types, 3, "")
    assert nearest == check_distances(i, j, r, "") and found.tolist() == most.tolist()


def test_crowding_of_atoms_on_one_place_and_of_none():
    coord, types = np.array([[1.0, 1, 1], [4, 4, 4], [4, 4, 4]]), np.zeros(3, dtype=int)
    with pytest.raises(UserError, match="box, frame 7: atoms 11 and 10"):
        crowding(coord, None, 2.0, types, 1, "box, frame 7", order=np.array([12, 11, 10]))
    nearest, most = crowding(coord[:0], None, 2.0, types[:0], 2, "")
    assert nearest == np.inf and most.tolist() == [0, 0]


def test_sel_keeps_the_nearest_of_each_type():
    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    atoms.rattle(0.1, seed=1)
    type = (atoms.numbers == 17).astype(np.int64)
    i, j, r = neighbor_list(atoms.positions, atoms.cell.array, 6.0)
    sel = [7, 5]
    ki, kj, kr, dropped = limit_neighbors(i, j, r, type, sel)
    assert dropped == len(i) - len(ki) == len(i) - 8 * 12
    for a in range(len(atoms)):
        for t in range(2):
            of_all = np.sort(np.linalg.norm(r[(i == a) & (type[j] == t)], axis=1))
            kept = np.linalg.norm(kr[(ki == a) & (type[kj] == t)], axis=1)
            np.testing.assert_array_equal(np.sort(kept), of_all[: sel[t]])
    assert (np.diff(ki) >= 0).all()


def test_sel_large_enough_changes_nothing():
    i, j, r = neighbor_list(np.random.default_rng(0).random((5, 3)), np.eye(3) * 3, 3.0)
    ki, kj, kr, dropped = limit_neighbors(i, j, r, np.array([0, 1, 1, 0, 2]), [500, 500, 500])
    assert dropped == 0 and ki is i and kj is j and kr is r
