"""lcurve.out: the learning curve, one row for each displayed step, in the layout of DeePMD-kit."""

from __future__ import annotations

from contextlib import suppress
from errno import ENOSPC
from os import strerror
from pathlib import Path
from shutil import disk_usage

from allforce.logs import log
from allforce.writing import write_whole

NOTE = "# If there is no available reference data, rmse_*_{val,trn} will print nan"


class LearningCurve:
    """Rows (step, figures, rate). A new run begins the file anew; one that goes on at a step keeps the rows up to it.

    Rows that cannot be written, on a full disk, wait for the next one.
    """

    def __init__(self, path: str | Path, names: list[str], validation: bool, at: int | None = None):
        self.path, self.names, self.validation = Path(path), names, validation
        kept = self._rows_until(at) if at is not None else ""
        self.text = kept or self.header()  # what is not written yet
        open(self.path, "ab").close()  # a folder that is not there, or closed to us, is an error
        write_whole(self.path, self.text.encode())
        self.text, self.full = "", False
        self.file = open(self.path, "ab", buffering=0)
        self.size = self.file.tell()

    def _rows_until(self, step: int) -> str:
        """What an uninterrupted run would have written by now: the rest was before the restart."""
        try:
            lines = self.path.read_text(errors="replace").splitlines(keepends=True)
        except OSError:
            return ""
        return "".join(
            line for line in lines if line.startswith("#") or (line.endswith("\n") and _step(line, step + 1) <= step)
        )

    def header(self) -> str:
        ends = ("val", "trn") if self.validation else ("trn",)
        columns = "".join("   " + " ".join(f"{f'{name}_{end}':>11}" for end in ends) for name in self.names)
        return f"# step {columns}   {'lr':8}\n{NOTE}\n"

    def row(self, step: int, training: dict[str, float], validation: dict[str, float] | None, rate: float) -> None:
        ends = [validation, training] if self.validation and validation is not None else [training]
        columns = "".join("   " + " ".join(f"{end[name]:11.2e}" for end in ends) for name in self.names)
        self.text += f"{step:7d}{columns}   {rate:8.1e}\n"
        self._write()

    def _write(self) -> None:
        data = self.text.encode()
        try:
            if self.file.write(data) != len(data):
                raise OSError(ENOSPC, strerror(ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(self.size)  # no half rows
            if not self.full:
                free = disk_usage(self.path.absolute().parent).free
                log.warning(f"{self.path}: {error.strerror} ({len(data)} bytes needed, {free} free). Rows are kept.")
            self.full = True
        else:
            self.text, self.full, self.size = "", False, self.size + len(data)

    def close(self) -> None:
        if self.text:
            self._write()
        self.file.close()


def _step(line: str, otherwise: int) -> int:
    first = line.split(maxsplit=1)[:1]
    return int(first[0]) if first and first[0].isdigit() else otherwise
