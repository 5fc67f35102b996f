"""MiMiC data: topology, trajectory and energies against what was written, against another reader, and damaged."""

from __future__ import annotations

import struct
import warnings

import numpy as np
import pytest
from mimic_files import ELEMENTS, WATER, energies_text, energy, run_frames, write_run

from allforce.config.load import load_input
from allforce.data.cpmd import read_energies
from allforce.data.discover import open_systems
from allforce.data.mimic import HARTREE, MimicFiles, MimicSystem
from allforce.data.mpt import Molecule, read_mpt, write_mpt
from allforce.data.trr import TrrFile, write_trr
from allforce.errors import UserError

TYPE_MAP = ["H", "O", "Na"]


def opened(files: MimicFiles) -> MimicSystem:
    system = MimicSystem(files)
    system.use_type_map(TYPE_MAP)
    return system


# ---- the three files


@pytest.mark.parametrize("double", [False, True])
def test_trr_agrees_with_mdanalysis(tmp_path, double):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from MDAnalysis.lib.formats.libmdaxdr import TRRFile
    frames = run_frames(range(0, 40, 10))
    frames[2] = {key: value for key, value in frames[2].items() if key != "v"}
    write_trr(tmp_path / "a.trr", frames, double)
    ours = TrrFile(str(tmp_path / "a.trr"))
    with TRRFile(str(tmp_path / "a.trr")) as theirs:
        assert len(theirs) == len(ours) == 4 and theirs.n_atoms == ours.natoms == len(ELEMENTS)
        for k, frame in enumerate(theirs):
            mine = ours.read(k, ["box", "x", "f"])
            assert frame.step == ours.step[k] == 10 * k and frame.hasv == ours.has("v")[k] == (k != 2)
            for name, value in {"box": frame.box, "x": frame.x, "f": frame.f}.items():
                np.testing.assert_array_equal(mine[name].astype(np.float32), value)  # theirs are float32 always
                np.testing.assert_allclose(mine[name], frames[k][name], rtol=1e-15 if double else 1e-7)
    assert (tmp_path / "a.trr").stat().st_size == 4 * (92 if double else 84) + (8 if double else 4) * (
        4 * 9 + (3 + 3 + 2 + 3) * 3 * len(ELEMENTS)
    )


