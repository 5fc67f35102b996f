"""The recipe: how to train when nothing speaks against it. What it was tried on: docs/training_recipes.md."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from allforce.config.load import normalised, parse_input
from allforce.config.schema import Input
from allforce.data.discover import open_systems
from allforce.data.system import System
from allforce.errors import UserError

FEWER = 30  # times fewer steps than Adam with an exponential decay of the rate
LEAST = 100  # steps

RATE: dict[str, Any] = {  # 0.4/√steps, falling linearly to 0
    "type": "wsd",
    "start_lr": 0.04,
    "stop_lr": 0.0,
    "reference_steps": 100,
    "decay_phase_ratio": 1.0,
    "decay_type": "linear",
    "scale_by_worker": "none",
}
FITTING: dict[str, Any] = {"input_scale": 0.1}
TRAINING: dict[str, Any] = {"refit": True}
OPTIMIZER: dict[str, Any] = {"type": "HybridMuon", "adam_beta1": 0.95, "adam_beta2": 0.95}
MIXED = 256  # atoms, at least, of a batch of several compositions
FORCES = 60  # times the weight of energies that forces have at the end, at least


def with_loss(loss: dict[str, Any]) -> dict[str, Any]:
    """Weights by steps; forces, if they are learned, keep some weight to the end."""
    least = FORCES * loss["limit_pref_e"] if loss["start_pref_f"] else 0
    return {**loss, "schedule": "step", "limit_pref_f": max(loss["limit_pref_f"], least)}


def mixed_batch(systems: Sequence[System]) -> str | None:
    """batch_size for data of several compositions, frames of all of them together: with one system in a batch a step
    learns that at the cost of the others. None for data of one composition."""
    if len({composition(s) for s in systems}) == 1:
        return None
    atoms = sum(s.natoms * s.nframes for s in systems) / sum(s.nframes for s in systems)
    return f"mixed:{ceil(MIXED / atoms)}"


def composition(system: System) -> tuple[tuple[int, int], ...]:
    """How many atoms of each type; frames of a mixed system are of several."""
    kinds, counts = np.unique(system.model_types, return_counts=True) if not system.mixed else ((), ())
    return tuple(zip(map(int, kinds), map(int, counts), strict=True))


def with_recipe(old: Input, name: str) -> tuple[Input, list[str]]:
    """Data and model of an input with the recipe's training, and what that changes, a line for each key."""
    data = before = normalised(old)
    training = data["training"] | TRAINING
    if "schedule" not in type(old.loss).model_fields:
        raise UserError(
            f"--recipe: there is none for the loss {data['loss']['type']!r} of {name}. Leave the option out."
        )
    if training.get("numb_steps") is not None:
        training["numb_steps"] = max(LEAST, training["numb_steps"] // FEWER)
        for key in ("disp_freq", "save_freq"):
            training[key] = max(1, training[key] // FEWER)
    else:
        training["numb_epoch"] = training["numb_epoch"] / FEWER
    drawn = old.training.training_data
    if old.training.sharding != "partition" and drawn.sys_probs is None:
        found = open_systems(drawn.systems, old.model.type_map, drawn.rglob_patterns, named=old.model.named_labels())
        if (batch := mixed_batch(found)) and not str(drawn.batch_size).startswith("mixed"):
            training["training_data"] = training["training_data"] | {"batch_size": batch}
    data = {**data, "training": training, "learning_rate": RATE, "optimizer": OPTIMIZER}
    data["loss"] = with_loss(data["loss"])
    if "fitting_net" in data["model"]:
        data["model"] = data["model"] | {"fitting_net": data["model"]["fitting_net"] | FITTING}
    new = parse_input(data, f"{name} with the recipe")
    return new, changes(before, normalised(new))


def changes(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """A line for each key that two inputs do not have in common."""
    lines: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        a, b, where = old.get(key), new.get(key), f"{path}/{key}" if path else key
        if isinstance(a, dict) and isinstance(b, dict):
            lines += changes(a, b, where)
        elif a != b:
            lines.append(f"{where}: {'-' if a is None else a} → {'-' if b is None else b}")
    return lines
