"""Slurm's two shorthands: `n[01-03,07],gpu-[1-2]-x[0-1]` for hosts and `2(x3),1` for tasks per node."""

from __future__ import annotations

import re


def expand_hosts(text: str) -> list[str]:
    """`n[01-03],m` → n01 n02 n03 m. Zero padding is kept, an item may have several brackets."""
    return [host for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for host in _expand_item(item)]


def _expand_item(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if match is None:
        return [item]
    head, tail = item[: match.start()], _expand_item(item[match.end() :])
    return [head + number + rest for number in _numbers(match[1]) for rest in tail]


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """`2(x3),1` → [2, 2, 2, 1]."""
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks
