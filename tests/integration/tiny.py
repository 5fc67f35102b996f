"""A few atoms with energies and forces of soft spheres, and a small model: a training of a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BOX, SPACING = 10.0, 2.6


def soft_spheres(x: np.ndarray, types: np.ndarray) -> tuple[float, np.ndarray]:
    """E = Σ_pairs 4 exp(-r²/σ²) + Σ_i bias, forces: nearest images, σ by the sum of two radii."""
    sigma = np.where(types == 0, 1.2, 0.9)
    sigma = sigma[:, None] + sigma[None, :]
    d = x[None, :] - x[:, None]
    d -= BOX * np.round(d / BOX)  # (n, n, 3) from i to j
    q = 4 * np.exp(-(d**2).sum(-1) / sigma**2) * (1 - np.eye(len(x)))
    energy = 0.5 * q.sum() + np.where(types == 0, -3.0, -1.0).sum()
    return float(energy), -((2 * q / sigma**2)[:, :, None] * d).sum(1)


def write_system(path: Path, types: list[int], frames: int, seed: int) -> Path:
    rng, kinds = np.random.default_rng(seed), np.array(types)
    grid = np.array([[i, j, k] for i in range(2) for j in range(2) for k in range(2)])[: len(types)] * SPACING
    x = grid + rng.normal(scale=0.2, size=(frames, len(types), 3))
    labels = [soft_spheres(frame, kinds) for frame in x]
    set_ = path / "set.000"
    set_.mkdir(parents=True)
    (path / "type.raw").write_text(" ".join(map(str, types)))
    (path / "type_map.raw").write_text("A\nB\n")
    np.save(set_ / "coord.npy", x.reshape(frames, -1))
    np.save(set_ / "box.npy", np.tile(np.eye(3).ravel() * BOX, (frames, 1)))
    np.save(set_ / "energy.npy", np.array([e for e, _ in labels]))
    np.save(set_ / "force.npy", np.array([f for _, f in labels]).reshape(frames, -1))
    return path


def write_data(root: Path) -> None:
    write_system(root / "small", [0, 1, 1, 0, 1], 40, 1)
    write_system(root / "large", [0, 1, 0, 0, 1, 0, 1, 0], 30, 2)
    write_system(root / "held", [0, 0, 1, 1, 1, 0], 6, 3)


INPUT: dict[str, Any] = {
    "model": {
        "type_map": ["A", "B"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [16, 20],
            "rcut": 4.5,
            "rcut_smth": 2.0,
            "neuron": [4, 8],
            "axis_neuron": 3,
            "type_one_side": True,
            "seed": 1,
        },
        "fitting_net": {"neuron": [12, 12], "seed": 1},
    },
    "learning_rate": {"type": "exp", "start_lr": 0.005, "stop_lr": 1e-5, "decay_steps": 5, "scale_by_worker": "none"},
    "loss": {"type": "ener", "start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 100, "limit_pref_f": 1},
    "training": {
        "training_data": {"systems": ["small", "large"], "batch_size": 2},
        "validation_data": {"systems": ["held"], "batch_size": 1, "numb_btch": 3},
        "numb_steps": 20,
        "disp_freq": 5,
        "save_freq": 10,
        "seed": 10,
    },
}


def changed(**changes: Any) -> dict[str, Any]:
    """The input with values at paths: changed(training__seed=3)."""
    data = deepcopy(INPUT)
    for path, value in changes.items():
        *parents, last = path.split("__")
        here = data
        for name in parents:
            here = here[name]
        if value is None:
            here.pop(last, None)
        else:
            here[last] = value
    return data


def write_input(folder: Path, **changes: Any) -> Path:
    path = folder / "input.json"
    path.write_text(json.dumps(changed(**changes)))
    return path


def rows(folder: Path, name: str = "lcurve.out") -> list[str]:
    return [line for line in (folder / name).read_text().splitlines() if not line.startswith("#")]


def dp(folder: Path, *args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "allforce", *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)
