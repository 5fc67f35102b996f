"""Draw a learning curve: python plot_lcurve.py [lcurve.out [learning_curve.png]]"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, not a window
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator

PANELS = {  # column of lcurve.out: (title, factor from eV)
    "rmse_e": ("energy, meV/atom", 1000.0),
    "rmse_f": ("force, meV/Å", 1000.0),
    "rmse_v": ("virial, meV/atom", 1000.0),
}
STYLES = {"trn": ("training", "#9db8d9", 1.0), "val": ("validation", "#c8452d", 1.8)}


def read(path: Path) -> dict[str, np.ndarray]:
    """The columns of lcurve.out by name; a run that was restarted has several headers, all alike."""
    with path.open() as lines:
        names = next(lines).lstrip("#").split()
    values = np.loadtxt(path, ndmin=2)
    if values.shape[1] != len(names):
        raise SystemExit(f"{path}: the header names {len(names)} columns, the rows have {values.shape[1]}")
    return dict(zip(names, values.T, strict=True))


def draw(columns: dict[str, np.ndarray], picture: Path) -> None:
    shown = [name for name in PANELS if f"{name}_trn" in columns and np.isfinite(columns[f"{name}_trn"]).any()]
    figure, panels = plt.subplots(1, len(shown), figsize=(4 * len(shown), 3.2), squeeze=False, layout="constrained")
    for panel, name in zip(panels[0], shown, strict=True):
        title, factor = PANELS[name]
        for kind, (label, color, width) in STYLES.items():
            if f"{name}_{kind}" in columns:
                panel.semilogy(columns["step"], factor * columns[f"{name}_{kind}"], color=color, lw=width, label=label)
        panel.set(title=f"RMSE of the {title}", xlabel="step")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
        panel.grid(alpha=0.3, which="both", lw=0.5)
    panels[0, 0].legend(frameon=False)
    figure.savefig(picture, dpi=140)


if __name__ == "__main__":
    arguments = [Path(a) for a in sys.argv[1:]]
    source, target = (arguments + [Path("lcurve.out"), Path("learning_curve.png")][len(arguments) :])[:2]
    draw(read(source), target)
    print(f"{target}: learning curve of {source}")
