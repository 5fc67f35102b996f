"""A folder with data, for tests of whole commands; no conftest.py, for others import that of tests/parallel by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import write_data

from allforce import logs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with tiny.py's data in it; the log is closed afterwards."""
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    logs.close()
