"""How batches are drawn from systems: the grammar of batch_size and auto_prob, and what sys_probs must sum to.

The schema judges an input by it, and data/dataset.py reads the values by it.
"""

from __future__ import annotations

import re

BATCH_FORMS = ("auto", "max", "filter", "mixed")
BATCH_WORDS = '"auto" or ' + ", ".join(f'"{form}:N"' for form in BATCH_FORMS) + " with an integer N"
BATCH_PATTERN = rf"^(auto|({'|'.join(BATCH_FORMS)}):[1-9]\d*)$"
AUTO_PROB_WORDS = '"prob_uniform", "prob_sys_size" or "prob_sys_size;start:end:weight;…"'
BLOCK_PATTERN = r"(\d+):(\d+):((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"


def batch_form(text: str) -> tuple[str, int]:
    """("max", 100) of "max:100"; "auto" is "auto:32". ValueError when it is none of the forms."""
    if re.fullmatch(BATCH_PATTERN, text) is None:
        raise ValueError(f"{text!r} is not a number, a list, {BATCH_WORDS}")
    form, _, n = text.partition(":")
    return form, int(n or 32)


def auto_prob_blocks(text: str) -> list[tuple[int, int, float]] | None:
    """[(start, end, weight), …] of "prob_sys_size;start:end:weight;…", [] without blocks, None of "prob_uniform".

    ValueError when it is none of these, when a block is empty, or when all weights are 0.
    """
    form, *blocks = text.replace(" ", "").split(";")
    if form == "prob_uniform" and not blocks:
        return None
    parts = [re.fullmatch(BLOCK_PATTERN, block, re.I) for block in blocks]
    found = [(int(part[1]), int(part[2]), float(part[3])) for part in parts if part is not None]
    if form != "prob_sys_size" or len(found) < len(blocks) or any(start >= end for start, end, _ in found):
        raise ValueError(f"{text!r} is not {AUTO_PROB_WORDS}")
    if found and sum(weight for _, _, weight in found) == 0:
        raise ValueError(f"{text!r}: all weights are zero")
    return found


def check_sys_probs(p: list[float]) -> None:
    """ValueError when the probabilities do not sum to 1; negative ones share the rest, and need not be there."""
    given = sum(x for x in p if x >= 0)
    if given > 1 + 1e-8 or (given < 1 - 1e-8 and all(x >= 0 for x in p)):
        raise ValueError(f"{p} has the sum {given:g}; expected 1 (negative ones share the rest)")
