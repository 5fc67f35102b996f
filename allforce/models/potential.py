"""From atomic energies to energies, forces and virials: once, for every model.

    E = Σ_i e_i     F = −∂E/∂x     Ξ_ab = −Σ_e (∂E/∂r_e)_a (r_e)_b

A descriptor and a fitting give e_i and ∂E/∂r_e from the edge vectors r_e; that one gradient gives the rest. The parts
write their first derivative themselves, each with its ordinary derivative, so a loss on forces needs one backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from allforce.config.schema import ModelConfig
from allforce.data.batch import Batch
from allforce.models.edges import AtomsOfEdges
from allforce.models.fitting import EnergyFitting
from allforce.models.se_e2_a import SeE2A

DESCRIPTORS = {"se_e2_a": SeE2A}
FITTINGS = {"ener": EnergyFitting}


@dataclass
class Prediction:
    """In float64 and in the order of the batch's atoms."""

    energy: Tensor  # (B,)
    atom_energy: Tensor  # (N,)
    force: Tensor  # (N, 3)
    virial: Tensor | None = None  # (B, 9)
    atom_virial: Tensor | None = None  # (N, 9), of the neighbour of each edge


class Potential(nn.Module):
    """A model of type `standard` with an energy fitting."""

    keep: Tensor  # (nt,) 0 for atom_exclude_types

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.type_map is not None and isinstance(config.descriptor.sel, list)
        self.config, self.type_map = config, list(config.type_map)
        ntypes = len(self.type_map)
        self.descriptor = DESCRIPTORS[config.descriptor.type](config.descriptor, ntypes)
        self.fitting = FITTINGS[config.fitting_net.type](config.fitting_net, ntypes, self.descriptor.dim)
        self.min_nbor_dist: float | None = None
        keep = torch.ones(ntypes, dtype=torch.float64)
        keep[config.atom_exclude_types] = 0.0
        self.register_buffer("keep", keep, persistent=False)

    @property
    def rcut(self) -> float:
        return self.config.descriptor.rcut

    @property
    def sel(self) -> list[int]:
        assert isinstance(self.config.descriptor.sel, list)
        return self.config.descriptor.sel

    def set_table(self, mode: str = "table", tolerance: float | None = None, nodes: int = 64) -> None:
        self.descriptor.set_table(mode, tolerance, nodes, self.min_nbor_dist)

    def check_table(self) -> str | None:
        return self.descriptor.check_table()

    def energies(self, batch: Batch, r: Tensor) -> tuple[Tensor, Tensor]:
        """e_i (N,) and ∂E/∂r_e (E, 3) from the edge vectors r (E, 3)."""
        D, pull = self.descriptor(batch, r)
        e, gradient = self.fitting(D, batch)
        if self.config.atom_exclude_types:
            keep = self.keep[batch.type]
            e, gradient = e * keep, gradient * keep[:, None].to(gradient.dtype)
        return e, pull(gradient)

    def forward(self, batch: Batch, virial: bool = True, atom_virial: bool = False) -> Prediction:
        """In grad mode the prediction can be differentiated with respect to the parameters."""
        e, g = self.energies(batch, batch.edges.r)
        energy = e.new_zeros(batch.nframes).index_add(0, batch.frame, e)
        out = Prediction(energy, e, AtomsOfEdges.apply(g, batch.edges, len(e)))
        if virial or atom_virial:
            of_edges = -(g[:, :, None] * batch.edges.r[:, None, :]).flatten(1)  # (E, 9)
            out.virial = of_edges.new_zeros(batch.nframes, 9).index_add(0, batch.frame[batch.edges.i], of_edges)
            if atom_virial:
                out.atom_virial = of_edges.new_zeros(len(e), 9).index_add(0, batch.edges.j, of_edges)
        return out


MODELS = {"standard": Potential}
