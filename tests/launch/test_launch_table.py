"""Recorded variables of every launcher → World, and the pitfalls."""

import dataclasses

import pytest
from environments import DISTRIBUTED, HYDRA, OPEN_MPI_5, SERIAL, SLURM_STEP, TORCHRUN, UNVOUCHED, WRONG

from allforce.distributed import launch
from allforce.distributed.hostlist import expand_hosts, expand_tasks
from allforce.distributed.launch import LAUNCHERS, detect, scrubbed
from allforce.errors import UserError


@pytest.fixture(autouse=True)
def started_by_a_program(monkeypatch):
    """pytest itself may have been typed at a terminal."""
    monkeypatch.setattr(launch, "typed_at_a_terminal", lambda: False)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed(name):
    environment, launcher, *numbers, meeting = DISTRIBUTED[name]
    world = detect(environment)
    assert [world.launcher, world.rank, world.size, world.local_rank, world.local_size] == [launcher, *numbers]
    assert world.meeting == meeting if not meeting.startswith("tcp://") else world.meeting.startswith(meeting)
    assert world.job_key and world.launcher_pid


@pytest.mark.parametrize("name", SERIAL)
def test_serial(name):
    world = detect(SERIAL[name])
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert bool(world.note) == name.startswith("stale")


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    environment, words = WRONG[name]
    with pytest.raises(UserError) as error:
        detect(environment)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", UNVOUCHED)
def test_unvouched(monkeypatch, name):
    """An error, unless a person typed the command and nothing says where other workers would be."""
    environment, may_be_left_over = UNVOUCHED[name]
    with pytest.raises(UserError, match="If it is left over in your shell: unset"):
        detect(environment)
    monkeypatch.setattr(launch, "typed_at_a_terminal", lambda: True)
    if may_be_left_over:
        world = detect(environment)
        assert (world.rank, world.size) == (0, 1) and "taken as left over, running serially" in world.note
    else:
        with pytest.raises(UserError, match="unset"):
            detect(environment)


def test_every_launcher_is_recorded():
    assert {row.name for row in LAUNCHERS} - {"pmi"} == {entry[1] for entry in DISTRIBUTED.values()}


def test_hosts_of_slurm():
    assert detect(SLURM_STEP).hosts == ["node07", "node08"]


def test_port_and_key_differ_between_steps():
    """Two steps of one job on the same nodes do not meet at the same port; all ranks of one step do."""
    one, other = detect(SLURM_STEP), detect(SLURM_STEP | {"SLURM_STEP_ID": "4"})
    sibling = detect(SLURM_STEP | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"})
    assert one.meeting == sibling.meeting != other.meeting and one.job_key == sibling.job_key != other.job_key
    assert 10000 <= int(one.meeting.rpartition(":")[2]) < 30000


def test_restarts_differ():
    keys = {detect(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": str(n)}).job_key for n in range(3)}
    assert len(keys) == 3


def test_nodefiles(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("batch1\nc1\nc1\nc2\n")
    environment = DISTRIBUTED["jsrun"][0] | {"LSB_DJOB_RANKFILE": str(nodes)}
    assert detect(environment).meeting.startswith("tcp://c1:")
    nodes.write_text("x1\nx1\nx2\n")
    environment = DISTRIBUTED["PALS"][0] | {"PBS_NODEFILE": str(nodes)}
    assert detect(environment).hosts == ["x1", "x2"] and detect(environment).meeting.startswith("tcp://x1:")


def test_local_rank_unknown():
    world = detect({"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert dataclasses.astuple(world)[:4] == (1, 2, 1, 2) and world.local_assumed


@pytest.mark.parametrize("environment", [TORCHRUN, OPEN_MPI_5, HYDRA, SLURM_STEP])
def test_children_are_scrubbed(environment):
    kept = scrubbed(environment | {"PATH": "/bin", "OMP_NUM_THREADS": "2", "HOME": "/h"})
    assert detect(kept).size == 1 and detect(kept).note == ""
    assert {"PATH", "OMP_NUM_THREADS", "HOME"} <= kept.keys()


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,07],m", ["n01", "n02", "n03", "n07", "m"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("gpu-[1-2]-x[0-1],z", ["gpu-1-x0", "gpu-1-x1", "gpu-2-x0", "gpu-2-x1", "z"]),
        ("", []),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text, tasks", [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2(x2)", [1, 2, 2]), ("", [])])
def test_tasks_per_node(text, tasks):
    assert expand_tasks(text) == tasks
