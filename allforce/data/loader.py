"""Batches: frames read, neighbours found, everything put side by side; prepared ahead in the background."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from allforce.data.batch import LABELS, Batch, Edges, Frame
from allforce.data.dataset import DataSet
from allforce.data.sampler import Sampler
from allforce.errors import UserError
from allforce.neighbors import check_distances, limit_to_sel, neighbor_list

log = logging.getLogger(__name__)

Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]  # i (E,), j (E,), r (E, 3) of one frame, sorted by i


class Loader:
    """Makes batches of the micro-batches of a sampler.

    Frames and their neighbour pairs are kept in memory up to cache_bytes, the least recently used go first.
    pair_exclude: type pairs that do not see each other (symmetric). sel None: no limit on the number of neighbours.
    """

    def __init__(
        self,
        dataset: DataSet,
        sampler: Sampler,
        rcut: float,
        sel: list[int] | None,
        rank: int = 0,
        size: int = 1,
        device: str | torch.device = "cpu",
        cache_bytes: int = 2 << 30,
        pair_exclude: list[tuple[int, int]] | list[list[int]] | None = None,
        numb_fparam: int = 0,
        numb_aparam: int = 0,
        default_fparam: list[float] | None = None,
    ):
        self.dataset, self.sampler, self.rcut, self.sel = dataset, sampler, rcut, sel
        self.rank, self.size = rank, size
        self.device = torch.device(device)
        self.ntypes = len(dataset.type_map)
        self.numb_fparam, self.numb_aparam, self.default_fparam = numb_fparam, numb_aparam, default_fparam
        self.seen = _seen(pair_exclude, self.ntypes)
        self.dropped = 0  # neighbours beyond sel so far
        self._check_parameters()
        self._cache: OrderedDict[tuple[int, int], tuple[Frame, Pairs]] = OrderedDict()
        self._free = cache_bytes
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Batch]] = deque()

    # ---- one batch

    def batch(self, m: int) -> Batch:
        """Micro-batch m of the sampler, on the device."""
        return self.make(self.sampler.micro_batch(m))

    def make(self, members: list[tuple[int, int]]) -> Batch:
        """The batch of these (system, frame) pairs."""
        parts = [self.frame(i, k) for i, k in members]
        systems = self.dataset.systems
        name = ", ".join(f"{systems[i].name} frame {k}" for i, k in members)
        batch = collate([f for f, _ in parts], [e for _, e in parts], self.ntypes, name)
        return batch if self.device.type == "cpu" else batch.pin_memory().to(self.device)

    def frame(self, i: int, k: int) -> tuple[Frame, Pairs]:
        """Frame k of system i, sorted by type, with its neighbour pairs."""
        with self._lock:
            known = self._cache.get((i, k))
            if known is not None:
                self._cache.move_to_end((i, k))
                return known
        made = self._prepare(i, k)
        size = _bytes(made)
        with self._lock:
            if (i, k) not in self._cache:
                self._cache[i, k] = made
                self._free -= size
            while self._free < 0:
                _, old = self._cache.popitem(last=False)
                self._free += _bytes(old)
        return made

    def _prepare(self, i: int, k: int) -> tuple[Frame, Pairs]:
        system = self.dataset.systems[i]
        where = f"{system.name}, frame {k}"
        frame = self._with_parameters(system.frame(k)).by_type()
        try:
            pairs = neighbor_list(frame.coord, frame.cell, self.rcut)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        check_distances(*pairs, where, frame.order)
        if self.seen is not None:
            keep = self.seen[frame.type[pairs[0]], frame.type[pairs[1]]]
            pairs = pairs[0][keep], pairs[1][keep], pairs[2][keep]
        if self.sel is not None:
            *pairs, dropped = limit_to_sel(*pairs, frame.type, self.sel)
            self._count_dropped(dropped, where)
        return frame, tuple(pairs)

    def _count_dropped(self, dropped: int, where: str) -> None:
        if dropped and not self.dropped:
            log.warning(
                "%s: %d neighbours are beyond sel = %s and are left out, the farthest of each type first. "
                "Raise model.descriptor.sel, or set it to auto",
                where, dropped, self.sel,
            )  # fmt: skip
        self.dropped += dropped

    # ---- frame and atomic parameters

    def _check_parameters(self) -> None:
        default = self.default_fparam is not None
        if default and len(self.default_fparam or []) != self.numb_fparam:
            raise UserError(
                f"default_fparam {self.default_fparam} does not have numb_fparam = {self.numb_fparam} numbers"
            )
        for s in self.dataset.systems:
            for key, want, found in (
                ("fparam", self.numb_fparam, s.fparam_width),
                ("aparam", self.numb_aparam, s.aparam_width),
            ):
                if want and found != want and not (key == "fparam" and default and found == 0):
                    what = f"has {found} of them" if found else f"has no {key}.npy"
                    raise UserError(f"model.fitting_net.numb_{key} is {want}, but {s.name} {what}")

    def _with_parameters(self, frame: Frame) -> Frame:
        fparam = frame.fparam if self.numb_fparam else None
        if self.numb_fparam and fparam is None:
            fparam = np.array(self.default_fparam, dtype=np.float64)
        return replace(frame, fparam=fparam, aparam=frame.aparam if self.numb_aparam else None)

    # ---- in the background

    def start(self, m0: int, stride: int, depth: int = 2) -> None:
        """Prepare micro-batches m0, m0 + stride, … ahead of next(), `depth` of them."""
        self.close()
        self._next, self._stride = m0, stride
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        for _ in range(depth):
            self._submit()

    def next(self) -> Batch:
        """The following micro-batch; what went wrong while it was made is raised here."""
        assert self._pool is not None, "start() comes first"
        self._submit()
        return self._ahead.popleft().result()

    def _submit(self) -> None:
        assert self._pool is not None
        self._ahead.append(self._pool.submit(self.batch, self._next))
        self._next += self._stride

    def close(self) -> None:
        """End the background thread; batch() still works, and start() begins anew."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None
        self._ahead.clear()


