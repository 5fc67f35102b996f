"""dp test, model-devi, eval-desc, show, neighbor-stat, change-bias on data whose errors are known beforehand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms

from allforce import logs
from allforce.cli import main
from allforce.files import checkpoint
from allforce.files.checkpoint import Checkpoint
from allforce.files.container import read_tree, write_tree
from allforce.files.model_file import load_model, save_model
from allforce.files.tree import observed_types
from allforce.infer.predict import DeepPot
from allforce.models.standard import StandardConfig, StandardModel

EDGE, N = 6.0, 8
TYPES = [1, 0, 1, 0, 1, 1, 0, 1]  # not sorted


def make(seed: int = 1) -> StandardModel:
    section = {
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [30, 40],
            "rcut": 4.0,
            "rcut_smth": 1.0,
            "neuron": [4, 8],
            "seed": seed,
        }
        | {"axis_neuron": 3},
        "fitting_net": {"neuron": [8, 8], "seed": seed + 1},
    }
    potential = StandardModel(StandardConfig.model_validate(section))
    with torch.no_grad():
        potential.descriptor.davg[:, 0] = torch.tensor([0.11, 0.07])
        potential.descriptor.dstd.copy_(torch.tensor([[0.2, 0.1, 0.1, 0.1], [0.3, 0.15, 0.15, 0.15]]))
        potential.fitting.bias_atom_e.copy_(torch.tensor([-9.0, -1.0]))
    return potential


def write_system(
    path: Path, frames: int, seed: int, labels: dict[str, np.ndarray], periodic: bool = True
) -> np.ndarray:
    """A cubic arrangement, shaken; returns its coordinates. labels are added to what the model `make()` says."""
    rng = np.random.default_rng(seed)
    grid = np.array([[i, j, k] for i in range(2) for j in range(2) for k in range(2)]) * 2.2
    x = (grid + rng.normal(0, 0.15, (frames, N, 3))).reshape(frames, -1)
    (path / "set.000").mkdir(parents=True)
    (path / "type.raw").write_text(" ".join(map(str, TYPES)))
    (path / "type_map.raw").write_text("O H")
    cells = np.tile(np.eye(3).ravel() * EDGE, (frames, 1))
    if periodic:
        np.save(path / "set.000" / "box.npy", cells)
    else:
        (path / "nopbc").touch()
    e, f, v, ae, _ = DeepPot(make()).eval(x, cells if periodic else None, TYPES, atomic=True)
    predicted = {"energy": e, "force": f.reshape(frames, -1), "virial": v, "atom_ener": ae[:, :, 0], "atom_pref": 0.0}
    np.save(path / "set.000" / "coord.npy", x)
    for name, shift in labels.items():
        np.save(path / "set.000" / f"{name}.npy", predicted[name] + shift)
    return x


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two periodic systems with known errors, one that is not periodic, and two models."""
    monkeypatch.chdir(tmp_path)
    save_model(make(), "m.dp")
    save_model(make(5), "other.dp")
    ones = np.ones((1, 3 * N))
    pref = np.zeros((1, N))
    pref[0, 0] = 2.0
    force = 0.1 * ones
    force[0, :3] = 0.4
    a = {"energy": np.full((3, 1), 0.8), "force": np.repeat(force, 3, 0), "atom_pref": np.repeat(pref, 3, 0)}
    write_system(
        tmp_path / "data" / "a", 3, 1, a | {"virial": np.full((3, 9), -0.5), "atom_ener": np.full((3, N), 0.3)}
    )
    write_system(tmp_path / "data" / "b", 1, 2, {"energy": np.array([[-2.4]]), "force": 0.3 * ones})
    write_system(tmp_path / "free", 2, 3, {"force": np.zeros((2, 3 * N)), "virial": np.ones((2, 9))}, periodic=False)
    return tmp_path


class Command:
    """`dp` in this process; the lines of its log without time and level."""

    def __init__(self, capsys: pytest.CaptureFixture):
        self.capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> list[str]:
        self.capsys.readouterr()
        found = main([str(a) for a in arguments])
        text = self.capsys.readouterr().err
        assert found == code, text
        return [line.split("INFO", 1)[-1].removeprefix("    ") for line in text.splitlines()]


