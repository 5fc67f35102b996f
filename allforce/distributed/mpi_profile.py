"""`mpi_profile.<job>.<rank>`: the calls of a rank in the layout of the mpitrace library, for every engine."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from ..writing import write_whole
from .launch import job_number
from .profile import ALL_REDUCE, BARRIER, BROADCAST, GATHER, Count, CountedComm, Record

ORDER = (BROADCAST, BARRIER, ALL_REDUCE, GATHER)
WIDE, NARROW = 71 * "-", 65 * "-"


@dataclass
class Usage:
    """What the table over all ranks says of one of them; seconds and MBytes."""

    host: str
    communication: float
    waiting: float
    elapsed: float
    user: float
    system: float
    memory: float
    switches: int


def usage(comm: CountedComm) -> Usage:
    used = resource.getrusage(resource.RUSAGE_SELF)
    host, record = socket.gethostname().partition(".")[0], comm.record
    times = record.seconds, record.waiting, perf_counter() - comm.begun, used.ru_utime, used.ru_stime
    return Usage(host, *times, used.ru_maxrss / 1024, used.ru_nivcsw)


def write_profile(comm: CountedComm, folder: str = ".", env: Mapping[str, str] = os.environ) -> str:
    """Every rank writes its file and returns its name; all call it together."""
    comm.settle()
    own = usage(comm)  # before the two collectives that carry it
    ranks = [Usage(**entry) for entry in comm.comm.gather(asdict(own))]
    job = comm.comm.gather(job_number(env) or os.getpid())[0]
    path = Path(folder) / f"mpi_profile.{job}.{comm.rank}"
    write_whole(path, profile_text(comm.record, ranks, comm.rank, comm.engine).encode())
    return str(path)


def profile_text(record: Record, ranks: list[Usage], rank: int, engine: str) -> str:
    """The layout of ThetaGPU's mpitrace, with two more lines `key = value` and a last column for the waiting."""
    me, size = ranks[rank], len(ranks)
    largest = max(range(size), key=lambda r: ranks[r].memory)
    longest = max(range(size), key=lambda r: ranks[r].elapsed)
    lines = [
        f"Data for MPI rank {rank} of {size}:",
        "Times and statistics from MPI_Init() to MPI_Finalize().",
        WIDE,
        f"{'MPI Routine':<28}{'#calls':>12}{'avg. bytes':>13}{'time(sec)':>14}",
        WIDE,
    ]
    counts = [(name, count) for name in ORDER if (count := record.routine(name)).calls]
    lines += [f"{name:<28}{_numbers(c)}" for name, c in counts]
    lines.append(NARROW)
    lines += [f"MPI task {r} of {size} had the {what} communication time." for what, r in _places(ranks) if r == rank]
    lines += [
        f"total communication time = {me.communication:.3f} seconds.",
        f"time waiting for other ranks = {me.waiting:.3f} seconds.",
        f"total elapsed time = {me.elapsed:.3f} seconds.",
        f"user cpu time = {me.user:.3f} seconds.",
        f"system time = {me.system:.3f} seconds.",
        f"max resident set size = {me.memory:.3f} MBytes.",
        f"engine = {engine}.",
        "",
        f"Rank {largest} reported the largest memory utilization : {ranks[largest].memory:.2f} MBytes",
        f"Rank {longest} reported the largest elapsed time : {ranks[longest].elapsed:.2f} sec",
        NARROW,
        "Message size distributions:",
        "",
    ]
    for name, total in counts:
        if total.bytes:
            lines.append(f"{name:<28}{'#calls':>12}{'avg. bytes':>13}{'time(sec)':>14}")
            sizes = sorted((k, c) for (routine, k), c in record.counts.items() if routine == name)
            lines += [f"{'':<28}{_numbers(c)}" for _, c in sizes] + [""]
    return "\n".join(lines + (_summary(ranks) if rank == 0 else [])) + "\n"


def _numbers(count: Count) -> str:
    return f"{count.calls:>12}{count.bytes / count.calls:>13.1f}{count.seconds:>14.3f}"


def _places(ranks: list[Usage]) -> list[tuple[str, int]]:
    order = sorted(range(len(ranks)), key=lambda r: ranks[r].communication)
    return [("minimum", order[0]), ("median", order[len(order) // 2]), ("maximum", order[-1])]


def _summary(ranks: list[Usage]) -> list[str]:
    places = _places(ranks)
    head = f"{'taskid':>7} {'hostname':<20}{'comm(s)':>12}{'elapsed(s)':>12}{'user(s)':>12}{'system(s)':>12}"
    return [
        NARROW,
        "Communication summary for all tasks:",
        "",
        *(f"  {what:<7} communication time = {ranks[r].communication:.3f} sec for task {r}" for what, r in places),
        "",
        f"{head}{'size(MB)':>12}{'switches':>10}{'waiting(s)':>12}",
        *(
            f"{r:>7} {u.host:<20}{u.communication:>12.3f}{u.elapsed:>12.3f}{u.user:>12.3f}{u.system:>12.3f}"
            f"{u.memory:>12.2f}{u.switches:>10}{u.waiting:>12.3f}"
            for r, u in enumerate(ranks)
        ),
    ]
