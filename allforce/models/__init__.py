"""Models: equations from edges to energies and other quantities. MODELS names them as model/type of the input does."""

from __future__ import annotations

from allforce.models.model import Model
from allforce.models.standard import StandardModel

MODELS: dict[str, type[Model]] = {"standard": StandardModel}
