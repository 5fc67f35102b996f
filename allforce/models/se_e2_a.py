"""The two-body embedding descriptor se_e2_a.

    R̂_e = (R_e − davg)/dstd  of the centre type,    G_e = net_{τ_j}(R̂_e0)   (or net_{τ_i τ_j})
    T_i = (1/nnei) Σ_e R̂_e ⊗ G_e  over all nnei = Σ sel slots, an empty slot counting as R = 0        4 × M1
    D_i = T_iᵀ T_i[:, :M2]                                                                          M1 × M2

G is a curve of one scalar, so it is trained on a table (moments.py); `exact` evaluates the net for every neighbour.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from allforce.config.schema import DescriptorSeE2A
from allforce.data.batch import Batch
from allforce.models.edges import Gram, GramPull
from allforce.models.envmat import environment
from allforce.models.layers import DTYPES, NOT_SMOOTH, Net, generator
from allforce.models.moments import Geometry, TablePull, TableSum
from allforce.models.spline import DEGREE, Grid

MAX_NODES = 4096
NEAREST = 0.7  # Å, the table's near end when the data's smallest distance is not known
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5}


class SeE2A(nn.Module):
    """D (N, M1·M2) of a batch."""

    davg: Tensor  # (nt, 4) only component 0 is not zero
    dstd: Tensor  # (nt, 4) radial, and three times the angular
    sel: Tensor  # (nt,)
    used: Tensor  # (nt, nt)
    nodes: Tensor  # (K, 1)
    to_coefficients: Tensor  # (K, K) M⁻¹

    def __init__(self, config: DescriptorSeE2A, ntypes: int):
        super().__init__()
        assert isinstance(config.sel, list), "sel is a list once the neighbours have been counted"
        self.config, self.ntypes, self.nnei = config, ntypes, float(sum(config.sel))
        self.dtype = DTYPES[config.dtype]
        self.M1, self.M2 = config.neuron[-1], config.axis_neuron
        self.dim = self.M1 * self.M2
        self.one_side = config.type_one_side
        self.nets: list[Net] = nn.ModuleList(  # type: ignore[assignment]
            Net(
                1, config.neuron, config.activation_function, config.resnet_dt, self.dtype, generator(config.seed, 0, n)
            )
            for n in range(
                ntypes if self.one_side else ntypes**2
            )  # place of (centre, neighbour): centre + ntypes·neighbour
        )
        self.requires_grad_(config.trainable)
        used = torch.ones(ntypes, ntypes, dtype=torch.bool)
        for a, b in config.exclude_types:
            used[a, b] = used[b, a] = False
        self.register_buffer("davg", torch.zeros(ntypes, 4, dtype=torch.float64))
        self.register_buffer("dstd", torch.ones(ntypes, 4, dtype=torch.float64))
        self.register_buffer("sel", torch.tensor(config.sel, dtype=torch.float64), persistent=False)
        self.register_buffer("used", used, persistent=False)
        self.grid: Grid | None = None  # None: exact
        self.tolerance = TOLERANCE[self.dtype]
        self.r_close = 0.0

    # ---- the table ----------------------------------------------------------------------------------------------

    def set_table(
        self, mode: str = "table", tolerance: float | None = None, nodes: int = 64, nearest: float | None = None
    ):
        """Lay the grid from s = 0 to the s of the nearest neighbours; call again when davg or dstd change."""
        self.tolerance = tolerance or TOLERANCE[self.dtype]
        if mode == "exact" or self.config.activation_function.lower().partition(":")[0] in NOT_SMOOTH:
            self.grid = None
            return
        self.r_close = 0.95 * (nearest or NEAREST)
        s = environment(torch.tensor([[self.r_close, 0.0, 0.0]], dtype=torch.float64), *self.radii())[0, 0]
        davg, dstd = self.davg[:, 0].cpu(), self.dstd[:, 0].cpu()
        self.lay_grid(Grid(float((-davg / dstd).min()), float(((s - davg) / dstd).max()), nodes))

    def radii(self) -> tuple[float, float, float]:
        return self.config.rcut_smth, self.config.rcut, self.config.env_protection

    def lay_grid(self, grid: Grid) -> None:
        self.grid = grid
        device = self.davg.device
        nodes, inverse = torch.from_numpy(grid.nodes()[:, None]), torch.from_numpy(grid.collocation_inverse())
        self.register_buffer("nodes", nodes.to(device, self.dtype), persistent=False)
        self.register_buffer("to_coefficients", inverse.to(device, self.dtype), persistent=False)

    def coefficients(self) -> Tensor:
        """C (nets, K, M1): the nets as splines; differentiable with respect to their parameters."""
        assert self.grid is not None
        G = torch.cat([net(self.nodes) for net in self.nets], dim=1)  # (K, nets·M1)
        return (self.to_coefficients @ G).view(self.grid.K, len(self.nets), self.M1).transpose(0, 1)

    def table_error(self) -> float:
        """Largest error of value and slope at the mid-points of the grid, relative to the largest value and slope."""
        assert self.grid is not None
        g = self.grid
        middle = g.lo + g.h * (torch.arange(g.K - DEGREE, dtype=torch.float64, device=self.davg.device) + 0.5)
        inverse = torch.from_numpy(g.collocation_inverse()).to(middle.device)
        worst = 0.0
        for net in self.nets:  # in float64, so that what is measured is the interpolation and not rounding
            double = {name: p.detach().double() for name, p in net.named_parameters()}

            def curve(x: Tensor, net: Net = net, double: dict[str, Tensor] = double) -> Tensor:
                return torch.func.functional_call(net, double, (x[:, None],))

            C = inverse @ curve(torch.from_numpy(g.nodes()).to(middle.device))
            exact = torch.autograd.functional.jvp(curve, middle, torch.ones_like(middle))
            for a, b in zip(g.interpolate(C, middle), exact, strict=True):
                worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)))
        return worst

    def check_table(self) -> str | None:
        """Double K until the error is within tolerance; says what was done, None when nothing was."""
        if self.grid is None or (error := self.table_error()) <= self.tolerance:
            return None
        old, grid = self.grid.K, self.grid
        while (now := self.table_error()) > self.tolerance and 2 * grid.K <= MAX_NODES:
            grid = Grid(grid.lo, grid.hi, 2 * grid.K)
            self.lay_grid(grid)
        if now > self.tolerance:
            self.grid = None
            return f"embedding table: error {now:.1e} > {self.tolerance:.0e} with {grid.K} nodes; exact from here on"
        return (
            f"embedding table: error {error:.1e} > {self.tolerance:.0e} with {old} nodes; now {now:.1e} with {grid.K}"
        )

    # ---- the descriptor -----------------------------------------------------------------------------------------

    def forward(self, batch: Batch, r: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """D (N, M1·M2), and the map that pulls ∂E/∂D back to ∂E/∂r_e (E, 3); both differentiable by the parameters."""
        T, pull_T = self.embed_exact(batch, r) if self.grid is None else self.embed_table(batch, r)  # (N, 4, M1)
        D = Gram.apply(T, self.M2)  # (N, M1, M2)
        return D.flatten(1), lambda gD: pull_T(GramPull.apply(gD.view_as(D), T))

    def embed_table(self, batch: Batch, r: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        assert self.grid is not None
        center = torch.stack([self.davg[:, 0], 1.0 / self.dstd[:, 0], 1.0 / self.dstd[:, 1]], 1)
        geometry = Geometry(
            r, batch.edges, batch.type, batch.type_counts, center, self.used, self.sel, *self.radii(), self.r_close,
            self.grid, self.dtype,
        )  # fmt: skip
        C = self.coefficients() / self.nnei  # (nets, K, M1)
        if not self.one_side:  # centre before neighbour
            C = C.view(self.ntypes, self.ntypes, self.grid.K, self.M1).transpose(0, 1)
        C = C.reshape(-1, self.ntypes * self.grid.K, self.M1)
        T = TableSum.apply(C, geometry)
        if batch.edges.nearest >= self.r_close:
            return T, lambda gT: TablePull.apply(gT, C, geometry)
        T_close, pull_close = self.embed_exact(batch, r, torch.linalg.vector_norm(r, dim=1) < self.r_close)
        return T + T_close, lambda gT: TablePull.apply(gT, C, geometry) + pull_close(gT)

    def embed_exact(
        self, batch: Batch, r: Tensor, subset: Tensor | None = None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """T by evaluating the net of every edge (of a subset, and then without the empty slots)."""
        training = torch.is_grad_enabled()
        with torch.enable_grad():
            r = r.detach().requires_grad_()
            T = self.sum_exact(batch, r, subset)

        def pull(gT: Tensor) -> Tensor:
            with torch.enable_grad():
                return torch.autograd.grad(T, r, gT, create_graph=training, allow_unused=True, materialize_grads=True)[
                    0
                ]

        return T if training else T.detach(), pull

    def sum_exact(self, batch: Batch, r: Tensor, subset: Tensor | None) -> Tensor:
        i, j = batch.edges.i, batch.edges.j
        if subset is not None:
            i, j, r = i[subset], j[subset], r[subset]
        center, neighbor = batch.type[i], batch.type[j]
        R = environment(r, *self.radii())
        R = ((R - self.davg[center]) / self.dstd[center] * self.used[center, neighbor][:, None]).to(self.dtype)
        T = torch.zeros(len(batch.type) * 4, self.M1, dtype=self.dtype, device=r.device)
        for n, net in enumerate(self.nets):
            c, t = (None, n) if self.one_side else (n % self.ntypes, n // self.ntypes)
            e = ((neighbor == t) & ((center == c) if c is not None else True)).nonzero()[:, 0]
            product = R[e][:, :, None] * net(R[e][:, :1])[:, None, :]  # (edges of the net, 4, M1)
            T = T.index_add(0, (i[e][:, None] * 4 + torch.arange(4, device=r.device)).flatten(), product.flatten(0, 1))
        T = T.view(-1, 4, self.M1)
        return (T if subset is not None else T + self.empty_slots(batch, i, neighbor)) / self.nnei

    def empty_slots(self, batch: Batch, i: Tensor, neighbor: Tensor) -> Tensor:
        """Σ_t (sel_t − n_it) p ⊗ net_t(p_0), p = −davg/dstd of the centre: what the padding of `sel` adds to T."""
        N, nt = len(batch.type), self.ntypes
        count = torch.zeros(N * nt, dtype=torch.float64, device=i.device).index_add_(
            0, i * nt + neighbor, torch.ones_like(i, dtype=torch.float64)
        )
        empty = (self.sel - count.view(N, nt)).clamp(min=0.0).to(self.dtype)  # (N, nt)
        p = (-self.davg / self.dstd).to(self.dtype)  # (nt, 4)
        G = torch.stack([net(p[:, :1]) for net in self.nets])  # (nets, centre, M1)
        if self.one_side:
            G = G.transpose(0, 1)  # (centre, neighbour, M1)
        else:
            G = torch.stack(
                [G.view(nt, nt, nt, -1)[:, c, c] for c in range(nt)]
            )  # (neighbour, centre, ·) at its own centre
        return p[batch.type][:, :, None] * (empty[:, :, None] * G[batch.type]).sum(1)[:, None, :]
