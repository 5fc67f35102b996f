"""PiNet and PiNet2: the common suite, and every formula against the NumPy evaluation of pinet_numpy.py."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pinet_numpy
import pytest
import torch
from suite import CELLS, ModelSuite, batch_of, evaluate, results_on_threads, structure

from allforce.data.batch import Frame
from allforce.models import MODELS, pinet_steps, pinn
from allforce.models.pinet_ops import SMALL, Tanh, interaction, tanh
from allforce.models.potential import Potential

AUTOGRAD = Potential.energies_and_gradient
NODES = {"pp_nodes": [6, 5], "pi_nodes": [4, 3], "ii_nodes": [4, 5], "out_nodes": [4]}


def make(name: str, **keys: Any):
    """A small model whose biases are not zero, as they are at the beginning."""
    cls = MODELS[name]
    config = {"type": name, "type_map": ["O", "H"], "depth": 2, "rc": 4.0, "seed": 3, "precision": "float64", **NODES}
    potential = {"e_dress": {"O": -1.5, "1": 0.25}, "e_scale": 2.0, "e_unit": 0.5}
    extra = {} if "dipole" in name else potential
    model = cls(cls.Config.model_validate({**config, **extra, **keys}))
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                p.uniform_(-0.3, 0.3, generator=rng)
    return model


class PinnSuite(ModelSuite):
    def test_smooth_cutoff(self, model):
        """PiNN's cutoff functions have one derivative: the force of a pair falls in proportion to rc − r."""

        def pair(distance: float):
            return evaluate(model, Frame(np.array([[0, 0, 0], [distance, 0, 0.0]]), np.array([0, 0]), None))

        rc = model.config.rc
        near, nearer, outside = pair(rc - 1e-3), pair(rc - 1e-4), pair(rc + 1e-7)
        assert abs(float(nearer.energy - outside.energy)) < 1e-6
        assert nearer.forces.abs().max() < 0.11 * near.forces.abs().max()
        assert outside.forces.abs().max() == 0.0
        assert pair(0.6 * rc).forces.abs().max() > 1e-6


class TestPiNet(PinnSuite):
    make = staticmethod(lambda: make("pinet"))


class TestPiNetGaussian(PinnSuite):
    make = staticmethod(
        lambda: make("pinet", basis_type="gaussian", n_basis=5, cutoff_type="f2", pi_nodes=[4], act="silu")
    )


class TestPiNet2(PinnSuite):
    make = staticmethod(lambda: make("pinet2"))


class TestPiNet2Weighted(PinnSuite):
    make = staticmethod(lambda: make("pinet2", weighted=True, cutoff_type="hip", n_basis=[1, 3]))


class TestPiNet2Scalars(PinnSuite):
    make = staticmethod(lambda: make("pinet2", rank=1))


