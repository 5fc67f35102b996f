"""The data of a run: opened, shared out, the same for all workers, and made into batches."""

from __future__ import annotations

import hashlib
import socket

import numpy as np

from allforce.config.schema import DataConfig, Input
from allforce.data.cache import Cache, memory_of_host
from allforce.data.dataset import DataSet
from allforce.data.discover import open_systems
from allforce.distributed.comm import Comm, partition
from allforce.distributed.connect import agree
from allforce.errors import UserError
from allforce.train.source import Source


def open_data(settings: Input, source: Source | None, comm: Comm) -> tuple[DataSet, DataSet | None]:
    """Training and validation data; workers that see different data stop."""
    config, type_map = settings.training, settings.model.type_map
    if source is not None:
        if type_map is not None and type_map != source.config.type_map:
            raise UserError(
                f"model/type_map is {type_map}, but {source.name} was trained with {source.config.type_map}. "
                "Types cannot be added, left out or moved: use the same list."
            )
        type_map = source.config.type_map
    share = (comm.rank, comm.size) if config.sharding == "partition" else (0, 1)
    training = _open(config.training_data, type_map, "training", *share)
    validation = None
    if config.validation_data is not None:
        validation = _open(config.validation_data, training.type_map, "validation")
    if config.sharding != "partition":
        agree(comm, "the training data", fingerprint(training))
    if validation is not None:
        agree(comm, "the validation data", fingerprint(validation))
    return training, validation


def _open(config: DataConfig, type_map: list[str] | None, name: str, rank: int = 0, size: int = 1) -> DataSet:
    systems = open_systems(config.systems, type_map, config.rglob_patterns, rank, size)
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
    """Hash of what a data set is: sizes of all systems, and the first frame of some of them."""
    digest = hashlib.sha256(repr([(s.natoms, s.nframes, sorted(s.label_names)) for s in dataset.systems]).encode())
    for system in dataset.systems[:: max(1, len(dataset.systems) // 16)]:
        frame = system.frame(0)
        for array in (frame.coord, frame.type, *(frame.labels[k] for k in sorted(frame.labels))):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def make_cache(memory: float | None, comm: Comm) -> Cache:
    """This worker's share of the memory (GiB; None: a quarter of what the host has) for frames on this host."""
    host = socket.gethostname()
    size = memory_of_host() / 4 if memory is None else memory * 2**30
    return Cache(int(size / comm.gather(host).count(host)))
