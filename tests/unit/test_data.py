"""Systems in all forms: what is read, what is refused and in which words."""

import os

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from data_files import arrays, write_h5, write_npy

from allforce.data import arrays as disk
from allforce.data.discover import find_systems, open_systems
from allforce.errors import UserError


def open_one(place, type_map=("O", "H")):
    (system,) = open_systems(str(place), list(type_map) if type_map else None)
    return system


# ---- DeePMD-kit's layout


def test_npy_frames(tmp_path):
    sets = [arrays(3, seed=0), arrays(2, seed=1)]
    s = open_one(write_npy(tmp_path / "s", sets))
    assert (s.natoms, s.nframes, s.periodic, s.mixed) == (3, 5, True, False)
    assert s.label_names == {"energy", "force", "virial"} and not s.has_fparam and not s.has_aparam
    for k, (part, row) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]):
        frame = s.frame(k)
        np.testing.assert_array_equal(frame.coord.ravel(), sets[part]["coord"][row])
        np.testing.assert_array_equal(frame.cell.ravel(), sets[part]["box"][row])
        np.testing.assert_array_equal(frame.labels["energy"], [sets[part]["energy"][row]])
        np.testing.assert_array_equal(frame.labels["force"].ravel(), sets[part]["force"][row])
        np.testing.assert_array_equal(frame.labels["virial"], sets[part]["virial"][row])
        assert frame.type.tolist() == [0, 1, 1] and frame.coord.dtype == np.float64


def test_a_range_of_frames(tmp_path):
    place = write_npy(tmp_path / "s", [arrays(3, seed=0), arrays(2, seed=1)])
    whole = open_one(place)
    for end, frames in (("@:-2", [0, 1, 2]), ("@-2:", [3, 4]), ("@1:4", [1, 2, 3]), ("@:", [0, 1, 2, 3, 4])):
        part = open_one(f"{place}{end}")
        assert part.nframes == len(frames) and part.label_names == whole.label_names and "@" in part.name
        for k, n in enumerate(frames):
            np.testing.assert_array_equal(part.frame(k).coord, whole.frame(n).coord)
        assert part.model_types.tolist() == whole.model_types.tolist()
    assert find_systems(f"{tmp_path}@1:") == [f"{place}@1:"]
    with pytest.raises(UserError, match="s@7: has no frames, for .*s has 5"):
        open_one(f"{place}@7:")


def test_other_dtypes_and_shapes(tmp_path):
    given = arrays(2)
    given = {k: v.astype(np.float32) for k, v in given.items()}
    given["energy"] = np.array([[1], [2]])  # integers, (frames, 1)
    given["coord"] = np.asfortranarray(given["coord"])
    given["force"] = given["force"].reshape(2, 3, 3)
    given["box"] = given["box"].astype(">f8")
    frame = open_one(write_npy(tmp_path, given)).frame(1)
    np.testing.assert_array_equal(frame.coord.ravel(), given["coord"][1])
    np.testing.assert_array_equal(frame.labels["force"], given["force"][1])
    assert frame.labels["energy"].tolist() == [2.0] and frame.cell[0, 0] == 6.0


def test_single_frame_without_its_axis(tmp_path):
    given = arrays(1)
    flat = {k: v.reshape(-1) for k, v in given.items()}
    s = open_one(write_npy(tmp_path, flat))
    assert s.nframes == 1
    np.testing.assert_array_equal(s.frame(0).coord, given["coord"].reshape(3, 3))
    np.testing.assert_array_equal(s.frame(0).labels["virial"], given["virial"][0])


def test_not_periodic_needs_no_box(tmp_path):
    given = arrays(2)
    del given["box"]
    s = open_one(write_npy(tmp_path, given, nopbc=True))
    assert not s.periodic and s.frame(0).cell is None


