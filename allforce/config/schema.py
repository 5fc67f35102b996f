"""The input file as typed objects: attribute names are DeePMD-kit's key names, the help of each field is the manual.

Types are strict (a text is no number, true is no 1), unknown keys are errors. `load.py` turns a file into `Input`;
aliases, comments and old forms are gone before the classes here see the data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from allforce.config.drawing import BATCH_PATTERN, BATCH_WORDS, auto_prob_blocks, check_sys_probs
from allforce.config.mimic import MimicSystem
from allforce.config.section import Section, Words, key
from allforce.errors import UserError
from allforce.optim import OPTIMIZERS
from allforce.optim.adam import AdamConfig, AdamWConfig
from allforce.optim.muon import HybridMuonConfig


def _whole(value: Any) -> Any:
    """1e6 is how people write a million: a float without fraction counts as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_whole)]
NonNegative = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Seed = NonNegative | list[NonNegative] | None
Pair = Annotated[list[NonNegative], Field(min_length=2, max_length=2)]
Name = Annotated[str, Field(min_length=1)]
Precision = Literal["default", "float32", "float64"]
Sel = Annotated[str, Field(pattern=r"^auto(:\d+(\.\d*)?)?$"), Words('"auto" or "auto:1.1"')] | list[NonNegative]
BatchForm = Annotated[str, Field(pattern=BATCH_PATTERN), Words(BATCH_WORDS)]
BatchSize = Positive | list[Positive] | BatchForm
ACTIVATIONS = (
    '"tanh", "relu", "relu6", "softplus", "sigmoid", "gelu", "gelu_tf", "silu", "silut", "silut:T", "linear" or "none"'
)
Activation = Annotated[
    str,
    Field(pattern=r"^(tanh|relu6?|softplus|sigmoid|gelu(_tf)?|silu|linear|none|(silut|custom_silu)(:\d+(\.\d*)?)?)$"),
    BeforeValidator(_lower),
    Words(ACTIVATIONS),
]
OutBias = Annotated[dict[Literal["energy"], list[float | None]], Words('{"energy": [number or null for each type]}')]

LABELS_OF_FILES = ("energy", "forces", "virial", "stress")  # that an entry of systems may name
FileAndNames = Annotated[dict[str, Name], Words('{"file": name, "energy": key, "forces": key, …}')]
System = Name | FileAndNames | Annotated[MimicSystem, Words('{"mimic": {…}}')]

PRECISION_HELP = (
    'Precision of the parameters: "float32", "float64", or "default" = float64 (float32 when the '
    "environment has DP_INTERFACE_PREC=low)."
)
ACTIVATION_HELP = f"Activation function: {ACTIVATIONS}; capitals do not matter."
SCHEDULE_HELP = 'Kind of schedule: "exp", "cosine" or "wsd".'
SEED_HELP = "Seed of the initial parameters; a different one each run when left out."


def precision_name(precision: str, env: Mapping[str, str] = os.environ) -> str:
    """The floating-point type behind a precision: "default" is float64, or float32 with DP_INTERFACE_PREC=low."""
    if precision != "default":
        return precision
    interface = env.get("DP_INTERFACE_PREC", "high").lower()
    if interface not in ("high", "low"):
        raise UserError(f'The environment variable DP_INTERFACE_PREC is "{interface}"; expected "high" or "low".')
    return "float64" if interface == "high" else "float32"


# ---------------------------------------------------------------------------------------------------------- model


