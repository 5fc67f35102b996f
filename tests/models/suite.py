"""What every model must hold, as one class to inherit: `class TestMine(ModelSuite): make = staticmethod(...)`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from allforce.data.batch import Batch, Frame
from allforce.data.loader import collate, collate_parts
from allforce.data.prepare import Preparation
from allforce.models import pool
from allforce.models.model import per_atom
from allforce.models.parts import summands
from allforce.models.potential import Potential
from allforce.neighbors import neighbor_list

# Named tolerances. Forces by central differences of step h = 1e-5 are good to about h² = 1e-10 of their size.
FINITE_DIFFERENCE = 2e-8
SYMMETRY = 1e-11
SAME = 1e-12

CELLS = {
    "cubic": np.eye(3) * 7.0,
    "triclinic": np.array([[7.0, 0.0, 0.0], [2.1, 6.5, 0.0], [-1.3, 1.7, 6.1]]),
    "smaller than the cutoff": np.array([[3.3, 0.0, 0.0], [0.4, 3.2, 0.0], [0.0, 0.6, 3.5]]),
    "none": None,
}


def structure(seed: int = 0, natoms: int = 9, ntypes: int = 2, cell: np.ndarray | None = CELLS["cubic"]) -> Frame:
    """Random atoms, none closer than 0.8 Å to another or to an image."""
    rng = np.random.default_rng(seed)
    box = np.eye(3) * 5.0 if cell is None else cell
    coord = np.empty((0, 3))
    while len(coord) < natoms:
        trial = np.vstack([coord, rng.uniform(0, 1, 3) @ box])
        _, _, r = neighbor_list(trial, cell, 2.0)
        if len(r) == 0 or np.linalg.norm(r, axis=1).min() > 0.8:
            coord = trial
    return Frame(coord, rng.integers(0, ntypes, natoms), cell)


def batch_of(model: Potential, *frames: Frame) -> Batch:
    prepare = Preparation(model.needs)
    parts = [prepare(f, "a frame") for f in frames]
    return collate([f for f, _ in parts], [pairs for _, pairs in parts], len(model.type_map))


ALL = ("energy", "forces", "virial", "atomic energy")


def evaluate(model: Potential, *frames: Frame, wanted: tuple[str, ...] = ALL) -> SimpleNamespace:
    """Results in the order of the frames' atoms, by names without blanks: energy, forces, atomic_energy, …"""
    batch = batch_of(model, *frames)
    with torch.no_grad():
        p = model(batch, wanted)
    back = torch.empty_like(batch.order)
    back[batch.order] = torch.arange(len(back))
    return SimpleNamespace(**{k.replace(" ", "_"): v[back] if per_atom(k) else v for k, v in p.items()})


def energy(model: Potential, frame: Frame, coord: np.ndarray | None = None, cell: np.ndarray | None = None) -> float:
    moved = Frame(
        frame.coord if coord is None else coord,
        frame.type,
        frame.cell if cell is None else cell,
        fparam=frame.fparam,
        aparam=frame.aparam,
    )
    return float(evaluate(model, moved).energy[0])


