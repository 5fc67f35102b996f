"""What a PiNN script calls for its data: distribute_data, load_mimic, load_tfrecord, load_ase, sparse_batch.

    mpt_chunks, trr_chunks, ener_chunks = distribute_data(mpt, trr, ener)
    dataset = lambda: load_mimic(mpt_chunks, trr_chunks, ener_chunks, split={"train": 8, "test": 2})

A data set is frames of systems in an order; iterating gives PiNN's dictionaries (elems, coord, cell, e_data, f_data,
s_data), in Å, eV, eV/Å, each frame read when its turn comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ase.data
import numpy as np

from allforce.data.discover import open_location
from allforce.data.mimic import MimicFiles, MimicSystem, check_lengths
from allforce.data.system import Part, System
from allforce.distributed.comm import partition
from allforce.distributed.launch import detect
from allforce.errors import UserError

SPLIT = {"train": 8, "vali": 1, "test": 1}


class Share(list):
    """The part of a list that a worker has; it remembers the whole."""

    def __init__(self, whole: Sequence[Any], rank: int, size: int):
        self.whole = list(whole)
        indices = partition(list(range(len(self.whole))), rank, size)
        self.start = indices[0]
        super().__init__(self.whole[k] for k in indices)


Files = str | Path | Iterable[str | Path]


def _listed(files: Files) -> list:
    return [files] if isinstance(files, (str, Path)) else files if isinstance(files, Share) else list(files)


def distribute_data(*lists: Files) -> list[Share]:
    """This worker's chunk of each list: contiguous, the first len % size workers have one entry more."""
    world, whole = detect(), [_listed(files) for files in lists]
    check_lengths({f"list {k}": entries for k, entries in enumerate(whole)}, "distribute_data")
    if whole and len(whole[0]) < world.size:
        raise UserError(
            f"distribute_data: {len(whole[0])} file(s) for {world.size} workers, some would have none. Use at most as"
            " many workers as files, or give all workers all files and leave distribute_data out"
        )
    return [Share(entries, world.rank, world.size) for entries in whole]


def load_mimic(
    mpt: Files,
    trr: Files,
    ener: Files,
    split: Any = SPLIT,
    shuffle: bool = True,
    seed: int = 0,
    **how: Any,
) -> Any:
    """Data sets of MiMiC runs, nested as `split` is; a bare number gives one data set. `how`: see MimicFiles.

    With chunks of distribute_data the frames of all files are split and each worker has its files' part of every leaf:
    which frames are for training does not depend on the number of workers.
    """
    lists = {"mpt": _listed(mpt), "trr": _listed(trr), "ener": _listed(ener)}
    check_lengths(lists, "load_mimic")
    first, count = 0, len(lists["trr"])
    chunks = {name: files for name, files in lists.items() if isinstance(files, Share)}
    if len(chunks) == len(lists):
        first, lists = chunks["trr"].start, {name: files.whole for name, files in chunks.items()}
        check_lengths(lists, "load_mimic, before distribute_data")
    if not count:
        raise UserError("load_mimic: the lists of files are empty. Expected at least one file of each kind")
    if not how.keys() <= {"match", "energy_column", "forces"} or how.get("match", "step") not in ("step", "line"):
        raise UserError(f'load_mimic: {how} should be match ("step" or "line"), energy_column (a number) or forces')
    runs = zip(*lists.values(), strict=True)
    systems: list[System] = [MimicSystem(MimicFiles(str(m), str(t), str(e), **how)) for m, t, e in runs]
    return split_frames(systems, split, shuffle, seed, range(first, first + count))


def load_tfrecord(path: str, split: Any = 1, shuffle: bool = True, seed: int = 0) -> Any:
    """Data sets of PiNN's NAME.yml, nested as `split` is."""
    return split_frames(open_location(path), split, shuffle, seed)


def load_ase(path: str, split: Any = 1, shuffle: bool = True, seed: int = 0) -> Any:
    """Data sets of a file that ASE reads, extended XYZ first, nested as `split` is."""
    return split_frames(open_location(path), split, shuffle, seed)