class DescriptorSeE2A(Section):
    """Deep Potential, smooth edition: full relative coordinates, embedding of two atoms."""

    type_aliases = ("se_a",)
    type_required = True

    type: Literal["se_e2_a"] = key("se_e2_a", 'Kind of descriptor (required): "se_e2_a".')
    sel: Sel = key(
        "auto",
        'Largest number of neighbours kept of each type, one integer per type; or "auto:f": the largest '
        'number in the training data times f ("auto" is "auto:1.1").',
    )
    rcut: float = key(6.0, "Cutoff radius in Å.", gt=0)
    rcut_smth: float = key(0.5, "Where the smooth switching of 1/r begins, in Å; smaller than rcut.", ge=0)
    neuron: list[Positive] = key(
        [10, 20, 40],
        "Widths of the embedding net. A layer as wide as, or twice as wide as, the one before gets a skip connection.",
        min_length=1,
    )
    axis_neuron: Int = key(
        4,
        "Columns of the embedding matrix used for the second factor; at most the last of neuron.",
        ge=1,
        aliases=("n_axis_neuron",),
    )
    activation_function: Activation = key("tanh", ACTIVATION_HELP)
    resnet_dt: bool = key(False, "A trained step width in the skip connections.")
    type_one_side: bool = key(
        False, "true: one embedding net per type of neighbour; false: one per pair (centre, neighbour)."
    )
    precision: Precision = key("default", PRECISION_HELP)
    trainable: bool = key(True, "Whether the embedding nets are trained.")
    seed: Seed = key(None, SEED_HELP)
    exclude_types: list[Pair] = key([], "Pairs of types that do not see each other, for example [[0, 1]].")
    env_protection: float = key(0.0, "Added to distances in denominators, against division by zero.", ge=0)
    set_davg_zero: bool = key(False, "Use zero for the mean of the environment matrix. Set it together with atom_ener.")

    @property
    def dtype(self) -> str:
        """float32 or float64."""
        return precision_name(self.precision)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.rcut_smth >= self.rcut:
            yield "rcut_smth", f"{self.rcut_smth} must be smaller than rcut, {self.rcut}"
        if self.axis_neuron > self.neuron[-1]:
            yield "axis_neuron", f"{self.axis_neuron} must not exceed the last of neuron, {self.neuron[-1]}"
        if isinstance(self.sel, list) and sum(self.sel) == 0:
            yield "sel", f'{self.sel} keeps no neighbour at all; give the number of neighbours per type, or "auto"'
        if isinstance(self.sel, str) and ":" in self.sel and float(self.sel.split(":")[1]) < 1:
            yield "sel", f'the factor of "{self.sel}" must be at least 1'


class FittingEner(Section):
    """Net from descriptor to atomic energy, one per type."""

    type: Literal["ener"] = key("ener", 'What is fitted: "ener", the energy.')
    numb_fparam: Int = key(0, "Number of frame parameters (fparam.npy).", ge=0)
    numb_aparam: Int = key(0, "Number of atomic parameters (aparam.npy).", ge=0)
    default_fparam: list[float] | None = key(None, "Frame parameters of data that have none; numb_fparam numbers.")
    neuron: list[Positive] = key(
        [120, 120, 120],
        "Widths of the hidden layers. Layers of equal width get a skip connection.",
        aliases=("n_neuron",),
    )
    activation_function: Activation = key("tanh", ACTIVATION_HELP)
    precision: Precision = key("default", PRECISION_HELP)
    resnet_dt: bool = key(True, "A trained step width in the skip connections.")
    trainable: bool | list[bool] = key(
        True, "Whether the net is trained; or a list, one for each hidden layer and one for the output layer."
    )
    rcond: float | None = key(
        None, "Singular values below this fraction of the largest are dropped when the energy bias is fitted.", ge=0
    )
    seed: Seed = key(None, SEED_HELP)
    atom_ener: list[float | None] = key(
        [],
        "Energy of each type in vacuum, in eV (null: not given): the net gives exactly this for an atom "
        "without neighbours.",
    )
    use_aparam_as_mask: bool = key(False, "Atomic parameters are a mask, not an input of the net.")

    @property
    def dtype(self) -> str:
        """float32 or float64."""
        return precision_name(self.precision)

    def problems(self) -> Iterator[tuple[str, str]]:
        layers = len(self.neuron) + 1
        if isinstance(self.trainable, list) and len(self.trainable) != layers:
            yield (
                "trainable",
                f"has {len(self.trainable)} entries; expected {layers}, one for each layer of neuron and one for the "
                f"output layer",
            )
        if self.default_fparam is not None and len(self.default_fparam) != self.numb_fparam:
            yield "default_fparam", f"has {len(self.default_fparam)} numbers, but numb_fparam is {self.numb_fparam}"
        if self.use_aparam_as_mask and self.numb_aparam == 0:
            yield "use_aparam_as_mask", "is true, but numb_aparam is 0"


