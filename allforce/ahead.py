"""What a training loads before it imports torch, side by side: a thread the shared libraries of torch, Python numba's.

The system takes a fifth of a second to link the libraries, and needs no lock of Python for that. Extension modules wait
for it, as one library is linked at a time; what is Python alone goes on.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

LIBRARIES = {"libtorch_global_deps.so": os.RTLD_NOW | os.RTLD_GLOBAL, "libtorch.so": os.RTLD_NOW}  # as torch opens them


def load_ahead() -> None:
    """The libraries of torch, and numba as far as to run the first loop."""
    import scipy.linalg.cython_blas  # noqa: F401 - numba imports it in the midst of its own modules

    from allforce.neighbors import ready_loops

    with torch_libraries():
        ready_loops()


@contextmanager
def torch_libraries() -> Iterator[None]:
    """They are loaded when the block has ended, unless torch has to tell why not."""
    torch = find_spec("torch") if "torch" not in sys.modules else None
    if torch is None or torch.origin is None:
        yield
        return
    thread = Thread(target=link, args=(Path(torch.origin).parent / "lib",), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def link(folder: Path) -> None:
    dlopen = ctypes.CDLL(None).dlopen  # called so it runs without Python's lock, which ctypes.CDLL(path) keeps
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, mode in LIBRARIES.items():
        if not dlopen(os.fsencode(folder / name), mode):
            return
