"""Frames from which a model takes its statistics, dealt out to the workers, and sums over all of them.

Every rank takes its share of the frames (r, r + W, …) and sums are reduced, so that nothing is done twice and the
result is the serial one to rounding. With sharding "partition" a rank takes all frames of its systems (`split` false).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from allforce.data.batch import Batch, Frame
from allforce.data.dataset import DataSet
from allforce.data.loader import Loader
from allforce.data.stat_file import StatFile
from allforce.data.system import System
from allforce.distributed.comm import Comm
from allforce.errors import UserError
from allforce.neighbors import FEW, TOUCHING, Pairs, crowding, crowding_of_frames, neighbor_list

ITEM = TypeVar("ITEM")
AT_ONCE = 100_000  # atoms that are read before their neighbours are counted
ATOMS = 512  # of frames that are evaluated together: enough that products are not waiting for weights
SAME_ENERGY = 1e-3  # eV; more between two energies of the same isolated atom is a mistake


class Sample:
    """Frames of `nbatch` batches of every system (all of it, if it has fewer), as they are stored: its first ones, or
    some from everywhere (`spread`; frames that follow each other in a run are alike); `most` of them in all."""

    def __init__(
        self,
        loader: Loader,
        nbatch: int,
        comm: Comm,
        split: bool = True,
        stat_file: str | None = None,
        spread: bool = False,
        most: int | None = None,
    ):
        self.loader, self.comm, self.needs = loader.whole, comm, loader.needs
        frames = some_frames(loader.dataset, nbatch, spread)
        frames = frames[:: -(-len(frames) // most) if most else 1]
        self.all, self.split = frames, split  # (system, frame) of all workers
        self.members = share(frames, comm, split)  # of this worker
        self.file = StatFile(stat_file, loader.dataset.type_map, comm)

    @property
    def ntypes(self) -> int:
        return self.needs.ntypes

    def frames(self) -> Iterator[Frame]:
        """This worker's frames as the data has them."""
        for n, k in self.members:
            yield self.loader.dataset.systems[n].frame(k)

    def prepared(self) -> Iterator[tuple[Frame, Pairs]]:
        """This worker's frames, sorted by type, with their neighbour pairs."""
        for n, k in self.members:
            yield self.loader.frame(n, k)

    def batches(self) -> Iterator[Batch]:
        """This worker's frames, each a batch of its own."""
        for member in self.members:
            yield self.loader.make([member])

    def groups(self, most: int = ATOMS) -> Iterator[tuple[list[tuple[int, int]], Batch]]:
        """This worker's share of batches of up to `most` atoms, or one frame; which frames are together does not depend
        on the number of workers."""
        groups: list[list[tuple[int, int]]] = []
        for n, k in self.all:
            natoms = self.loader.dataset.systems[n].natoms
            if not groups or groups[-1][0][0] != n or (len(groups[-1]) + 1) * natoms > most:
                groups.append([])
            groups[-1].append((n, k))
        for group in share(groups, self.comm, self.split):
            yield group, self.loader.make(group)

    def rows(self, rows: Iterable[np.ndarray], width: int) -> np.ndarray:
        """The rows (·, width) of all workers, in an order that does not depend on who had which."""
        own = np.array(list(rows), dtype=np.float64).reshape(-1, width)
        return gather_rows(own, self.comm)

    def sum_rows(self, rows: Iterable[np.ndarray], width: int) -> np.ndarray:
        """Σ (width,) over the rows of all workers, one for a frame: the sum does not depend on who had which."""
        return self.rows(rows, width).sum(axis=0)

    def observed_types(self) -> list[str]:
        """Names of the types that have atoms in the sample of any worker."""
        seen = np.zeros(self.ntypes)
        for n in sorted({n for n, _ in self.members}):
            system = self.loader.dataset.systems[n]
            types = [system.frame(k).type for m, k in self.members if m == n] if system.mixed else [system.model_types]
            for each in types:
                seen += np.bincount(each[each >= 0], minlength=self.ntypes)
        return [name for name, count in zip(self.loader.dataset.type_map, self.sum(seen), strict=True) if count > 0]

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Σ over workers."""
        return reduce(values, self.comm)

    def isolated_energies(self) -> dict[int, float]:
        """Energy of each type that a frame of the data has alone, one atom without neighbours, on every worker."""
        found = []
        for system in self.loader.dataset.systems:
            if system.natoms == 1 and not system.mixed and "energy" in system.label_names:
                frames = (system.frame(k) for k in range(system.nframes))
                found += [(int(f.type[0]), float(f.labels["energy"][0]), f.name) for f in frames if self._alone(f)]
        energies: dict[int, tuple[float, str]] = {}
        for t, energy, name in [entry for own in self.comm.gather(found) for entry in own]:
            first, where = energies.setdefault(t, (energy, name))
            if abs(energy - first) > SAME_ENERGY:
                raise UserError(f"Energies of one atom alone differ: {first} eV in {where}, {energy} eV in {name}.")
        return {t: energy for t, (energy, _) in energies.items()}

    def _alone(self, frame: Frame) -> bool:
        return len(neighbor_list(frame.coord, frame.cell, self.needs.limit.rcut, where=frame.name)[0]) == 0


def some_frames(dataset: DataSet, nbatch: int, spread: bool) -> list[tuple[int, int]]:
    """(system, frame): the first nbatch batches of every system, or as many frames at equal distances."""
    found = []
    for i, (system, size) in enumerate(zip(dataset.systems, dataset.batch_sizes, strict=True)):
        count = min(system.nframes, nbatch * size)
        found += [(i, k * system.nframes // count if spread else k) for k in range(count)]
    return found


def share(items: Sequence[ITEM], comm: Comm, split: bool = True) -> Sequence[ITEM]:
    return items[comm.rank :: comm.size] if split else items


def reduce(values: np.ndarray, comm: Comm, op: str = "sum") -> np.ndarray:
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))
    comm.all_reduce(tensor, op)
    return tensor.numpy()


def gather_rows(rows: np.ndarray, comm: Comm) -> np.ndarray:
    """The rows of all ranks, in an order that does not depend on who had which."""
    counts = comm.gather(len(rows))
    table = np.zeros((sum(counts), rows.shape[1]))
    start = sum(counts[: comm.rank])
    table[start : start + len(rows)] = rows
    table = reduce(table, comm) + 0.0  # no -0.0, which some sums keep and others do not
    as_bytes = table.view(f"V{table.itemsize * table.shape[1]}").ravel()  # any order will do that the rows alone decide
    return table[np.argsort(as_bytes)]


def count_neighbors(
    systems: list[System], rcut: float, comm: Comm, split: bool = True, mixed: bool = False
) -> tuple[float | None, np.ndarray]:
    """Over all frames: the smallest distance (None without a pair) and the most neighbours of each type in rcut.

    mixed: of all types together.
    """
    ntypes = 1 if mixed else len(systems[0].type_map)
    least, most = np.inf, np.zeros(ntypes)
    pieces = [p for s, ks in frames_of_worker(systems, comm, split) for p in pieces_of(s, ks, torch.get_num_threads())]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # compiled loops run without Python's lock
        for nearest, count in pool.map(lambda p: crowding_of(p[0], p[1], rcut, ntypes, mixed), pieces):
            least, most = min(least, nearest), np.maximum(most, count)
    most = reduce(most, comm, "max").astype(np.int64)
    least = float(reduce(np.array([least]), comm, "min")[0])
    return (least if np.isfinite(least) else None), most


def frames_of_worker(systems: list[System], comm: Comm, split: bool) -> Iterator[tuple[System, range]]:
    """Every system with this worker's share of its frames: all frames of all systems dealt out in turn."""
    start = 0
    for s in systems:
        yield s, range((comm.rank - start) % comm.size, s.nframes, comm.size) if split else range(s.nframes)
        start += s.nframes