@pytest.fixture
def dp(capsys: pytest.CaptureFixture):
    yield Command(capsys)
    logs.close()
    logs.ROOT.propagate = True


def metrics(lines: list[str]) -> dict[str, str]:
    return {line[:19].rstrip(): line[20:].strip() for line in lines if line[19:20] == ":"}


def values(lines: list[str]) -> dict[str, float]:
    return {name: float(text.split()[0]) for name, text in metrics(lines).items()}


def test_errors_of_one_system(folder: Path, dp: Command) -> None:
    lines = dp("test", "-m", "m.dp", "-s", "data/a", "-a")
    assert lines[0] == "# ---------------output of dp test--------------- "
    assert lines[1:3] == ["# testing system : data/a", "# number of test data : 3 "]
    assert "# number of systems : 1" in lines and lines[-1] == "# ----------------------------------------------- "
    end = lines.index("# ----------weighted average of errors----------- ")
    found = values(lines[:end])
    force_rmse = np.sqrt((3 * 0.4**2 + 21 * 0.1**2) / 24)
    expected = {
        "Energy MAE": 0.8, "Energy RMSE": 0.8, "Energy MAE/Natoms": 0.1, "Energy RMSE/Natoms": 0.1,
        "Force  MAE": (3 * 0.4 + 21 * 0.1) / 24, "Force  RMSE": force_rmse,
        "Force weighted MAE": 0.4, "Force weighted RMSE": 0.4,
        "Virial MAE": 0.5, "Virial RMSE": 0.5, "Virial MAE/Natoms": 0.0625, "Virial RMSE/Natoms": 0.0625,
        "Stress MAE": 0.5 / EDGE**3, "Stress RMSE": 0.5 / EDGE**3,
        "Atomic ener MAE": 0.3, "Atomic ener RMSE": 0.3,
    }  # fmt: skip
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    average = values(lines[end:])
    assert average == {name: value for name, value in found.items() if not name.startswith("Atomic")}
    units = {name: text.split()[1] for name, text in metrics(lines).items()}
    assert units["Energy MAE"] == "eV" and units["Force  RMSE"] == "eV/Å" and units["Stress MAE"] == "eV/Å³"


def test_average_over_systems_counts_numbers(folder: Path, dp: Command) -> None:
    """3 frames with 0.8 and 1 with 2.4: MAE weighted by frames, RMSE the root of the weighted mean square."""
    lines = dp("test", "-m", "m.dp", "-s", "data")
    found = values(lines[lines.index("# ----------weighted average of errors----------- ") :])
    assert found["Energy MAE"] == pytest.approx((3 * 0.8 + 2.4) / 4, rel=1e-5)
    assert found["Energy RMSE"] == pytest.approx(np.sqrt((3 * 0.8**2 + 2.4**2) / 4), rel=1e-5)
    assert found["Virial MAE"] == pytest.approx(0.5, rel=1e-5)  # of the one system that has virials
    assert "Atomic ener MAE" not in found


def test_systems_from_lists_and_inputs(folder: Path, dp: Command) -> None:
    (folder / "list.txt").write_text("data/b\ndata/a\n")
    lines = dp("test", "-m", "m.dp", "-f", "list.txt")
    assert [x for x in lines if "testing system" in x] == ["# testing system : data/b", "# testing system : data/a"]
    sections = {"training_data": {"systems": ["../data/a"]}, "validation_data": {"systems": "../data/b"}}
    atoms = Atoms("OH2", np.eye(3) * 2, info={"E_mp2": 1.0})
    ase.io.write("data/one.xyz", atoms, format="extxyz")
    section = {
        "model": {"type_map": ["O", "H"], "descriptor": {"type": "se_e2_a"}, "fitting_net": {}},
        "learning_rate": {"start_lr": 0.001},
        "training": {"numb_steps": 1, **sections},
    }
    (folder / "run").mkdir()
    (folder / "run" / "input.json").write_text(json.dumps(section))
    for option, name in (("--train-data", "a"), ("--valid-data", "b")):
        lines = dp("test", "-m", "m.dp", option, "run/input.json")
        assert [x for x in lines if "testing system" in x] == [f"# testing system : run/../data/{name}"]
    sections["training_data"]["systems"] = {"file": "../data/one.xyz", "energy": "E_mp2"}
    (folder / "run" / "input.json").write_text(json.dumps(section))
    lines = dp("test", "-m", "m.dp", "--train-data", "run/input.json")
    assert any("Energy MAE" in line for line in lines)


