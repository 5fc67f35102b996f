"""What a model takes from the data: types, limits on neighbours, statistics, biases."""

from __future__ import annotations

from typing import Any

import numpy as np

from allforce.config.schema import Input
from allforce.data.dataset import DataSet
from allforce.data.loader import Loader
from allforce.data.sample import Sample, count_neighbors
from allforce.distributed.comm import Comm
from allforce.errors import UserError
from allforce.logs import log
from allforce.models import MODELS, Model
from allforce.models.model import CountNeighbors
from allforce.train.source import Options, Source, compare

LOOKED_AT = 16  # frames, at most, for the initial weights
REFIT = 200  # frames, at most, that linear parameters are fitted to after training
REFIT_ATOMS = 5_000  # in all of these, unless they are fewer than FEWEST frames
FEWEST = 50  # frames, if there are so many, that an energy bias is fitted to


def complete_model(
    config: Any, training: DataSet, options: Options, source: Source | None, comm: Comm, split: bool
) -> tuple[Any, float | None]:
    """The model section with nothing left to the data, and the smallest distance in the data if looked for."""
    if options.use_pretrain_script and source is not None:
        config = source.config
    config = _with_type_map(config, training.type_map)
    nearest: list[float] = []  # of every look at the data
    count = None
    if not options.skip_neighbor_stat and not options.restart:
        if comm.rank == 0:
            log.info("Calculate neighbor statistics... (add --skip-neighbor-stat to skip this step)")
        count = _counter(training, comm, split, nearest)
    before = source.config if source is not None and source.config.type == config.type else None
    config, warnings = MODELS[config.type].complete(config, count, before)
    if count is not None and not nearest:  # the model asked for no numbers, but the smallest distance is always told
        count(MODELS[config.type](config).needs.limit.rcut, True)
    if comm.rank == 0:
        for line in warnings:
            log.warning(line)
    if source is not None:
        compare(config, source, strict=options.restart is not None)
    return config, min(nearest, default=None)


def _counter(training: DataSet, comm: Comm, split: bool, nearest: list[float]) -> CountNeighbors:
    """Counts neighbours, each cutoff once, and tells what it found."""
    known: dict[tuple[float, bool], tuple[float | None, np.ndarray]] = {}

    def count(rcut: float, mixed: bool) -> tuple[float | None, np.ndarray]:
        if (rcut, mixed) not in known:
            least, most = known[rcut, mixed] = count_neighbors(training.systems, rcut, comm, split, mixed)
            nearest.extend([] if least is None else [least])
            if comm.rank == 0:
                text = "Neighbor statistics: training data with"
                log.info(f"{text} minimal neighbor distance: {least or 0.0:f}")
                log.info(f"{text} maximum neighbor size: {most} (cutoff radius: {rcut:f})")
        return known[rcut, mixed]

    return count


def _with_type_map(config: Any, type_map: list[str]) -> Any:
    """The model section with the type_map that the data gave; what is given per type is held against it."""
    config = config.model_copy(update={"type_map": type_map})
    for key, what in config.problems():
        raise UserError(f"model/{key}: {what} (types of the data: {', '.join(type_map)}).")
    return config


def set_statistics(model: Model, loader: Loader, settings: Input, comm: Comm) -> None:
    """Whatever the model takes from the training data before training."""
    config = settings.training
    if comm.rank == 0:
        n = loader.needs.numb_fparam
        log.info(f"training with {n} frame parameter(s)" if n else "training without frame parameter")
        log.info("data stating... (this step may take long time)")
    split = config.sharding != "partition"
    sample = Sample(loader, settings.model.data_stat_nbatch, comm, split, config.stat_file)
    lines = model.fit_statistics(sample)
    model.observed = sample.observed_types()
    sample.file.save(read_only=config.stat_file_mode == "read")
    tell(lines, comm)


def fit_input(model: Model, loader: Loader, comm: Comm, split: bool) -> None:
    """What the model changes of its initial weights by a look at some frames."""
    model.fit_input(Sample(loader, LOOKED_AT, comm, split, spread=True, most=LOOKED_AT))


def change_bias(model: Model, loader: Loader, nbatch: int, comm: Comm, split: bool = True) -> None:
    """Fit the constants of the types anew to what the model misses of the training data, of nbatch batches of every
    system: more where these are few frames, since a single one may be far off."""
    nbatch = max(nbatch, -(-FEWEST // sum(loader.dataset.batch_sizes)))
    tell(model.change_bias(Sample(loader, nbatch, comm, split, spread=True)), comm)


def refit(model: Model, loader: Loader, comm: Comm, split: bool = True) -> None:
    """Fit what is linear in the model's parameters to what it misses of frames from everywhere in the training data."""
    systems = loader.dataset.systems
    frames = sum(s.nframes for s in systems)
    atoms = sum(s.nframes * s.natoms for s in systems) / frames
    most = max(FEWEST, min(REFIT, int(REFIT_ATOMS / atoms)))
    tell(model.refit(Sample(loader, frames, comm, split, spread=True, most=most)), comm)


def tell(lines: list[str], comm: Comm) -> None:
    if comm.rank == 0:
        for line in lines:
            log.info(line)
