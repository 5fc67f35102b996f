"""`dp test`: errors of a model on labelled data.

MAE = Σ|d|/n, RMSE = √(Σd²/n) over all n numbers of a quantity. The sums are kept, so the average over systems is that
of all their numbers together: MAE weighted by n, RMSE the root of the weighted mean square.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from allforce.data.batch import Frame
from allforce.data.system import System
from allforce.errors import UserError
from allforce.infer.evaluate import AnyModel, Evaluator, Result
from allforce.infer.metrics import Errors
from allforce.infer.predict import DEFAULT
from allforce.infer.systems import select_systems
from allforce.infer.test_tensor import tensor_test

log = logging.getLogger("deepmd.entrypoints.test")

XYZ = ("xx", "xy", "xz", "yx", "yy", "yz", "zx", "zy", "zz")
CHUNK = 64  # frames between two writes to the detail files

# quantity -> (label of the MAE line, label of the RMSE line, unit), in the order of the output
METRICS = {
    "energy": ("Energy MAE", "Energy RMSE", "eV"),
    "energy_peratom": ("Energy MAE/Natoms", "Energy RMSE/Natoms", "eV"),
    "force": ("Force  MAE", "Force  RMSE", "eV/Å"),
    "force_weighted": ("Force weighted MAE", "Force weighted RMSE", "eV/Å"),
    "virial": ("Virial MAE", "Virial RMSE", "eV"),
    "virial_peratom": ("Virial MAE/Natoms", "Virial RMSE/Natoms", "eV"),
    "stress": ("Stress MAE", "Stress RMSE", "eV/Å³"),
    "atom_energy": ("Atomic ener MAE", "Atomic ener RMSE", "eV"),
    "dos": ("DOS MAE", "DOS RMSE", "Occupation/eV"),
    "dos_peratom": ("DOS MAE/Natoms", "DOS RMSE/Natoms", "Occupation/eV"),
    "atom_dos": ("Atomic DOS MAE", "Atomic DOS RMSE", "Occupation/eV"),
    "property": ("PROPERTY MAE", "PROPERTY RMSE", "units"),
    "atom_property": ("Atomic PROPERTY MAE", "Atomic PROPERTY RMSE", "units"),
    "dipole": ("Dipole MAE", "Dipole RMSE", "e·Å"),
    "dipole_norm": ("Dipole length MAE", "Dipole length RMSE", "e·Å"),
}
WANTED = (
    *(*DEFAULT, "atomic energy", "dipole", "dipole norm", "dos", "atomic dos"),
    *("property", "atomic property"),
)
NOT_AVERAGED = ("atom_energy", "atom_property")


def run_test(
    model: str,
    system: str | None = None,
    datafile: str | None = None,
    train_data: str | None = None,
    valid_data: str | None = None,
    numb_test: int = 0,
    rand_seed: int | None = None,
    shuffle_test: bool = False,
    detail_file: str | None = None,
    atomic: bool = False,
) -> dict[str, Errors]:
    """Log the errors on every system and their average, which is also returned. Of several workers rank 0 writes."""
    dp = AnyModel(model)
    detail_file = detail_file if dp.workers.rank == 0 else None
    tensor = tensor_test(dp.model, detail_file)
    named = named_labels(dp, atomic)
    systems = select_systems(dp.get_type_map(), system, datafile, train_data, valid_data, named)
    rng = np.random.default_rng(rand_seed)
    details = None if detail_file is None or tensor is not None else Details(detail_file)
    show, own = (log_errors, NOT_AVERAGED) if tensor is None else (tensor.log, tensor.not_averaged)
    total: dict[str, Errors] = {}
    for one in systems:
        frames = chosen_frames(one, numb_test, rng if shuffle_test else None)
        if details is not None:
            details.system = one.name
        log.info("# ---------------output of dp test--------------- ")
        log.info("# testing system : %s", one.name)
        if tensor is None:
            errors = test_system(dp, one, frames, atomic, details)
        else:
            errors = tensor.system(one, frames, atomic)
        log.info("# number of test data : %d ", len(frames))
        show(errors)
        log.info("# ----------------------------------------------- ")
        for name in errors.keys() - set(own):
            total[name] = total.get(name, Errors()) + errors[name]
    log.info("# ----------weighted average of errors----------- ")
    log.info("# number of systems : %d", len(systems))
    show(total)
    log.info("# ----------------------------------------------- ")
    return total


def named_labels(dp: Evaluator, atomic: bool) -> dict[str, tuple[str, int]]:
    """Labels that the model names; with `atomic` also those of atoms, which begin with atom_."""
    named = dp.model.config.named_labels()
    of_atoms = {f"atom_{label}": (f"atom_{name}", width) for label, (name, width) in named.items()}
    return named | of_atoms if atomic else named


def chosen_frames(system: System, numb_test: int, rng: np.random.Generator | None) -> np.ndarray:
    """The first numb_test frames (0: all), after shuffling when there is a generator."""
    frames = np.arange(system.nframes) if rng is None else rng.permutation(system.nframes)
    return frames[:numb_test] if numb_test > 0 else frames


def test_system(
    dp: Evaluator, system: System, frames: np.ndarray, atomic: bool = False, details: Details | None = None
) -> dict[str, Errors]:
    files = {label: name for label, (name, _) in named_labels(dp, atomic).items()}
    if atomic and not files:
        usual = "atom_dos" if "dos" in dp.model.outputs else "atom_ener"
        files = {usual: usual}
    for label, file in files.items():
        if label not in system.label_names:
            why = "which --atomic needs. Leave out -a or" if label.startswith("atom_") else "what the model predicts:"
            raise UserError(f"{system.name}: has no {file}.npy, {why} add the labels.")
    errors: dict[str, Errors] = {}
    for pairs in _chunks(dp, system, frames):
        for frame, result in pairs:
            for name, difference, weight in differences(frame, result, atomic):
                errors.setdefault(name, Errors()).add(difference, weight)
        if details is not None:
            details.write(pairs, system.periodic)
    return errors


def _chunks(dp: Evaluator, system: System, frames: np.ndarray) -> Iterator[list[tuple[Frame, Result]]]:
    """Frames with their results, CHUNK at a time: memory does not grow with the system."""
    wanted, units = [name for name in WANTED if name in dp.model.outputs], dp.model.label_units
    for start in range(0, len(frames), CHUNK):
        part = [_in_units(system.frame(int(k)), units) for k in frames[start : start + CHUNK]]
        yield list(zip(part, dp.evaluate(part, wanted), strict=True))


def _in_units(frame: Frame, units: Mapping[str, float]) -> Frame:
    """The frame with its labels in eV, Å, e·Å."""
    labels = {name: value * units[name] if name in units else value for name, value in frame.labels.items()}
    return replace(frame, labels=labels) if units else frame


def differences(frame: Frame, result: Result, atomic: bool) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """(quantity, prediction - label, weight) of what the frame has labels for."""
    labels, real = frame.labels, frame.type >= 0
    n = int(real.sum())
    if "energy" in labels and "energy" in result:
        d = result["energy"] - labels["energy"].ravel()
        yield "energy", d, None
        yield "energy_peratom", d / n, None
    if "force" in labels and "forces" in result:
        d = (result["forces"] - labels["force"].reshape(-1, 3))[real]
        yield "force", d, None
        if "atom_pref" in labels:
            yield "force_weighted", d, np.repeat(labels["atom_pref"].reshape(-1, 1)[real], 3, axis=1)
    if "virial" in labels and "virial" in result and frame.cell is not None:
        d = result["virial"] - labels["virial"].ravel()
        yield "virial", d, None
        yield "virial_peratom", d / n, None
        yield "stress", -d / abs(np.linalg.det(frame.cell)), None
    if "dipole" in labels and "dipole" in result:
        yield "dipole", result["dipole"].ravel() - labels["dipole"].ravel(), None
    if "dipole norm" in result and {"dipole", "dipole_norm"} & labels.keys():
        length = labels["dipole_norm"] if "dipole_norm" in labels else np.linalg.norm(labels["dipole"])
        yield "dipole_norm", result["dipole norm"].ravel() - np.ravel(length), None
    if "dos" in labels and "dos" in result:
        d = result["dos"] - labels["dos"].ravel()
        yield "dos", d, None
        yield "dos_peratom", d / n, None
    if atomic and "atom_dos" in labels and "atomic dos" in result:
        yield "atom_dos", (result["atomic dos"] - labels["atom_dos"])[real], None
    if "property" in labels and "property" in result:
        yield "property", result["property"] - labels["property"].ravel(), None
    if atomic and "atom_property" in labels and "atomic property" in result:
        yield "atom_property", (result["atomic property"] - labels["atom_property"])[real], None
    if atomic and "atom_ener" in labels and "atomic energy" in result:
        yield "atom_energy", (result["atomic energy"] - labels["atom_ener"].ravel())[real], None


def log_errors(errors: dict[str, Errors]) -> None:
    """Lines grouped by quantity: MAE, RMSE, then both per atom."""
    for name, (mae, rmse, unit) in METRICS.items():
        if name in errors:
            value = errors[name]
            if value.weight == 0.0:
                continue
            log.info("%-19s: %e %s", mae, value.mae, unit)
            log.info("%-19s: %e %s", rmse, value.rmse, unit)


class Details:
    """The files PREFIX.e.out, .e_peratom.out, .f.out, .v.out, .v_peratom.out, .s.out; .dipole.out; .dos.out;
    .property.out.

    Labels, then predictions. A label that the data does not have is written as nan. The header names the first system;
    rows of later ones follow.
    """

    def __init__(self, prefix: str):
        self.prefix, self.system = Path(prefix), ""
        self.started: set[str] = set()  # kinds of files begun
        if not self.prefix.parent.is_dir():
            raise UserError(f"--detail-file {prefix}: the directory {self.prefix.parent} does not exist.")

    def write(self, pairs: list[tuple[Frame, Result]], periodic: bool) -> None:
        if "dipole" in pairs[0][1]:
            d = np.array([np.concatenate([_label(f, "dipole", 3), r["dipole"]]) for f, r in pairs])
            self._save("dipole", " ".join(f"{which}_d{x}" for which in ("data", "pred") for x in "xyz"), d)
        for kind in ("dos", "property"):
            if kind in pairs[0][1]:  # a line for each number: of the grid of energies, of the property
                columns = [np.stack([_label(f, kind, r[kind].size), r[kind].ravel()], 1) for f, r in pairs]
                self._save(kind, f"data_{kind} pred_{kind}", np.concatenate(columns))
        if "energy" in pairs[0][1]:
            self._potential(pairs, periodic)

    def _potential(self, pairs: list[tuple[Frame, Result]], periodic: bool) -> None:
        atoms = np.array([[int((f.type >= 0).sum())] for f, _ in pairs])  # (nf, 1)
        e = np.array([[_label(f, "energy", 1)[0], r["energy"]] for f, r in pairs])
        self._save("e", "data_e pred_e", e)
        self._save("e_peratom", "data_e pred_e", e / atoms)
        forces = [np.hstack([_label(f, "force", 3 * len(f.type)).reshape(-1, 3), r["forces"]]) for f, r in pairs]
        f_columns = " ".join(f"{which}_f{x}" for which in ("data", "pred") for x in "xyz")
        self._save("f", f_columns, np.concatenate(forces))
        v = np.array([np.concatenate([_label(f, "virial", 9), r["virial"]]) for f, r in pairs])
        v_columns = " ".join(f"{which}_v{x}" for which in ("data", "pred") for x in XYZ)
        self._save("v", v_columns, v)
        self._save("v_peratom", v_columns, v / atoms)
        if periodic and "virial" in pairs[0][0].labels:
            volume = np.array([[abs(np.linalg.det(f.cell))] for f, _ in pairs if f.cell is not None])
            s_columns = " ".join(f"{which}_s{x}" for which in ("data", "pred") for x in XYZ)
            self._save("s", s_columns, -v / volume, unit=" (eV/Å³)")

    def _save(self, kind: str, columns: str, rows: np.ndarray, unit: str = "") -> None:
        path = self.prefix.with_suffix(f".{kind}.out")
        append = kind in self.started
        header = "" if append else f"{self.system}{unit}: {columns}"
        self.started.add(kind)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            np.savetxt(file, rows, header=header)


def _label(frame: Frame, name: str, width: int) -> np.ndarray:
    value = frame.labels.get(name)
    return np.full(width, np.nan) if value is None else value.ravel()
