"""Where the time went: the table over ranks, and that the sentence names what costs most."""

import json
import re

import pytest

from allforce.trace import phase as monitor_phase
from allforce.train import summary
from allforce.train.monitor import JsonLines, difference
from allforce.train.summary import RankTimes

STEP = {"forward": 40.0, "moments": 10.0, "backward": 40.0, "optimizer": 5.0}


def rank(waiting=0.0, communication=None, loader=None, cpu=1.0, **phases):
    times = {**STEP, **{name.replace("_", " "): s for name, s in phases.items()}}
    times["communication"] = waiting if communication is None else communication
    wall = sum(times.values()) + 5.0
    return RankTimes(wall, times, waiting, loader or {}, 100, cpu * wall, 500.0)


def test_parts_add_up_to_the_wall_time():
    parts = rank(waiting=3.0, communication=4.0, data_wait=1.0).split()
    assert list(parts) == [
        *("data wait", "forward", "moments", "backward", "waiting", "transfer", "optimizer", "other")
    ]
    assert parts["waiting"] == 3.0 and parts["transfer"] == 1.0 and parts["other"] == 5.0
    assert sum(parts.values()) == pytest.approx(rank(waiting=3.0, communication=4.0, data_wait=1.0).wall)


def test_slowest_rank_and_imbalance():
    ranks = [rank(waiting=30.0), rank(waiting=0.0, forward=70.0)]
    row = {r.phase: r for r in summary.rows(ranks)}["forward"]
    assert (row.slowest, row.worst, row.mean) == (1, 70.0, 55.0)
    assert row.imbalance == pytest.approx(70 / 55 - 1)
    assert summary.slowest_rank(ranks) == 1
    lines = summary.table(ranks, 1000, 2.5)
    assert re.fullmatch(r"where the time went \(1000 steps in 130\.00 s, after a first one of 2\.50 s\):", lines[0])
    assert any(re.fullmatch(r"forward +55\.000 +55\.000 +42\.3 % +1 +27 %", line) for line in lines)
    assert sum(float(m[1]) for line in lines if (m := re.search(r"([\d.]+) % +\d+ +\d+ %$", line))) == pytest.approx(
        100, 0.01
    )


@pytest.mark.parametrize(
    "ranks, words",
    [
        ([rank()], "95 % of the time is computing"),
        ([rank(cpu=0.5), rank(cpu=0.3)], r"a worker gets 0\.40 of one core"),
        ([rank(data_wait=70.0, loader={"batch": 60.0, "neighbours": 5.0})], "the training waits 41 % .* data; reading"),
        (
            [rank(), rank(data_wait=70.0, loader={"batch": 1.0, "neighbours": 60.0})],
            "rank 1 waits 41 % .*; finding neigh",
        ),
        ([rank(waiting=40.0), rank(forward=80.0)], "wait 14 % of their time for each other, mostly for rank 1"),
        ([rank(communication=30.0), rank(communication=30.0)], "23 % of the time goes into adding up gradients"),
        ([rank(validation=30.0)], "23 % .* learning curve"),
        ([rank(checkpoint=30.0)], "23 % .* checkpoints"),
    ],
)
def test_verdict(ranks, words):
    assert re.search(words, summary.verdict(ranks)), summary.verdict(ranks)


def test_difference_is_what_was_spent_in_between():
    before, after = rank(waiting=1.0), rank(waiting=3.0, checkpoint=2.0)
    spent = difference(after, before)
    assert spent.waiting == 2.0 and spent.phases["checkpoint"] == 2.0 and spent.phases["forward"] == 0.0
    assert spent.samples == 0 and spent.memory == 500.0


def test_lines_of_json_have_no_nan_and_survive_a_full_disk(tmp_path, caplog):
    lines = JsonLines(str(tmp_path / "deep/m.jsonl"), append=False)
    lines.write({"rmse_e": float("nan"), "list": [1.0, float("inf")]})
    lines.close()
    assert json.loads((tmp_path / "deep/m.jsonl").read_text()) == {"rmse_e": None, "list": [1.0, None]}
    full = JsonLines("/dev/full", append=False)
    full.write({"a": 1})
    full.write({"a": 2})
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    JsonLines(str(tmp_path / "deep/m.jsonl/x"), append=False).write({"a": 1})
    assert len(caplog.records) == 2


def test_a_timeline_has_a_limit(tmp_path, monkeypatch, caplog):
    """Also when rows of the learning curve are far apart."""
    import torch

    from allforce.config.schema import Training
    from allforce.distributed.comm import SerialComm
    from allforce.distributed.profile import CountedComm
    from allforce.train import monitor

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(monitor, "LIMIT", 50)
    config = Training(training_data={"systems": "data"}, numb_steps=1)
    watch = monitor.Monitor(config, CountedComm(SerialComm()), torch.device("cpu"), {"host": "a"}, "t.json")
    with caplog.at_level("INFO"), watch.running():
        for _ in range(1000):
            with monitor_phase("forward"):
                pass
            watch.step(1)
        assert len(watch.trace.lane().events) == 51
        for step in (1, 2):
            watch.row(step, 1e-3, {"rmse": 1.0}, None)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(e["name"] == "forward" for e in events) == 51 and caplog.text.count("ends here") == 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["samples"] == rows[1]["steps"] == 1000 and rows[2]["samples"] == 0
