"""dp plot: what a file is, its numbers, and pictures that show them."""

import json
import re

import numpy as np
import pytest

from allforce.cli import main
from allforce.errors import UserError
from allforce.report.plot import by_engine, phase_seconds, window
from allforce.report.read import Curve, Parity, Phases, read, title_of

HEAD = "#  step      rmse_val    rmse_trn    rmse_e_val  rmse_e_trn    rmse_f_val  rmse_f_trn         lr\n"
NOTE = "# If there is no available reference data, rmse_*_{val,trn} will print nan\n"


def curve(path, steps=(0, 100), factor=1.0, tail=""):
    rows = [f"{s:7d} {factor:.2e} {2 * factor:.2e} nan nan {3 * factor:.2e} {4 * factor:.2e} 1.0e-03\n" for s in steps]
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD + NOTE + "".join(rows) + tail)
    return path


def test_learning_curve_of_a_restarted_run_that_still_writes(tmp_path):
    path = curve(tmp_path / "lcurve.out")
    path.write_text(path.read_text() + HEAD + "    200 1 1 nan nan 3 4 1.0e-03\n    300 1 1 na")
    found = read(tmp_path)  # a folder is its lcurve.out
    assert isinstance(found, Curve) and found.columns["step"].tolist() == [0, 100, 200]
    assert found.quantities == ["rmse", "rmse_f"]  # nothing is known of the energy
    assert title_of("rmse_f") == "RMSE of the force, eV/Å"
    path.write_text(path.read_text() + "\n# step rmse_trn lr\n")
    with pytest.raises(UserError, match="different runs"):
        read(path)


def test_parity_leaves_out_missing_labels(tmp_path):
    path = tmp_path / "detail.f.out"
    path.write_text("# sys: data_fx data_fy data_fz pred_fx pred_fy pred_fz\n1 2 3 1 2 5\nnan nan nan 7 7 7\n")
    found = read(path)
    assert isinstance(found, Parity) and found.kind == "f" and found.data.tolist() == [1, 2, 3]
    assert found.rmse == pytest.approx(np.sqrt(4 / 3)) and found.mae == pytest.approx(2 / 3)
    assert found.quantity == ("force", "eV/Å")
    (tmp_path / "x.e.out").write_text("# sys: data_e pred_e\n-3 -2\n")
    assert read(tmp_path / "x.e.out").quantity == ("energy", "eV")


def timeline(path, steps=9):
    spans = [(n, s + k / 4, 0.25) for s in range(steps) for k, n in enumerate(("forward", "backward", "optimizer"))]
    threads = {1: "loader_0", 0: "main"}
    events = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": t, "args": {"name": n}} for t, n in threads.items()]
    events += [{"ph": "X", "pid": 0, "tid": 0, "name": n, "ts": 1e6 * a, "dur": 1e6 * d} for n, a, d in spans]
    events += [{"ph": "X", "pid": 0, "tid": 1, "name": "batch", "ts": 0, "dur": 1e6}]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_timeline(tmp_path):
    found = read(timeline(tmp_path / "t.json"))
    assert isinstance(found, Phases) and list(found.rows) == [(0, "main"), (0, "loader_0")]
    assert phase_seconds(found) == pytest.approx({"forward": 2.25, "backward": 2.25, "optimizer": 2.25})
    assert window(found) == pytest.approx((2.75, 5.75))  # three steps
    assert window(read(timeline(tmp_path / "t.json", steps=1))) == pytest.approx((0, 1))


ROWS = [
    {"workers": w, "engine": e, "rate": r, "spread": 0.1, "speed_up": u, "communication": 0.1, "waiting": 0.0}
    for w, e, r, u in [(2, "torch", 19.0, 1.9), (1, "serial", 10.0, 1.0), (2, "mpi", 18.0, 1.8)]
]


def scaling(path):
    path.write_text(json.dumps({"title": "input.json, weak scaling, cpu:0", "scaling": ROWS}))
    return path


def test_scaling_by_engine():
    found = by_engine(ROWS)
    assert {e: [r["rate"] for r in rows] for e, rows in found.items()} == {"torch": [10.0, 19.0], "mpi": [10.0, 18.0]}


@pytest.mark.parametrize(
    "make, name, words",
    [
        (curve, "lcurve.out", ["RMSE of the force", "validation"]),
        (timeline, "t.json", ["rank 0, main", "loader_0", "optimizer"]),
        (scaling, "scaling.json", ["weak scaling", "torch", "mpi"]),
    ],
)
def test_pictures(tmp_path, capsys, make, name, words):
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"
    target = tmp_path / "x.svg"
    assert main(["plot", str(make(tmp_path / name)), "-o", str(target)]) == 0
    assert all(word in target.read_text() for word in words) and f"{target}:" in capsys.readouterr().out
    pytest.importorskip("plotext")
    assert main(["plot", str(tmp_path / name), "--term"]) == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert words[-1] in shown and len(shown.splitlines()) > 3


def test_several_runs_in_one_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"
    curve(tmp_path / "a/lcurve.out")
    curve(tmp_path / "b/lcurve.out", factor=0.5)
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "a", "b/lcurve.out", "-o", "both.svg"]) == 0
    text = (tmp_path / "both.svg").read_text()
    assert "a/lcurve.out, training" in text and "b/lcurve.out, validation" in text


def test_mistakes_get_words(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    curve(tmp_path / "lcurve.out")
    timeline(tmp_path / "t.json")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_text(HEAD)
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "x.f.out").write_text("# sys: data_f pred_f\n")
    for words, arguments in {
        "different kinds": ["lcurve.out", "t.json"],
        "is neither": ["text"],
        "is neither a": ["list.json"],
        "no rows yet": ["empty"],
        "x.f.out: has no rows": ["x.f.out"],
        "No such file": ["nothing"],
        "should end in": ["lcurve.out", "-o", "x.jpeg2"],
    }.items():
        assert main(["plot", *arguments]) == 2
        assert words in capsys.readouterr().err