def results_on_threads(model: Potential, threads: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """Energies, forces and the gradient of a loss on both, of a batch whose loops are shared out however short."""
    monkeypatch.setattr(pool, "ENOUGH", 0)
    frames = (structure(k, 9, len(model.type_map), CELLS["smaller than the cutoff"]) for k in (7, 8))
    batch, before = batch_of(model, *frames), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        p = model(batch, ("energy", "forces"))
        loss = (p["energy"] ** 2).sum() + (p["forces"] ** 2).sum()
        return [p["energy"], p["forces"], *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]
    finally:
        torch.set_num_threads(before)


class ModelSuite:
    """Physics that holds for any energy model. `make()` returns a Potential in float64."""

    @staticmethod
    def make() -> Potential:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Potential:
        return cls.make()

    def frame(self, model: Potential, seed: int = 0, cell: str = "cubic", natoms: int = 9) -> Frame:
        f = structure(seed, natoms, len(model.type_map), CELLS[cell])
        rng = np.random.default_rng(seed + 1000)
        f.fparam = rng.normal(size=model.needs.numb_fparam) if model.needs.numb_fparam else None
        n = model.needs.numb_aparam
        f.aparam = rng.normal(size=(natoms, n)) if n else None
        return f

    @pytest.mark.parametrize("cell", CELLS)
    def test_forces_are_minus_the_gradient(self, model, cell):
        f, h = self.frame(model, 1, cell), 1e-5
        forces = evaluate(model, f).forces
        for atom, c in ((0, 0), (4, 1), (8, 2)):
            step = np.zeros_like(f.coord)
            step[atom, c] = h
            slope = (energy(model, f, f.coord + step) - energy(model, f, f.coord - step)) / (2 * h)
            assert forces[atom, c].item() == pytest.approx(-slope, abs=FINITE_DIFFERENCE)
        assert forces.abs().max() > 1e-3  # there is something to compare

    @pytest.mark.parametrize("cell", ["triclinic", "smaller than the cutoff"])
    def test_virial_is_minus_the_strain_derivative(self, model, cell):
        """Ξ_ab = −∂E/∂ε_ab for r_a → r_a + ε_ab r_b of atoms and cell."""
        f, h = self.frame(model, 2, cell), 1e-5
        virial = evaluate(model, f).virial[0]
        for a in range(3):
            for b in range(3):
                strain = np.eye(3)
                strain[a, b] += h
                up = energy(model, f, f.coord @ strain.T, f.cell @ strain.T)
                strain[a, b] -= 2 * h
                down = energy(model, f, f.coord @ strain.T, f.cell @ strain.T)
                assert virial[3 * a + b].item() == pytest.approx(-(up - down) / (2 * h), abs=5 * FINITE_DIFFERENCE)

    def test_parts_add_up(self, model):
        f = self.frame(model, 3)
        p = evaluate(model, f, wanted=(*ALL, "atomic virial"))
        torch.testing.assert_close(p.atomic_energy.sum(), p.energy[0], rtol=SAME, atol=SAME)
        torch.testing.assert_close(p.atomic_virial.sum(0), p.virial[0], rtol=SAME, atol=SAME)
        assert p.forces.sum(0).abs().max() < SYMMETRY

    def test_translation_and_wrapping(self, model):
        f = self.frame(model, 4, "triclinic")
        p = evaluate(model, f)
        moved = Frame(f.coord + [0.3, -8.1, 2.2] + f.cell[1] * 3, f.type, f.cell, fparam=f.fparam, aparam=f.aparam)
        q = evaluate(model, moved)
        torch.testing.assert_close(p.energy, q.energy, rtol=0, atol=SYMMETRY)
        torch.testing.assert_close(p.forces, q.forces, rtol=0, atol=SYMMETRY)

    def test_rotation(self, model):
        f = self.frame(model, 5, "triclinic")
        Q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))  # may mirror, which holds as well
        p = evaluate(model, f)
        q = evaluate(model, Frame(f.coord @ Q.T, f.type, f.cell @ Q.T, fparam=f.fparam, aparam=f.aparam))
        Q = torch.from_numpy(Q)
        torch.testing.assert_close(p.energy, q.energy, rtol=0, atol=SYMMETRY)
        torch.testing.assert_close(p.forces @ Q.T, q.forces, rtol=0, atol=SYMMETRY)
        torch.testing.assert_close(Q @ p.virial.view(3, 3) @ Q.T, q.virial.view(3, 3), rtol=0, atol=SYMMETRY)

    def test_permutation(self, model):
        f = self.frame(model, 6)
        order = np.random.default_rng(1).permutation(len(f.type))
        p = evaluate(model, f)
        aparam = None if f.aparam is None else f.aparam[order]
        q = evaluate(model, Frame(f.coord[order], f.type[order], f.cell, fparam=f.fparam, aparam=aparam))
        torch.testing.assert_close(p.energy, q.energy, rtol=0, atol=SYMMETRY)
        torch.testing.assert_close(p.forces[order], q.forces, rtol=0, atol=SYMMETRY)
        torch.testing.assert_close(p.atomic_energy[order], q.atomic_energy, rtol=0, atol=SYMMETRY)

    def test_smooth_cutoff(self, model):
        """Energy and force go to a limit when a neighbour comes in through rcut: no jump."""
        d = 1e-7
        fp = None if not model.needs.numb_fparam else np.zeros(model.needs.numb_fparam)
        ap = None if not model.needs.numb_aparam else np.zeros((2, model.needs.numb_aparam))

        def pair(distance: float) -> SimpleNamespace:
            return evaluate(
                model, Frame(np.array([[0, 0, 0], [distance, 0, 0.0]]), np.array([0, 0]), None, fparam=fp, aparam=ap)
            )

        inside, outside = pair(model.needs.limit.rcut - d), pair(model.needs.limit.rcut + d)
        assert abs(float(inside.energy - outside.energy)) < 1e-9
        assert inside.forces.abs().max() < 1e-9
        assert outside.forces.abs().max() == 0.0
        assert pair(0.6 * model.needs.limit.rcut).forces.abs().max() > 1e-6

    def test_batch_equals_single(self, model):
        frames = [
            self.frame(model, 7, "cubic", 9),
            self.frame(model, 8, "triclinic", 5),
            self.frame(model, 9, "cubic", 12),
        ]
        together = evaluate(model, *frames)
        apart = [evaluate(model, f) for f in frames]
        torch.testing.assert_close(together.energy, torch.cat([p.energy for p in apart]), rtol=0, atol=SYMMETRY)
        torch.testing.assert_close(together.forces, torch.cat([p.forces for p in apart]), rtol=0, atol=SYMMETRY)
        torch.testing.assert_close(together.virial, torch.cat([p.virial for p in apart]), rtol=0, atol=SYMMETRY)

    @pytest.mark.parametrize("cell", CELLS)
    @pytest.mark.parametrize("blocks", [2, 3, 4, 12])
    def test_blocks_add_up(self, model, cell, blocks):
        """Frames cut into blocks of space (thinner than the cutoff, some of them empty): outputs and gradient."""
        frames = [self.frame(model, 13, cell), self.frame(model, 14, cell, 5)]
        wanted = (*ALL, "atomic virial")
        whole = model(batch_of(model, *frames), wanted)
        prepare, parts = Preparation(model.needs), []
        for number in range(blocks):
            prepared = [prepare.part(f, "a frame", number, blocks) for f in frames]
            batch = collate_parts([f for f, _ in prepared], [p for _, p in prepared], len(model.type_map))
            parts.append(summands(model, batch, wanted))
        weights = {name: torch.randn(whole[name].shape, dtype=torch.float64) for name in wanted}
        parameters = [p for p in model.parameters() if p.requires_grad]

        def gradient(out: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            loss = sum((weights[name] * out[name]).sum() for name in ALL)
            return list(torch.autograd.grad(loss, parameters, materialize_grads=True))

        for name in wanted:
            total = sum(part[name] for part in parts)
            torch.testing.assert_close(total, whole[name], rtol=SYMMETRY, atol=SYMMETRY)
        expected = torch.cat([g.flatten() for g in gradient(whole)])
        found = sum(torch.cat([g.flatten() for g in gradient(part)]) for part in parts)
        assert (found - expected).norm() <= SAME * expected.norm()

    def test_one_atom(self, model):
        f = self.frame(model, 10, "none", 1)
        p = evaluate(model, f)
        assert torch.isfinite(p.energy).all() and (p.forces == 0).all() and (p.virial == 0).all()

    def test_parameter_gradient(self, model):
        """The derivative of a loss on energy, forces and virial against finite differences in each parameter tensor."""
        batch = batch_of(model, self.frame(model, 11), self.frame(model, 12, "triclinic", 7))
        rng = torch.Generator().manual_seed(0)
        e0, f0, v0 = (torch.randn(n, generator=rng, dtype=torch.float64) for n in ((2,), (16, 3), (2, 9)))

        def loss() -> torch.Tensor:
            e, f, v = (model(batch, ALL)[name] for name in ("energy", "forces", "virial"))
            return ((e / 8 - e0) ** 2).mean() + ((f - f0) ** 2).mean() + ((v - v0) ** 2).mean()

        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss(), parameters)
        h, compared = 1e-5, 0
        for p, g in zip(parameters, gradients, strict=True):
            place = int(g.abs().argmax())
            with torch.no_grad():
                p.view(-1)[place] += h
                up = float(loss())
                p.view(-1)[place] -= 2 * h
                down = float(loss())
                p.view(-1)[place] += h
            assert float(g.view(-1)[place]) == pytest.approx((up - down) / (2 * h), rel=1e-5, abs=1e-8)
            compared += abs(float(g.view(-1)[place])) > 1e-8
        assert compared > len(parameters) // 2

    def test_a_batch_without_atoms_of_a_type(self, model):
        """The gradient of a sum over two frames is the sum of theirs, also where a frame has atoms of one type only."""
        mixed, pure = self.frame(model, 13), self.frame(model, 14, "triclinic", 6)
        pure.type[:] = len(model.type_map) - 1
        parameters = [p for p in model.parameters() if p.requires_grad]

        def gradient(*frames: Frame) -> torch.Tensor:
            p = model(batch_of(model, *frames), ALL)
            loss = sum((p[name] ** 2).sum() for name in ("energy", "forces", "virial"))
            return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

        torch.testing.assert_close(gradient(mixed, pure), gradient(mixed) + gradient(pure), rtol=1e-10, atol=1e-10)

    def test_written_by_hand_or_by_autograd(self, model):
        """A gradient with respect to the edges that a model writes itself is that of its equation, to rounding.

        So are the derivatives of a loss on it. A model that writes none compares equal numbers.
        """
        batch = batch_of(model, self.frame(model, 15), self.frame(model, 16, "triclinic", 7))
        weight = torch.randn(batch.edges.r.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        parameters = [p for p in model.parameters() if p.requires_grad]
        found = []
        for way in (model.energies_and_gradient, partial(Potential.energies_and_gradient, model)):
            e, g = way(batch, batch.edges.r)
            gradient = torch.autograd.grad((e**2).sum() + (weight * g).sum(), parameters)
            found.append((e, g, torch.cat([x.flatten() for x in gradient])))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * float(b.detach().abs().max()))

    def test_energies_alone(self, model):
        """Nothing else is computed when nothing else is asked for, and the energies are the same."""
        f = self.frame(model, 17)
        alone = evaluate(model, f, wanted=("energy",))
        assert not hasattr(alone, "forces") and not hasattr(alone, "virial")
        torch.testing.assert_close(alone.energy, evaluate(model, f).energy, rtol=0, atol=SYMMETRY)
