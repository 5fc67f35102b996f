"""Frames evaluated by several workers of a launcher (infer_suite.py) against one process: to 1e-10."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.io import read, write

from allforce.files.model_file import save_model

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[0] / "models"), str(HERE)]
from infer_suite import STRUCTURES, everything, simulation  # noqa: E402
from make import small_model  # noqa: E402
from test_pinet import make as pinet  # noqa: E402

SUITE = HERE / "infer_suite.py"
TRICLINIC = np.array([[7.0, 0.0, 0.0], [2.1, 6.5, 0.0], [-1.3, 1.7, 6.1]])
THIN = np.array([[3.1, 0.0, 0.0], [0.0, 14.0, 0.0], [0.4, 0.0, 5.0]])
CELLS = {"triclinic": TRICLINIC, "thin": THIN, "cluster": np.eye(3) * 8.0, "slab": np.diag([5.0, 6.0, 30.0])}
CELLS |= {"pair": np.eye(3) * 9.0, "one": np.eye(3) * 5.0}
ATOMS = {"triclinic": 12, "thin": 7, "cluster": 10, "slab": 9, "pair": 2, "one": 1}
PBC = {"cluster": False, "slab": [True, True, False]}


def structure(name: str) -> Atoms:
    """Atoms on places of a grid; half of the slab is below the origin."""
    rng, cell = np.random.default_rng(4), CELLS[name]
    steps = np.maximum(np.round(np.linalg.norm(cell, axis=1) / 1.8), 1).astype(int)
    steps = np.minimum(steps, [9, 9, 3]) if name == "slab" else steps
    grid = np.stack(np.meshgrid(*(np.arange(k) / k for k in steps), indexing="ij"), -1).reshape(-1, 3)
    grid = grid * [1, 1, 0.2] - [0, 0, 0.1] if name == "slab" else grid
    x = (grid[rng.permutation(len(grid))[: ATOMS[name]]] + rng.normal(scale=0.02, size=(ATOMS[name], 3))) @ cell
    return Atoms(["H" if k % 3 else "O" for k in range(len(x))], x, cell=cell, pbc=PBC.get(name, True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models, structures, and what one process finds."""
    root = tmp_path_factory.mktemp("infer")
    save_model(small_model({"sel": [80, 80]}), root / "m.dp")
    save_model(small_model({"sel": [80, 80]}, {"type": "dipole"}), root / "dipole.dp")
    save_model(pinet("pinet"), root / "pinet.dp")
    for name in STRUCTURES:
        write(root / f"{name}.xyz", structure(name))
    np.savez(root / "found1.npz", **everything(root))
    for kind in ("langevin", "verlet"):
        simulation(root, kind)
        (root / f"{kind}.traj").rename(root / f"{kind}1.traj")
    return root


@pytest.mark.parametrize("launcher, ranks", [("hydra", 2), ("hydra", 3), ("torchrun", 2), ("torchrun", 3)])
def test_the_same_as_one_process(launch, folder, launcher, ranks):
    (folder / "md.log").unlink()
    result = launch(launcher, ranks, sys.executable, SUITE, folder, EXPECTED=str(ranks))
    assert result.returncode == 0 and f"passed: {ranks} ranks" in result.stdout, result.stdout
    one, many = np.load(folder / "found1.npz"), np.load(folder / f"found{ranks}.npz")
    assert one.files == many.files
    for name in one.files:
        np.testing.assert_allclose(many[name], one[name], rtol=0, atol=1e-10, err_msg=name)
    for kind in ("langevin", "verlet"):  # rank 0's, with its random numbers
        frames, expected = (read(folder / f"{kind}{one}.traj", ":") for one in ("", "1"))
        assert len(frames) == len(expected) == 6
        for a, b in zip(frames, expected, strict=True):
            np.testing.assert_allclose(a.positions, b.positions, rtol=0, atol=1e-9)
            np.testing.assert_allclose(a.get_momenta(), b.get_momenta(), rtol=0, atol=1e-9)
    assert (folder / "md.log").read_text().count("Time[ps]") == 2  # of the two simulations


@pytest.mark.parametrize("launcher", ["hydra", "torchrun"])
def test_a_script_that_fails_on_one_worker_ends_all(launch, folder, tmp_path, launcher):
    script = tmp_path / "md.py"
    script.write_text(
        "import sys\nfrom ase.io import read\nfrom ase.parallel import world\nfrom allforce.infer.ase import DP\n"
        f"atoms = read({str(folder / 'triclinic.xyz')!r})\n"
        f"atoms.calc = DP({str(folder / 'm.dp')!r})\n"
        "for step in range(9):\n"
        "    atoms.positions += 0.01\n"
        "    atoms.get_forces()\n"
        "    if step == 3 and world.rank == 1: raise RuntimeError('out of paper')\n"
    )
    result = launch(launcher, 2, sys.executable, script, timeout=60)
    assert result.returncode != 0 and "out of paper" in result.stdout, result.stdout


def test_dp_test(launch, folder, tmp_path, monkeypatch):
    """The errors of one process, told once, details written once; and a mistake told once."""
    rng, data = np.random.default_rng(2), tmp_path / "data/set.000"
    data.mkdir(parents=True)
    atoms = structure("triclinic")
    (tmp_path / "data/type.raw").write_text(" ".join("0" if s == "O" else "1" for s in atoms.get_chemical_symbols()))
    (tmp_path / "data/type_map.raw").write_text("O\nH\n")
    labels = {"coord": atoms.positions.ravel() + rng.normal(scale=0.05, size=(5, 36)), "energy": rng.normal(size=5)}
    labels |= {"force": rng.normal(size=(5, 36)), "virial": rng.normal(size=(5, 9))}
    for name, value in (labels | {"box": np.tile(TRICLINIC.ravel(), (5, 1))}).items():
        np.save(data / f"{name}.npy", value)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "allforce", "test", "-m", folder / "m.dp", "-s", "data"]
    texts = []
    for ranks in (1, 3):
        result = launch("hydra", ranks, *command, "-d", f"detail{ranks}")
        assert result.returncode == 0, result.stdout
        texts.append(re.findall(r"((?:Energy|Force|Virial) .*(?:MAE|RMSE).*)", result.stdout))
    assert texts[0] == texts[1] and len(texts[0]) == 20
    for kind in ("e", "f", "v"):
        one, three = (np.loadtxt(f"detail{ranks}.{kind}.out") for ranks in (1, 3))
        np.testing.assert_allclose(three, one, rtol=0, atol=1e-10)
    result = launch("hydra", 2, *command, "-d", "nowhere/detail")
    assert result.returncode == 2 and result.stdout.count("nowhere does not exist") == 1, result.stdout
    assert "Traceback" not in result.stdout
