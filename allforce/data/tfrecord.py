"""PiNN's data sets: NAME.yml (keys, types, number of samples) and NAME.tfr (the samples), read without TensorFlow.

A .tfr file is records: length (8 bytes), checksum (4), message, checksum (4). The message is a tf.train.Example,
whose features are serialised tensors: elems (n,), coord (n, 3), cell (3, 3), e_data, f_data (n, 3), s_data (3, 3), …
Samples with the same atoms and the same keys make one system. PiNN's files have no units: eV, Å, eV/Å are expected.

    key       elems      coord   cell   e_data   f_data   s_data
    here      types      coord   cell   energy   force    virial = -s_data·volume
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ase.data
import numpy as np
import yaml

from allforce.data.batch import Frame
from allforce.data.system import System, check_finite
from allforce.errors import UserError

DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 4: "u1", 5: "<i2", 6: "i1", 9: "<i8", 10: "?", 19: "<f2"}  # of a TensorProto
VALUES = {5: "<f4", 6: "<f8"}  # fields of a TensorProto that hold its numbers one by one
LABELS = {"e_data": "energy", "f_data": "force", "s_data": "virial"}
WIRE = {0: "varint", 1: 8, 2: "bytes", 5: 4}  # protobuf's kinds of values


def read_tfrecord(path: str) -> list[TfrSystem]:
    """The systems of NAME.yml with NAME.tfr beside it."""
    count = _n_sample(path)
    file = TfrFile(str(Path(path).with_suffix(".tfr")))
    if len(file.records) != count:
        raise UserError(
            f"{file.path}: has {len(file.records)} samples, but {path} promises {count}. Convert them again"
        )
    groups: dict[tuple, TfrSystem] = {}
    for k in range(len(file.records)):
        sample = file.sample(k)
        elems = sample["elems"].ravel().astype(np.int64)
        key = (elems.tobytes(), *((name, sample[name].size) for name in sorted(sample) if name in (*LABELS, "cell")))
        if key not in groups:
            groups[key] = TfrSystem(file, elems, sample, k)
        groups[key].add(k)
    if not groups:
        raise UserError(f"{path}: has zero samples")
    systems = list(groups.values())
    for n, system in enumerate(systems):
        system.name = path if len(systems) == 1 else f"{path}#{n}"
    return systems


def _n_sample(path: str) -> int:
    try:
        form = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        keys, count = set(form["format"]), int(form["info"]["n_sample"])
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, ValueError):
        raise UserError(
            f"{path}: is not a data set of PiNN. Expected the keys format (of every array) and info/n_sample, as"
            " `pinn convert` writes them beside a .tfr file"
        ) from None
    if not {"elems", "coord"} <= keys:
        raise UserError(f"{path}: has the arrays {sorted(keys)}. Expected elems and coord among them")
    return count


class TfrFile:
    """The records of a file: where each begins and how long it is."""

    def __init__(self, path: str):
        self.path = path
        self.records: list[tuple[int, int]] = []
        try:
            with open(path, "rb") as file:
                size, at = os.fstat(file.fileno()).st_size, 0
                while at < size:
                    head = os.pread(file.fileno(), 12, at)
                    length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else size
                    if at + 16 + length > size:
                        raise UserError(
                            f"{path}: sample {len(self.records)}, at byte {at}: the file ends before it, at byte"
                            f" {size}. It is truncated or not a .tfr file: convert the data again"
                        )
                    self.records.append((at + 12, length))
                    at += 16 + length
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}). It belongs to the .yml of this name") from None

    def where(self, k: int) -> str:
        return f"{self.path}: sample {k}, at byte {self.records[k][0]}"

    def sample(self, k: int) -> dict[str, np.ndarray]:
        """The arrays of a record by name, float64 and integers."""
        at, length = self.records[k]
        with open(self.path, "rb", buffering=0) as file:
            raw = os.pread(file.fileno(), length, at)
        try:
            sample = {name: tensor(message) for name, message in features(raw)}
        except (ValueError, IndexError, struct.error, KeyError, UnicodeDecodeError) as error:
            raise UserError(f"{self.where(k)}: is damaged, or not a sample of PiNN ({error})") from None
        for name in ("elems", "coord"):
            if name not in sample:
                raise UserError(f"{self.where(k)}: has no {name}, but {sorted(sample)}")
        n = sample["elems"].size
        sizes = {"elems": n, "coord": 3 * n, "cell": 9, "e_data": 1, "f_data": 3 * n, "s_data": 9}
        for name, expected in sizes.items():
            if name in sample and sample[name].size != expected:
                raise UserError(f"{self.where(k)}: {name} has {sample[name].size} numbers, expected {expected}")
        return sample


def features(example: bytes) -> Iterator[tuple[str, bytes]]:
    """name, serialised tensor of every feature of a tf.train.Example."""
    for _, group in fields(example, only=1):
        for _, entry in fields(group, only=1):
            parts = dict(fields(entry))
            for _, values in fields(parts[2], only=1):  # a bytes_list
                yield bytes(parts[1]).decode(), next(value for _, value in fields(values, only=1))


def tensor(message: bytes) -> np.ndarray:
    """The array of a TensorProto; as a flat list where it has one number for several."""
    parts: dict[int, Any] = {}
    for number, value in fields(message):
        parts[number] = parts.get(number, b"") + value if number in VALUES else value
    dtype = DTYPES[parts[1]]
    shape = [dict(fields(dim)).get(1, 0) for _, dim in fields(parts.get(2, b""), only=2)]
    raw = parts.get(4)
    if raw is None:
        raw = next((parts[n] for n, kind in VALUES.items() if n in parts and kind == dtype), b"")
    array = np.frombuffer(raw, dtype=dtype)
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    if array.size == 1 < count <= 1 << 24:
        array = np.full(count, array[0])
    return array.reshape(shape) if shape else array.reshape(())


def fields(message: bytes, only: int | None = None) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message, an integer or bytes; `only`: of that field, which has bytes."""
    at = 0
    while at < len(message):
        head, at = varint(message, at)
        number, kind = head >> 3, WIRE.get(head & 7)
        value: bytes | int
        if kind == "varint":
            value, at = varint(message, at)
        else:
            size, at = varint(message, at) if kind == "bytes" else (kind, at)
            if not isinstance(size, int) or at + size > len(message):
                raise ValueError(f"a field of {size} bytes at byte {at} of {len(message)}")
            value, at = message[at : at + size], at + size
        if only is None or number == only:
            if only is not None and not isinstance(value, bytes):
                raise ValueError(f"field {number} is a number, expected bytes")
            yield number, value


