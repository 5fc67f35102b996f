"""`dp plot`: learning curves, parity plots, scaling and timelines, as pictures or in the terminal."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from allforce.errors import UserError
from allforce.report.read import KINDS, Curve, Parity, Phases, Scaling, read, title_of
from allforce.writing import write_whole

STEPS_SHOWN = 3  # of a timeline
SHADES = {"trn": (0.45, 1.0, "training"), "val": (1.0, 1.8, "validation")}  # opacity, width, name


def plot(files: list[str], output: str | None = None, term: bool = False) -> Path | None:
    """Draw what the files are, all of one kind, several learning curves over each other. The picture, if not `term`."""
    things: list[Any] = [read(f) for f in files]
    kinds = {type(thing) for thing in things}
    if len(kinds) > 1:
        raise UserError(f"dp plot: the files are of different kinds; give one of {KINDS} at a time, or several alike.")
    kind = kinds.pop()
    if term:
        _in_terminal(kind, things)
        return None
    target = Path(output or NAMES[kind])
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"-o {target}: a picture's name should end in .png, .svg or .pdf.")
    pyplot = _pyplot()
    figure = DRAW[kind](pyplot, things)
    picture = BytesIO()
    figure.savefig(picture, dpi=140, format=target.suffix[1:].lower())
    pyplot.close(figure)
    write_whole(target, picture.getvalue())
    return target


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("dp plot needs matplotlib: pip install allforce[plot].") from None
    matplotlib.use("Agg")  # a file, not a window
    from matplotlib import pyplot

    return pyplot


def _common(labels: list[str]) -> list[str]:
    """Labels without the folders that all of them share."""
    if len(labels) < 2:
        return labels
    start = os.path.commonpath([os.path.dirname(label) or "." for label in labels])
    return [os.path.relpath(label, start) for label in labels]


# ---- pictures


def draw_curves(pyplot: Any, curves: list[Curve]) -> Any:
    from matplotlib.ticker import LogLocator

    shown = list(dict.fromkeys(q for curve in curves for q in curve.quantities if q not in ("rmse", "mae")))
    shown = shown or ["rmse"]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(4 * len(shown), 3.4), squeeze=False, layout="constrained")
    for panel, quantity in zip(panels[0], shown, strict=True):
        for k, (curve, label) in enumerate(zip(curves, _common([c.label for c in curves]), strict=True)):
            for end, (alpha, width, name) in SHADES.items():
                values = curve.columns.get(f"{quantity}_{end}")
                if values is not None and np.isfinite(values).any():
                    text = name if len(curves) == 1 else f"{label}, {name}"
                    color = f"C{k}" if len(curves) > 1 else {"trn": "#9db8d9", "val": "#c8452d"}[end]
                    opacity = alpha if len(curves) > 1 else 1.0
                    panel.semilogy(curve.columns["step"], values, color=color, alpha=opacity, lw=width, label=text)
        panel.set(title=title_of(quantity), xlabel="step")
        panel.title.set_fontsize("medium")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
        panel.grid(alpha=0.3, which="both", lw=0.5)
    panels[0, 0].legend(frameon=False, fontsize="small")
    return figure


def draw_parity(pyplot: Any, parities: list[Parity]) -> Any:
    from matplotlib.ticker import MaxNLocator

    n = len(parities)
    figure, panels = pyplot.subplots(1, n, figsize=(3.8 * n, 3.8), squeeze=False, layout="constrained")
    for panel, p in zip(panels[0], parities, strict=True):
        name, unit = p.quantity
        ends = [min(p.data.min(), p.pred.min()), max(p.data.max(), p.pred.max())]
        panel.plot(ends, ends, color="grey", lw=0.8)
        panel.plot(p.data, p.pred, ".", ms=2, alpha=0.5, rasterized=len(p.data) > 5000)
        panel.set(title=f"{name}: RMSE {p.rmse:.3g} {unit}", xlabel=f"label, {unit}", ylabel=f"prediction, {unit}")
        panel.title.set_fontsize("medium")
        panel.set_aspect("equal", "datalim")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(MaxNLocator(4))
    return figure


def draw_scaling(pyplot: Any, scalings: list[Scaling]) -> Any:
    figure, axes = pyplot.subplots(figsize=(5, 4), layout="constrained")
    workers = sorted({row["workers"] for s in scalings for row in s.rows})
    axes.plot(workers, workers, "--", color="grey", label="ideal")
    for scaling, label in zip(scalings, _common([s.label for s in scalings]), strict=True):
        for engine, rows in by_engine(scaling.rows).items():
            text = engine if len(scalings) == 1 else f"{label}, {engine}"
            x, up, spread = (np.array([row[k] for row in rows]) for k in ("workers", "speed_up", "spread"))
            axes.errorbar(x, up, spread * up, fmt="o-", capsize=3, label=text)
    axes.set(xlabel="workers", ylabel="speed up", xticks=workers, title=scalings[0].title)
    axes.title.set_fontsize("medium")
    axes.legend(frameon=False)
    return figure


def by_engine(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """A curve for each engine; the row of one worker, which needs none, belongs to all."""
    engines = list(dict.fromkeys(row["engine"] for row in rows if row["workers"] > 1)) or ["serial"]
    chosen = {e: [row for row in rows if row["engine"] == e or row["workers"] == 1] for e in engines}
    return {e: sorted(found, key=lambda row: row["workers"]) for e, found in chosen.items()}


def draw_timelines(pyplot: Any, timelines: list[Phases]) -> Any:
    """Some steps in the middle: what every worker did, threads below each other."""
    from matplotlib.patches import Patch

    n = len(timelines)
    height = max(1.8, 0.32 * max(len(t.rows) for t in timelines) + 1.2)
    figure, panels = pyplot.subplots(n, 1, figsize=(10, height * n), squeeze=False, layout="constrained")
    names = list(dict.fromkeys(p for t in timelines for row in t.rows.values() for p, _, _ in row))
    shades = pyplot.get_cmap("tab20").colors  # the strong ones first
    colors = {name: shades[(2 * k + k // 10) % 20] for k, name in enumerate(names)}
    for panel, timeline in zip(panels[:, 0], timelines, strict=True):
        begin, end = window(timeline)
        for line, row in enumerate(timeline.rows.values()):
            inside = [(p, a, d) for p, a, d in row if a + d >= begin and a <= end]
            inside.sort(key=lambda r: -r[2])  # long ones first: what is inside lies on top
            bars = [(1e3 * (a - begin), 1e3 * d) for _, a, d in inside]
            panel.broken_barh(bars, (line - 0.4, 0.8), color=[colors[p] for p, _, _ in inside], lw=0)
        panel.set_yticks(range(len(timeline.rows)), [f"rank {r}, {t}" for r, t in timeline.rows])
        panel.set(xlim=(0, 1e3 * (end - begin)), xlabel="ms", title=timeline.label)
        panel.invert_yaxis()
    handles = [Patch(color=colors[name], label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize="small")
    return figure


def window(timeline: Phases) -> tuple[float, float]:
    """Begin and end of a few steps in the middle, by the updates of the first worker."""
    main = next(iter(timeline.rows.values()), [])
    ends = [a + d for p, a, d in main if p == "optimizer"]
    if len(ends) <= STEPS_SHOWN:
        spans = [(a, a + d) for row in timeline.rows.values() for _, a, d in row]
        return (min(a for a, _ in spans), max(b for _, b in spans)) if spans else (0.0, 1.0)
    middle = len(ends) // 2
    return ends[middle - STEPS_SHOWN // 2 - 1], ends[middle - STEPS_SHOWN // 2 - 1 + STEPS_SHOWN]


# ---- terminal


def _in_terminal(kind: type, things: list[Any]) -> None:
    try:
        import plotext
    except ImportError:
        raise UserError("dp plot --term needs plotext: pip install allforce[plot].") from None
    plotext.clear_figure()
    plotext.theme("clear")
    if kind is Curve:
        quantity = next((q for q in things[0].quantities if q.endswith("_f")), things[0].quantities[0])
        for curve, label in zip(things, _common([c.label for c in things]), strict=True):
            for end, (_, _, name) in SHADES.items():
                values = curve.columns.get(f"{quantity}_{end}")
                if values is not None:
                    known = np.isfinite(values) & (values > 0)
                    text = name if len(things) == 1 else f"{label}, {name}"
                    plotext.plot(curve.columns["step"][known].tolist(), values[known].tolist(), label=text)
        plotext.yscale("log")
        plotext.title(title_of(quantity))
        plotext.xlabel("step")
    elif kind is Parity:
        for p in things:
            plotext.scatter(p.data.tolist(), p.pred.tolist(), label=f"{p.label}: RMSE {p.rmse:.3g}")
        plotext.title("prediction against label")
    elif kind is Scaling:
        for engine, rows in by_engine(things[0].rows).items():
            plotext.plot([r["workers"] for r in rows], [r["speed_up"] for r in rows], label=engine)
        plotext.title(things[0].title)
    else:
        shares = phase_seconds(things[0])
        plotext.simple_bar(
            list(shares), list(shares.values()), title=f"{things[0].label}: seconds of the phases", width=80
        )
    plotext.plotsize(100, 30)
    plotext.show()


def phase_seconds(timeline: Phases) -> dict[str, float]:
    """Seconds of each phase, whatever is inside included, over all training threads."""
    found: dict[str, float] = {}
    for (_, thread), row in timeline.rows.items():
        for name, _, seconds in row if thread == "main" else []:
            found[name] = found.get(name, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


DRAW: dict[type, Any] = {Curve: draw_curves, Parity: draw_parity, Scaling: draw_scaling, Phases: draw_timelines}
NAMES = {Curve: "learning_curve.png", Parity: "parity.png", Scaling: "scaling.png", Phases: "timeline.png"}
