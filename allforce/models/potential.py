"""From atomic energies to energies, forces and virials: once, for every model.

    E = Σ_i e_i     F = −∂E/∂x     Ξ_ab = −Σ_e (∂E/∂r_e)_a (r_e)_b

A model gives e_i as a differentiable function of the edge vectors r_e; that one gradient gives the rest.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from allforce.data.batch import Batch
from allforce.models.edges import AtomsOfEdges
from allforce.models.model import Model
from allforce.models.pull import by_autograd

OUTPUTS = ("energy", "forces", "virial", "atomic energy", "atomic virial")
DERIVATIVES = frozenset({"forces", "virial", "atomic virial"})


class Potential(Model):
    """Base of all energy models: derive from it and write `energies`."""

    outputs: tuple[str, ...] = OUTPUTS

    def energies(self, batch: Batch, r: Tensor) -> Tensor:
        """e_i (N,) in float64 of the edge vectors r (E, 3), twice differentiable by r. Use r, not batch.edges.r."""
        raise NotImplementedError

    def energies_and_gradient(self, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor]:
        """e_i (N,) and ∂E/∂r_e (E, 3); in grad mode both can be differentiated by the parameters.

        Here by automatic differentiation. A faster one, written by hand, may take its place.
        """
        e, pull = by_autograd(lambda x: self.energies(batch, x), r)
        e = e if batch.own is None else e * batch.own
        return e, pull(torch.ones_like(e) if batch.own is None else batch.own)

    def energies_alone(self, batch: Batch) -> Tensor:
        """e_i (N,) where no derivative by r_e is asked for: a place for a shorter way."""
        e = self.energies(batch, batch.edges.r)
        return e if batch.own is None else e * batch.own

    def forward(self, batch: Batch, wanted: Collection[str]) -> dict[str, Tensor]:
        r, atoms = batch.edges.r, len(batch.edges.type)  # in a part of a batch more than the centres
        if DERIVATIVES.isdisjoint(wanted):
            e, gradient = self.energies_alone(batch), None
        else:
            e, gradient = self.energies_and_gradient(batch, r)
        out = {"energy": e.new_zeros(batch.nframes).index_add(0, batch.frame, e), "atomic energy": e}
        if gradient is not None and "forces" in wanted:
            out["forces"] = AtomsOfEdges.apply(gradient, batch.edges, atoms)
        if gradient is not None and "virial" in wanted and batch.nframes == 1:
            out["virial"] = -(gradient.T @ r).reshape(1, 9)
            wanted = set(wanted) - {"virial"}
        if gradient is not None and not {"virial", "atomic virial"}.isdisjoint(wanted):
            of_edges = -(gradient[:, :, None] * r[:, None, :]).flatten(1)  # (E, 9)
            if "virial" in wanted:
                out["virial"] = of_edges.new_zeros(batch.nframes, 9).index_add(0, batch.frame[batch.edges.i], of_edges)
            if "atomic virial" in wanted:  # of the neighbour of each edge
                out["atomic virial"] = of_edges.new_zeros(atoms, 9).index_add(0, batch.edges.j, of_edges)
        return out
