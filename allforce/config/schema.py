"""The input file as typed objects: attribute names are DeePMD-kit's key names, the help of each field is the manual.

Types are strict (a text is no number, true is no 1), unknown keys are errors. `load.py` turns a file into `Input`;
aliases, comments and old forms are gone before the classes here see the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from allforce.config.drawing import BATCH_PATTERN, BATCH_WORDS, auto_prob_blocks, check_sys_probs
from allforce.config.keys import Int, Name, Positive, Seed, Width
from allforce.config.mimic import MimicSystem
from allforce.config.section import Section, Words, key, one_of
from allforce.losses import LOSSES, EnerLoss
from allforce.models import MODELS
from allforce.models.table import TableConfig
from allforce.optim import OPTIMIZERS, Adam

if TYPE_CHECKING:
    AnyModel = Any
    AnyLoss = Any
    AnyOptimizer = Any
else:
    AnyModel = one_of(MODELS)
    AnyLoss = one_of(LOSSES)
    AnyOptimizer = one_of(OPTIMIZERS)

BatchForm = Annotated[str, Field(pattern=BATCH_PATTERN), Words(BATCH_WORDS)]
BatchSize = Positive | list[Positive] | BatchForm
LABELS_OF_FILES = ("energy", "forces", "virial", "stress")  # that an entry of systems may name
FileAndNames = Annotated[dict[str, Name], Words('{"file": name, "energy": key, "forces": key, …}')]
System = Name | FileAndNames | Annotated[MimicSystem, Words('{"mimic": {…}}')]
SCHEDULE_HELP = 'Kind of schedule: "exp", "cosine" or "wsd".'


# -------------------------------------------------------------------------------------------------- learning rate


class LearningRate(Section):
    """What all schedules share."""

    type: str = key("exp", SCHEDULE_HELP)
    start_lr: float = key(..., "Learning rate at the beginning (after warmup).", gt=0)
    stop_lr: float | None = key(
        None, "Learning rate at the end; 5e-8 when neither this nor stop_lr_ratio is given.", ge=0
    )
    stop_lr_ratio: float | None = key(None, "stop_lr as a fraction of start_lr; instead of stop_lr.", gt=0, le=1)
    warmup_steps: Int = key(0, "Steps over which the rate grows to start_lr.", ge=0)
    warmup_ratio: float | None = key(
        None, "warmup_steps as a fraction of the number of steps; instead of warmup_steps.", ge=0, lt=1
    )
    warmup_start_factor: float = key(0.0, "The warmup begins at this fraction of start_lr.", ge=0)
    scale_by_worker: Literal["linear", "sqrt", "none"] = key(
        "linear",
        "The optimizer's rate is the schedule times W (linear), √W (sqrt) or 1 (none) for W workers (groups of workers "
        "that split frames count once).",
    )
    warmup_from_unscaled: bool = key(
        False, "The warmup goes from start_lr to start_lr scaled by the workers.", own=True
    )
    reference_steps: Positive | None = key(
        None,
        "start_lr is meant for runs of up to so many steps; a run of n steps, n being larger, begins with start_lr · "
        "√(reference_steps / n), and a stop_lr above that is lowered to it.",
        own=True,
    )

    @property
    def stop(self) -> float:
        """The rate at the end of a run of at most reference_steps, however it was given."""
        if self.stop_lr_ratio is not None:
            return self.start_lr * self.stop_lr_ratio
        return 5e-8 if self.stop_lr is None else self.stop_lr

    def rates(self, steps: int) -> tuple[float, float]:
        """First and last rate of a run of so many steps."""
        factor = 1.0 if self.reference_steps is None else min(1.0, sqrt(self.reference_steps / max(steps, 1)))
        start = self.start_lr * factor
        return start, self.stop * factor if self.stop_lr_ratio is not None else min(self.stop, start)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.stop_lr is not None and self.stop_lr_ratio is not None:
            yield "stop_lr_ratio", "and stop_lr exclude each other; give one of them"
        elif self.stop > self.start_lr:
            default = "" if self.stop_lr is not None else " (the default)"
            yield "stop_lr", f"{self.stop}{default} must not exceed start_lr, {self.start_lr}"
        if self.warmup_steps and self.warmup_ratio is not None:
            yield "warmup_ratio", "and warmup_steps exclude each other; give one of them"
        if self.warmup_from_unscaled and not (self.warmup_steps or self.warmup_ratio):
            yield "warmup_from_unscaled", "needs warmup_steps or warmup_ratio"
        if self.warmup_from_unscaled and self.warmup_start_factor:
            yield (
                "warmup_start_factor",
                "has no meaning with warmup_from_unscaled, which begins at start_lr; leave one out",
            )


class LearningRateExp(LearningRate):
    """Exponential decay in steps: start_lr · r^floor(t / decay_steps), not below stop_lr."""

    type: Literal["exp"] = key("exp", SCHEDULE_HELP)
    decay_steps: Int = key(5000, "The rate falls every so many steps.", ge=1)
    decay_rate: float | None = key(
        None, "Factor r of each fall; from start_lr, stop_lr and the number of steps when left out.", gt=0, le=1
    )
    smooth: bool = key(False, "Fall a little every step instead.")


class LearningRateCosine(LearningRate):
    """Half a cosine from start_lr to stop_lr."""

    type: Literal["cosine"] = key("cosine", SCHEDULE_HELP)


class LearningRateWSD(LearningRate):
    """Warmup, stable, decay: constant, then a fall to stop_lr in the last part."""

    type: Literal["wsd"] = key("wsd", SCHEDULE_HELP)
    decay_phase_ratio: float = key(0.1, "Share of all steps in the last part.", gt=0, le=1)
    decay_type: Literal["inverse_linear", "cosine", "linear"] = key("inverse_linear", "Form of the fall.")

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.stop <= 0 and self.decay_type == "inverse_linear":
            yield "stop_lr", 'must be greater than 0 for decay_type "inverse_linear" of the schedule wsd'


# ------------------------------------------------------------------------------------------------------- training


class DataConfig(Section):
    """What training and validation data share."""

    systems: System | Annotated[list[System], Field(min_length=1)] = key(
        ...,
        "Folders with type.raw (searched through all levels), HDF5 groups file.h5#/group, files that ASE reads (of "
        'these {"file": name, "energy": key, …} says what their labels are called, if not as usual), data sets of PiNN '
        "(NAME.yml), or objects with the files of MiMiC runs.",
    )
    rglob_patterns: list[str] | None = key(None, "Search the folders with these patterns instead.")
    batch_size: BatchSize = key(
        "auto",
        'Frames of a batch: a number; a list, one per system; "auto:N", at least N atoms ("auto" is '
        '"auto:32"); "max:N", at most N atoms; "filter:N", the same without larger systems; "mixed:N", N '
        "frames of any systems.",
    )
    auto_prob: str = key(
        "prob_sys_size",
        'How often a system is drawn: "prob_uniform"; "prob_sys_size", by its number of batches; '
        '"prob_sys_size;s:e:w;…", systems s … e-1 together with weight w.',
        aliases=("auto_prob_style",),
    )
    sys_probs: list[float] | None = key(
        None,
        "Probability of each system, with sum 1; systems with a negative number share the rest by their "
        "number of batches.",
        aliases=("sys_weights",),
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        for entry in self.systems if isinstance(self.systems, list) else [self.systems]:
            if isinstance(entry, dict) and not {"file"} <= entry.keys() <= {"file", *LABELS_OF_FILES}:
                yield "systems", f'{entry} needs "file", and may have {", ".join(LABELS_OF_FILES)}'
            if isinstance(entry, dict) and {"virial", "stress"} <= entry.keys():
                yield "systems", f"{entry} names both virial and stress; give one of them"
        try:
            auto_prob_blocks(self.auto_prob)
        except ValueError as error:
            yield "auto_prob", str(error)
        try:
            check_sys_probs(self.sys_probs or [1.0])
        except ValueError as error:
            yield "sys_probs", str(error)


class TrainingData(DataConfig):
    """The data that are learned."""


class ValidationData(DataConfig):
    """The data whose errors are shown beside those of training."""

    numb_btch: Width = key(1, "Batches evaluated for each line of the learning curve.", aliases=("numb_batch",))


class StopWhen(Section):
    """When a run ends early: the error on validation data makes no progress."""

    patience: Positive = key(
        ...,
        "So many validations without progress end the run: those of `validating`, else those of the learning curve.",
        own=True,
    )
    change: float = key(0.01, "Progress is a fall by more than this fraction.", ge=0, lt=1, own=True)


class Validating(Section):
    """Errors on all validation data, and the best models."""

    full_validation: bool = key(False, "Evaluate all validation data every validation_freq steps.")
    validation_freq: Positive = key(5000, "Steps between evaluations.")
    save_best: bool = key(True, "Keep the checkpoints with the smallest errors, best.ckpt-<step>.")
    save_best_dir: Name | None = key(None, "Their folder; that of the checkpoints when left out.")
    max_best_ckpt: Positive = key(1, "How many of them.")
    validation_metric: Annotated[
        Literal["E:MAE", "E:RMSE", "F:MAE", "F:RMSE", "V:MAE", "V:RMSE"],
        BeforeValidator(lambda text: text.upper() if isinstance(text, str) else text),
    ] = key("E:MAE", "The error that decides: of energies per atom, forces or virials per atom, its mean or square.")
    full_val_file: Name = key("val.log", "File of these errors.")
    full_val_start: float = key(
        0.5, "When to begin: a fraction of all steps; from 1 on a step, where 1 itself means never.", ge=0
    )


class Training(Section):
    """Data, length of the training, and what is written."""

    training_data: TrainingData = key(..., "The data that are learned.")
    validation_data: ValidationData | None = key(None, "The data whose errors are shown beside those of training.")
    numb_steps: Positive | None = key(
        None,
        "Number of steps; this or numb_epoch is required.",
        aliases=("stop_batch", "num_step", "num_steps", "numb_step"),
    )
    numb_epoch: float | None = key(
        None,
        "Number of passes through the data; instead of numb_steps.",
        gt=0,
        aliases=("num_epoch", "num_epochs", "numb_epochs"),
    )
    seed: Seed = key(None, "Seed of the order of the data; a different one each run when left out.")
    stat_file: Name | None = key(
        None, "File (.h5, .hdf5) or folder that keeps the statistics of the data for the next run."
    )
    stat_file_mode: Literal["update", "read"] = key(
        "update",
        "update: read what stat_file has and add what it lacks; read: change nothing, missing statistics are an error.",
    )
    disp_file: Name = key("lcurve.out", "File of the learning curve.")
    disp_freq: Int = key(1000, "Steps between lines of the learning curve.", ge=1)
    save_freq: Int = key(1000, "Steps between checkpoints.", ge=1)
    save_ckpt: Name = key("model.ckpt", "Beginning of the names of checkpoints.")
    save_dir: Name | None = key(None, "Folder of the checkpoints; the current one when left out.")
    max_ckpt_keep: Int = key(5, "Checkpoints of the run kept, the newest ones.", ge=1)
    enable_ema: bool = key(
        False, "Keep a moving average of the weights: it is validated, lies in the checkpoints, and is what is frozen."
    )
    ema_decay: float = key(0.999, "Decay of that average, smaller in the first steps.", ge=0, lt=1)
    change_bias_after_training: bool = key(False, "Fit the energy bias again to the errors of the trained model.")
    refit: bool = key(
        False,
        "After training, fit the last layer of the fitting nets and the energy bias by linear least squares to "
        "energies and forces of up to 200 frames; without such a layer: the bias.",
        own=True,
    )
    disp_training: bool = key(True, "Write the learning curve.")
    time_training: bool = key(True, "Show the time of training in the log.")
    disp_avg: bool = key(False, "Training errors of the learning curve are means over the steps since the line before.")
    gradient_max_norm: float | None = key(
        None, "The gradient is shortened to this length when it is longer; 0 or left out: never.", ge=0
    )
    tensorboard: bool = key(False, "Write for TensorBoard.")
    tensorboard_log_dir: Name = key("log", "Folder of the TensorBoard files.")
    tensorboard_freq: Int = key(1, "Steps between entries for TensorBoard.", ge=1)
    tensorboard_histograms: bool = key(
        False, "Also histograms of all parameters, with every line of the learning curve.", own=True
    )
    wandb_project: Name | None = key(
        None,
        "Project of Weights & Biases that gets what TensorBoard would (WANDB_MODE=offline: files only).",
        own=True,
    )
    profiling: bool = key(False, "Write a timeline of all workers, for chrome://tracing and Perfetto.")
    profiling_file: Name = key("timeline.json", "File of the timeline.")
    enable_profiler: bool = key(
        False, "Also the trace of torch.profiler, of three steps of every worker, in tensorboard_log_dir."
    )
    metrics_file: Name | None = key(
        "metrics.jsonl",
        "File with all figures, samples per second and times of phases, a JSON object for each line of the learning "
        "curve; null: none.",
        own=True,
    )
    stop_when: StopWhen | None = key(None, "When the run ends before its number of steps.", own=True)
    acc_freq: Int = key(1, "Batches of each worker that make one step (gradient accumulation).", ge=1)
    zero_stage: Int = key(
        0,
        "1: every worker keeps and updates its share of the optimizer's matrices (HybridMuon); 0: all of them.",
        ge=0,
        le=1,
    )
    sharding: Literal["global", "replicate", "partition"] = key(
        "global",
        "Which worker sees which data. global: one common order, dealt out; replicate: every worker draws "
        "from everything with its own seed; partition: every worker holds its share of the systems only.",
        own=True,
    )
    parallel: bool | None = key(
        None,
        "true: the log says what several workers do together; false: several workers are an error (as for a script of "
        "PiNN without parallel).",
        own=True,
    )
    spatial_workers: Positive | Literal["auto"] = key(
        1,
        "Workers that split every frame among them by blocks of space; the number of workers is a multiple of it. "
        "auto: as few as memory and the number of micro-batches allow.",
        own=True,
    )
    cache_memory: float | None = key(
        None,
        "Memory of each host for frames kept ready with their neighbours, in GiB, shared by its workers; a quarter of "
        "the host's memory when left out.",
        ge=0,
        own=True,
    )
    distributed_timeout: float = key(
        30.0, "Seconds without a sign of life after which a worker is given up and all others end.", ge=2, own=True
    )
    on_nan: Literal["stop", "skip", "rewind"] = key(
        "stop",
        "A loss or gradient that is not finite ends the run, or is left out (skip), or is answered by the weights of "
        "the last checkpoint (rewind); training then goes on with the next batches. On GPUs skip and rewind look at "
        "every step, which costs time.",
        own=True,
    )
    gradient_precision: Literal["float32", "bfloat16"] | None = key(
        None, "Precision of the gradients between workers; that of the parameters when left out.", own=True
    )
    scale_steps_by_worker: bool = key(
        False, "Divide numb_steps, decay_steps, disp_freq and save_freq by the number of workers.", own=True
    )
    table: TableConfig = key(TableConfig(), "How the embedding nets are evaluated while training.", own=True)

    @property
    def ema(self) -> float | None:
        """Decay of the average of the weights, None when there is none."""
        return self.ema_decay if self.enable_ema else None

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.numb_steps is None and self.numb_epoch is None:
            yield "numb_steps", "or numb_epoch is required"
        if self.numb_steps is not None and self.numb_epoch is not None:
            yield "numb_epoch", "and numb_steps exclude each other; give one of them"
        if self.sharding == "partition" and self.spatial_workers != 1:
            yield "spatial_workers", 'goes with sharding "global" or "replicate" only'


AnyLearningRate = Annotated[LearningRateExp | LearningRateCosine | LearningRateWSD, Field(discriminator="type")]


class ModelAlone(Section):
    """The section `model` by itself, as a model file carries it."""

    model: AnyModel = key(..., "The model.")


class Input(Section):
    """The whole input file."""

    model: AnyModel = key(..., "The model.")
    learning_rate: AnyLearningRate = key(..., "The schedule of the learning rate, by its type.")
    optimizer: AnyOptimizer = key(Adam.Config(), "The optimizer, by its type.")
    loss: AnyLoss = key(EnerLoss.Config(), "The loss, by its type.")
    training: Training = key(..., "Data, length of the training, and what is written.")

    validating: Validating = key(Validating(), "Errors on all validation data, and the best models.")

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from self._validation()
        steps, warmup = self.training.numb_steps, self.learning_rate.warmup_steps
        if steps is not None and warmup >= steps:
            yield "learning_rate/warmup_steps", f"{warmup} must be smaller than the number of steps, {steps}"
        if self.training.zero_stage and not OPTIMIZERS[self.optimizer.type].shards:
            able = " or ".join(name for name, cls in OPTIMIZERS.items() if cls.shards)
            yield "training/zero_stage", f"is 1, but {self.optimizer.type} is not shared out; set 0, or use {able}"

    def _validation(self) -> Iterator[tuple[str, str]]:
        """Whatever looks at validation data needs some, with the label it looks at."""
        if self.training.validation_data is None:
            if self.validating.full_validation:
                yield "validating/full_validation", "needs training/validation_data"
            if self.training.stop_when is not None:
                yield "training/stop_when", "needs training/validation_data"
        term = self.validating.validation_metric[0].lower()
        prefactors = [getattr(self.loss, f"{end}_pref_{term}", None) for end in ("start", "limit")]
        if self.validating.full_validation and not any(prefactors):
            metric = self.validating.validation_metric
            yield "validating/validation_metric", f"is {metric}, but the loss has no such term (or both weights are 0)"
