"""DeepPot and the ASE calculator: shapes, order of atoms, batches, cells, the skin, and errors."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import molecule
from ase.md.verlet import VelocityVerlet

from allforce.errors import UserError
from allforce.files.model_file import save_model
from allforce.infer.ase import DP
from allforce.infer.predict import DeepPot
from allforce.models.standard import StandardConfig, StandardModel


def make(fitting: dict | None = None, sel: tuple[int, int] = (40, 60), **model: object) -> StandardModel:
    section = {
        "type_map": ["O", "H"],
        "descriptor": {"type": "se_e2_a", "sel": list(sel), "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8], "seed": 1}
        | {"axis_neuron": 3, "precision": "float64"},
        "fitting_net": {"neuron": [8, 8], "seed": 2, "precision": "float64"} | (fitting or {}),
        **model,
    }
    potential = StandardModel(StandardConfig.model_validate(section))
    with torch.no_grad():
        potential.descriptor.davg[:, 0] = torch.tensor([0.11, 0.07])
        potential.descriptor.dstd.copy_(torch.tensor([[0.2, 0.1, 0.1, 0.1], [0.3, 0.15, 0.15, 0.15]]))
        if potential.config.fitting_net.type == "ener":
            potential.fitting.bias_atom_e.copy_(torch.tensor([-9.0, -1.0]))
        for net in potential.fitting.nets:
            net.layers[-1].w.mul_(0.1)  # gentle forces, so that a simulation stays in order
    return potential


def water(n: int = 2, edge: float = 3.1) -> Atoms:
    """n³ molecules on a lattice, turned at random."""
    rng = np.random.default_rng(0)
    atoms = Atoms(cell=[n * edge] * 3, pbc=True)
    for place in np.ndindex(n, n, n):
        one = molecule("H2O")
        one.rotate(rng.uniform(0, 360), rng.normal(size=3))
        one.translate(np.array(place) * edge)
        atoms += one
    return atoms


def arrays(atoms: Atoms) -> tuple[np.ndarray, np.ndarray, list[int]]:
    types = [{"O": 0, "H": 1}[s] for s in atoms.get_chemical_symbols()]
    return atoms.positions.reshape(1, -1), np.array(atoms.cell).reshape(1, 9), types


def test_shapes_and_questions(tmp_path: Path) -> None:
    save_model(make(), tmp_path / "m.dp")
    dp = DeepPot(str(tmp_path / "m.dp"))
    assert (dp.get_ntypes(), dp.get_rcut(), dp.get_type_map()) == (2, 4.0, ["O", "H"])
    assert (dp.get_dim_fparam(), dp.get_dim_aparam()) == (0, 0)
    x, cell, types = arrays(water())
    n = len(types)
    out = dp.eval(np.repeat(x, 3, 0), np.repeat(cell, 3, 0), types, atomic=True)
    assert [a.shape for a in out] == [(3, 1), (3, n, 3), (3, 9), (3, n, 1), (3, n, 9)]
    assert all(a.dtype == np.float64 for a in out)
    np.testing.assert_allclose(out[3].sum(axis=1), out[0], rtol=1e-12)
    np.testing.assert_allclose(out[4].sum(axis=1), out[2], atol=1e-10)
    assert len(dp.eval(x.reshape(1, -1, 3), cell.reshape(1, 3, 3), types)) == 3
    assert dp.eval_descriptor(x, cell, types).shape == (1, n, 24)
    assert not any(p.requires_grad for p in dp.model.parameters())


def test_order_of_atoms_and_frames_does_not_matter() -> None:
    dp = DeepPot(make())
    x, cell, types = arrays(water())
    rng = np.random.default_rng(1)
    coords = np.concatenate([x + rng.normal(0, 0.05, x.shape) for _ in range(7)])
    cells = np.repeat(cell, 7, 0)
    whole = dp.eval(coords, cells, types, atomic=True)
    whole_d = dp.eval_descriptor(coords, cells, types)
    order = rng.permutation(len(types))
    mixed = coords.reshape(7, -1, 3)[:, order].reshape(7, -1)
    shuffled = dp.eval(mixed, cells, np.array(types)[order], atomic=True)
    for k, per_atom in enumerate((False, True, False, True, True)):
        expected = whole[k][:, order] if per_atom else whole[k]
        np.testing.assert_allclose(shuffled[k], expected, atol=1e-9)
    np.testing.assert_allclose(dp.eval_descriptor(mixed, cells, np.array(types)[order]), whole_d[:, order], atol=1e-12)
    dp.max_atoms = 30  # batches of one frame
    for a, b in zip(dp.eval(coords, cells, types, atomic=True), whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


def test_mixed_types_and_virtual_atoms() -> None:
    """A virtual atom has zeros, and the others do not see it."""
    dp = DeepPot(make())
    x, cell, types = arrays(water())
    n = len(types)
    alone = dp.eval(x, cell, types, atomic=True)
    padded = np.concatenate([x.reshape(-1, 3)[:5], np.full((2, 3), 0.3), x.reshape(-1, 3)[5:]])
    padded_types = np.array([*types[:5], -1, -1, *types[5:]])
    other_types = np.where(padded_types < 0, -1, 1)
    out = dp.eval(
        np.stack([padded.ravel()] * 2),
        np.repeat(cell, 2, 0),
        np.stack([padded_types, other_types]),
        True,
        mixed_type=True,
    )
    real = padded_types >= 0
    np.testing.assert_allclose(out[0][0], alone[0][0], atol=1e-10)
    np.testing.assert_allclose(out[1][0][real], alone[1][0], atol=1e-10)
    assert real.sum() == n
    for value in (out[1], out[3], out[4]):
        assert not value[:, ~real].any()
    hydrogen = dp.eval(x, cell, [1] * n)
    np.testing.assert_allclose(out[0][1], hydrogen[0][0], atol=1e-10)


def test_table_and_exact_agree() -> None:
    x, cell, types = arrays(water())
    fast, exact = DeepPot(make()), DeepPot(make(), table="exact")
    for a, b in zip(fast.eval(x, cell, types, True), exact.eval(x, cell, types, True), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)
    assert exact.model.descriptor.table.grid is None and fast.model.descriptor.table.grid is not None


def test_frame_and_atomic_parameters() -> None:
    model = make({"numb_fparam": 2, "numb_aparam": 1, "default_fparam": [0.1, 0.2]})
    dp = DeepPot(model)
    x, cell, types = arrays(water())
    n = len(types)
    rng = np.random.default_rng(3)
    fparam, aparam = rng.normal(size=(2, 2)), rng.normal(size=(2, n, 1))
    coords, cells = np.repeat(x, 2, 0), np.repeat(cell, 2, 0)
    both = dp.eval(coords, cells, types, fparam=fparam, aparam=aparam)[0]
    single = [dp.eval(x, cell, types, fparam=fparam[k], aparam=aparam[k])[0][0] for k in range(2)]
    np.testing.assert_allclose(both, single, atol=1e-10)
    assert abs(both[0] - both[1]).max() > 1e-6
    default = dp.eval(x, cell, types, aparam=[0.3])[0]
    np.testing.assert_allclose(default, dp.eval(x, cell, types, fparam=[0.1, 0.2], aparam=[0.3])[0])
    with pytest.raises(UserError, match="needs 1 aparam"):
        dp.eval(x, cell, types)
    with pytest.raises(UserError, match="fparam has shape"):
        dp.eval(x, cell, types, fparam=[1.0, 2.0, 3.0], aparam=[0.3])


def test_python_of_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of the water example, as the page says, with a model beside it."""
    root = Path(__file__).resolve().parents[2]
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/quickstart.md").read_text(), re.S)
    (tmp_path / "data").symlink_to(root / "examples/water/data")
    save_model(make(), tmp_path / "model.dp")
    save_model(make({"type": "dipole"}), tmp_path / "dipole.dp")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert names["force"].shape == (20, 96, 3) and names["energy"].shape == (20, 1)
    assert names["dipoles"].shape == (20, 3)
    assert names["atoms"].get_potential_energy() == pytest.approx(names["energy"][0, 0])


