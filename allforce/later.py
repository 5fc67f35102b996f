"""Modules that are imported for everybody and used by few: they are loaded by their first use, if ever.

    postpone()
    import torch          # torch.export is there, but empty
    torch.export.export   # loads it

Only what is imported after the call is postponed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any

# name -> what of that which it would import is needed all the same, also for the order of imports in a circle
UNUSED: dict[str, tuple[str, ...]] = {
    # what records torch's operations, to compile them
    "torch._higher_order_ops": (),
    "torch._meta_registrations": ("torch._prims.rng_prims",),  # torch.Generator wants this one
    "torch._prims": (),
    "torch.compiler": (),
    "torch.export": ("torch.fx.passes",),
    "torchgen.model": (),
    "unittest.mock": (),
    # kinds of layers and tensors; torch.nested is used by every derivative
    "torch.masked": (),
    "torch.nn.intrinsic": (),
    "torch.nn.qat": (),
    "torch.nn.quantizable": (),
    "torch.nn.quantized": (),
    "torch.quantization": (),
    # tools of a training, of which Allforce has its own
    "torch.distributions": (),
    "torch.optim": (),
    "torch.profiler": (),
    "torch.utils.data": (),
    # operations that it has for GPUs in Python
    "torch._native": (),
    # others
    "h5py": (),  # for data and statistics in files of this kind
    "scipy.linalg": (),  # numba looks whether a part of it, cython_blas, is there
}
# parts of these that are used: they are loaded without the whole
ALONE = {
    "scipy.linalg._flapack",
    "scipy.linalg.cython_blas",
    "torch._higher_order_ops.schema",
    "torch._higher_order_ops.utils",
    "torch._prims.rng_prims",
}
# functions that are taken from these by name: whoever calls them loads the module
FUNCTIONS = {"torch._higher_order_ops": ("cond", "while_loop")}
TRIED = {"torch": "2.13."}  # a package whose own modules are left out: only where this was tried
WITHOUT_GPUS = {"torch._native"}  # only of a torch that knows none


def postpone(modules: Mapping[str, tuple[str, ...]] = UNUSED) -> None:
    sys.meta_path.insert(0, Postponed({name: needed for name, needed in modules.items() if tried(name)}))


def tried(name: str) -> bool:
    package, _, inner = name.partition(".")
    if not inner or package not in TRIED:
        return True
    version = version_of(package)
    return version.startswith(TRIED[package]) and (name not in WITHOUT_GPUS or version.endswith("+cpu"))


version_of = cache(metadata.version)  # which reads a file


class Postponed(MetaPathFinder):
    """Finds modules where they are, and has them loaded later."""

    def __init__(self, modules: Mapping[str, tuple[str, ...]]):
        self.modules = modules
        self.empty: list[OnUse] = []  # in the order in which they were imported
        self.lock, self.loading = RLock(), False  # who comes while another thread loads waits

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.modules:
            loader = getattr(sys.modules.get(name.rpartition(".")[0]), "__loader__", None)
            if isinstance(loader, OnUse) and name not in ALONE:
                self.load(loader)  # a package before its parts, as always
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = OnUse(spec.loader, self.modules[name], self)
        return spec

    def load(self, wanted: OnUse) -> None:
        """Before it what of its package was imported before it: imports in a circle may work in this order only."""
        with self.lock:
            nested, self.loading = self.loading, True
            try:
                for module in [wanted] if nested else self.empty.copy():
                    if module in self.empty and module.package == wanted.package:
                        self.empty.remove(module)
                        module.fill()
                    if module is wanted:
                        break
            finally:
                self.loading = nested


class OnUse(Loader):
    """Of an empty module, which another loader fills when a name is looked for in it.

    importlib's LazyLoader would be woken by whoever asks all modules for their __file__, as torch does by `inspect`.
    """

    def __init__(self, loader: Loader, needed: tuple[str, ...], finder: Postponed):
        self.loader, self.needed, self.finder = loader, needed, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.module, self.package = module, module.__name__.partition(".")[0]
        for other in self.needed:
            import_module(other)
        self.finder.empty.append(self)
        vars(module)["__getattr__"] = self.look_up

    def look_up(self, name: str) -> Any:
        if name in FUNCTIONS.get(self.module.__name__, ()):
            return self.stand_in(name)
        if not name.startswith("__"):
            self.finder.load(self)
            if vars(self.module).get("__getattr__") != self.look_up:
                return getattr(self.module, name)
        raise AttributeError(f"module {self.module.__name__!r} has no attribute {name!r}")

    def fill(self) -> None:
        self.loader.exec_module(self.module)
        if vars(self.module)["__getattr__"] == self.look_up:  # and not one of its own
            del vars(self.module)["__getattr__"]

    def stand_in(self, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            self.finder.load(self)
            return getattr(self.module, name)(*args, **kwargs)

        return function
