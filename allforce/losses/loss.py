"""What a loss is: one number to minimise, the figures that are shown, and the outputs of the model that both need.

The figures of any number of micro-batches follow from sums over them, which travel with the gradients:

    sums = [ atoms·value of every figure | atoms of the batches that have it ]
"""

from __future__ import annotations

from collections.abc import Collection, Container
from math import nan, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from allforce.config.section import Section
from allforce.data.batch import Batch

Term = tuple[Tensor, Tensor]  # what is minimised, and what is shown: the mean square of "rmse…", else the figure


class Loss:
    """Derive from it and write `names`, `wanted`, `has` and `term`."""

    Config: ClassVar[type[Section]]  # the section `loss` of the input
    terms: list[str]  # the terms that are on
    names: list[str]  # of the figures: "rmse" for the whole loss, then one for each term
    judged_by: ClassVar[tuple[str, ...]] = ()  # terms that tell best how a run gets on, the first that is on
    wanted: tuple[str, ...]  # outputs of the model that it looks at

    def __init__(self, config: Any, start_lr: float, outputs: Collection[str] = ()):
        """outputs: what the model predicts, for a loss that suits itself to it."""
        self.config, self.start_lr = config, start_lr
        self._weights: dict[tuple, Tensor] = {}

    @property
    def progress(self) -> str:
        """The figure by whose validation error a run is judged: that of a term of `judged_by`, else the last."""
        figures = dict(zip(self.terms, self.names[1:], strict=True))
        return next((figures[term] for term in self.judged_by if term in figures), self.names[-1])

    def prefactor(self, term: str, lr: float) -> float:
        """limit + (start − limit)·lr/start_lr"""
        start, limit = (getattr(self.config, f"{end}_pref_{term}") for end in ("start", "limit"))
        return limit + (start - limit) * lr / self.start_lr

    def has(self, term: str, labels: Container[str]) -> bool:
        """Whether data with these labels have what the term looks at."""
        raise NotImplementedError

    def term(self, name: str, prediction: dict[str, Tensor], batch: Batch) -> Term:
        raise NotImplementedError

    def learns_from(self, labels: Container[str]) -> bool:
        """Whether data with these labels have anything that the loss looks at."""
        return any(self.has(term, labels) for term in self.terms)

    def caveat(self, labels: Container[str]) -> str:
        """What a user of data with these labels may not expect; empty: nothing."""
        return ""

    def __call__(self, prediction: dict[str, Tensor], batch: Batch, lr: float) -> tuple[Tensor, Tensor]:
        """The loss, and sums (2·names,): atoms·value of every displayed quantity, then the atoms as their weights."""
        anything = prediction[self.wanted[0]]
        loss = anything.new_zeros(())
        values, present = [loss], [True]
        for name in self.terms:
            present.append(self.has(name, batch.labels))
            if not present[-1]:
                values.append(loss.new_zeros(()))
                continue
            cost, figure = self.term(name, prediction, batch)
            loss = loss + self.prefactor(name, lr) * cost
            values.append(figure.detach())
        if not any(present[1:]):  # nothing to learn from this batch: a gradient of zero, not none
            loss = 0.0 * anything.sum()
        return loss, self.sums(loss.detach(), values[1:], present[1:], batch)

    def with_adjoints(
        self, prediction: dict[str, Tensor], batch: Batch, lr: float, scale: float
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss, the sums, and scale·∂loss/∂ of predictions by name, for a model that goes the way back by itself.

        Here by automatic differentiation. A faster one, written by hand, may take its place.
        """
        leaves = {name: value.detach().requires_grad_() for name, value in prediction.items()}
        with torch.enable_grad():
            loss, sums = self(leaves, batch, lr)
            found = torch.autograd.grad(loss * scale, list(leaves.values()), allow_unused=True)
        return loss.detach(), sums, {name: g for name, g in zip(leaves, found, strict=True) if g is not None}

    def sums(self, loss: Tensor, figures: list[Tensor], present: list[bool], batch: Batch) -> Tensor:
        """(2·names,) of the loss and the figures of all terms, whether they are there or not."""
        weights = self._present((True, *present), loss.device)
        return torch.cat([torch.stack([loss.abs(), *figures]) * weights, weights]) * batch.type.shape[0]

    def _present(self, present: tuple[bool, ...], device: torch.device) -> Tensor:
        """Which quantities count, kept on the device so that a step copies nothing to it."""
        key = (present, device)
        if key not in self._weights:
            self._weights[key] = torch.tensor(present, dtype=torch.float64, device=device)
        return self._weights[key]

    def metric(self, sums: Tensor) -> dict[str, float]:
        """Displayed figures from sums over any number of micro-batches; nan where no data has the label."""
        n = len(self.names)
        totals = sums.tolist()
        means = [v / w if w > 0 else nan for v, w in zip(totals[:n], totals[n:], strict=True)]
        return {name: sqrt(m) if name.startswith("rmse") else m for name, m in zip(self.names, means, strict=True)}