def test_parameters_copies_and_atomic_names(tmp_path):
    given = arrays(3) | {
        "fparam": np.arange(6.0).reshape(3, 2),
        "aparam": np.arange(9.0).reshape(3, 3),
        "atomic_ener": np.arange(9.0).reshape(3, 3),
        "atom_pref": np.repeat(np.arange(9.0).reshape(3, 3), 3, axis=1),  # 3·natoms
        "numb_copy": np.array([2, 0, 1]),
    }
    s = open_one(write_npy(tmp_path, given))
    assert s.nframes == 3 and s.fparam_width == 2 and s.aparam_width == 1
    assert [s.frame(k).fparam.tolist() for k in range(3)] == [[0, 1], [0, 1], [4, 5]]
    assert s.frame(2).aparam.tolist() == [[6], [7], [8]]
    assert s.frame(2).labels["atom_ener"].tolist() == [[6], [7], [8]]
    assert s.frame(2).labels["atom_pref"].tolist() == [[6], [7], [8]]


def test_atom_pref_of_width_natoms_and_of_unequal_components(tmp_path):
    s = open_one(write_npy(tmp_path / "a", arrays(1) | {"atom_pref": np.array([[1.0, 2.0, 3.0]])}))
    assert s.frame(0).labels["atom_pref"].tolist() == [[1], [2], [3]]
    s = open_one(write_npy(tmp_path / "b", arrays(1) | {"atom_pref": np.arange(9.0)[None]}))
    with pytest.raises(UserError, match="different weights for x, y, z"):
        s.frame(0)


def test_hdf5_is_the_same_as_npy(tmp_path):
    sets = [arrays(3, seed=0), arrays(2, seed=1)]
    npy = open_one(write_npy(tmp_path / "s", sets))
    write_h5(tmp_path / "d.h5", "/water/cold", sets)
    write_h5(tmp_path / "d.h5", "/water/warm", sets)
    assert len(open_systems(str(tmp_path / "d.h5"), ["O", "H"])) == 2
    h5 = open_one(f"{tmp_path}/d.h5#/water/warm", ["H", "O"])
    assert h5.name.endswith("d.h5#/water/warm") and h5.nframes == 5
    for k in range(5):
        a, b = npy.frame(k), h5.frame(k)
        np.testing.assert_array_equal(a.coord, b.coord)
        np.testing.assert_array_equal(a.cell, b.cell)
        np.testing.assert_array_equal(a.type, 1 - b.type)
        assert a.labels.keys() == b.labels.keys()
        for name in a.labels:
            np.testing.assert_array_equal(a.labels[name], b.labels[name])
    write_h5(tmp_path / "bad.h5", "/", [arrays(1) | {"force": np.array([b"a", b"b"])}])
    with pytest.raises(UserError, match="bad.h5#/set.000/force.npy: expected a dataset of real numbers"):
        open_systems(f"{tmp_path}/bad.h5", ["O", "H"])
    with pytest.raises(UserError, match="no group '/ice'"):
        open_systems(f"{tmp_path}/d.h5#/ice", ["O", "H"])


def test_mixed_type(tmp_path):
    real = np.array([[0, 1, -1], [1, 1, 0]])
    given = arrays(2) | {"real_atom_types": real}
    s = open_one(write_npy(tmp_path, given, types=(0, 0, 0)), ["C", "H", "O"])
    assert s.mixed
    assert s.frame(0).type.tolist() == [2, 1, -1]
    assert s.frame(1).type.tolist() == [1, 1, 2]
    np.save(tmp_path / "set.000" / "real_atom_types.npy", real + 1)
    with pytest.raises(UserError, match=r"frame 0: atom 1 has type 2, but the type map \['O', 'H'\] allows -1 … 1"):
        open_one(tmp_path, ["C", "H", "O"]).frame(0)


def test_a_frame_of_virtual_atoms_alone(tmp_path):
    given = [arrays(2) | {"real_atom_types": np.array([[0, 1, -1], last])} for last in ([0, 1, 1], [-1, -1, -1])]
    s = open_one(write_npy(tmp_path, given))
    assert s.frame(2).type.tolist() == [0, 1, -1]
    with pytest.raises(UserError, match=r"set.001: real_atom_types.npy of frame 1 has virtual atoms \(-1\) only"):
        s.frame(3)


