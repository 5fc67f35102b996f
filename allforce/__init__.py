"""Allforce: synchronous data-parallel training of neural-network interatomic potentials."""

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


def __getattr__(name: str) -> Any:
    """DeepPot and the like on first use, so that `import allforce` and `dp --help` do not load torch."""
    if name in HOMES:
        return getattr(import_module(f"allforce.infer.{HOMES[name]}"), name)
    raise AttributeError(f"module 'allforce' has no attribute {name!r}")
