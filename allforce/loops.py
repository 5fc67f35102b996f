"""numba's njit. A loop that was compiled before comes from numba's cache in a fifth of the time.

    @njit(cache=True, nogil=True)
    def doubled(x, out):
        ...

The cache has the machine code of a loop, and the code that loops which call it are compiled from. numba reads both, and
makes itself ready to compile, when the first loop is called. Here the second is read when it is asked for, and numba
makes itself ready when something is to be compiled, which it does then in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from llvmlite import binding
from numba.core import codegen
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.compiler import CompileResult
from numba.core.runtime import _nrt_python as memory  # type: ignore[attr-defined]

TRIED = "0.68."  # versions of numba; others load loops in their own way


def njit(**options: Any) -> Callable[[Callable], Any]:
    if not options.pop("cache", False):
        return numba.njit(**options)

    def decorate(function: Callable) -> Any:
        loop = numba.njit(**options)(function)
        if numba.__version__.startswith(TRIED):
            loop._cache = Cache(function)
        else:
            loop.enable_caching()
        return loop

    return decorate


class Library(codegen.JITCodeLibrary):
    """Machine code from the cache, and what other loops link."""

    def __init__(self, owner: codegen.JITCPUCodegen, name: str, machine_code: bytes, linked: bytes):
        super().__init__(owner, name)
        self.linked = linked
        self.enable_object_caching()
        self._set_compiled_object(machine_code)
        self._finalize_final_module()

    def get_pointer_to_function(self, name: str) -> int:
        return self._codegen._engine.get_function_address(name)

    def _get_module_for_linking(self) -> binding.ModuleRef:
        if self._shared_module is None:
            self._shared_module = binding.parse_bitcode(self.linked)
            self._codegen._engine._load_defined_symbols(self._shared_module)
        return self._shared_module


class Stored(CompileResultCacheImpl):
    def reduce(self, cres):
        """Without what numba's own functions have beside their code: parts of numba that only compiling needs would be
        imported to read it, and there is nothing in it."""
        *others, environments = super().reduce(cres)
        return *others, tuple(e for e in environments if e.consts)

    def rebuild(self, target_context, payload):
        """CompileResult._rebuild with another library."""
        (name, _, code), description, environment, signature, objectmode, lifted, annotation, initial, others = payload
        for function in initial:
            function()
        library = Library(target_context.codegen(), name, *code)
        for other in others:
            library.codegen.set_env(other.env_name, other)
        return CompileResult(
            target_context=target_context,
            typing_context=target_context.typing_context,
            library=library,
            environment=environment,
            entry_point=target_context.get_executable(library, description, environment),
            fndesc=description,
            type_annotation=annotation,
            signature=signature,
            objectmode=objectmode,
            lifted=lifted,
            typing_error=None,
            call_helper=None,
            metadata=None,
            reload_init=initial,
            referenced_envs=others,
        )


@cache
def name_memory_functions() -> None:
    """Machine code finds what makes arrays by these names."""
    for name, address in memory.c_helpers.items():
        binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


class Cache(FunctionCache):
    """Of the same files as numba's own."""

    _impl_class = Stored

    def load_overload(self, sig, target_context):
        name_memory_functions()
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)
