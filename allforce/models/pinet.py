"""The network PiNet of PiNN: atoms and pairs refine each other's properties, block by block.

    P_i   properties of an atom, at first which element it is         e_b  radial basis of a pair, 0 at the cutoff
    PI    w = FF([P_i, P_j]) (c, n_basis),  I_c = Σ_b w_cb e_b        II   I ← FF(I), without bias
    IP    P'_i = Σ_j I_ij                                              PP   P ← FF(P)
    out   += Out_t(P'),  a linear net of the new properties            res  P ← P + P', P·W + P' where widths differ

A block of PiNet is P' = IP(II(PI(PP(P)))), the first one without PP. FF is a chain of dense layers x·kernel + bias with
the activation on every one. Modules and parameters are named as PiNN names them, so its weights go in by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import pi, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from allforce.data.batch import Edges
from allforce.models import pinet_steps as steps
from allforce.models.layers import activation
from allforce.models.pinet_ops import interaction, tanh

TANH_1 = math.tanh(1.0)
FEW = 4  # types, up to which a first PI by pairs of types is less work than by pairs of atoms
CUTOFFS = {  # (r, rc) -> value, 0 at rc with a slope of 0
    "f1": lambda r, rc: 0.5 * (torch.cos(pi * r / rc) + 1.0),
    "f2": lambda r, rc: (torch.tanh(1.0 - r / rc) / TANH_1) ** 3,
    "hip": lambda r, rc: torch.cos(pi * r / (2.0 * rc)) ** 2,
}


class Elements(NamedTuple):
    """What a network begins with: P_i = rows[types_i]."""

    rows: Tensor  # (nt, n_types)
    types: Tensor  # (N,)

    def properties(self) -> Tensor:
        return self.rows.index_select(0, self.types)


class Basis(nn.Module):
    """e_b of distances: powers 1 … n_basis (or a list) of the cutoff function, or Gaussians times it."""

    center: Tensor
    gamma: Tensor

    def __init__(
        self, cutoff_type: str, basis_type: str, rc: float, n_basis: int | Sequence[int],
        gamma: float | Sequence[float], center: Sequence[float] | None,
    ):  # fmt: skip
        super().__init__()
        self.cutoff, self.rc, self.gaussian = CUTOFFS[cutoff_type], rc, basis_type == "gaussian"
        if self.gaussian:
            assert isinstance(n_basis, int)
            centers = np.linspace(0.0, rc, n_basis) if center is None else np.array(center, dtype=np.float64)
            gammas = np.broadcast_to(np.array(gamma, dtype=np.float64), centers.shape).copy()
            self.register_buffer("center", torch.from_numpy(centers), persistent=False)
            self.register_buffer("gamma", torch.from_numpy(gammas), persistent=False)
            self.size = len(centers)
        else:
            self.powers = list(range(1, n_basis + 1)) if isinstance(n_basis, int) else list(n_basis)
            self.size = len(self.powers)

    def with_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """e_b and ∂e_b/∂r, both (E, nb)."""
        with torch.enable_grad():
            x = r.detach().requires_grad_()
            fc = self.cutoff(x, self.rc)
            (slope,) = torch.autograd.grad(fc.sum(), x)
        fc = fc.detach()
        if self.gaussian:
            apart = r[:, None] - self.center
            bells = torch.exp(-self.gamma * apart**2)
            return bells * fc[:, None], bells * (slope[:, None] - 2.0 * self.gamma * apart * fc[:, None])
        powers = [(fc ** (n - 1), n) for n in self.powers]
        return torch.stack([p * fc for p, _ in powers], 1), torch.stack([n * p * slope for p, n in powers], 1)

    def forward(self, r: Tensor) -> Tensor:
        """(E, nb) from distances (E,)."""
        fc = self.cutoff(r, self.rc)
        if self.gaussian:
            return torch.exp(-self.gamma * (r[:, None] - self.center) ** 2) * fc[:, None]
        return torch.stack([fc**n for n in self.powers], dim=1)


class Dense(nn.Module):
    """x·kernel + bias; kernels begin uniform in ±√(6/(in + out)), biases with 0, as Keras has it."""

    def __init__(self, size_in: int, size_out: int, make: Maker, bias: bool = True):
        super().__init__()
        self.kernel = make.kernel(size_in, size_out)
        self.bias = make.zeros(size_out) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # (…, in) -> (…, out)
        return x @ self.kernel if self.bias is None else torch.addmm(self.bias, x, self.kernel)

    def record(self, tape: steps.Tape, x: steps.Quantity, tanh: bool = True) -> steps.Quantity:
        bias = None if self.bias is None else tape.weight(self.bias)
        return steps.Dense(tape, x, tape.weight(self.kernel), bias, tanh).out


class Maker:
    """Makes parameters, one after the other from one stream of random numbers."""

    def __init__(self, rng: np.random.Generator, dtype: torch.dtype):
        self.rng, self.dtype = rng, dtype

    def kernel(self, size_in: int, size_out: int) -> nn.Parameter:
        limit = sqrt(6.0 / (size_in + size_out))
        return nn.Parameter(torch.from_numpy(self.rng.uniform(-limit, limit, (size_in, size_out))).to(self.dtype))

    def zeros(self, size: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(size, dtype=self.dtype))


class FF(nn.Module):
    """Dense layers with the activation on each, also on the last."""

    def __init__(self, size_in: int, nodes: Sequence[int], act: str, make: Maker, bias: bool = True):
        super().__init__()
        sizes = [size_in, *nodes]
        layers = [Dense(a, b, make, bias) for a, b in zip(sizes, nodes, strict=False)]
        self.dense_layers: list[Dense] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.phi = tanh if act == "tanh" else activation(act)
        self.size = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.dense_layers:
            x = self.phi(layer(x))
        return x

    def record(self, tape: steps.Tape, x: steps.Quantity) -> steps.Quantity:
        for layer in self.dense_layers:
            x = layer.record(tape, x, self.phi is tanh)
        return x


class PI(nn.Module):
    """From the properties of two atoms and the basis of their distance to the interaction I (E, c)."""

    def __init__(self, size_in: int, nodes: Sequence[int], n_basis: int, act: str, make: Maker):
        super().__init__()
        self.size_in, self.size, self.n_basis, self.tanh = size_in, nodes[-1], n_basis, act == "tanh"
        self.ff_layer = FF(2 * size_in, [*nodes[:-1], nodes[-1] * n_basis], act, make)

    def forward(self, P: Tensor, edges: Edges, e: Tensor, elements: Elements | None = None) -> Tensor:
        """elements: what P was made of, in the first block."""
        if elements is not None and len(elements.rows) <= FEW:
            return self.of_elements(*elements, edges, e)
        z = self.net(P, edges.i, edges.j)
        return interaction(z, e) if self.tanh else (self.ff_layer.phi(z) * e[:, :, None]).sum(1)

    def of_elements(self, rows: Tensor, types: Tensor, edges: Edges, e: Tensor) -> Tensor:
        """The same where P is rows[types]: w depends on the two types only, so the sum over b is a product:
        e, in the columns that belong to these types and 0 elsewhere, times the w of all pairs of types."""
        n, grid = len(rows), torch.arange(len(rows), device=e.device)
        w = self.ff_layer.phi(self.net(rows, grid.repeat_interleave(n), grid.repeat(n)))  # (n², n_basis, c)
        pair = types.index_select(0, edges.i) * n + types.index_select(0, edges.j)
        columns = pair[:, None] * self.n_basis + torch.arange(self.n_basis, device=e.device)
        return e.new_zeros(len(e), n * n * self.n_basis).scatter(1, columns, e) @ w.flatten(0, 1)

    def record(self, tape: steps.Tape, P: steps.Quantity | None, elements: Elements) -> steps.Quantity:
        """P: None in the first block, where w depends on the two elements only."""
        if P is None:
            present, inverse = torch.unique(elements.types, return_inverse=True)
            n, grid = len(present), torch.arange(len(present))
            kinds = self.ff_layer.phi(self.net(elements.rows[present], grid.repeat_interleave(n), grid.repeat(n)))
            return steps.OfKinds(tape, inverse[tape.edges.i] * n + inverse[tape.edges.j], kinds).out
        first, *others = self.ff_layer.dense_layers
        assert first.bias is not None
        # [P_i, P_j]·kernel = a_i + b_j, and [a, b] of all atoms is one product
        split, by_basis = (2, self.size_in, -1), (self.size, self.n_basis)
        if not others:  # in both cases (c, n_basis) -> (n_basis, c) for the last layer
            w = tape.weight(first.kernel, (*split[:2], *by_basis), (1, 0, 3, 2))
            b = tape.weight(first.bias, by_basis, (1, 0))
            return steps.Direct(tape, steps.Dense(tape, P, w, b, tanh=False).out, self.n_basis).out
        ab = steps.Dense(tape, P, tape.weight(first.kernel, split, (1, 0, 2)), tape.weight(first.bias), tanh=False).out
        x, (*hidden, last) = steps.Pairs(tape, ab).out, others
        for layer in hidden:
            x = layer.record(tape, x)
        assert last.bias is not None
        w, b = tape.weight(last.kernel, (-1, *by_basis), (0, 2, 1)), tape.weight(last.bias, by_basis, (1, 0))
        return steps.Interaction(tape, x, w, b, self.n_basis).out

    def net(self, P: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """FF([P_i, P_j]) before its last activation, (pairs, n_basis, c)."""
        layers: list[Any] = [(layer.kernel, layer.bias) for layer in self.ff_layer.dense_layers]
        layers[-1] = self._by_basis(*layers[-1])
        (kernel, bias), *others = layers
        # [P_i, P_j]·kernel = P_i·upper + P_j·lower: products over atoms, which are fewer than pairs
        of_i, of_j = P @ kernel[: self.size_in], torch.addmm(bias, P, kernel[self.size_in :])
        z = of_i.index_select(0, i) + of_j.index_select(0, j)
        for kernel, bias in others:
            z = torch.addmm(bias, self.ff_layer.phi(z), kernel)
        return z.view(-1, self.n_basis, self.size)

    def _by_basis(self, kernel: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Columns (c, n_basis) -> (n_basis, c): sums over the basis are then sums of rows."""
        shape = (-1, self.size, self.n_basis)
        kernel, bias = kernel.view(shape).transpose(1, 2), bias.view(shape[1:]).T
        return kernel.flatten(1), bias.flatten()


