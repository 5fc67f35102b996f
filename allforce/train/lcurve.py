"""lcurve.out: the learning curve, one row for each displayed step, in the layout of DeePMD-kit."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

NOTE = "# If there is no available reference data, rmse_*_{val,trn} will print nan"


class LearningCurve:
    """Rows (step, figures, rate): a new run begins the file anew, a restart appends and repeats the header."""

    def __init__(self, path: str | Path, names: list[str], validation: bool, append: bool):
        self.names, self.validation = names, validation
        self.file: TextIO = open(path, "a" if append else "w", buffering=1)
        self.file.write(self.header())

    def header(self) -> str:
        ends = ("val", "trn") if self.validation else ("trn",)
        columns = "".join("   " + " ".join(f"{f'{name}_{end}':>11}" for end in ends) for name in self.names)
        return f"# step {columns}   {'lr':8}\n{NOTE}\n"

    def row(self, step: int, training: dict[str, float], validation: dict[str, float] | None, rate: float) -> None:
        ends = [validation, training] if self.validation and validation is not None else [training]
        columns = "".join("   " + " ".join(f"{end[name]:11.2e}" for end in ends) for name in self.names)
        self.file.write(f"{step:7d}{columns}   {rate:8.1e}\n")

    def close(self) -> None:
        self.file.close()
