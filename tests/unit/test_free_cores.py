"""Fewer threads while other programs have the cores."""

import pytest
import torch

from allforce.train.free_cores import EVERY, FreeCores, busy_time


class Machine:
    """Two CPUs, of which others use `others` and this process the rest, as far as it has threads."""

    def __init__(self, cpus=2):
        self.cpus, self.others, self.now, self.busy, self.own, self.lines = cpus, 0.0, 0.0, 5.0, 1.0, []

    def cores(self, most):
        return FreeCores(
            most, self.cpus, self.lines.append, lambda: self.busy, lambda: self.own, clock=lambda: self.now
        )

    def run(self, cores, seconds):
        self.work(cores, seconds)
        cores.look()

    def work(self, cores, seconds):
        own = min(cores.threads, self.cpus - self.others)
        self.now, self.busy, self.own = (
            self.now + seconds,
            self.busy + seconds * (self.others + own),
            self.own + seconds * own,
        )


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_follow_the_free_cores():
    machine = Machine()
    cores = machine.cores(2)
    for others, expected in ((0.0, 2), (0.2, 2), (0.9, 1), (1.4, 1), (0.0, 2)):
        machine.others = others
        for _ in range(2):
            machine.run(cores, EVERY)
        assert cores.threads == expected
    assert [line.split(": ")[1] for line in machine.lines] == ["1 thread(s) from here on", "2 thread(s) from here on"]
    assert torch.get_num_threads() == 2


def test_a_moment_changes_nothing_and_not_every_step_looks():
    machine = Machine(cpus=8)
    cores = machine.cores(8)
    for others in (3.0, 0.0, 5.0, 0.0):
        machine.others = others
        machine.run(cores, EVERY)
        assert cores.threads == 8
    machine.others = 3.0
    for _ in range(100):
        machine.run(cores, EVERY / 1000)
    assert cores.threads == 8 and not machine.lines
    for _ in range(3):
        machine.run(cores, EVERY)
    assert cores.threads == 5


@pytest.mark.parametrize("others, seconds, expected", [(1.0, 0.5, 1), (0.0, 0.5, 2), (1.0, 0.01, 2)])
def test_the_first_step_knows_already(others, seconds, expected):
    machine = Machine()
    cores = machine.cores(2)
    since = machine.now, machine.busy, machine.own
    machine.others = others
    machine.work(cores, seconds)
    cores.begin(since)
    assert cores.threads == expected and len(machine.lines) == (expected < 2)


def test_busy_time_grows_with_work():
    begun = busy_time()
    x = torch.ones(1000, 1000)
    for _ in range(5):
        x = x @ x * 1e-3
    assert busy_time() > begun
