"""Energies, forces and virials of a Deep Potential on CPUs, and the way back to its parameters, without a graph.

    C = splines of the nets    T = A C    D = ½S(T, T)    e, g = net(D), ∂e/∂D    G = P(g, T)    q_e = pull(G Cᵀ)
    E = Σ_i e_i     F, Ξ from q_e = ∂E/∂r_e as in potential.py

    back from Ē, F̄, Ξ̄:     ē_i = Ē of its frame     u_e = F̄_i − F̄_j − Ξ̄ r_e      (Ȧ, Ḡ) = push(u)
    ḡ = S(Ḡ, T)     D̄ and the nets' gradients from ē, ḡ     T̄ = P(g, Ḡ) + P(D̄, T)     C̄ = Aᵀ T̄ + Ȧᵀ G

The letters are those of moments.py, edges.py and scalar_net.py, whose parts these are: standard.py puts the same parts
together by automatic differentiation, for every model and device. With few atoms that costs as much as the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from allforce.data.batch import Batch
from allforce.models import curves, fused_kernels, scalar_kernels
from allforce.models.edges import NUMBERS
from allforce.models.ener import EnerFitting
from allforce.models.kernels import compiled
from allforce.models.layers import Net, Weights
from allforce.models.moments import ATOMS
from allforce.models.pool import threads
from allforce.models.products import lanes, tiles_of
from allforce.models.scalar_sweeps import INPUTS, addresses, last_hidden, ones, parameters_of, plan
from allforce.models.se_e2_a import SeE2A
from allforce.models.table_kernels import strips_of

if TYPE_CHECKING:
    from allforce.models.standard import StandardModel

OUTPUTS, DERIVATIVES = frozenset({"energy", "forces", "virial"}), frozenset({"forces", "virial"})
PLANS, MOST = 8, 2**25  # numbers of atoms of the types whose memory is kept, and bytes of the larger part of each
OfLoops = tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray, np.ndarray]  # weights, plan, kept, pairs


class Fused:
    """A model, and memory that all its batches use in turn: there is one sweep at a time."""

    def __init__(self, model: StandardModel):
        assert isinstance(model.descriptor, SeE2A) and isinstance(model.fitting, EnerFitting)
        self.descriptor, self.fitting = model.descriptor, model.fitting
        self.curve_nets: list[Net] = list(self.descriptor.nets)  # type: ignore[arg-type]
        self.fitting_nets = list(self.fitting.nets)
        self.parameters = parameters_of([*self.curve_nets, *self.fitting_nets])
        self.unused = torch.empty(max(p.shape[-1] for p in self.parameters), dtype=self.fitting.dtype)
        self.ones = ones(len(self.unused), self.fitting.dtype)
        self._at: list[int] = []  # where the parameters lie
        self._table: Table | None = None
        self._nets: dict[tuple[int, ...], OfLoops] = {}
        self._places: list[tuple[list[Tensor], np.ndarray, np.ndarray]] = []  # of gradients, by the list of these
        self.sweeps = 0  # so far: the memory is that of the last one

    @staticmethod
    def suits(model: StandardModel) -> bool:
        """Whether this is written for its parts."""
        d, f = model.descriptor, model.fitting
        if type(d) is not SeE2A or type(f) is not EnerFitting or d.dtype != f.dtype:
            return False
        if any(f.vacuum) or f.numb_fparam or f.numb_aparam or model.config.atom_exclude_types:
            return False
        return bool(d.nets[0].hidden_tanh) and f.nets[0].hidden_tanh

    def sweep(self, batch: Batch, wanted: Collection[str]) -> Sweep | None:
        """None where something is not trained, or beyond the table, or only a part of a batch is here, or nothing but
        energies is asked for, which takes less."""
        d, atoms = self.descriptor, batch.type
        if not compiled(atoms) or not OUTPUTS.issuperset(wanted) or DERIVATIVES.isdisjoint(wanted):
            return None
        if batch.part is not None or batch.own is not None:
            return None
        if d.table.grid is None or batch.edges.nearest < d.r_close or atoms.shape[0] == 0:
            return None
        if not all(p.requires_grad for p in self.parameters):
            return None
        at = [p.data_ptr() for p in self.parameters]
        if at != self._at:  # loops are given addresses
            self._at, self._table = at, None
            self._nets.clear()
            self._places.clear()
        if self._table is None or self._table.grid is not d.table.grid:
            self._table = Table(d, self.curve_nets, batch)
        return Sweep(self, self._table, batch, "virial" in wanted)

    def net(self, counts: tuple[int, ...]) -> OfLoops:
        """What loops take of the fitting nets, with memory for so many atoms of each type."""
        if counts in self._nets:
            return self._nets[counts]
        dtype = np.dtype(str(self.fitting.dtype).removeprefix("torch."))
        layers = plan(counts, self.fitting_nets[0].shape, dtype)
        numbers = sum(counts) * layers.numbers
        weights = addresses([net.weights for net in self.fitting_nets], self.ones)
        found = weights, layers.arguments, np.empty((3, numbers), dtype), np.empty(2 * numbers, dtype)
        if len(self._nets) < PLANS and found[2].nbytes < MOST:  # of large frames memory is soon filled
            self._nets[counts] = found
        return found

    def places(self, targets: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Addresses (layers, nets, 3) where the gradients of curves and of nets are to go."""
        for known, *places in self._places:
            if known is targets:
                return places[0], places[1]
        assert [t.shape for t in targets] == [p.shape for p in self.parameters]
        rest = iter(targets)
        for_curves, for_nets = (
            addresses([[instead(layer, rest) for layer in net.weights] for net in nets], self.unused)
            for nets in (self.curve_nets, self.fitting_nets)
        )
        self._places = [*self._places[-1:], (targets, for_curves, for_nets)]  # of the first micro-batch and of others
        return for_curves, for_nets


