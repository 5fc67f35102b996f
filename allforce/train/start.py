"""From an input to a run that can be trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allforce.config.load import normalised
from allforce.config.schema import Input
from allforce.data.batch import Batch
from allforce.data.dataset import DataSet
from allforce.data.loader import Loader
from allforce.data.sampler import Sampler, make_sampler, stride
from allforce.distributed.comm import Comm
from allforce.distributed.mesh import Mesh
from allforce.errors import UserError
from allforce.logs import log
from allforce.losses import LOSSES, Loss
from allforce.models import MODELS, Model
from allforce.models.parts import check_sums, summands
from allforce.schedule import Schedule
from allforce.trace import BACKWARD, FORWARD, phase
from allforce.train.build import change_bias, complete_model, fit_input, set_statistics
from allforce.train.datasets import Given, make_cache, open_data
from allforce.train.groups import choose_groups
from allforce.train.source import Options, Source, read_source, run_name, shared_seed
from allforce.train.state import State
from allforce.writing import write_whole

VALIDATION = 0x76616C  # its order is another one than that of the training data
NAMED = 20  # systems in a warning, at most


class NothingToDo(Exception):
    """The run that is to be continued has come to its end."""


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
    mesh: Mesh
    consumed: int = 0  # micro-batches of all workers before the first step of this run
    sum_since: list[float] | None = None  # of the checkpoint, for disp_avg
    exit_code: int = 0  # of the training

    def __post_init__(self) -> None:
        self.first = self.state.step

    @property
    def prefix(self) -> Path:
        """Beginning of the checkpoints' names."""
        config = self.input.training
        return Path(config.save_dir or ".") / config.save_ckpt

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Of the whole batch, whoever computes which part of it."""
        if batch.part is None:
            sweep = None if torch.is_grad_enabled() else self.state.model.sweep(batch, self.loss.wanted)
            return self.state.model(batch, self.loss.wanted) if sweep is None else sweep.outputs
        return self.mesh.sum(summands(self.state.model, batch, self.loss.wanted))

    def learn(self, batch: Batch, lr: float, scale: float, first: bool) -> Tensor:
        """The loss of a micro-batch; scale times its gradient, and its sums, go to the flat buffer."""
        flat = self.state.flat
        with phase(FORWARD):
            sweep = self.state.model.sweep(batch, self.loss.wanted)
            if sweep is None:
                loss, sums = self.loss(self.predict(batch), batch, lr)
            else:
                loss, sums, adjoints = self.loss.with_adjoints(sweep.outputs, batch, lr, scale)
        with phase(BACKWARD):
            if sweep is None:
                flat.differentiate(loss, self.mesh.once(sums), scale, first)
            else:
                flat.take(partial(sweep.adjoints, adjoints), self.mesh.once(sums), first)
        return loss.detach()

    def first_and_stride(self, step: int) -> tuple[int, int]:
        """Number of this worker's first micro-batch of a step in its sampler's order, and the distance to its next."""
        offset, distance = stride(self.input.training.sharding, self.mesh.number, self.mesh.groups)
        before = self.consumed if distance == self.mesh.groups else self.consumed // self.mesh.groups
        return offset + before + distance * self.input.training.acc_freq * (step - self.first), distance

    def names_of(self, step: int) -> list[str]:
        """Where the micro-batches of this worker at a step come from."""
        first, distance = self.first_and_stride(step)
        numbers = range(first, first + distance * self.input.training.acc_freq, distance)
        return [self.loader.batch(m).name for m in numbers]

    def meta(self, step: int) -> dict[str, Any]:
        """What a checkpoint says besides its tensors."""
        consumed = self.consumed + (step - self.first) * self.mesh.groups * self.input.training.acc_freq
        own = {"run": self.run, "seed": self.seed, "micro_batches": consumed, "workers": self.mesh.groups}
        return own | {"input": normalised(self.input)}


def prepare(settings: Input, comm: Comm, options: Options, device: torch.device, data: Given | None = None) -> Job:
    """Open the data, make the statistics, build the model and give every worker the same initial state."""
    size = settings.training.spatial_workers
    mesh = None if size == "auto" else Mesh(comm, size)
    source = read_source(options, comm)
    chosen = source.config if options.use_pretrain_script and source is not None else settings.model
    training, validation = open_data(settings, source, comm, data, chosen)
    split = settings.training.sharding != "partition"
    section, nearest = complete_model(settings.model, training, options, source, comm, split)
    settings = settings.model_copy(update={"model": section})
    model = MODELS[section.type](section)
    if mesh is None:
        size, why = choose_groups(training, model, comm, device)
        mesh = Mesh(comm, size)
        if comm.rank == 0:
            log.info(why)
    complete, (settings, numb_steps) = normalised(settings), scaled_steps(settings, training, comm, mesh.groups)
    seed = shared_seed(settings.training.seed, source, comm)
    if options.restart is not None and source is not None and source.step >= numb_steps:
        raise NothingToDo(f"{source.name} is at step {source.step} of {numb_steps}: nothing is left to do")
    if comm.rank == 0:
        for line in [line for d in (training, validation) if d is not None for line in d.summary()]:
            log.info(line)
        if options.output is not None:
            open(options.output, "ab").close()  # a folder that is not there, or closed to us, is an error
            write_whole(options.output, (json.dumps(complete, indent=4, ensure_ascii=False) + "\n").encode())
            prefix = Path(settings.training.save_dir or ".") / settings.training.save_ckpt
            prefix.parent.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(settings.learning_rate, numb_steps, mesh.groups, getattr(settings.loss, "schedule", "lr"))
    loss = LOSSES[settings.loss.type](settings.loss, schedule.start, model.outputs)
    check_labels(training, loss, comm, split)
    sampler = make_sampler(training, seed, settings.training.sharding, mesh.number)
    model.min_nbor_dist = nearest
    check_outputs(model, loss, settings)
    if mesh.size > 1:
        check_sums(model, loss.wanted, "training/spatial_workers")
    cache = make_cache(settings.training.cache_memory, comm)
    block = mesh.position, mesh.size
    loader = Loader(training, sampler, model.needs, device, cache, block)
    state = initial_state(model, settings, loader, loss, source, options, comm)
    held_out = None
    if validation is not None:
        held_out = Loader(validation, Sampler(validation, seed ^ VALIDATION), model.needs, device, cache, block)
    run, restarted = run_name(source), options.restart is not None
    job = Job(settings, state, loss, schedule, loader, held_out, numb_steps, seed, run, restarted, comm, mesh)
    if restarted and source is not None:
        old = state.step * mesh.groups * settings.training.acc_freq  # as checkpoints of version 1 mean it
        job.consumed, job.sum_since = old if source.consumed is None else source.consumed, source.sum_since
    return job


def check_labels(training: DataSet, loss: Loss, comm: Comm, split: bool) -> None:
    """Systems that the loss learns nothing from are named; when all are such, that is an error."""
    unlabelled = [s.name for s in training.systems if not loss.learns_from(s.label_names)]
    reports = comm.gather([len(training.systems), len(unlabelled), unlabelled[:NAMED]])
    reports = reports[:1] if split else reports  # the same data everywhere, or each its own
    total, count = sum(r[0] for r in reports), sum(r[1] for r in reports)
    if count == total:
        hint = training.systems[0].label_hint
        raise UserError(
            f"training/training_data: no system has a label that the loss uses (in {training.systems[0].name}: {hint})."
        )
    if count and comm.rank == 0:
        names = [name for r in reports for name in r[2]][:NAMED]
        more = f" and {count - len(names)} more" if count > len(names) else ""
        log.warning(
            f"{count} of {total} training systems have no label that the loss uses, "
            f"nothing is learned from them: {', '.join(names)}{more}"
        )
    if comm.rank == 0 and (caveat := loss.caveat({label for s in training.systems for label in s.label_names})):
        log.warning(caveat)


def check_outputs(model: Model, loss: Loss, settings: Input) -> None:
    """The model can predict what the loss looks at."""
    missing = [name for name in loss.wanted if name not in model.outputs]
    if missing:
        raise UserError(
            f"loss/type {settings.loss.type!r} looks at {', '.join(missing)}; the model predicts "
            f"{', '.join(model.outputs)}. Choose the loss that belongs to the model."
        )


def initial_state(
    model: Model, settings: Input, loader: Loader, loss: Loss, source: Source | None, options: Options, comm: Comm
) -> State:
    """The model from scratch with statistics of the data, or as its source has it; rank 0's on all workers."""
    config = settings.training
    if source is None:
        set_statistics(model, loader, settings, comm)
    model.to(loader.device)
    state = State(
        model, settings.optimizer, 2 * len(loss.names), config.gradient_precision, comm, config.zero_stage, config.ema
    )
    if source is not None:
        source.load_into(state, resume=options.restart is not None)
    state.broadcast(comm)
    model.prepare(config.table)
    if source is None:
        fit_input(model, loader, comm, config.sharding != "partition")
    if options.finetune:
        change_bias(model, loader, settings.model.data_bias_nsample, comm, config.sharding != "partition")
    return state


def scaled_steps(settings: Input, training: DataSet, comm: Comm, workers: int) -> tuple[Input, int]:
    """numb_steps, and the settings with its counts of steps divided by the workers where that is asked for.

    workers: a group that splits frames counts as one. An epoch is one pass of all together, so numb_epoch needs no
    scaling.
    """
    config, rate = settings.training, settings.learning_rate
    steps = config.numb_steps
    if steps is None:
        batches = training.total_batches()
        if config.sharding == "partition":
            batches = sum(comm.gather(batches))
        steps = max(1, ceil((config.numb_epoch or 0) * batches / (workers * config.acc_freq)))
    elif config.scale_steps_by_worker:
        steps = max(1, steps // workers)
    if not config.scale_steps_by_worker or workers == 1:
        return settings, steps

    def fewer(section, *names):
        return section.model_copy(
            update={n: max(1, getattr(section, n) // workers) for n in names if getattr(section, n, 0)}
        )

    counts = ("numb_steps", "disp_freq", "save_freq") if config.numb_steps is not None else ("disp_freq", "save_freq")
    update = {"training": fewer(config, *counts), "learning_rate": fewer(rate, "decay_steps", "warmup_steps")}
    return settings.model_copy(update=update), steps