def split_frames(systems: list[System], split: Any, shuffle: bool, seed: int, own: range | None = None) -> Any:
    """All frames, in a seeded order, dealt out to the leaves of `split`: ceil(N·w/Σw) to each in turn."""
    for system in systems:
        system.use_type_map(list(system.type_names or []))
    frames = np.array([(i, k) for i, s in enumerate(systems) for k in range(s.nframes)], dtype=np.int64).reshape(-1, 2)
    if shuffle:
        frames = np.random.Generator(np.random.Philox(seed)).permutation(frames)
    weights = list(_leaves(split))
    if not weights or any(not isinstance(w, (int, float)) or not w >= 0 for w in weights) or not sum(weights) > 0:
        raise UserError(f"split: {split!r} should be a number, or dicts or lists of numbers of which one is above 0")
    sizes = [math.ceil(len(frames) * w / sum(weights)) for w in weights]
    pieces = iter(np.split(frames, np.cumsum(sizes)[:-1]))
    keep = range(len(systems)) if own is None else own

    def fill(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: fill(part) for name, part in tree.items()}
        if isinstance(tree, (list, tuple)):
            return [fill(part) for part in tree]
        return Dataset(systems, [(int(i), int(k)) for i, k in next(pieces) if i in keep])

    return fill(split)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, list, tuple)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(part)
    else:
        yield tree


@dataclass
class Dataset:
    """Frames of systems in an order. Shuffling, repeating and keeping frames in memory are the trainer's business."""

    whole: list[System]
    frames: list[tuple[int, int]]  # (system, frame)
    batch_size: int | None = None  # frames of a batch, set by apply(sparse_batch(n))

    def __len__(self) -> int:
        return len(self.frames)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[n] for n in range(len(self)))

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Frame n as PiNN has it: elems (n,), coord (n, 3), cell (3, 3), e_data, f_data (n, 3), s_data (3, 3)."""
        i, k = self.frames[n]
        system = self.whole[i]
        frame = system.frame(k)
        names = np.array([ase.data.atomic_numbers[name] for name in system.type_map])
        sample = {"elems": names[frame.type], "coord": frame.coord}
        if frame.cell is not None:
            sample["cell"] = frame.cell
        if "energy" in frame.labels:
            sample["e_data"] = frame.labels["energy"].reshape(())
        if "force" in frame.labels:
            sample["f_data"] = frame.labels["force"]
        if "virial" in frame.labels and frame.cell is not None:
            sample["s_data"] = -frame.labels["virial"].reshape(3, 3) / abs(np.linalg.det(frame.cell))
        return sample

    def systems(self) -> list[System]:
        """The same frames as systems, one for each that has any."""
        frames_of: dict[int, list[int]] = {}
        for i, k in sorted(self.frames):
            frames_of.setdefault(i, []).append(k)
        return [Part(self.whole[i], frames) for i, frames in frames_of.items()]

    def apply(self, function: Callable[[Dataset], Dataset]) -> Dataset:
        return function(self)

    def shuffle(self, *_: Any, **__: Any) -> Dataset:
        return self

    repeat = cache = prefetch = shuffle

    def take(self, count: int) -> Dataset:
        return replace(self, frames=self.frames[:count])

    def skip(self, count: int) -> Dataset:
        return replace(self, frames=self.frames[count:])

    def map(self, *_: Any, **__: Any) -> Dataset:
        raise UserError(
            "Dataset.map is not offered: frames are read and their neighbours found while the training runs. Leave out"
            " a map that prepares neighbours; what changes the data has to be written to files before"
        )


def sparse_batch(batch_size: int) -> Callable[[Dataset], Dataset]:
    """For Dataset.apply: so many frames in a batch."""
    if not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise UserError(f"sparse_batch: {batch_size!r} frames a batch; expected a whole number of at least 1")
    return lambda dataset: replace(dataset, batch_size=int(batch_size))
