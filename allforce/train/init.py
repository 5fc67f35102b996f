"""`dp init DATA…`: a complete input for the data it looked at, by the recipe, as long as the time that the user has.

Runs (folders, files) are held back for validation as wholes where there are enough of them, else the end of each run:
a frame between two frames of the training data is no test.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allforce.data.discover import Location, find_systems, open_location
from allforce.data.sample import count_neighbors
from allforce.data.system import Part, System, adopt_type_map
from allforce.distributed.comm import SerialComm
from allforce.errors import UserError
from allforce.logs import log
from allforce.models.sel import sel_auto
from allforce.train.fill import SIZES, full
from allforce.train.recipe import FITTING, LEAST, OPTIMIZER, RATE, TRAINING, mixed_batch, with_loss

RCUT = 6.0
ATOMS = 256  # of a batch of validation data, at least
SHARE = 10  # one frame of so many is held back
RUNS = 2 * SHARE  # so many runs are enough to hold back whole ones
COUNTED = 500  # frames, at most, in which neighbours are counted
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass
class Run:
    """What holds frames of one simulation, as far as one can tell."""

    location: str
    systems: list[System]

    @property
    def frames(self) -> int:
        return sum(s.nframes for s in self.systems)

    def cut(self) -> tuple[str, str] | None:
        """(all but the end, the end) as entries of `systems`; None when one of its systems has too few frames."""
        shortest = min(s.nframes for s in self.systems)
        n = max(s.nframes for s in self.systems) // SHARE
        return (f"{self.location}@:-{n}", f"{self.location}@-{n}:") if 0 < n < shortest else None


def init(entries: list[str], time: str, output: str) -> None:
    """Write the input file."""
    if Path(output).exists():
        raise UserError(f"{output}: exists already. Choose another name with -o, or remove it.")
    seconds = in_seconds(time)
    runs = [Run(text(location), open_location(location)) for location in find_systems(entries)]
    type_map = adopt_type_map([s for run in runs for s in run.systems])
    for run in runs:
        for system in run.systems:
            system.use_type_map(type_map)
    training, validation = split(runs)
    plan = draft(type_map, training, validation, runs)
    log.info(f"{sum(r.frames for r in runs)} frames of {len(runs)} runs, types {', '.join(type_map)}")
    log.info(f"validation: {', '.join(validation) if validation else 'none, for every run is too short'}")
    log.info("timing a few steps with batches of several sizes")
    mixed = mixed_batch([s for run in runs for s in run.systems])
    chosen = full(times_of_steps(plan, [mixed] if mixed else SIZES))
    each = chosen["seconds"]
    steps = max(LEAST, int(seconds / each))
    if steps > seconds / each:
        log.warning(f"{time} is short: {LEAST} steps, the least worth doing, take about {LEAST * each:.0f} s")
    plan["training"]["training_data"]["batch_size"] = chosen["batch"]
    plan["training"] |= {"numb_steps": steps, "disp_freq": max(10, steps // 100), "save_freq": max(1, steps // 10)}
    Path(output).write_text(pretty(plan), encoding="utf-8")
    log.info(f"{1000 * each:.1f} ms a step here with batch_size {chosen['batch']}, so {steps} steps")
    log.info(f"wrote {output}; next: dp train {output}")


def pretty(plan: dict[str, Any]) -> str:
    """JSON with short lists in one line."""
    text = json.dumps(plan, indent=4, ensure_ascii=False)
    return (
        re.sub(r"\[\s+[^\[\]{}]*\]", lambda m: " ".join(m[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
        + "\n"
    )


def in_seconds(time: str) -> float:
    """10m, 1.5h, 1d, 90s."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([smhd])", time)
    if not match or float(match[1]) == 0:
        raise UserError(f"--time {time}: expected a number and one of s, m, h, d, such as 10m or 1.5h.")
    return float(match[1]) * SECONDS[match[2]]


def text(location: Location) -> str:
    assert isinstance(location, str)  # the command line has no objects
    return location


