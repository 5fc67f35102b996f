"""What PiNN scripts call for their data."""

from __future__ import annotations

import shutil
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from mimic_files import energies_text, energy, run_frames, write_run

from allforce.data.discover import open_systems
from allforce.data.mimic import HARTREE
from allforce.data.pinn import distribute_data, load_ase, load_mimic, load_tfrecord, sparse_batch
from allforce.errors import UserError

PINN_DATA = Path(__file__).parent / "pinn_data"  # water.* written with TensorFlow 2.21, water.npz holds its numbers


def worker(monkeypatch, rank: int, size: int) -> None:
    for name, value in {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}.items():
        monkeypatch.setenv(f"ALLFORCE_{name}", str(value))


@pytest.mark.parametrize("size, expected", [(1, ["abcdefg"]), (3, ["abc", "de", "fg"]), (7, list("abcdefg"))])
def test_chunks(monkeypatch, size, expected):
    for rank, letters in enumerate(expected):
        worker(monkeypatch, rank, size)
        one, two = distribute_data(list("abcdefg"), list("ABCDEFG"))
        assert one == list(letters) and two == list(letters.upper())


def test_lists_that_cannot_be_distributed(monkeypatch):
    worker(monkeypatch, 0, 3)
    with pytest.raises(UserError, match="3 in list 0, 2 in list 1"):
        distribute_data(list("abc"), list("ab"))
    with pytest.raises(UserError, match="2 file.s. for 3 workers"):
        distribute_data(list("ab"), list("ab"))


def test_files_in_other_forms(runs, monkeypatch):
    """Paths, one file without a list, generators; a chunk that a script made a plain list of."""
    paths = [[Path(file) for file in files] for files in runs]
    assert names(load_mimic(*paths)["train"]) == names(load_mimic(*runs)["train"])
    assert len(load_mimic(*(files[0] for files in paths), split=1)) == 4
    worker(monkeypatch, 1, 2)
    mpt, trr, ener = distribute_data(*(iter(files) for files in paths))
    assert trr == paths[1][2:]
    assert len(load_mimic(mpt, list(trr), ener, split=1)) == 6
    with pytest.raises(UserError, match="load_mimic, before distribute_data: .* found 3 in mpt, 2 in trr"):
        load_mimic(mpt, distribute_data(paths[1][:2])[0], ener)


def test_mistakes_are_told(runs):
    for how in ({"match": "name"}, {"column": 3}):
        with pytest.raises(UserError, match="should be match"):
            load_mimic(*runs, **how)
    with pytest.raises(UserError, match="empty"):
        load_mimic([], [], [])
    for size in (0, 2.5, "ten"):
        with pytest.raises(UserError, match="expected a whole number of at least 1"):
            sparse_batch(size)
    with pytest.raises(UserError, match=r"Dataset\.map is not offered"):
        load_mimic(*runs)["train"].map(print)


def test_a_part_of_a_data_set(runs):
    whole = load_mimic(*runs, split=1)
    assert whole.take(4).frames + whole.skip(4).frames == whole.frames and len(whole.take(4)) == 4


@pytest.fixture
def runs(tmp_path):
    files = [
        write_run(tmp_path, f"run{n}", run_frames(range(1, 5 + n), seed=n), energies_text(range(1, 9)))
        for n in range(3)
    ]
    return [f.mpt for f in files], [f.trr for f in files], [f.energies for f in files]


def names(dataset) -> set[tuple[str, int]]:
    return {(dataset.whole[i].name, k) for i, k in dataset.frames}


def test_samples_and_split(runs):
    everything = load_mimic(*runs, split=1, shuffle=False)
    assert len(everything) == 4 + 5 + 6  # the last frame of every file included
    sample = everything[4 + 2]
    np.testing.assert_allclose(sample["coord"], run_frames(range(1, 6), seed=1)[2]["x"] * 10, rtol=1e-6)
    assert sample["elems"].tolist() == [8, 1, 1] * 3 + [11, 8, 1, 1, 11]
    assert sample["e_data"] == pytest.approx(energy(3) * HARTREE) and sample["f_data"].shape == (14, 3)
    parts = load_mimic(*runs, split={"fit": [6, 2], "test": {"near": 1, "far": 1}})
    leaves = [*parts["fit"], parts["test"]["near"], parts["test"]["far"]]
    assert [len(leaf) for leaf in leaves] == [9, 3, 2, 1]  # ceil(15·w/10), the last has what is left
    assert set.union(*map(names, leaves)) == names(everything) and sum(map(len, leaves)) == 15
    again = load_mimic(*runs, split={"fit": [6, 2], "test": {"near": 1, "far": 1}})
    assert again["fit"][0].frames == parts["fit"][0].frames
    assert load_mimic(*runs, split={"fit": [6, 2], "test": 2}, seed=1)["fit"][0].frames != parts["fit"][0].frames
    assert len(load_mimic(*(files[0] for files in runs))["train"]) == 4  # three paths instead of lists, 8 : 1 : 1


