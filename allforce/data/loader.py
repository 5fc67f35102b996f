"""Batches: frames read, neighbours found, everything put side by side; prepared ahead in the background."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from allforce.data.batch import LABELS, Batch, Edges, Frame
from allforce.data.blocks import NOTHING, Part
from allforce.data.cache import Cache
from allforce.data.dataset import DataSet
from allforce.data.plan import Plan
from allforce.data.prepare import Needs, Preparation
from allforce.data.sampler import Sampler
from allforce.errors import UserError
from allforce.neighbors import FEW, Pairs
from allforce.trace import BATCH, phase

PLANS = 1 << 25  # bytes of plans that a loader keeps
AT_ONCE = 8  # batches of few atoms: one that is made by itself, beside the training, takes three times as long


class Loader:
    """Makes batches of the micro-batches of a sampler.

    Frames and their neighbour pairs are kept in the cache, which other loaders of this worker may share. With block
    (s, S) a batch has the part that worker s of S computes of every frame (see blocks.py).
    """

    def __init__(
        self,
        dataset: DataSet,
        sampler: Sampler,
        needs: Needs,
        device: str | torch.device = "cpu",
        cache: Cache | None = None,
        block: tuple[int, int] = (0, 1),
    ):
        self.block = block
        self.dataset, self.sampler, self.needs = dataset, sampler, needs
        self.prepare = Preparation(needs)
        self.device = torch.device(device)
        check_parameters(dataset, needs)
        self._cache = Cache(1 << 30) if cache is None else cache
        self._plans = Cache(PLANS)
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[list[Batch | Exception]]] = deque()
        self._ready: deque[Batch | Exception] = deque()

    @property
    def whole(self) -> Loader:
        """The same without blocks."""
        if self.block[1] == 1:
            return self
        return Loader(self.dataset, self.sampler, self.needs, self.device, self._cache)

    # ---- one batch

    def batch(self, m: int) -> Batch:
        """Micro-batch m of the sampler, on the device."""
        with phase(BATCH):
            return self.make(self.sampler.micro_batch(m))

    def make(self, members: list[tuple[int, int]]) -> Batch:
        """The batch of these (system, frame) pairs; a batch of one frame is kept as it is."""
        if len(members) == 1:
            batch = self._cache.kept((id(self), "batch", *members[0]), lambda: self._made(members), _bytes)
        else:
            batch = self._made(members)
        return batch if self.device.type == "cpu" else batch.pin_memory().to(self.device)

    def _made(self, members: list[tuple[int, int]]) -> Batch:
        if self._alike(members):
            n, count = members[0][0], len(members)
            system = self.dataset.systems[n]
            plan = self._plans.kept((n, count), lambda: Plan(system.model_types, count, self.needs), lambda p: p.nbytes)
            batch = plan.batch(system.several([k for _, k in members]), self._name(members))
            if batch is not None:
                return batch
        frame = self._prepare if len(members) == 1 else self.frame
        return self._join(members, [frame(i, k) for i, k in members])

    def _alike(self, members: list[tuple[int, int]]) -> bool:
        """Frames of the same few atoms, whose batch can be made by a plan as fast as from frames that were kept."""
        needs, system = self.needs, self.dataset.systems[members[0][0]]
        special = needs.excluded_pairs or needs.numb_fparam or needs.numb_aparam or self.block[1] > 1
        few = system.natoms <= FEW and not system.mixed and (system.at_hand or len(members) == 1)
        return few and not special and all(n == members[0][0] for n, _ in members)

    def _name(self, members: list[tuple[int, int]]) -> str:
        return ", ".join(f"{self.dataset.systems[i].name} frame {k}" for i, k in members)

    def _join(self, members: list[tuple[int, int]], parts: list[tuple[Frame, Any]]) -> Batch:
        join: Any = collate if self.block[1] == 1 else collate_parts
        return join([f for f, _ in parts], [e for _, e in parts], self.needs.ntypes, self._name(members))

    def frame(self, i: int, k: int) -> tuple[Frame, Any]:
        """Frame k of system i, sorted by type, with its neighbour pairs, or, with blocks, its Part."""
        return self._cache.kept((id(self), "frame", i, k), lambda: self._prepare(i, k), _bytes)

    def _prepare(self, n: int, k: int) -> tuple[Frame, Any]:
        system = self.dataset.systems[n]
        frame, where = system.frame(k), f"{system.name}, frame {k}"
        return self.prepare(frame, where) if self.block[1] == 1 else self.prepare.part(frame, where, *self.block)

    # ---- in the background

    def start(self, m0: int, stride: int, depth: int = 2) -> None:
        """Prepare micro-batches m0, m0 + stride, … ahead of next(): some at a time, `depth` times."""
        self.close()
        data = self.dataset
        largest = max(s.natoms * (data.mixed_batch or b) for s, b in zip(data.systems, data.batch_sizes, strict=True))
        self._next, self._stride, self._at_once = m0, stride, AT_ONCE if largest <= FEW else 1
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        for _ in range(depth):
            self._submit()

    def next(self) -> Batch:
        """The following micro-batch; what went wrong while it was made is raised here."""
        assert self._pool is not None, "start() comes first"
        if not self._ready:
            self._submit()
            self._ready.extend(self._ahead.popleft().result())
        batch = self._ready.popleft()
        if isinstance(batch, Exception):
            raise batch
        return batch

    def _submit(self) -> None:
        assert self._pool is not None
        end = self._next + self._at_once * self._stride
        self._ahead.append(self._pool.submit(self._some, range(self._next, end, self._stride)))
        self._next = end

    def _some(self, numbers: range) -> list[Batch | Exception]:
        """These micro-batches, up to the first that cannot be made."""
        found: list[Batch | Exception] = []
        try:
            for m in numbers:
                found.append(self.batch(m))
        except Exception as error:  # has its turn behind those that were made
            found.append(error)
        return found

    def close(self) -> None:
        """End the background thread; batch() still works, and start() begins anew."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None
        self._ahead.clear()
        self._ready.clear()


