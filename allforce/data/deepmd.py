"""Systems in DeePMD-kit's own layout: a directory (deepmd/npy), or a group of an HDF5 file (deepmd/hdf5).

    sys/type.raw            types of the atoms, numbers from 0
    sys/type_map.raw        names of the types (optional)
    sys/nopbc               present: not periodic
    sys/set.*/coord.npy     (frames, 3·natoms)      box.npy (frames, 9)
    sys/set.*/energy.npy    force.npy virial.npy atom_ener.npy atom_pref.npy fparam.npy aparam.npy …, what there is
    sys/set.*/real_atom_types.npy   (frames, natoms): mixed_type, types differ from frame to frame, -1 is a virtual atom

An HDF5 file has the same tree, with groups for directories and datasets for files; it is written file.h5#/group.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any, Protocol

import h5py
import numpy as np

from allforce.data.arrays import DiskArray, H5Array, check_bytes, h5_file, open_npy
from allforce.data.batch import LABELS, NAMED_BY_MODEL, NO_LABELS, Frame, Frames, Named
from allforce.data.system import System, check_finite
from allforce.errors import UserError

LARGEST_TEXT = 1 << 28  # bytes of type.raw, type_map.raw
MOST_FRAMES = 1e9  # of a set whose frames are repeated


class Tree(Protocol):
    """What is read of a directory or an HDF5 group."""

    name: str

    def words(self, name: str) -> list[str] | None: ...  # of type.raw, type_map.raw; None when absent
    def has(self, name: str) -> bool: ...
    def sets(self) -> list[str]: ...  # sorted names of set.*
    def arrays(self, set_name: str, used: Collection[str]) -> dict[str, DiskArray]: ...  # name without .npy -> array


class Folder:
    def __init__(self, path: str):
        self.name = path
        try:
            self.entries = set(os.listdir(path))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None

    def words(self, name: str) -> list[str] | None:
        if name not in self.entries:
            return None
        path = os.path.join(self.name, name)
        try:
            if not os.path.isfile(path):  # a pipe would be waited for
                raise UserError(f"{path}: expected a file, found a folder, pipe or device")
            check_bytes(path, os.path.getsize(path), LARGEST_TEXT)
            with open(path, encoding="utf-8") as f:
                return f.read().split()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.name}/{name}: cannot be read ({error})") from None

    def has(self, name: str) -> bool:
        return name in self.entries

    def sets(self) -> list[str]:
        return sorted(x for x in self.entries if x.startswith("set."))

    def arrays(self, set_name: str, used: Collection[str]) -> dict[str, DiskArray]:
        path = os.path.join(self.name, set_name)
        try:
            files = os.listdir(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        return {
            f[:-4]: open_npy(os.path.join(path, f)) for f in files if f.endswith(".npy") and _canonical(f[:-4]) in used
        }


class Group:
    def __init__(self, file: str, group: str):
        self.file, self.group = file, group
        self.name = f"{file}#{group}"
        self.below = group.rstrip("/")  # before the name of something in it

    def _here(self) -> h5py.Group:
        return h5_file(self.file)[self.group]

    def _item(self, name: str) -> Any:
        """What a name leads to; links may lead nowhere, in a ring, or to another file."""
        try:
            return self._here()[name]
        except (KeyError, OSError, RuntimeError) as error:
            raise UserError(f"{self.file}#{self.below}/{name}: is a link that leads nowhere ({error})") from None

    def words(self, name: str) -> list[str] | None:
        if not self.has(name):
            return None
        item = self._item(name)
        if not isinstance(item, h5py.Dataset):
            raise UserError(f"{self.file}#{self.below}/{name}: expected a dataset, found {item}")
        check_bytes(f"{self.file}#{self.below}/{name}", item.dtype.itemsize * math.prod(item.shape), LARGEST_TEXT)
        values = np.atleast_1d(item[()]).ravel().tolist()
        try:
            return [v.decode() if isinstance(v, bytes) else str(v) for v in values]
        except UnicodeDecodeError as error:
            raise UserError(f"{self.file}#{self.below}/{name}: is not UTF-8 text ({error})") from None

    def has(self, name: str) -> bool:
        return self._here().get(name, getlink=True, default=None) is not None

    def sets(self) -> list[str]:
        return sorted(x for x in self._here() if x.startswith("set."))

    def arrays(self, set_name: str, used: Collection[str]) -> dict[str, DiskArray]:
        group = self._item(set_name)
        if not isinstance(group, h5py.Group):
            raise UserError(f"{self.file}#{self.below}/{set_name}: expected a group with the frames, found {group}")
        names = [n for n in group if n.endswith(".npy") and _canonical(n[:-4]) in used]
        found = {n: self._item(f"{set_name}/{n}") for n in names}
        for n, d in found.items():
            if not isinstance(d, h5py.Dataset) or d.dtype.kind not in "fiub" or d.shape is None:
                raise UserError(
                    f"{self.file}#{self.below}/{set_name}/{n}: expected a dataset of real numbers, found {d}"
                )
        return {n[:-4]: H5Array(self.file, f"{self.below}/{set_name}/{n}", d.shape) for n, d in found.items()}


def _canonical(name: str) -> str:
    """atomic_X and atom_X are one name; upstream tries atom_X first."""
    return "atom_" + name[7:] if name.startswith("atomic_") else name


OF_SELECTED = ("atom_dipole", "atom_polarizability", "atom_weight")  # may have rows of some types' atoms only
BY_FRAME = {*OF_SELECTED, "atom_pref"}  # labels with more than one form
USED = {*NO_LABELS, *LABELS} - {*NAMED_BY_MODEL}


class DeepmdSystem(System):
    """One system of this layout. Only headers are read when it is opened."""

    def __init__(self, tree: Tree, named: Named | None = None):
        self.name, self.at_hand = tree.name, isinstance(tree, Folder)  # files are mapped into memory
        self.named = {label: (_canonical(name), width) for label, (name, width) in (named or {}).items()}
        self.types = self._types(tree)
        self.natoms = len(self.types)
        self.type_names = tree.words("type_map.raw")
        if twice := [name for name in self.type_names or () if (self.type_names or []).count(name) > 1]:
            raise UserError(f"{self.name}/type_map.raw: {twice[0]} is there twice. Expected every name once")
        self.periodic = not tree.has("nopbc")
        names = tree.sets()
        if not names:
            raise UserError(f"{self.name}: has no directory set.000, set.001, … with the frames")
        used = USED | {name for name, _ in self.named.values()}
        self.sets = [
            Set(f"{self.name}/{n}", tree.arrays(n, used), self.natoms, self.periodic, self.named) for n in names
        ]
        self._agree(names)
        self.starts = np.cumsum([0] + [s.nframes for s in self.sets])  # (sets + 1,)
        self.nframes = int(self.starts[-1])
        if self.nframes == 0:
            raise UserError(f"{self.name}: has zero frames. Leave the system out, or add frames to its coord.npy")

    def _types(self, tree: Tree) -> np.ndarray:
        words = tree.words("type.raw")
        if words is None:
            raise UserError(f"{self.name}: type.raw is missing, the file with the type of every atom")
        try:
            types = np.array(words, dtype=np.int64)
        except (ValueError, OverflowError):
            raise UserError(f"{self.name}/type.raw: expected whole numbers, one per atom, found {words[:8]}") from None
        if len(types) == 0:
            raise UserError(f"{self.name}/type.raw: is empty. Expected the type of every atom")
        return types

    def _agree(self, names: list[str]) -> None:
        """All sets must have the same labels and parameters: a batch may take frames of several."""
        first = self.sets[0]
        for name, s in zip(names, self.sets, strict=True):
            if s.kinds != first.kinds:
                differ = ", ".join(sorted(self._file(n) for n in s.kinds.keys() ^ first.kinds.keys()))
                what = f"only one of them has {differ}" if differ else f"widths {s.kinds} and {first.kinds}"
                raise UserError(
                    f"{self.name}: {names[0]} and {name} do not have the same files: {what}. "
                    "Put sets with different labels into systems of their own"
                )
        self.mixed = "real_atom_types" in first.kinds
        self.label_names = frozenset(first.kinds) & frozenset(LABELS)
        self.fparam_width = first.kinds.get("fparam", 0)
        self.aparam_width = first.kinds.get("aparam", 0) // self.natoms

    def _file(self, name: str) -> str:
        return f"{self.named[name][0] if name in self.named else name}.npy"

    def paths(self) -> list[str]:
        return sorted({array.path for s in self.sets for array in s.arrays.values()})

    def frame(self, k: int) -> Frame:
        n = int(np.searchsorted(self.starts, k, side="right")) - 1
        s, k_set = self.sets[n], k - int(self.starts[n])

        def read(name: str) -> np.ndarray:
            return self._values(name, np.array([k]))[0]

        if self.mixed:
            real = s.rows("real_atom_types", np.array([k_set]))[0]
            if (real != np.rint(real)).any():
                raise UserError(f"{s.name}: real_atom_types.npy of frame {k_set} has numbers that are not whole")
            types = self._map(real.astype(np.int64), f", frame {k}")
            if (types < 0).all():
                raise UserError(
                    f"{s.name}: real_atom_types.npy of frame {k_set} has virtual atoms (-1) only. "
                    "Expected at least one atom: remove the frame or mend its types"
                )
        else:
            types = self.model_types
        labels = {name: self._label(name, read(name), s.name, k_set) for name in self.label_names}
        return Frame(
            coord=read("coord").reshape(-1, 3),
            type=types,
            cell=read("box").reshape(3, 3) if self.periodic else None,
            labels=labels,
            fparam=read("fparam") if self.has_fparam else None,
            aparam=read("aparam").reshape(self.natoms, -1) if self.has_aparam else None,
            name=f"{self.name}, frame {k}",
        )

    def several(self, ks: Sequence[int], labels: bool = True) -> Frames:
        names = self.label_names if labels else frozenset[str]()
        if not names.isdisjoint(BY_FRAME):
            return super().several(ks, labels)
        which, of_atoms = np.array(ks), (len(ks), self.natoms, -1)
        return Frames(
            coord=self._values("coord", which).reshape(of_atoms),
            cell=self._values("box", which).reshape(-1, 3, 3) if self.periodic else None,
            labels={x: self._values(x, which).reshape(of_atoms if LABELS[x][0] else (len(ks), -1)) for x in names},
        )

    def _values(self, name: str, ks: np.ndarray) -> np.ndarray:
        """(frames, ·) finite numbers of these frames."""
        at = np.searchsorted(self.starts, ks, side="right") - 1  # (frames,) set of each
        if (at == at[0]).all():
            found = self.sets[at[0]].rows(name, ks - self.starts[at[0]])
        else:
            found = np.empty((len(ks), self.sets[0].kinds[name]))
            for n in set(at.tolist()):
                found[at == n] = self.sets[n].rows(name, ks[at == n] - self.starts[n])
        if not np.isfinite(found).all():
            bad = int(np.isfinite(found).all(axis=1).argmin())
            check_finite(found[bad], self.sets[at[bad]].name, self._file(name), int(ks[bad] - self.starts[at[bad]]))
        return found

    def _label(self, name: str, value: np.ndarray, where: str, k: int) -> np.ndarray:
        per_atom, width = LABELS[name]
        if name in OF_SELECTED and value.size < width * self.natoms:
            return self._of_selected(name, value.reshape(-1, width), where)
        if name == "atom_pref" and value.size == 3 * self.natoms:  # the form of DeePMD-kit's PyTorch side
            value = value.reshape(-1, 3)
            if (value != value[:, :1]).any():
                raise UserError(f"{where}: atom_pref.npy of frame {k} has different weights for x, y, z of an atom")
            value = value[:, 0]
        return value.reshape(self.natoms, -1) if per_atom else value

    def _of_selected(self, name: str, value: np.ndarray, where: str) -> np.ndarray:
        """Rows (natoms, ·) from those of the atoms of some types: the ones whose atoms are as many as the rows."""
        count = np.bincount(self.types)
        kinds = np.flatnonzero(count)
        many = self.mixed or len(kinds) > 12
        subsets = [] if many else [c for n in range(1, len(kinds)) for c in combinations(kinds, n)]
        fitting = [c for c in subsets if count[list(c)].sum() == len(value)]
        if len(fitting) != 1:
            raise UserError(
                f"{where}: {name}.npy has {len(value)} of {self.natoms} atoms, and the types do not tell which "
                f"({dict(zip(kinds.tolist(), count[kinds].tolist(), strict=True))} atoms of each). Write a row for "
                "every atom, zeros for those that have none"
            )
        out = np.zeros((self.natoms, value.shape[1]))
        out[np.isin(self.types, fitting[0])] = value
        return out


class Set:
    """The arrays of one set directory, with their widths checked."""

    def __init__(self, name: str, arrays: dict[str, DiskArray], natoms: int, periodic: bool, named: Named):
        self.name = name
        for spelled in [x for x in arrays if x.startswith("atomic_")]:
            arrays.setdefault(_canonical(spelled), arrays.pop(spelled))
        own = {label: arrays[file] for label, (file, _) in named.items() if file in arrays}
        arrays = {x: array for x, array in arrays.items() if x in USED} | own
        if "coord" not in arrays:
            raise UserError(f"{name}: coord.npy is missing")
        if periodic and "box" not in arrays:
            raise UserError(
                f"{name}: box.npy is missing. Give the cell of every frame, or, when the system is not periodic, "
                "put an empty file called nopbc next to type.raw"
            )
        if not periodic:
            arrays.pop("box", None)
        coord = arrays["coord"]
        rows = 1 if len(coord.shape) <= 1 else coord.shape[0]
        self.arrays, self.stored = arrays, rows
        names = sorted(arrays, key=lambda x: (x != "coord", x))  # the others' complaints would follow from coord's
        self.kinds = {x: _width(x, arrays[x], rows, natoms, named) for x in names}  # name -> numbers of a frame
        self.copies = self._copies(rows)
        self.nframes = rows if self.copies is None else len(self.copies)

    def _copies(self, rows: int) -> np.ndarray | None:
        """Stored row of each frame where numb_copy.npy repeats some, else None."""
        self.kinds.pop("numb_copy", None)
        array = self.arrays.pop("numb_copy", None)
        if array is None:
            return None
        count = np.asarray(array.read()).ravel()
        if (count < 0).any() or (count != np.round(count)).any():
            raise UserError(f"{array.where}: expected whole numbers >= 0, how often each frame counts")
        if (total := float(count.sum(dtype=np.float64))) > MOST_FRAMES:
            raise UserError(f"{array.where}: asks for {total:.1e} frames, at most {MOST_FRAMES:.0e} are possible")
        return np.repeat(np.arange(rows), count.astype(np.int64))

    def rows(self, name: str, ks: np.ndarray) -> np.ndarray:
        """(len(ks), ·) float64 of frames ks"""
        array = self.arrays[name]
        ks = ks if self.copies is None else self.copies[ks]
        found = array.rows(ks) if array.shape[:1] == (self.stored,) else array.read().reshape(self.stored, -1)[ks]
        return np.ascontiguousarray(found, dtype=np.float64).reshape(len(ks), -1)


def _width(name: str, array: DiskArray, rows: int, natoms: int, named: Named) -> int:
    """Numbers of a frame in an array of `rows` frames. As in DeePMD-kit's loader the axes of coord.npy count, and all
    other arrays may have any axes that reshape to (rows, width): (1, 5400) is 100 frames of 54 atoms.
    """
    shape, size = array.shape, math.prod(array.shape)
    width = math.prod(shape[1:]) if shape[:1] == (rows,) else size // max(rows, 1)
    per_atom, each = LABELS.get(name, (name == "aparam", 0))
    each = named[name][1] if name in named else each
    any_width = width if not per_atom or (width % natoms == 0 and width > 0) else natoms
    allowed = {
        "coord": [3 * natoms],
        "box": [9],
        "numb_copy": [1],
        "real_atom_types": [natoms],
        "atom_pref": [natoms, 3 * natoms],
        **{x: [width if 0 < width < each * natoms and width % each == 0 else each * natoms] for x in OF_SELECTED},
    }.get(name, [(each * natoms if per_atom else each) or any_width])
    if size != rows * width or width not in allowed:
        expected = " or ".join(f"({rows}, {w})" for w in allowed)
        note = f"{rows} frames as in coord.npy"
        if name in named:
            note += f", and {each} numbers for each {'atom' if per_atom else 'frame'} as the model has it"
        if name == "coord":
            note = f"coord.npy has {width / 3:g} atoms in a frame, type.raw has {natoms}. Mend the one that is wrong"
        raise UserError(f"{array.where}: has shape {shape}, expected {expected}: {note}")
    return width
