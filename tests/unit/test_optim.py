"""The optimizers: their updates, their state, their sections of the input."""

from typing import get_args

import pytest
import torch
from torch import nn

from allforce.config.schema import Input
from allforce.config.section import sections
from allforce.distributed.comm import SerialComm
from allforce.optim import OPTIMIZERS, muon
from allforce.optim.adam import AdamConfig, AdamWConfig
from allforce.train.flat import FlatParameters


def make(config, *parameters, comm=None):
    """The optimizer of a model that has these parameters."""
    flat = FlatParameters(nn.ParameterList([p.clone() for p in parameters]), 0)
    return OPTIMIZERS[config.type](flat, config, comm)


def step(optimizer, rate, *gradients):
    torch._foreach_copy_(list(optimizer.parameters.gradient_views.values()), list(gradients))
    optimizer.step(rate)


def test_every_optimizer_is_in_the_schema_by_its_name():
    in_schema = sections(Input.model_fields["optimizer"].annotation)
    assert in_schema == tuple(cls.Config for cls in OPTIMIZERS.values())
    assert [get_args(c.model_fields["type"].annotation)[0] for c in in_schema] == list(OPTIMIZERS)


@pytest.mark.parametrize("config", [AdamConfig(weight_decay=0.1), AdamWConfig(adam_beta1=0.8, weight_decay=0.1)])
def test_adam_is_torchs(config):
    p = torch.linspace(-1, 1, 7, dtype=torch.float64)
    adam, theirs = make(config, p), nn.Parameter(p.clone())
    cls = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[config.type]
    reference = cls([theirs], betas=(config.adam_beta1, config.adam_beta2), weight_decay=0.1)
    for k in range(5):
        g = torch.sin(torch.arange(7, dtype=torch.float64) + k)
        theirs.grad = g.clone()
        reference.param_groups[0]["lr"] = 0.01 * (k + 1)
        reference.step()
        step(adam, 0.01 * (k + 1), g)
    assert torch.allclose(adam.parameters.flat[0], theirs.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_complete(name):
    """Another optimizer that is given tensors and numbers goes on exactly alike."""
    shapes, config = [(6, 4), (4,), (4, 4), (300, 80)], OPTIMIZERS[name].Config()
    torch.manual_seed(0)
    first = make(config, *(torch.randn(s) for s in shapes))
    gradients = [[torch.randn(s) for s in shapes] for _ in range(6)]
    for g in gradients[:3]:
        step(first, 0.01, *g)
    second = make(config, *first.parameters.split(first.parameters.flat).values())
    second.load(first.tensors())
    second.set_numbers(first.numbers())
    for g in gradients[3:]:
        step(first, 0.01, *g)
        step(second, 0.01, *g)
    assert torch.equal(first.parameters.flat[0], second.parameters.flat[0])


# ---- HybridMuon


def spectrum(*shape, small=1e-3, seed=0):
    """Matrices whose singular values fall from 1 to `small`."""
    torch.manual_seed(seed)
    U, _, Vh = torch.linalg.svd(torch.randn(*shape, dtype=torch.float64), full_matrices=False)
    return (U * torch.logspace(0, torch.log10(torch.tensor(small)).item(), U.shape[-1])) @ Vh


def pushed(s):
    """What the iteration makes of singular values between 0 and 1."""
    for coefficients in muon.COEFFICIENTS:
        s = sum(c * s ** (2 * k + 1) for k, c in enumerate(coefficients))
    return s


def test_coefficients_do_what_their_constants_say():
    s = torch.logspace(torch.log10(torch.tensor(muon.FLOOR)).item(), 0, 100_000, dtype=torch.float64)
    assert muon.SPREAD - 0.005 < (pushed(s) - 1).abs().max() < muon.SPREAD + 0.005
    below = torch.linspace(0, muon.FLOOR, 1000, dtype=torch.float64)
    assert (pushed(below).diff() > 0).all()


@pytest.mark.parametrize("shape", [(3, 96, 24), (2, 24, 96), (1, 30, 30)])
def test_direction_has_the_singular_vectors_of_the_momentum(shape):
    """Against a dense SVD in float64: the same vectors, singular values pushed to 1 within SPREAD."""
    X = spectrum(*shape, small=2 * muon.FLOOR)
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    bound = (s**8).sum(-1, keepdim=True) ** 0.125 * muon.ROUNDING**0.5
    exact = (U * pushed(s / bound).unsqueeze(-2)) @ Vh
    x = X.float()
    root = muon.inverse_root(x.mT @ x if shape[1] >= shape[2] else x @ x.mT)
    ours = (x @ root if shape[1] >= shape[2] else root @ x).double()
    assert (ours - exact).abs().max() < 1e-7 / (2 * (2 * muon.FLOOR) ** 2)  # Gram matrix in float32: s δ(s⁻¹)
    assert torch.linalg.matrix_norm(ours - U @ Vh, 2).max() < muon.SPREAD


def test_zero_gradient_moves_nothing():
    assert (torch.zeros(1, 4, 3) @ muon.inverse_root(torch.zeros(1, 3, 3)) == 0).all()
    assert muon.orthonormal(torch.zeros(1, 40, 8)).isfinite().all()


def test_rank_is_a_multiple_of_a_register():
    with pytest.raises(ValueError, match="found 12; expected a multiple of 8"):
        muon.HybridMuonConfig(rank=12)


def direction(X, rank):
    """−ΔX of one step along the gradient X, in units of the rate."""
    optimizer = make(muon.HybridMuonConfig(weight_decay=0.0, lr_adjust=1.0, rank=rank), torch.zeros_like(X))
    step(optimizer, 1.0, X)
    return -optimizer.parameters.flat[0].view_as(X) / max(1.0, X.shape[0] / X.shape[1]) ** 0.5


@pytest.mark.parametrize("shape", [(160, 60), (60, 160), (60, 60)])
def test_the_largest_directions_of_a_matrix_are_enough(shape):
    """Cut to 24 directions: those far above what was left out have a singular value of 1 within SPREAD, no other is
    turned into them, and nothing is longer than that."""
    U, _, Vh = torch.linalg.svd(torch.randn(*shape, dtype=torch.float64), full_matrices=False)
    s = torch.logspace(0, -12, U.shape[-1], dtype=torch.float64)  # 13 of 60 are above 0.002
    cut = U.T @ direction((U * s) @ Vh, rank=24) @ Vh.T
    assert (cut[:13, :13] - torch.eye(13)).abs().max() < muon.SPREAD + 0.01
    assert (cut - cut.diag().diag())[:13].abs().max() < 0.02
    assert torch.linalg.matrix_norm(cut, 2) < 1 + muon.SPREAD + 0.01


def test_few_directions_are_orthonormal_and_found_without_full_rank():
    torch.manual_seed(5)
    P = muon.orthonormal(spectrum(3, 200, 40, small=1e-4).float()).double()
    assert (P.mT @ P - torch.eye(40)).abs().max() < 1e-4
    P = muon.orthonormal(spectrum(3, 200, 40, small=1e-9).float()).double()
    assert torch.linalg.matrix_norm(P, 2).max() < 1 + 1e-5  # directions of rounding errors are shorter, never longer
    low = torch.randn(90, 3, dtype=torch.float64) @ torch.randn(3, 70, dtype=torch.float64)
    U, _, Vh = torch.linalg.svd(low, full_matrices=False)
    assert torch.linalg.matrix_norm(direction(low, 16) - U[:, :3] @ Vh[:3], 2) < muon.SPREAD


def test_a_matrix_without_gradient_waits():
    """The net of a type that a batch has not: as if the step had not been."""
    torch.manual_seed(4)
    p, config = torch.randn(2, 6, 4), muon.HybridMuonConfig(weight_decay=0.0)
    both, alone = make(config, *p), make(config, p[1])
    for k in range(6):
        g, present = torch.randn(2, 6, 4), k % 3 == 0
        step(both, 0.01, g[0], g[1] * present)
        if present:
            step(alone, 0.01, g[1])
        assert torch.equal(both.parameters.flat[0][24:], alone.parameters.flat[0])


def test_update_turns_with_the_layer():
    """Gradients seen in a turned basis give the turned update."""
    torch.manual_seed(1)
    turn, other = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for n in (40, 20))
    p, config = torch.randn(40, 20, dtype=torch.float64), muon.HybridMuonConfig()
    plain, turned = make(config, p), make(config, turn @ p @ other)
    for k in range(4):
        g = spectrum(40, 20, seed=k)
        step(plain, 0.01, g)
        step(turned, 0.01, turn @ g @ other)
    difference = turned.parameters.flat[0].view(40, 20) - turn @ plain.parameters.flat[0].view(40, 20) @ other
    assert difference.abs().max() < 1e-5