def pieces_of(system: System, ks: range, threads: int) -> Iterator[tuple[System, range]]:
    """The frames ks, some at a time, something for every thread."""
    size = max(1, min(AT_ONCE // system.natoms, -(-len(ks) // threads)))
    for begin in range(0, len(ks), size):
        yield system, ks[begin : begin + size]


def crowding_of(system: System, ks: range, rcut: float, ntypes: int, mixed: bool) -> tuple[float, np.ndarray]:
    """The smallest distance in these frames, and the most neighbours (ntypes,) of each type that an atom has."""
    found, single = [], list(ks)
    if system.natoms <= FEW and not system.mixed:
        frames = system.several(ks, labels=False)
        kind = np.zeros_like(system.model_types) if mixed else system.model_types
        nearest, most = crowding_of_frames(frames.coord, frames.cell, rcut, kind, ntypes)
        found.append((float(nearest.min()), most))
        single = [ks[n] for n in np.flatnonzero(nearest < TOUCHING)]  # to say what is wrong with them
    for k in single:
        frame, where = system.frame(k).by_type(), f"{system.name}, frame {k}"
        types = np.zeros_like(frame.type) if mixed else frame.type
        found.append(crowding(frame.coord, frame.cell, rcut, types, ntypes, where, frame.order))
    return min(d for d, _ in found), np.max([most for _, most in found], axis=0)