class Out(nn.Module):
    """A linear net: dense layers without activation, the last one without bias."""

    def __init__(self, size_in: int, nodes: Sequence[int], units: int, make: Maker):
        super().__init__()
        self.ff_layer = FF(size_in, nodes, "linear", make)
        self.out_units = Dense(self.ff_layer.size, units, make, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (…, c) -> (…, units)
        y = self.out_units(self.ff_layer(x.flatten(0, -2)))
        return y.view(*x.shape[:-1], y.shape[-1])

    def record(self, tape: steps.Tape, x: steps.Quantity) -> None:
        chain: list[Any] = list(self.ff_layer.dense_layers)
        layers = [(tape.weight(layer.kernel), tape.weight(layer.bias)) for layer in chain]
        steps.Out(tape, x, layers, tape.weight(self.out_units.kernel))


class Residual(nn.Module):
    """P + P', with a matrix on P when their widths differ."""

    def __init__(self, size_in: int, size_out: int, make: Maker):
        super().__init__()
        self.transform = Dense(size_in, size_out, make, bias=False) if size_in != size_out else None

    def forward(self, old: Tensor, new: Tensor) -> Tensor:
        return (old if self.transform is None else self.transform(old)) + new

    def record(self, tape: steps.Tape, old: steps.Quantity | Tensor, new: steps.Quantity) -> steps.Quantity:
        return steps.Residual(tape, old, None if self.transform is None else self.transform.kernel, new).out


def of_atoms(I: Tensor, edges: Edges, natoms: int) -> Tensor:  # noqa: E741
    """IP: Σ_j I_ij of the pairs (E, …) of each atom (N, …)."""
    return I.new_zeros(natoms, *I.shape[1:]).index_add(0, edges.i, I)


class Block(nn.Module):
    """PP, PI, II, IP of PiNet; the first block of a network has no PP."""

    def __init__(self, size_in: int, first: bool, config: Any, n_basis: int, make: Maker):
        super().__init__()
        self.pp_layer = None if first else FF(size_in, config.pp_nodes, config.act, make)
        size_in = size_in if self.pp_layer is None else self.pp_layer.size
        self.pi_layer = PI(size_in, config.pi_nodes, n_basis, config.act, make)
        self.ii_layer = FF(self.pi_layer.size, config.ii_nodes, config.act, make, bias=False)

    def forward(self, P: Tensor, edges: Edges, e: Tensor, elements: Elements | None) -> Tensor:
        Q = P if self.pp_layer is None else self.pp_layer(P)
        return of_atoms(self.ii_layer(self.pi_layer(Q, edges, e, elements)), edges, len(P))

    def record(self, tape: steps.Tape, P: steps.Quantity | None, elements: Elements) -> steps.Quantity:
        Q = P if P is None or self.pp_layer is None else self.pp_layer.record(tape, P)
        return steps.SumOfPairs(tape, self.ii_layer.record(tape, self.pi_layer.record(tape, Q, elements))).out


class PiNet(nn.Module):
    """Scalars only. Parameters as those of PiNN's class; act: a name of layers.ACTIVATIONS."""

    def __init__(self, config: Any, n_types: int, make: Maker):
        super().__init__()
        self.basis = basis_of(config)
        width, blocks, outs, residuals = n_types, [], [], []
        for t in range(config.depth):
            blocks.append(Block(width, t == 0, config, self.basis.size, make))
            outs.append(Out(config.ii_nodes[-1], config.out_nodes, 1, make))
            residuals.append(Residual(width, config.ii_nodes[-1], make))
            width = config.ii_nodes[-1]
        self.gc_blocks: list[Block] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.out_layers: list[Out] = nn.ModuleList(outs)  # type: ignore[assignment]
        self.res_update: list[Residual] = nn.ModuleList(residuals)  # type: ignore[assignment]

    def forward(self, elements: Elements, edges: Edges, r: Tensor) -> dict[str, Tensor]:
        """{"out": (N,)} from the elements of N atoms and the edge vectors r (E, 3)."""
        P = elements.properties()
        e = self.basis(torch.linalg.vector_norm(r, dim=1)).to(P.dtype)
        out = P.new_zeros(len(P), 1)
        for t, block in enumerate(self.gc_blocks):
            new = block(P, edges, e, elements if t == 0 else None)
            out = out + self.out_layers[t](new)
            P = self.res_update[t](P, new)
        return {"out": out[:, 0]}

    def record(self, tape: steps.Tape, elements: Elements) -> None:
        """The same, step by step, for derivatives by hand."""
        P = None
        for t, block in enumerate(self.gc_blocks):
            new = block.record(tape, P, elements)
            self.out_layers[t].record(tape, new)
            P = self.res_update[t].record(tape, elements.properties() if P is None else P, new)


def basis_of(config: Any) -> Basis:
    return Basis(config.cutoff_type, config.basis_type, config.rc, config.n_basis, config.gamma, config.center)
