"""Optimizers: each owns its section of the input, its update and its state."""

from allforce.optim.adam import Adam, AdamW
from allforce.optim.keras_adam import KerasAdam
from allforce.optim.muon import HybridMuon
from allforce.optim.optimizer import Optimizer

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "Adam": Adam,
    "AdamW": AdamW,
    "HybridMuon": HybridMuon,
    "KerasAdam": KerasAdam,
}
