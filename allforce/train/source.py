"""The model that a run begins with, if it begins with one: restart, init-model, init-frz-model, finetune."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allforce.config.load import validated_config
from allforce.config.section import Section, is_free
from allforce.distributed.comm import Comm
from allforce.errors import UserError
from allforce.files import checkpoint
from allforce.files.checkpoint import Checkpoint
from allforce.files.model_file import load_model
from allforce.logs import log
from allforce.models import Model
from allforce.train.state import State, load_weights, model_section


@dataclass
class Options:
    """What the command line says about a run."""

    input: str = "input.json"
    output: str | None = "out.json"  # None: nothing is written
    restart: str | None = None
    init_model: str | None = None
    init_frz_model: str | None = None
    finetune: str | None = None
    skip_neighbor_stat: bool = False
    use_pretrain_script: bool = False
    wall_time: float | None = None  # seconds since the start of the process

    @property
    def source(self) -> str | None:
        """The model that the run begins with."""
        return self.restart or self.init_model or self.init_frz_model or self.finetune


@dataclass
class Source:
    """The model that a run begins with. Rank 0 has read it; the others know what it says about itself."""

    name: str
    config: Any  # its section `model`
    seed: int | None
    nearest: float | None  # Å, the smallest distance in the data that it was trained with
    step: int = 0
    consumed: int | None = None  # micro-batches of all workers
    sum_since: list[float] | None = None
    model: Model | None = None
    checkpoint: Checkpoint | None = None

    def load_into(self, state: State, resume: bool) -> None:
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
    model, saved, facts = None, None, {}
    if comm.rank == 0:
        path = checkpoint.find(name) if options.restart else name
        log.info(f"{'restart' if options.restart else 'initialize'} from model {path}")
        model = load_model(path)
        saved = _resumable(name, Path(path)) if options.restart else None
        meta = saved.meta if saved is not None else {}
        facts = {key: meta.get(key) for key in ("seed", "micro_batches", "sum_since")}
        facts |= {"step": meta.get("step", 0), "model": model_section(model), "nearest": model.min_nbor_dist}
    facts = comm.gather(facts)[0]
    config = validated_config(facts["model"], name)
    progress = (facts["step"], facts["micro_batches"], facts["sum_since"])
    return Source(name, config, facts["seed"], facts["nearest"], *progress, model, saved)


def _resumable(name: str, path: Path) -> Checkpoint:
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
        seed = source.seed if source is not None and source.seed is not None else secrets.randbits(31)
        return comm.gather(seed)[0]
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) if isinstance(seed, list) else seed


def compare(config: Section, source: Source, strict: bool) -> None:
    """Another cutoff, sel, activation, … than the weights were trained with: an error on restart, else a warning."""
    for where, new, old in differences(config, source.config, "model"):
        text = f"{where} is {new}, but {source.name} was trained with {old}"
        if strict:
            raise UserError(f"{text}. A restart continues the same model: use that value, or --init-model.")
        log.warning(text)


def differences(new: Section, old: Section, path: str) -> Iterator[tuple[str, Any, Any]]:
    """(path, value, value) of the keys in which two sections differ, those left out that may differ."""
    if type(new) is not type(old):
        yield f"{path}/type", getattr(new, "type", None), getattr(old, "type", None)
        return
    for key, field in type(new).model_fields.items():
        a, b = getattr(new, key), getattr(old, key)
        if isinstance(a, Section) and isinstance(b, Section):
            yield from differences(a, b, f"{path}/{key}")
        elif a != b and not is_free(field):
            yield f"{path}/{key}", a, b
