"""Small systems on disk for the tests of the data part."""

from pathlib import Path

import h5py
import numpy as np


def arrays(nframes=3, types=(0, 1, 1), seed=0, labels=("energy", "force", "virial"), box=6.0):
    """Arrays of a set, random structures on a loose grid so that no two atoms touch."""
    rng = np.random.default_rng(seed)
    n = len(types)
    side = int(np.ceil(n ** (1 / 3)))
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)[:n] * (box / side)
    made = {
        "coord": (grid + 0.3 * rng.random((nframes, n, 3))).reshape(nframes, -1),
        "box": np.tile(np.eye(3).ravel() * box, (nframes, 1)),
    }
    shapes = {"energy": (nframes,), "force": (nframes, 3 * n), "virial": (nframes, 9), "atom_ener": (nframes, n)}
    return made | {x: rng.normal(size=shapes[x]) for x in labels}


def write_npy(path: Path, sets, types=(0, 1, 1), type_map=("O", "H"), nopbc=False) -> str:
    """A directory in DeePMD-kit's layout; sets is a list of name -> array, or one such."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "type.raw").write_text("\n".join(map(str, types)) + "\n")
    if type_map is not None:
        (path / "type_map.raw").write_text("\n".join(type_map) + "\n")
    if nopbc:
        (path / "nopbc").touch()
    for k, content in enumerate([sets] if isinstance(sets, dict) else sets):
        here = path / f"set.{k:03d}"
        here.mkdir(exist_ok=True)
        for name, value in content.items():
            np.save(here / f"{name}.npy", value)
    return str(path)


def write_h5(file: Path, group: str, sets, types=(0, 1, 1), type_map=("O", "H")) -> str:
    with h5py.File(file, "a") as f:
        root = f.require_group(group)
        root["type.raw"] = np.array(types)
        root["type_map.raw"] = np.array([x.encode() for x in type_map])
        for k, content in enumerate(sets):
            for name, value in content.items():
                root[f"set.{k:03d}/{name}.npy"] = value
    return f"{file}#{group}"
