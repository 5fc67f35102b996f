"""What a run leaves behind, as columns: lcurve.out, details of dp test, scaling.json, timelines, metrics.jsonl."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allforce.errors import UserError

KINDS = "a learning curve (lcurve.out), details of dp test (*.e.out, …), scaling.json of dp scaling-test, or a timeline"
COLUMNS = {  # of a learning curve, without rmse_: (name, unit)
    "e": ("energy", "eV/atom"),
    "f": ("force", "eV/Å"),
    "v": ("virial", "eV/atom"),
}
DETAILS = {  # kind of a detail file: (name, unit)
    "e": ("energy", "eV"),
    "e_peratom": ("energy", "eV/atom"),
    "f": ("force", "eV/Å"),
    "v": ("virial", "eV"),
    "v_peratom": ("virial", "eV/atom"),
    "s": ("stress", "eV/Å³"),
}


@dataclass
class Curve:
    """The columns of a learning curve by name; `step` and `lr` among them."""

    label: str
    columns: dict[str, np.ndarray]

    @property
    def quantities(self) -> list[str]:
        """rmse, rmse_e, …: those with a number in them."""
        names = dict.fromkeys(n.removesuffix("_trn") for n in self.columns if n.endswith("_trn"))
        return [n for n in names if np.isfinite(self.columns[f"{n}_trn"]).any()]


@dataclass
class Parity:
    """Predictions against labels, all components in a row."""

    label: str
    kind: str  # e, f, …
    data: np.ndarray
    pred: np.ndarray

    @property
    def rmse(self) -> float:
        return float(np.sqrt(np.mean((self.pred - self.data) ** 2)))

    @property
    def mae(self) -> float:
        return float(np.mean(np.abs(self.pred - self.data)))

    @property
    def quantity(self) -> tuple[str, str]:
        """Name and unit."""
        return DETAILS.get(self.kind, (self.kind, ""))


@dataclass
class Phases:
    """A timeline: begin and length (s) of every phase, by rank and thread."""

    label: str
    rows: dict[tuple[int, str], list[tuple[str, float, float]]]


@dataclass
class Scaling:
    """What dp scaling-test measured: rows with workers, engine, rates, communication, waiting."""

    label: str
    title: str
    rows: list[dict[str, Any]]


def title_of(quantity: str) -> str:
    """Of a column of a learning curve: "RMSE of the force, eV/Å"."""
    name, unit = COLUMNS.get(quantity.removeprefix("rmse_").removeprefix("mae_"), (quantity, ""))
    kind = "MAE" if quantity.startswith("mae") else "RMSE"
    return (
        f"{kind} of the {name}, {unit}" if unit else f"{name} (weighted error of all terms)" if name == "rmse" else name
    )


def read(path: str | Path) -> Curve | Parity | Phases | Scaling:
    """Whatever the file is, by its content; a folder is its lcurve.out."""
    path = Path(path)
    path = path / "lcurve.out" if path.is_dir() else path
    with path.open(errors="replace") as file:
        head = file.read(400)
    if re.match(r"#\s*step\s", head):
        return read_curve(path)
    if re.match(r"#.*\bdata_\w+.* pred_\w+", head):
        return read_parity(path)
    if head.lstrip().startswith(("{", "[")):
        return _read_json(path)
    raise UserError(f"{path}: is neither {KINDS}.")


def read_curve(path: Path) -> Curve:
    """A run that was restarted has several headers, all alike; a last line that is being written is left out."""
    names: list[str] = []
    rows = []
    for line in path.read_text().splitlines():
        words = line.lstrip("# ").split()
        if line.startswith("#") and words[:1] == ["step"]:
            if names and words != names:
                raise UserError(f"{path}: has headers with different columns; it is made of different runs.")
            names = words
        elif line.strip() and not line.startswith("#") and len(words) == len(names):
            rows.append([float(word) for word in words])
    if not rows:
        raise UserError(f"{path}: has no rows yet.")
    return Curve(str(path), dict(zip(names, np.array(rows).T, strict=True)))


def read_parity(path: Path) -> Parity:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        raise UserError(f"{path}: has no rows.")
    values = np.loadtxt(lines, ndmin=2)
    half = values.shape[1] // 2
    data, pred = values[:, :half].ravel(), values[:, half:].ravel()
    known = np.isfinite(data)  # a label that the data does not have is nan
    kind = path.name.split(".")[-2] if path.name.count(".") >= 2 else "f"
    if not known.any():
        raise UserError(f"{path}: has no labels.")
    return Parity(str(path), kind, data[known], pred[known])


def _read_json(path: Path) -> Phases | Scaling:
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: is no valid JSON ({error}).") from None
    if isinstance(content, dict) and "scaling" in content:
        return Scaling(str(path), content["title"], content["scaling"])
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise UserError(f"{path}: is neither {KINDS}.")
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    rows: dict[tuple[int, str], list[tuple[str, float, float]]] = {}
    for e in events:
        if e.get("ph") == "X":
            key = e["pid"], threads.get((e["pid"], e["tid"]), str(e["tid"]))
            rows.setdefault(key, []).append((e["name"], 1e-6 * e["ts"], 1e-6 * e["dur"]))
    order = sorted(rows, key=lambda key: (key[0], key[1] != "main", key[1]))
    return Phases(str(path), {key: sorted(rows[key], key=lambda r: r[1]) for key in order})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl; a last line that is being written is left out."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found
