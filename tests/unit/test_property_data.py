"""Labels of free names in every kind of file, and the constants of the fitting `property` over workers."""

import copy

import h5py
import numpy as np
import pytest
from ase import Atoms
from ase.io import write
from data_files import arrays, write_h5, write_npy
from test_stats import on_workers

from allforce.config.load import validated_config
from allforce.data.dataset import DataSet
from allforce.data.discover import open_systems
from allforce.data.loader import Loader
from allforce.data.sample import Sample
from allforce.data.sampler import Sampler
from allforce.distributed.comm import SerialComm
from allforce.errors import UserError
from allforce.models import MODELS

NAMED = {"property": ("gap", 2), "atom_property": ("atom_gap", 2)}
MAP = ["A", "B", "C"]


def labelled(nframes=3, types=(0, 1, 1), seed=0):
    rng = np.random.default_rng(seed + 50)
    own = {"gap": rng.normal(size=(nframes, 2)), "atom_gap": rng.normal(size=(nframes, 2 * len(types)))}
    return arrays(nframes, types, seed) | own


def write_extxyz(path, given):
    frames = []
    for k in range(len(given["coord"])):
        atoms = Atoms("OHH", given["coord"][k].reshape(-1, 3), cell=given["box"][k].reshape(3, 3), pbc=True)
        atoms.info["gap"] = given["gap"][k]
        atoms.arrays["atom_gap"] = given["atom_gap"][k].reshape(-1, 2)
        frames.append(atoms)
    write(path, frames, format="extxyz")
    return str(path)


@pytest.mark.parametrize("kind", ["npy", "hdf5", "extxyz"])
def test_labels_of_any_name(kind, tmp_path):
    given = labelled()
    make = {
        "npy": lambda: write_npy(tmp_path / "s", given),
        "hdf5": lambda: write_h5(tmp_path / "d.h5", "/s", [given]),
        "extxyz": lambda: write_extxyz(tmp_path / "s.extxyz", given),
    }
    entry = make[kind]()
    (system,) = open_systems(f"{entry}@1:", ["O", "H"], named=NAMED)
    labels = system.frame(1).labels
    np.testing.assert_allclose(labels["property"], given["gap"][2], rtol=0, atol=1e-7)
    np.testing.assert_allclose(labels["atom_property"], given["atom_gap"][2].reshape(3, 2), rtol=0, atol=1e-7)
    assert not open_systems(entry, ["O", "H"])[0].label_names & {"property", "gap"}  # nobody asked
    (other,) = open_systems(entry, ["O", "H"], named={"property": ("dos_at_fermi", 1)})
    assert "property" not in other.label_names and "property is dos_at_fermi" in other.label_hint


def test_atoms_are_sorted_with_their_labels(tmp_path):
    (system,) = open_systems(write_npy(tmp_path / "s", labelled(1, (1, 0, 1)), (1, 0, 1)), ["O", "H"], named=NAMED)
    frame = system.frame(0)
    ordered = frame.by_type()
    np.testing.assert_array_equal(ordered.labels["atom_property"], frame.labels["atom_property"][[1, 0, 2]])
    np.testing.assert_array_equal(ordered.labels["property"], frame.labels["property"])


def test_names_that_are_usual_or_spelled_otherwise(tmp_path):
    given = arrays() | {"property": np.full(3, 9.0), "atomic_score": np.arange(3.0)}
    place = write_npy(tmp_path / "s", given)

    def first(name, width=1):
        return open_systems(place, ["O", "H"], named={"property": (name, width)})[0].frame(1).labels

    both = first("energy")
    assert both["property"] == both["energy"] == given["energy"][1]
    np.testing.assert_array_equal(first("virial", 9)["property"], given["virial"][1])
    assert first("property")["property"] == 9.0 and first("atomic_score")["property"] == 1.0
    assert "property" not in first("gap")  # property.npy is the property called property, no other


def test_files_that_do_not_fit_are_told_by_their_own_name(tmp_path):
    place = write_npy(tmp_path / "s", labelled())
    with pytest.raises(UserError, match=r"gap.npy: has shape \(3, 2\), expected \(3, 5\): .* 5 numbers for each frame"):
        open_systems(place, ["O", "H"], named={"property": ("gap", 5)})
    broken = labelled()
    broken["gap"][1, 1] = np.nan
    (system,) = open_systems(write_npy(tmp_path / "nan", broken), ["O", "H"], named=NAMED)
    with pytest.raises(UserError, match="gap.npy of frame 1 holds nan"):
        system.frame(1)
    two = write_npy(tmp_path / "two", [labelled(), arrays()])
    with pytest.raises(UserError, match="only one of them has atom_gap.npy, gap.npy"):
        open_systems(two, ["O", "H"], named=NAMED)
    for value, message in ((np.ones(3), "gap has 3 numbers, expected 2"), ("wide", "gap is 'wide', expected numbers")):
        atoms = Atoms("OHH", np.eye(3) * 2)
        atoms.info["gap"] = value
        write(tmp_path / "bad.extxyz", atoms, format="extxyz")
        with pytest.raises(UserError, match=message):
            open_systems(str(tmp_path / "bad.extxyz"), ["O", "H"], named=NAMED)


