"""MPI_Init cannot be interrupted: what counts the seconds meanwhile ends it, and never outlives it."""

import subprocess
import sys
import time

import psutil
import pytest

WAITING = """
import sys, time
from allforce.distributed.mpi_comm import watchdog
with watchdog(float(sys.argv[1]), "MPI did not 'start'; 100 %s"):
    print("waiting", flush=True)
    time.sleep(float(sys.argv[2]))
print("done", flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def waiting():
    """waiting(limit, seconds, afterwards): a process within a watchdog, and what the watchdog consists of."""
    processes = []

    def start(*seconds):
        command = [sys.executable, "-c", WAITING, *map(str, seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "waiting\n"
        parts, deadline = [], time.monotonic() + 10
        while not any(part.name() == "sleep" for part in parts) and time.monotonic() < deadline:
            parts = psutil.Process(process.pid).children(recursive=True)
        assert parts
        return process, parts

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_start_that_takes_too_long_is_ended(waiting):
    process, parts = waiting(1.0, 60, 0)
    out, err = process.communicate(timeout=30)
    assert process.returncode == -15 and err == "MPI did not 'start'; 100 %s\n" and out == ""
    assert not psutil.wait_procs(parts, timeout=5)[1]


def test_a_start_in_time_is_left_alone(waiting):
    process, parts = waiting(2.0, 0.5, 4)
    assert process.stdout.readline() == "done\n"
    assert not psutil.wait_procs(parts, timeout=1)[1]
    assert process.wait(timeout=30) == 0 and process.stderr.read() == ""


def test_a_killed_worker_leaves_no_watchdog(waiting):
    """Which would live on for a minute, and then end whatever process has that number."""
    process, parts = waiting(60, 60, 0)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(parts, timeout=5)[1]