def test_number_and_choice_of_frames(folder: Path, dp: Command) -> None:
    x = np.load("data/a/set.000/energy.npy")
    x[0] += 1.0
    np.save("data/a/set.000/energy.npy", x)
    first = values(dp("test", "-m", "m.dp", "-s", "data/a", "-n", "1"))
    assert first["Energy MAE"] == pytest.approx(1.8, rel=1e-5)
    seen = {
        values(dp("test", "-m", "m.dp", "-s", "data/a", "-n", "1", "--shuffle-test", "-r", k))["Energy MAE"]
        for k in range(6)
    }
    assert len(seen) == 2  # sometimes the first frame, sometimes another
    again = [values(dp("test", "-m", "m.dp", "-s", "data/a", "-n", "1", "--shuffle-test", "-r", 4)) for _ in range(2)]
    assert again[0] == again[1]


def test_detail_files(folder: Path, dp: Command) -> None:
    dp("test", "-m", "m.dp", "-s", "data", "-d", "detail")
    texts = {p.name: p.read_text().splitlines() for p in folder.glob("detail.*")}
    assert set(texts) == {f"detail.{k}.out" for k in ("e", "e_peratom", "f", "v", "v_peratom", "s")}
    assert texts["detail.e.out"][0] == "# data/a: data_e pred_e"
    assert texts["detail.f.out"][0] == "# data/a: data_fx data_fy data_fz pred_fx pred_fy pred_fz"
    assert texts["detail.v.out"][0].startswith("# data/a: data_vxx data_vxy data_vxz data_vyx")
    assert texts["detail.s.out"][0].startswith("# data/a (eV/Å³): data_sxx data_sxy")
    assert [sum(x.startswith("#") for x in t) for t in texts.values()] == [1] * 6
    assert texts["detail.e.out"][1].split()[0].count("e") == 1 and len(texts["detail.e.out"][1].split()[0]) >= 24
    e, f, v, s = (np.loadtxt(f"detail.{k}.out") for k in ("e", "f", "v", "s"))
    assert e.shape == (4, 2) and f.shape == (4 * N, 6) and v.shape == (4, 18) and s.shape == (3, 18)
    np.testing.assert_allclose(e[:, 0] - e[:, 1], [0.8, 0.8, 0.8, -2.4], atol=1e-8)
    np.testing.assert_allclose(np.loadtxt("detail.e_peratom.out"), e / N)
    np.testing.assert_allclose(s[:, :9], -v[:3, :9] / EDGE**3)
    assert np.isnan(v[3, :9]).all() and np.isfinite(v[:, 9:]).all()  # b has no virials
    order = DeepPot("m.dp").eval(np.load("data/b/set.000/coord.npy"), np.load("data/b/set.000/box.npy"), TYPES)[1]
    np.testing.assert_allclose(f[-N:, 3:], order[0], atol=1e-10)
    dp("test", "-m", "m.dp", "-s", "data/b", "-d", "detail")  # a new run writes anew
    assert len(np.loadtxt("detail.f.out")) == N


def test_not_periodic(folder: Path, dp: Command) -> None:
    found = values(dp("test", "-m", "m.dp", "-s", "free", "-d", "free_detail"))
    assert set(found) == {"Force  MAE", "Force  RMSE"}
    assert not (folder / "free_detail.s.out").exists()


