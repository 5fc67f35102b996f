"""The command line: what it accepts, and how it ends."""

import os
import subprocess
import sys

import pytest

from allforce import __version__, cli, logs, wait_calmly
from allforce.errors import UserError
from allforce.train.local import without


@pytest.fixture(autouse=True)
def clean():
    yield
    logs.close()


def test_no_command_is_help(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    for command in ("train", "test", "freeze", "show", "neighbor-stat", "model-devi", "eval-desc", "change-bias"):
        assert f"    {command}" in shown


def test_help_is_quick_because_torch_stays_out():
    code = "import sys; from allforce.cli import main; main([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_whoever_waits_for_workers_has_no_torch():
    code = "import sys; import allforce.train.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_imports_are_no_garbage():
    """None is looked for in what they make, meanwhile or later, but in all that comes after them it is."""
    code = (
        "import gc; from allforce.commands import loading\n"
        "with loading(): import json; assert not gc.isenabled()\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 0"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_torch_threads_wait_calmly_unless_told_how():
    env: dict[str, str] = {}
    wait_calmly(env)
    assert env == {"GOMP_SPINCOUNT": "100000"}
    for given in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}):
        env = dict(given)
        wait_calmly(env)
        assert env == given
    code = "import os, sys, allforce; sys.exit(os.environ['GOMP_SPINCOUNT'] != '100000' or 'torch' in sys.modules)"
    bare = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    assert subprocess.run([sys.executable, "-c", code], env=bare).returncode == 0  # also for scripts


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, serves",
    [
        ("compress -i graph.pb -o graph-compress.pb", "models need no compression"),
        ("--pt convert-backend model.dp model.pth", "`dp freeze -c IN -o OUT`"),
        ("convert-from 1.3 -i a.pb -o b.pb", "`dp convert-backend model.pb model.dp`"),
    ],
)
def test_commands_of_deepmd_kit_say_what_serves_instead(capsys, line, serves):
    assert cli.main(line.split()) == 2
    assert serves in capsys.readouterr().err


def test_unknown_flags_are_errors(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["show", "model.dp", "size", "--loudly"])
    assert ended.value.code == 2 and "unrecognized arguments: --loudly" in capsys.readouterr().err


@pytest.fixture
def commands(monkeypatch):
    """Calls of `dp train` instead of trainings."""
    calls = []
    monkeypatch.setattr(cli, "train", lambda args: calls.append(args) or 0)
    return calls


def test_train_flags(commands):
    line = (
        "train in.json -o o.json -v 3 -l t.log -m collect --init-model m --skip-neighbor-stat --workers 2 --engine mpi"
    )
    assert cli.main(line.split()) == 0
    args = commands[0]
    assert (args.INPUT, args.output, args.log_level, args.log_path, args.mpi_log) == (
        "in.json",
        "o.json",
        "3",
        "t.log",
        "collect",
    )
    assert (args.init_model, args.skip_neighbor_stat, args.workers, args.engine) == ("m", True, "2", "mpi")
    cli.main(["train", "--mpi-log=workers", "input.json"])
    assert commands[1].mpi_log == "workers"


def test_only_one_beginning():
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "i.json", "--restart", "a", "--finetune", "b"])
    assert ended.value.code == 2


@pytest.mark.parametrize("flags", [["--pt"], ["--tensorflow"], ["-b", "jax"]])
def test_backends_are_accepted_with_a_note(commands, flags, capsys):
    assert cli.main([*flags, "train", "i.json"]) == 0
    assert len(commands) == 1 and "one backend" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, words", [(UserError("do this"), 2, "dp train: error: do this\n"), (KeyboardInterrupt(), 130, "")]
)
def test_how_mistakes_end(monkeypatch, capsys, error, code, words):
    def fail(args):
        raise error

    monkeypatch.setattr(cli, "train", fail)
    assert cli.main(["train", "i.json"]) == code
    assert capsys.readouterr().err == words


def test_workers_are_started_without_the_flag():
    line = ["train", "--workers", "4", "i.json", "-l", "x"]
    assert (
        without(line, "--workers")
        == without(["train", "--workers=4", "i.json", "-l", "x"], "--workers")
        == ["train", "i.json", "-l", "x"]
    )


@pytest.mark.parametrize("line", ["train in.json --model-branch x", "test -m a.dp --head x", "freeze --head x"])
def test_a_branch_is_refused(line, capsys):
    assert cli.main(line.split()) == 2
    assert "no branches" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, words",
    [
        ("scaling-test in.json --workers a", "1,2,4"),
        ("scaling-test in.json --workers 0,2", "1,2,4"),
        ("train in.json --use-pretrain-script", "--finetune"),
    ],
)
def test_flags_that_do_not_fit(line, words, capsys):
    assert cli.main(line.split()) == 2
    assert words in capsys.readouterr().err
