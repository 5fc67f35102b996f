"""A worker or the launcher dies or hangs: the others notice, say who it was, and end; nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from run import FULL, ROOT, Run

from allforce.distributed.launch import LOST, scrubbed
from allforce.distributed.watch import INTERVAL

ENDLESS = {"training__numb_steps": 10_000_000, "training__disp_freq": 20, "training__save_freq": 1000}
LAUNCHERS = ["workers", "torchrun", "hydra", "openmpi", "horovodrun"]
DEATHS = [("forked", 0), ("workers", 1), ("torchrun", 1), ("hydra", 0)]  # what CI has time for


@pytest.fixture
def endless(tmp_path):
    """endless(launcher, ranks): a training that is under way and would never end."""
    import conftest  # that of tests/parallel

    runs = []

    def start(launcher, ranks, *args, **changes):
        if reason := conftest.missing(launcher):
            pytest.skip(reason)
        runs.append(Run(tmp_path, launcher, ranks, *args, **ENDLESS | changes))
        runs[0].wait_for("Batch      40")
        time.sleep(5 * INTERVAL)  # 40 steps are done within a second: let the others hear of them
        return runs[0]

    yield start
    for run in runs:
        run.__exit__()
        assert not run.leftovers()


@pytest.mark.parametrize("launcher, victim", [(x, v) for x in LAUNCHERS for v in (0, 1)] if FULL else DEATHS)
def test_a_killed_rank(endless, launcher, victim):
    run = endless(launcher, 2)
    run.kill(victim)
    code, text = run.wait()
    assert code != 0
    if launcher not in ("torchrun", "horovodrun"):  # which show tracebacks of their own
        assert "Traceback" not in text, text
    if launcher in ("forked", "workers"):
        assert code == LOST and f"rank {victim} (process" in text and "was ended by SIGKILL" in text, text
        assert "it was in step" in text, text


@pytest.mark.parametrize("launcher", LAUNCHERS if FULL else ["workers"])
def test_a_killed_launcher(endless, launcher):
    """Its workers do not train on into the same folder."""
    run = endless(launcher, 2)
    workers = run.ranks()
    assert len(workers) == 2
    run.process.kill()
    gone, alive = psutil.wait_procs(workers.values(), timeout=30)
    assert not alive


LOADING = """
import os, time
os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1"}
from allforce.distributed.orphans import end_with_launcher
end_with_launcher()
print("loading", flush=True)
time.sleep(300)
"""


def test_a_launcher_killed_while_a_worker_is_loading(tmp_path):
    """Long before there is a watch."""
    (tmp_path / "worker.py").write_text(LOADING)
    command = f"{sys.executable} {tmp_path / 'worker.py'} & wait"
    environment = scrubbed(os.environ) | {"PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen(["sh", "-c", command], env=environment, stdout=subprocess.PIPE, text=True)
    with launcher:
        assert launcher.stdout.readline() == "loading\n"
        (worker,) = psutil.Process(launcher.pid).children()
        launcher.kill()
        try:
            assert not psutil.wait_procs([worker], timeout=30)[1]
        finally:
            if worker.is_running():
                worker.kill()


@pytest.mark.parametrize("launcher", ["workers", "hydra"] if FULL else ["forked"])
def test_a_stopped_rank_is_waited_for_then_given_up(endless, launcher):
    run = endless(launcher, 2, training__distributed_timeout=13)
    run.kill(1, signal.SIGSTOP)
    text = run.wait_for("has given no sign of life for 1")
    code, text = run.wait()
    assert "waiting for rank 1 (process" in text and "in step" in text, text
    assert re.search(r"has given no sign of life for 1\d s; it was in step", text), text  # 13, on a busy machine later
    assert "lack of memory" not in text, text  # it was its parent that ended it
    assert code == LOST or launcher == "hydra", code


def test_a_stopped_rank_that_goes_on(endless):
    """A pause shorter than the limit ends nothing; nor does one of all ranks."""
    run = endless("forked", 2, training__distributed_timeout=4)
    for victims in ([1], [0], [0, 1]):
        for rank in victims:
            run.kill(rank, signal.SIGSTOP)
        time.sleep(6 if len(victims) == 2 else 2)
        for rank in victims:
            run.kill(rank, signal.SIGCONT)
        time.sleep(1)
        assert run.process.poll() is None, run.text()
    assert "has ended" not in run.text()


LATE = """
import os, sys, time, torch
from allforce.distributed.launch import detect
world = detect()
time.sleep(float(sys.argv[1]) * world.rank)
from allforce.distributed.connect import join
comm = join(world)
ones = torch.ones(3)
comm.all_reduce(ones)
comm.close()
os.write(1, b"met\\n")
"""


@pytest.mark.parametrize("launcher", ["workers", "hydra", "openmpi", "horovodrun", "torchrun"] if FULL else ["hydra"])
def test_a_late_worker_is_waited_for(launcher):
    """As long as ALLFORCE_TIMEOUT promises, by default a minute."""
    import conftest  # that of tests/parallel

    if reason := conftest.missing(launcher):
        pytest.skip(reason)
    command = [*map(str, conftest.COMMANDS[launcher]), "2", sys.executable, "-c", LATE, "40" if FULL else "8"]
    environment = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and done.stdout.count("met") == 2, done.stdout + done.stderr


UNREACHED = """
import sys, torch
from allforce.distributed import watch
from allforce.distributed.connect import join
from allforce.distributed.launch import detect
if detect().rank == 1:
    watch.Watch._dial = lambda self, place: "rank 1 does not reach rank 0"
world = detect()
comm = join(world)
ones = torch.ones(3)
comm.all_reduce(ones)
comm.close()
sys.stdout.write(f"{comm.watch} {int(ones[0])} {world.note}\\n")  # in one piece, beside the other workers
"""


def test_where_the_watch_is_not_reached_training_goes_on_and_says_so():
    command = [sys.executable, str(ROOT / "tests/parallel/start_workers.py"), "3", sys.executable, "-c", UNREACHED]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = (
        "None 3 workers are not watched, so a dead or hanging one may not be noticed: rank 1 does not reach rank 0."
    )
    assert done.stdout.splitlines() == [expected] * 3


UNEQUAL = """
import sys, time, torch
from allforce.distributed.connect import join
from allforce.distributed.launch import detect
comm = join(detect())
step = 0
comm.watch.doing = lambda: (step, "forward")
for step in range(30):
    time.sleep(float(sys.argv[1 + comm.rank]))
    comm.all_reduce(torch.ones(3))
comm.close()
"""


@pytest.mark.parametrize("seconds, slow", [(("0.02", "0.2"), True), (("0.1", "0.1"), False)])
def test_a_slow_rank_is_named_once_and_never_ended(seconds, slow):
    command = [sys.executable, str(ROOT / "tests/parallel/start_workers.py"), "2", sys.executable, "-c", UNEQUAL]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *seconds], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is slow") == slow and done.stderr.count("rank 1 (process") == slow, done.stderr
