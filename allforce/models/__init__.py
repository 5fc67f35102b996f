"""Models: equations from edges to energies and other quantities. MODELS names them as model/type of the input does."""

from __future__ import annotations

from allforce.models.model import Model
from allforce.models.pinn import PiNet2Dipole, PiNet2Potential, PiNetDipole, PiNetPotential
from allforce.models.standard import StandardModel

MODELS: dict[str, type[Model]] = {
    "standard": StandardModel,
    "pinet": PiNetPotential,
    "pinet2": PiNet2Potential,
    "pinet_dipole": PiNetDipole,
    "pinet2_dipole": PiNet2Dipole,
}
