"""Private calls of torch that Allforce uses: a test at the start that they are there and do what they did.

torch promises nothing about them, so pyproject.toml bounds its version, and whoever has another one gets a sentence
instead of a traceback or wrong numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allforce.errors import UserError

NAMES = ("_fused_adam_", "_fused_adamw_", "_foreach_add_", "_foreach_copy_", "_foreach_mul_")
VERSIONS = "2.6 to 2.13"  # as in pyproject.toml


def check_torch() -> None:
    """UserError when this torch does not have the calls, or they work otherwise."""
    try:
        works = all(_works(getattr(torch, name), name) for name in NAMES)
    except (AttributeError, TypeError, RuntimeError) as error:
        works, reason = False, str(error).splitlines()[0]
    else:
        reason = "one of them gives another result"
    if not works:
        raise UserError(
            f"torch {torch.__version__} does not have the private calls that Allforce makes ({', '.join(NAMES)}) as "
            f"they were: {reason}. Install torch {VERSIONS}."
        )


def _works(call, name: str) -> bool:
    a, b = _number(1.0), _number(0.5)
    if name.startswith("_fused"):  # the first step of Adam is one of length lr, against the gradient
        options = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 0.0, "amsgrad": False, "maximize": False}
        count = [torch.ones((), dtype=torch.float32)]
        call(a, b, _number(0.0), _number(0.0), [], count, lr=0.25, **options)
        return abs(float(a[0]) - 0.75) < 1e-6
    if name == "_foreach_mul_":
        call(a, 3.0)
        return float(a[0]) == 3.0
    call(a, b)
    if name == "_foreach_add_":
        call(a, 1.0)
    return float(a[0]) == (2.5 if name == "_foreach_add_" else 0.5)


def _number(value: float) -> list[Tensor]:
    return [torch.full((1,), value, dtype=torch.float64)]