class ModelConfig(Section):
    """Descriptor and fitting net."""

    type: Literal["standard"] = key("standard", 'Kind of model: "standard", a descriptor with a fitting net.')
    type_map: list[Name] | None = key(
        None, 'Names of the types, for example ["O", "H"]; taken from the data when left out.', min_length=1
    )
    descriptor: DescriptorSeE2A = key(..., "The descriptor, by its type.")
    fitting_net: FittingEner = key(..., "The fitting net, by its type.")
    data_stat_nbatch: Int = key(10, "Batches of each system used for the statistics of the descriptor.", ge=1)
    data_stat_protect: float = key(0.01, "Smallest standard deviation used for frame and atomic parameters.", gt=0)
    data_bias_nsample: Int = key(10, "Batches of each system used when the energy bias is changed.", ge=1)
    pair_exclude_types: list[Pair] = key([], "Pairs of types that do not interact, in the whole model.")
    atom_exclude_types: list[NonNegative] = key([], "Types whose atoms have no energy of their own.")
    preset_out_bias: OutBias | None = key(
        None, 'Energy bias given by hand, {"energy": [value or null for each type]}, in eV; null: from the data.'
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        names = self.type_map or []
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            yield "type_map", f"has {', '.join(twice)} more than once; every name must be there once"
        if names:
            yield from self._lengths(len(names))

    def _lengths(self, ntypes: int) -> Iterator[tuple[str, str]]:
        """Everything that is given per type must fit to the type_map."""
        preset = (self.preset_out_bias or {}).get("energy", [])
        lists = {"descriptor/sel": self.descriptor.sel, "fitting_net/atom_ener": self.fitting_net.atom_ener}
        for path, values in {**lists, "preset_out_bias/energy": preset}.items():
            if isinstance(values, list) and values and len(values) != ntypes:
                yield path, f"{values} has {len(values)} entries; expected {ntypes}, one for each type of type_map"
        for path, pairs in {
            "descriptor/exclude_types": self.descriptor.exclude_types,
            "pair_exclude_types": self.pair_exclude_types,
        }.items():
            if any(t >= ntypes for pair in pairs for t in pair):
                yield path, f"{pairs} names a type outside 0 … {ntypes - 1} of type_map"
        if any(t >= ntypes for t in self.atom_exclude_types):
            yield "atom_exclude_types", f"{self.atom_exclude_types} names a type outside 0 … {ntypes - 1} of type_map"


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
        "linear", "The optimizer's rate is the schedule times W (linear), √W (sqrt) or 1 (none) for W workers."
    )
    warmup_from_unscaled: bool = key(
        False, "The warmup goes from start_lr to start_lr scaled by the workers.", own=True
    )

    @property
    def stop(self) -> float:
        """The rate at the end, however it was given."""
        if self.stop_lr_ratio is not None:
            return self.start_lr * self.stop_lr_ratio
        return 5e-8 if self.stop_lr is None else self.stop_lr

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


# ----------------------------------------------------------------------------------------------------------- loss


