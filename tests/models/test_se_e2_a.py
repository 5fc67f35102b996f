"""se_e2_a with energy fitting: the common suite over its options, and a dense slot-by-slot reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from make import small_model
from suite import ALL, CELLS, ModelSuite, batch_of, evaluate, structure

from allforce.data.batch import Frame
from allforce.models import kernels, moments
from allforce.models.standard import StandardModel
from allforce.models.table import InferenceTable, TableConfig


class TestTable(ModelSuite):
    make = staticmethod(small_model)


class TestExact(ModelSuite):
    make = staticmethod(lambda: small_model(mode="exact"))


class TestOneSideThreeTypes(ModelSuite):
    make = staticmethod(lambda: small_model({"type_one_side": True, "resnet_dt": True}, ntypes=3))


class TestExcludedPairs(ModelSuite):
    """Also with protected distances and atoms without an energy of their own."""

    make = staticmethod(
        lambda: small_model(
            {"exclude_types": [[0, 1]], "env_protection": 0.01}, model={"atom_exclude_types": [2]}, ntypes=3
        )
    )


class TestParametersAndVacuum(ModelSuite):
    make = staticmethod(
        lambda: small_model(
            {"set_davg_zero": True},
            {"numb_fparam": 2, "numb_aparam": 1, "atom_ener": [-1.5, None], "resnet_dt": False},
        )
    )


class TestSilu(ModelSuite):
    make = staticmethod(lambda: small_model({"activation_function": "silu"}, {"activation_function": "softplus"}))


class TestLinearFitting(ModelSuite):
    make = staticmethod(lambda: small_model(fitting={"neuron": []}))


class TestGelu(ModelSuite):
    make = staticmethod(lambda: small_model({"activation_function": "gelu"}, {"activation_function": "sigmoid"}))


def test_embedding_nets_side_by_side_are_the_nets():
    """Value and gradients of the parameters; the third layer is as wide as the second, with a step width."""
    nets = small_model({"neuron": [3, 6, 6], "resnet_dt": True}, ntypes=3).descriptor.nets
    x, parameters = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None], list(nets.parameters())
    weight = torch.sin(torch.arange(5 * len(nets) * 6, dtype=torch.float64)).view(5, len(nets), 6)
    one_by_one = torch.stack([net(x) for net in nets], 1)
    torch.testing.assert_close(nets(x), one_by_one, rtol=1e-13, atol=1e-13)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), parameters) for y in (nets(x), one_by_one))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def dense_energy(model: StandardModel, frame: Frame) -> float:
    """The formulas slot by slot in plain numpy: sorted slots per type, empty ones filled with −davg/dstd."""
    c, d = model.config, model.descriptor
    s = c.descriptor

    def net(nn, x):
        for layer in nn.layers:
            w, b = layer.w.detach().numpy(), layer.b.detach().numpy()
            y = x @ w + b
            y = y if layer.activation == "none" else np.tanh(y)
            y = y if layer.idt is None else y * layer.idt.detach().numpy()
            if layer.resnet and w.shape[1] == w.shape[0]:
                y = y + x
            if layer.resnet and w.shape[1] == 2 * w.shape[0]:
                y = y + np.concatenate([x, x], -1)
            x = y
        return x

    images = [np.zeros(3)] if frame.cell is None else [
        np.array([a, b, e]) @ frame.cell for a in range(-3, 4) for b in range(-3, 4) for e in range(-3, 4)
    ]  # fmt: skip
    total = 0.0
    for i, tau in enumerate(frame.type):
        T = np.zeros((4, s.neuron[-1]))
        avg, std = d.davg[tau].numpy(), d.dstd[tau].numpy()
        for t in range(len(model.type_map)):
            found = []
            for j in np.flatnonzero(frame.type == t):
                for image in images:
                    v = frame.coord[j] - frame.coord[i] + image
                    if 1e-9 < np.linalg.norm(v) <= s.rcut:
                        found.append(v)
            found = sorted(found, key=np.linalg.norm)[: s.sel[t]]
            nn = d.nets[t] if s.type_one_side else d.nets[tau + len(model.type_map) * t]
            for k in range(s.sel[t]):
                R = np.zeros(4)
                if k < len(found):
                    r = np.linalg.norm(found[k])
                    u = np.clip((r - s.rcut_smth) / (s.rcut - s.rcut_smth), 0, 1)
                    w = 1 + u**3 * (-6 * u**2 + 15 * u - 10)
                    R = np.r_[w / r, w * found[k] / r**2]
                R = (R - avg) / std
                T += np.outer(R, net(nn, R[:1])) / sum(s.sel)
        D = (T.T @ T[:, : s.axis_neuron]).ravel()
        total += float(net(model.fitting.nets[tau], D)[0]) + float(model.fitting.bias_atom_e[tau])
    return total


@pytest.mark.parametrize("one_side", [True, False])
@pytest.mark.parametrize("cell", ["triclinic", "smaller than the cutoff", "none"])
@pytest.mark.parametrize("sel", [[30, 30], [70, 80]])
def test_dense_reference(one_side, cell, sel):
    """Padding of `sel` counts, and more neighbours than `sel` keep the nearest of each type."""
    model = small_model({"type_one_side": one_side, "sel": sel})
    frame = structure(3, 6, 2, CELLS[cell])
    assert float(evaluate(model, frame).energy[0]) == pytest.approx(dense_energy(model, frame), abs=1e-10)


@pytest.mark.parametrize("options", [{}, {"type_one_side": True}, {"exclude_types": [[0, 1]]}, {"env_protection": 0.1}])
def test_eager_and_compiled_agree(options, monkeypatch):
    """The tensor form, which GPUs use, and the compiled loops give the same predictions and gradients."""
    model = small_model(options, nodes=32)
    batch = batch_of(model, structure(0), structure(1, 5, 2, CELLS["triclinic"]))

    def run() -> list[torch.Tensor]:
        values = [model(batch, ALL)[name] for name in ("energy", "forces", "virial")]
        loss = sum((x**2).mean() for x in values)
        return [*values, *torch.autograd.grad(loss, list(model.parameters()))]

    compiled = run()
    monkeypatch.setenv(kernels.SWITCH, "torch")
    for a, b in zip(compiled, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("one_side", [True, False])
def test_moments_in_pieces(one_side, backend, monkeypatch):
    """With little memory the neighbour types are taken one by one; nothing changes."""
    model = small_model({"type_one_side": one_side}, ntypes=3, nodes=32)
    batch = batch_of(model, structure(0, 9, 3), structure(1, 5, 3, CELLS["triclinic"]))
    monkeypatch.setenv(kernels.SWITCH, backend)

    def run() -> list[torch.Tensor]:
        values = [model(batch, ALL)[name] for name in ("energy", "forces")]
        loss = sum((x**2).mean() for x in values)
        return [*values, *torch.autograd.grad(loss, list(model.parameters()))]

    whole = run()
    monkeypatch.setattr(moments, "MOMENTS_BYTES", 1)
    for a, b in zip(whole, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("one_side", [True, False])
def test_table_follows_exact(one_side):
    model, exact = (small_model({"type_one_side": one_side}, mode=m) for m in ("table", "exact"))
    frame = structure(5)
    a, b = evaluate(model, frame), evaluate(exact, frame)
    torch.testing.assert_close(a.energy, b.energy, rtol=0, atol=1e-8)
    torch.testing.assert_close(a.forces, b.forces, rtol=0, atol=1e-7)


def test_close_neighbours_are_exact():
    """Atoms nearer than anything in the data are off the grid and are evaluated by the net itself."""
    model, exact = small_model(), small_model(mode="exact")
    frame = structure(6)
    near = frame.coord.copy()
    near[1] = near[0] + [0.31, 0.1, 0.05]
    frame = Frame(near, frame.type, frame.cell)
    assert np.linalg.norm(near[1] - near[0]) < model.descriptor.r_close
    a, b = evaluate(model, frame), evaluate(exact, frame)
    torch.testing.assert_close(a.energy, b.energy, rtol=0, atol=1e-8)
    torch.testing.assert_close(a.forces, b.forces, rtol=1e-8, atol=1e-7)


def test_table_grows_when_the_nets_become_rough():
    model = small_model(nodes=16)
    with torch.no_grad():
        for net in model.descriptor.nets:
            for layer in net.layers:
                layer.w *= 3.0
    table, nets = model.descriptor.table, model.descriptor.nets
    before = table.error(nets)
    message = model.refresh()
    assert before > table.tolerance >= table.error(nets)
    assert message is not None and "16 nodes" in message and str(table.K) in message
    assert model.refresh() is None


@pytest.mark.parametrize("one_side", [True, False])
def test_steep_nets_in_prediction(one_side, monkeypatch):
    """As HybridMuon makes them: more nodes than in training, forces as by the nets, also by tensor operations."""
    potentials = {mode: small_model({"type_one_side": one_side}, mode=mode) for mode in ("table", "exact")}
    for potential in potentials.values():
        potential.requires_grad_(False)
        for net in potential.descriptor.nets:
            net.layers[0].w *= 20.0
    model = potentials["table"]
    model.prepare(InferenceTable(tolerance=2e-10))
    model.refresh()
    assert TableConfig.most < model.descriptor.table.K <= InferenceTable.most
    assert model.descriptor.table.error(model.descriptor.nets) <= 2e-10
    frame = structure(5)
    a, b = evaluate(model, frame), evaluate(potentials["exact"], frame)
    torch.testing.assert_close(a.energy, b.energy, rtol=0, atol=1e-10)
    torch.testing.assert_close(a.forces, b.forces, rtol=0, atol=1e-9)
    monkeypatch.setenv(kernels.SWITCH, "torch")
    torch.testing.assert_close(evaluate(model, frame).forces, a.forces, rtol=0, atol=1e-11)


def test_a_net_with_kinks_is_exact():
    model = small_model({"activation_function": "relu"})
    assert model.descriptor.table.grid is None
    frame = structure(2)
    h, step = 1e-6, np.zeros((9, 3))
    step[3, 1] = h
    up, down = (evaluate(model, Frame(frame.coord + s * step, frame.type, frame.cell)).energy[0] for s in (1, -1))
    assert float(evaluate(model, frame).forces[3, 1]) == pytest.approx(-float(up - down) / (2 * h), abs=1e-6)


def test_float32_is_close_to_float64():
    f32, f64 = (small_model({"precision": p}, {"precision": p}, nodes=64) for p in ("float32", "float64"))
    frame = structure(4)
    a, b = evaluate(f32, frame), evaluate(f64, frame)
    assert a.forces.dtype == torch.float64 and next(f32.parameters()).dtype == torch.float32
    torch.testing.assert_close(a.energy, b.energy, rtol=0, atol=1e-4)
    torch.testing.assert_close(a.forces, b.forces, rtol=0, atol=1e-4)


def test_an_atom_in_vacuum_has_the_given_energy():
    model = small_model({"set_davg_zero": True}, {"atom_ener": [-1.5, None]})
    model.fitting.bias_atom_e[:] = torch.tensor([-1.5, -2.0])
    alone = evaluate(model, Frame(np.zeros((1, 3)), np.array([0]), None))
    assert float(alone.energy[0]) == pytest.approx(-1.5, abs=1e-12)


def test_trainable_flags():
    model = small_model({"trainable": False}, {"trainable": [True, False, True]})
    assert not any(p.requires_grad for p in model.descriptor.parameters())
    flags = [[p.requires_grad for p in layer.parameters()] for layer in model.fitting.nets[0].layers]
    assert all(flags[0]) and not any(flags[1]) and all(flags[2])
    p = model(batch_of(model, structure(0)), ("forces",))
    (p["forces"] ** 2).sum().backward()
    assert model.fitting.nets[0].layers[0].w.grad is not None


def test_seed_fixes_the_nets():
    a, b, c = small_model(), small_model(), small_model({"seed": 5})
    assert torch.equal(a.descriptor.nets[0].layers[1].w, b.descriptor.nets[0].layers[1].w)
    assert not torch.equal(a.descriptor.nets[0].layers[1].w, c.descriptor.nets[0].layers[1].w)
    assert not torch.equal(a.descriptor.nets[0].layers[1].w, a.descriptor.nets[1].layers[1].w)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_gpu_equals_cpu(precision):
    model = small_model({"precision": precision}, {"precision": precision})
    batch = batch_of(model, structure(0), structure(1))
    cpu = model(batch, ALL)["forces"]
    gpu = model.to("cuda")(batch.to("cuda"), ALL)["forces"]
    torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu_never_waits():
    """Prediction and gradient on the table copy nothing from the host and wait for nothing."""
    model = small_model().to("cuda")
    batch = batch_of(model, structure(0), structure(1)).to("cuda")

    def step() -> None:
        p = model(batch, ALL)
        torch.autograd.grad(
            sum((p[name] ** 2).sum() for name in ("energy", "forces", "virial")), list(model.parameters())
        )

    step()  # what is kept on the device is put there
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