# ---- the constants


def section(**fitting):
    return {
        "type_map": MAP,
        "descriptor": {"type": "se_e2_a", "sel": [9, 9, 9], "rcut": 3.0, "rcut_smth": 1.0, "neuron": [4]},
        "fitting_net": {"type": "property", "property_name": "gap", "task_dim": 2, "neuron": [3], **fitting},
    }


@pytest.fixture
def data(tmp_path):
    for k, (n, types) in enumerate([(5, (0, 1, 1, 2, 0)), (4, (1, 2, 2)), (3, (0, 0, 1, 1))]):
        write_npy(tmp_path / f"s{k}", labelled(n, types, seed=k), types, MAP)
    write_npy(tmp_path / "without", arrays(2, (0, 1)), (0, 1), MAP)
    return DataSet(open_systems(str(tmp_path), MAP, named=NAMED), 1)


def fitted(model, data, comm, path=None):
    own = copy.deepcopy(model)
    sample = Sample(Loader(data, Sampler(data, 0), model.needs), 10, comm, stat_file=path)
    lines = own.fitting.fit_statistics(sample, own.config)
    sample.file.save()
    return own.fitting.bias.numpy(), own.fitting.std.numpy(), lines


@pytest.mark.parametrize("excluded", [[], [2]])
@pytest.mark.parametrize("intensive", [False, True])
@pytest.mark.parametrize("distinguish", [True, False])
def test_constants_do_not_depend_on_the_workers(distinguish, intensive, excluded, data):
    given = section(intensive=intensive, distinguish_types=distinguish) | {"atom_exclude_types": excluded}
    model = MODELS["standard"](validated_config(given, "test"))
    frames = [s.frame(k) for s in data.systems[:3] for k in range(s.nframes)]
    c = np.array([np.bincount(f.type, minlength=3) for f in frames], dtype=float)
    c[:, excluded] = 0.0
    y, n = np.array([f.labels["property"] for f in frames]), c.sum(1, keepdims=True)
    if distinguish:
        bias = np.linalg.pinv(c / n if intensive else c) @ y
        rest = y - (c / n if intensive else c) @ bias
    else:
        rest = y if intensive else y / n
        bias = np.tile(rest.mean(0), (3, 1))
    std = np.sqrt(((rest - rest.mean(0)) ** 2).mean(0))
    alone = on_workers(1, lambda comm: fitted(model, data, comm))[0]
    np.testing.assert_allclose(alone[0], bias, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(alone[1], np.tile(std, (3, 1)), rtol=1e-9)
    assert f"RMSE of gap {'' if intensive else 'per atom '}after linear regression is: " in alone[2][-1]
    for size in (2, 4):
        for found in on_workers(size, lambda comm: fitted(model, data, comm)):
            assert np.array_equal(found[0], alone[0]) and np.array_equal(found[1], alone[1])


def test_labels_that_are_all_the_same_have_no_deviation(tmp_path):
    """σ = 1 then: with 0 the loss would not be finite."""
    for k, types in enumerate([(0, 1, 1), (0, 0, 1)]):
        given = arrays(3, types, seed=k) | {"gap": np.full((3, 2), [0.1, 0.0])}
        write_npy(tmp_path / f"s{k}", given, types, MAP[:2])
    data = DataSet(open_systems(str(tmp_path), MAP, named=NAMED), 1)
    model = MODELS["standard"](validated_config(section(intensive=True), "test"))
    bias, std, _ = on_workers(1, lambda comm: fitted(model, data, comm))[0]
    assert (std == 1.0).all()
    np.testing.assert_allclose(bias[:2], [[0.1, 0.0]] * 2, atol=1e-12)


def test_constants_are_kept_in_the_file_of_statistics(data, tmp_path):
    model = MODELS["standard"](validated_config(section(), "test"))
    path = str(tmp_path / "stat.hdf5")
    first = on_workers(1, lambda comm: fitted(model, data, comm, path))[0]
    with h5py.File(path) as file:
        assert {"bias_atom_gap", "std_atom_gap"} <= set(file["A B C"])
    with h5py.File(path, "a") as file:
        file["A B C/bias_atom_gap"][0, 0] = 42.0
    again = on_workers(1, lambda comm: fitted(model, data, comm, path))[0]
    assert again[0][0, 0] == 42.0 and np.array_equal(again[1], first[1])
    wide = MODELS["standard"](validated_config(section(task_dim=3), "test"))
    with pytest.raises(UserError, match="bias_atom_gap"):
        fitted(wide, data, SerialComm(), path)
