"""From an input to a run that can be trained: data, statistics, model, initial state."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allforce.config.load import normalised
from allforce.config.schema import DataConfig, Input, ModelConfig
from allforce.data import stats
from allforce.data.batch import Batch
from allforce.data.dataset import DataSet
from allforce.data.discover import open_systems, partition
from allforce.data.loader import Loader
from allforce.data.sampler import Sampler, make_sampler, stride
from allforce.distributed.comm import Comm
from allforce.distributed.connect import agree
from allforce.errors import UserError
from allforce.infer.bias import fit_bias
from allforce.infer.model_file import load_model
from allforce.infer.tree import validated_config
from allforce.loss import Loss
from allforce.models.potential import MODELS, Potential, Prediction
from allforce.schedule import Schedule
from allforce.train import checkpoint
from allforce.train.checkpoint import Checkpoint
from allforce.train.logs import log
from allforce.train.state import State, load_weights, model_section

VALIDATION = 0x76616C  # its order is another one than that of the training data


@dataclass
class Options:
    """What the command line says about a run."""

    input: str = "input.json"
    output: str = "out.json"
    restart: str | None = None
    init_model: str | None = None
    init_frz_model: str | None = None
    finetune: str | None = None
    skip_neighbor_stat: bool = False
    use_pretrain_script: bool = False

    @property
    def source(self) -> str | None:
        """The model that the run begins with."""
        return self.restart or self.init_model or self.init_frz_model or self.finetune


@dataclass
class Job:
    """Everything the trainer needs."""

    input: Input
    state: State
    loss: Loss
    schedule: Schedule
    loader: Loader
    validation: Loader | None
    numb_steps: int
    seed: int
    run: str
    restarted: bool
    comm: Comm

    @property
    def prefix(self) -> Path:
        """Beginning of the checkpoints' names."""
        config = self.input.training
        return Path(config.save_dir or ".") / config.save_ckpt

    def predict(self, batch: Batch) -> Prediction:
        return self.state.model(batch, virial="v" in self.loss.terms)

    def place(self, step: int) -> tuple[int, int]:
        """Number of this worker's first micro-batch of a step in its sampler's order, and the distance to its next."""
        offset, distance = stride(self.input.training.sharding, self.comm.rank, self.comm.size)
        return offset + distance * self.input.training.acc_freq * step, distance

    def names_of(self, step: int) -> list[str]:
        """Where the micro-batches of this worker at a step come from."""
        first, distance = self.place(step)
        numbers = range(first, first + distance * self.input.training.acc_freq, distance)
        return [self.loader.batch(m).name for m in numbers]

    def meta(self) -> dict[str, Any]:
        """What a checkpoint says besides its tensors."""
        nodes = table_nodes(self.state.model)
        return {"run": self.run, "seed": self.seed, "table_nodes": nodes, "input": normalised(self.input)}


def prepare(input: Input, comm: Comm, options: Options, device: torch.device) -> Job:
    """Open the data, make the statistics, build the model and give every worker the same initial state."""
    source = read_source(options, comm)
    training, validation = open_data(input, source, comm)
    model, nearest = complete_model(
        input.model, training, options, source, comm, input.training.sharding != "partition"
    )
    input = input.model_copy(update={"model": model})
    complete, (input, numb_steps) = normalised(input), scaled_steps(input, training, comm)
    seed = shared_seed(input.training.seed, source, comm)
    if comm.rank == 0:
        for line in [line for d in (training, validation) if d is not None for line in d.summary()]:
            log.info(line)
        Path(options.output).write_text(json.dumps(complete, indent=4, ensure_ascii=False) + "\n")
        (Path(input.training.save_dir or ".") / input.training.save_ckpt).parent.mkdir(parents=True, exist_ok=True)

    loss = Loss(input.loss, input.learning_rate.start_lr)
    if not any(comm.gather(any(loss.learns_from(s.label_names) for s in training.systems))):
        raise UserError("training/training_data: no system has a label (energy.npy, force.npy, …) that the loss uses.")
    schedule = Schedule(input.learning_rate, numb_steps, comm.size)
    loader = make_loader(
        training, make_sampler(training, seed, input.training.sharding, comm.rank), model, comm, device
    )
    potential = MODELS[model.type](model)
    potential.min_nbor_dist = nearest
    if source is None:
        set_statistics(potential, loader, input, comm)
    potential.to(device)
    state = State(potential, input.optimizer, 2 * len(loss.names), input.training.gradient_precision, comm)
    if source is not None:
        source.give(state, resume=options.restart is not None)
    state.broadcast(comm)
    set_table(potential, input, source.table_nodes if source is not None and options.restart else None)
    if options.finetune:
        change_bias(potential, loader, model.data_bias_nsample, comm, input.training.sharding != "partition")
    held_out = None
    if validation is not None:
        held_out = make_loader(validation, Sampler(validation, seed ^ VALIDATION), model, comm, device)
    run, restarted = run_name(source), options.restart is not None
    return Job(input, state, loss, schedule, loader, held_out, numb_steps, seed, run, restarted, comm)


