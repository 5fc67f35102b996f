"""The one exception for everything a user can cause, and how a program of the user's ends with it."""

import sys
import traceback
from types import TracebackType


class UserError(Exception):
    """A mistake that the user can mend: shown as one paragraph, exit code 2, never a traceback.

    The text says what is wrong, where (key path, file, rank), what was found, what was expected, and the remedy.
    """


def file_problem(error: OSError) -> str:
    """What the system says about a file that cannot be read or written: "no/such/out.json: No such file…"."""
    return f"{error.filename2 or error.filename}: {error.strerror}"


def program_line(trace: TracebackType | None) -> str:
    """Where the user's own program was: "train.py, line 12: "."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace) if _is_main(frame.f_globals)]
    return f"{places[-1][0]}, line {places[-1][1]}: " if places else ""


def _is_main(names: dict) -> bool:
    return names.get("__name__") == "__main__"


def end_program(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For sys.excepthook of a program that calls us: a UserError is one paragraph and exit code 2, too."""
    if not issubclass(kind, UserError):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {program_line(trace)}{error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
