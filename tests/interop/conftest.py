"""Interop tests are asked for by name (`make interop`), and tell the differences that they measured."""

from __future__ import annotations

import pytest

MEASURED: dict[str, dict[str, float]] = {}


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if any("interop" in str(argument) for argument in config.args) else True


@pytest.fixture(scope="session")
def differences() -> dict[str, dict[str, float]]:
    """Case -> quantity -> largest difference."""
    return MEASURED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not MEASURED:
        return
    names = list(next(iter(MEASURED.values())))
    write = terminalreporter.write_line
    write("largest differences between DeePMD-kit and Allforce (energy per atom; eV, Å)")
    write(f"{'':28s}" + "".join(f"{name:>14s}" for name in names))
    for case, values in MEASURED.items():
        write(f"{case:28s}" + "".join(f"{values[name]:14.1e}" for name in names))
