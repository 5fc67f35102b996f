"""A step without a graph (fused.py) beside automatic differentiation of the same model."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from make import small_model
from suite import batch_of, structure

from allforce.losses.ener import EnerLoss, EnerLossConfig
from allforce.models.layers import DTYPES
from allforce.train.flat import FlatParameters

WANTED = ("energy", "forces", "virial")
CLOSE = {"float64": 1e-11, "float32": 3e-4}  # of the largest gradient of a parameter; float32: sums of some 100 terms


def labelled(model, *frames):
    """A batch with labels that are off by numbers of size 1."""
    batch, rng = batch_of(model, *frames), torch.Generator().manual_seed(5)
    N, B = len(batch.type), batch.nframes
    shapes = {"energy": (B,), "force": (N, 3), "virial": (B, 9)}
    return replace(batch, labels={k: torch.randn(s, generator=rng, dtype=torch.float64) for k, s in shapes.items()})


def make(precision="float64", ntypes=2, **descriptor):
    kind = {"precision": precision}
    return small_model({**kind, **descriptor}, {**kind, "neuron": [12, 12, 24]}, ntypes=ntypes, nodes=64)


def frames(ntypes=2):
    return structure(0, 9, ntypes), structure(1, 5, ntypes, None), structure(2, 7, ntypes)


def forces_adjoint(batch):
    """Not the same for all atoms: that would be no force at all."""
    rng = torch.Generator().manual_seed(len(batch.type))
    return {"forces": torch.randn(len(batch.type), 3, generator=rng, dtype=torch.float64)}


def by_autograd(model, batch, adjoints):
    out = model(batch, WANTED)
    total = sum((out[name] * value).sum() for name, value in adjoints.items())
    return out, torch.autograd.grad(total, list(model.parameters()))


def by_hand(model, batch, adjoints, wanted=WANTED):
    sweep = model.sweep(batch, wanted)
    assert sweep is not None
    targets = [torch.full_like(p, torch.nan) for p in model.parameters()]
    sweep.adjoints(adjoints, targets)
    return sweep.outputs, targets


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("ntypes, one_side", [(2, True), (2, False), (3, True), (3, False)])
@pytest.mark.parametrize(
    "other", [{"resnet_dt": True}, {"exclude_types": [[0, 1]], "env_protection": 0.01}, {"set_davg_zero": True}]
)
def test_outputs_and_gradients_are_those_of_autograd(precision, ntypes, one_side, other):
    model = make(precision, ntypes, type_one_side=one_side, **other)
    batch, rng = batch_of(model, *frames(ntypes)), torch.Generator().manual_seed(1)
    adjoints = {
        "energy": torch.randn(3, generator=rng, dtype=torch.float64),
        "forces": torch.randn(len(batch.type), 3, generator=rng, dtype=torch.float64),
        "virial": torch.randn(3, 9, generator=rng, dtype=torch.float64),
    }
    expected, gradients = by_autograd(model, batch, adjoints)
    found, targets = by_hand(model, batch, adjoints)
    for name in WANTED:
        largest = expected[name].abs().max()
        assert (found[name] - expected[name]).abs().max() <= {"float64": 1e-12, "float32": 1e-5}[precision] * largest
    for ours, theirs in zip(targets, gradients, strict=True):
        assert (ours - theirs).abs().max() <= CLOSE[precision] * theirs.abs().max()
    for name in WANTED:  # also of one of them alone
        found, targets = by_hand(model, batch, {name: adjoints[name]})
        _, gradients = by_autograd(model, batch, {name: adjoints[name]})
        for ours, theirs in zip(targets, gradients, strict=True):
            assert (ours - theirs).abs().max() <= CLOSE[precision] * theirs.abs().max() + 1e-30


def test_memory_that_is_kept_spoils_nothing():
    """Batches of several sizes in turn, with another table in between: the gradients of a model that has seen none."""
    model, others = make(), [batch_of(make(), *frames()[:n]) for n in (1, 3, 2, 1, 3)]
    first = {}
    for batch in others:
        adjoints = forces_adjoint(batch)
        _, found = by_hand(model, batch, adjoints)
        _, expected = by_hand(make(), batch, adjoints)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found, first.setdefault(batch.nframes, found), strict=True))
    model.descriptor.table.set_grid(replace(model.descriptor.table.grid, K=96))
    batch = others[0]
    adjoints = forces_adjoint(batch)
    _, found = by_hand(model, batch, adjoints)
    _, expected = by_autograd(model, batch, adjoints)
    assert all((a - b).abs().max() <= 1e-11 * b.abs().max() for a, b in zip(found, expected, strict=True))


def test_memory_of_large_frames_is_not_kept(monkeypatch):
    monkeypatch.setattr("allforce.models.fused.MOST", 1000)
    model = make()
    batch = batch_of(model, *frames())
    adjoints = forces_adjoint(batch)
    _, first = by_hand(model, batch, adjoints)
    assert not model.fused._nets
    monkeypatch.undo()
    _, again = by_hand(model, batch, adjoints)
    assert len(model.fused._nets) == 1 and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_copy_has_addresses_of_its_own():
    model, batch = make(), batch_of(make(), *frames())
    flat, adjoints = FlatParameters(model, 1), forces_adjoint(batch)
    model.sweep(batch, WANTED).adjoints(adjoints, flat._gradients)
    expected = flat.gradient.clone()
    copied, own = deepcopy((model, flat))
    flat.gradient.fill_(7)
    copied.sweep(batch, WANTED).adjoints(adjoints, own._gradients)
    assert (flat.gradient == 7).all() and torch.equal(own.gradient, expected)


def test_the_way_back_is_that_of_the_last_batch():
    model, batch = make(), batch_of(make(), *frames())
    first, _ = (model.sweep(batch, WANTED) for _ in range(2))
    with pytest.raises(AssertionError, match="another batch"):
        first.adjoints(forces_adjoint(batch), [torch.empty_like(p) for p in model.parameters()])


def test_threads_change_no_bit(monkeypatch):
    monkeypatch.setattr("allforce.models.pool.ENOUGH", 0)
    model, before = make("float32", 3), torch.get_num_threads()
    batch = batch_of(model, *frames(3))
    adjoints = {"energy": torch.ones(3, dtype=torch.float64), **forces_adjoint(batch)}
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(by_hand(make("float32", 3), batch, adjoints))
    finally:
        torch.set_num_threads(before)
    for outputs, targets in results[1:]:
        assert all(torch.equal(outputs[name], results[0][0][name]) for name in WANTED)
        assert all(torch.equal(a, b) for a, b in zip(targets, results[0][1], strict=True))


def test_what_it_is_not_written_for_is_left_to_autograd(monkeypatch):
    model = make()
    batch = batch_of(model, *frames())
    assert model.sweep(batch, ("energy", "forces")) is not None
    assert model.sweep(batch, ("energy", "forces", "atomic energy")) is None
    assert model.sweep(batch, ("energy",)) is None
    near = replace(batch, edges=replace(batch.edges, nearest=0.5 * model.descriptor.r_close))
    assert model.sweep(near, WANTED) is None
    model.fitting.nets[0].layers[0].requires_grad_(False)
    assert model.sweep(batch, WANTED) is None
    monkeypatch.setenv("ALLFORCE_KERNELS", "torch")
    assert make().sweep(batch, WANTED) is None
    monkeypatch.delenv("ALLFORCE_KERNELS")
    for other in (
        small_model(mode="exact"),
        small_model(fitting={"numb_fparam": 1}),
        small_model(fitting={"atom_ener": [-1.0, None]}),
        small_model(fitting={"activation_function": "silu"}),
        small_model({"activation_function": "gelu"}),
        small_model(fitting={"precision": "float32"}),
        small_model(model={"atom_exclude_types": [1]}),
        small_model({"type": "se_e2_r"}),
        small_model({"type": "se_atten"}),
    ):
        assert other.sweep(batch_of(model, *frames()), WANTED) is None


LOSSES = {
    "energies and forces": {},
    "virials": {"start_pref_v": 0.5, "limit_pref_v": 2.0},
    "intensive": {"start_pref_v": 0.5, "limit_pref_v": 2.0, "intensive_ener_virial": True},
    "forces alone": {"start_pref_e": 0, "limit_pref_e": 0},
    "huber": {"use_huber": True, "huber_delta": 0.3},
    "mae": {"loss_func": "mae"},
    "relative": {"relative_f": 0.5},
    "weighted forces": {"start_pref_pf": 1.0, "limit_pref_pf": 1.0, "use_default_pf": True},
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("missing", ["", "energy", "force", "virial"])
def test_a_loss_by_hand_is_that_of_autograd(name, missing):
    """The loss, its sums, and the gradient of every parameter, also where the data has not all labels."""
    model = make()
    loss = EnerLoss(EnerLossConfig(**LOSSES[name]), 1e-3)
    batch = labelled(model, *frames())
    batch.labels.pop(missing, None)
    whole, sums = loss(model(batch, loss.wanted), batch, 4e-4)
    expected = torch.autograd.grad(0.25 * whole, list(model.parameters()), allow_unused=True)
    sweep = model.sweep(batch, loss.wanted)
    value, found_sums, adjoints = loss.with_adjoints(sweep.outputs, batch, 4e-4, 0.25)
    targets = [torch.empty_like(p) for p in model.parameters()]
    sweep.adjoints(adjoints, targets)
    torch.testing.assert_close(value, whole.detach(), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found_sums, sums, rtol=1e-10, atol=1e-14)
    for ours, theirs in zip(targets, expected, strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()


def test_micro_batches_are_complete_before_they_are_added():
    """What two workers add up over the wire is what one worker has after two micro-batches, to the bit."""
    model = make("float32")
    flat, sums, pieces = FlatParameters(model, 1), torch.ones(1, dtype=torch.float32), []
    batches = [batch_of(model, frame) for frame in frames()[:2]]
    adjoints = [forces_adjoint(batch) for batch in batches]
    sweep = lambda k: lambda targets: model.sweep(batches[k], WANTED).adjoints(adjoints[k], targets)  # noqa: E731
    for k in range(2):
        flat.take(sweep(k), sums, first=True)
        pieces.append(flat.wire.clone())
    for k in range(2):
        flat.take(sweep(k), sums, first=k == 0)
    assert torch.equal(flat.wire, pieces[0] + pieces[1]) and DTYPES["float32"] == flat.wire.dtype
    assert flat.gradient.abs().max() > 0