# ---- type maps


def test_types_follow_the_names(tmp_path):
    place = write_npy(tmp_path, arrays(1))
    assert open_one(place, ["H", "C", "O"]).frame(0).type.tolist() == [2, 0, 0]
    with pytest.raises(UserError, match=r"type\(s\) H of its type map \['O', 'H'\] are not in .* \['O', 'C'\]"):
        open_one(place, ["O", "C"])


def test_types_without_names_are_taken_as_they_are(tmp_path):
    place = write_npy(tmp_path, arrays(1), type_map=None)
    assert open_one(place, ["A", "B"]).frame(0).type.tolist() == [0, 1, 1]
    assert open_one(place, None).type_map == ["Type_0", "Type_1"]
    with pytest.raises(UserError, match=r"atom 1 has type 1, but the type map \['A'\] allows 0 … 0"):
        open_one(place, ["A"])


def test_the_longest_type_map_is_adopted(tmp_path):
    a = write_npy(tmp_path / "a", arrays(1))
    b = write_npy(tmp_path / "b", arrays(1), type_map=("O", "H", "N"))
    assert open_systems([a, b], None)[0].type_map == ["O", "H", "N"]
    c = write_npy(tmp_path / "c", arrays(1), type_map=("H", "O"))
    with pytest.raises(UserError, match=r"type maps of the data differ: .*b, \['H', 'O'\] in .*c"):
        open_systems([a, b, c], None)


# ---- discovery


def test_discovery_is_recursive_and_sorted(tmp_path):
    for name in ("z/one", "a/deep/two", "a"):
        write_npy(tmp_path / name, arrays(1))
    assert find_systems(str(tmp_path)) == [f"{tmp_path}/{n}" for n in ("a/deep/two", "a", "z/one")]
    assert find_systems([f"{tmp_path}/z", f"{tmp_path}/a/deep"]) == [f"{tmp_path}/{n}" for n in ("z/one", "a/deep/two")]
    assert find_systems(str(tmp_path), ["*e"]) == [f"{tmp_path}/z/one"]
    assert find_systems(str(tmp_path), ["a/*/t*", "a"]) == [f"{tmp_path}/a", f"{tmp_path}/a/deep/two"]


def test_links_are_followed_but_not_in_rings(tmp_path):
    write_npy(tmp_path / "real" / "s", arrays(1))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "real" / "s")
    (tmp_path / "data" / "ring").symlink_to(tmp_path / "data")
    assert find_systems(str(tmp_path / "data")) == [f"{tmp_path}/data/link"]


def test_hdf5_patterns(tmp_path):
    for group in ("/water/cold", "/water/warm", "/ice"):
        write_h5(tmp_path / "d.h5", group, [arrays(1)])
    assert find_systems(f"{tmp_path}/d.h5", ["w*m"]) == [f"{tmp_path}/d.h5#/water/warm"]


def test_partition_opens_only_its_share(tmp_path):
    for k in range(5):
        write_npy(tmp_path / f"s{k}", arrays(1))
    shares = [[s.name[-2:] for s in open_systems(str(tmp_path), ["O", "H"], rank=r, size=2)] for r in range(2)]
    assert shares == [["s0", "s1", "s2"], ["s3", "s4"]]
    with pytest.raises(UserError, match="5 system.* to 6 workers"):
        open_systems(str(tmp_path), ["O", "H"], rank=0, size=6)
    with pytest.raises(UserError, match="needs model/type_map"):
        open_systems(str(tmp_path), None, rank=0, size=2)


# ---- what is refused


