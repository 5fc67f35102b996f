"""What a model takes from the data: types and sel, statistics, energy bias; and its embedding table."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from allforce.config.schema import Input, ModelConfig
from allforce.data import stats
from allforce.data.dataset import DataSet
from allforce.data.loader import Loader
from allforce.distributed.comm import Comm
from allforce.errors import UserError
from allforce.infer.bias import fit_bias
from allforce.models.potential import Potential
from allforce.train.logs import log
from allforce.train.source import Options, Source, compare


def complete_model(
    config: ModelConfig, training: DataSet, options: Options, source: Source | None, comm: Comm, split: bool
) -> tuple[ModelConfig, float | None]:
    """The model section with type_map and sel as they are used, and the smallest distance in the data if looked for."""
    if options.use_pretrain_script and source is not None:
        config = source.config
    config = _with_type_map(config, training.type_map)
    if source is not None:
        compare(config, source, strict=options.restart is not None)
    descriptor, nearest = config.descriptor, None
    sel = descriptor.sel
    if isinstance(sel, str) and source is not None:
        sel = source.config.descriptor.sel
    elif isinstance(sel, str) and options.skip_neighbor_stat:
        raise UserError(
            f"model/descriptor/sel: {sel!r} is found by neighbour statistics, which --skip-neighbor-stat leaves out. "
            "Give one number per type, or leave the flag out."
        )
    if not options.skip_neighbor_stat and not options.restart:
        if comm.rank == 0:
            log.info("Calculate neighbor statistics... (add --skip-neighbor-stat to skip this step)")
        nearest, most = stats.neighbor_stat(training.systems, descriptor.rcut, comm, split)
        if isinstance(sel, str):
            sel = stats.sel_auto(most, sel)
        if comm.rank == 0:
            _tell_neighbors(nearest, most, descriptor.rcut, sel)
    descriptor = descriptor.model_copy(update={"sel": list(sel)})
    return config.model_copy(update={"descriptor": descriptor}), nearest


def _with_type_map(config: ModelConfig, type_map: list[str]) -> ModelConfig:
    """The model section with the type_map that the data gave; what is given per type is held against it."""
    config = config.model_copy(update={"type_map": type_map})
    for key, what in config.problems():
        raise UserError(f"model/{key}: {what} (types of the data: {', '.join(type_map)}).")
    return config


def _tell_neighbors(nearest: float | None, most: np.ndarray, rcut: float, sel: list[int]) -> None:
    log.info(f"Neighbor statistics: training data with minimal neighbor distance: {nearest or 0.0:f}")
    log.info(f"Neighbor statistics: training data with maximum neighbor size: {most} (cutoff radius: {rcut:f})")
    for t in stats.sel_too_small(most, sel):
        log.warning(
            f"sel of type {t} is {sel[t]}, but the data has up to {most[t]} neighbours of it within the cutoff: "
            "the farthest are left out"
        )


def set_statistics(model: Potential, loader: Loader, input: Input, comm: Comm) -> None:
    """Mean and deviation of the environment, energy bias, frame and atomic parameters from the training data."""
    config = input.training
    if comm.rank == 0:
        n = input.model.fitting_net.numb_fparam
        log.info(f"training with {n} frame parameter(s)" if n else "training without frame parameter")
        log.info("data stating... (this step may take long time)")
    read_only = config.stat_file_mode == "read"
    found = stats.statistics(loader, input.model, comm, config.stat_file, config.sharding != "partition", read_only)
    if comm.rank == 0 and found.energy.rmse is not None:
        log.info(f"RMSE of energy per atom after linear regression is: {found.energy.rmse} in the unit of energy.")
    model.descriptor.davg.copy_(torch.from_numpy(found.davg))
    model.descriptor.dstd.copy_(torch.from_numpy(found.dstd))
    model.fitting.bias_atom_e.copy_(torch.from_numpy(found.energy.bias))
    for name in ("fparam", "aparam"):
        pair = getattr(found, name)
        if pair is not None:
            getattr(model.fitting, f"{name}_avg").copy_(torch.from_numpy(pair[0]))
            getattr(model.fitting, f"{name}_inv_std").copy_(torch.from_numpy(pair[1]))


def change_bias(model: Potential, loader: Loader, nbatch: int, comm: Comm, split: bool = True) -> None:
    """Add to the energy bias the least-squares fit, per type, of what the model misses: label - prediction."""

    def predict(members: stats.Sample) -> Iterator[float]:
        for member in members:
            with torch.no_grad():
                energy = float(model(loader.make([member]), virial=False).energy[0])
            yield energy

    mine = stats.share(stats.stat_sample(loader.dataset, nbatch), comm, split)
    fit = fit_bias(model, loader.dataset.systems, mine, comm, predict)
    model.fitting.bias_atom_e += torch.from_numpy(fit.bias).to(model.fitting.bias_atom_e.device)
    if comm.rank == 0:
        log.info(f"energy bias changed by {np.array2string(fit.bias, precision=6)} eV, RMSE per atom now {fit.rmse} eV")


def set_table(model: Potential, input: Input, nodes: int | None) -> None:
    """The embedding table; a continued run goes on with the nodes it had (0: it had gone over to exact)."""
    table = input.training.table
    mode = "exact" if nodes == 0 else table.mode
    model.set_table(mode, table.tolerance, nodes or table.nodes)


def table_nodes(model: Potential) -> int:
    grid = model.descriptor.grid
    return 0 if grid is None else grid.K
