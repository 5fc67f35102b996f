"""What is counted between workers, and the file of a rank. The waiting of real workers is in tests/parallel."""

import os
import re

import pytest
import torch

from allforce.distributed.comm import SerialComm
from allforce.distributed.launch import job_number
from allforce.distributed.mpi_profile import Usage, profile_text, write_profile
from allforce.distributed.profile import CountedComm, Record, bounds, size_bin


def test_bins_are_those_of_mpitrace():
    sizes = [0, 1, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 1 << 20, (1 << 20) + 1]
    assert [size_bin(n) for n in sizes] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 19, 20]


def test_every_collective_is_counted_with_its_bytes():
    comm = CountedComm(SerialComm())
    tensor = torch.ones(5, dtype=torch.float64)
    comm.all_reduce(tensor)
    comm.all_reduce_start(tensor[:3]).wait()
    comm.broadcast(torch.ones(4, dtype=torch.float32))
    assert comm.gather({"a": 1}) == [{"a": 1}]
    comm.barrier()
    part = comm.split(0)
    part.all_reduce(tensor)  # counts for the whole
    counts = {
        name: comm.record.routine(name) for name in ("MPI_Allreduce", "MPI_Bcast", "MPI_Allgather", "MPI_Barrier")
    }
    assert {n: (c.calls, c.bytes) for n, c in counts.items()} == {
        "MPI_Allreduce": (3, 40 + 24 + 40),
        "MPI_Bcast": (1, 16),
        "MPI_Allgather": (1, 8),
        "MPI_Barrier": (1, 0),
    }
    assert comm.record.seconds == pytest.approx(sum(c.seconds for c in counts.values()))
    assert comm.settle() == [] and comm.record.waiting == 0.0


def test_clocks_are_compared_by_barriers():
    """Rank r's clock is 100 ahead: it comes at 1, 11 and leaves at 3.5, 12.1 of rank 0's time; rank 0: 2→3, 10→12."""
    low, high = bounds([[101.0, 103.5], [111.0, 112.1]], [[2.0, 3.0], [10.0, 12.0]])
    assert low <= 100 <= high
    assert (low, high) == pytest.approx((99.0, 101.5))


def test_layout(tmp_path):
    record = Record(waiting=0.25)
    for bytes, seconds in [(8, 0.1), (8, 0.2), (8_000_000, 0.5)]:
        record.add("MPI_Allreduce", bytes, seconds)
    record.add("MPI_Barrier", 0, 0.05)
    ranks = [Usage("a", 0.85, 0.25, 10, 9, 1, 100.0, 3), Usage("b", 1.5, 0.9, 10.1, 9, 1, 120.0, 4)]
    text = profile_text(record, ranks, 0, "torch")
    lines = text.splitlines()
    assert lines[0] == "Data for MPI rank 0 of 2:"
    assert lines[1] == "Times and statistics from MPI_Init() to MPI_Finalize()."
    assert lines[3].split() == ["MPI", "Routine", "#calls", "avg.", "bytes", "time(sec)"]
    rows = {words[0]: words[1:] for line in lines if len(words := line.split()) == 4 and words[0].startswith("MPI_")}
    assert rows == {"MPI_Barrier": ["1", "0.0", "0.050"], "MPI_Allreduce": ["3", "2666672.0", "0.800"]}
    assert "MPI task 0 of 2 had the minimum communication time." in lines
    assert "total communication time = 0.850 seconds." in lines
    assert "Rank 1 reported the largest memory utilization : 120.00 MBytes" in lines
    sizes = text.partition("Message size distributions:")[2].partition("-----")[0]
    assert re.findall(r"(\d+) +([\d.]+) +([\d.]+)$", sizes, re.M) == [
        ("2", "8.0", "0.300"),
        ("1", "8000000.0", "0.500"),
    ]
    assert "MPI_Barrier" not in sizes  # without bytes there are no sizes
    assert "Communication summary for all tasks:" in text and "task 1" in text
    assert "Communication summary" not in profile_text(record, ranks, 1, "torch")


def test_name_of_the_file(tmp_path):
    comm = CountedComm(SerialComm())
    assert write_profile(comm, str(tmp_path), {"PBS_JOBID": "4711.server"}) == str(tmp_path / "mpi_profile.4711.0")
    assert write_profile(comm, str(tmp_path), {}).endswith(f"mpi_profile.{os.getpid()}.0")
    assert job_number({"SLURM_JOB_ID": "12", "PBS_JOBID": "13"}) == 12
