"""The test suite of every engine, run as a program by all ranks: comm_suite.py [--engine E] [--expect E LAUNCHER].

Every check fails on its own rank with a traceback, which ends the job with an exit code other than 0. Rank 0 prints
`passed` and what it ran on.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from allforce.distributed import devices  # noqa: E402
from allforce.distributed.connect import agree, connect  # noqa: E402
from allforce.distributed.launch import detect  # noqa: E402
from allforce.distributed.profile import CountedComm  # noqa: E402
from allforce.errors import UserError  # noqa: E402

LARGE = 1 << 20  # float64: 8 MB


def numbers(n: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Irregular numbers in -1..1, different on every rank."""
    return torch.sin(torch.arange(n, dtype=torch.float64) * 12.9898 + 78.233 * (rank + 1)).to(dtype)


def same_everywhere(comm, tensor: torch.Tensor) -> None:
    """Bit for bit: the maximum and minimum of the bits over the ranks are equal."""
    bits = tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).to(torch.int64)
    high, low = bits.clone(), bits.clone()
    comm.all_reduce(high, "max")
    comm.all_reduce(low, "min")
    assert torch.equal(high, low)


def sums(comm) -> None:
    everyone = range(comm.size)
    for dtype, tolerance in {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2e-2}.items():
        for n in (0, 1, 7, 4096, LARGE if dtype == torch.float64 else 10_001):
            mine = numbers(n, dtype, comm.rank)
            expected = sum(numbers(n, dtype, r).double() for r in everyone)
            comm.all_reduce(mine)
            scale = float(expected.abs().max()) if n else 1.0
            torch.testing.assert_close(mine.double(), expected, rtol=0, atol=comm.size * tolerance * scale)
            same_everywhere(comm, mine)
    if comm.size == 2:  # a sum of two has one order
        mine = numbers(1000, torch.float64, comm.rank)
        comm.all_reduce(mine)
        assert torch.equal(mine, numbers(1000, torch.float64, 0) + numbers(1000, torch.float64, 1))
    count = torch.tensor([comm.rank + 1, 2**40])
    comm.all_reduce(count)
    assert count.tolist() == [comm.size * (comm.size + 1) // 2, comm.size * 2**40]
    scalar = torch.tensor(1.5)
    comm.all_reduce(scalar)
    assert scalar.shape == () and scalar.item() == 1.5 * comm.size


def extremes(comm) -> None:
    for dtype in (torch.float64, torch.float32, torch.int64):
        values = torch.tensor([comm.rank, -comm.rank], dtype=dtype)
        low = values.clone()
        comm.all_reduce(values, "max")
        comm.all_reduce(low, "min")
        assert values.tolist() == [comm.size - 1, 0] and low.tolist() == [0, 1 - comm.size]


def asynchronous(comm) -> None:
    first, second = numbers(5000, torch.float64, comm.rank), numbers(5000, torch.float64, comm.rank + 100)
    works = [comm.all_reduce_start(first), comm.all_reduce_start(second)]
    other = torch.randn(200, 200) @ torch.randn(200, 200)  # the processor is free meanwhile
    for work in works:
        work.wait()
    assert other.isfinite().all()
    for result, shift in ((first, 0), (second, 100)):
        expected = sum(numbers(5000, torch.float64, r + shift) for r in range(comm.size))
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)
        same_everywhere(comm, result)
    parameter = torch.nn.Parameter(torch.ones(3))  # a leaf that requires grad is reduced in place as well
    comm.all_reduce_start(parameter.data).wait()
    assert parameter.tolist() == [comm.size] * 3
    comm.all_reduce_start(torch.empty(0)).wait()


def buffers(comm) -> None:
    """Buffers of the engine's own choice (shared memory on one host), added up again and again."""
    for dtype, tolerance in {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2e-2}.items():
        for n in (1, 7, 100_003):
            buffer = comm.buffer(n, dtype, "cpu")
            assert buffer.shape == (n,) and buffer.dtype == dtype and not buffer.any()
            for turn in range(20 if n == 7 else 3):
                buffer.copy_(numbers(n, dtype, comm.rank + 10 * turn))
                comm.all_reduce_start(buffer).wait()
                expected = sum(numbers(n, dtype, r + 10 * turn).double() for r in range(comm.size))
                torch.testing.assert_close(buffer.double(), expected, rtol=0, atol=comm.size**2 * tolerance)
                same_everywhere(comm, buffer)


