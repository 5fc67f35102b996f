"""The data of a run: opened, shared out, the same for all workers, and made into batches."""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import numpy as np

from allforce.config.schema import DataConfig, Input
from allforce.data.batch import Named
from allforce.data.cache import Cache, memory_of_host
from allforce.data.dataset import DataSet
from allforce.data.discover import open_systems
from allforce.data.system import System, adopt_type_map
from allforce.distributed.comm import Comm, partition
from allforce.distributed.connect import agree
from allforce.errors import UserError
from allforce.train.source import Source

SAMPLED = 1024  # systems of which files and frames are compared between workers
ENDS = 4096  # bytes of each end of a file
Given = tuple[list[System], list[System] | None]  # training and validation systems that a script has opened


def open_data(
    settings: Input, source: Source | None, comm: Comm, given: Given | None = None, section: Any = None
) -> tuple[DataSet, DataSet | None]:
    """Training and validation data; workers that see different data stop.

    section: the model's, where it is not that of the settings.
    """
    config, type_map = settings.training, settings.model.type_map
    if source is not None:
        if type_map is not None and type_map != source.config.type_map:
            raise UserError(
                f"model/type_map is {type_map}, but {source.name} was trained with {source.config.type_map}. "
                "Types cannot be added, left out or moved: use the same list."
            )
        type_map = source.config.type_map
    if given is not None:
        return _given(given, settings, type_map, comm)
    share = (comm.rank, comm.size) if config.sharding == "partition" else (0, 1)
    named = (section or settings.model).named_labels()
    training = _open(config.training_data, type_map, "training", named, *share)
    validation = None
    if config.validation_data is not None:
        validation = _open(config.validation_data, training.type_map, "validation", named)
    if config.sharding != "partition":
        agree(comm, "the training data", fingerprint(training))
    if validation is not None:
        agree(comm, "the validation data", fingerprint(validation))
    return training, validation


def _given(given: Given, settings: Input, type_map: list[str] | None, comm: Comm) -> tuple[DataSet, DataSet | None]:
    """The data that a script has opened; with sharding "partition" every worker has its own share of them."""
    config, (systems, held_out) = settings.training, given
    if not systems:
        raise UserError(f"rank {comm.rank}: the training data have no frames.")
    training = _adopt(systems, config.training_data, type_map, "training")
    if config.sharding != "partition":
        agree(comm, "the training data", fingerprint(training))
    if not held_out or config.validation_data is None:
        return training, None
    return training, _adopt(held_out, config.validation_data, training.type_map, "validation")


def _adopt(systems: list[System], config: DataConfig, type_map: list[str] | None, name: str) -> DataSet:
    type_map = adopt_type_map(systems) if type_map is None else type_map
    for system in systems:
        system.use_type_map(type_map)
    return DataSet(systems, config.batch_size, config.auto_prob, config.sys_probs, name)


def _open(
    config: DataConfig, type_map: list[str] | None, name: str, named: Named, rank: int = 0, size: int = 1
) -> DataSet:
    systems = open_systems(config.systems, type_map, config.rglob_patterns, rank, size, named)
    batch_size, sys_probs = config.batch_size, config.sys_probs
    if size > 1:
        if ";" in config.auto_prob:
            raise UserError(
                f"training/{name}_data/auto_prob: {config.auto_prob!r} numbers all systems; with sharding partition "
                "a worker sees its own only. Use sys_probs, prob_sys_size or prob_uniform."
            )
        batch_size = partition(batch_size, rank, size) if isinstance(batch_size, list) else batch_size
        if sys_probs is not None:
            own = [max(p, 0.0) for p in partition(sys_probs, rank, size)]
            sys_probs = [p / sum(own) for p in own] if sum(own) > 0 else None
    return DataSet(systems, batch_size, config.auto_prob, sys_probs, name)


def fingerprint(dataset: DataSet) -> str:
    """Hash of what is cheap to know of a data set: atoms, frames and labels of every system; of up to SAMPLED of them,
    spread over all, the size and both ends of every file, and the first, the last and another frame.

    Times of files are not among it: good copies on the disks of several machines have different ones.
    """
    systems = dataset.systems
    digest = hashlib.sha256(repr([(s.natoms, s.nframes, sorted(s.label_names)) for s in systems]).encode())
    for number in range(0, len(systems), -(-len(systems) // SAMPLED)):
        system = systems[number]
        for path in sorted(system.paths()):
            digest.update(_ends(path))
        drawn = int(np.random.default_rng(number).integers(system.nframes))
        for k in sorted({0, drawn, system.nframes - 1}):
            frame = system.frame(k)
            labels = (frame.labels[name] for name in sorted(frame.labels))
            for array in (frame.coord, frame.type, frame.cell, *labels):
                digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _ends(path: str) -> bytes:
    """Size, first and last bytes of a file."""
    with open(path, "rb") as file:
        first = file.read(ENDS)
        size = file.seek(0, 2)
        file.seek(max(0, size - ENDS))
        return size.to_bytes(8, "little") + first + file.read(ENDS)


def make_cache(memory: float | None, comm: Comm) -> Cache:
    """This worker's share of the memory (GiB; None: a quarter of what the host has) for frames on this host."""
    host = socket.gethostname()
    size = memory_of_host() / 4 if memory is None else memory * 2**30
    return Cache(int(size / comm.gather(host).count(host)))