def test_every_entry_moves_by_about_the_rate_and_vectors_by_adam():
    torch.manual_seed(2)
    w, b = torch.randn(200, 50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    muon_, adam = make(muon.HybridMuonConfig(weight_decay=0.0), w, b), make(AdamConfig(adam_beta2=0.95), b)
    for k in range(3):
        g, h = spectrum(200, 50, small=0.1, seed=k), torch.randn(50, dtype=torch.float64)
        before = muon_.parameters.flat[0].clone()
        step(muon_, 0.01, g, h)
        step(adam, 0.01, h)
        moved = (muon_.parameters.flat[0] - before)[: w.numel()]
        assert moved.square().mean().sqrt() == pytest.approx(0.01 * 0.18, rel=muon.SPREAD)
    assert torch.allclose(muon_.parameters.flat[0][w.numel() :], adam.parameters.flat[0], rtol=1e-12)


def test_which_parameters_are_matrices():
    sizes = [(3, 5, 7), (1, 9), (5, 1, 4), (6,), ()]
    found = {mode: [muon.matrix_shape(torch.zeros(s), mode) for s in sizes] for mode in ("slice", "2d", "flat")}
    assert found["slice"] == [(5, 7), None, (5, 4), None, None]
    assert found["2d"] == [None, None, (5, 4), None, None]
    assert found["flat"] == [(15, 7), None, (5, 4), None, None]


def test_matrices_are_dealt_by_cost():
    assert deal_of(2, a=10, b=4, c=4, d=3) == [{"a"}, {"b", "c", "d"}]
    assert deal_of(3, a=1) == [{"a"}, set(), set()]


def deal_of(workers, **costs):
    owner = muon.deal(costs, workers)
    return [{n for n, rank in owner.items() if rank == r} for r in range(workers)]


class Together(SerialComm):
    """One of several workers that take turns in this process; the test adds up for them."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("workers", [2, 3])
def test_shared_out_is_the_same_to_the_bit(workers):
    shapes = [(40, 20), (20, 20), (20, 20), (20, 40), (20,), (2, 20, 20), (20, 1), (2, 400, 150), (150, 150)]
    torch.manual_seed(3)
    start, config = [torch.randn(s) for s in shapes], muon.HybridMuonConfig()
    alone = make(config, *start)
    shared = [make(config, *start, comm=Together(r, workers)) for r in range(workers)]
    for _ in range(3):
        gradients = [torch.randn(s) for s in shapes]
        step(alone, 0.01, *gradients)
        for worker in shared:
            step(worker, 0.01, *gradients)
        total = sum(worker.parameters.flat[0] for worker in shared)
        for worker in shared:
            worker.parameters.flat[0].copy_(total)
        assert torch.equal(total, alone.parameters.flat[0])
    assert sum(g.momentum.numel() for w in shared for g in w.groups) == sum(g.momentum.numel() for g in alone.groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape, rank", [((400, 240), 64), ((400, 240), 32), ((136, 136), 64), ((64, 40), 64), ((25, 50), 32)]
)
def test_compiled_loops_move_as_tensor_operations_do(shape, rank, dtype, monkeypatch):
    """Two matrices, of which the second has no gradient, and on two threads to the bit what one thread gives."""
    rng = torch.Generator().manual_seed(3)
    size = torch.logspace(0, -2, min(shape))
    gradient = torch.randn(shape, generator=rng) * size if shape[0] > 64 else torch.randn(shape, generator=rng)

    def moved(threads):
        torch.set_num_threads(threads)
        model = nn.ParameterList([nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(2)])
        flat = FlatParameters(model, 0)
        optimizer = muon.HybridMuon(flat, muon.HybridMuonConfig(rank=rank))
        for _ in range(2):
            flat.gradient.zero_()
            flat.gradient_views["0"].copy_(gradient)
            optimizer.step(0.01)
        return flat.flat[0].clone()

    before = torch.get_num_threads()
    try:
        alone = moved(1)
        monkeypatch.setattr("allforce.models.pool.ENOUGH", 0)
        assert torch.equal(moved(2), alone)
        monkeypatch.setenv("ALLFORCE_KERNELS", "torch")
        expected = moved(1)
    finally:
        torch.set_num_threads(before)
    assert (alone - expected).abs().max() <= 2e-3 * (expected - 1).abs().max()
    assert (expected - 1).abs().max() > 0.001


def followed(gradients, dtype):
    """Momentum, X and `used` of matrices of one shape after some steps, of which the last has a gradient for some."""
    optimizer = make(muon.HybridMuonConfig(), *(torch.ones(g.shape, dtype=dtype) for g in gradients))
    (group,) = optimizer.groups
    for factor in (1.0, -0.3, gradients.new_tensor([1.0, 0.0, -0.0, 1.0]).view(4, 1, 1)):
        optimizer.parameters.gradient.copy_((factor * gradients).flatten())
        optimizer.step(0.01)
    return group.momentum.clone(), group.ahead.clone(), group.used.flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(400, 240), (24, 100), (7, 5)])
def test_momentum_of_compiled_loops(shape, dtype, monkeypatch):
    """That of tensor operations but for rounding; the same bits on two threads and in another stack."""
    gradients = torch.randn(4, *shape, generator=torch.Generator().manual_seed(6), dtype=dtype)
    gradients[3].view(-1)[:-1] = 0  # only the last entry has a gradient
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        momentum, X, used = followed(gradients, dtype)
        turned = followed(gradients[[3, 1, 2, 0]], dtype)
        monkeypatch.setattr("allforce.models.pool.ENOUGH", 0)
        torch.set_num_threads(2)
        shared = followed(gradients, dtype)
    finally:
        torch.set_num_threads(before)
    assert used == shared[2] == [1, 0, 0, 1]
    assert torch.equal(shared[0], momentum) and torch.equal(shared[1], X)
    assert torch.equal(turned[0][[3, 1, 2, 0]], momentum) and torch.equal(turned[1][[3, 1, 2, 0]], X)
    monkeypatch.setenv("ALLFORCE_KERNELS", "torch")
    expected = followed(gradients, dtype)
    assert expected[2] == used
    for ours, theirs in ((momentum, expected[0]), (X[[0, 3]], expected[1][[0, 3]])):  # others do not move along X
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    assert momentum[1].abs().max() > 0 and X.isfinite().all()


def test_a_gradient_that_is_no_number_is_not_taken_for_none():
    optimizer = make(muon.HybridMuonConfig(), torch.ones(40, 20))
    optimizer.parameters.gradient[700] = float("nan")
    optimizer.step(0.01)
    assert optimizer.groups[0].used.item() == 1 and optimizer.groups[0].momentum.isnan().any()


def test_matrices_of_two_precisions(monkeypatch):
    """Their gradients lie in one buffer, they themselves in two."""
    rng = torch.Generator().manual_seed(8)
    start = [torch.randn(160, 136, generator=rng, dtype=d) for d in (torch.float32, torch.float64, torch.float32)]
    gradients = torch.randn(3, 160, 136, generator=rng) * torch.logspace(0, -2, 136)

    def moved():
        optimizer = make(muon.HybridMuonConfig(), *start)
        for name, g in zip("012", gradients, strict=True):
            optimizer.parameters.gradient_views[name].copy_(g)
        optimizer.step(0.01)
        values = optimizer.parameters.split(optimizer.parameters.flat)
        return [values[n] - p for n, p in zip("012", start, strict=True)]

    ours = moved()
    monkeypatch.setenv("ALLFORCE_KERNELS", "torch")
    for a, b in zip(ours, moved(), strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= 2e-3 * b.abs().max()


@pytest.mark.parametrize("side", [3, 50, 64, 100])
def test_roots_of_compiled_loops(side, monkeypatch):
    """Where the iteration has converged, both are R^(-1/2) within SPREAD, and equal but for rounding."""
    rng = torch.Generator().manual_seed(side)
    B = torch.randn(2, 2 * side, side, generator=rng)
    R = B.mT @ B
    found = muon.inverse_root(R)
    monkeypatch.setenv("ALLFORCE_KERNELS", "torch")
    expected = muon.inverse_root(R)
    assert (found - expected).abs().max() <= 2e-3 * expected.abs().max()
    assert (torch.linalg.svdvals(B @ found) - 1).abs().max() <= muon.SPREAD + 0.01


@pytest.mark.parametrize("weights", [(0, 0), (0, -3), (-3, 0)])
@pytest.mark.parametrize("long, short", [(400, 240), (240, 240), (64, 64)])
def test_few_signs_find_the_directions_that_normal_numbers_do(long, short, weights):
    """What is left of a matrix outside 32 directions, in the mean of ten, whichever rows are the largest."""
    omega, rng = muon.random_matrix(long, 32), torch.Generator().manual_seed(0)
    assert (omega.abs().sum(1) == muon.TERMS).all() and (omega.abs().sum(0) >= muon.TERMS * (long // 32)).all()
    X = torch.logspace(*weights, long)[:, None] * torch.randn(10, long, short, generator=rng)
    X *= torch.logspace(0, -6, short)
    found = [muon.orthonormal(X.mT @ w) for w in (omega, torch.randn(10, long, 32, generator=rng))]
    ours, normal = (torch.linalg.matrix_norm(X - X @ P @ P.mT).mean() for P in found)
    assert ours < 1.25 * normal
