"""Systems in any file that ASE reads, extended XYZ first.

Frames with the same atoms in the same order and the same labels make one system, called file#0, file#1, … in the order
in which they first appear (just file, when there is one). The whole file is read when it is opened and stays in memory.

    energy   of the calculator's results, else info["energy"] or another of its USUAL names, else the free energy
    force    of the calculator's results, else arrays["forces"] or another of its usual names
    virial   info["virial"] or the like, else -stress·volume of the calculator's results or info["stress"] or the like
    atom_ener, fparam, aparam     the calculator's energies or arrays["atom_ener"], info["fparam"], arrays["aparam"]
    what the model names          of the calculator's results, else info[name], of atoms arrays[name]

Where the entry of `systems` names a label ({"file": "x.xyz", "energy": "E0"}), that is read and nothing else.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ase.io
import numpy as np
from ase import Atoms
from ase.stress import voigt_6_to_full_3x3_stress

from allforce.data.batch import LABELS, Frame, Named
from allforce.data.system import System, check_finite
from allforce.errors import UserError

log = logging.getLogger("deepmd.data")

# what an entry of `systems` may name -> usual names, of which the first that a frame has counts; capitals do not matter
USUAL = {
    "energy": r"energy|(ref|dft|tot|total)_?energy",
    "forces": r"forces?|(ref|dft)_?forces?",
    "virial": r"virials?|(ref|dft)_?virials?",
    "stress": r"stress|(ref|dft)_?stress",
}
LABEL_LIKE = re.compile(r"energy|force|virial|stress", re.I)


def read_ase(path: str, names: Mapping[str, str] | None = None, named: Named | None = None) -> list[AseSystem]:
    """The systems of a file. names: what its labels are called, for those of USUAL that need saying; named: what the
    model calls its own."""
    groups: dict[tuple, AseSystem] = {}
    keys: Counter[str] = Counter()  # of all frames, and how many of them have each
    used: set[str] = set()
    count = 0
    for atoms in _images(path):
        where = f"{path}, frame {count}"
        reader = _Reader(atoms, names or {}, where, named or {})
        values = reader.values()
        pbc = _periodic(atoms, where)
        key = (atoms.numbers.tobytes(), pbc, *((name, v.size) for name, v in sorted(values.items())))
        if key not in groups:
            groups[key] = AseSystem(atoms, pbc, values, named or {})
        groups[key].add(atoms, values, where)
        keys.update((reader.of_frame | reader.of_atoms).keys() - {"numbers", "positions"})
        used |= reader.used
        count += 1
    if not groups:
        raise UserError(f"{path}: has zero frames")
    _check_names(path, names or {}, keys, used)
    systems = list(groups.values())
    for k, system in enumerate(systems):
        system.name = path if len(systems) == 1 else f"{path}#{k}"
        system.keys = sorted(keys)
    return systems


def _check_names(path: str, names: Mapping[str, str], keys: Counter[str], used: set[str]) -> None:
    """Names that no frame has are an error; what looks like a label and is not read is worth a warning."""
    for label, name in names.items():
        if name not in keys:
            raise UserError(f"systems: {path} has no {name!r}, named for {label}. Its frames have {sorted(keys)}")
    unread = sorted(key for key in keys.keys() - used - {"free_energy"} if LABEL_LIKE.search(key))
    if unread:
        log.warning(
            "%s: not read: %s. To train on one of them give the system as "
            '{"file": "%s", "energy": NAME, "forces": NAME, "virial": NAME}',
            path, ", ".join(f"{key} ({keys[key]} frames)" for key in unread), path,
        )  # fmt: skip


def _images(path: str):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ASE's readers, about their own old forms
            yield from ase.io.iread(path, index=":", parallel=False)  # each worker its own files
    except UserError:
        raise
    except Exception as error:  # whatever a reader of some format raises on a file that is not what it seems
        raise UserError(
            f"{path}: ASE cannot read it ({type(error).__name__}: {error}). Expected a directory in DeePMD-kit's "
            "layout, an HDF5 file, or a structure file of a format that ASE knows, such as extended XYZ"
        ) from None


def _periodic(atoms: Atoms, where: str) -> bool:
    if atoms.pbc.any() != atoms.pbc.all():
        raise UserError(
            f"{where}: is periodic in some directions only, pbc = {atoms.pbc.tolist()}. Expected all or none: "
            "make the cell wide along the others, at least the cutoff beyond the atoms, and set pbc to T T T"
        )
    return bool(atoms.pbc.all())


class _Reader:
    """Labels and parameters of one frame; remembers the keys that were used."""

    def __init__(self, atoms: Atoms, names: Mapping[str, str], where: str, named: Named):
        results = {} if atoms.calc is None else {k: v for k, v in atoms.calc.results.items() if v is not None}
        self.atoms, self.names, self.where, self.named = atoms, names, where, named
        self.of_frame, self.of_atoms = {**atoms.info, **results}, {**atoms.arrays, **results}
        self.used: set[str] = set()

    def values(self) -> dict[str, np.ndarray]:
        """Name -> numbers, flat."""
        found = {
            "energy": self.label("energy", self.of_frame, "free_energy"),
            "force": self.label("forces", self.of_atoms),
            "virial": self.virial(),
            "atom_ener": self.first(["energies", "atom_ener"], self.of_atoms),
            "atom_pref": self.atoms.arrays.get("atom_pref"),
            "fparam": self.atoms.info.get("fparam"),
            "aparam": self.atoms.arrays.get("aparam"),
        }
        for label, (name, _) in self.named.items():
            found[label] = self.first([name], self.of_atoms if LABELS[label][0] else self.of_frame)
        values = {name: self.numbers(self.called(name), v).ravel() for name, v in found.items() if v is not None}
        for name, value in values.items():
            if name in LABELS:
                per_atom, width = LABELS[name]
                width = self.named[name][1] if name in self.named else width
                expected = width * len(self.atoms) if per_atom else width
                if value.size != expected:
                    raise UserError(f"{self.where}: {self.called(name)} has {value.size} numbers, expected {expected}")
        return values

    def called(self, label: str) -> str:
        return self.named[label][0] if label in self.named else label

    def label(self, label: str, found: dict[str, Any], *last: str) -> Any:
        """The value of the key that was named, or of the label's own name, or of the first usual one in the file."""
        if label in self.names:
            return self.first([self.names[label]], found)
        usual = [key for key in found if re.fullmatch(USUAL[label], key, re.I)]
        return self.first([label, *usual, *last], found)

    def first(self, keys: list[str], found: dict[str, Any]) -> Any:
        key = next((key for key in keys if key in found), None)
        if key is None:
            return None
        self.used.add(key)
        return found[key]

    def virial(self) -> Any:
        """Ξ, or Ξ = -stress·volume; ASE's stress is positive under tension, 6 numbers (Voigt) or 3 × 3."""
        virial = None if "stress" in self.names else self.label("virial", self.of_frame)
        stress = None if "virial" in self.names else self.label("stress", self.of_frame)
        if virial is not None or stress is None or not self.atoms.pbc.all():
            return virial
        stress = self.numbers("stress", stress)
        if stress.size not in (6, 9):
            raise UserError(f"{self.where}: stress has {stress.size} numbers, expected 6 or 9")
        full = voigt_6_to_full_3x3_stress(stress) if stress.size == 6 else stress.reshape(3, 3)
        return -full * self.atoms.get_volume()

    def numbers(self, name: str, value: Any) -> np.ndarray:
        try:
            return np.array(value, dtype=np.float64)
        except (TypeError, ValueError):
            raise UserError(f"{self.where}: {name} is {str(value)[:60]!r}, expected numbers") from None