def test_mistakes(folder: Path, dp: Command) -> None:
    Path("junk.pt").write_bytes(b"junk\xff")
    Path("junk.yaml").write_text("model: {}")
    Path("folder.dp").mkdir()
    shutil.copytree("data/a", "touching")
    coord = np.load("touching/set.000/coord.npy")
    coord[1, 3:6] = coord[1, :3]
    np.save("touching/set.000/coord.npy", coord)
    for arguments, message in (
        (("test", "-m", "m.dp", "-s", "data/b", "-a"), "has no atom_ener.npy"),
        (("test", "-m", "nothing.dp", "-s", "data"), "no such model file"),
        (("test", "-m", "m.dp", "-s", "data/b", "-d", "nowhere/x"), "does not exist"),
        (("test", "-m", "m.dp", "-f", "nothing.txt"), "cannot be read"),
        (("model-devi", "-m", "m.dp", "-s", "data/a"), "at least two models"),
        (("change-bias", "m.dp", "-b", "1.0"), "found 1 value"),
        (("change-bias", "m.dp", "-s", "free"), "no energy labels"),
        (("show", "m.dp", "model-branch"), "no branches"),
        (("neighbor-stat", "-s", "data", "-r", "-1"), "rcut is -1"),
        (("neighbor-stat", "-s", "data", "-r", "nan"), "rcut is nan"),
        (("test", "-m", "m.dp", "-f", "junk.pt"), "not UTF-8"),
        (("test", "-m", "junk.pt", "-s", "data"), "not a readable PyTorch checkpoint"),
        (("test", "-m", "junk.yaml", "-s", "data"), "not a model file"),
        (("freeze", "-c", "m.dp", "-o", "folder.dp"), "folder.dp: Is a directory"),
        (("model-devi", "-m", "m.dp", "m.dp", "-s", "data/a", "-o", "nowhere/x"), "nowhere/x: No such file"),
        (("eval-desc", "-m", "m.dp", "-s", "data/a", "-o", "junk.pt"), "junk.pt: File exists"),
        (
            ("test", "-m", "m.dp", "-s", "touching"),
            "touching, frame 1: atoms 1 and 0 (counted from 0) are on one place",
        ),
    ):
        lines = dp(*arguments, code=2)
        assert message in lines[-1] and "Traceback" not in "".join(lines)


def test_model_devi(folder: Path, dp: Command) -> None:
    """Columns against their definition, and the block layout."""
    dp("model-devi", "-m", "m.dp", "other.dp", "-s", "data", "-o", "devi.out", "-f", "10", "--atomic")
    lines = (folder / "devi.out").read_text().splitlines()
    assert [x for x in lines if x.startswith("# data")] == ["# data/a", "# data/b"]
    names = [
        "max_devi_v",
        "min_devi_v",
        "avg_devi_v",
        "max_devi_f",
        "min_devi_f",
        "avg_devi_f",
        "devi_e",
        "atm_devi_f(N)",
    ]
    assert lines[1] == "# step      " + "".join(x.ljust(19) for x in names)
    assert lines[2].startswith("           0") and len(lines[2]) == 12 + 19 * (7 + N)
    rows = np.loadtxt("devi.out")
    assert rows.shape == (4, 8 + N) and rows[:3, 0].tolist() == [0, 10, 20]
    x, box = np.load("data/a/set.000/coord.npy"), np.load("data/a/set.000/box.npy")
    e, f, v = (np.array(z) for z in zip(*(DeepPot(m).eval(x, box, TYPES) for m in ("m.dp", "other.dp")), strict=True))
    sigma = np.sqrt((f.std(axis=0) ** 2).sum(-1))  # (frames, N)
    np.testing.assert_allclose(rows[:3, 8:], sigma, rtol=1e-5)
    np.testing.assert_allclose(rows[:3, 4:7], np.stack([sigma.max(1), sigma.min(1), sigma.mean(1)], 1), rtol=1e-5)
    dv = (v / N).std(axis=0)
    np.testing.assert_allclose(rows[:3, 1:4], np.stack([dv.max(1), dv.min(1), np.sqrt((dv**2).mean(1))], 1), rtol=1e-5)
    np.testing.assert_allclose(rows[:3, 7], (e / N).std(axis=0)[:, 0], rtol=1e-5)
    dp(
        "model-devi",
        "-m",
        "m.dp",
        "other.dp",
        "-s",
        "data/a",
        "-o",
        "rel.out",
        "--relative",
        "0.5",
        "--relative_v",
        "0.2",
    )
    relative = np.loadtxt("rel.out")
    norm = np.sqrt((f.mean(axis=0) ** 2).sum(-1)) + 0.5
    np.testing.assert_allclose(relative[:, 4], (sigma / norm).max(1), rtol=1e-5)
    size = np.sqrt(((v / N).mean(axis=0) ** 2).sum(-1)) + 0.2
    np.testing.assert_allclose(relative[:, 1], dv.max(1) / size, rtol=1e-5)