def break_file(path, how):
    """Spoil a good system with 2 frames of 3 atoms."""
    here = path / "set.000"
    big = arrays(2)
    spoil = {
        "no type.raw in set": lambda: (path / "type.raw").write_text(""),
        "words in type.raw": lambda: (path / "type.raw").write_text("O H H"),
        "atoms of type.raw": lambda: (path / "type.raw").write_text("0 1"),
        "coord width": lambda: np.save(here / "coord.npy", big["coord"][:, :8]),
        "force width": lambda: np.save(here / "force.npy", big["force"][:, :6]),
        "energy rows": lambda: np.save(here / "energy.npy", np.zeros(3)),
        "virial width": lambda: np.save(here / "virial.npy", np.zeros((2, 6))),
        "no coord": lambda: (here / "coord.npy").unlink(),
        "no box": lambda: (here / "box.npy").unlink(),
        "no frames": lambda: [np.save(here / f"{n}.npy", v[:0]) for n, v in big.items()],
        "truncated": lambda: os.truncate(here / "force.npy", 200),
        "cut in the header": lambda: os.truncate(here / "force.npy", 50),
        "empty file": lambda: os.truncate(here / "force.npy", 0),
        "not npy": lambda: (here / "force.npy").write_text("1 2 3"),
        "objects": lambda: np.save(here / "force.npy", np.array([{}, {}]), allow_pickle=True),
        "complex": lambda: np.save(here / "force.npy", big["force"] * 1j),
        "no set": lambda: here.rename(path / "other"),
        "unequal sets": lambda: write_npy(path, [big, {k: v for k, v in big.items() if k != "force"}]),
        "negative type": lambda: (path / "type.raw").write_text("0 -1 1"),
        "copies": lambda: np.save(here / "numb_copy.npy", [1, -1]),
    }
    spoil[how]()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no type.raw in set", "type.raw: is empty"),
        ("words in type.raw", "type.raw: expected whole numbers.*'O'"),
        ("atoms of type.raw", r"coord.npy: has shape \(2, 9\), .* coord.npy has 3 atoms in a frame, type.raw has 2"),
        ("coord width", r"coord.npy: has shape \(2, 8\), expected \(2, 9\): .* type.raw has 3"),
        ("force width", r"set.000/force.npy: has shape \(2, 6\), expected \(2, 9\)"),
        ("energy rows", r"energy.npy: has shape \(3,\), expected \(2, 1\): 2 frames as in coord.npy"),
        ("virial width", r"virial.npy: has shape \(2, 6\), expected \(2, 9\)"),
        ("no coord", "set.000: coord.npy is missing"),
        ("no box", "set.000: box.npy is missing.*nopbc"),
        ("no frames", "zero frames"),
        ("truncated", r"force.npy: the file is truncated.*shape \(2, 9\), 272 bytes, but it has 200"),
        ("cut in the header", "force.npy: cannot be read as a .npy file"),
        ("empty file", "force.npy: cannot be read as a .npy file"),
        ("not npy", "force.npy: cannot be read as a .npy file.*magic"),
        ("objects", "force.npy: holds numbers of type object"),
        ("complex", "force.npy: holds numbers of type complex128"),
        ("no set", "no directory set.000"),
        ("unequal sets", "set.000 and set.001 do not have the same files: only one of them has force.npy"),
        ("negative type", "atom 1 has type -1"),
        ("copies", "numb_copy.npy: expected whole numbers >= 0"),
    ],
)
def test_bad_system(tmp_path, how, message):
    place = write_npy(tmp_path / "s", arrays(2))
    open_one(place)
    break_file(tmp_path / "s", how)
    with pytest.raises(UserError, match=message):
        open_one(place)


