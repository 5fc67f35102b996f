"""The one exception for everything a user can cause."""


class UserError(Exception):
    """A mistake that the user can mend: shown as one paragraph, exit code 2, never a traceback.

    The text says what is wrong, where (key path, file, rank), what was found, what was expected, and the remedy.
    """