def test_arrays_that_may_not_be_written_to() -> None:
    """Warnings are errors here, and torch warns of a tensor over read-only memory."""
    dp = DeepPot(make({"numb_fparam": 2, "numb_aparam": 1}))
    x, cell, types = arrays(water())
    order = np.argsort(types, kind="stable")
    x, types = x.reshape(1, -1, 3)[:, order], np.array(types)[order]
    fparam, aparam = np.ones(2), np.ones((len(types), 1))
    before = dp.eval(x, cell, types, fparam=fparam, aparam=aparam)
    for array in (x, cell, types, fparam, aparam):
        array.setflags(write=False)
    for a, b in zip(before, dp.eval(x, cell, types, fparam=fparam, aparam=aparam), strict=True):
        np.testing.assert_array_equal(a, b)


def test_wrong_arrays_are_named() -> None:
    dp = DeepPot(make())
    x, cell, types = arrays(water())
    with pytest.raises(UserError, match=r"Atom 1 has type 2; the model's type_map \['O', 'H'\] allows 0 … 1"):
        dp.eval(x, cell, [0, 2, *types[2:]])
    with pytest.raises(UserError, match="coords has shape"):
        dp.eval(x[:, :-1], cell, types)
    with pytest.raises(UserError, match="cells has shape"):
        dp.eval(x, cell[:, :3], types)
    with pytest.raises(UserError, match="atom_types has shape"):
        dp.eval(x, cell, types, mixed_type=True)