@pytest.mark.parametrize("form", ["npy", "hdf5"])
def test_axes_do_not_matter_as_in_deepmd_kit(tmp_path, form):
    """Its loader reshapes all arrays but coord.npy; its fparam example has aparam.npy of shape (1, 5400)."""
    plain = arrays(4) | {"aparam": np.arange(24.0).reshape(4, 6), "fparam": np.arange(8.0).reshape(4, 2)}
    shapes = {
        "aparam": (1, 24),
        "fparam": (8,),
        "box": (36,),
        "energy": (1, 4),
        "force": (1, 4, 3, 3),
        "virial": (2, 18),
    }
    odd = plain | {name: plain[name].reshape(shape) for name, shape in shapes.items()}
    a, b = (
        open_one(write_npy(tmp_path / x, given) if form == "npy" else write_h5(tmp_path / f"{x}.h5", "/s", [given]))
        for x, given in (("plain", plain), ("odd", odd))
    )
    assert (b.aparam_width, b.fparam_width) == (a.aparam_width, a.fparam_width) == (2, 2)
    for k in range(4):
        fa, fb = a.frame(k), b.frame(k)
        for name in ("coord", "cell", "aparam", "fparam"):
            np.testing.assert_array_equal(getattr(fa, name), getattr(fb, name))
        for name in ("energy", "force", "virial"):
            np.testing.assert_array_equal(fa.labels[name], fb.labels[name])


@pytest.mark.parametrize(
    ("name", "value"), [("coord", np.nan), ("force", np.inf), ("box", np.nan), ("energy", -np.inf)]
)
def test_numbers_that_are_none(tmp_path, name, value):
    given = arrays(3)
    given[name].reshape(3, -1)[1, 0] = value
    s = open_one(write_npy(tmp_path, given))
    s.frame(0)
    with pytest.raises(UserError, match=rf"set.000: {name}.npy of frame 1 holds {value} \(entry 0"):
        s.frame(1)


