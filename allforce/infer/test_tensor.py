"""`dp test` of models that predict tensors: RMSE of dipoles or polarizabilities."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from allforce.data.system import System
from allforce.errors import UserError
from allforce.infer.metrics import Errors
from allforce.infer.tensor import DeepDipole, DeepPolar, DeepTensor
from allforce.models import Model

log = logging.getLogger("deepmd.entrypoints.test")

# output -> (its class, label of the data, name in the log, names of its components)
KINDS: dict[str, tuple[type[DeepTensor], str, str, tuple[str, ...]]] = {
    "dipole": (DeepDipole, "dipole", "Dipole", ("x", "y", "z")),
    "polar": (DeepPolar, "polarizability", "Polarizability", tuple(f"p{a}{b}" for a in "xyz" for b in "xyz")),
}
# quantity -> its name in the log
METRICS = {"rmse": "RMSE       ", "rmse_sqrtn": "RMSE/sqrtN ", "rmse_n": "RMSE/N     "}


def tensor_test(model: Model, detail_file: str | None) -> TensorTest | None:
    """The test of a model whose fitting is one of tensors, None for any other."""
    if "atomic selection" not in model.outputs:
        return None
    kind = next(kind for kind in KINDS if kind in model.outputs)
    return TensorTest(model, kind, None if detail_file is None else TensorDetails(detail_file))


class TensorDetails:
    """The file PREFIX.out: labels, then predictions; of later systems PREFIX.out.1, PREFIX.out.2, …"""

    def __init__(self, prefix: str):
        self.prefix, self.count = Path(prefix), 0
        if not self.prefix.parent.is_dir():
            raise UserError(f"--detail-file {prefix}: the directory {self.prefix.parent} does not exist.")

    def write(self, labels: np.ndarray, found: np.ndarray, names: list[str]) -> None:
        header = " ".join(f"{which}_{name}" for which in ("data", "pred") for name in names)
        path = self.prefix.with_suffix(".out" if self.count == 0 else f".out.{self.count}")
        np.savetxt(path, np.hstack([labels, found]), header=header)
        self.count += 1


class TensorTest:
    """Of frames, or with `atomic` of the atoms of selected types."""

    not_averaged = ("rmse_sqrtn", "rmse_n")

    def __init__(self, model: Model, kind: str, details: TensorDetails | None):
        of_kind, self.label, self.title, self.components = KINDS[kind]
        self.kind, self.dp, self.details = kind, of_kind(model), details

    def system(self, system: System, frames: np.ndarray, atomic: bool) -> dict[str, Errors]:
        label = f"atom_{self.label}" if atomic else self.label
        if label not in system.label_names:
            other = f"atomic_{self.label}.npy" if atomic else f"{self.label}.npy. With -a atomic tensors are tested"
            raise UserError(f"{system.name}: has no {other}.")
        errors: dict[str, Errors] = {}
        selected, rows = self.dp.get_sel_type(), []
        wanted = f"atomic {self.kind}" if atomic else self.kind
        labelled = (system.frame(int(k)) for k in frames)
        predicted = self.dp.evaluate((system.frame(int(k)) for k in frames), (wanted,))
        for frame, result in zip(labelled, predicted, strict=True):
            mask = np.isin(frame.type, selected)
            n = int(mask.sum())
            true, found = frame.labels[label], result[wanted]
            true, found = (true[mask], found[mask]) if atomic else (true, found)
            difference = found.ravel() - true.ravel()
            errors.setdefault("rmse", Errors()).add(difference)
            if not atomic and n:
                errors.setdefault("rmse_sqrtn", Errors()).add(difference / np.sqrt(n))
                errors.setdefault("rmse_n", Errors()).add(difference / n)
            rows.append((true.ravel(), found.ravel()))
        if self.details is not None:
            if len({len(a) for a, _ in rows}) > 1:
                raise UserError(f"{system.name}: frames differ in the number of selected atoms; test without -d.")
            names = [f"{c}{k}" for k in range(1, n + 1) for c in self.components] if atomic else list(self.components)
            self.details.write(np.array([a for a, _ in rows]), np.array([b for _, b in rows]), names)
        return errors

    def log(self, errors: dict[str, Errors]) -> None:
        for name, text in METRICS.items():
            if name in errors and errors[name].weight > 0:
                log.info("%s  %s: %e", self.title, text, errors[name].rmse)
        log.info("The unit of error is the same as the unit of provided label.")
