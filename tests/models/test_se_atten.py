"""se_atten and se_atten_v2: the common suite over their options; the table against the nets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from make import small_model
from suite import CELLS, ModelSuite, batch_of, evaluate, structure

from allforce.data.batch import Frame
from allforce.models import kernels, moments, se_atten

ATTEN = {"type": "se_atten"}
STRIP = ATTEN | {"tebd_input_mode": "strip"}
SMOOTH = STRIP | {"smooth_type_embedding": True}
ALL = ("energy", "forces", "virial")


@pytest.fixture(autouse=True)
def always_on_the_table(monkeypatch):
    """Small structures have few edges; the table is to be used all the same."""
    monkeypatch.setattr(se_atten, "WORTH", 1e9)


class TestConcat(ModelSuite):
    make = staticmethod(lambda: small_model(ATTEN, ntypes=3))


class TestConcatExact(ModelSuite):
    make = staticmethod(lambda: small_model(ATTEN | {"concat_output_tebd": False}, mode="exact"))


class TestConcatOneSide(ModelSuite):
    make = staticmethod(
        lambda: small_model(ATTEN | {"type_one_side": True, "resnet_dt": True, "use_tebd_bias": True}, ntypes=3)
    )


class TestStrip(ModelSuite):
    make = staticmethod(lambda: small_model(STRIP | {"exclude_types": [[0, 1]], "env_protection": 0.01}, ntypes=3))


class TestStripSmooth(ModelSuite):
    make = staticmethod(lambda: small_model(SMOOTH | {"type_one_side": True}, ntypes=3))


class TestV2(ModelSuite):
    """Its davg is not zero by default, and empty slots of sel count."""

    make = staticmethod(lambda: small_model({"type": "se_atten_v2"}, {"numb_fparam": 1}, ntypes=3))


class TestAttention(ModelSuite):
    make = staticmethod(
        lambda: small_model(ATTEN | {"attn_layer": 2, "smooth_type_embedding": True, "exclude_types": [[1, 1]]})
    )


class TestAttentionV2(ModelSuite):
    make = staticmethod(lambda: small_model({"type": "se_atten_v2", "attn_layer": 1, "attn_dotr": False}, ntypes=3))


@pytest.mark.parametrize("options", [ATTEN, ATTEN | {"type_one_side": True}, STRIP, SMOOTH, {"type": "se_atten_v2"}])
def test_table_follows_the_nets(options):
    model, exact = (small_model(options, ntypes=3, mode=mode) for mode in ("table", "exact"))
    assert model.descriptor.table.grid is not None and exact.descriptor.table.grid is None
    frame = structure(5, 9, 3)
    near = Frame(frame.coord.copy(), frame.type, frame.cell)
    near.coord[1] = near.coord[0] + [0.31, 0.1, 0.05]  # nearer than the table reaches
    for f in (frame, near):
        a, b = evaluate(model, f), evaluate(exact, f)
        torch.testing.assert_close(a.energy, b.energy, rtol=0, atol=1e-8)
        torch.testing.assert_close(a.forces, b.forces, rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("options", [ATTEN, SMOOTH, {"type": "se_atten_v2"}])
def test_eager_compiled_and_in_pieces_agree(options, monkeypatch):
    model = small_model(options, ntypes=3, nodes=32)
    batch = batch_of(model, structure(0, 9, 3), structure(1, 5, 3, CELLS["triclinic"]))

    def run() -> list[torch.Tensor]:
        p = model(batch, ALL)
        loss = sum((p[name] ** 2).mean() for name in ALL)
        return [*p.values(), *torch.autograd.grad(loss, list(model.parameters()))]

    compiled = run()
    monkeypatch.setattr(moments, "MOMENTS_BYTES", 1)
    pieces = run()
    monkeypatch.setenv(kernels.SWITCH, "torch")
    for a, b, c in zip(compiled, pieces, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(a, c, rtol=1e-11, atol=1e-12)


def test_only_types_of_the_batch_are_evaluated():
    """A model of many types costs what the types of a batch cost, and they may be any."""
    model = small_model(ATTEN, model={"type_map": [f"X{t}" for t in range(60)]}, ntypes=60)
    d, rows = model.descriptor, []
    d.nets.net.register_forward_hook(lambda module, given, out: rows.append(len(out)))
    frame = structure(3)
    frame.type[:] = np.where(frame.type == 0, 7, 41)
    model.forward(batch_of(model, frame), ("energy", "forces"))
    assert rows == [4 * d.table.K]


def test_the_table_gives_way_where_it_does_not_pay(monkeypatch):
    """Its rows grow with the square of the number of types in a batch, the edges do not."""
    monkeypatch.setattr(se_atten, "WORTH", 4)
    model = small_model(ATTEN, ntypes=3)
    frame = structure(0, 5, 3)
    frame.type[:3] = 0, 1, 2
    few = batch_of(model, frame)
    assert not model.descriptor.on_table(few) and 9 * model.descriptor.table.K > 4 * len(few.edges.i)
    monkeypatch.setattr(se_atten, "WORTH", 1e9)
    assert model.descriptor.on_table(few)


def test_attention_of_few_atoms_at_a_time(monkeypatch):
    model, frame = small_model(ATTEN | {"attn_layer": 2}, ntypes=3), structure(3, 9, 3)
    whole = evaluate(model, frame)
    monkeypatch.setattr(se_atten, "ROWS", 1)
    some = evaluate(model, frame)
    for name in ("energy", "forces", "virial"):
        torch.testing.assert_close(getattr(some, name), getattr(whole, name), rtol=1e-12, atol=1e-12)


def test_not_smooth_attention_has_forces_of_its_energy():
    """Without smooth_type_embedding neighbours enter at rcut with a jump, as in DeePMD-kit; elsewhere all is well."""
    model = small_model(ATTEN | {"attn_layer": 2, "scaling_factor": 2.0, "ln_eps": 1e-3})
    frame, h = structure(2), 1e-6
    step = np.zeros((9, 3))
    step[3, 1] = h
    up, down = (evaluate(model, Frame(frame.coord + s * step, frame.type, frame.cell)).energy[0] for s in (1, -1))
    assert float(evaluate(model, frame).forces[3, 1]) == pytest.approx(-float(up - down) / (2 * h), abs=1e-6)


def test_slots_are_shared_by_all_types():
    """sel counts neighbours of all types together, and keeps the nearest."""
    model = small_model(ATTEN | {"sel": [4, 4]}, ntypes=2)
    batch = batch_of(model, structure(0, 12))
    count = batch.edges.first.diff()
    of_type = [torch.bincount(batch.edges.i[batch.type[batch.edges.j] == t], minlength=12) for t in (0, 1)]
    assert int(count.max()) == 8 and max(int(n.max()) for n in of_type) > 4


def test_trainable_and_seed():
    frozen = small_model(ATTEN | {"trainable": False, "attn_layer": 1})
    assert not any(p.requires_grad for p in frozen.descriptor.parameters())
    norm = small_model(ATTEN | {"trainable_ln": False, "attn_layer": 1}).descriptor.attention[0]
    assert not norm.norm_w.requires_grad and norm.in_proj.w.requires_grad
    a, b, c = (small_model(ATTEN | {"seed": seed}).descriptor.nets.types.w for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
