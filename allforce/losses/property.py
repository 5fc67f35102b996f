"""The loss `property`: how far a property of frames is from its labels.

    d = (Y − Y_label)/n      n the atoms of the frame, 1 for an intensive property

    smooth_mae   Σ h(d/σ)      h(x) = x²/(2β) for |x| < β, else |x| − β/2
    mae          Σ |d/σ|
    mse          Σ (d/σ)²
    rmse         √<(d/σ)²>
    mape         <|d/(Y_label/n + 0.001)|>

σ is the deviation of the labels that the model took from the data. As in DeePMD-kit the first three are sums over the
frames of a batch and the numbers of the property, the others means. Figures are means of the same without σ.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from allforce.config.section import Section, key
from allforce.data.batch import Batch
from allforce.errors import UserError
from allforce.losses.loss import Loss, Term

Function = Literal["smooth_mae", "mae", "mse", "rmse", "mape"]
OFFSET = 1e-3  # of labels in mape, as in DeePMD-kit


class PropertyLossConfig(Section):
    """Errors of a property of frames."""

    type: Literal["property"] = key("property", 'Kind of loss: "property".')
    loss_func: Function = key("smooth_mae", "What is minimised.")
    metric: Annotated[list[Function], Field(min_length=1)] = key(["mae"], "What is shown.")
    beta: float = key(1.0, "Where smooth_mae becomes linear.", ge=0)


class PropertyLoss(Loss):
    """Of a model that predicts a property."""

    Config = PropertyLossConfig

    def __init__(self, config: PropertyLossConfig, start_lr: float, outputs: Collection[str] = ()):
        super().__init__(config, start_lr, outputs)
        if "property" not in outputs:
            raise UserError(
                f"loss/type 'property' needs a model that predicts one; model/fitting_net gives {', '.join(outputs)}."
            )
        self.terms = list(dict.fromkeys(config.metric))
        self.names = ["rmse"] + [f"{term}_property" for term in self.terms]
        self.wanted = ("property", "property atoms", "property deviation")

    def prefactor(self, term: str, lr: float) -> float:
        return 1.0

    def has(self, term: str, labels: Container[str]) -> bool:
        return "property" in labels

    def term(self, name: str, prediction: dict[str, Tensor], batch: Batch) -> Term:
        """A figure; what is minimised comes with the first of them."""
        atoms = prediction["property atoms"]  # (B, 1)
        label = batch.labels["property"] / atoms  # (B, task_dim)
        d = prediction["property"] / atoms - label
        first = name == self.terms[0]
        cost = self.cost(d, prediction["property deviation"], label) if first else d.new_zeros(())
        return cost, self.errors(name, d.detach(), label).mean()

    def cost(self, d: Tensor, deviation: Tensor, label: Tensor) -> Tensor:
        function = self.config.loss_func
        if function == "mape":
            return self.errors(function, d, label).mean()
        if function == "rmse":  # a norm, unlike the root of a mean, has a derivative where all errors are 0
            return torch.linalg.vector_norm(d / deviation) / d.numel() ** 0.5
        return self.errors(function, d / deviation, label).sum()

    def errors(self, function: str, d: Tensor, label: Tensor) -> Tensor:
        """Of each number, (B, task_dim)."""
        if function == "smooth_mae":
            return smooth_l1_loss(d, torch.zeros_like(d), reduction="none", beta=self.config.beta)
        if function == "mae":
            return d.abs()
        if function == "mape":
            return (d / (label + OFFSET)).abs()
        return d**2
