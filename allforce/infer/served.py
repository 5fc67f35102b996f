"""One program has the atoms, all workers of a launcher compute their forces: rank 0 tells, the others serve.

For simulation programs that must run once, such as LAMMPS: it runs on rank 0 and writes its files there.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from allforce.data.batch import Frame
from allforce.infer.evaluate import Evaluator
from allforce.infer.skin import Steps
from allforce.infer.workers import Workers

END = -1  # in the place of a number of atoms


def send(workers: Workers, frame: Frame, pbc: np.ndarray, skin: float) -> None:
    """Rank 0: the structure that everybody evaluates now, and how far its neighbour lists reach beyond the cutoff."""
    workers.comm.broadcast(torch.tensor([len(frame.type), frame.cell is not None, *pbc.tolist()], dtype=torch.int64))
    cell = np.zeros((3, 3)) if frame.cell is None else frame.cell
    numbers = np.concatenate([frame.coord.ravel(), frame.type, cell.ravel(), [skin]])
    workers.comm.broadcast(torch.from_numpy(numbers))


def send_end(workers: Workers) -> None:
    """Rank 0: no further structure comes."""
    if workers.size > 1:
        workers.comm.broadcast(torch.tensor([END, 0, 0, 0, 0], dtype=torch.int64))


def receive(workers: Workers) -> tuple[Frame, np.ndarray, float] | None:
    """The others: what rank 0 tells, None at the end."""
    head = torch.empty(5, dtype=torch.int64)
    workers.comm.broadcast(head)
    n, periodic, *pbc = head.tolist()
    if n == END:
        return None
    numbers = torch.empty(4 * n + 10, dtype=torch.float64)
    workers.comm.broadcast(numbers)
    coord, types, cell, skin = np.split(numbers.numpy(), [3 * n, 4 * n, 4 * n + 9])
    frame = Frame(coord.reshape(n, 3), types.astype(np.int64), cell.reshape(3, 3) if periodic else None)
    return frame, np.array(pbc, dtype=bool), float(skin[0])


def serve(evaluator: Evaluator, wanted: Collection[str]) -> None:
    """The others: compute their part of every structure until the end."""
    steps = None
    while (received := receive(evaluator.workers)) is not None:
        frame, pbc, skin = received
        steps = steps or Steps(evaluator, skin, wanted)
        frame = evaluator.checked(frame)
        list(evaluator.results(steps.batch(frame, pbc), [frame], wanted))