# ---- where the run begins


@dataclass
class Source:
    """The model that a run begins with. Rank 0 has read it; the others know what it says about itself."""

    name: str
    config: ModelConfig
    seed: int | None
    table_nodes: int | None
    nearest: float | None
    model: Potential | None = None
    checkpoint: Checkpoint | None = None

    def give(self, state: State, resume: bool) -> None:
        """Weights and statistics to the state, with `resume` also step and optimizer; rank 0 alone has them."""
        nearest = state.model.min_nbor_dist
        if resume and self.checkpoint is not None:
            state.restore(self.checkpoint)
        elif self.model is not None:
            load_weights(state.model, self.model.state_dict(), self.name)
        state.model.min_nbor_dist = self.nearest if nearest is None else nearest


def read_source(options: Options, comm: Comm) -> Source | None:
    name = options.source
    if name is None:
        if comm.rank == 0:
            log.info("initialize model from scratch")
        return None
    model, saved, told = None, None, {}
    if comm.rank == 0:
        log.info(f"{'restart' if options.restart else 'initialize'} from model {name}")
        model = load_model(name)
        if options.restart:
            saved = _resumable(name)
        seed, nodes = (saved.meta.get("seed"), saved.meta.get("table_nodes")) if saved is not None else (None, None)
        told = {"seed": seed, "nodes": nodes, "model": model_section(model), "nearest": model.min_nbor_dist}
    told = comm.gather(told)[0]
    config = validated_config(told["model"], name)
    return Source(name, config, told["seed"], told["nodes"], told["nearest"], model, saved)


def _resumable(name: str) -> Checkpoint:
    path = checkpoint.find(name)
    if path.suffix != checkpoint.SUFFIX:
        raise UserError(
            f"--restart {name}: {path.name} has no state of an optimizer, so the run cannot be continued. "
            "Begin a new one with its weights: --init-model."
        )
    return checkpoint.read(path)


def run_name(source: Source | None) -> str:
    """By which a run knows its checkpoints: that of the run that is continued, else a new one. Rank 0 alone saves."""
    saved = source.checkpoint if source is not None else None
    return (saved.meta.get("run") if saved is not None else None) or secrets.token_hex(8)


def shared_seed(seed: int | list[int] | None, source: Source | None, comm: Comm) -> int:
    """One seed for all workers: the input's, else that of the run that is continued, else a new one."""
    if seed is None:
        mine = source.seed if source is not None and source.seed is not None else secrets.randbits(31)
        return comm.gather(mine)[0]
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) if isinstance(seed, list) else seed


# ---- data


def open_data(input: Input, source: Source | None, comm: Comm) -> tuple[DataSet, DataSet | None]:
    """Training and validation data; workers that see different data stop."""
    config, type_map = input.training, input.model.type_map
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
            mine = [max(p, 0.0) for p in partition(sys_probs, rank, size)]
            sys_probs = [p / sum(mine) for p in mine] if sum(mine) > 0 else None
    return DataSet(systems, batch_size, config.auto_prob, sys_probs, name)


