"""Private calls of torch that Allforce uses: a test at the start that they are there and do what they did.

torch promises nothing about them, so pyproject.toml bounds its version, and whoever has another one gets a sentence
instead of a traceback or wrong numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allforce.errors import UserError

FUSED = ("_fused_adam_", "_fused_adamw_")
OTHERS: dict[str, list[tuple[tuple, float]]] = {  # name -> arguments after [1.0], and what that becomes
    "_foreach_add_": [(([0.5],), 1.5), ((1.0,), 2.0)],
    "_foreach_addcdiv_": [(([0.5], [0.25], 3.0), 7.0)],
    "_foreach_addcmul_": [(([0.5], [0.25], 4.0), 1.5)],
    "_foreach_copy_": [(([0.5],), 0.5)],
    "_foreach_lerp_": [(([0.5], 0.5), 0.75)],
    "_foreach_mul": [((3.0,), 3.0)],
    "_foreach_mul_": [((3.0,), 3.0)],
    "_foreach_norm": [((), 1.0)],
    "_foreach_sqrt": [((), 1.0)],
    "_foreach_zero_": [((), 0.0)],
}
NAMES = (*FUSED, *OTHERS)
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
    if name in FUSED:  # the first step of Adam is one of length lr, against the gradient
        tensors, count = _number(1.0), [torch.ones((), dtype=torch.float32)]
        options = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 0.0, "amsgrad": False, "maximize": False}
        call(tensors, _number(0.5), _number(0.0), _number(0.0), [], count, lr=0.25, **options)
        return abs(float(tensors[0]) - 0.75) < 1e-6
    for arguments, expected in OTHERS[name]:
        tensors = _number(1.0)
        result = call(tensors, *(_number(a[0]) if isinstance(a, list) else a for a in arguments))
        if float((tensors if name.endswith("_") else result)[0]) != expected:
            return False
    return True


def _number(value: float) -> list[Tensor]:
    return [torch.full((1,), value, dtype=torch.float64)]
