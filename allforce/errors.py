"""The one exception for everything a user can cause."""


class UserError(Exception):
    """A mistake that the user can mend: shown as one paragraph, exit code 2, never a traceback.

    The text says what is wrong, where (key path, file, rank), what was found, what was expected, and the remedy.
    """


def file_problem(error: OSError) -> str:
    """What the system says about a file that cannot be read or written: "no/such/out.json: No such file…"."""
    return f"{error.filename2 or error.filename}: {error.strerror}"
