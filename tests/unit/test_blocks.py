"""Blocks of a frame: every atom and every pair is in exactly one, and they cost alike."""

import numpy as np
import pytest

from allforce.data.blocks import pairs_of_block, part_of
from allforce.neighbors import neighbor_list

CELLS = {
    "none": None,
    "box": np.diag([9.0, 14.0, 11.0]),
    "triclinic": np.array([[8.0, 0.0, 0.0], [3.0, 7.0, 0.0], [-2.0, 1.5, 9.0]]),
    "left-handed and thin": np.array([[0.0, 2.8, 0.0], [12.0, 0.3, 0.0], [0.0, 0.0, 6.0]]),
}


def atoms(cell: np.ndarray | None, n: int, seed: int) -> np.ndarray:
    """In the cell and far outside of it."""
    return np.random.default_rng(seed).uniform(-2, 3, (n, 3)) @ (np.eye(3) * 5 if cell is None else cell)


def in_order(i: np.ndarray, j: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, ...]:
    order = np.lexsort((*r.round(7).T, j, i))
    return i[order], j[order], r[order]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_every_pair_once(cell, n, parts):
    x, box = atoms(CELLS[cell], n, n), CELLS[cell]
    for rcut in (1.5, 6.5):
        expected = in_order(*neighbor_list(x, box, rcut))
        blocks = [pairs_of_block(x, box, rcut, k, parts, 1, "here") for k in range(parts)]
        assert np.array_equal(np.sort(np.concatenate([own for own, _, _ in blocks])), np.arange(n))
        found = in_order(*(np.concatenate([pairs[k] for _, _, pairs in blocks]) for k in range(3)))
        assert np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])
        np.testing.assert_allclose(found[2], expected[2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS)
def test_deep_halo(cell):
    """With depth d, all atoms up to d − 1 edges away from the block have their edges, and nobody has some of them."""
    x, box, rcut = atoms(CELLS[cell], 40, 5), CELLS[cell], 2.0
    i, j, _ = neighbor_list(x, box, rcut)
    degree = np.bincount(i, minlength=40)
    for number in range(4):
        own, centers, pairs = pairs_of_block(x, box, rcut, number, 4, 3, "here")
        near = own
        for _ in range(2):
            near = np.union1d(near, j[np.isin(i, near)])
        found = np.bincount(pairs[0], minlength=40)
        assert np.array_equal(found[near], degree[near])
        assert ((found == degree) | (found == 0)).all()
        assert np.isin(pairs[1], centers).all()
        part = part_of(own, centers, pairs, 40)
        assert part.own is None or part.own.sum() == len(own)


def test_blocks_cost_alike():
    """A drop in a large cell: pairs are balanced, not volume; and a block sees little more than itself."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(0, 20, (3000, 3)), rng.uniform(0, 80, (300, 3))])
    blocks = [pairs_of_block(x, np.eye(3) * 80, 4.0, k, 4, 1, "here") for k in range(4)]
    count = np.array([len(pairs[0]) for _, _, pairs in blocks])
    assert count.max() < 1.1 * count.mean()
    seen = [len(part_of(own, centers, pairs, len(x)).atoms) for own, centers, pairs in blocks]
    assert max(seen) < 0.75 * len(x)