def _seen(pair_exclude: list | None, ntypes: int) -> np.ndarray | None:
    """(nt, nt) bool: does a centre of type a see neighbours of type b; None when all do."""
    if not pair_exclude:
        return None
    seen = np.ones((ntypes, ntypes), dtype=bool)
    for a, b in pair_exclude:
        seen[a, b] = seen[b, a] = False
    return seen


def _bytes(item: tuple[Frame, Pairs]) -> int:
    frame, pairs = item
    arrays = [frame.coord, frame.type, *frame.labels.values(), *pairs]
    return 2000 + sum(a.nbytes for a in arrays)  # the constant stands for the objects themselves


def collate(frames: list[Frame], edges: list[Pairs], ntypes: int, name: str = "") -> Batch:
    """Frames side by side, atoms of all frames sorted by type, edges regrouped with their centres. O(N log N + E).

    edges of a frame: (i, j, r) sorted by i. Virtual atoms are left out; order tells where each atom came from.
    """
    labels = set(frames[0].labels)
    if any(set(f.labels) != labels for f in frames):
        raise UserError(f"{name}: the frames of a batch must have the same labels")
    sizes = np.array([len(f.type) for f in frames])
    start = np.cumsum(sizes) - sizes  # (B,) first atom of each frame
    nfile = np.array([f.nfile or len(f.type) for f in frames])
    fstart = np.cumsum(nfile) - nfile
    type = _join([f.type for f in frames])
    frame = np.repeat(np.arange(len(frames)), sizes)
    order = _join([np.arange(len(f.type)) if f.order is None else f.order for f in frames]) + np.repeat(fstart, sizes)
    i = _join([e[0] if s == 0 else e[0] + s for e, s in zip(edges, start, strict=True)])
    j = _join([e[1] if s == 0 else e[1] + s for e, s in zip(edges, start, strict=True)])
    r = _join([e[2] for e in edges])
    first = np.concatenate([[0], np.cumsum(np.bincount(i, minlength=len(type)))])

    by_type = np.argsort(type, kind="stable")
    by_type = by_type[np.count_nonzero(type < 0) :]  # (N,) virtual atoms come first in it and are left out
    atoms = _Take(None if len(by_type) == len(type) and (np.diff(by_type) == 1).all() else by_type)
    if atoms.index is not None:
        i, j, r, first = _regroup(by_type, j, r, first)
    type, frame = atoms(type), atoms(frame)
    counts = np.bincount(type, minlength=ntypes)
    cells = [np.zeros((3, 3)) if f.cell is None else f.cell for f in frames]
    aparam = None if frames[0].aparam is None else atoms(_join([f.aparam for f in frames]))
    return Batch(
        type=_int(type),
        frame=_int(frame),
        natoms=_float(np.bincount(frame, minlength=len(frames))),
        type_counts=tuple(counts.tolist()),
        coord=_float(atoms(_join([f.coord for f in frames]))),
        cell=None if all(f.cell is None for f in frames) else _float(np.stack(cells)),
        edges=Edges(_int(i), _int(j), _float(r), _int(first)),
        order=_int(atoms(order)),
        labels={x: _label(x, _join([f.labels[x] for f in frames]), atoms, len(frames)) for x in sorted(labels)},
        fparam=None if frames[0].fparam is None else _float(np.stack([f.fparam for f in frames])),
        aparam=None if aparam is None else _float(aparam),
        name=name,
    )


class _Take:
    """value[index] along the atoms; nothing to do when they are in order already."""

    def __init__(self, index: np.ndarray | None):
        self.index = index

    def __call__(self, value: np.ndarray) -> np.ndarray:
        return value if self.index is None else value[self.index]


def _regroup(
    order: np.ndarray, j: np.ndarray, r: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Edges of the atoms `order`, in that order; edges to atoms that are not among them go."""
    count = np.diff(first)[order]
    new_first = np.concatenate([[0], np.cumsum(count)])
    take = np.repeat(first[order] - new_first[:-1], count) + np.arange(new_first[-1])  # (E,) old place of each edge
    place = np.full(len(first) - 1, -1)
    place[order] = np.arange(len(order))
    i, j, r = np.repeat(np.arange(len(order)), count), place[j[take]], r[take]
    if len(order) < len(place):
        keep = j >= 0
        i, j, r = i[keep], j[keep], r[keep]
        new_first = np.concatenate([[0], np.cumsum(np.bincount(i, minlength=len(order)))])
    return i, j, r, new_first


def _label(name: str, value: np.ndarray, atoms: _Take, nframes: int) -> torch.Tensor:
    per_atom, width = LABELS[name]
    value = atoms(value) if per_atom else value.reshape(nframes, width)
    return _float(value[:, 0] if width == 1 else value)


def _join(arrays: list) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _int(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64))


def _float(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64))
