"""The timeline is complete JSON at every moment, with a row for every rank and thread."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allforce.distributed.timeline import Timeline, open_timeline, packed
from allforce.logs import log

EVENTS = [("main", "forward", 10.0, 10.5), ("main", "moments", 10.1, 10.2), ("loader_0", "neighbours", 10.0, 10.3)]


def read(path):
    return json.loads(Path(path).read_text())["traceEvents"]


def test_events_of_all_ranks(tmp_path):
    path = tmp_path / "deep/timeline.json"
    timeline = Timeline(str(path), ["a", "b"], log.warning)
    assert [e["args"]["name"] for e in read(path) if e["name"] == "process_name"] == ["rank 0 (a)", "rank 1 (b)"]
    for _ in range(2):
        timeline.add([packed(EVENTS, 10.0), packed(EVENTS[:1], 9.0)])
    timeline.close()
    events = read(path)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {(0, 1): "main", (0, 2): "loader_0", (1, 3): "main"}
    spans = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert sorted(set(spans)) == [
        (0, 1, "forward", 0.0, 500000.0),
        (0, 1, "moments", 100000.0, 100000.0),
        (0, 2, "neighbours", 0.0, 300000.0),
        (1, 3, "forward", 1000000.0, 500000.0),
    ]
    assert len(spans) == 8 and os.listdir(path.parent) == ["timeline.json"]


def test_a_killed_writer_leaves_complete_json(tmp_path):
    code = (
        "from allforce.distributed.timeline import *\n"
        "timeline = Timeline('t.json', ['a'], print)\n"
        "while True:\n"
        "    timeline.add([packed([('main', 'x', k, k + 1) for k in range(5000)], 0.0)])\n"
        "    timeline.thread.join(0.003)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env)
    while process.poll() is None and (not (tmp_path / "t.json").exists() or len(read(tmp_path / "t.json")) < 20000):
        time.sleep(0.01)  # read at any moment, it is whole
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(read(tmp_path / "t.json")) >= 20000


@pytest.mark.parametrize("path", ["{}/file/x.json", "/proc/x.json", "{}", "{}/pipe"])
def test_where_nothing_can_be_written_there_is_none(path, caplog, tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    path = path.format(tmp_path)
    assert open_timeline(path, ["a"], log.warning) is None
    assert len(caplog.records) == 1 and path in caplog.text


def test_a_disk_that_fills_up_ends_the_timeline_alone(tmp_path, caplog):
    timeline = Timeline(str(tmp_path / "t.json"), ["a"], log.warning)
    timeline.file.close()
    timeline.file = open("/dev/full", "wb", buffering=0)
    for _ in range(3):
        timeline.add([packed(EVENTS, 0.0)])
    timeline.close()
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    timeline.file.close()
    assert read(tmp_path / "t.json")