def test_real_error(folder: Path, dp: Command) -> None:
    """One model alone: the deviation from the labels is the error that was put into them."""
    dp("model-devi", "-m", "m.dp", "-s", "data", "-o", "err.out", "--real_error")
    rows = np.loadtxt("err.out")
    np.testing.assert_allclose(rows[:3, 4], 0.4 * np.sqrt(3), rtol=1e-5)
    np.testing.assert_allclose(rows[:3, 5], 0.1 * np.sqrt(3), rtol=1e-5)
    np.testing.assert_allclose(rows[:, 7], np.array([0.8, 0.8, 0.8, 2.4]) / N, rtol=1e-5)
    np.testing.assert_allclose(rows[:3, 1:4], 0.5 / N, rtol=1e-5)
    assert np.isnan(rows[3, 1:4]).all()  # no virials there


def test_eval_desc(folder: Path, dp: Command) -> None:
    dp("eval-desc", "-m", "m.dp", "-s", "data", "-o", "out/desc")
    found = np.load("out/desc/a.npy")
    assert found.shape == (3, N, 24) and found.dtype == np.float64 and (folder / "out/desc/b.npy").is_file()
    x, box = np.load("data/a/set.000/coord.npy"), np.load("data/a/set.000/box.npy")
    np.testing.assert_allclose(found, DeepPot("m.dp").eval_descriptor(x, box, TYPES), atol=1e-12)
    dp("eval-desc", "-m", "m.dp", "-s", "data/a", "-o", "small", "--dtype", "fp32")
    assert np.load("small/a.npy").dtype == np.float32
    write_system(folder / "more" / "a", 1, 9, {})
    (folder / "list.txt").write_text("data/a\nmore/a\n")
    assert "would all be written to a.npy" in dp("eval-desc", "-m", "m.dp", "-f", "list.txt", code=2)[-1]


def test_show(folder: Path, dp: Command) -> None:
    lines = dp("show", "m.dp", "type-map", "descriptor", "fitting-net", "size", "observed-type", "serialization-tree")
    text = "\n".join(lines)
    assert "This is a singletask model" in lines and "The type_map is ['O', 'H']" in lines
    assert "'rcut': 4.0" in text and "'neuron': [8, 8]" in text
    total = sum(p.numel() for p in make().parameters())
    assert f"Parameters in total: {total:,}" in lines
    assert "davg: float64 (2, 70, 4)" in text and "bias_atom_e: float64 (2, 1)" in text
    assert "Number of observed types: 2 " in lines and "Observed types: ['H', 'O'] " in lines


def test_observed_types_of_a_training(folder: Path, dp: Command) -> None:
    """C has no atom in the data, though it has an energy; the checkpoint, the model and DeePMD-kit's entry agree."""
    descriptor = {"type": "se_e2_a", "sel": [30, 4, 40], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4], "axis_neuron": 2}
    fitting = {"neuron": [4], "atom_ener": [-9.0, -5.0, -1.0]}
    section = {
        "model": {"type_map": ["O", "C", "H"], "descriptor": descriptor, "fitting_net": fitting},
        "learning_rate": {"start_lr": 0.001},
        "training": {"numb_steps": 1, "training_data": {"systems": "data"}},
    }
    Path("input.json").write_text(json.dumps(section))
    dp("train", "input.json")
    dp("freeze", "-o", "trained.dp")
    for name in (".", "model.ckpt", "trained.dp", "trained"):
        lines = dp("show", name, "observed-type")
        assert lines[-2:] == ["Number of observed types: 2 ", "Observed types: ['H', 'O'] "]
    script = read_tree(Path("trained.dp"))["model_def_script"]
    assert script["info"] == {"observed_type": ["H", "O"]}