@pytest.mark.parametrize("coords", [np.zeros((0, 9)), np.zeros((0, 3, 3)), []])
@pytest.mark.parametrize("cells", [np.zeros((0, 9)), np.zeros((0, 3, 3)), [], None])
def test_no_frames(coords: object, cells: object) -> None:
    """Arrays of the usual shapes without rows, so that a loop over chunks of a trajectory needs no special case."""
    dp = DeepPot(make({"numb_fparam": 1}))
    types = [0, 1, 1]
    shapes = [(0, 1), (0, 3, 3), (0, 9), (0, 3, 1), (0, 3, 9)]
    for fparam in (None, [0.5], np.zeros((0, 1))):
        out = dp.eval(coords, cells, types, atomic=True, fparam=fparam)
        assert [a.shape for a in out] == shapes and all(a.dtype == np.float64 for a in out)
    assert [a.shape for a in dp.eval(coords, cells, types)] == shapes[:3]
    mixed = dp.eval(coords, cells, np.zeros((0, 3), dtype=int), atomic=True, mixed_type=True)
    assert [a.shape for a in mixed] == shapes
    assert dp.eval_descriptor(coords, cells, types).shape == (0, 3, 24)


def test_no_frames_with_arrays_that_disagree() -> None:
    dp = DeepPot(make())
    with pytest.raises(UserError, match=r"coords has shape \(1, 0, 3\)"):  # a frame without atoms is not no frame
        dp.eval(np.zeros((1, 0, 3)), None, [0, 1, 1])
    with pytest.raises(UserError, match=r"cells has shape \(1, 9\)"):
        dp.eval([], np.eye(3).reshape(1, 9), [0, 1, 1])
    with pytest.raises(UserError, match="atom_types has 1 frames, coords has 0"):
        dp.eval([], None, [[0, 1, 1]], mixed_type=True)
    with pytest.raises(UserError, match=r"atom_types has shape \(0,\)"):
        dp.eval([], None, [])


def test_too_many_neighbours_keep_the_nearest(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("deepmd"), "propagate", True)
    dp = DeepPot(make(sel=(3, 5)))
    x, cell, types = arrays(water())
    with caplog.at_level("WARNING", logger="deepmd"):
        dp.eval(x, cell, types)
        dp.eval(x, cell, types)
    assert dp.preparation.dropped > 0
    assert [r.levelname for r in caplog.records] == ["WARNING"]


# ---------------------------------------------------------------- ASE


def calculator(**kwargs: object) -> DP:
    return DP(make(), **kwargs)


def test_ase_properties() -> None:
    atoms = water()
    atoms.calc = calculator()
    x, cell, types = arrays(atoms)
    e, f, v, ae, _ = atoms.calc.dp.eval(x, cell, types, atomic=True)
    assert atoms.get_potential_energy() == pytest.approx(e[0, 0], abs=1e-10)
    assert atoms.get_potential_energy(force_consistent=True) == pytest.approx(e[0, 0], abs=1e-10)
    np.testing.assert_allclose(atoms.get_forces(), f[0], atol=1e-10)
    np.testing.assert_allclose(atoms.get_potential_energies(), ae[0, :, 0], atol=1e-10)
    np.testing.assert_allclose(atoms.get_stress(voigt=False), -v[0].reshape(3, 3) / atoms.get_volume(), atol=1e-10)
    np.testing.assert_allclose(atoms.calc.get_property("virial", atoms), v[0].reshape(3, 3), atol=1e-10)


def test_stress_costs_one_evaluation() -> None:
    """Simulations at constant pressure ask for stress and forces in turn: one evaluation a step serves both."""
    atoms = water()
    atoms.calc = calculator()
    calls = []
    results = atoms.calc.dp.results
    atoms.calc.dp.results = lambda *args: calls.append("virial" in args[2]) or results(*args)
    atoms.get_forces()
    atoms.get_stress()
    assert calls == [False, True]
    atoms.positions[0] += 0.01
    atoms.get_forces()
    atoms.get_stress()
    assert calls == [False, True, True]


def test_ase_stress_is_the_derivative_by_strain() -> None:
    atoms = water()
    atoms.calc = calculator()
    stress, h = atoms.get_stress(voigt=False), 1e-5
    for a, b in ((0, 0), (1, 2), (2, 0)):
        energy = []
        for sign in (1, -1):
            strain = np.eye(3)
            strain[a, b] += 0.5 * sign * h
            strain[b, a] += 0.5 * sign * h
            strained = atoms.copy()
            strained.set_cell(atoms.cell @ strain, scale_atoms=True)
            strained.calc = atoms.calc
            energy.append(strained.get_potential_energy())
        assert (energy[0] - energy[1]) / (2 * h) / atoms.get_volume() == pytest.approx(stress[a, b], abs=1e-7)


