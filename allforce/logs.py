"""The log: line formats, where the lines of many workers go, and the blocks that a run prints.

console (stderr)   [2026-01-31 12:00:00,123] DEEPMD INFO    message
several workers    [2026-01-31 12:00:00,123] DEEPMD rank:3  INFO    message
file (-l)          the same with the logger's name (45 wide) before the message

--mpi-log   console                              file
master      rank 0                               rank 0
collect     all ranks through rank 0, in order   one file, all ranks through rank 0
workers     every rank its own                   one for each rank: name_<rank>.ext
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from allforce.errors import UserError

if TYPE_CHECKING:
    from allforce.distributed.comm import Comm

LEVELS = {"DEBUG": 10, "3": 10, "INFO": 20, "2": 20, "WARNING": 30, "1": 30, "ERROR": 40, "0": 40}
CONSOLE = "[%(asctime)s] DEEPMD {rank}%(levelname)-7s %(message)s"
FILE = "[%(asctime)s] DEEPMD {rank}%(levelname)-7s %(name)-45s %(message)s"

ROOT = logging.getLogger("deepmd")
log = logging.getLogger("deepmd.train")


class Console(logging.StreamHandler):
    """Whatever stderr is at the moment: a progress bar puts itself in front of it."""

    @property
    def stream(self):
        return sys.stderr

    @stream.setter
    def stream(self, value) -> None:
        pass


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, rank, message."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "rank": self.rank, "message": record.getMessage()}
        return json.dumps(line, ensure_ascii=False)


class CollectHandler(logging.Handler):
    """Keeps lines until `flush_all`, where rank 0 puts those of all ranks in order of time and writes them."""

    def __init__(self, comm: Comm, outputs: list[logging.StreamHandler], rank_field: str):
        super().__init__()
        self.comm, self.outputs = comm, outputs
        self.console, self.file = (logging.Formatter(f.format(rank=rank_field)) for f in (CONSOLE, FILE))
        self.lines: list[tuple[float, int, str, str]] = []

    def setFormatter(self, fmt: logging.Formatter | None) -> None:
        if fmt is not None:
            self.console = self.file = fmt

    def emit(self, record: logging.LogRecord) -> None:
        line = (record.created, self.comm.rank, self.console.format(record), self.file.format(record))
        self.lines.append(line)

    def flush_all(self) -> None:
        """A collective: every rank calls it at the same place."""
        lines, self.lines = self.lines, []  # in this order: the writer's thread may add one any time
        gathered = self.comm.gather(lines)
        if self.comm.rank == 0:
            self.write(sorted((tuple(line) for lines in gathered for line in lines), key=lambda line: line[:2]))

    def write(self, lines: Iterable[tuple]) -> None:
        for _, _, console, file in lines:
            for output in self.outputs:
                output.stream.write((file if isinstance(output, logging.FileHandler) else console) + output.terminator)
        for output in self.outputs:
            output.flush()

    def close(self) -> None:
        for output in self.outputs:
            output.close()
        super().close()

    def rescue(self) -> None:
        """The run ends early and the others may be gone: this rank writes what it has to its own stderr."""
        for *_, console, _ in self.lines:
            sys.stderr.write(console + "\n")
        self.lines = []


class LogFile(logging.FileHandler):
    """A file that a full disk ends: the console says so once, and the run goes on."""

    full = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self.full:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        self.full = True
        log.warning(f"--log-path {self.baseFilename} is not continued ({error.strerror})")

    def close(self) -> None:
        with suppress(OSError):  # said already
            super().close()


def setup(
    level: str = "INFO",
    path: str | None = None,
    mode: str = "master",
    comm: Comm | None = None,
    as_json: bool = False,
) -> CollectHandler | None:
    """Send the log to the console and to `path`; returns the handler to flush when lines are collected."""
    close()
    collector = _send(level, path, mode, comm)
    if as_json:
        for handler in ROOT.handlers:
            handler.setFormatter(JsonFormatter(comm.rank if comm is not None else 0))
    return collector


def _send(level: str, path: str | None, mode: str, comm: Comm | None) -> CollectHandler | None:
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    ROOT.setLevel(LEVELS[level])
    ROOT.propagate = False
    if size == 1:
        _attach(_outputs(path), "")
        return None
    field = f"rank:{rank:<2d} "
    if mode == "collect":
        assert comm is not None
        collector = CollectHandler(comm, _outputs(path) if rank == 0 else [], field)
        ROOT.addHandler(collector)
        return collector
    if mode == "workers":
        _attach(_outputs(None if path is None else worker_path(path, rank)), field, file_field="")
    elif rank == 0:
        _attach(_outputs(path), "")
    else:
        ROOT.addHandler(logging.NullHandler())
    return None


def close() -> None:
    """Undo setup()."""
    ROOT.propagate = True
    for handler in list(ROOT.handlers):
        ROOT.removeHandler(handler)
        handler.close()


def worker_path(path: str, rank: int) -> str:
    """train.log -> train_3.log, train -> train.3"""
    p = Path(path)
    return str(p.with_name(f"{p.stem}_{rank}{p.suffix}" if p.suffix else f"{p.name}.{rank}"))


def _outputs(path: str | None) -> list[logging.StreamHandler]:
    outputs: list[logging.StreamHandler] = [Console()]
    if path is not None:
        try:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
            outputs.append(LogFile(path, mode="w", encoding="utf-8"))
        except OSError as error:
            raise UserError(f"--log-path {path}: cannot write there ({error.strerror}). Choose another file.") from None
    return outputs


def _attach(outputs: list[logging.StreamHandler], field: str, file_field: str | None = None) -> None:
    for output in outputs:
        if isinstance(output, logging.FileHandler):
            output.setFormatter(logging.Formatter(FILE.format(rank=field if file_field is None else file_field)))
        else:
            output.setFormatter(logging.Formatter(CONSOLE.format(rank=field)))
        ROOT.addHandler(output)


def summary(rows: list[tuple[str, str]], distributed: bool) -> list[str]:
    """The block "Summary of the training", 65 wide."""
    title = "---Summary of the training"
    width = max(len(key) for key, _ in rows) + 2
    body = [f"{key + ':':<{width}}{value}" for key, value in rows]
    return [title.ljust(65, "-"), "distributed" if distributed else "serial", *body, "-" * 65]


def figures(values: dict[str, float]) -> str:
    """rmse = 1.00e+00, rmse_e = …"""
    return ", ".join(f"{name} = {value:8.2e}" for name, value in values.items())
