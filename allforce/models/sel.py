"""`sel`, the number of slots for neighbours, from what the data have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from allforce.errors import UserError


def complete_sel(config: Any, count: Any, before: Any, mixed: bool) -> tuple[Any, list[str]]:
    """The descriptor's section with sel as numbers (mixed: one for all types), and warnings; see Model.complete."""
    sel = config.sel
    if isinstance(sel, str) and before is not None:
        sel = before.sel
    if isinstance(sel, str) and count is None:
        raise UserError(
            f"model/descriptor/sel: {sel!r} is found by neighbour statistics, which --skip-neighbor-stat leaves out. "
            "Give one number per type, or leave the flag out."
        )
    warnings = []
    if count is not None:
        _, most = count(config.rcut, mixed)
        if isinstance(sel, str):
            sel = sel_auto(most, sel)
            sel = sel[0] if mixed else sel
        warnings = [
            f"sel {'' if mixed else f'of type {t} '}is {s}, but the data has up to {n} neighbours of it within the "
            "cutoff: the farthest are left out"
            for t, (n, s) in enumerate(zip(most, [sel] if mixed else sel, strict=True))
            if 0 < s < n
        ]
    return config.model_copy(update={"sel": sel if mixed else list(sel)}), warnings


def sel_auto(most: Iterable[int], sel: str) -> list[int]:
    """ "auto:f": f times the most neighbours of a type, truncated, then up to a multiple of 4; "auto" is "auto:1.1"."""
    factor = float(sel.partition(":")[2] or 1.1)
    return [4 * ((int(factor * int(n)) + 3) // 4) for n in most]
