"""Allforce: synchronous data-parallel training of neural-network interatomic potentials."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["DeepPot", "__version__"]

if TYPE_CHECKING:
    from allforce.infer.predict import DeepPot


def __getattr__(name: str) -> Any:
    """DeepPot on first use, so that `import allforce` and `dp --help` do not load torch."""
    if name == "DeepPot":
        from allforce.infer.predict import DeepPot

        return DeepPot
    raise AttributeError(f"module 'allforce' has no attribute {name!r}")
