"""`dp model-devi`: how much the predictions of several models differ.

σ_i  = ‖std over models of F_i‖₂           max, min and mean over the atoms
v    = std over models of Ξ/n              max and min of its 9 components, and their root mean square
e    = std over models of E/n
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from allforce.data.batch import Frame
from allforce.data.system import System
from allforce.errors import UserError
from allforce.infer.evaluate import Result
from allforce.infer.predict import DEFAULT, DeepPot
from allforce.infer.systems import select_systems

log = logging.getLogger("deepmd.infer.model_devi")

CHUNK = 64
COLUMNS = ("max_devi_v", "min_devi_v", "avg_devi_v", "max_devi_f", "min_devi_f", "avg_devi_f", "devi_e")


def model_devi(
    models: Sequence[str],
    system: str = ".",
    output: str = "model_devi.out",
    frequency: int = 1,
    real_error: bool = False,
    atomic: bool = False,
    relative: float | None = None,
    relative_v: float | None = None,
) -> None:
    """Append one block for each system to the output: a row for each frame, step = frame number × frequency."""
    if len(models) < 2 and not real_error:
        raise UserError(f"model-devi needs at least two models, found {len(models)}. Give them after -m.")
    potentials = [DeepPot(model, parallel=False) for model in models]
    type_map = potentials[0].get_type_map()
    for name, other in zip(models, potentials, strict=True):
        if other.get_type_map() != type_map:
            raise UserError(f"{name} has the type map {other.get_type_map()}, but {models[0]} has {type_map}.")
    for one in select_systems(type_map, system):
        if real_error and not {"energy", "force"} <= one.label_names:
            raise UserError(
                f"{one.name}: --real_error needs the labels energy and force, found {sorted(one.label_names)}."
            )
        rows = [
            deviation(frame, results, real_error, relative, relative_v)
            for frame, *results in _evaluated(one, potentials)
        ]
        write(Path(output), one.name, rows, frequency, atomic)
        log.info("# %s: deviation of %d models on %d frames written to %s", one.name, len(models), len(rows), output)


def _evaluated(system: System, potentials: Sequence[DeepPot]) -> Iterator[tuple]:
    """(frame, result of each model), CHUNK frames in memory at a time."""
    for start in range(0, system.nframes, CHUNK):
        frames = [system.frame(k) for k in range(start, min(start + CHUNK, system.nframes))]
        yield from zip(frames, *(dp.evaluate(frames, DEFAULT) for dp in potentials), strict=True)


def deviation(
    frame: Frame,
    results: Sequence[Result],
    real_error: bool = False,
    relative: float | None = None,
    relative_v: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The 7 numbers of a row, and σ_i (n,) of the real atoms. real_error: root mean square error in place of std."""
    real = frame.type >= 0
    n = int(real.sum())

    def spread(name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Deviation over the models (axis 0), and what it is relative to."""
        if not real_error:
            return values.std(axis=0), values.mean(axis=0)
        label = frame.labels.get(name)
        if label is None:
            return np.full(values.shape[1:], np.nan), np.full(values.shape[1:], np.nan)
        reference = label.reshape(-1, 3)[real] if name == "force" else label.reshape(values.shape[1:]) / n
        return np.sqrt(((values - reference) ** 2).mean(axis=0)), reference

    f, f_mean = spread("force", np.array([r["forces"][real] for r in results]))  # (n, 3)
    v, v_mean = spread("virial", np.array([r["virial"] for r in results]) / n)  # (9,)
    e, _ = spread("energy", np.array([r["energy"] for r in results]) / n)  # ()
    sigma = np.linalg.norm(f, axis=1)
    if relative is not None:
        sigma = sigma / (np.linalg.norm(f_mean, axis=1) + relative)
    if relative_v is not None:
        v = v / (np.linalg.norm(v_mean) + relative_v)
    row = [v.max(), v.min(), np.linalg.norm(v) / 3.0, sigma.max(), sigma.min(), sigma.mean(), float(e)]
    return np.array(row), sigma


def write(path: Path, system: str, rows: list[tuple[np.ndarray, np.ndarray]], frequency: int, atomic: bool) -> None:
    """Append a block; with atomic, σ_i of every atom follows in its row."""
    names = [*COLUMNS, "atm_devi_f(N)"] if atomic else COLUMNS
    with path.open("a", encoding="utf-8") as file:
        file.write(f"# {system}\n# {'step':<10s}" + "".join(f"{name:<19s}" for name in names) + "\n")
        for k, (row, sigma) in enumerate(rows):
            values = np.concatenate([row, sigma]) if atomic else row
            file.write(f"{k * frequency:12d}" + "".join(f"{x:19.6e}" for x in values) + "\n")
