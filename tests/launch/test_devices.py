"""One GPU per local rank, a share of the cores, and the variables that say otherwise."""

import pytest

from allforce.distributed import connect as connecting
from allforce.distributed.comm import SerialComm
from allforce.distributed.devices import (
    M_TRIM_THRESHOLD,
    Threads,
    choose_device,
    choose_threads,
    crowded,
    keep_freed_memory,
    physical_cores,
)
from allforce.distributed.launch import World
from allforce.distributed.spawn import worker_count
from allforce.errors import UserError


def world(local_rank=0, local_size=1, **more):
    return World(local_rank, local_size, local_rank, local_size, launcher_pid=1, **more)


@pytest.mark.parametrize(
    "local_rank, local_size, gpus, env, device",
    [
        (0, 1, 0, {}, "cpu"),
        (3, 4, 0, {}, "cpu"),
        (0, 1, 4, {}, "cuda:0"),
        (3, 4, 4, {}, "cuda:3"),
        (1, 2, 4, {"CUDA_VISIBLE_DEVICES": "2,3,0,1"}, "cuda:1"),
        (3, 4, 1, {"CUDA_VISIBLE_DEVICES": "3"}, "cuda:0"),  # its own, as a scheduler shows it
        (3, 4, 2, {"SLURM_GPUS_PER_TASK": "2"}, "cuda:0"),
        (1, 4, 2, {"DEVICE": "cpu"}, "cpu"),
    ],
)
def test_device(local_rank, local_size, gpus, env, device):
    assert str(choose_device(world(local_rank, local_size), env, gpus)) == device


@pytest.mark.parametrize("env", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}])
def test_more_ranks_than_gpus(env):
    with pytest.raises(UserError, match="4 workers on this host but only 2 visible"):
        choose_device(world(0, 4), env, 2)


def test_shared_gpu_is_found(monkeypatch):
    """Two ranks that see one and the same GPU each, though CUDA_VISIBLE_DEVICES was set."""

    class Two(SerialComm):
        size = 2

        def gather(self, value):
            return [[0, 2, "h", "GPU-1", 2], [1, 2, "h", "GPU-1", 2]]

    with pytest.raises(UserError, match="Ranks 0 and 1 on h would share one GPU"):
        connecting.check(world(0, 2), Two(), connecting.torch.device("cpu"))


@pytest.mark.parametrize(
    "env, intra, inter, source",
    [
        ({}, 4, 1, "16 cores / 4 workers"),
        ({"OMP_NUM_THREADS": "3"}, 3, 1, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "3,2"}, 3, 1, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "3", "TF_INTRA_OP_PARALLELISM_THREADS": "2"}, 2, 1, "TF_INTRA_OP_PARALLELISM_THREADS"),
        (
            {"DP_INTRA_OP_PARALLELISM_THREADS": "5", "TF_INTRA_OP_PARALLELISM_THREADS": "2"},
            5,
            1,
            "DP_INTRA_OP_PARALLELISM_THREADS",
        ),
        (
            {"DP_INTRA_OP_PARALLELISM_THREADS": "0", "DP_INTER_OP_PARALLELISM_THREADS": "2"},
            4,
            2,
            "16 cores / 4 workers",
        ),
        ({"TF_INTER_OP_PARALLELISM_THREADS": "3"}, 4, 3, "16 cores / 4 workers"),
    ],
)
def test_threads(env, intra, inter, source):
    threads = choose_threads(world(1, 4), env, cores=16)
    assert (threads.intra, threads.inter, threads.source) == (intra, inter, source)


def test_threads_at_least_one_and_serial():
    assert choose_threads(world(0, 8), {}, cores=2).intra == 1
    assert choose_threads(World(), {}, cores=6).intra == 6


@pytest.mark.parametrize(
    "number, dynamic, fixed", [("3", "false", True), ("3", "true", False), ("3", None, False), (None, "false", False)]
)
def test_fewer_threads_than_given_beside_others(number, dynamic, fixed, monkeypatch):
    """A number is the most that is used, unless OpenMP's own variable keeps it."""
    monkeypatch.delenv("OMP_DYNAMIC", raising=False)
    if dynamic is not None:
        monkeypatch.setenv("OMP_DYNAMIC", dynamic)
    assert choose_threads(World(), {} if number is None else {"OMP_NUM_THREADS": number}, cores=2).fixed == fixed


@pytest.mark.parametrize("text", ["many", "-1"])
def test_threads_wrong(text):
    with pytest.raises(UserError, match=f"OMP_NUM_THREADS={text}"):
        choose_threads(World(), {"OMP_NUM_THREADS": text})


def test_more_threads_than_cpus_is_told():
    class Four(SerialComm):
        size = 4
        told: list = []

        def gather(self, value):
            return self.told

    comm, threads = Four(), Threads(2, 1, "")
    comm.told = [["a", 2, [0, 1]], ["a", 2, [2, 3]], ["b", 2, [0, 1, 2, 3]], ["b", 2, [0, 1, 2, 3]]]
    assert crowded(threads, comm) == []  # cores of their own, or shared ones that are enough
    comm.told[3][1] = 3
    (sentence,) = crowded(threads, comm)
    assert sentence.startswith("b: 2 worker(s) with 5 threads share 4 CPUs")
    assert crowded(Threads(10**6, 1, ""), SerialComm())[0].count("1 worker(s) with 1000000 threads") == 1


@pytest.mark.parametrize("largest, granted", [(2**40, 2**30), (2**25, 2**25), (2**20, None)])
def test_malloc_is_asked_for_what_it_grants(largest, granted):
    """glibc before 2.35 refuses thresholds above 32 MiB, and any setting ends its own search for a good one."""
    calls = []

    def mallopt(parameter, value):
        calls.append((parameter, value))
        return int(parameter == M_TRIM_THRESHOLD or value <= largest)

    assert keep_freed_memory(mallopt) == granted
    assert ((M_TRIM_THRESHOLD, 2**31 - 1) in calls) == (granted is not None)
    assert keep_freed_memory() in (None, 2**30, 2**25)


def test_physical_cores():
    assert physical_cores({0}) == 1


def test_worker_count(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert worker_count("3") == 3 and worker_count("auto") >= 1
    for wrong in ("0", "two", "-1"):
        with pytest.raises(UserError, match="--workers"):
            worker_count(wrong)
