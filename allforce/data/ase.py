"""Systems in any file that ASE reads, extended XYZ first.

Frames with the same atoms in the same order and the same labels make one system, called file#0, file#1, … in the order
in which they first appear (just file, when there is one). The whole file is read when it is opened and stays in memory.

    energy   of the calculator's results, else info["energy"], else the free energy
    force    of the calculator's results, else arrays["forces"] or arrays["force"]
    virial   info["virial"], else -stress·volume of the calculator's results or info["stress"]
    atom_ener, fparam, aparam     the calculator's energies or arrays["atom_ener"], info["fparam"], arrays["aparam"]
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import ase.io
import numpy as np
from ase import Atoms
from ase.stress import voigt_6_to_full_3x3_stress

from allforce.data.batch import LABELS, Frame
from allforce.data.system import System, check_finite
from allforce.errors import UserError


def read_ase(path: str) -> list[AseSystem]:
    """The systems of a file."""
    groups: dict[tuple, AseSystem] = {}
    count = 0
    for atoms in _images(path):
        where = f"{path}, frame {count}"
        values = _values(atoms, where)
        pbc = _periodic(atoms, where)
        key = (atoms.numbers.tobytes(), pbc, *((name, v.size) for name, v in sorted(values.items())))
        if key not in groups:
            groups[key] = AseSystem(atoms, pbc, values)
        groups[key].add(atoms, values, where)
        count += 1
    if not groups:
        raise UserError(f"{path}: has zero frames")
    systems = list(groups.values())
    for k, system in enumerate(systems):
        system.name = path if len(systems) == 1 else f"{path}#{k}"
    return systems


def _images(path: str):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ASE's readers, about their own old forms
            yield from ase.io.iread(path, index=":")
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


def _values(atoms: Atoms, where: str) -> dict[str, np.ndarray]:
    """Labels and parameters of a frame, flat: name -> numbers."""
    results = {} if atoms.calc is None else atoms.calc.results
    found = {
        "energy": _first(results.get("energy"), atoms.info.get("energy"), results.get("free_energy")),
        "force": _first(results.get("forces"), atoms.arrays.get("forces"), atoms.arrays.get("force")),
        "virial": _first(atoms.info.get("virial"), _virial(atoms, results, where)),
        "atom_ener": _first(results.get("energies"), atoms.arrays.get("atom_ener")),
        "atom_pref": atoms.arrays.get("atom_pref"),
        "fparam": atoms.info.get("fparam"),
        "aparam": atoms.arrays.get("aparam"),
    }
    values = {name: np.array(v, dtype=np.float64).ravel() for name, v in found.items() if v is not None}
    for name, value in values.items():
        if name in LABELS:
            per_atom, width = LABELS[name]
            expected = width * len(atoms) if per_atom else width
            if value.size != expected:
                raise UserError(f"{where}: {name} has {value.size} numbers, expected {expected}")
    return values


def _first(*candidates):
    return next((c for c in candidates if c is not None), None)


def _virial(atoms: Atoms, results: dict, where: str) -> np.ndarray | None:
    """Ξ = -stress·volume; ASE's stress is positive under tension, 6 numbers (Voigt) or 3 × 3."""
    stress = _first(results.get("stress"), atoms.info.get("stress"))
    if stress is None or not atoms.pbc.all():
        return None
    stress = np.array(stress, dtype=np.float64)
    if stress.size not in (6, 9):
        raise UserError(f"{where}: stress has {stress.size} numbers, expected 6 or 9")
    full = voigt_6_to_full_3x3_stress(stress) if stress.size == 6 else stress.reshape(3, 3)
    return -full * atoms.get_volume()


@dataclass
class _Stored:
    coord: np.ndarray
    cell: np.ndarray
    values: dict[str, np.ndarray] = field(default_factory=dict)


class AseSystem(System):
    """Frames of one kind of a file, in memory."""

    numbered = False

    def __init__(self, atoms: Atoms, periodic: bool, values: dict[str, np.ndarray]):
        symbols = atoms.get_chemical_symbols()
        self.natoms = len(atoms)
        self.type_names = sorted(set(symbols), key=lambda x: ase.data.atomic_numbers[x])
        self.types = np.array([self.type_names.index(x) for x in symbols], dtype=np.int64)
        self.periodic = periodic
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

    def frame(self, k: int) -> Frame:
        s = self.stored[k]
        labels = {x: s.values[x].reshape((-1, LABELS[x][1]) if LABELS[x][0] else -1) for x in self.label_names}
        return Frame(
            coord=s.coord,
            type=self.model_types,
            cell=s.cell if self.periodic else None,
            labels=labels,
            fparam=s.values.get("fparam"),
            aparam=s.values["aparam"].reshape(self.natoms, -1) if self.has_aparam else None,
            name=f"{self.name}, frame {k}",
        )
