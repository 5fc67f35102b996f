"""Nets that are trained, as compiled loops: the same as in tensor operations (scalar_net.py)."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import njit

from allforce.models.layers import Net
from allforce.models.plain_products import add_plain_product, times_transposed
from allforce.models.scalar_net import value_and_gradient
from allforce.models.scalar_sweeps import plan, suits

CLOSE = {torch.float64: 1e-13, torch.float32: 1e-4}  # of the largest number of a result, or of 1


def nets_of(size_in, neuron, resnet_dt, dtype, number, activation="tanh"):
    return [Net(size_in, neuron, activation, resnet_dt, dtype, np.random.default_rng(n), 1) for n in range(number)]


def all_results(nets, counts, dtype, wanted=True):
    """e, ∂e/∂x, x̄ and the gradients of all parameters."""
    rng = torch.Generator().manual_seed(0)
    size = nets[0].layers[0].w.shape[0]
    x, v = torch.randn(2, sum(counts), size, generator=rng, dtype=torch.float64).to(dtype)
    e_bar = torch.randn(sum(counts), generator=rng, dtype=torch.float64).to(dtype)
    x.requires_grad_(wanted)
    e, gradient = value_and_gradient(nets, counts, x)
    parameters = [p for net in nets for p in net.parameters()]
    found = torch.autograd.grad((e * e_bar).sum() + (gradient * v).sum(), [x, *parameters][1 - wanted :])
    return [e.detach(), gradient.detach(), *found]


def assert_close(found, expected, dtype):
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and x.dtype == dtype
        assert not y.numel() or (x - y).abs().max() <= CLOSE[dtype] * max(1.0, float(y.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("resnet_dt", [True, False])
@pytest.mark.parametrize("neuron", [[7], [16, 32, 20, 20], [100, 33]])
@pytest.mark.parametrize("size_in", [32, 17, 160])
@pytest.mark.parametrize("counts", [[20, 8, 33], [0, 3, 70], [1], [140, 0]])
def test_loops_and_tensor_operations_agree(size_in, neuron, resnet_dt, counts, dtype, monkeypatch):
    """Skip connections of both kinds and none, widths that fill no register, types without atoms, several tiles."""
    nets = nets_of(size_in, neuron, resnet_dt, dtype, len(counts))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = all_results(nets, counts, dtype)
        torch.set_num_threads(2)
        monkeypatch.setattr("allforce.models.pool.ENOUGH", 0)
        together = all_results(nets, counts, dtype)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(alone, together, strict=True))
    monkeypatch.setenv("ALLFORCE_KERNELS", "torch")
    assert_close(alone, all_results(nets, counts, dtype), dtype)


def test_the_gradient_of_x_is_left_out_where_nobody_asks_for_it(monkeypatch):
    nets = nets_of(12, [8, 8], True, torch.float64, 2)
    found = all_results(nets, [3, 4], torch.float64, wanted=False)
    monkeypatch.setenv("ALLFORCE_KERNELS", "torch")
    assert_close(found, all_results(nets, [3, 4], torch.float64, wanted=False), torch.float64)


@pytest.mark.parametrize(("neuron", "activation", "rows"), [([], "tanh", 3), ([4], "gelu", 3), ([4], "tanh", 0)])
def test_other_nets_are_left_to_tensor_operations(neuron, activation, rows):
    nets = nets_of(5, neuron, True, torch.float64, 1, activation)
    assert not suits(nets, torch.ones(rows, 5, dtype=torch.float64))
    assert all(torch.isfinite(y).all() for y in all_results(nets, [rows], torch.float64))


def test_a_row_does_not_depend_on_the_others():
    nets = nets_of(24, [16, 16], True, torch.float32, 1)
    x = torch.randn(150, 24, generator=torch.Generator().manual_seed(0))
    e, gradient = value_and_gradient(nets, [150], x)
    for n in (1, 5, 23, 64, 70):
        assert torch.equal(value_and_gradient(nets, [n], x[:n])[0], e[:n])
        assert torch.equal(value_and_gradient(nets, [n], x[:n])[1], gradient[:n])


@pytest.mark.parametrize("counts", [(5,), (0, 64, 65), (129, 3, 0)])
def test_every_piece_of_every_net_is_somebodys(counts):
    shape = ((70, 100, 0), (100, 100, 1), (100, 1, 0))
    p = plan(counts, shape, np.dtype(np.float32))
    kinds = np.repeat(np.arange(len(counts)), counts)
    assert [row for a, b, *_ in p.tiles for row in range(a, b)] == list(range(sum(counts)))
    assert all((kinds[a:b] == net).all() for a, b, net, *_ in p.tiles)
    for layer, (size_in, size_out, _) in enumerate(shape):
        there, back = (t[p.ends[k, layer] : p.ends[k, layer + 1]] for k, t in enumerate((p.there, p.back)))
        assert sorted((n, r) for n, a, b in back for r in range(a, b)) == [
            (n, r) for n in range(len(counts)) for r in range(size_in)
        ]
        if layer < 2:
            assert sorted((k, c) for k, a, b in there for c in range(a, b)) == [
                (k, c) for k in range(len(p.tiles)) for c in range(size_out)
            ]


@njit
def plain(x, W, first, last, y):
    add_plain_product(x, W, first, last, y)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("n", [1, 4, 5, 8, 21, 50])
@pytest.mark.parametrize("columns", [(0, 48), (16, 21), (0, 101), (48, 80)])
def test_product_with_a_matrix_as_it_lies(columns, n, dtype):
    rng, (first, last) = np.random.default_rng(n), columns
    x, W = rng.normal(size=(n, 300)).astype(dtype), rng.normal(size=(300, max(last, 101 if last > 90 else last)))
    W = W.astype(dtype)
    y = np.ones((n, 112), dtype)
    plain(x, W, first, last, y)
    expected = 1 + x.astype(np.float64) @ W[:, first:last].astype(np.float64)
    np.testing.assert_allclose(y[:, : last - first], expected, rtol=0, atol=3e3 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 20, 33, 64])
@pytest.mark.parametrize("rows", [8, 13, 40])
def test_product_with_a_transposed_matrix_as_it_lies(rows, n, dtype):
    rng = np.random.default_rng(n)
    x, W = np.full((30, -(-n // 8) * 8), np.nan, dtype), rng.normal(size=(rows, 30)).astype(dtype)
    x[:, :n] = rng.normal(size=(30, n))
    whole = np.zeros((n + 1, 48), dtype)
    times_transposed(x, W, 0, rows, whole[:n])
    np.testing.assert_allclose(whole[:n, :rows], x[:, :n].T @ W.T, rtol=0, atol=300 * np.finfo(dtype).eps)
    assert not whole[n].any()


GUARDED = """
import ctypes, sys
import numpy as np
from allforce.models.plain_products import times_transposed

libc, page = ctypes.CDLL(None), 4096
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def before_a_closed_page(shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    pages = -(-size // page)
    base = libc.mmap(None, (pages + 1) * page, 3, 0x22, -1, 0)  # read and write; private, of no file
    assert libc.mprotect(ctypes.c_void_p(base + pages * page), page, 0) == 0
    numbers = (ctypes.c_char * size).from_address(base + pages * page - size)
    return np.frombuffer(numbers, dtype).reshape(shape)


for dtype in (np.float32, np.float64):
    for rows in range(1, 70):
        x, y = before_a_closed_page((24, -(-rows // 8) * 8), dtype), np.zeros((rows, 16), dtype)
        x[...] = 1
        times_transposed(x, np.ones((16, 24), dtype), 0, 16, y)
        assert (y == 24).all()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is closed by Linux's calls")
def test_nothing_is_read_behind_an_array():
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"ended with {done.returncode}"