def test_observed_types_by_the_statistics(folder: Path, dp: Command) -> None:
    """A default deviation (1/rcut by DeePMD-kit's TensorFlow backend): no atoms; the floor: atoms without neighbours.

    What a file records goes before that.
    """
    model = make()
    for rows, expected in (
        ([[0.2, 0.1], [0.1, 0.1]], ["O"]),
        ([[0.25, 0.25], [0.3, 0.2]], ["H"]),
        ([[0.01, 0.01], [0.1, 0.1]], ["O"]),
        ([[1.0, 1.0], [1.0, 1.0]], []),
    ):
        model.descriptor.dstd.copy_(torch.tensor(rows)[:, [0, 1, 1, 1]])
        save_model(model, "some.dp")
        assert observed_types(load_model("some.dp")) == expected
    tree = read_tree(Path("m.dp"))
    tree["model_def_script"]["info"]["observed_type"] = ["H"]
    write_tree(Path("told.yaml"), tree)
    assert observed_types(load_model("told.yaml")) == ["H"]
    del tree["model_def_script"]["info"]
    write_tree(Path("silent.yaml"), tree)
    assert observed_types(load_model("silent.yaml")) == ["H", "O"]


def test_neighbor_stat(folder: Path, dp: Command) -> None:
    x = np.concatenate([np.load(f"data/{n}/set.000/coord.npy") for n in "ab"]).reshape(-1, N, 3)
    d = x[:, :, None] - x[:, None]
    shifts = np.array([[i, j, k] for i in (-1, 0, 1) for j in (-1, 0, 1) for k in (-1, 0, 1)]) * EDGE
    r = np.linalg.norm(d[..., None, :] + shifts, axis=-1)  # (frames, N, N, 27)
    near = (r > 0) & (r < 3.0)
    by_type = [int(near[:, :, np.array(TYPES) == t].sum(axis=(2, 3)).max()) for t in (0, 1)]
    lines = dp("neighbor-stat", "-s", "data", "-r", "3.0", "-t", "O", "H")
    assert lines[-2:] == [f"min_nbor_dist: {r[r > 0].min():.6f}", f"max_nbor_size: [{by_type[0]} {by_type[1]}]"]
    lines = dp("neighbor-stat", "-s", "data", "-r", "3.0", "--mixed-type")
    assert lines[-1] == f"max_nbor_size: [{int(near.sum(axis=(2, 3)).max())}]"


def test_change_bias(folder: Path, dp: Command) -> None:
    """Labels off by 0.5 eV per O and -0.25 per H: `change` finds it, `set` fits the labels, -b takes what is given."""
    shift = 0.5 * TYPES.count(0) - 0.25 * TYPES.count(1)
    write_system(folder / "shifted", 4, 7, {"energy": np.full((4, 1), shift)})
    old = load_model("m.dp").fitting.bias_atom_e.numpy()
    counts = np.array([TYPES.count(0), TYPES.count(1)])
    dp("change-bias", "m.dp", "-s", "shifted")
    new = load_model("m_updated.dp").fitting.bias_atom_e.numpy()
    assert (new - old) @ counts == pytest.approx(shift, abs=1e-8)
    assert values(dp("test", "-m", "m_updated.dp", "-s", "shifted"))["Energy RMSE"] < 1e-6
    dp("change-bias", "m.dp", "-s", "shifted", "-m", "set", "-n", "1", "-o", "set.yaml")
    energy = np.load("shifted/set.000/energy.npy")  # an automatic batch is 4 frames of 8 atoms
    assert load_model("set.yaml").fitting.bias_atom_e.numpy() @ counts == pytest.approx(energy.mean(), rel=1e-9)
    dp("change-bias", "m.dp", "-b", "-3.5", "2.25", "-o", "given.dp")
    np.testing.assert_array_equal(load_model("given.dp").fitting.bias_atom_e, [-3.5, 2.25])


def test_change_bias_of_a_checkpoint(folder: Path, dp: Command) -> None:
    """A checkpoint stays one: all its tensors, the new bias."""
    model = make()
    tensors = {f"model/{k}": v for k, v in model.state_dict().items()} | {"optimizer/exp_avg/x": torch.ones(3)}
    checkpoint.save(
        Path("model.ckpt"), Checkpoint(tensors, {"step": 3, "model": model.config.model_dump(mode="json")}), 5
    )
    dp("change-bias", "model.ckpt-3.safetensors", "-b", "1.5", "2.5")
    again = checkpoint.read("model.ckpt-3_updated.safetensors")
    assert again.step == 3 and torch.equal(again.tensors["optimizer/exp_avg/x"], torch.ones(3))
    np.testing.assert_array_equal(load_model("model.ckpt-3_updated.safetensors").fitting.bias_atom_e, [1.5, 2.5])