@pytest.mark.parametrize("pbc", [True, False, (True, True, False), (False, True, False)])
def test_skin_gives_the_same_as_a_new_list(pbc: object) -> None:
    """A simulation that reuses its list agrees with a calculator without skin at every step."""
    atoms = water()
    atoms.pbc = pbc
    atoms.calc = calculator(skin=0.6)
    fresh = calculator(skin=0.0)
    mass = atoms.get_masses()[:, None]
    atoms.set_momenta(np.random.default_rng(0).normal(size=(len(atoms), 3)) * np.sqrt(mass * units.kB * 300.0))
    steps = 40
    md = VelocityVerlet(atoms, timestep=0.5 * units.fs)
    for _ in range(steps):
        md.run(1)
        same = atoms.copy()
        same.calc = fresh
        np.testing.assert_allclose(atoms.get_forces(), same.get_forces(), atol=1e-10)
        assert atoms.get_potential_energy() == pytest.approx(same.get_potential_energy(), abs=1e-9)
    assert 1 < atoms.calc.steps.rebuilds < steps / 2
    assert fresh.steps.rebuilds >= steps


def test_skin_sees_every_change() -> None:
    """Cell, periodicity, elements, number of atoms, a jump of one atom: the list is never stale."""
    atoms = water()
    atoms.calc = calculator(skin=1.0)

    def check() -> None:
        same = atoms.copy()
        same.calc = calculator(skin=0.0)
        np.testing.assert_allclose(atoms.get_forces(), same.get_forces(), atol=1e-10)

    check()
    atoms.set_cell(atoms.cell * 1.001)  # atoms stay where they are
    check()
    atoms.set_cell(atoms.cell * 0.9, scale_atoms=True)
    check()
    atoms.pbc = (True, False, True)
    check()
    atoms.pbc = False
    check()
    atoms.symbols[3] = "H"
    check()
    atoms.positions[5] += 0.8
    check()
    atoms.positions[5] += atoms.cell[0]  # the same place for a periodic structure
    check()
    del atoms[7]
    check()
    atoms.wrap()
    check()


def test_slab_is_a_large_vacuum() -> None:
    """Two periodic directions give the same as a cell with much vacuum in the third."""
    atoms = water()
    atoms.pbc = (True, True, False)
    vacuum = atoms.copy()
    vacuum.cell[2] = [0.0, 0.0, 60.0]
    vacuum.pbc = True
    atoms.calc, vacuum.calc = calculator(), calculator()
    np.testing.assert_allclose(atoms.get_forces(), vacuum.get_forces(), atol=1e-10)
    cluster = atoms.copy()
    cluster.pbc = False
    cluster.calc = calculator()
    assert abs(atoms.get_forces() - cluster.get_forces()).max() > 1e-6
    with pytest.raises(NotImplementedError):
        cluster.get_stress()


def test_small_cell_with_images() -> None:
    """A cell smaller than the cutoff gives a third of the energy of its threefold repetition."""
    small = Atoms("OH2", positions=[[0, 0, 0], [0.9, 0.1, 0.0], [-0.2, 0.9, 0.1]], cell=[3.0, 3.1, 3.2], pbc=True)
    large = small.repeat((3, 1, 1))
    small.calc, large.calc = calculator(), calculator()
    assert large.get_potential_energy() == pytest.approx(3 * small.get_potential_energy(), abs=1e-9)


def test_types_by_symbol() -> None:
    atoms = Atoms("CO", positions=[[0, 0, 0], [1.2, 0, 0]])
    atoms.calc = calculator()
    with pytest.raises(UserError, match="holds C, which the model does not know; its types are O, H"):
        atoms.get_potential_energy()
    atoms.calc = calculator(type_dict={"C": 1, "O": 0})
    same = Atoms("HO", positions=atoms.positions)
    same.calc = calculator()
    assert atoms.get_potential_energy() == pytest.approx(same.get_potential_energy(), abs=1e-12)


def test_parameters_of_a_structure() -> None:
    model = make({"numb_fparam": 1, "numb_aparam": 1})
    atoms = water()
    atoms.calc = DP(model)
    atoms.info["fparam"] = 0.7
    atoms.info["aparam"] = [0.2]
    x, cell, types = arrays(atoms)
    expected = atoms.calc.dp.eval(x, cell, types, fparam=[0.7], aparam=[0.2])[0][0, 0]
    assert atoms.get_potential_energy() == pytest.approx(expected, abs=1e-10)
