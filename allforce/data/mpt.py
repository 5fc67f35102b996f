"""MiMiC topologies (.mpt, made by MiMiCPy), read and written: which atoms a system has, in the order of the trajectory.

Big-endian numbers, no magic, no version:

    names of the molecules in the system's order, copies of each, alias names, alias targets
    then for every molecule: name, atom numbers, atom types, residue ids, residue names, atom names, charges (e),
    elements, masses (u)

    text     length, bytes, zeros up to a multiple of 4         texts    one text, joined by commas
    numbers  1, number, 1, number, …, 0                         (int32 or float32)

An alias is a molecule that equals another one. A name may come twice in the system's order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from allforce.errors import UserError
from allforce.writing import write_whole


@dataclass
class Molecule:
    """Columns of one molecule, one entry for each atom."""

    elements: list[str]
    names: list[str]
    types: list[str]
    residues: list[str]
    residue_ids: list[int]
    charges: list[float]  # e
    masses: list[float]  # u


@dataclass
class Topology:
    """The molecules of a system in order, each with its number of copies."""

    path: str
    order: list[tuple[Molecule, int]]

    @property
    def natoms(self) -> int:
        return sum(len(molecule.elements) * copies for molecule, copies in self.order)

    def elements(self) -> np.ndarray:
        """(natoms,) element symbols in the order of the trajectory."""
        return np.concatenate([np.tile(np.array(m.elements, dtype=object), n) for m, n in self.order])


class Reader:
    """Goes through the bytes of a file and says where it stopped."""

    def __init__(self, path: str):
        self.path, self.at = path, 0
        try:
            self.data = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}). Expected an .mpt file of MiMiCPy") from None

    def wrong(self, what: str) -> UserError:
        return UserError(
            f"{self.path}: not a whole .mpt file: {what}, at byte {self.at} of {len(self.data)}. Make it again with"
            " MiMiCPy"
        )

    def text(self, what: str) -> str:
        raw = self.data[self.at : self.at + 4]
        length = struct.unpack(">I", raw)[0] if len(raw) == 4 else 0
        end = self.at + 4 + -(-length // 4) * 4
        if len(raw) < 4 or end > len(self.data):
            raise self.wrong(f"the file ends within {what}")
        try:
            text = self.data[self.at + 4 : self.at + 4 + length].decode()
        except UnicodeDecodeError:
            raise self.wrong(f"{what} are no text") from None
        self.at = end
        return text

    def texts(self, what: str) -> list[str]:
        text = self.text(what)
        return text.split(",") if text else []

    def numbers(self, what: str, kind: str) -> list:
        words = np.frombuffer(self.data, dtype=">u4", offset=self.at, count=(len(self.data) - self.at) // 4)
        flags = words[::2]
        count = int((flags != 1).argmax()) if (flags != 1).any() else len(flags)
        if count == len(flags) or flags[count] != 0:
            raise self.wrong(f"the list of {what} has no end")
        values = words[1 : 2 * count : 2].view(kind)
        self.at += 8 * count + 4
        return values.tolist()


def read_mpt(path: str) -> Topology:
    """The topology in a file; what cannot be is a UserError that names the byte."""
    reader = Reader(path)
    names, copies = reader.texts("the molecule names"), reader.numbers("copies", ">i4")
    aliases, targets = reader.texts("the aliases"), reader.texts("the targets of aliases")
    if len(names) != len(copies) or len(aliases) != len(targets) or not names:
        raise reader.wrong(
            f"{len(names)} molecule(s) with {len(copies)} number(s) of copies, {len(aliases)} alias(es) of "
            f"{len(targets)} molecule(s)"
        )
    tables: dict[str, Molecule] = {}
    while reader.at < len(reader.data):
        name = reader.text("the name of a molecule")
        tables[name] = _molecule(reader, name)
    same = dict(zip(aliases, targets, strict=True))
    order = []
    for name, n in zip(names, copies, strict=True):
        table = tables.get(same.get(name, name), tables.get(name))
        if table is None or n < 0:
            raise reader.wrong(f"{n} copies of molecule {name!r}, of which the file has {sorted(tables)}")
        order.append((table, n))
    return Topology(path, order)


def _molecule(reader: Reader, name: str) -> Molecule:
    of = f"of molecule {name!r}"
    numbers = reader.numbers(f"atom numbers {of}", ">i4")
    types, resids = reader.texts(f"the atom types {of}"), reader.numbers(f"residue ids {of}", ">i4")
    residues, names = reader.texts(f"the residue names {of}"), reader.texts(f"the atom names {of}")
    charges, elements = reader.numbers(f"charges {of}", ">f4"), reader.texts(f"the elements {of}")
    masses = reader.numbers(f"masses {of}", ">f4")
    columns = {"types": types, "residue ids": resids, "residues": residues, "names": names}
    columns |= {"charges": charges, "elements": elements, "masses": masses}
    for column, values in columns.items():
        if len(values) != len(numbers):
            raise reader.wrong(f"{len(numbers)} atoms but {len(values)} {column} {of}")
    return Molecule(elements, names, types, residues, resids, charges, masses)


def write_mpt(path: str | Path, order: list[tuple[str, int]], molecules: dict[str, Molecule]) -> None:
    """Write a topology: (name, copies) in the system's order, and the molecules by name."""
    parts = [_texts([name for name, _ in order]), _numbers([n for _, n in order], ">i4"), _texts([]), _texts([])]
    for name, m in molecules.items():
        parts += [_texts([name]), _numbers(range(1, len(m.elements) + 1), ">i4"), _texts(m.types)]
        parts += [_numbers(m.residue_ids, ">i4"), _texts(m.residues), _texts(m.names)]
        parts += [_numbers(m.charges, ">f4"), _texts(m.elements), _numbers(m.masses, ">f4")]
    write_whole(path, b"".join(parts))


def _texts(items: list[str]) -> bytes:
    raw = ",".join(items).encode()
    return struct.pack(">I", len(raw)) + raw + bytes(-len(raw) % 4)


def _numbers(values, kind: str) -> bytes:
    words = np.ones((len(values), 2), dtype=">u4")
    words[:, 1] = np.asarray(values, dtype=kind).view(">u4")
    return words.tobytes() + bytes(4)
