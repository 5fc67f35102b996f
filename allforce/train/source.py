"""The model that a run begins with, if it begins with one: restart, init-model, init-frz-model, finetune."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from allforce.config.load import validated_config
from allforce.config.schema import ModelConfig
from allforce.distributed.comm import Comm
from allforce.errors import UserError
from allforce.infer.model_file import load_model
from allforce.models.potential import Potential
from allforce.train import checkpoint
from allforce.train.checkpoint import Checkpoint
from allforce.train.logs import log
from allforce.train.state import State, load_weights, model_section

# what may differ from the model that a run begins with: it does not change what the same weights mean
FREE = {"seed", "trainable", "precision", "type_map", "rcond", "set_davg_zero", "default_fparam", "preset_out_bias"}


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


def compare(config: ModelConfig, source: Source, strict: bool) -> None:
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