CASES = {
    "pinet": ("pinet", {}),
    "powers and f2": ("pinet", {"n_basis": [2, 5], "cutoff_type": "f2"}),
    "gaussians": ("pinet", {"basis_type": "gaussian", "n_basis": 4, "gamma": 2.0, "cutoff_type": "hip"}),
    "gaussians given": ("pinet", {"basis_type": "gaussian", "center": [1.0, 2.5], "gamma": [3.0, 1.0]}),
    "one layer": ("pinet", {"pi_nodes": [3], "ii_nodes": [2], "out_nodes": []}),
    "widths equal to the types": ("pinet", {"ii_nodes": [2]}),
    "unknown element": ("pinet", {"atom_types": [8]}),
    "many elements": ("pinet", {"type_map": ["O", "H", "C", "N", "F"]}),
    "pinet2 rank 1": ("pinet2", {"rank": 1}),
    "pinet2 rank 3": ("pinet2", {}),
    "pinet2 weighted": ("pinet2", {"weighted": True}),
    "pinet2 many elements": ("pinet2", {"type_map": ["O", "H", "C", "N", "F"]}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("some", [False, True])
def test_steps_by_hand(case, some):
    """Energies, gradient and the derivative of both by every weight, against autograd; also where some centres are
    another block's, in a batch of two frames, and a second time."""
    kind, keys = CASES[case]
    model = make(kind, depth=3, **keys)
    batch = batch_of(model, structure(4, 9, 2, CELLS["triclinic"]), structure(5, 6, 2, None))
    rng = torch.Generator().manual_seed(1)
    if some:
        batch.own = (torch.rand(len(batch.type), generator=rng) > 0.4).double()
    named = dict(model.named_parameters())
    u, v = (
        torch.randn(len(batch.type), generator=rng).double(),
        torch.randn(batch.edges.r.shape, generator=rng).double(),
    )

    def results(way):
        e, g = way(batch, batch.edges.r)
        loss = (u * e).sum() + (v * g).sum() + (g * g).sum() + e.sum() ** 2
        first, again = (torch.autograd.grad(loss, named.values(), retain_graph=True, allow_unused=True) for _ in "ab")
        return {"e": e.detach(), "g": g.detach(), **dict(zip(named, first, strict=True))}, again

    (found, again), (expected, _) = results(model.energies_and_gradient), results(partial(AUTOGRAD, model))
    assert [name for name in named if found[name] is None] == [name for name in named if expected[name] is None]
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12 * float(expected[name].abs().max()))
    for name, value in zip(named, again, strict=True):
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("case", CASES)
def test_the_number_of_threads_changes_no_bit(case, monkeypatch):
    kind, keys = CASES[case]
    one, two = (results_on_threads(make(kind, depth=3, **keys), n, monkeypatch) for n in (1, 2))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("kind", ["pinet", "pinet2"])
def test_memory_is_free_when_the_results_are_gone(kind, monkeypatch):
    """At once, and not when Python looks for circles: it is several megabytes a step."""
    tapes: list[weakref.ref] = []

    def tape(*arguments):
        tapes.append(weakref.ref(made := pinet_steps.Tape(*arguments)))
        return made

    monkeypatch.setattr(pinn, "Tape", tape)
    model = make(kind)
    gc.disable()
    try:
        e, g = model.energies_and_gradient(batch := batch_of(model, structure(1)), batch.edges.r)
        torch.autograd.grad((g * g).sum() + e.sum(), list(model.parameters()), allow_unused=True)
        del e, g
        assert tapes and tapes[0]() is None
    finally:
        gc.enable()


def weights_of(model) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy() for name, p in model.network.named_parameters()}


def elements_of(model, frame: Frame) -> np.ndarray:
    return model.elements.numpy()[frame.type]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cell", ["triclinic", "smaller than the cutoff", "none"])
def test_formulas(case, cell):
    kind, keys = CASES[case]
    model = make(kind, **keys)
    frame = structure(4, 5, 2, CELLS[cell])
    frame.coord[0] += [20.0, -13.0, 7.0] if frame.cell is not None else 0.0  # atoms may be far outside the cell
    network = pinet_numpy.pinet if kind == "pinet" else pinet_numpy.pinet2
    out, forces = pinet_numpy.energy_and_forces(
        network, weights_of(model), model.config, elements_of(model, frame), frame.coord, frame.cell
    )
    p = evaluate(model, frame)
    dress = np.array([-1.5, 0.25])[frame.type]
    np.testing.assert_allclose(p.atomic_energy, (out / 2.0 + dress) * 0.5, rtol=0, atol=1e-12)
    np.testing.assert_allclose(p.forces, forces / 4.0, rtol=0, atol=1e-12)
    assert np.abs(forces).max() > 1e-3


def moment(model, kind: str, frame: Frame, q: np.ndarray, net: dict) -> np.ndarray:
    total = np.zeros(3)
    if "AC" in kind:
        total += (q - q.mean()) @ frame.coord
    if "AD" in kind:
        total += net["p3"][:, :, 0].sum(0)
    if "BC" in kind:
        total += (net["i1"] + (net["i3"] ** 2).sum(1))[:, 0] @ net["pairs"][1]
    if "OS" in kind:
        total += frame.aparam[:, 0] @ frame.coord
    return total if kind != "dipole" else q @ frame.coord