class LossEner(Section):
    """Weighted sum of the errors of energy, force, virial, atomic energies and weighted forces.

    The weight of a term is limit + (start − limit) · lr(t) / start_lr; a term is on when start or limit is not 0.
    """

    type_aliases = ("ener_hess",)

    type: Literal["ener"] = key("ener", 'Kind of loss: "ener".')
    schedule: Literal["lr", "step"] = key(
        "lr",
        "What lr(t) / start_lr of the weights is. lr: that of the learning rate; step: 1000^(−t / numb_steps), "
        "whatever the rate does.",
        own=True,
    )
    start_pref_e: float = key(0.02, "Weight of the energy at the beginning.", ge=0)
    limit_pref_e: float = key(1.0, "Weight of the energy when the rate has gone to 0.", ge=0)
    start_pref_f: float = key(1000.0, "Weight of the forces at the beginning.", ge=0)
    limit_pref_f: float = key(1.0, "Weight of the forces at the end.", ge=0)
    start_pref_v: float = key(0.0, "Weight of the virial at the beginning.", ge=0)
    limit_pref_v: float = key(0.0, "Weight of the virial at the end.", ge=0)
    start_pref_ae: float = key(0.0, "Weight of the atomic energies at the beginning.", ge=0)
    limit_pref_ae: float = key(0.0, "Weight of the atomic energies at the end.", ge=0)
    start_pref_pf: float = key(0.0, "Weight, at the beginning, of the forces weighted by atom_pref.npy.", ge=0)
    limit_pref_pf: float = key(0.0, "Weight, at the end, of the forces weighted by atom_pref.npy.", ge=0)
    use_default_pf: bool = key(False, "Data without atom_pref.npy count as if it were 1.")
    relative_f: float | None = key(None, "Divide the force error of an atom by |force| + this number, in eV/Å.", gt=0)
    enable_atom_ener_coeff: bool = key(False, "The energy is Σ c_i e_i with c_i from atom_ener_coeff.npy.")
    use_huber: bool = key(False, "Huber's loss: quadratic for small errors, linear beyond huber_delta.")
    huber_delta: float | list[float] = key(
        0.01, "Where Huber's loss becomes linear; or three numbers for energy, force, virial."
    )
    loss_func: Literal["mse", "mae"] = key("mse", "Mean of squares, or of absolute values.")
    f_use_norm: bool = key(
        False, "Use the length of the force error instead of its components (with mae or Huber's loss)."
    )
    intensive_ener_virial: bool = key(
        False, "Divide the terms of energy and virial by N² instead of N, the number of atoms."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        deltas = self.huber_delta if isinstance(self.huber_delta, list) else [self.huber_delta] * 3
        if len(deltas) != 3 or min(deltas) <= 0:
            yield (
                "huber_delta",
                f"{self.huber_delta} must be one number or three (energy, force, virial), greater than 0",
            )
        if self.use_huber and self.loss_func == "mae":
            yield "use_huber", 'goes with loss_func "mse" only'
        if self.use_huber and self.relative_f is not None:
            yield "relative_f", "and use_huber exclude each other"
        if self.use_huber and (self.start_pref_pf or self.limit_pref_pf):
            yield "start_pref_pf", "and limit_pref_pf must be 0 with use_huber"
        if self.f_use_norm and not (self.use_huber or self.loss_func == "mae"):
            yield "f_use_norm", 'needs loss_func "mae" or use_huber true'
        if not any(
            getattr(self, f"{when}_pref_{what}") for when in ("start", "limit") for what in ("e", "f", "v", "ae", "pf")
        ):
            yield "start_pref_e", "and all other prefactors are 0, so there is nothing to fit"


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

    numb_btch: Int = key(1, "Batches evaluated for each line of the learning curve.", ge=1, aliases=("numb_batch",))


class Table(Section):
    """How the embedding nets are evaluated while training. A frozen model has the plain nets either way."""

    mode: Literal["table", "exact"] = key(
        "table", "Interpolate the embedding nets between nodes, or evaluate them for every neighbour.", own=True
    )
    tolerance: float | None = key(
        None, "Largest error of the interpolation; 1e-7 for float64 and 1e-5 for float32 when left out.", gt=0, own=True
    )
    nodes: Int = key(64, "Nodes to begin with; more are taken when the tolerance asks for it.", ge=8, own=True)


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
    cache_memory: float | None = key(
        None,
        "Memory of each host for frames kept ready with their neighbours, in GiB, shared by its workers; a quarter of "
        "the host's memory when left out.",
        ge=0,
        own=True,
    )
    gradient_precision: Literal["float32", "bfloat16"] | None = key(
        None, "Precision of the gradients between workers; that of the parameters when left out.", own=True
    )
    scale_steps_by_worker: bool = key(
        False, "Divide numb_steps, decay_steps, disp_freq and save_freq by the number of workers.", own=True
    )
    table: Table = key(Table(), "How the embedding nets are evaluated while training.", own=True)

    @property
    def ema(self) -> float | None:
        """Decay of the average of the weights, None when there is none."""
        return self.ema_decay if self.enable_ema else None

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.numb_steps is None and self.numb_epoch is None:
            yield "numb_steps", "or numb_epoch is required"
        if self.numb_steps is not None and self.numb_epoch is not None:
            yield "numb_epoch", "and numb_steps exclude each other; give one of them"


AnyLearningRate = Annotated[LearningRateExp | LearningRateCosine | LearningRateWSD, Field(discriminator="type")]
AnyOptimizer = Annotated[AdamConfig | AdamWConfig | HybridMuonConfig, Field(discriminator="type")]


class Input(Section):
    """The whole input file."""

    model: ModelConfig = key(..., "The model.")
    learning_rate: AnyLearningRate = key(..., "The schedule of the learning rate, by its type.")
    optimizer: AnyOptimizer = key(AdamConfig(), "The optimizer, by its type.")
    loss: LossEner = key(LossEner(), "The loss.")
    training: Training = key(..., "Data, length of the training, and what is written.")

    def problems(self) -> Iterator[tuple[str, str]]:
        steps, warmup = self.training.numb_steps, self.learning_rate.warmup_steps
        if steps is not None and warmup >= steps:
            yield "learning_rate/warmup_steps", f"{warmup} must be smaller than the number of steps, {steps}"
        if self.training.zero_stage and not OPTIMIZERS[self.optimizer.type].shards:
            able = " or ".join(name for name, cls in OPTIMIZERS.items() if cls.shards)
            yield "training/zero_stage", f"is 1, but {self.optimizer.type} is not shared out; set 0, or use {able}"
