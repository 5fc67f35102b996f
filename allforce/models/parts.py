"""What a model gives for one block of a frame, as a summand of what it gives for the whole frame (data/blocks.py).

    E = Σ_blocks E_b     F = Σ_blocks F_b     Ξ = Σ_blocks Ξ_b

E_b is the energy of the block's own atoms, F_b and Ξ_b are its derivatives: forces also on atoms around the block.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from allforce.data.batch import Batch
from allforce.errors import UserError
from allforce.models.model import Model, per_atom

SUMS = frozenset({"energy", "forces", "virial", "atomic energy", "atomic virial", "descriptor"})


def check_sums(model: Model, wanted: Collection[str], key: str) -> None:
    """What is wanted of the model is a sum over blocks."""
    others = sorted(set(wanted) - SUMS)
    if others or "energy" not in model.outputs:
        raise UserError(
            f"{key}: a frame is split over several workers only where energies, forces and virials are predicted; "
            f"a model of type {model.config.type!r} is asked for {', '.join(others or wanted)} here. Set it to 1."
        )


def summands(model: Model, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
    """What the part of a batch adds to the outputs of the whole, with rows for all atoms of the whole."""
    part = batch.part
    assert part is not None and part.rows is not None
    out = {}
    for name, value in model(part, wanted).items():
        if name in wanted:
            rows = part.rows[: len(value)]  # centres come first
            whole = value.new_zeros(len(batch.type), *value.shape[1:])
            out[name] = whole.index_add(0, rows, value) if per_atom(name) else value
    return out