@pytest.mark.parametrize("kind", ["dipole", "AC", "AD", "AC_AD", "BC_R", "AC_BC_R", "AD_BC_R", "AD_OS"])
def test_dipoles(kind):
    """Two frames in one batch: each as the NumPy evaluation gives it by itself."""
    model = make("pinet2_dipole", kind=kind, d_scale=2.0, d_unit=0.75)
    frames = [structure(1, 6, 2, CELLS["triclinic"]), structure(2, 4, 2, None)]
    for frame in frames:
        frame.aparam = np.linspace(-1, 2, len(frame.type))[:, None]
    found = evaluate(model, *frames, wanted=model.outputs)
    for k, frame in enumerate(frames):
        arguments = (weights_of(model), model.config, elements_of(model, frame), frame.coord, frame.cell)
        net = pinet_numpy.pinet2(*arguments)
        expected = moment(model, kind, frame, net["out"], net)
        np.testing.assert_allclose(found.dipole[k].detach(), expected * 0.375, rtol=0, atol=1e-11)
        norm = np.sqrt(expected @ expected + 1e-6) * 0.375
        np.testing.assert_allclose(found.dipole_norm[k].detach(), norm, rtol=0, atol=1e-11)
    if "AC" in kind:
        assert found.charge.abs().max() < 1e-12 and found.charges.abs().max() > 1e-3


def test_molecules_are_neutral():
    model = make("pinet_dipole", kind="AC", neutral_unit="water_molecule")
    frame = structure(3, 9, 2)
    frame.type[:] = [0, 1, 1] * 3
    charges = evaluate(model, frame, wanted=("charges",)).charges
    assert charges.view(3, 3).sum(1).abs().max() < 1e-12 and charges.abs().max() > 1e-3


def test_vectors_turn_with_the_frame():
    """Output layers of vectors have biases, as in PiNN; without them, as at the beginning, a dipole is a vector."""
    model = make("pinet2_dipole", kind="AD_BC_R")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "3_out_layers" in name and name.endswith(".bias"):
                p.zero_()
    frame = structure(6, 7, 2, CELLS["triclinic"])
    Q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    turned = Frame(frame.coord @ Q.T, frame.type, frame.cell @ Q.T)
    a, b = (evaluate(model, f, wanted=("dipole",)).dipole[0].numpy() for f in (frame, turned))
    np.testing.assert_allclose(a @ Q.T, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("way", ["compiled", "torch"])
def test_written_out_derivatives(way, monkeypatch):
    """The two steps with their first and second derivatives, against differences and against plain autograd."""
    if way == "torch":
        monkeypatch.setenv("ALLFORCE_KERNELS", "torch")
    rng = torch.Generator().manual_seed(0)
    z, e = torch.randn(4, 3, 5, generator=rng).double(), torch.randn(4, 3, generator=rng).double()
    z.requires_grad_(), e.requires_grad_()
    assert torch.autograd.gradcheck(interaction, (z, e)) and torch.autograd.gradcheck(Tanh.apply, (z,))
    assert torch.autograd.gradgradcheck(interaction, (z, e)) and torch.autograd.gradgradcheck(Tanh.apply, (z,))
    wide = torch.zeros(SMALL // 4 + 1, requires_grad=True)
    assert type(tanh(wide).grad_fn).__name__ == "TanhBackward" and type(tanh(z).grad_fn).__name__ == "TanhBackward0"


def test_single_precision_is_near_double():
    double, single = make("pinet2"), make("pinet2", precision="float32")
    single.load_state_dict(double.state_dict())
    frame = structure(2, 12)
    a, b = evaluate(double, frame), evaluate(single, frame)
    assert b.forces.dtype == torch.float64
    torch.testing.assert_close(a.forces, b.forces, rtol=1e-4, atol=1e-5)


def test_parameters_of_the_defaults():
    """PiNN's own count of parameters with all its defaults."""
    cls = MODELS["pinet"]
    model = cls(cls.Config(type_map=["H", "C", "N", "O"]))
    assert sum(p.numel() for p in model.parameters()) == 12064


def test_unlabelled_elements_are_told():
    cls = MODELS["pinet"]
    config = cls.Config(type_map=["H", "C", "F", "O"], atom_types=[1, 8])
    assert "C, F" in cls.complete(config, None)[1][0]


def test_a_batch_sees_each_frame_alone():
    """Charges are neutral in each frame, and dipoles do not leak from one frame to the next."""
    model = make("pinet_dipole", kind="AC")
    frames = [structure(1, 6), structure(2, 4, cell=None)]
    batch = batch_of(model, *frames)
    together = model(batch, ("dipole",))["dipole"]
    apart = torch.cat([model(batch_of(model, f), ("dipole",))["dipole"] for f in frames])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)
