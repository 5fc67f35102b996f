"""The cache of statistics (training/stat_file), in DeePMD-kit's layout.

An HDF5 file when the name ends in .h5 or .hdf5, else a directory. Inside a group named by the type map:
entries by the names that the parts of the model give them (bias_atom_energy, fparam, <hash>/r_0, …).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from tokenize import TokenError

import h5py
import numpy as np

from allforce.data.arrays import check_bytes
from allforce.distributed.comm import Comm
from allforce.errors import UserError

LARGEST = 1 << 28  # bytes of an entry


class StatFile:
    """Entries of the file for one type map, read by rank 0 for all and written by rank 0. Without a path: empty."""

    def __init__(self, path: str | None, type_map: list[str], comm: Comm):
        self.path, self.group, self.comm = path, " ".join(type_map), comm
        self.new: dict[str, np.ndarray] = {}
        found = {k: v.tolist() for k, v in _read(path, self.group).items()} if path and comm.rank == 0 else {}
        self.entries = {k: np.array(v) for k, v in comm.gather(found)[0].items()} if path else {}

    def get(self, *names: str) -> list[np.ndarray] | None:
        """These entries, None unless all are there."""
        return [self.entries[n] for n in names] if all(n in self.entries for n in names) else None

    def put(self, **values: np.ndarray) -> None:
        self.new.update(values)

    def once(self, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """The entry, computed when it is not there."""
        if name not in self.entries:
            self.new[name] = self.entries[name] = compute()
        return self.entries[name]

    def save(self, read_only: bool = False) -> None:
        """Write what is new; with read_only that is an error."""
        if read_only and self.new:
            raise UserError(
                f"training/stat_file: {self.path} lacks {', '.join(sorted(self.new))} for the types {self.group} and "
                "this descriptor, and stat_file_mode is read. Use update, or the file of a run with the same model"
            )
        if self.path and self.new and self.comm.rank == 0:
            try:
                _write(self.path, self.group, self.new)
            except OSError as error:
                raise UserError(f"training/stat_file {self.path!r} cannot be written ({error})") from None
        self.new = {}


def _is_hdf5(path: str) -> bool:
    return path.endswith((".h5", ".hdf5"))


def _read(path: str, group: str) -> dict[str, np.ndarray]:
    """Numeric entries below the group: name or hash/name -> array."""
    found: dict[str, np.ndarray] = {}
    if not os.path.exists(path):
        return found
    try:
        if _is_hdf5(path):
            with h5py.File(path, "r") as f:
                if group in f:
                    f[group].visititems(lambda n, d: found.update({n: _small(path, d)}) if _numbers(d) else None)
        else:
            root = os.path.join(path, group)
            for here, _, files in os.walk(root):
                for name in files:
                    file = os.path.join(here, name)
                    found[os.path.relpath(file, root)] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, TypeError, SyntaxError, TokenError) as error:  # numpy lets some through
        raise UserError(
            f"training/stat_file {path!r} cannot be read ({error}). Remove it or name another one"
        ) from None
    return {k: v for k, v in found.items() if v.dtype.kind in "fiu"}


def _numbers(item: object) -> bool:
    return isinstance(item, h5py.Dataset) and item.dtype.kind in "fiu"


def _small(path: str, data: h5py.Dataset) -> np.ndarray:
    check_bytes(f"{path}#{data.name}", data.dtype.itemsize * math.prod(data.shape), LARGEST)
    return data[()]


def _write(path: str, group: str, entries: dict[str, np.ndarray]) -> None:
    if _is_hdf5(path):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with h5py.File(path, "a") as f:
            for name, value in entries.items():
                here = f.require_group(group)
                if name in here:
                    del here[name]
                here[name] = value
        return
    for name, value in entries.items():
        file = os.path.join(path, group, name)
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "wb") as out:
            np.save(out, value)
