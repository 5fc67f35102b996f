"""Line formats, where the lines of workers go, and the learning curve's layout."""

import json
import re

import pytest

from allforce import logs
from allforce.train.lcurve import LearningCurve

STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] "


@pytest.fixture(autouse=True)
def clean():
    yield
    logs.close()


class Workers:
    """Ranks of one process in turn: gather gives what each rank's handler holds."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self.shared = rank, size, shared

    def gather(self, value):
        self.shared[self.rank] = json.loads(json.dumps(value))
        return [self.shared.get(r, []) for r in range(self.size)]


def test_console_and_file_lines(tmp_path, capsys):
    path = tmp_path / "deep" / "train.log"
    logs.setup("INFO", str(path))
    logs.log.info("start training")
    logs.log.debug("not shown")
    assert re.fullmatch(STAMP + r"DEEPMD INFO    start training\n", capsys.readouterr().err)
    assert re.fullmatch(STAMP + r"DEEPMD INFO    deepmd\.train {33} start training\n", path.read_text())


@pytest.mark.parametrize("level, shown", [("3", 2), ("DEBUG", 2), ("2", 1), ("0", 0)])
def test_levels(level, shown, capsys):
    logs.setup(level)
    logs.log.debug("a")
    logs.log.info("b")
    assert len(capsys.readouterr().err.splitlines()) == shown


def test_master_is_rank_0_alone(tmp_path, capsys):
    for rank in (0, 1):
        logs.setup("INFO", str(tmp_path / "x.log") if rank == 0 else None, "master", Workers(rank, 2, {}))
        logs.log.info(f"hello from {rank}")
    assert [line[-12:] for line in capsys.readouterr().err.splitlines()] == ["hello from 0"]


def test_workers_write_their_own_files(tmp_path, capsys):
    logs.setup("INFO", str(tmp_path / "train.log"), "workers", Workers(3, 4, {}))
    logs.log.info("batch     200 training time 4.37 s, testing time 0.00 s")
    line = r"DEEPMD rank:3  INFO    batch     200 training time 4\.37 s, testing time 0\.00 s\n"
    assert re.fullmatch(STAMP + line, capsys.readouterr().err)
    assert "rank:" not in (tmp_path / "train_3.log").read_text()
    assert logs.worker_path("train", 3) == "train.3"


def test_collect_brings_whole_lines_in_order_of_time(tmp_path, capsys):
    shared: dict = {}
    first = logs.setup("INFO", str(tmp_path / "all.log"), "collect", Workers(0, 2, shared))
    logs.log.info("one")
    logs.ROOT.handlers.clear()
    second = logs.setup("INFO", str(tmp_path / "never.log"), "collect", Workers(1, 2, shared))
    logs.log.info("two")
    logs.ROOT.handlers.clear()
    logs.ROOT.addHandler(first)
    logs.log.info("three")
    second.flush_all()  # a worker shows nothing itself
    assert capsys.readouterr().err == ""
    first.flush_all()
    lines = capsys.readouterr().err.splitlines()
    assert [line.rsplit("    ")[-1] for line in lines] == ["one", "two", "three"]
    assert [re.search(r"rank:(\d) ", line)[1] for line in lines] == ["0", "1", "0"]
    assert len((tmp_path / "all.log").read_text().splitlines()) == 3 and not (tmp_path / "never.log").exists()


def test_summary_block():
    lines = logs.summary([("world size", "4"), ("CUDA_VISIBLE_DEVICES", "0,1,2,3")], distributed=True)
    assert lines == [
        "---Summary of the training---------------------------------------",
        "distributed",
        "world size:           4",
        "CUDA_VISIBLE_DEVICES: 0,1,2,3",
        "-----------------------------------------------------------------",
    ]


FIGURES = {"rmse": 25.3, "rmse_e": float("nan")}
NOTE = "# If there is no available reference data, rmse_*_{val,trn} will print nan\n"


def test_learning_curve_with_validation(tmp_path):
    curve = LearningCurve(tmp_path / "l", list(FIGURES), validation=True)
    curve.row(100, FIGURES, {"rmse": 1.0, "rmse_e": 0.5}, 1e-3)
    curve.close()
    assert (tmp_path / "l").read_text() == (
        "# step       rmse_val    rmse_trn    rmse_e_val  rmse_e_trn   lr      \n"
        + NOTE
        + "    100      1.00e+00    2.53e+01      5.00e-01         nan    1.0e-03\n"
    )


def curve_of(path, steps, at=None):
    curve = LearningCurve(path, list(FIGURES), validation=False, at=at)
    for step in steps:
        curve.row(step, FIGURES, None, 5e-4)
    curve.close()
    return path.read_text()


def test_learning_curve_of_a_restart_is_that_of_an_uninterrupted_run(tmp_path):
    whole = curve_of(tmp_path / "whole", range(0, 50, 10))
    assert curve_of(tmp_path / "l", range(0, 40, 10)) != whole
    with open(tmp_path / "l", "a") as file:
        file.write("     40      2.53")  # killed in the middle of a row
    assert curve_of(tmp_path / "l", (30, 40), at=20) == whole
    assert curve_of(tmp_path / "new", (30, 40), at=20).count("#") == 2


def test_rows_wait_while_the_disk_is_full(tmp_path, caplog):
    curve = LearningCurve(tmp_path / "l", list(FIGURES), validation=False)
    curve.row(0, FIGURES, None, 5e-4)
    disk, curve.file = curve.file, open("/dev/full", "ab", buffering=0)
    for step in (1, 2):
        curve.row(step, FIGURES, None, 5e-4)
    curve.file.close()
    curve.file = disk
    curve.row(3, FIGURES, None, 5e-4)
    curve.close()
    assert [int(line.split()[0]) for line in (tmp_path / "l").read_text().splitlines()[2:]] == [0, 1, 2, 3]