def check_parameters(dataset: DataSet, needs: Needs) -> None:
    """Every system has the frame and atomic parameters that the model takes."""
    for s in dataset.systems:
        for name, want, found in (
            ("fparam", needs.numb_fparam, s.fparam_width),
            ("aparam", needs.numb_aparam, s.aparam_width),
        ):
            if want and found != want and not (name == "fparam" and needs.default_fparam is not None and found == 0):
                what = f"has {found} of them" if found else f"has no {name}.npy"
                raise UserError(f"{needs.parameters_key}/numb_{name} is {want}, but {s.name} {what}")


def _bytes(item: Any) -> int:
    """Of a batch, or of a frame with its pairs."""
    if isinstance(item, Batch):
        edges = item.edges
        arrays: list = [item.coord, item.type, item.frame, item.order, *item.labels.values(), edges.i, edges.j, edges.r]
        if item.part is not None:
            return 2000 + sum(a.nbytes for a in arrays) + _bytes(item.part)
    else:
        frame, pairs = item
        pairs = pairs.pairs if isinstance(pairs, Part) else pairs
        arrays = [frame.coord, frame.type, *frame.labels.values(), *pairs]
    return 2000 + sum(a.nbytes for a in arrays)  # the constant stands for the objects themselves


def collate(
    frames: list[Frame], edges: list[Pairs], ntypes: int, name: str = "", others: list[np.ndarray] | None = None
) -> Batch:
    """Frames side by side, atoms of all frames sorted by type, edges with their centres.

    edges of a frame: (i, j, r) sorted by i. Virtual atoms are left out; order tells where each atom came from. Frames
    that are sorted by type already (Frame.by_type) are joined by copying slices, the rest is sorted first.
    others: types of atoms that are no centres, numbered behind those of the frame, in the batch behind all centres.
    """
    labels = sorted(frames[0].labels)
    if any(sorted(f.labels) != labels for f in frames):
        raise UserError(f"{name}: the frames of a batch must have the same labels")
    parts = [_sorted(f, e) for f, e in zip(frames, edges, strict=True)]
    frames = [f for f, _ in parts]
    join = _Join([f.type for f in frames], ntypes)
    firsts = [_first(e[0], len(f.type)) for f, e in parts]
    count = join([np.diff(x) for x in firsts])  # (N,) edges of each atom
    start = np.cumsum([0] + [f.nfile or len(f.type) for f in frames])  # (B + 1,) first atom of each frame in the files
    order = [p + (np.arange(len(f.type)) if f.order is None else f.order) for p, f in zip(start, frames, strict=False)]
    periodic = any(f.cell is not None for f in frames)
    centers, rows_of = join([f.type for f in frames]), join.rows_of
    types = centers if others is None else np.concatenate([centers, *others])
    if others is not None:
        begin = np.cumsum([len(centers)] + [len(t) for t in others])
        rows_of = [np.append(p, b + np.arange(len(t))) for p, b, t in zip(rows_of, begin, others, strict=False)]
    if len(parts) == 1 and others is None:  # every atom and edge is in its place
        i, j = parts[0][1][:2]
    else:
        i = np.repeat(np.arange(len(count)), count)
        j = join([p[e[1]] for p, (_, e) in zip(rows_of, parts, strict=True)], firsts)
    return Batch(
        type=int_tensor(centers),
        frame=int_tensor(join([np.full(len(f.type), k) for k, f in enumerate(frames)])),
        natoms=float_tensor(np.array([len(f.type) for f in frames])),
        lowest=int_tensor(np.array([f.type.min(initial=ntypes) for f in frames])),
        type_counts=join.type_counts,
        coord=float_tensor(join([f.coord for f in frames])),
        cell=float_tensor(np.stack([np.zeros((3, 3)) if f.cell is None else f.cell for f in frames]))
        if periodic
        else None,
        edges=Edges(
            i=int_tensor(i),
            j=int_tensor(j),
            r=float_tensor(join([e[2] for _, e in parts], firsts)),
            first=int_tensor(np.concatenate([[0], np.cumsum(count)])),
            type=int_tensor(types),
            type_counts=tuple(np.bincount(types, minlength=ntypes).tolist()),
            nearest=min(_nearest(e[2]) for _, e in parts),
        ),
        order=int_tensor(join(order)),
        labels={x: _label(x, [f.labels[x] for f in frames], join) for x in labels},
        fparam=None if frames[0].fparam is None else float_tensor(np.stack([_given(f.fparam) for f in frames])),
        aparam=None if frames[0].aparam is None else float_tensor(join([_given(f.aparam) for f in frames])),
        name=name,
    )