def instead(layer: Weights, targets: Iterator[Tensor]) -> Weights:
    """The next targets in the place of w, b and, where there is one, idt."""
    w, b, idt = layer
    return next(targets), next(targets), None if idt is None else next(targets)


class Table:
    """What stays as long as the grid does."""

    def __init__(self, d: SeE2A, nets: list[Net], batch: Batch):
        assert d.table.grid is not None
        geometry = d.geometry_of(batch, batch.edges.r)
        self.grid = d.table.grid
        self.sweep = curve = curves.Sweep(nets, d.table.nodes, self.grid)
        there, back = (self.grid.factors(curve.dtype, transposed) for transposed in (False, True))
        self.curve = curve.nodes.numpy(), curve.weights, curve.layout, there, curve.kept
        self.curve_back = *self.curve[:3], back, curve.kept
        self.constants, self.sel, self.curve_work = geometry.for_loops[4:], geometry.sel.numpy(), curve.work
        self.C = np.empty((1 if d.one_side else d.ntypes, d.ntypes * self.grid.K, d.M1), curve.dtype)


class Sweep:
    """One batch: forwards when it is made, then `adjoints`."""

    def __init__(self, fused: Fused, table: Table, batch: Batch, virial: bool):
        d, edges, N = fused.descriptor, batch.edges, batch.type.shape[0]
        self.fused, self.table, self.net = fused, table, fused.net(batch.type_counts)
        fused.sweeps += 1
        self.number = fused.sweeps
        types, i, j, r, first, frame = (
            x.numpy() for x in (batch.type, edges.i, edges.j, edges.r, edges.first, batch.frame)
        )
        work = table.curve_work, len(i), N * d.dim // NUMBERS, N * d.dim // INPUTS
        self.pools = tuple(threads(amount) for amount in work)  # others may want the cores: see train/free_cores.py
        self.counts = batch.type_counts if len(table.C) > 1 else (N,)
        self.of_edges = i, frame, (r, j, first, types, *table.constants), d.nnei, d.M2
        self.tiles = tiles_of(self.counts, self.pools[1][1], ATOMS)
        energy, forces = np.zeros(batch.nframes), np.zeros((N, 3))
        V = np.zeros((batch.nframes if virial else 0, 9))
        given = table.curve, table.C, self.tiles, *self.of_edges, table.sel, self.net
        bias = fused.fitting.bias_atom_e.numpy()
        self.kept = fused_kernels.forward(*given, bias, energy, forces, V, self.pools)
        self.outputs = {"energy": torch.from_numpy(energy), "forces": torch.from_numpy(forces)}
        if virial:
            self.outputs["virial"] = torch.from_numpy(V)

    def adjoints(self, of_outputs: dict[str, Tensor], targets: list[Tensor]) -> None:
        assert self.number == self.fused.sweeps, "another batch has this one's memory"
        table, E, F = self.table, *(of_outputs.get(name) for name in ("energy", "forces"))
        E, F = (torch.zeros_like(self.outputs[n]) if x is None else x for n, x in (("energy", E), ("forces", F)))
        V = of_outputs["virial"].contiguous().numpy() if "virial" in of_outputs else np.empty((0, 9))
        strips = strips_of(self.counts, table.C.shape[2], lanes(table.C.dtype), self.pools[1][1])
        given = table.curve_back, table.C, self.tiles, strips, *self.of_edges, self.net, self.kept
        adjoints = E.contiguous().numpy(), F.contiguous().numpy(), V
        fused_kernels.backward(*given, *adjoints, *self.fused.places(targets), self.pools)

    def hidden_and_tangents(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """What the last layers are given (N, H), and its tangents (p, N, H) along displacements v (p, N, 3)."""
        assert self.number == self.fused.sweeps, "another batch has this one's memory"
        weights, layers, numbers, _ = self.net
        made, found = np.empty((3, numbers.shape[1]), numbers.dtype), []
        given = self.table.C, self.tiles, *self.of_edges, (weights, layers, numbers), self.kept
        for one in -v:  # forwards of forces is the transpose of what displacements do
            fused_kernels.tangent(*given, one.numpy(), made, self.pools)
            found.append(last_hidden(made[scalar_kernels.A_DOT], layers, v.shape[1]).clone())
        return last_hidden(numbers[scalar_kernels.A], layers, v.shape[1]), torch.stack(found)
