"""The network PiNet2 of PiNN: PiNet with vectors beside the scalars.

    I1 = II(PI(P1)),  I3 = (P3_j + n)·I1      P1' = PP(IP(I1)),  P3' = (Σ_j I3)·W          n: unit vector of the pair
    [p1, s] = PP([P1', P3'·P3']),  p3 = s·P3'     P1 ← P1 + p1,  P3 ← P3 + p3,  out += Out_t(p1)

Layers, names and parameters as in pinet.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from allforce.data.batch import Edges
from allforce.models import pinet_steps as steps
from allforce.models.pinet import FF, PI, Dense, Elements, Maker, Out, Residual, basis_of, of_atoms
from allforce.models.pinet2_steps import Columns, Dot, Scaled, Vectors


class Invariant(nn.Module):
    """I1 = II(PI(P1)) of pairs and P1' = PP(IP(I1)) of atoms, neither II nor this PP with a bias."""

    def __init__(self, size_in: int, config: Any, n_props: int, n_basis: int, make: Maker):
        super().__init__()
        *hidden, last = config.ii_nodes
        self.pi_layer = PI(size_in, config.pi_nodes, n_basis, config.act, make)
        self.ii_layer = FF(self.pi_layer.size, [*hidden, last * n_props], config.act, make, bias=False)
        self.pp_layer = FF(self.ii_layer.size, config.pp_nodes, config.act, make, bias=False)

    def forward(self, P1: Tensor, edges: Edges, e: Tensor, elements: Elements | None) -> tuple[Tensor, Tensor]:
        I1 = self.ii_layer(self.pi_layer(P1, edges, e, elements))
        return self.pp_layer(of_atoms(I1, edges, len(P1))), I1

    def record(
        self, tape: steps.Tape, P1: steps.Quantity | None, elements: Elements
    ) -> tuple[steps.Quantity, steps.Quantity]:
        I1 = self.ii_layer.record(tape, self.pi_layer.record(tape, P1, elements))
        return self.pp_layer.record(tape, steps.SumOfPairs(tape, I1).out), I1


class Mixed(nn.Module):
    """Two square matrices, on the two factors of what `weighted` makes different."""

    def __init__(self, size: int, make: Maker):
        super().__init__()
        self.wi, self.wj = Dense(size, size, make, bias=False), Dense(size, size, make, bias=False)


class Equivariant(nn.Module):
    """Vectors: I3 = (P3_j + n)·I1, P3' = (Σ_j I3)·W, and their squares; n is the unit vector of the pair.

    weighted: P3_i·W_i + P3_j·W_j in the place of P3_j, (P3'·V_i)·(P3'·V_j) in that of P3'·P3'.
    """

    def __init__(self, size_in: int, config: Any, make: Maker):
        super().__init__()
        size = config.pp_nodes[-1]
        self.pi_layer = Mixed(size_in, make) if config.weighted else None
        self.pp_layer = FF(size, [size], "linear", make, bias=False)
        self.dot_layer = Mixed(size, make) if config.weighted else None

    def forward(self, P3: Tensor, I1: Tensor, n: Tensor, edges: Edges) -> tuple[Tensor, Tensor, Tensor]:
        if self.pi_layer is None:
            seen = P3.index_select(0, edges.j)
        else:
            of_i, of_j = self.pi_layer.wi(P3), self.pi_layer.wj(P3)
            seen = of_i.index_select(0, edges.i) + of_j.index_select(0, edges.j)
        I3 = (seen + n[:, :, None]) * I1[:, None, :]  # (E, 3, c)
        new = self.pp_layer(of_atoms(I3, edges, len(P3)))
        left, right = (new, new) if self.dot_layer is None else (self.dot_layer.wi(new), self.dot_layer.wj(new))
        return new, I3, (left * right).sum(1)

    def record(
        self, tape: steps.Tape, P3: steps.Quantity | None, I1: steps.Quantity
    ) -> tuple[steps.Quantity, steps.Quantity]:
        """P3: None in the first block, where it is 0."""
        of_i, of_j = None, P3
        if P3 is None and self.pi_layer is not None:  # of no effect, but weights of the network
            tape.weight(self.pi_layer.wi.kernel), tape.weight(self.pi_layer.wj.kernel)
        if P3 is not None and self.pi_layer is not None:
            of_i, of_j = (layer.record(tape, P3, tanh=False) for layer in (self.pi_layer.wi, self.pi_layer.wj))
        new = self.pp_layer.record(tape, Vectors(tape, I1, self.pp_layer.size, of_i, of_j).out)
        left = right = new
        if self.dot_layer is not None:
            left, right = (layer.record(tape, new, tanh=False) for layer in (self.dot_layer.wi, self.dot_layer.wj))
        return new, Dot(tape, left, right).out


