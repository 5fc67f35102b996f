"""Nets of one scalar as splines on a common grid: the table on which they are trained.

    G_n(x) ≈ Σ_k B_k(x) C_nk ,   C = M⁻¹ G(nodes)        see spline.py

For every descriptor whose embedding is a curve of one scalar for each pair of types. The nets are a module that maps
x (P, 1) to their values (P, nets, M).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from allforce.config.keys import Int
from allforce.config.section import WIDEST, Section, key
from allforce.models import curves
from allforce.models.spline import DEGREE, Grid

PLACES = 256  # at which the error is looked at together
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5}


class TableConfig(Section):
    """How the embedding nets are evaluated while training. A frozen model has the plain nets either way."""

    mode: Literal["table", "exact"] = key(
        "table", "Interpolate the embedding nets between nodes, or evaluate them for every neighbour.", own=True
    )
    tolerance: float | None = key(
        None, "Largest error of the interpolation; 1e-7 for float64 and 1e-5 for float32 when left out.", gt=0, own=True
    )
    nodes: Int = key(
        64, "Nodes to begin with; more are taken when the tolerance asks for it.", ge=9, le=WIDEST, own=True
    )
    reach: ClassVar[float] = 0.95  # down to this part of the smallest distance in the training data
    most: ClassVar[int] = 4096  # nodes; if these are too few, the nets are evaluated for every neighbour


class InferenceTable(TableConfig):
    """For a model that is not trained: nodes of the table where nobody is cost nothing (table_kernels.py), and the
    nets for every neighbour that comes closer than it reaches much."""

    reach = 0.7
    most = 8192


class SplineTable(nn.Module):
    """The grid, and the error of the nets on it. `grid` None: the nets are evaluated for every neighbour."""

    nodes: Tensor  # (K, 1)
    inverse: Tensor  # (K, K) M⁻¹, empty until it is needed

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.tolerance, self.most = self.default_tolerance, TableConfig.most
        self.grid: Grid | None = None
        self.decided = False  # whether it has been decided if there is a grid
        self._kept: tuple[nn.Module, list[nn.Parameter], object, Tensor | None] | None = None  # see coefficients
        self.register_buffer("nodes", torch.zeros(0, 1, dtype=dtype), persistent=False)
        self.register_buffer("inverse", torch.zeros(0, 0, dtype=dtype), persistent=False)

    @property
    def default_tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def K(self) -> int:
        """Number of nodes, 0 without a table."""
        return 0 if self.grid is None else self.grid.K

    def set_grid(self, grid: Grid | None) -> None:
        self.grid, self.decided = grid, True
        if grid is not None:
            self.nodes = torch.from_numpy(grid.nodes()[:, None]).to(self.nodes)
            self.inverse = self.nodes.new_zeros(0, 0)

    def to_coefficients(self, G: Tensor) -> Tensor:
        """C (K, …) from values G (K, …) at the nodes; differentiable."""
        if len(self.inverse) != self.K:
            assert self.grid is not None
            self.inverse = torch.from_numpy(self.grid.collocation_inverse()).to(self.nodes)
        return (self.inverse @ G.flatten(1)).view_as(G)

    def coefficients(self, nets: nn.Module, arrange: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """C (K, nets, M), or what `arrange` makes of it: the nets as splines, differentiable by their parameters.

        Those of nets that are not trained are kept as long as these, and the grid, are as they were.
        """
        if self._kept is None or self._kept[0] is not nets:
            self._kept = nets, list(nets.parameters()), None, None  # a walk through the modules costs more than a look
        _, parameters, state, C = self._kept
        if any(p.requires_grad for p in parameters):
            assert self.grid is not None
            if curves.suits(nets, self.nodes):
                C = curves.splines(nets, self.nodes, self.grid).transpose(0, 1)
            else:
                C = self.to_coefficients(nets(self.nodes))
            return C if arrange is None else arrange(C)
        now = self.grid, arrange, [(p.data_ptr(), p._version) for p in parameters]
        if C is None or state != now:
            assert self.grid is not None
            G = nets(self.nodes)
            C = torch.from_numpy(self.grid.solve(G.flatten(1).cpu().numpy())).to(G).view_as(G)
            C = C if arrange is None else arrange(C)
            self._kept = nets, parameters, now, C
        return C

    def interpolate(self, C: Tensor, x: Tensor) -> Tensor:
        """Values (P, M) at x (P,) from C (K, M) of one net; differentiable by x and C."""
        assert self.grid is not None
        return self.grid.interpolate(C, x.clamp(max=self.grid.hi))[0]

    def error(self, nets: nn.Module) -> float:
        """Largest error of value and slope at the mid-points of the grid, relative to the largest of each net."""
        assert self.grid is not None
        g, device = self.grid, self.nodes.device
        double = {name: p.detach().double() for name, p in nets.named_parameters()}

        def curve(x: Tensor) -> Tensor:  # in float64, so that what is measured is the interpolation and not rounding
            return torch.func.functional_call(nets, double, (x[:, None],))

        middle = g.lo + g.h * (torch.arange(g.K - DEGREE, dtype=torch.float64, device=device) + 0.5)
        G = curve(torch.from_numpy(g.nodes()).to(device))
        C = torch.from_numpy(g.solve(G.flatten(1).cpu().numpy())).to(device)
        off, largest = torch.zeros(2, 2, G.shape[1], dtype=torch.float64, device=device)  # of values and slopes, by net
        for x in middle.split(PLACES):
            exact = torch.stack(with_slopes(curve, x))
            near = torch.stack(g.interpolate(C, x)).view_as(exact)
            off = torch.maximum(off, (near - exact).abs().amax((1, 3)))
            largest = torch.maximum(largest, exact.abs().amax((1, 3)))
        return float((off / largest.clamp(min=1e-30)).max())

    def nodes_for(self, error: float, K: int) -> int:
        """K that brings an error of K nodes within tolerance: that of slopes goes with h^DEGREE. In steps of a vector
        register, and a quarter more at least."""
        factor = max(1.25, 1.02 * (error / self.tolerance) ** (1 / DEGREE))
        return 8 * ceil(min(factor, 2.5) * K / 8)

    def refresh(self, nets: nn.Module) -> str | None:
        """Raise K until the error is within tolerance; says what was done, None when nothing was."""
        if self.grid is None or (error := self.error(nets)) <= self.tolerance:
            return None
        old, grid, now = self.grid.K, self.grid, error
        while now > self.tolerance and (K := self.nodes_for(now, grid.K)) <= self.most:
            grid = Grid(grid.lo, grid.hi, K)
            self.set_grid(grid)
            now = self.error(nets)
        if now > self.tolerance:
            self.grid = None
            return f"embedding table: error {now:.1e} > {self.tolerance:.0e} with {grid.K} nodes; exact from here on"
        return (
            f"embedding table: error {error:.1e} > {self.tolerance:.0e} with {old} nodes; now {now:.1e} with {grid.K}"
        )


def with_slopes(curve: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """y (P, …) and ∂y_p/∂x_p of a curve, for which y_p depends on x_p (P,) alone: ∂/∂v of ∂(Σ v y)/∂x.

    By gradients of plain numbers: torch's own function for it takes half a second to be imported.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = curve(x)
        v = torch.ones_like(y, requires_grad=True)
        (slope,) = torch.autograd.grad((v * y).sum(), x, create_graph=True)
        return y.detach(), torch.autograd.grad(slope.sum(), v)[0]