def collate_parts(frames: list[Frame], parts: list[Part], ntypes: int, name: str = "") -> Batch:
    """Frames side by side without edges, their labels as usual, and in `part` what this worker computes of them."""
    whole = collate(frames, [NOTHING.pairs] * len(frames), ntypes, name)
    centers = [_only(f, p.atoms[: p.centers]) for f, p in zip(frames, parts, strict=True)]
    others = [p.atoms[p.centers :] for p in parts]
    types = [f.type[o] for f, o in zip(frames, others, strict=True)]
    part = collate(centers, [p.pairs for p in parts], ntypes, name, types)
    rows_of = _Join([f.type for f in frames], ntypes).rows_of  # of each frame's atoms in the whole
    rows = [np.concatenate(rows_of)[part.order.numpy()], *(p[o] for p, o in zip(rows_of, others, strict=True))]
    own = None
    if any(p.own is not None for p in parts):
        masks = [np.ones(p.centers) if p.own is None else p.own for p in parts]
        own = float_tensor(_Join([f.type for f in centers], ntypes)(masks))
    return replace(
        whole,
        part=replace(part, natoms=whole.natoms, lowest=whole.lowest, rows=int_tensor(np.concatenate(rows)), own=own),
    )


def _only(frame: Frame, atoms: np.ndarray) -> Frame:
    """Some atoms of a frame that is sorted by type, without labels; `order` tells which."""
    aparam = None if frame.aparam is None else frame.aparam[atoms]
    coord, types = frame.coord[atoms], frame.type[atoms]
    return replace(frame, coord=coord, type=types, aparam=aparam, labels={}, order=atoms, nfile=len(frame.type) or None)


class _Join:
    """Puts arrays of type-sorted frames together, sorted by type: slices (type, frame) one after the other."""

    def __init__(self, types: list[np.ndarray], ntypes: int):
        bounds = np.stack([np.searchsorted(t, np.arange(ntypes + 1)) for t in types])  # (B, nt + 1)
        size = np.diff(bounds, axis=1)  # (B, nt)
        self.slices = [(f, bounds[f, t], bounds[f, t + 1]) for t in range(ntypes) for f in np.flatnonzero(size[:, t])]
        self.type_counts = tuple(size.sum(axis=0).tolist())
        start = (np.cumsum(size.T.ravel()) - size.T.ravel()).reshape(size.T.shape).T  # (B, nt) new place of each slice
        self.rows_of = [
            np.arange(len(t)) + np.repeat(s, n) for t, s, n in zip(types, start - bounds[:, :-1], size, strict=True)
        ]

    def __call__(self, arrays: list[np.ndarray], firsts: list[np.ndarray] | None = None) -> np.ndarray:
        """Join per-atom arrays, or, with the first edge of each atom of each frame, per-edge arrays."""
        if len(arrays) == 1 or not self.slices:
            return arrays[0]
        if firsts is None:
            return np.concatenate([arrays[f][a:b] for f, a, b in self.slices])
        return np.concatenate([arrays[f][firsts[f][a] : firsts[f][b]] for f, a, b in self.slices])


def _first(i: np.ndarray, n: int) -> np.ndarray:
    """(n + 1,) place of the first edge of each atom."""
    return np.concatenate([[0], np.cumsum(np.bincount(i, minlength=n))])


def _nearest(r: np.ndarray) -> float:
    return float(np.sqrt(np.einsum("ea,ea->e", r, r).min())) if len(r) else np.inf


def _sorted(frame: Frame, edges: Pairs) -> tuple[Frame, Pairs]:
    """The frame sorted by type without virtual atoms, and its edges, those of virtual atoms left out."""
    if len(frame.type) == 0 or (frame.type[0] >= 0 and (np.diff(frame.type) >= 0).all()):
        return frame, edges
    i, j, r = edges
    index = np.full(len(frame.type), -1)
    keep = np.flatnonzero(frame.type >= 0)
    order = keep[np.argsort(frame.type[keep], kind="stable")]
    index[order] = np.arange(len(order))
    i, j = index[i], index[j]
    take = np.argsort(i, kind="stable")
    take = take[(i[take] >= 0) & (j[take] >= 0)]
    return frame.by_type(), (i[take], j[take], r[take])


def _label(name: str, values: list[np.ndarray], join: _Join) -> torch.Tensor:
    per_atom, width = LABELS[name]
    value = join(values) if per_atom else np.stack(values)
    return float_tensor(value[:, 0] if width == 1 else value)


def _given(x: np.ndarray | None) -> np.ndarray:
    assert x is not None
    return x


def int_tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.require(x, np.int64, ["C", "W"]))  # a tensor is writable: what is not is copied


def float_tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.require(x, np.float64, ["C", "W"]))
