"""Which systems a command works on: from a path, a list in a file, or the data sections of an input file."""

from __future__ import annotations

from pathlib import Path

from allforce.config.load import load_input
from allforce.data.batch import Named
from allforce.data.discover import below, open_systems
from allforce.data.system import System
from allforce.errors import UserError


def select_systems(
    type_map: list[str] | None,
    system: str | None = None,
    datafile: str | None = None,
    train_data: str | None = None,
    valid_data: str | None = None,
    named: Named | None = None,
) -> list[System]:
    """The systems of the first that is given; of the current directory when none is. named: see open_systems."""
    if datafile is not None:
        return open_systems(_listed(Path(datafile)), type_map, named=named)
    if train_data is not None:
        return _of_input(Path(train_data), "training_data", type_map, named)
    if valid_data is not None:
        return _of_input(Path(valid_data), "validation_data", type_map, named)
    return open_systems(system or ".", type_map, named=named)


def _listed(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: cannot be read ({reason}). Expected a file with one system in each line.") from None
    if not any(lines):
        raise UserError(f"{path}: names no system. Expected one in each line.")
    return [line for line in lines if line]


def _of_input(path: Path, section: str, type_map: list[str] | None, named: Named | None) -> list[System]:
    """Relative paths count from the directory of the input file."""
    data = getattr(load_input(path).training, section)
    if data is None:
        raise UserError(f"{path}: has no training/{section}.")
    return open_systems(below(path.parent, data.systems), type_map, data.rglob_patterns, named=named)
