"""Losses: how far predictions are from their labels. LOSSES has the names of loss/type, the default first."""

from __future__ import annotations

from allforce.losses.dos import DosLoss
from allforce.losses.ener import EnerLoss
from allforce.losses.loss import Loss
from allforce.losses.pinn import PinnDipoleLoss, PinnLoss
from allforce.losses.property import PropertyLoss
from allforce.losses.tensor import TensorLoss

LOSSES: dict[str, type[Loss]] = {
    "ener": EnerLoss,
    "pinn": PinnLoss,
    "pinn_dipole": PinnDipoleLoss,
    "tensor": TensorLoss,
    "dos": DosLoss,
    "property": PropertyLoss,
}