def test_nothing_there(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no system found in .*empty"):
        open_systems(str(tmp_path / "empty"), ["O"])
    write_npy(tmp_path / "untyped" / "s", arrays(1))
    (tmp_path / "untyped" / "s" / "type.raw").unlink()
    (tmp_path / "frames.lmdb").mkdir()
    (tmp_path / "frames.lmdb/data.mdb").touch()
    with pytest.raises(
        UserError, match="frames.lmdb: is an LMDB database, a format of data that Allforce does not read"
    ):
        open_systems(str(tmp_path / "frames.lmdb"), ["O"])
    (tmp_path / "one.lmdb").touch()
    with pytest.raises(UserError, match="one.lmdb: is an LMDB database"):
        open_systems(str(tmp_path / "one.lmdb"), ["O"])
    with pytest.raises(UserError, match="untyped/s: has set.000/coord.npy, but type.raw is missing"):
        open_systems(str(tmp_path / "untyped"), ["O"])
    with pytest.raises(UserError, match="missing' does not exist"):
        open_systems(str(tmp_path / "missing"), ["O"])
    with pytest.raises(UserError, match="the list is empty"):
        open_systems([], ["O"])
    (tmp_path / "note.txt").write_text("nothing of the kind")
    with pytest.raises(UserError, match="note.txt: ASE cannot read it"):
        open_systems(str(tmp_path / "note.txt"), ["O"])


# ---- many systems, large files


def test_many_systems_hold_few_files_open(tmp_path):
    shared = arrays(1)
    for k in range(2 * disk.OPEN_FILES // 5):
        write_npy(tmp_path / f"s{k:04d}", shared)
    before = len(os.listdir("/proc/self/fd"))
    systems = open_systems(str(tmp_path), ["O", "H"])
    assert len(os.listdir("/proc/self/fd")) == before
    for s in systems:
        s.frame(0)
    assert len(os.listdir("/proc/self/fd")) <= before + disk.OPEN_FILES


def test_a_frame_of_a_huge_file_is_read_alone(tmp_path):
    nframes, natoms = 200_000, 1000  # 4.8 GB of coordinates, and as much of forces, as holes in the file
    write_npy(tmp_path, {"box": np.tile(np.eye(3).ravel() * 99, (nframes, 1))}, types=[0] * natoms, type_map=("O",))
    for name in ("coord", "force"):
        with open(tmp_path / "set.000" / f"{name}.npy", "wb") as f:
            header = {"descr": "<f8", "fortran_order": False, "shape": (nframes, 3 * natoms)}
            np.lib.format.write_array_header_1_0(f, header)
            f.truncate(f.tell() + nframes * natoms * 24)
    s = open_one(tmp_path, ["O"])
    assert s.nframes == nframes and s.frame(nframes - 1).coord.shape == (natoms, 3)


# ---- files that ASE reads


def labelled(symbols, seed, **results):
    rng = np.random.default_rng(seed)
    atoms = Atoms(symbols, rng.random((len(Atoms(symbols)), 3)) * 5, cell=np.eye(3) * 6 + 0.1, pbc=True)
    values = {
        "energy": rng.normal(),
        "forces": rng.normal(size=(len(atoms), 3)),
        "stress": rng.normal(size=6),
    } | results
    atoms.calc = SinglePointCalculator(atoms, **values)
    return atoms


def test_extxyz(tmp_path):
    images = [labelled("OH2", 0), labelled("OH2", 1), labelled("H2O", 2), labelled("OH2", 3), labelled("N2", 4)]
    ase.io.write(tmp_path / "a.extxyz", images)
    systems = open_systems(str(tmp_path / "a.extxyz"), ["H", "N", "O"])
    assert [(s.name[-11:], s.natoms, s.nframes) for s in systems] == [
        ("/a.extxyz#0", 3, 3), ("/a.extxyz#1", 3, 1), ("/a.extxyz#2", 2, 1)
    ]  # fmt: skip
    frame = systems[0].frame(2)
    assert frame.type.tolist() == [2, 0, 0] and systems[1].frame(0).type.tolist() == [0, 0, 2]
    np.testing.assert_allclose(frame.coord, images[3].positions, atol=1e-7)
    np.testing.assert_allclose(frame.cell, images[3].cell.array, atol=1e-7)
    np.testing.assert_allclose(frame.labels["energy"], [images[3].get_potential_energy()], atol=1e-7)
    np.testing.assert_allclose(frame.labels["force"], images[3].get_forces(), atol=1e-7)
    xx, yy, zz, yz, xz, xy = images[3].get_stress()
    expected = -np.array([xx, xy, xz, xy, yy, yz, xz, yz, zz]) * images[3].get_volume()
    np.testing.assert_allclose(frame.labels["virial"], expected, rtol=1e-6)
    assert open_systems(str(tmp_path / "a.extxyz"), None)[0].type_map == ["H", "O", "N"]
    with pytest.raises(UserError, match=r"type\(s\) N .* are not in"):
        open_systems(str(tmp_path / "a.extxyz"), ["O", "H"])


def test_molecule_without_labels_and_partly_periodic(tmp_path):
    ase.io.write(tmp_path / "m.xyz", Atoms("OH2", np.eye(3)))
    s = open_one(tmp_path / "m.xyz")
    assert not s.periodic and s.frame(0).cell is None and s.label_names == frozenset()
    ase.io.write(tmp_path / "slab.extxyz", Atoms("OH2", np.eye(3), cell=np.eye(3) * 5, pbc=[True, True, False]))
    with pytest.raises(UserError, match=r"slab.extxyz, frame 0: is periodic in some directions only"):
        open_one(tmp_path / "slab.extxyz")


def test_virial_and_parameters_of_the_file(tmp_path):
    atoms = labelled("OH2", 0)
    atoms.info["virial"] = np.arange(9.0).reshape(3, 3)
    atoms.info["fparam"] = np.array([7.0, 8.0])
    atoms.arrays["aparam"] = np.array([1.0, 2.0, 3.0])
    ase.io.write(tmp_path / "v.extxyz", atoms)
    frame = open_one(tmp_path / "v.extxyz").frame(0)
    assert frame.labels["virial"].tolist() == list(range(9))
    assert frame.fparam.tolist() == [7, 8] and frame.aparam.tolist() == [[1], [2], [3]]


@pytest.mark.parametrize(
    "energy, forces, virial",
    [
        ("TotEnergy", "force", "virial"),
        ("DFT_energy", "DFT_forces", "DFT_virial"),
        ("REF_energy", "REF_forces", "REF_stress"),
        ("Energy", "Forces", "Virials"),
        ("E_0", "gradient", "w"),
    ],
)
def test_names_of_labels(tmp_path, energy, forces, virial, caplog):
    """Usual ones are recognised; an entry may name its own."""
    plain, atoms = labelled("OH2", 0), labelled("OH2", 0)
    atoms.calc = None
    volume = plain.get_volume() if "stress" in virial else -1.0
    atoms.info |= {energy: 1.5, virial: np.arange(9.0).reshape(3, 3), "config": "bulk"}
    atoms.arrays[forces] = plain.get_forces()
    ase.io.write(tmp_path / "a.extxyz", atoms)
    entry = str(tmp_path / "a.extxyz")
    if energy == "E_0":
        assert not open_systems(entry, ["O", "H"])[0].label_names
        entry = {"file": entry, "energy": energy, "forces": forces, "virial": virial}
    (system,) = open_systems([entry], ["O", "H"])
    frame = system.frame(0)
    assert frame.labels["energy"].tolist() == [1.5] and caplog.records == []
    np.testing.assert_allclose(frame.labels["force"], plain.get_forces(), atol=1e-7)
    np.testing.assert_allclose(frame.labels["virial"], -np.arange(9.0) * volume, rtol=1e-6)
    assert system.label_hint.startswith("its frames have ") and energy in system.label_hint


def test_labels_that_nobody_reads_are_told(tmp_path, caplog):
    atoms = labelled("OH2", 0)
    atoms.info |= {"DFT_energy": 1.5, "energy_cutoff": 400, "config_type": "bulk", "generation": 3}
    atoms.arrays["DFT_forces"] = np.ones((3, 3))
    ase.io.write(tmp_path / "a.extxyz", [atoms, labelled("OH2", 1)])
    file = str(tmp_path / "a.extxyz")
    (system,) = open_systems(file, ["O", "H"])
    assert system.frame(0).labels["energy"] != 1.5
    (record,) = caplog.records
    assert "not read: DFT_energy (1 frames), DFT_forces (1 frames), energy_cutoff (1 frames). To" in record.getMessage()
    named = {"file": file, "energy": "DFT_energy", "forces": "DFT_forces"}
    first, second = open_systems(named, ["O", "H"])
    assert first.frame(0).labels["energy"] == 1.5 and second.label_names == {"virial"}


def test_names_of_labels_that_are_wrong(tmp_path):
    atoms = labelled("OH2", 0)
    atoms.info["note_energy"] = "unknown"
    ase.io.write(tmp_path / "a.extxyz", atoms)
    file = str(tmp_path / "a.extxyz")
    with pytest.raises(UserError, match="no 'DFT_energy', named for energy. Its frames have .*'note_energy'"):
        open_systems({"file": file, "energy": "DFT_energy"}, ["O", "H"])
    with pytest.raises(UserError, match="frame 0: energy is 'unknown', expected numbers"):
        open_systems({"file": file, "energy": "note_energy"}, ["O", "H"])
    write_npy(tmp_path / "s", arrays(1))
    with pytest.raises(UserError, match="s is in DeePMD-kit's layout, where labels have fixed names"):
        open_systems({"file": str(tmp_path / "s"), "energy": "E"}, ["O", "H"])


def test_broken_extxyz(tmp_path):
    ase.io.write(tmp_path / "a.extxyz", [labelled("OH2", 0), labelled("OH2", 1)])
    text = (tmp_path / "a.extxyz").read_text()
    (tmp_path / "a.extxyz").write_text(text[: len(text) - 60])
    with pytest.raises(UserError, match="a.extxyz: ASE cannot read it"):
        open_one(tmp_path / "a.extxyz")
    atoms = labelled("OH2", 0)
    atoms.positions[1, 1] = np.nan
    ase.io.write(tmp_path / "b.extxyz", [labelled("OH2", 0), atoms])
    with pytest.raises(UserError, match="b.extxyz: positions of frame 1 holds nan"):
        open_one(tmp_path / "b.extxyz")
