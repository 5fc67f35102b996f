"""Where the time went: the phases of all ranks as a table, and one sentence about what it means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from allforce.trace import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    DISPLAY,
    FORWARD,
    MOMENTS,
    NEIGHBORS,
    OPTIMIZER,
    TRANSFER,
    VALIDATION,
    WAITING,
)

ORDER = (DATA, FORWARD, MOMENTS, BACKWARD, WAITING, TRANSFER, OPTIMIZER, VALIDATION, DISPLAY, CHECKPOINT)
OTHER = "other"
COMPUTING = (FORWARD, MOMENTS, BACKWARD, OPTIMIZER)


@dataclass
class RankTimes:
    """What one rank spent in a stretch of the run; JSON both ways, so that ranks can tell each other."""

    wall: float  # s
    phases: dict[str, float]  # own seconds of the training thread's phases
    waiting: float = 0.0  # s, part of communication
    loader: dict[str, float] = field(default_factory=dict)  # own seconds of the loader's thread
    samples: int = 0
    cpu: float = 0.0  # s, all threads
    memory: float = 0.0  # MB, largest so far
    gpu: float | None = None  # % busy
    gpu_memory: float | None = None  # MB

    def split(self) -> dict[str, float]:
        """Phases with communication in its two parts, in the order of a step; the rest is `other`."""
        phases = dict(self.phases)
        communication = phases.pop(COMMUNICATION, 0.0)
        if communication:
            waiting = min(self.waiting, communication)
            phases |= {WAITING: waiting, TRANSFER: communication - waiting}
        names = [n for n in ORDER if n in phases] + [n for n in phases if n not in ORDER]
        return {n: phases[n] for n in names} | {OTHER: max(0.0, self.wall - sum(phases.values()))}


@dataclass
class Row:
    """A phase over all ranks."""

    phase: str
    mean: float  # s
    share: float  # of the mean wall time
    slowest: int  # rank
    worst: float  # s, of that rank
    imbalance: float  # worst / mean - 1


def rows(ranks: list[RankTimes]) -> list[Row]:
    split = [r.split() for r in ranks]
    names = list(dict.fromkeys(name for phases in split for name in phases if name != OTHER)) + [OTHER]
    wall = sum(r.wall for r in ranks) / len(ranks) or 1.0
    found = []
    for name in names:
        seconds = [phases.get(name, 0.0) for phases in split]
        mean, slowest = sum(seconds) / len(seconds), max(range(len(seconds)), key=seconds.__getitem__)
        imbalance = seconds[slowest] / mean - 1 if mean else 0.0
        found.append(Row(name, mean, mean / wall, slowest, seconds[slowest], imbalance))
    return found


def slowest_rank(ranks: list[RankTimes]) -> int:
    """The one that the others wait for."""
    return min(range(len(ranks)), key=lambda r: ranks[r].waiting)


def table(ranks: list[RankTimes], steps: int, first: float = 0.0) -> list[str]:
    """Lines for the log; the first step, of `first` seconds, is not among the steps."""
    wall, several = sum(r.wall for r in ranks) / len(ranks), len(ranks) > 1
    head = f"{'phase':<14}{'seconds':>10}{'ms/step':>10}{'share':>9}"
    lines = [f"where the time went ({steps} steps in {wall:.2f} s, after a first one of {first:.2f} s):"]
    lines.append(head + (f"{'slowest rank':>14}{'imbalance':>11}" if several else ""))
    for row in rows(ranks):
        line = f"{row.phase:<14}{row.mean:>10.3f}{1000 * row.mean / max(steps, 1):>10.3f}{100 * row.share:>7.1f} %"
        lines.append(line + (f"{row.slowest:>14}{100 * row.imbalance:>9.0f} %" if several else ""))
    return [*lines, devices(ranks), verdict(ranks)]


def devices(ranks: list[RankTimes]) -> str:
    """CPUs, memory, GPUs in one line."""
    cores = sum(r.cpu for r in ranks) / (sum(r.wall for r in ranks) or 1.0)
    most = max(range(len(ranks)), key=lambda r: ranks[r].memory)
    each = " each" if len(ranks) > 1 else ""
    text = f"CPU: {cores:.2f} cores busy{each}; memory: {ranks[most].memory:.0f} MB"
    text += f" (rank {most}, the largest)" if len(ranks) > 1 else ""
    used = [r.gpu for r in ranks if r.gpu is not None]
    if used:
        least = min((r.gpu, k) for k, r in enumerate(ranks) if r.gpu is not None)
        text += f"; GPU: {sum(used) / len(used):.0f} % busy" + (
            f", least rank {least[1]} with {least[0]:.0f} %" * (len(used) > 1)
        )
        memory = [r.gpu_memory for r in ranks if r.gpu_memory is not None]
        text += f", memory {max(memory):.0f} MB" if memory else ""
    return text


def verdict(ranks: list[RankTimes]) -> str:
    """What costs most besides computing, and what to do about it; the first of these that is true."""
    found = {row.phase: row for row in rows(ranks)}
    return next(_findings(found, ranks), _all_well(found))


def _findings(found: dict[str, Row], ranks: list[RankTimes]) -> Iterator[str]:
    def share(name: str) -> float:
        return found[name].share if name in found else 0.0

    several = len(ranks) > 1
    working = sum(r.wall - r.waiting - r.phases.get(DATA, 0.0) for r in ranks)
    cpu = sum(r.cpu for r in ranks) / (working or 1.0)
    if ranks[0].gpu_memory is None and cpu < 0.7:
        yield (
            f"verdict: {'a worker' if several else 'the training'} gets {cpu:.2f} of one core while it computes: other "
            "programs, or too many workers, share these CPUs. Everything takes that much longer."
        )
    if DATA in found and found[DATA].worst >= 0.1 * ranks[found[DATA].slowest].wall:
        row = found[DATA]
        who = f"rank {row.slowest} waits" if several else "the training waits"
        loader = ranks[row.slowest].loader
        searches = loader.get(NEIGHBORS, 0.0) > 0.5 * sum(loader.values())
        what, remedy = (
            ("finding neighbours", "give the workers more cores")
            if searches
            else ("reading", "put the data on a faster disk")
        )
        cause = f"{what} takes longest. Raise training/cache_memory so that frames are kept, or {remedy}"
        yield f"verdict: {who} {100 * row.worst / ranks[row.slowest].wall:.0f} % of its time for data; {cause}."
    if several and found.get(WAITING) and share(WAITING) >= 0.1:
        slow = slowest_rank(ranks)
        yield (
            f"verdict: the ranks wait {100 * share(WAITING):.0f} % of their time for each other, mostly for rank "
            f"{slow}: its batches are larger, or it shares its cores with something else. Make the batches alike "
            '(batch_size "auto:N" or "max:N"), and give every worker cores of its own.'
        )
    if share(TRANSFER) >= 0.15:
        yield (
            f"verdict: {100 * share(TRANSFER):.0f} % of the time goes into adding up gradients. A larger batch_size or "
            'acc_freq makes steps fewer and longer, training/gradient_precision "float32" makes the message smaller.'
        )
    if share(VALIDATION) + share(DISPLAY) >= 0.15:
        lines = share(VALIDATION) + share(DISPLAY)
        yield (
            f"verdict: {100 * lines:.0f} % of the time goes into lines of the learning curve: raise "
            "training/disp_freq, or lower validation_data/numb_btch."
        )
    if share(CHECKPOINT) >= 0.1:
        yield f"verdict: {100 * share(CHECKPOINT):.0f} % of the time goes into checkpoints: raise training/save_freq."


def _all_well(found: dict[str, Row]) -> str:
    computing = sum(found[name].share for name in COMPUTING if name in found)
    return f"verdict: {100 * computing:.0f} % of the time is computing; no other cost stands out."


def as_dict(ranks: list[RankTimes]) -> dict[str, Any]:
    """For metrics.jsonl."""
    return {
        "phases": {row.phase: row.mean for row in rows(ranks)},
        "slowest_rank": slowest_rank(ranks),
        "waiting": [r.waiting for r in ranks],
        "cpu_cores": [r.cpu / r.wall if r.wall else 0.0 for r in ranks],
        "memory_mb": [r.memory for r in ranks],
        **({"gpu_percent": [r.gpu for r in ranks]} if ranks[0].gpu is not None else {}),
    }
