"""Nets and tables that are not trained: the compiled passes over tiles give what the trained ones give."""

import numpy as np
import pytest
import torch
from numba import njit

from allforce.models.frozen_nets import FrozenNets, frozen
from allforce.models.layers import Net
from allforce.models.products import (
    add_listed,
    add_product,
    add_transposed_product,
    packed,
    tiles_of,
    times_listed,
    whole_strips,
)
from allforce.models.scalar_net import value_and_gradient

CLOSE = {torch.float64: 1e-14, torch.float32: 5e-6}


@njit
def product(x, begin, end, w, m, columns, y):
    add_product(x, begin, end, w, m, columns, y)


@njit
def listed(x, rows, count, W, y):
    add_listed(x, rows, count, W, y)


@njit
def listed_back(x, rows, count, W, y):
    times_listed(x, rows, count, W, y)


@njit
def transposed(x, z, y):
    add_transposed_product(x, z, y)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 16), (8, 7, 24), (9, 300, 49), (17, 33, 150)])
def test_products(shape, dtype):
    n, m, columns = shape
    rng = np.random.default_rng(0)
    x, W = rng.normal(size=(n, m)).astype(dtype), rng.normal(size=(m, columns)).astype(dtype)
    for begin, end in ((0, m), (m // 3, m // 3 + 1)):
        y = np.ones((n, whole_strips(columns, x.dtype)), dtype)
        product(x, begin, end, packed(W), m, columns, y)
        np.testing.assert_allclose(
            y[:, :columns], 1 + x[:, begin:end] @ W[begin:end], rtol=0, atol=50 * m * np.finfo(dtype).eps
        )
        np.testing.assert_array_equal(y[:, columns:], 1)
    z = np.full((n + 1, columns), np.nan, dtype)  # what stands behind is read, but must not matter
    z[:n] = rng.normal(size=(n, columns))
    y = np.ones((m, whole_strips(columns, x.dtype)), dtype)
    transposed(x, z[:n], y)
    np.testing.assert_allclose(y[:, :columns], 1 + x.T @ z[:n], rtol=0, atol=50 * n * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("columns", [1, 16, 100])
def test_products_with_listed_rows(columns, count, dtype):
    rng = np.random.default_rng(0)
    W = np.zeros((60, whole_strips(columns, np.dtype(dtype))), dtype)
    W[:, :columns] = rng.normal(size=(60, columns))
    rows, x = rng.permutation(60)[:50], rng.normal(size=(4, 50)).astype(dtype)
    y = np.ones((4, W.shape[1]), dtype)
    listed(x, rows, count, W, y)
    close = {"rtol": 0, "atol": 1000 * np.finfo(dtype).eps}
    np.testing.assert_allclose(y, 1 + x[:, :count] @ W[rows[:count]], **close)
    back = np.full((4, 60), 7.0, dtype)
    listed_back(y, rows, count, W, back)
    np.testing.assert_allclose(back[:, rows[:count]], y @ W[rows[:count]].T, **close)
    np.testing.assert_array_equal(np.delete(back, rows[:count], axis=1), 7.0)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("counts", [(0,), (1, 0, 3), (64, 128), (513, 2, 1024)])
def test_tiles_cover_all_rows(counts, threads):
    tiles = tiles_of(counts, threads)
    kinds = np.repeat(np.arange(len(counts)), counts)
    seen = [row for first, last, kind in tiles for row in range(first, last) if kinds[row] == kind]
    assert seen == list(range(sum(counts))) and ((tiles[:, 1] - tiles[:, 0] <= 64) & (tiles[:, 1] > tiles[:, 0])).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("neuron", [[5], [10, 20, 20, 13], [33, 66]])
@pytest.mark.parametrize("resnet_dt", [True, False])
def test_nets(neuron, resnet_dt, dtype):
    """Values and gradients of two nets, with skip connections of both kinds, on several threads."""
    nets = [
        Net(37, neuron, "tanh", resnet_dt, dtype, np.random.default_rng(n), 1).requires_grad_(False) for n in (0, 1)
    ]
    x, counts = torch.randn(800, 37, dtype=dtype, generator=torch.Generator().manual_seed(0)), [13, 787]
    expected = value_and_gradient(nets, counts, x)
    with torch.no_grad():
        fast = frozen(nets, counts, x, None)
    assert isinstance(fast, FrozenNets)
    for found, right in zip(fast(x, counts), expected, strict=True):
        assert found.dtype == dtype and found.shape == right.shape
        assert (found - right).abs().max() <= CLOSE[dtype] * right.abs().max()


def test_nets_are_packed_anew_when_they_change():
    net = Net(4, [8], "tanh", True, torch.float64, np.random.default_rng(0), 1)
    x = torch.rand(3, 4, dtype=torch.float64)
    with torch.no_grad():
        assert frozen([net], [3], x, None) is None  # could be trained
    net.requires_grad_(False)
    assert frozen([net], [3], x, None) is None  # in grad mode
    with torch.no_grad():
        kept = frozen([net], [3], x, None)
        assert kept is not None and frozen([net], [3], x, kept) is kept
        net.layers[0].w *= 2
        new = frozen([net], [3], x, kept)
        assert new is not None and new is not kept
        torch.testing.assert_close(new(x, [3])[0], net(x)[:, 0], rtol=1e-14, atol=1e-14)
        other = Net(4, [8], "gelu", True, torch.float64, np.random.default_rng(0), 1).requires_grad_(False)
        assert frozen([other], [3], x, None) is None


def test_only_nets_of_types_that_are_there_are_packed():
    nets = [
        Net(4, [8], "tanh", True, torch.float64, np.random.default_rng(n), 1).requires_grad_(False) for n in range(4)
    ]
    x = torch.rand(7, 4, dtype=torch.float64)
    with torch.no_grad():
        kept = None
        for counts, types in (([0, 3, 0, 4], [1, 3]), ([0, 7, 0, 0], [1, 3]), ([5, 0, 0, 2], [0, 1, 3])):
            kept = frozen(nets, counts, x, kept)
            assert kept is not None and kept.types == types and len(kept.weights) == len(types)
            torch.testing.assert_close(kept(x, counts), value_and_gradient(nets, counts, x), rtol=1e-13, atol=1e-14)
        assert frozen(nets, [0, 0, 0, 0], x[:0], None) is None


def test_numbers_that_are_not_finite_are_not_hidden():
    net = Net(4, [8, 8], "tanh", True, torch.float64, np.random.default_rng(0), 1).requires_grad_(False)
    x = torch.rand(3, 4, dtype=torch.float64)
    x[1, 2] = torch.nan
    with torch.no_grad():
        fast = frozen([net], [3], x, None)
        assert fast is not None
        e, gradient = fast(x, [3])
    assert torch.isnan(e).tolist() == [False, True, False] and torch.isnan(gradient).any(1).tolist() == [
        False,
        True,
        False,
    ]