def varint(message: bytes, at: int) -> tuple[int, int]:
    """An integer of 7 bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")


class TfrSystem(System):
    """Samples of a file that have the same atoms; each is read when it is asked for."""

    numbered = False

    def __init__(self, file: TfrFile, elems: np.ndarray, sample: dict[str, np.ndarray], k: int):
        self.file, self.nframes = file, 0
        self.records: list[int] = []  # (nframes,) place in the file
        self.real = elems > 0  # 0 is padding
        numbers = elems[self.real]
        if not len(numbers) or numbers.max() >= len(ase.data.chemical_symbols):
            raise UserError(f"{file.where(k)}: elems {elems.tolist()[:8]} … are not atomic numbers")
        self.natoms, self.periodic = len(numbers), "cell" in sample
        known, self.types = np.unique(numbers, return_inverse=True)
        self.type_names = [ase.data.chemical_symbols[z] for z in known]
        self.label_names = frozenset(
            LABELS[key] for key in sample if key in LABELS and (key != "s_data" or self.periodic)
        )

    def paths(self) -> list[str]:
        return [self.file.path]

    def add(self, k: int) -> None:
        self.records.append(k)
        self.nframes += 1

    def frame(self, k: int) -> Frame:
        record = self.records[k]
        sample = self.file.sample(record)
        arrays = {name: np.asarray(value, dtype=np.float64) for name, value in sample.items() if name != "elems"}
        for name in ("coord", "cell", *LABELS):
            if name in arrays:
                check_finite(arrays[name], self.file.path, f"{name} (at byte {self.file.records[record][0]})", record)
        cell = arrays["cell"].reshape(3, 3) if self.periodic else None
        labels = {}
        if "energy" in self.label_names:
            labels["energy"] = arrays["e_data"].reshape(1)
        if "force" in self.label_names:
            labels["force"] = arrays["f_data"].reshape(-1, 3)[self.real]
        if cell is not None and "virial" in self.label_names:
            labels["virial"] = -arrays["s_data"].reshape(9) * abs(np.linalg.det(cell))
        coord = arrays["coord"].reshape(-1, 3)[self.real]
        return Frame(coord, self.model_types, cell, labels, name=self.file.where(record))