def broadcasts(comm) -> None:
    for root in range(comm.size):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
            mine = (numbers(1001, torch.float64, comm.rank) * 100).to(dtype)
            comm.broadcast(mine, root)
            assert torch.equal(mine, (numbers(1001, torch.float64, root) * 100).to(dtype))
    matrix = torch.full((3, 4), float(comm.rank))
    comm.broadcast(matrix, comm.size - 1)
    assert torch.equal(matrix, torch.full((3, 4), comm.size - 1.0))
    comm.broadcast(torch.empty(0))


def gathers(comm) -> None:
    mine = {"rank": comm.rank, "text": "Å" * 1000 * comm.rank, "numbers": [0.1, None, True]}
    values = comm.gather(mine)
    assert [v["rank"] for v in values] == list(range(comm.size))
    assert [len(v["text"]) for v in values] == [1000 * r for r in range(comm.size)]
    assert values[comm.rank] == mine
    assert comm.gather(0.1 + comm.rank)[-1] == 0.1 + (comm.size - 1)


def disagreement(comm) -> None:
    agree(comm, "the input file", "abc")
    try:
        agree(comm, "the input file", "abc" if comm.rank < comm.size - 1 else "xyz")
    except UserError as error:
        assert "abc" in str(error) and "xyz" in str(error) and f"rank {comm.size - 1}" in str(error)
    else:
        raise AssertionError("a disagreement went unnoticed")


def splits(comm) -> None:
    part = comm.split(comm.rank % 2)
    members = [r for r in range(comm.size) if r % 2 == comm.rank % 2]
    assert (part.rank, part.size) == (members.index(comm.rank), len(members))
    total = torch.tensor([float(comm.rank)])
    part.all_reduce(total)
    assert total.item() == sum(members)
    assert part.gather(comm.rank) == members
    alone = part.split(part.rank)  # a part of a part
    assert alone.size == 1 and alone.gather("x") == ["x"]
    whole = comm.split(0)
    assert (whole.rank, whole.size) == (comm.rank, comm.size)
    whole.barrier()
    for piece in (part, alone, whole):
        piece.close()
    comm.barrier()  # closing a part leaves the whole alive


def counts(comm) -> None:
    """A counted Comm is a Comm; who comes last to a collective has not waited."""
    counted = CountedComm(comm)
    asynchronous(counted)
    gathers(counted)
    counted.settle()
    begun = counted.record.waiting
    for turn in range(6):
        if counted.rank == turn % counted.size:
            time.sleep(0.02)
        total = torch.ones(1000)
        counted.all_reduce_start(total).wait() if turn % 2 else counted.all_reduce(total)
        assert total.eq(counted.size).all()
    spans = counted.settle()
    waits = [end - begin for name, begin, end in spans if name == "waiting"]
    assert len(waits) == 6 and min(waits) >= 0 and all(begin <= end for _, begin, end in spans)
    everybody = comm.gather(waits)
    if counted.one_clock:
        assert all(min(each) == 0 for each in zip(*everybody, strict=True)) and max(map(max, everybody)) > 0
    assert abs(counted.record.waiting - begun - sum(waits)) < 1e-9 <= counted.record.seconds
    assert counted.settle() == []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--expect", nargs=2, metavar=("ENGINE", "LAUNCHER"))
    parser.add_argument("--hosts", type=int, default=1)
    arguments = parser.parse_args()
    world = detect()
    device, threads = devices.setup(world)
    comm = connect(world, arguments.engine, device)
    assert (comm.rank, comm.size) == (world.rank, world.size)
    assert comm.size // world.local_size == arguments.hosts
    if arguments.expect:
        assert [comm.engine, world.launcher] == arguments.expect, (comm.engine, world)
    for check in (sums, extremes, asynchronous, buffers, broadcasts, gathers, disagreement, counts, splits):
        check(comm)
        comm.barrier()
    if comm.rank == 0:
        print(f"passed: {comm.engine} under {world.launcher}, {comm.size} ranks, {threads}", flush=True)
    comm.close()
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    assert comm.engine != "torch" or not any("gloo" in name for name in names), names  # a thread may break the exit


if __name__ == "__main__":
    main()
