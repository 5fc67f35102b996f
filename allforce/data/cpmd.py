"""The file ENERGIES of CPMD: one line for each step, columns without a header, energies in Hartree.

    Car-Parrinello, and Born-Oppenheimer without diagonalisation   NFI EKINC TEMPP EKS ECLASSIC EHAM DIS TCPU
    the same with constrained DFT                                  two columns more (10)
    the same through the GROMOS interface                          NFI EKINC TEMPP EKS ECLASSIC EHAM EQM DIS TCPU
    variable cell                                                  NFI EKINC EKINH TEMPP EKS ECLASSIC EHAM DIS TCPU
    Born-Oppenheimer with diagonalisation                          NFI TEMPP EKS ECLASSIC DIS TCPU
    the same with constrained DFT                                  two columns more (8)

The potential energy is EKS. Where two kinds have as many columns, the sign tells: temperatures and kinetic energies are
not negative, EKS is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from allforce.errors import UserError

COLUMNS = {6: (2,), 8: (2, 3), 9: (3, 4), 10: (3,)}  # columns of a line -> where EKS may be, counted from 0
MARK = "<<<<<<"  # of a line that CPMD puts into some files at a restart


def read_energies(path: str, column: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(L,) steps NFI and (L,) energies in Hartree. `column`, counted from 0, says where the energy is."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Expected the file ENERGIES of CPMD") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not a text file, see byte {error.start}. Expected the file ENERGIES of CPMD"
        ) from None
    rows: list[list[float]] = []
    at = 0
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        if words and not line.lstrip().startswith(MARK):
            rows.append(_row(words, f"{path}: line {number}, at byte {at}", len(rows[0]) if rows else 0))
        at += len(line) + 1
    if not rows:
        raise UserError(f"{path}: has no lines. Expected one for each step, as CPMD writes the file ENERGIES")
    table = np.array(rows)
    if column is None:
        column = _energy_column(table, path)
    if not 0 < column < table.shape[1]:
        raise UserError(f"{path}: there is no energy column {column}: lines have the columns 0 … {table.shape[1] - 1}")
    return table[:, 0].astype(np.int64), table[:, column]


def _row(words: list[str], where: str, width: int) -> list[float]:
    try:
        row = [float(word.replace("D", "E")) for word in words]  # Fortran may write 1.0D+00
    except ValueError:
        raise UserError(
            f"{where}: found {' '.join(words)[:60]!r}, expected numbers with spaces between them. CPMD writes"
            " asterisks, or columns without a space, when a number does not fit its width: remove"
            " the line, and its frame"
        ) from None
    if width and len(row) != width:
        raise UserError(f"{where}: has {len(row)} columns, the lines before have {width}. The file is damaged or mixed")
    if not np.isfinite(row).all() or row[0] != int(row[0]) or abs(row[0]) > 2**53:
        raise UserError(f"{where}: found {' '.join(words)[:60]!r}, expected a step number and finite numbers")
    return row


def _energy_column(table: np.ndarray, path: str) -> int:
    """Where EKS is: the first of the places it may have at which it is negative, else the usual one."""
    columns = COLUMNS.get(table.shape[1], ())
    negative = [column for column in columns if (table[:, column] < 0).all()]
    if negative:
        return negative[0]
    if len(columns) == 1 or table.shape[1] == 8:  # 8 columns are those of a Car-Parrinello run, with rare exceptions
        return columns[-1]
    raise UserError(
        f"{path}: lines of {table.shape[1]} columns, in which the potential energy (EKS) cannot be told from the"
        " others. Say which column it is, counted from 0: energy_column"
    )
