"""Embedding nets on their table as compiled loops: the same as in tensor operations (table.py)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from allforce.models import curves
from allforce.models.se_e2_a import EmbeddingNets
from allforce.models.spline import WIDTH, Grid
from allforce.models.table import SplineTable

# Of the largest number of a result. M has a condition of 3,000 to 6,000, so C has some 1e-12 and 1e-3 of rounding; in
# what the splines give it is gone.
CLOSE = {torch.float64: 2e-11, torch.float32: 5e-3}


def nets_and_table(neuron, resnet_dt, dtype, count, K, activation="tanh"):
    config = SimpleNamespace(activation_function=activation, resnet_dt=resnet_dt, neuron=neuron, seed=3)
    nets, table = EmbeddingNets(config, count, dtype), SplineTable(dtype)
    table.set_grid(Grid(-0.8, 3.1, K))
    return nets, table


def with_gradients(nets, table):
    """C (K, nets, M) and the gradients of all parameters for some C̄."""
    C = table.coefficients(nets)
    weight = torch.randn(C.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(C.dtype)
    return [C.detach(), *torch.autograd.grad((C * weight).sum(), list(nets.parameters()))]


@pytest.mark.parametrize("K", [9, 64, 101])
def test_factors_are_those_of_the_collocation_matrix(K):
    grid = Grid(-0.8, 3.1, K)
    M = np.zeros((K, K))
    row, column, value = grid.collocation()
    M[row, column] = value
    for transposed in (False, True):
        rows, side = grid.factors(np.dtype("float64"), transposed), WIDTH - 1
        L, D, U = np.eye(K), np.diag(1.0 / rows[:, side]), np.eye(K)
        for n in range(K):
            for m in range(1, side + 1):
                if n - m >= 0:
                    L[n, n - m] = rows[n, side - m]
                if n + m < K:
                    U[n, n + m] = rows[n, side + m]
        np.testing.assert_allclose(L @ D @ U, M.T if transposed else M, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("resnet_dt", [True, False])
@pytest.mark.parametrize("neuron", [[25, 50, 100], [16, 16], [7], [20, 33, 20]])
@pytest.mark.parametrize(("count", "K"), [(1, 9), (3, 64), (4, 101)])
def test_loops_and_tensor_operations_agree(neuron, resnet_dt, count, K, dtype, monkeypatch):
    """Skip connections of both kinds and none, widths that fill no register, one thread and two."""
    nets, table = nets_and_table(neuron, resnet_dt, dtype, count, K)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = with_gradients(nets, table)
        torch.set_num_threads(2)
        monkeypatch.setattr("allforce.models.pool.ENOUGH", 0)
        together = with_gradients(nets, table)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(alone, together, strict=True))
    monkeypatch.setenv("ALLFORCE_KERNELS", "torch")
    for x, y in zip(alone, with_gradients(nets, table), strict=True):
        assert x.shape == y.shape and x.dtype == dtype
        assert (x - y).abs().max() <= CLOSE[dtype] * y.abs().max()


def test_splines_of_float32_go_through_the_nets():
    nets, table = nets_and_table([25, 50, 100], False, torch.float32, 2, 264)
    exact, _ = nets_and_table([25, 50, 100], False, torch.float64, 2, 264)
    x = torch.linspace(-0.79, 3.09, 1001, dtype=torch.float64)
    found, _ = table.grid.interpolate(table.coefficients(nets).detach().flatten(1).double(), x)
    expected = exact(x[:, None]).detach().flatten(1)
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_other_activations_go_by_tensor_operations():
    nets, table = nets_and_table([8, 16], False, torch.float64, 2, 20, "gelu")
    assert not curves.suits(nets, table.nodes)
    assert with_gradients(nets, table)[0].shape == (20, 2, 16)