class Block2(nn.Module):
    """A block of PiNet2: scalars P1 (N, c) and, from rank 3 on, vectors P3 (N, 3, c)."""

    def __init__(self, size1: int, size3: int, config: Any, n_basis: int, make: Maker):
        super().__init__()
        self.vectors = config.rank >= 3
        n_props = 2 if self.vectors else 1
        *hidden, width = config.pp_nodes
        self.invar_p1_layer = Invariant(size1, config, n_props, n_basis, make)
        self.pp_layer = FF(width * n_props, [*hidden, config.ii_nodes[-1] * n_props], config.act, make)
        self.equivar_p3_layer = Equivariant(size3, config, make) if self.vectors else None

    def forward(
        self, P1: Tensor, P3: Tensor, edges: Edges, e: Tensor, n: Tensor, elements: Elements | None
    ) -> dict[str, Tensor]:
        """The new properties p1, p3 of atoms and i1, i3 of pairs."""
        p1, i1 = self.invar_p1_layer(P1, edges, e, elements)
        if self.equivar_p3_layer is None:
            return {"p1": self.pp_layer(p1), "i1": i1}
        p3, i3, dotted = self.equivar_p3_layer(P3, i1.chunk(2, dim=1)[1], n, edges)
        p1, scale = self.pp_layer(torch.cat([p1, dotted], dim=1)).chunk(2, dim=1)
        return {"p1": p1, "i1": i1, "p3": p3 * scale[:, None, :], "i3": i3, "dotted_p3": dotted}

    def record(
        self, tape: steps.Tape, P1: steps.Quantity | None, P3: steps.Quantity | None, elements: Elements
    ) -> tuple[steps.Quantity, steps.Quantity | None]:
        """The new properties of atoms."""
        p1, i1 = self.invar_p1_layer.record(tape, P1, elements)
        if self.equivar_p3_layer is None:
            return self.pp_layer.record(tape, p1), None
        width = self.equivar_p3_layer.pp_layer.size
        p3, dotted = self.equivar_p3_layer.record(tape, P3, i1)
        both = self.pp_layer.record(tape, Columns(tape, [p1, dotted], 0, 2 * width).out)
        p1, scale = (Columns(tape, [both], k * width, (k + 1) * width).out for k in range(2))
        return p1, Scaled(tape, p3, scale).out


class PiNet2(nn.Module):
    """PiNet with vectors beside the scalars. `out_extra`: further outputs by what they are read from.

    Rank 1 has scalars only. Output layers of vectors have biases, as in PiNN, that begin with 0: see the docs.
    """

    def __init__(self, config: Any, n_types: int, make: Maker):
        super().__init__()
        self.basis, self.extra = basis_of(config), dict(config.out_extra)
        width, vectors = config.ii_nodes[-1], config.rank >= 3
        sizes = {"p1": width, "p3": width, "i3": width, "dotted_p3": width, "i1": width * (2 if vectors else 1)}
        size1, size3, blocks, update1, update3 = n_types, 1, [], [], []
        for _ in range(config.depth):
            blocks.append(Block2(size1, size3, config, self.basis.size, make))
            update1.append(Residual(size1, width, make))
            update3.append(Residual(size3, width, make))
            size1 = size3 = width
        self.gc_blocks: list[Block2] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.res_update1: list[Residual] = nn.ModuleList(update1)  # type: ignore[assignment]
        self.res_update3: list[Residual] | None = nn.ModuleList(update3) if vectors else None  # type: ignore[assignment]
        outs = nn.ModuleList(Out(width, config.out_nodes, 1, make) for _ in blocks)
        self.out_layers: list[Out] = outs  # type: ignore[assignment]
        for name, units in self.extra.items():
            layers = nn.ModuleList(Out(sizes[name], config.out_nodes, units, make) for _ in blocks)
            self.add_module(f"{name}_out_layers", layers)

    def forward(self, elements: Elements, edges: Edges, r: Tensor) -> dict[str, Tensor]:
        """{"out": (N,), "p3": (N, 3, units), "i1": (E, units), …}: `out` and those of out_extra."""
        P, distance = elements.properties(), torch.linalg.vector_norm(r, dim=1)
        e, n = self.basis(distance).to(P.dtype), (r / distance[:, None]).to(P.dtype)
        P1, P3 = P, P.new_zeros(len(P), 3, 1)
        out: dict[str, Tensor] = {}
        readers = {"out": self.out_layers, **{x: getattr(self, f"{x}_out_layers") for x in self.extra}}
        for t, block in enumerate(self.gc_blocks):
            new = block(P1, P3, edges, e, n, elements if t == 0 else None)
            for name, layers in readers.items():
                value = layers[t](new["p1" if name == "out" else name])
                out[name] = value if t == 0 else out[name] + value
            P1 = self.res_update1[t](P1, new["p1"])
            if self.res_update3 is not None:
                P3 = self.res_update3[t](P3, new["p3"])
        return {**out, "out": out["out"][:, 0]}

    def record(self, tape: steps.Tape, elements: Elements) -> None:
        """`out`, step by step, for derivatives by hand."""
        P1, P3 = None, None
        for t, block in enumerate(self.gc_blocks):
            p1, p3 = block.record(tape, P1, P3, elements)
            self.out_layers[t].record(tape, p1)
            P1 = self.res_update1[t].record(tape, elements.properties() if P1 is None else P1, p1)
            if self.res_update3 is not None and p3 is not None:
                P3 = self.res_update3[t].record(tape, tape.like.new_zeros(len(p3.y), 1) if P3 is None else P3, p3)