def test_mdanalysis_writes_what_we_read(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from MDAnalysis.lib.formats.libmdaxdr import TRRFile
    frames = run_frames()
    with TRRFile(str(tmp_path / "a.trr"), "w") as file:
        for f in frames:
            x, v, forces, box = (np.float32(f[name]) for name in ("x", "v", "f", "box"))
            file.write(x, v, forces, box, f["step"], f["time"], 0.0, len(x))
    trr = TrrFile(str(tmp_path / "a.trr"))
    assert trr.step.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(trr.read(4, ["f"])["f"], np.float32(frames[4]["f"]))


def test_mpt_bytes_of_the_check_case(tmp_path):
    """The beginning of a file of MiMiCPy: 100 waters and 2 lipids, no aliases."""
    one = Molecule(["C"], ["C1"], ["CT"], ["DPPC"], [1], [0.1], [12.0])
    write_mpt(tmp_path / "a.mpt", [("DPPC", 2), ("SOL", 100)], {"DPPC": one, "SOL": WATER})
    head = struct.pack(">I8sIIIII", 8, b"DPPC,SOL", 1, 2, 1, 100, 0) + bytes(8)
    assert (tmp_path / "a.mpt").read_bytes().startswith(head)
    topology = read_mpt(str(tmp_path / "a.mpt"))
    assert topology.natoms == 302 and topology.elements().tolist() == ["C"] * 2 + ["O", "H", "H"] * 100
    water = topology.order[1][0]
    assert (water.names, water.types, water.residues) == (WATER.names, WATER.types, WATER.residues)
    np.testing.assert_allclose([water.charges, water.masses], [WATER.charges, WATER.masses], rtol=1e-7)  # float32


def test_mpt_aliases(tmp_path):
    write_mpt(tmp_path / "a.mpt", [("SOL", 1), ("WAT", 2)], {"SOL": WATER})
    raw = (tmp_path / "a.mpt").read_bytes()
    at = 4 + 8 + 8 * 2 + 4  # behind names and copies
    aliased = raw[:at] + struct.pack(">I3sxI3sx", 3, b"WAT", 3, b"SOL") + raw[at + 8 :]
    (tmp_path / "b.mpt").write_bytes(aliased)
    assert read_mpt(str(tmp_path / "b.mpt")).elements().tolist() == ["O", "H", "H"] * 3
    with pytest.raises(UserError, match="WAT.*of which the file has .*SOL"):
        read_mpt(str(tmp_path / "a.mpt"))


LAYOUTS = {  # columns with the potential energy as E
    "Car-Parrinello": "0.01 300.0 E -16.0 -15.9 0.1 1.2",
    "Car-Parrinello with constrained DFT": "0.01 300.0 E -16.0 -15.9 0.1 1.2 0.3 0.4",
    "GROMOS": "0.01 300.0 E -16.0 -15.9 -9.0 0.1 1.2",
    "variable cell": "0.01 0.02 300.0 E -16.0 -15.9 0.1 1.2",
    "diagonalisation": "300.0 E -16.0 0.1 1.2",
    "diagonalisation with constrained DFT": "300.0 E -16.0 0.1 1.2 0.3 0.4",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_energies_of_every_kind_of_run(tmp_path, layout):
    path = tmp_path / "ENERGIES"
    path.write_text("".join(f"{n} {LAYOUTS[layout].replace('E', str(energy(n)))}\n" for n in range(3)))
    steps, energies = read_energies(str(path))
    assert steps.tolist() == [0, 1, 2] and energies.tolist() == [energy(n) for n in range(3)]


def test_energies_that_cannot_be_told_apart(tmp_path):
    path = tmp_path / "ENERGIES"
    path.write_text("1 0.01 0.02 300.0 5.0 16.0 15.9 0.1 1.2\n")
    with pytest.raises(UserError, match="energy_column"):
        read_energies(str(path))
    assert read_energies(str(path), column=4)[1].tolist() == [5.0]


@pytest.mark.parametrize(
    "line, words",
    [("2 0.01 ******* -1.0", "line 2, at byte 20"), ("2 0.01 3.0", "3 columns"), ("2 nan 1 -1", "finite")],
)
def test_damaged_energies(tmp_path, line, words):
    path = tmp_path / "ENERGIES"
    path.write_text(f"1 0.01 300.000 -1.0\n{line}\n")
    with pytest.raises(UserError, match=words):
        read_energies(str(path))


# ---- a system


@pytest.mark.parametrize("double", [False, True])
def test_units_and_order(tmp_path, double):
    frames = run_frames()
    system = opened(write_run(tmp_path, frames=frames, double=double))
    assert (system.nframes, system.natoms, system.periodic) == (5, len(ELEMENTS), True)
    tolerance = 1e-14 if double else 1e-6
    for k in range(5):  # the last one included
        frame = system.frame(k)
        np.testing.assert_allclose(frame.coord, frames[k]["x"] * 10, rtol=tolerance)
        np.testing.assert_allclose(frame.cell, frames[k]["box"] * 10, rtol=tolerance)
        np.testing.assert_allclose(frame.labels["force"], frames[k]["f"] / 964.8533212331002, rtol=1e-6)
        np.testing.assert_allclose(frame.labels["energy"], [energy(k + 1) * 27.211386245988], rtol=1e-9)
        assert [TYPE_MAP[t] for t in frame.type] == ELEMENTS
    # 1 kJ/mol/nm in eV/Å: 1000 / (Avogadro's number · 1.602176634e-19 · 10)
    assert system.frame(0).labels["force"][0, 0] / frames[0]["f"][0, 0] == pytest.approx(
        1000 / (6.02214076e23 * 1.602176634e-19 * 10), rel=1e-6
    )


def test_a_frame_reads_its_own_bytes_only(tmp_path, monkeypatch):
    import os

    system = opened(write_run(tmp_path))
    read, seen = os.pread, []
    monkeypatch.setattr(os, "pread", lambda *args: seen.append(args[1:]) or read(*args))
    system.frame(4)
    n = len(ELEMENTS)
    assert [size for size, _ in seen] == [36, 12 * n, 12 * n]  # box, positions, forces; velocities are passed over
    assert all(at >= system.trr.start[4] for _, at in seen)


def test_step_zero_has_no_energy(tmp_path, caplog):
    with caplog.at_level("INFO"):
        system = opened(write_run(tmp_path, frames=run_frames(range(0, 9, 2)), energies=energies_text(range(1, 9))))
    assert system.trr.step[system.frames].tolist() == [2, 4, 6, 8] and "left out" in caplog.text
    assert system.frame(3).labels["energy"] == pytest.approx(energy(8) * HARTREE)


def test_frame_without_an_energy(tmp_path):
    with pytest.raises(UserError, match=r"frame 4 \(step 5, at byte \d+\).*0 line.s. in .*steps 1 … 4"):
        write = write_run(tmp_path, energies=energies_text(range(1, 5)))
        MimicSystem(write)


def test_restarts(tmp_path):
    """Both files have steps 3, 4 twice; or the trajectory has them once, from the second run."""
    steps = [1, 2, 3, 4, 3, 4, 5]
    lines = energies_text(steps).splitlines(keepends=True)
    lines[4] = lines[4].replace(f"{energy(3):.9f}", "-99.000000000")
    system = opened(write_run(tmp_path, "twice", frames=run_frames(steps), energies="".join(lines)))
    assert system.nframes == 7 and system.energies[4] == -99 * HARTREE and system.energies[2] == energy(3) * HARTREE
    once = opened(write_run(tmp_path, "once", energies="".join(lines)))
    assert once.nframes == 5 and once.energies[2] == -99 * HARTREE


def test_match_by_line(tmp_path):
    frames = run_frames([0] * 5)
    with pytest.raises(UserError, match='set match to "line"'):
        MimicSystem(write_run(tmp_path, frames=frames, energies="1 0.1 300 -5.0 -4 -3 0 0\n0 0.1 300 -5.0 -4 -3 0 0\n"))
    system = opened(write_run(tmp_path, frames=frames, match="line"))
    np.testing.assert_allclose(system.energies / HARTREE, [energy(n) for n in range(1, 6)])
    with pytest.raises(UserError, match="4 lines, but .* 5 frames"):
        MimicSystem(write_run(tmp_path, frames=frames, energies=energies_text(range(1, 5)), match="line"))


def test_missing_blocks(tmp_path, caplog):
    frames = run_frames()
    del frames[1]["f"]
    with pytest.raises(UserError, match=r"frame 1 \(step 2, at byte \d+\): has positions, but no forces"):
        MimicSystem(write_run(tmp_path, frames=frames))
    system = opened(write_run(tmp_path, frames=frames, forces=False))
    assert system.label_names == {"energy"} and system.frame(1).labels.keys() == {"energy"}
    frames = run_frames()
    del frames[1]["x"], frames[1]["f"]
    with caplog.at_level("INFO"):
        assert opened(write_run(tmp_path, frames=frames)).nframes == 4
    assert "1 frame(s) without positions are left out" in caplog.text
    frames = run_frames()
    del frames[4]["box"]
    with pytest.raises(UserError, match="frame 4 .*no box"):
        MimicSystem(write_run(tmp_path, frames=frames))


def test_no_box_is_not_periodic(tmp_path):
    frames = run_frames()
    for frame in frames:
        frame["box"] = np.zeros((3, 3))
    system = opened(write_run(tmp_path, frames=frames))
    assert not system.periodic and system.frame(2).cell is None


def test_truncated_trajectory(tmp_path):
    files = write_run(tmp_path)
    whole = (tmp_path / "run.trr").read_bytes()
    start = TrrFile(files.trr).start
    for cut, words in [(len(whole) - 1, f"frame 4, at byte {start[4]}: needs"), (start[3] + 50, "ends in its header")]:
        (tmp_path / "run.trr").write_bytes(whole[:cut])
        with pytest.raises(UserError, match=rf"run\.trr: .*{words}.*at byte {cut}.*head -c {start[cut // start[1]]}"):
            MimicSystem(files)


def test_a_trajectory_that_goes_away(tmp_path):
    system = MimicSystem(write_run(tmp_path, "a", run_frames(), energies_text(range(9))))
    (tmp_path / "a.trr").unlink()
    with pytest.raises(UserError, match=r"a\.trr: frame 1 \(step 2, .* cannot be read any more \(No such file"):
        system.frame(1)


def test_files_that_do_not_belong_together(tmp_path):
    files = write_run(tmp_path)
    write_mpt(tmp_path / "other.mpt", [("SOL", 2)], {"SOL": WATER})
    with pytest.raises(UserError, match=r"other\.mpt: has 6 atoms, but .*run\.trr has 14"):
        MimicSystem(MimicFiles(str(tmp_path / "other.mpt"), files.trr, files.energies))
    frames = run_frames()
    frames[3] = run_frames([4], natoms=7)[0]
    with pytest.raises(UserError, match="frame 3, at byte .*has 7 atoms, expected 14"):
        MimicSystem(write_run(tmp_path, frames=frames))
    with pytest.raises(UserError, match="cannot be read"):
        MimicSystem(MimicFiles(files.mpt, str(tmp_path / "none.trr"), files.energies))


def test_an_atom_without_an_element(tmp_path):
    files = write_run(tmp_path)
    odd = Molecule(
        ["O", "H", ""],
        *(getattr(WATER, c) for c in ("names", "types", "residues", "residue_ids")),
        [0.0] * 3,
        [1.0] * 3,
    )
    write_mpt(tmp_path / "run.mpt", [("SOL", 4), ("SOL", 0)], {"SOL": odd})
    write_trr(tmp_path / "run.trr", run_frames(natoms=12))
    with pytest.raises(UserError, match="atom 2 .*element ''"):
        MimicSystem(files)


def test_not_finite(tmp_path):
    frames = run_frames()
    frames[2]["f"][3, 1] = np.nan
    system = opened(write_run(tmp_path, frames=frames))
    with pytest.raises(UserError, match=r"run\.trr: f .at byte \d+. of frame 2 holds nan"):
        system.frame(2)


# ---- damage: whatever happens to the files, a UserError or numbers


def mutated(raw: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(raw)
    at = int(rng.integers(len(data)))
    match rng.integers(5):
        case 0:
            del data[at:]
        case 1:
            data[at] ^= 1 << int(rng.integers(8))
        case 2:
            data[at : at + 4] = rng.bytes(4)
        case 3:
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        case 4:
            word = at // 4 * 4
            data[word : word + 4] = struct.pack(">i", int(rng.choice([-1, 0, 1, 2**31 - 1, -(2**31), 1 << 24])))
    return bytes(data)


def test_500_damaged_files(tmp_path):
    rng = np.random.default_rng(1)
    refused = 0
    for k in range(500):
        files = write_run(tmp_path, double=bool(k % 2))
        path = tmp_path / f"run{('.mpt', '.trr', '.energies')[k % 3]}"
        path.write_bytes(mutated(path.read_bytes(), rng))
        try:
            system = opened(files)
            for n in range(system.nframes):
                assert np.isfinite(system.frame(n).coord).all()
        except UserError as error:
            refused += 1
            assert any(part in str(error) for part in ("run.mpt", "run.trr", "run.energies"))
    assert 150 < refused < 500  # a changed digit of a position is nobody's fault


# ---- the input file


def input_of(tmp_path, systems) -> dict:
    return {
        "model": {
            "type_map": TYPE_MAP,
            "descriptor": {"type": "se_e2_a", "rcut": 4.0, "neuron": [4], "axis_neuron": 2},
            "fitting_net": {"neuron": [4]},
        },
        "learning_rate": {"type": "exp", "start_lr": 0.001},
        "training": {"training_data": {"systems": systems}, "numb_steps": 2},
    }


def test_systems_of_the_input(tmp_path):
    import json

    from allforce.config.load import normalised

    files = [write_run(tmp_path, name) for name in ("a", "b")]
    entry = {"mimic": {"mpt": files[0].mpt, "trr": files[0].trr, "energies": files[0].energies}}
    both = {"mimic": {x: [getattr(f, x) for f in files] for x in ("mpt", "trr", "energies")}}
    for systems, count in ((entry, 1), ([entry, both], 3)):
        (tmp_path / "input.json").write_text(json.dumps(input_of(tmp_path, systems)))
        config = load_input(tmp_path / "input.json")
        assert normalised(config)["training"]["training_data"]["systems"] == systems
        found = open_systems(config.training.training_data.systems, TYPE_MAP)
        assert len(found) == count and all(s.nframes == 5 for s in found)
    assert [s.name for s in open_systems(config.training.training_data.systems, TYPE_MAP, rank=1, size=2)] == [
        files[1].trr
    ]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"trr": ["a.trr", "b.trr"]}, "as many files of each kind .* 1 in mpt, 2 in trr, 1 in energies"),
        ({"trrr": "a.trr"}, "systems/0/mimic/trrr: unknown key.*did you mean trr"),
        ({"match": "time"}, 'systems/0/mimic/match: found "time".*"step" or "line"'),
        ({"trr": 3}, "systems/0/mimic/trr: found 3"),
        ({"energies": None}, "systems/0/mimic/energies"),
    ],
)
def test_mistakes_in_the_input(tmp_path, change, words):
    import json

    entry = {"mimic": {"mpt": "a.mpt", "trr": "a.trr", "energies": "E"} | change}
    (tmp_path / "input.json").write_text(json.dumps(input_of(tmp_path, [entry])))
    with pytest.raises(UserError, match=words):
        open_systems(load_input(tmp_path / "input.json").training.training_data.systems, TYPE_MAP)


def test_missing_key_in_the_input(tmp_path):
    import json

    (tmp_path / "input.json").write_text(json.dumps(input_of(tmp_path, {"mimic": {"mpt": "a", "trr": "b"}})))
    with pytest.raises(UserError, match="systems/mimic/energies: required key is missing"):
        load_input(tmp_path / "input.json")
