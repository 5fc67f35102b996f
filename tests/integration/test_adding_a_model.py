"""The page docs/adding_a_model.md, executed: its files in a copy of the program, trained, frozen, loaded, in ASE."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/adding_a_model.md"
WATER = ROOT / "examples/water"

EVALUATE = """
import sys
from ase.io import read
from allforce.infer.ase import DP
import numpy as np
sys.path.insert(0, {tests!r})
from allforce.data.discover import open_systems
from ase import Atoms

frame = open_systems([{system!r}], ["O", "H"])[0].frame(0)
atoms = Atoms([["O", "H"][t] for t in frame.type], frame.coord, cell=frame.cell, pbc=True)
atoms.calc = DP("model.dp")
energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
h = 1e-5
atoms.positions[4, 1] += h
up = atoms.get_potential_energy()
atoms.positions[4, 1] -= 2 * h
down = atoms.get_potential_energy()
print(energy, frame.labels["energy"].item(), forces[4, 1], -(up - down) / (2 * h), np.abs(stress).max())
"""


def blocks() -> list[tuple[str, str]]:
    """(file, code) of the page's Python blocks, which begin with the name of their file."""
    found = re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert [name for name, _ in found] == [
        "allforce/models/radial.py",
        "allforce/models/standard.py",
        "allforce/models/linear.py",
        "allforce/models/standard.py",
    ]
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """A copy of the package with what the page adds to it."""
    root = tmp_path_factory.mktemp("program")
    shutil.copytree(ROOT / "allforce", root / "allforce", ignore=shutil.ignore_patterns("__pycache__"))
    for name, code in blocks():
        path = root / name
        if not path.exists():
            path.write_text(code)
            continue
        imports = "".join(line for line in code.splitlines(keepends=True) if line.startswith("from "))
        entries = "".join(line for line in code.splitlines(keepends=True) if line.startswith(("DESCR", "FITT")))
        text = path.read_text()
        before, table, after = text.partition("\nif TYPE_CHECKING:")
        assert imports and entries and table
        before = before.replace(
            "from __future__ import annotations\n", f"from __future__ import annotations\n\n{imports}"
        )
        path.write_text(f"{before}\n{entries}{table}{after}")
    return root


def run(program: Path, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(program), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_page_is_a_working_model(program, tmp_path):
    section = json.loads(re.search(r"^```json\n(.*?)^```", PAGE.read_text(), re.S | re.M)[1])  # type: ignore[index]
    config = json.loads((WATER / "input.json").read_text())
    config["model"] = {"type_map": ["O", "H"], **section}
    config["model"]["fitting_net"]["seed"] = 1
    del config["training"]["validation_data"]
    config["training"] |= {"numb_steps": 200, "disp_freq": 40, "save_freq": 200, "disp_avg": True}
    config["training"]["training_data"]["systems"] = str(WATER / "data/train")
    config["learning_rate"]["start_lr"] = 0.01
    (tmp_path / "input.json").write_text(json.dumps(config))

    log = run(program, tmp_path, "-m", "allforce", "train", "--workers", "2", "input.json")
    assert str(program) in run(program, tmp_path, "-c", "import allforce; print(allforce.__file__)")
    assert "finished training" in log
    force = np.loadtxt(tmp_path / "lcurve.out")[:, 3]
    assert force[-1] < 0.9 * force[0]  # it learns

    run(program, tmp_path, "-m", "allforce", "freeze", "-o", "model.dp")
    test = run(program, tmp_path, "-m", "allforce", "test", "-m", "model.dp", "-s", str(WATER / "data/valid"))
    assert "Force  RMSE" in test
    code = EVALUATE.format(tests=str(ROOT / "tests"), system=str(WATER / "data/valid/300K"))
    energy, label, force_x, slope, stress = map(float, run(program, tmp_path, "-c", code).split()[-5:])
    assert energy == pytest.approx(label, rel=1e-2)  # the bias of the types is in the file
    assert force_x == pytest.approx(slope, abs=1e-6) and abs(force_x) > 1e-4
    assert stress > 0
