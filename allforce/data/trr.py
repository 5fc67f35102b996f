"""GROMACS .trr trajectories, read and written: big-endian numbers, single or double precision.

A file is frames one after the other, a frame is a header of 84 bytes (92 in double precision) and blocks of numbers:

    1993, 13, 12, "GMX_trn_file"                                       24 bytes
    bytes of: ir e box vir pres top sym x v f; natoms, step, nre       13 integers
    time (ps), lambda                                                  2 reals
    box (3, 3), vir (3, 3), pres (3, 3), x (n, 3), v (n, 3), f (n, 3)  those whose number of bytes is not 0

Units nm, nm/ps, kJ/mol/nm. Box rows are the lattice vectors. Opening a file goes from header to header; the numbers of
a frame are read when they are asked for.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from allforce.errors import UserError
from allforce.writing import write_whole

MAGIC = struct.pack(">iii12s", 1993, 13, 12, b"GMX_trn_file")
HEADER = struct.Struct(">24s13i")
BLOCKS = ("box", "vir", "pres", "x", "v", "f")  # in the order of the file


class TrrFile:
    """Where everything is in a file: start (F,), step (F,), real (F,) bytes of a number, sizes (F, 6) of the blocks."""

    def __init__(self, path: str):
        self.path, self.natoms = path, 0
        rows: list[tuple[int, ...]] = []
        try:
            with open(path, "rb", buffering=0) as file:
                length, at = os.fstat(file.fileno()).st_size, 0
                while at < length:
                    rows.append(self._header(os.pread(file.fileno(), HEADER.size, at), at, length, len(rows)))
                    at = rows[-1][1] + sum(rows[-1][4:])
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}). Expected a .trr file of GROMACS") from None
        table = np.array(rows, dtype=np.int64).reshape(-1, 4 + len(BLOCKS))
        self.start, self.data, self.step, self.real = table[:, :4].T
        self.sizes = table[:, 4:]  # (F, 6) bytes

    def __len__(self) -> int:
        return len(self.start)

    def has(self, name: str) -> np.ndarray:
        """(F,) whether a frame has this block."""
        return self.sizes[:, BLOCKS.index(name)] > 0

    def where(self, k: int) -> str:
        return f"{self.path}: frame {k} (step {self.step[k]}, at byte {self.start[k]})"

    def read(self, k: int, names: Iterable[str]) -> dict[str, np.ndarray]:
        """These blocks of frame k, float64, in the units of the file: 3 × 3 or (n, 3)."""
        blocks = {}
        try:
            file = open(self.path, "rb", buffering=0)
        except OSError as error:
            raise UserError(f"{self.where(k)} cannot be read any more ({error.strerror})") from None
        with file:
            for name in names:
                b = BLOCKS.index(name)
                size, at = int(self.sizes[k, b]), int(self.data[k] + self.sizes[k, :b].sum())
                raw = os.pread(file.fileno(), size, at)
                if len(raw) < size:
                    raise UserError(f"{self.where(k)} has been cut short, at byte {at + len(raw)}, since it was opened")
                blocks[name] = np.frombuffer(raw, dtype=f">f{self.real[k]}").reshape(-1, 3).astype(np.float64)
        return blocks

    def _header(self, raw: bytes, at: int, length: int, k: int) -> tuple[int, ...]:
        """start, first byte of the data, step, real, bytes of each block of the frame at this byte."""
        where = f"{self.path}: frame {k}, at byte {at}"
        if len(raw) < HEADER.size:
            raise UserError(f"{where}: the file ends in its header, at byte {length}. {_truncated(k, at)}")
        magic, ir, e, box, vir, pres, top, sym, x, v, f, natoms, step, _ = HEADER.unpack(raw)
        if magic != MAGIC:
            raise UserError(
                f"{where}: does not begin as a frame of a .trr file: found the bytes {raw[:8].hex()}, expected "
                f"{MAGIC[:8].hex()}. The file is damaged or not a .trr file"
            )
        if self.natoms and natoms != self.natoms or natoms < 1:
            expected = f"{self.natoms} as in frame 0" if self.natoms else "at least 1"
            raise UserError(f"{where}: has {natoms} atoms, expected {expected}. One file, one set of atoms")
        self.natoms = natoms
        sizes = (box, vir, pres, x, v, f)
        real = _real(sizes, natoms)
        whole = [9 * real] * 3 + [3 * natoms * real] * 3
        if not real or any((ir, e, top, sym)) or any(s not in (0, w) for s, w in zip(sizes, whole, strict=True)):
            raise UserError(
                f"{where}: blocks of {dict(zip(BLOCKS, sizes, strict=True))} bytes do not fit {natoms} atoms in single "
                "or double precision. The file is damaged"
            )
        data = at + HEADER.size + 2 * real  # time and lambda end the header
        if data + sum(sizes) > length:
            raise UserError(
                f"{where}: needs {data + sum(sizes) - at} bytes, but the file ends at byte {length}. "
                + _truncated(k, at)
            )
        return at, data, step, real, *sizes


def _real(sizes: tuple[int, ...], natoms: int) -> int:
    """Bytes of a number, 4 or 8, from the first block there is; 0 when that cannot be."""
    counts = [9] * 3 + [3 * natoms] * 3
    real = next((size / count for size, count in zip(sizes, counts, strict=True) if size), 0)
    return int(real) if real in (4, 8) else 0


def _truncated(k: int, at: int) -> str:
    if k == 0:
        return "It is truncated, or not a .trr file: copy or write it again"
    return f"It is truncated: copy it again, or keep its {k} whole frame(s), with `head -c {at}`"


def write_trr(path: str | Path, frames: Iterable[Mapping[str, Any]], double: bool = False) -> None:
    """Write frames: {"step": 0, "time": 0.0, "box": (3, 3), "x": (n, 3), "v": (n, 3), "f": (n, 3)}, any block may be
    missing, in the file's units (nm, nm/ps, kJ/mol/nm).
    """
    real = ">f8" if double else ">f4"
    parts = []
    for k, frame in enumerate(frames):
        blocks = {name: np.asarray(frame[name], dtype=real) for name in BLOCKS if frame.get(name) is not None}
        box, vir, pres, x, v, f = (blocks[name].nbytes if name in blocks else 0 for name in BLOCKS)
        natoms = max((len(blocks[name]) for name in ("x", "v", "f") if name in blocks), default=0)
        step, time = int(frame.get("step", k)), float(frame.get("time", 0.0))
        parts.append(HEADER.pack(MAGIC, 0, 0, box, vir, pres, 0, 0, x, v, f, natoms, step, 0))
        parts.append(np.array([time, 0.0], dtype=real).tobytes())
        parts += [blocks[name].tobytes() for name in BLOCKS if name in blocks]
    write_whole(path, b"".join(parts))
