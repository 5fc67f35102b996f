"""Inputs, data and model files with random faults: a correct result or a UserError; no other error, no memory without
bounds. ALLFORCE_MUTATIONS says how many inputs, data sets and model files are tried (make faults: thousands).
"""

import copy
import json
import os
import resource
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run import ROOT  # noqa: F401 - it makes tests/integration importable
from tiny import INPUT, write_system

from allforce.config.load import load_input, parse_input
from allforce.config.schema import Input
from allforce.data.discover import open_systems
from allforce.data.prepare import Preparation
from allforce.errors import UserError
from allforce.files import checkpoint
from allforce.files.checkpoint import Checkpoint
from allforce.files.model_file import load_model, save_model
from allforce.models import MODELS, Model

INPUTS, DATA, FILES = map(int, os.environ.get("ALLFORCE_MUTATIONS", "150,150,150").split(","))
MEMORY = 1_000_000  # kB that the whole file may take more than it had at its start


def many(count: int) -> settings:
    """In CI always the same, in the full proof others each time."""
    same = "ALLFORCE_MUTATIONS" not in os.environ
    quiet = list(HealthCheck)
    return settings(max_examples=count, deadline=None, database=None, derandomize=same, suppress_health_check=quiet)


@pytest.fixture(scope="module", autouse=True)
def bounded():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY


# ---- inputs

VALUES = [None, True, -1, 0, 1, 3, 10**9, 10**18, 10**400, 1e30, 1e300, -0.5, float("inf"), float("nan"), "", "a", "\0"]
VALUES += ["auto", "auto:1e9", "max:0", "x" * 10_000, [], [[]], [0], [1, 2, 3], {}, {"type": "no"}, {"a": {"b": []}}]


def paths(node, above=()):
    yield above
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield from paths(node[key], (*above, key))


PATHS = [path for path in paths(INPUT) if path]


def mutated(changes):
    data = copy.deepcopy(INPUT)
    for path, action, value in changes:
        *parents, last = path
        here = data
        try:
            for name in parents:
                here = here[name]
            if action == "set":
                here[last] = copy.deepcopy(value)
            elif action == "add":
                here[str(value)[:20]] = value
            else:
                del here[last]
        except (KeyError, IndexError, TypeError):
            continue
    return data


change = st.tuples(st.sampled_from(PATHS), st.sampled_from(["set", "set", "add", "remove"]), st.sampled_from(VALUES))


@many(INPUTS // 2)
@given(st.lists(change, min_size=1, max_size=3))
def test_values_of_an_input(changes):
    try:
        assert isinstance(parse_input(mutated(changes)), Input)
    except UserError as error:
        assert len(str(error)) < 20_000


flips = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=8)
cut = st.one_of(st.none(), st.floats(0, 1))


def damage(data: bytes, places, end) -> bytes:
    spoiled = bytearray(data)
    for where, mask in places:
        spoiled[int(where * len(data))] ^= mask
    return bytes(spoiled if end is None else spoiled[: int(end * len(data))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mutations")


@many(INPUTS // 2)
@given(places=flips, end=cut, suffix=st.sampled_from([".json", ".yaml"]))
def test_bytes_of_an_input(folder, places, end, suffix):
    path = folder / f"input{suffix}"
    path.write_bytes(damage(json.dumps(INPUT, indent=1).encode(), places, end))
    try:
        assert isinstance(load_input(path), Input)
    except UserError:
        pass


# ---- data

ARRAYS = ["coord", "box", "energy", "force"]
SHAPES = [(), (0,), (40,), (40, 1), (39, 15), (40, 15), (40, 9), (1, 600), (40, 5, 3), (2, 40, 9)]
NUMBERS = [0.0, 1e300, 1e9, np.nan, np.inf, -1.0]
KINDS = ["f8", "f4", "i8", "u1", "?", "c16", "S3"]
strange = st.tuples(st.sampled_from(ARRAYS), st.sampled_from(SHAPES), st.sampled_from(NUMBERS), st.sampled_from(KINDS))
broken = st.tuples(st.sampled_from([*ARRAYS, "type.raw", "type_map.raw"]), flips, cut)


def spoil(system: Path, how) -> None:
    name, *rest = how
    path = system / (name if name.endswith(".raw") else f"set.000/{name}.npy")
    if isinstance(rest[0], list):
        path.write_bytes(damage(path.read_bytes(), *rest))
        return
    shape, number, kind = rest
    with np.errstate(all="ignore"):
        np.save(path, np.full(shape, number).astype(kind))


@many(DATA)
@given(st.one_of(strange, broken))
def test_data(folder, how):
    system = folder / "system"
    if not system.exists():
        write_system(folder / "good", [0, 1, 1, 0, 1], 40, 1)
    shutil.rmtree(system, ignore_errors=True)
    shutil.copytree(folder / "good", system)
    spoil(system, how)
    try:
        (opened,) = open_systems([str(system)], ["A", "B"])
        for k in (0, opened.nframes - 1):
            frame = opened.frame(k)
            assert frame.coord.shape == (opened.natoms, 3) and np.isfinite(frame.coord).all()
            Preparation(MODEL.needs)(frame, "system")
    except UserError as error:
        assert "system" in str(error)


# ---- models


def small_model() -> Model:
    config = parse_input(copy.deepcopy(INPUT)).model
    return MODELS[config.type](config)


MODEL = small_model()


@pytest.fixture(scope="module")
def files(folder) -> dict[str, bytes]:
    save_model(MODEL, folder / "model.dp")
    save_model(MODEL, folder / "model.yaml")
    meta = {"step": 1, "model": MODEL.config.model_dump(mode="json")}
    tensors = {f"model/{k}": v for k, v in MODEL.state_dict().items()}
    checkpoint.write(folder / "model-1.safetensors", Checkpoint(tensors, meta))
    torch.save({"model": {"_extra_state": {"model_params": meta["model"]}, **tensors}}, folder / "model.pt")
    return {p.suffix: p.read_bytes() for p in folder.glob("model*") if p.is_file()}


@many(FILES // 2)
@given(places=flips, end=cut, suffix=st.sampled_from([".dp", ".yaml", ".safetensors", ".pt"]))
def test_bytes_of_a_model(folder, files, places, end, suffix):
    path = folder / f"broken{suffix}"
    path.write_bytes(broken := damage(files[suffix], places, end))
    try:
        assert isinstance(load_model(path), Model)
        assert suffix != ".safetensors" or broken == files[suffix]  # its damage is always noticed; two flips are none
    except UserError as error:
        assert "broken" in str(error)


def leaves(tree, above=()):
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield (*above, key)
        if isinstance(tree[key], (dict, list)):
            yield from leaves(tree[key], (*above, key))


@many(FILES // 2)
@given(st.data())
def test_leaves_of_a_model(folder, files, data):
    """The tree of a .dp file with an entry of the wrong kind."""
    path = folder / "tree.dp"
    path.write_bytes(files[".dp"])
    with h5py.File(path, "r+") as file:
        tree = json.loads(file.attrs["json"])
        *parents, last = data.draw(st.sampled_from(list(leaves(tree))))
        here = tree
        for name in parents:
            here = here[name]
        here[last] = data.draw(st.sampled_from([v for v in VALUES if v == v]))
        file.attrs["json"] = json.dumps(tree)
    try:
        assert isinstance(load_model(path), Model)
    except UserError as error:
        assert "tree.dp" in str(error)
