"""Files that cannot be right: one paragraph, no traceback, no signal, no memory without bounds."""

import os
import resource
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from run import ROOT, Run
from tiny import changed, write_data, write_input, write_system

from allforce.cli import main
from allforce.config.load import parse_input
from allforce.config.read import read_file
from allforce.data.arrays import open_npy
from allforce.data.discover import open_systems
from allforce.errors import UserError
from allforce.files import checkpoint
from allforce.files.checkpoint import Checkpoint
from allforce.files.model_file import load_model, save_model
from allforce.infer.ase import DP
from allforce.models import MODELS
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
    "nul.json": ('{"training": {"disp_file": "a\\u0000b"}}', "the character NUL"),
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


NUMBERS = {
    "training__numb_steps": (10**18, "expected at most 1,000,000,000,000,000"),
    "training__training_data__batch_size": (1e30, "expected at most 1,000,000,000,000,000"),
    "model__descriptor__neuron": ([10**9], "neuron/0: found 1000000000; expected at most 16,384"),
    "model__fitting_net__neuron": ([16000, 16000], r"has 2.6e\+08 weights, at most 2e\+08 are possible"),
    "training__validation_data__numb_btch": (10**9, "expected at most 16,384"),
    "training__table": ({"nodes": 8}, "expected an integer ≥ 9"),
}


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers(key):
    value, words = NUMBERS[key]
    with pytest.raises(UserError, match=words):
        parse_input(changed(**{key: value}))