@pytest.mark.parametrize("size", [2, 3])
def test_the_number_of_workers_does_not_change_the_split(runs, monkeypatch, size):
    serial = load_mimic(*runs)
    parts = []
    for rank in range(size):
        worker(monkeypatch, rank, size)
        parts.append(load_mimic(*distribute_data(*runs)))
    for leaf in ("train", "vali", "test"):
        each = [names(part[leaf]) for part in parts]
        assert set.union(*each) == names(serial[leaf]) and sum(map(len, each)) == len(serial[leaf])
    assert {name for name, _ in names(parts[0]["train"])} <= set(runs[1][:2])


def test_wrong_splits(runs):
    for split in ({}, "train", {"train": -1}, {"train": 0}):
        with pytest.raises(UserError, match="split"):
            load_mimic(*runs, split=split)
    with pytest.raises(UserError, match="3 in mpt, 2 in trr"):
        load_mimic(runs[0], runs[1][:2], runs[2])


def test_a_data_set_as_systems(runs):
    """What a trainer takes: the frames of one leaf, read one by one, types as the model numbers them."""
    leaf = load_mimic(*runs)["train"].repeat().shuffle(100).apply(sparse_batch(7))
    systems = leaf.systems()
    assert leaf.batch_size == 7 and sum(s.nframes for s in systems) == len(leaf)
    for system in systems:
        system.use_type_map(["Na", "H", "O"])
        assert [system.type_map[t] for t in system.frame(system.nframes - 1).type[:3]] == ["O", "H", "H"]
    whole = {s.name: s for s in leaf.whole}
    first = systems[0]
    assert (first.frame(0).coord == whole[first.name].frame(first.frames[0]).coord).all()
    assert leaf[0]["elems"].tolist()[:3] == [8, 1, 1]


def test_data_set_of_pinn():
    numbers = np.load(PINN_DATA / "water.npz")
    dataset = load_tfrecord(str(PINN_DATA / "water.yml"), shuffle=False)
    assert len(dataset) == 4
    for k, sample in enumerate(dataset):
        assert sample.keys() == {"elems", "coord", "cell", "e_data", "f_data", "s_data"}
        for name, value in sample.items():
            np.testing.assert_allclose(value, numbers[f"{k}/{name}"], rtol=1e-14, err_msg=name)
    systems = open_systems(str(PINN_DATA / "water.yml"), ["O", "H"])
    assert [(s.natoms, s.nframes, s.periodic) for s in systems] == [(3, 3, True), (6, 1, True)]
    assert systems[0].frame(1).type.tolist() == [0, 1, 1]
    assert systems[0].label_names == {"energy", "force", "virial"}


def test_damaged_data_sets_of_pinn(tmp_path):
    rng = np.random.default_rng(2)
    whole = (PINN_DATA / "water.tfr").read_bytes()
    shutil.copy(PINN_DATA / "water.yml", tmp_path)
    path, refused = tmp_path / "water.tfr", 0
    for k in range(300):
        data = bytearray(whole)
        if k % 3 == 0:
            del data[int(rng.integers(len(data))) :]
        else:
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        path.write_bytes(data)
        try:
            for system in open_systems(str(tmp_path / "water.yml"), ["O", "H"]):
                [system.frame(n) for n in range(system.nframes)]
        except UserError as error:
            refused += 1
            assert "water" in str(error)
    assert refused > 100
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"water\.tfr: sample \d, at byte \d+: the file ends before it"):
        open_systems(str(tmp_path / "water.yml"), ["O", "H"])
    (tmp_path / "water.yml").write_text("network: {name: PiNet}\n")
    with pytest.raises(UserError, match="not a data set of PiNN"):
        open_systems(str(tmp_path / "water.yml"), ["O", "H"])


def test_extended_xyz(tmp_path):
    rng = np.random.default_rng(3)
    frames = []
    for _ in range(4):
        atoms = Atoms("OH2", rng.normal(size=(3, 3)), cell=np.eye(3) * 8, pbc=True)
        stress = rng.normal(size=6)
        atoms.calc = SinglePointCalculator(atoms, energy=rng.normal(), forces=rng.normal(size=(3, 3)), stress=stress)
        frames.append(atoms)
    ase.io.write(tmp_path / "water.xyz", frames, format="extxyz")
    parts = load_ase(str(tmp_path / "water.xyz"), split={"train": 3, "test": 1}, shuffle=False)
    assert [len(parts[name]) for name in ("train", "test")] == [3, 1]
    sample = parts["test"][0]
    np.testing.assert_allclose(sample["f_data"], frames[3].get_forces(), atol=1e-8)
    np.testing.assert_allclose(sample["s_data"], frames[3].get_stress(voigt=False), atol=1e-8)
