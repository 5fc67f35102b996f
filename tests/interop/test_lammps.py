"""One script in two LAMMPS: `pair_style deepmd` of the real DeePMD-kit and our `dp lammps`, with the same model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.io import write
from test_deepmd import CASES, HERE, PEER, potential, structures

from allforce.files.model_file import save_model

pytestmark = pytest.mark.skipif(
    not PEER.with_name("lmp").exists(), reason="no LAMMPS with DeePMD-kit here; `make interop` installs it"
)

ENERGY, FORCE, PRESSURE = 1e-8, 1e-8, 1e-6  # eV, eV/Å, relative to the largest
COLUMNS = "step pe etotal press pxx pyy pzz pxy pxz pyz vol".split()
SCRIPT = f"""units metal
atom_style atomic
atom_modify sort 10 4.0
read_data data.lmp
{{pair}}
pair_coeff * * O H
neighbor 1.0 bin
thermo_style custom {" ".join(COLUMNS)}
thermo_modify format float %.16g norm no
thermo 1
dump d all custom 1 forces.{{name}} id fx fy fz
dump_modify d sort id format float %.16g
velocity all create 300 7 loop geom
timestep 0.0002
fix move all nve
run 20
unfix move
fix move all npt temp 300 300 0.05 tri 1.0 1.0 0.2
run 20
unfix move
minimize 0 1e-4 20 40
"""


def run(command: list[str], folder: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def thermo(path: Path) -> list[np.ndarray]:
    """A table (rows, COLUMNS) of every run in a log."""
    blocks = re.findall(r"^ *Step .*\n((?: *\d+ .*\n)+)", path.read_text(), re.M)
    return [np.array([line.split() for line in block.splitlines()], dtype=float) for block in blocks]


def forces(path: Path, atoms: int) -> np.ndarray:
    """(frames, atoms, 3) of a dump."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return np.array([row[1:] for row in rows if len(row) == 4 and row[0].isdigit()], dtype=float).reshape(-1, atoms, 3)


@pytest.fixture(scope="module", params=["smooth", "steep"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both have run the script. Steep: embedding nets whose table has some 3,000 nodes, as HybridMuon makes them."""
    folder, case = tmp_path_factory.mktemp("lammps"), CASES["triclinic"]
    model, steep = potential(case, 3), request.param == "steep"
    for net in model.fitting.nets:  # gentle forces: random ones would throw the atoms onto each other
        net.layers[-1].w.data.div_(-20.0 if steep else 4.0)
    for net in model.descriptor.nets if steep else []:
        net.layers[0].w.data.mul_(10.0)
    save_model(model, folder / "model.dp")
    (folder / "jobs.json").write_text(json.dumps([{"model": "model.dp", "frozen": "model.pb"}]))
    run([str(PEER), str(HERE / "peer.py"), "jobs.json"], folder)
    data = structures(case, 3, frames=1)
    atoms = Atoms(
        np.array(["O", "H"])[data["type"]], data["coord"].reshape(-1, 3), cell=data["cell"][0].reshape(3, 3), pbc=True
    )
    write(folder / "data.lmp", atoms, format="lammps-data", specorder=["O", "H"], masses=True)
    theirs = "plugin load libdeepmd_lmpplugin.so\npair_style deepmd model.pb"
    for name, pair in {"theirs": theirs, "ours": "pair_style allforce"}.items():
        (folder / f"in.{name}").write_text(SCRIPT.format(pair=pair, name=name))
    run([str(PEER.with_name("lmp")), "-in", "in.theirs", "-log", "log.theirs"], folder)
    run([sys.executable, "-m", "allforce", "lammps", "-m", "model.dp", "-in", "in.ours"], folder)
    return folder


@pytest.mark.parametrize("number, what", list(enumerate(["nve", "npt", "minimize"])))
def test_thermodynamic_output(folder: Path, number: int, what: str) -> None:
    there, here = thermo(folder / "log.theirs")[number], thermo(folder / "log.lammps")[number]
    assert there.shape == here.shape and len(there) > 5
    apart = dict(zip(COLUMNS, np.abs(here - there).max(axis=0), strict=True))
    largest = dict(zip(COLUMNS, np.abs(there).max(axis=0), strict=True))
    print(what, {name: f"{value:.1e}" for name, value in apart.items()})
    assert np.ptp(there[:, 1]) > 1e-4  # something happened
    assert apart["pe"] < ENERGY and apart["etotal"] < ENERGY
    for name in COLUMNS[3:]:
        assert apart[name] < PRESSURE * max(largest["press"], largest[name]), name


def test_forces(folder: Path) -> None:
    n = sum(CASES["triclinic"].natoms)
    there, here = forces(folder / "forces.theirs", n), forces(folder / "forces.ours", n)
    assert there.shape == here.shape and len(there) > 50 and np.abs(there).max() > 0.05
    assert np.abs(here - there).max() < FORCE