STRUCTURES = {
    "a cell of 1e300 Å": (np.zeros((1, 3)), np.eye(3) * 1e300, 6.0, r"a cell vector of 1.0e\+300 Å"),
    "an atom at 1e15 Å": (np.array([[0.0, 0, 0], [1e15, 0, 0]]), None, 6.0, r"a coordinate of 1.0e\+15 Å"),
    "a thin cell": (np.zeros((1, 3)), np.diag([0.001, 0.001, 0.01]), 6.0, "pairs within 6.0 Å"),
    "a cutoff of 1000 Å": (np.zeros((192, 3)), np.eye(3) * 12.4, 1000.0, "pairs within 1000.0 Å"),
    "a cutoff of 1e300 Å": (np.zeros((2, 3)), np.eye(3), 1e300, r"a cutoff of 1.0e\+300 Å"),
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
    with Run(tmp_path, "forked", 1, data=False) as run:
        code, text = run.wait()
    assert code == 2 and words in text and "small" in text and "Traceback" not in text, text


def with_atoms(file, **types):
    """An HDF5 file that is a system; `types` is what type.raw is created with."""
    file.create_dataset("type.raw", **(types or {"data": np.zeros(2, int)}))
    frames = file.create_group("set.000")
    frames["coord.npy"], frames["box.npy"] = np.zeros((3, 6)), np.tile(np.eye(3).ravel() * 9, (3, 1))
    return frames


def sparse(file):
    with_atoms(file, shape=(1_600_000_000,), dtype="i8", chunks=(10**6,))


def long_text(file):
    with_atoms(file, shape=(1,), dtype="S1000000000")


def link_to_itself(file):
    with_atoms(file)
    del file["type.raw"]
    file["type.raw"] = h5py.SoftLink("/type.raw")


def link_to_nothing(file):
    frames = with_atoms(file)
    del frames["coord.npy"]
    frames["coord.npy"] = h5py.ExternalLink("missing.h5", "/x")


def repeated(file):
    with_atoms(file)["numb_copy.npy"] = np.full(3, 10**17)


def no_array(file):
    frames = with_atoms(file)
    del frames["coord.npy"]
    frames["coord.npy"] = h5py.Empty("f8")


HDF5 = {
    sparse: r"type.raw: promises 1.3e\+10 bytes",
    long_text: r"type.raw: promises 1.0e\+09 bytes",
    link_to_itself: "type.raw: is a link that leads nowhere",
    link_to_nothing: "coord.npy: is a link that leads nowhere",
    repeated: r"numb_copy.npy: asks for 3.0e\+17 frames",
    no_array: "expected a dataset of real numbers",
}


@pytest.mark.parametrize("build", HDF5)
def test_hdf5(tmp_path, build):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with h5py.File(tmp_path / "data.h5", "w") as file:
        build(file)
    with pytest.raises(UserError, match=HDF5[build]):
        open_systems([str(tmp_path / "data.h5")], ["A"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_rings_of_links_are_not_followed(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        with_atoms(file)
        file["a"], file["b"], file["c"] = h5py.SoftLink("/b"), h5py.SoftLink("/a"), file["/"]
    assert len(open_systems([str(tmp_path / "data.h5")], ["A"])) == 1


@pytest.mark.parametrize("name", ["type.raw", "set.000/coord.npy"])
def test_a_pipe_where_data_are_expected(tmp_path, name):
    write_system(tmp_path / "system", [0, 1], 3, 1)
    (tmp_path / "system" / name).unlink()
    os.mkfifo(tmp_path / "system" / name)
    with pytest.raises(UserError, match="not a file|found a folder, pipe or device"):
        open_systems([str(tmp_path / "system")], ["A", "B"])


@pytest.mark.parametrize("header", ["[{'descr': '<f8'}", "{'descr': '<f8'}\n  x\n y", "{1: 2, 'descr': 3}", "(" * 300])
def test_a_header_of_npy_that_numpy_fails_on(tmp_path, header):
    """Its reader lets errors of Python's tokenizer and comparisons through."""
    text = header.encode().ljust(117) + b"\n"
    (tmp_path / "coord.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(UserError, match="cannot be read as a .npy file"):
        open_npy(str(tmp_path / "coord.npy"))


@pytest.mark.parametrize("suffix", [".dp", ".yaml", ".safetensors"])
def test_weights_that_are_not_numbers(tmp_path, capsys, suffix):
    """They would make all predictions of dp test and of ASE nan, without a word."""
    config = parse_input(changed()).model
    model = MODELS[config.type](config)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    path = tmp_path / f"model{suffix}"
    if suffix == ".safetensors":
        weights = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        checkpoint.write(path, Checkpoint(weights, {"step": 1, "model": model.config.model_dump(mode="json")}))
    else:
        save_model(model, path)
    words = "of this model has numbers that are not finite"
    with pytest.raises(UserError, match=words):
        load_model(path)
    with pytest.raises(UserError, match=words):
        DP(str(path))
    system = write_system(tmp_path / "system", [0, 1], 3, 1)
    assert main(["test", "-m", str(path), "-s", str(system)]) == 2
    assert words in capsys.readouterr().err


def test_models_of_the_wrong_form(tmp_path):
    for number, state in enumerate([3, {"model_params": [1]}, {"model_params": {"descriptor": 5, "fitting_net": 6}}]):
        torch.save({"model": {"_extra_state": state, "model.Default.x": torch.zeros(1)}}, tmp_path / f"{number}.pt")
    (tmp_path / "bomb.yaml").write_text(BOMB + "model: {descriptor: 3}\n")
    for number, tree in enumerate(["[]", '{"model": {"descriptor": 3}}', '{"model": {"type": [], "descriptor": {}}}']):
        with h5py.File(tmp_path / f"{number}.dp", "w") as file:
            file.attrs["json"] = tree
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(UserError, match=path.name):
            load_model(path)


def test_a_terminal_without_utf8():
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "allforce", "doc-train-input"]  # has Å and ≥
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "\\u2265" in done.stdout, done.stderr


def test_a_file_truncated_while_it_is_in_use(tmp_path):
    np.save(tmp_path / "coord.npy", np.zeros((100_000, 9)))
    array = open_npy(str(tmp_path / "coord.npy"))
    assert array.rows(np.array([99_999])).sum() == 0
    os.truncate(tmp_path / "coord.npy", 10_000)
    with pytest.raises(UserError, match="truncated while it was in use"):
        array.rows(np.array([99_999]))
