"""Allforce: synchronous data-parallel training of neural-network interatomic potentials."""

import os
from collections.abc import MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["DeepDOS", "DeepDipole", "DeepPolar", "DeepPot", "DeepProperty", "__version__"]

if TYPE_CHECKING:
    from allforce.infer.invariant import DeepDOS, DeepProperty
    from allforce.infer.predict import DeepPot
    from allforce.infer.tensor import DeepDipole, DeepPolar

HOMES = {
    "DeepPot": "predict",
    "DeepDipole": "tensor",
    "DeepPolar": "tensor",
    "DeepDOS": "invariant",
    "DeepProperty": "invariant",
}


def wait_calmly(env: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's threads spin for a short time only when they wait for each other; OpenMP looks when torch is loaded.

    On cores that others use too, spinning threads keep the core from the one that they wait for. A thread that sleeps
    takes long to be woken, so they spin for a millisecond or two: as long as Python takes between two loops.
    """
    if not env.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        env["GOMP_SPINCOUNT"] = "100000"


wait_calmly()


def __getattr__(name: str) -> Any:
    """DeepPot and the like on first use, so that `import allforce` and `dp --help` do not load torch."""
    if name in HOMES:
        return getattr(import_module(f"allforce.infer.{HOMES[name]}"), name)
    raise AttributeError(f"module 'allforce' has no attribute {name!r}")