def fingerprint(dataset: DataSet) -> str:
    """Hash of what a data set is: sizes of all systems, and the first frame of some of them."""
    digest = hashlib.sha256(repr([(s.natoms, s.nframes, sorted(s.label_names)) for s in dataset.systems]).encode())
    for system in dataset.systems[:: max(1, len(dataset.systems) // 16)]:
        frame = system.frame(0)
        for array in (frame.coord, frame.type, *(frame.labels[k] for k in sorted(frame.labels))):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def make_loader(dataset: DataSet, sampler: Sampler, model: ModelConfig, comm: Comm, device: torch.device) -> Loader:
    fitting, sel = model.fitting_net, model.descriptor.sel
    assert isinstance(sel, list)  # since complete_model
    return Loader(
        dataset,
        sampler,
        model.descriptor.rcut,
        sel,
        comm.rank,
        comm.size,
        device,
        pair_exclude=model.pair_exclude_types,
        numb_fparam=fitting.numb_fparam,
        numb_aparam=fitting.numb_aparam,
        default_fparam=fitting.default_fparam,
    )


# ---- model and statistics


def complete_model(
    config: ModelConfig, training: DataSet, options: Options, source: Source | None, comm: Comm, split: bool
) -> tuple[ModelConfig, float | None]:
    """The model section with type_map and sel as they are used, and the smallest distance in the data if looked for."""
    if options.use_pretrain_script and source is not None:
        config = source.config
    config = _with_type_map(config, training.type_map)
    if source is not None:
        _compare(config, source, strict=options.restart is not None)
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


# what may differ from the model that a run begins with: it does not change what the same weights mean
FREE = {"seed", "trainable", "precision", "type_map", "rcond", "set_davg_zero", "default_fparam", "preset_out_bias"}


def _compare(config: ModelConfig, source: Source, strict: bool) -> None:
    """Another cutoff, sel, activation, … than the weights were trained with: an error on restart, else a warning."""
    for part in ("descriptor", "fitting_net", ""):
        new, old = (getattr(c, part) if part else c for c in (config, source.config))
        for key in type(new).model_fields:
            mine, theirs = getattr(new, key), getattr(old, key)
            free = key in FREE or key.startswith("data_") or (key == "sel" and isinstance(mine, str))
            if free or key in ("descriptor", "fitting_net") or mine == theirs:
                continue
            where = "/".join(x for x in ("model", part, key) if x)
            text = f"{where} is {mine}, but {source.name} was trained with {theirs}"
            if strict:
                raise UserError(f"{text}. A restart continues the same model: use that value, or --init-model.")
            log.warning(text)


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
                yield float(model(loader.make([member]), virial=False).energy[0])

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


# ---- steps


def scaled_steps(input: Input, training: DataSet, comm: Comm) -> tuple[Input, int]:
    """numb_steps, and the input with its counts of steps divided by the workers where that is asked for.

    An epoch is one pass of all workers together, so numb_epoch needs no scaling.
    """
    config, rate = input.training, input.learning_rate
    steps, workers = config.numb_steps, comm.size
    if steps is None:
        batches = training.total_batches()
        if config.sharding == "partition":
            batches = sum(comm.gather(batches))
        steps = max(1, ceil((config.numb_epoch or 0) * batches / (workers * config.acc_freq)))
    elif config.scale_steps_by_worker:
        steps = max(1, steps // workers)
    if not config.scale_steps_by_worker or workers == 1:
        return input, steps

    def fewer(section, *names):
        return section.model_copy(
            update={n: max(1, getattr(section, n) // workers) for n in names if getattr(section, n, 0)}
        )

    counts = ("numb_steps", "disp_freq", "save_freq") if config.numb_steps is not None else ("disp_freq", "save_freq")
    update = {"training": fewer(config, *counts), "learning_rate": fewer(rate, "decay_steps", "warmup_steps")}
    return input.model_copy(update=update), steps
