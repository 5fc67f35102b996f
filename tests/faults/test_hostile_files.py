"""Files that cannot be right: one paragraph, no traceback, no signal, no memory without bounds."""

import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from run import ROOT
from tiny import write_data, write_input

from allforce.config.read import read_file
from allforce.data.arrays import open_npy
from allforce.errors import UserError
from allforce.neighbors import neighbor_list

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 10)
)
INPUTS = {
    "alias bomb.yaml": (BOMB, "aliases written out"),
    "alias of itself.yaml": ("a: &a [1, *a]\n", "contains itself"),
    "nested.json": ("[" * 100_000, "nested too deeply"),
    "nested.yaml": ("[" * 5_000 + "]" * 5_000, "nested too deeply"),
    "digits.json": ('{"training": {"numb_steps": ' + "1" * 5_000 + "}}", "cannot be read"),
    "digits.yaml": ("a: " + "1" * 5_000, "cannot be read"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_input_files(tmp_path, name):
    text, words = INPUTS[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_file(path)


def test_a_pipe_where_an_input_is_expected(tmp_path):
    os.mkfifo(tmp_path / "input.json")
    with pytest.raises(UserError, match="not a file"):
        read_file(tmp_path / "input.json")


STRUCTURES = {
    "a cell of 1e300 Å": (np.zeros((1, 3)), np.eye(3) * 1e300, 6.0, r"a cell vector of 1.0e\+300 Å"),
    "an atom at 1e15 Å": (np.array([[0.0, 0, 0], [1e15, 0, 0]]), None, 6.0, r"a coordinate of 1.0e\+15 Å"),
    "a thin cell": (np.zeros((1, 3)), np.diag([0.001, 0.001, 0.01]), 6.0, "pairs within 6.0 Å"),
    "a cutoff of 1000 Å": (np.zeros((192, 3)), np.eye(3) * 12.4, 1000.0, "pairs within 1000.0 Å"),
    "no volume": (np.zeros((1, 3)), np.ones((3, 3)), 6.0, "has no volume"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name):
    """Refused before memory is asked for; a signal would end the tests."""
    coord, cell, rcut, words = STRUCTURES[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=words):
        neighbor_list(coord, cell, rcut, where="small, frame 3")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def train(folder) -> tuple[int, str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "allforce", "train", "input.json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stderr


def spoil_box(folder):
    boxes = np.load(folder / "small/set.000/box.npy")
    boxes[7] *= 1e300
    np.save(folder / "small/set.000/box.npy", boxes)


def repeat_name(folder):
    (folder / "small/type_map.raw").write_text("A\nA\n")


def large_type(folder):
    (folder / "small/type.raw").write_text("0 1 1 0 99999999999999999999999")


@pytest.mark.parametrize(
    "spoil, words",
    [(spoil_box, "frame 7: a cell vector of"), (repeat_name, "A is there twice"), (large_type, "expected whole")],
)
def test_data(tmp_path, spoil, words):
    write_data(tmp_path)
    write_input(tmp_path)
    spoil(tmp_path)
    code, text = train(tmp_path)
    assert code == 2 and words in text and "small" in text and "Traceback" not in text, text


def test_a_file_truncated_while_it_is_in_use(tmp_path):
    np.save(tmp_path / "coord.npy", np.zeros((100_000, 9)))
    array = open_npy(str(tmp_path / "coord.npy"))
    assert array.row(99_999).sum() == 0
    os.truncate(tmp_path / "coord.npy", 10_000)
    with pytest.raises(UserError, match="truncated while it was in use"):
        array.row(99_999)