def split(runs: list[Run]) -> tuple[list[str], list[str]]:
    """Entries for training and for validation."""
    if len(runs) >= RUNS:
        held = held_back(runs)
        return [r.location for r in runs if r not in held], [r.location for r in held]
    training, validation = [], []
    for run in runs:
        parts = run.cut()
        training.append(parts[0] if parts else run.location)
        validation += [parts[1]] if parts else []
    return training, validation


def held_back(runs: list[Run]) -> list[Run]:
    """Every SHARE-th run, but none without which a type would be missing in training."""
    held: list[Run] = []
    for run in runs[SHARE - 1 :: SHARE]:
        rest = {name for r in runs if r is not run and r not in held for name in types_of(r)}
        if types_of(run) <= rest:
            held.append(run)
    return held


def types_of(run: Run) -> set[str]:
    found: set[str] = set()
    for s in run.systems:
        found |= set(s.type_map) if s.mixed else {s.type_map[t] for t in set(s.model_types.tolist())}
    return found


def draft(type_map: list[str], training: list[str], validation: list[str], runs: list[Run]) -> dict[str, Any]:
    """The input but for its number of steps."""
    systems = [s for run in runs for s in run.systems]
    virial = 0.02 if all("virial" in s.label_names for s in systems) else 0.0
    data: dict[str, Any] = {"training_data": {"systems": training}}
    if validation:
        data["validation_data"] = {"systems": validation, "batch_size": f"auto:{ATOMS}", "numb_btch": 4}
    return {
        "_comment": "written by dp init; every key is described by `dp doc-train-input`",
        "model": {
            "type_map": type_map,
            "descriptor": {
                "type": "se_e2_a",
                "_sel": "most neighbours of each type within rcut, and a tenth more",
                "sel": sel_of(systems),
                "rcut": RCUT,
                "rcut_smth": 0.5,
                "neuron": [25, 50, 100],
                "axis_neuron": 16,
                "type_one_side": True,
                "precision": "float32",
                "seed": 1,
            },
            "fitting_net": {"neuron": [128, 128, 128], "resnet_dt": True, "precision": "float32", "seed": 1, **FITTING},
        },
        "learning_rate": RATE,
        "optimizer": OPTIMIZER,
        "loss": with_loss(
            {
                "type": "ener",
                "_prefactors": "forces first, energies at the end",
                "start_pref_e": 0.02,
                "limit_pref_e": 1,
                "start_pref_f": 1000,
                "limit_pref_f": 1,
                "start_pref_v": virial,
                "limit_pref_v": 1.0 if virial else 0.0,
            }
        ),
        "training": {
            **data,
            "numb_steps": LEAST,
            "seed": 1,
            **TRAINING,
        },
    }


def sel_of(systems: list[System]) -> list[int]:
    """From at most COUNTED frames, spread over all of them."""
    each = max(1, COUNTED // len(systems))
    some = systems[:: -(-len(systems) // COUNTED)]
    parts: list[System] = [Part(s, range(0, s.nframes, -(-s.nframes // each))) for s in some]
    for part, whole in zip(parts, some, strict=True):
        part.use_type_map(whole.type_map)
    distance, most = count_neighbors(parts, RCUT, SerialComm())
    if distance is None:
        raise UserError(f"dp init: no two atoms of the data are within {RCUT} Å, there is nothing to learn.")
    return [max(4, n) for n in sel_auto(most, "auto:1.1")]


def times_of_steps(plan: dict[str, Any], sizes: list[str]) -> list[dict[str, Any]]:
    """Of batches of these sizes, by a few steps each in a process of their own; see fill.py."""
    short = json.loads(json.dumps(plan))
    for key in ("training_data", "validation_data"):
        if key in short["training"]:
            short["training"][key]["systems"] = [os.path.abspath(s) for s in short["training"][key]["systems"]]
    with tempfile.TemporaryDirectory(prefix="allforce-init-") as folder:
        (Path(folder) / "input.json").write_text(json.dumps(short))
        command = [sys.executable, "-m", "allforce.train.fill", "input.json", *sizes]
        path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise UserError(f"dp init: a training with this data fails:\n{done.stderr.strip().splitlines()[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()]
