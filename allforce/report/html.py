"""`dp report RUN_DIR`: one HTML file that needs nothing else, with what the run has left in its folder.

The charts are drawn by uPlot (MIT), 50 kB that are put into the file: lines and points with log axes, zoom and values
under the cursor, at a fiftieth of the weight of the large plotting libraries.
"""

from __future__ import annotations

import html
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from allforce.errors import UserError
from allforce.report.read import (
    Parity,
    Scaling,
    read,
    read_curve,
    read_metrics,
    read_parity,
    title_of,
)
from allforce.writing import write_whole

HERE = Path(__file__).parent
POINTS = 3000  # of a parity plot; RMSE and MAE are those of all
ROWS = 4000  # of a curve
SHOWN = ("e_peratom", "f", "v_peratom", "s")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{styles}</style>
</head>
<body>
<span id="live"></span>
<main id="report"></main>
<noscript>This report draws its charts with JavaScript, which is off.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{uplot}</script>
<script>{script}</script>
</body>
</html>
"""


def report(folder: str, output: str | None) -> Path:
    """Write the report of a run; whole or not at all."""
    target = Path(output) if output else Path(folder) / "report.html"
    write_whole(target, page(collect(Path(folder))).encode())
    return target


def page(data: dict[str, Any]) -> str:
    parts = {name: (HERE / name).read_text(encoding="utf-8") for name in FILES}
    return PAGE.format(
        policy=POLICY,
        title=html.escape(data["title"]),
        styles=parts["uplot.min.css"] + parts["report.css"],
        data=as_json(data).replace("</", "<\\/").replace("<!--", "<\\!--"),
        uplot=parts["uplot.min.js"],
        script=parts["report.js"],
    )


FILES = ("uplot.min.css", "report.css", "uplot.min.js", "report.js")


def as_json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def collect(folder: Path) -> dict[str, Any]:
    """Everything the report shows. A file that is not there is left out; without any there is nothing to report."""
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder. Give the one in which a training ran.")
    training = _training(folder)
    metrics = _optional(_in(folder, training.get("metrics_file") or "metrics.jsonl"), read_metrics) or []
    curve = _optional(_in(folder, training.get("disp_file") or "lcurve.out"), read_curve)
    details = [p for kind in SHOWN for p in sorted(folder.glob(f"*.{kind}.out"))]
    parities = [p for path in details if (p := _optional(path, read_parity)) is not None]
    scalings = [s for path in sorted(folder.glob("scaling*.json")) if isinstance(s := _optional(path, read), Scaling)]
    if not metrics and curve is None and not parities and not scalings:
        raise UserError(f"{folder}: has no metrics.jsonl, lcurve.out, details of dp test or scaling.json to report.")
    run = [line["run"] for line in metrics if "run" in line]
    ends = [line["end"] for line in metrics if "end" in line]
    end = ends[-1] if ends and "end" in metrics[-1] else None
    name = folder.resolve().name
    when = datetime.fromtimestamp(max(p.stat().st_mtime for p in folder.iterdir())).strftime("%Y-%m-%d %H:%M")
    state = "finished" if end else "not finished" if metrics else ""
    facts = run[-1] if run else {}
    return {
        "title": f"{name}: {facts.get('input', 'training')}",
        "subtitle": f"{state}{', ' if state else ''}last change {when}",
        "verdict": (end or {}).get("verdict"),
        "facts": facts,
        "metrics": _thin([line for line in metrics if "step" in line]),
        "end": end,
        "curve": None if curve is None else {
            "titles": {q: title_of(q) for q in curve.quantities},
            "columns": {n: _numbers(v) for n, v in curve.columns.items()},
        },
        "parity": [_points(p) for p in parities],
        "scaling": [{"title": s.title, "rows": s.rows} for s in scalings],
        "input_name": "out.json",
        "input": (folder / "out.json").read_text() if (folder / "out.json").exists() else "",
    }  # fmt: skip


def _training(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "out.json").read_text()).get("training", {})
    except (OSError, json.JSONDecodeError):
        return {}


def _in(folder: Path, name: str) -> Path:
    """A file that the input names, seen from where the run was started: above the folder, or in it."""
    return path if (path := folder / name).exists() else folder / Path(name).name


def _optional(path: Path, reader: Any) -> Any:
    """What the file has; None when it is missing, or has nothing yet."""
    try:
        return reader(path)
    except (FileNotFoundError, UserError, ValueError):
        return None


def _thin(rows: list[Any]) -> list[Any]:
    """Evenly fewer of very many, the last among them."""
    every = -(-len(rows) // ROWS)
    return rows[::-every][::-1] if every > 1 else rows


def _numbers(values: np.ndarray) -> list[float | int | None]:
    return _thin(
        [None if not np.isfinite(v) else int(v) if v == int(v) and abs(v) < 2**53 else float(v) for v in values]
    )


def _points(p: Parity) -> dict[str, Any]:
    name, unit = p.quantity
    chosen = np.arange(len(p.data))
    if len(chosen) > POINTS:
        chosen = np.random.default_rng(0).choice(chosen, POINTS, replace=False)
    chosen = chosen[np.argsort(p.data[chosen])]
    data, pred = ([float(f"{v:.6g}") for v in values[chosen]] for values in (p.data, p.pred))
    return {"name": name, "unit": unit, "rmse": p.rmse, "mae": p.mae, "count": len(p.data), "data": data, "pred": pred}
