"""Batches of a plan are those of collate, counts of many frames at once those of frame after frame, and so are the
messages."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from data_files import arrays, write_h5, write_npy
from hypothesis import given, settings
from hypothesis import strategies as st

from allforce.data.batch import Frame, Frames
from allforce.data.dataset import DataSet
from allforce.data.discover import open_systems
from allforce.data.loader import Loader, collate
from allforce.data.plan import Plan
from allforce.data.prepare import Limit, Needs, Preparation
from allforce.data.sample import count_neighbors
from allforce.data.sampler import Sampler
from allforce.data.system import Part, System
from allforce.distributed.comm import SerialComm
from allforce.errors import UserError

MAP = ["A", "B", "C"]
CELLS = {
    "large": np.diag([15.0, 14.0, 16.0]),
    "cubic": np.eye(3) * 6.0,
    "small": np.diag([2.1, 2.4, 2.0]),
    "triclinic": np.array([[5.0, 0.0, 0.0], [2.3, 4.1, 0.0], [-1.9, 1.2, 3.7]]),
    "left-handed": np.array([[0.0, 4.5, 0.3], [5.0, 0.1, 0.0], [0.2, 0.4, 4.0]]),
    "none": None,
}


def structures(cell, types, count, seed):
    """Random frames of these atoms, each in a cell of its own, in and outside of it."""
    rng = np.random.default_rng(seed)
    n, found = len(types), []
    for _ in range(count):
        own = None if cell is None else cell * rng.uniform(0.9, 1.1)
        coord = rng.random((n, 3)) @ (np.eye(3) * 5 if own is None else own)
        coord += 0.0 if own is None else rng.integers(-2, 3, (n, 3)) @ own
        labels = {"energy": rng.random(1), "force": rng.random((n, 3)), "virial": rng.random(9)}
        found.append(Frame(coord, np.array(types), own, labels | {"atom_ener": rng.random((n, 1))}))
    return found


def together(frames):
    cells = [f.cell for f in frames if f.cell is not None]
    labels = {x: np.stack([f.labels[x] for f in frames]) for x in frames[0].labels}
    return Frames(np.stack([f.coord for f in frames]), np.stack(cells) if cells else None, labels)


def collated(frames, needs):
    prepare = Preparation(needs)
    parts = [prepare(f, "") for f in frames]
    return collate([f for f, _ in parts], [e for _, e in parts], needs.ntypes, "name")


def same(found, expected):
    """Every bit of two batches, or of their edges; the smallest distance is a sum in another order."""
    for x in fields(expected):
        a, b = getattr(found, x.name), getattr(expected, x.name)
        if x.name == "edges":
            same(a, b)
        elif x.name == "labels":
            assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in b), x.name
        elif isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b), x.name
        else:
            assert a == pytest.approx(b, rel=1e-15) if x.name == "nearest" else a == b, x.name


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(CELLS)),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.integers(1, 5),
    st.sampled_from([1.5, 4.2]),
    st.sampled_from([None, 10**6, [10**6] * 3]),
    st.integers(0, 1000),
)
def test_the_batch_is_that_of_collate(cell, types, count, rcut, most, seed):
    frames, needs = structures(CELLS[cell], types, count, seed), Needs(3, Limit(rcut, most))
    same(Plan(frames[0].type, count, needs).batch(together(frames), "name"), collated(frames, needs))


def test_more_edges_than_there_was_space_for():
    """A heap of atoms; afterwards the memory that was kept holds more than the next batch needs."""
    needs = Needs(3, Limit(6.0))
    heap = [Frame(np.random.default_rng(k).random((90, 3)) * 2, np.arange(90) % 3, None) for k in range(2)]
    plan = Plan(heap[0].type, 2, needs)
    for frames in (heap, [Frame(f.coord * 9, f.type, None) for f in heap]):
        same(plan.batch(together(frames), "name"), collated(frames, needs))


@pytest.mark.parametrize("most", [[3, 9, 9], [9, 3, 9], 7])
def test_beyond_a_limit_there_is_no_batch(most):
    frames = structures(CELLS["none"], (1, 0, 0, 1, 0, 0, 1, 1, 2), 2, 3)
    frames[0].coord = frames[0].coord * 100  # nobody has a neighbour there
    plan = Plan(frames[0].type, 2, Needs(3, Limit(20.0, most)))
    assert plan.batch(together(frames), "") is None
    enough = Plan(frames[0].type, 2, Needs(3, Limit(20.0, [4, 4, 1] if isinstance(most, list) else 8)))
    assert enough.batch(together(frames), "") is not None


def spoil(frames, how):
    if how == "touching":
        frames.coord[1, 0] = frames.coord[1, 2] + 1e-5
    elif how == "far":
        frames.coord[1, 0, 0] = 1e12
    elif how == "nan":
        frames.coord[1, 0, 0] = np.nan
    else:
        frames.cell[1] = {"no volume": np.ones((3, 3)), "thin": np.eye(3) * 1e-3, "long": np.eye(3) * 1e300}[how]


@pytest.mark.parametrize("how", ["touching", "far", "nan", "no volume", "thin", "long"])
def test_what_cannot_be_right_is_no_batch(how):
    frames = together(structures(CELLS["cubic"], (1, 0, 2), 3, 1))
    plan = Plan(np.array([1, 0, 2]), 3, Needs(3, Limit(3.0)))
    assert plan.batch(frames, "") is not None
    spoil(frames, how)
    assert plan.batch(frames, "") is None


# ---- frames of a system together

TYPES = (1, 0, 1, 2, 0)


def sets(n=4, labels=("energy", "force", "virial", "atom_ener")):
    return [arrays(n, TYPES, seed=k, labels=labels) for k in range(2)]


def systems(folder):
    """One of every kind."""
    numbers = {"numb_copy": np.array([2, 0, 1, 3])}
    pref = [x | {"atom_pref": np.random.default_rng(1).random((4, 5))} for x in sets()]
    write_npy(folder / "plain", sets()[0], TYPES, MAP)
    write_npy(folder / "sets", sets(), TYPES, MAP)
    write_npy(folder / "copies", [x | numbers for x in sets()], TYPES, MAP)
    write_npy(folder / "pref", pref, TYPES, MAP)
    write_npy(folder / "fortran", {x: np.asfortranarray(y) for x, y in sets()[0].items()}, TYPES, MAP)
    write_npy(folder / "molecule", sets(), TYPES, MAP, nopbc=True)
    write_h5(folder / "file.h5", "/group", sets(), TYPES, MAP)
    found = {
        x: open_systems(str(folder / x), MAP)[0] for x in ("plain", "sets", "copies", "pref", "fortran", "molecule")
    }
    found["hdf5"] = open_systems(f"{folder}/file.h5#/group", MAP)[0]
    found["part"] = Part(found["sets"], [6, 1, 5, 2])
    found["part"].use_type_map(MAP)
    return found


@pytest.mark.parametrize("ks", [[2], [0, 1, 2], [3, 0, 2, 0], [1, 3]])
def test_several_frames_are_the_frames(tmp_path, ks):
    for name, system in systems(tmp_path).items():
        ks = [k % system.nframes for k in (*ks, *([system.nframes - 1] if len(ks) > 2 else []))]
        for labels in (True, False):
            found, expected = system.several(ks, labels), System.several(system, ks, labels)
            assert np.array_equal(found.coord, expected.coord) and found.coord.flags.carray, name
            assert (found.cell is None) == (name == "molecule") == (expected.cell is None)
            assert found.cell is None or np.array_equal(found.cell, expected.cell)
            assert found.labels.keys() == expected.labels.keys() == (system.label_names if labels else set())
            for x in found.labels:
                assert found.labels[x].dtype == np.float64 and np.array_equal(found.labels[x], expected.labels[x]), x


def test_what_is_not_finite_is_named_as_in_a_frame(tmp_path):
    given = sets()
    given[1]["force"][2, 7] = np.inf
    write_npy(tmp_path / "bad", given, TYPES, MAP)
    (system,) = open_systems(str(tmp_path / "bad"), MAP)
    for read in (lambda: system.frame(6), lambda: system.several([0, 5, 6, 1])):
        with pytest.raises(UserError, match=r"set.001: force.npy of frame 2 holds inf \(entry 7 of 15"):
            read()
    assert system.several([0, 6], labels=False).coord.shape == (2, 5, 3)


@pytest.mark.parametrize("size", [1, 3])
def test_batches_of_a_loader_do_not_depend_on_the_way(tmp_path, size, monkeypatch):
    data = DataSet(
        [s for s in systems(tmp_path).values() if s.label_names == {"energy", "force", "virial", "atom_ener"}], size
    )
    for limit in (Limit(3.5), Limit(3.5, [1, 1, 0])):
        quick, plain = (Loader(data, Sampler(data, 1), Needs(3, limit)) for _ in range(2))
        monkeypatch.setattr(plain, "_alike", lambda members: False)
        for m in range(data.total_batches()):
            same(quick.batch(m), plain.batch(m))
        assert (quick.prepare.dropped > 0) == (plain.prepare.dropped > 0) == (limit.most is not None)


# ---- counts

BAD = {
    "touching": "atoms (0 and 2|2 and 0) .* on one place",
    "far": r"a coordinate of 1.0e\+12 Å",
    "nan": "coord.npy of frame 1 holds nan",
    "no volume": "the cell .* has no volume",
    "thin": r"about 1.0e\+12 pairs within 3.0 Å",
    "long": r"a cell vector of 1.0e\+300 Å",
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_counts_of_many_frames_are_those_of_each(tmp_path, cell, mixed, monkeypatch):
    found = together(structures(CELLS[cell], TYPES, 7, 4))
    given = {"coord": found.coord} | ({} if found.cell is None else {"box": found.cell.reshape(7, 9)})
    write_npy(tmp_path / "s", given, TYPES, MAP, nopbc=found.cell is None)
    opened = open_systems(str(tmp_path / "s"), MAP)
    quick = count_neighbors(opened, 4.2, SerialComm(), mixed=mixed)
    monkeypatch.setattr("allforce.data.sample.FEW", 0)
    plain = count_neighbors(opened, 4.2, SerialComm(), mixed=mixed)
    assert quick[0] == pytest.approx(plain[0], rel=1e-14) and quick[1].tolist() == plain[1].tolist()


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("few", [400, 0])
def test_bad_frames_are_named_when_they_are_counted(tmp_path, how, few, monkeypatch):
    frames = together(structures(CELLS["cubic"], (1, 0, 2), 3, 1))
    spoil(frames, how)
    write_npy(tmp_path / "s", {"coord": frames.coord, "box": frames.cell.reshape(3, 9)}, (1, 0, 2), MAP)
    monkeypatch.setattr("allforce.data.sample.FEW", few)
    where = "s/set.000: " if how == "nan" else "s, frame 1: "
    with pytest.raises(UserError, match=where + BAD[how]):
        count_neighbors(open_systems(str(tmp_path / "s"), MAP), 3.0, SerialComm())
