"""Modules that are imported for everybody and used by few: they are loaded by their first use, if ever.

    postpone()
    import torch                             # torch._meta_registrations is there, but empty
    torch._meta_registrations.register_meta  # loads it

Only what is imported after the call is postponed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# name -> what of that which it would import is needed all the same, for what it does when it is imported
UNUSED: dict[str, tuple[str, ...]] = {
    "torch._meta_registrations": ("torch._prims",),  # 0.15 s: shapes of results, for what compiles torch's operations
    "scipy.linalg": (),  # 0.1 s: numba looks whether a part of it, cython_blas, is there
    "h5py": (),  # 0.02 s: for data and statistics in files of this kind
}
TRIED = {"torch": "2.13."}  # a package whose own modules are left out: only where this was tried


def postpone(modules: Mapping[str, tuple[str, ...]] = UNUSED) -> None:
    sys.meta_path.insert(0, Postponed({name: needed for name, needed in modules.items() if tried(name)}))


def tried(name: str) -> bool:
    package, _, inner = name.partition(".")
    return not inner or package not in TRIED or metadata.version(package).startswith(TRIED[package])


class Postponed(MetaPathFinder):
    """Finds modules where they are, and has them loaded later."""

    def __init__(self, modules: Mapping[str, tuple[str, ...]]):
        self.modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self.modules else None
        if spec is not None and spec.loader is not None:
            spec.loader = OnUse(spec.loader, self.modules[name])
        return spec


class OnUse(Loader):
    """Of an empty module, which another loader fills when a name is looked for in it.

    importlib's LazyLoader would be woken by whoever asks all modules for their __file__, as torch does by `inspect`.
    """

    def __init__(self, loader: Loader, needed: tuple[str, ...]):
        self.loader, self.needed = loader, needed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        def fill(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            vars(module).pop("__getattr__", None)
            self.loader.exec_module(module)
            return getattr(module, name)

        for other in self.needed:
            import_module(other)
        vars(module)["__getattr__"] = fill