@dataclass
class _Stored:
    coord: np.ndarray
    cell: np.ndarray
    values: dict[str, np.ndarray] = field(default_factory=dict)


class AseSystem(System):
    """Frames of one kind of a file, in memory."""

    numbered = False
    at_hand = True
    keys: list[str]  # that its file has

    def __init__(self, atoms: Atoms, periodic: bool, values: dict[str, np.ndarray], named: Named):
        symbols = atoms.get_chemical_symbols()
        self.natoms = len(atoms)
        self.type_names = sorted(set(symbols), key=lambda x: ase.data.atomic_numbers[x])
        self.types = np.array([self.type_names.index(x) for x in symbols], dtype=np.int64)
        self.periodic, self.named = periodic, named
        self.label_names = frozenset(values) & frozenset(LABELS)
        self.fparam_width = values["fparam"].size if "fparam" in values else 0
        self.aparam_width = values["aparam"].size // self.natoms if "aparam" in values else 0
        self.stored: list[_Stored] = []
        self.nframes = 0

    def add(self, atoms: Atoms, values: dict[str, np.ndarray], where: str) -> None:
        if self.natoms == 0:
            raise UserError(f"{where}: has no atoms")
        for name, value in {"positions": atoms.positions, "cell": atoms.cell.array, **values}.items():
            check_finite(value, where.rpartition(", frame")[0], name, int(where.rpartition(" ")[2]))
        self.stored.append(_Stored(atoms.positions.copy(), atoms.cell.array.copy(), values))
        self.nframes += 1

    @property
    def label_hint(self) -> str:
        own = [f"{label} is {name}" for label, (name, _) in self.named.items()]
        return "; ".join([f"its frames have {', '.join(self.keys)}", *own])

    def frame(self, k: int) -> Frame:
        s = self.stored[k]
        labels = {x: s.values[x].reshape((self.natoms, -1) if LABELS[x][0] else -1) for x in self.label_names}
        return Frame(
            coord=s.coord,
            type=self.model_types,
            cell=s.cell if self.periodic else None,
            labels=labels,
            fparam=s.values.get("fparam"),
            aparam=s.values["aparam"].reshape(self.natoms, -1) if self.has_aparam else None,
            name=f"{self.name}, frame {k}",
        )
