"""Arrays on disk, one row per frame, read a row at a time: .npy files (memory-mapped) and HDF5 datasets.

Opening looks at the header only, and the number of files held open is bounded, so that neither 50 GB of data nor tens
of thousands of small systems are a burden.
"""

from __future__ import annotations

import io
import math
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from tokenize import TokenError
from typing import Any, Protocol

import h5py
import numpy as np

from allforce.errors import UserError

LARGEST_READ = 1 << 31  # bytes that are read at once
OPEN_FILES = 256  # memory maps kept open; each holds a file descriptor


class DiskArray(Protocol):
    """An array on disk. `where` names it in messages."""

    @property
    def where(self) -> str: ...
    @property
    def path(self) -> str: ...  # its file
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self) -> np.ndarray: ...  # all of it
    def rows(self, ks: np.ndarray) -> np.ndarray: ...  # (len(ks), ·)


@dataclass(frozen=True, slots=True)
class NpyArray:
    where: str
    shape: tuple[int, ...]
    dtype: str
    fortran: bool
    offset: int
    stamp: int  # time of last change: a rewritten file is mapped anew

    @property
    def path(self) -> str:
        return self.where

    def read(self) -> np.ndarray:
        self._still_whole()
        return _memory_map(self)

    def rows(self, ks: np.ndarray) -> np.ndarray:
        mapped = _memory_map(self)
        self._still_whole()
        return mapped[ks]

    def _still_whole(self) -> None:
        """A mapped file that has become shorter would end the process (SIGBUS)."""
        expected = self.offset + np.dtype(self.dtype).itemsize * math.prod(self.shape)
        try:
            size = os.stat(self.where).st_size
        except OSError as error:
            raise UserError(f"{self.where}: cannot be read any more ({error.strerror})") from None
        if size < expected:
            raise UserError(
                f"{self.where}: the file was truncated while it was in use: it has {size} bytes, of {expected}. "
                "Copy or write it again"
            )


def open_npy(path: str) -> NpyArray:
    """Read the header of a .npy file, and compare the size of the file with it."""
    try:
        if not os.path.isfile(path):  # a pipe would be waited for
            raise ValueError("it is not a file")
        with open(path, "rb", buffering=0) as f:
            stat = os.fstat(f.fileno())
            head = f.read(128)  # nearly always the whole header
            size = _header_size(head)
            head += f.read(size - len(head)) if size > len(head) else b""
        shape, fortran, dtype = _parse_header(head[:size])
    except (OSError, ValueError, TypeError, SyntaxError, TokenError, struct.error) as error:  # numpy lets some through
        raise UserError(f"{path}: cannot be read as a .npy file ({error}). Write it with numpy.save") from None
    if dtype.kind not in "fiub":
        raise UserError(f"{path}: holds numbers of type {dtype}. Expected real numbers, written with numpy.save")
    expected = size + dtype.itemsize * math.prod(shape)
    if stat.st_size < expected:
        raise UserError(
            f"{path}: the file is truncated. Its header promises shape {shape}, {expected} bytes, but it has "
            f"{stat.st_size} bytes. Copy or write it again"
        )
    return NpyArray(path, shape, dtype.str, fortran, size, stat.st_mtime_ns)


def _header_size(head: bytes) -> int:
    if head[:6] != b"\x93NUMPY":
        raise ValueError("it does not begin with the magic string of .npy files")
    size = struct.unpack("<H", head[8:10])[0] + 10 if head[6] == 1 else struct.unpack("<I", head[8:12])[0] + 12
    return size


@lru_cache(maxsize=1024)  # many systems share the shapes of their files
def _parse_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    f = io.BytesIO(head)
    version = np.lib.format.read_magic(f)
    read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(f)


@lru_cache(maxsize=OPEN_FILES)
def _memory_map(array: NpyArray) -> np.ndarray:
    if 0 in array.shape:
        return np.empty(array.shape, array.dtype)
    order: Any = "F" if array.fortran else "C"
    try:
        return np.memmap(array.where, array.dtype, "r", array.offset, array.shape, order).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise UserError(f"{array.where}: cannot be read any more ({error})") from None


@dataclass(frozen=True, slots=True)
class H5Array:
    file: str
    name: str
    shape: tuple[int, ...]

    @property
    def path(self) -> str:
        return self.file

    @property
    def where(self) -> str:
        return f"{self.file}#{self.name}"

    def read(self) -> np.ndarray:
        return self._taken((), math.prod(self.shape))

    def rows(self, ks: np.ndarray) -> np.ndarray:
        size = math.prod(self.shape[1:])
        if (np.diff(ks) == 1).all():
            return self._taken(slice(int(ks[0]), int(ks[-1]) + 1), size * len(ks))
        return np.stack([self._taken(k, size) for k in ks.tolist()])  # h5py takes no others than ascending ones

    def _taken(self, which: Any, count: int) -> np.ndarray:
        """Some of it, `count` numbers."""
        try:
            data = h5_file(self.file)[self.name]
            check_bytes(self.where, data.dtype.itemsize * count)
            return data[which]
        except (OSError, KeyError, RuntimeError) as error:
            raise UserError(f"{self.where}: cannot be read ({error})") from None


def check_bytes(where: str, count: int, most: int = LARGEST_READ) -> None:
    """A few bytes of a file can promise terabytes: asked before memory is taken."""
    if count > most:
        raise UserError(f"{where}: promises {count:.1e} bytes, at most {most:.1e} are read at once. Check its shape")


@lru_cache(maxsize=16)
def h5_file(path: str) -> h5py.File:
    """An HDF5 file open for reading. h5py serialises access by a lock of its own."""
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise UserError(f"{path}: cannot be opened as an HDF5 file ({error})") from None
