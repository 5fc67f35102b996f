"""HybridMuon: matrices go along the polar factor of their momentum, vectors by Adam.

    m ← β m + (1-β) g     X = β m + (1-β) g        Nesterov's momentum of one matrix
    p ← p (1 - rate·weight_decay) - rate·s·U       X = U H, the polar decomposition: U has singular values 1

The singular values of X fall quickly: with nets of 240, less than 50 are above a hundredth of the largest. So the short
side (n of m × n) is cut to `rank` r orthonormal directions first, which a random matrix Ω (m × r) finds:

    P = orthonormal(Xᵀ Ω)   (n × r)        B = X P   (m × r)        U = B (BᵀB)^(-1/2) Pᵀ

Ω has TERMS numbers, 1 or -1, in each row, and zeros: it finds what one of normal numbers does (a sparse sign embedding,
Martinsson and Tropp 2020), and Xᵀ Ω is some sums of rows of X, made while these are in the cache for the momentum. A
short side below 2r is left whole (P = 1). The inverse root of the Gram matrix R = BᵀB is made by an iteration:

    Z = a + b R + R² (c + d R + e R²)     Q ← Q Z     R ← Z R Z         so that Q R₀ Q → 1

with a … e of step k chosen so that the largest deviation of a singular value from 1 is smallest over the interval in
which the step before leaves them (`COEFFICIENTS`). A polynomial of this degree needs two products, and gains the most
for each product. Singular values above FLOOR of the largest end within SPREAD of 1, smaller ones are raised in
proportion. All of it in float32 whatever the model's precision, for it is a direction: the Gram matrix has rounding
errors of 1e-7 of its largest eigenvalue, below FLOOR². Only P is made in float64, see `orthonormal`.

A matrix without gradient (the net of a type that the batch has not) stays where it is, and its momentum with it: U
knows no size, and would go on at full length.

With `zero_stage: 1` every worker keeps and updates its share of the matrices, and the new parameters are gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache, lru_cache
from math import comb, prod, sqrt
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from allforce.config.keys import Int
from allforce.config.section import WIDEST, Section, key
from allforce.distributed.comm import Comm
from allforce.models.kernels import compiled
from allforce.models.pool import threads
from allforce.optim import muon_kernels
from allforce.optim.optimizer import TYPE_HELP, Optimizer, Parameters

EPSILON = 1e-8  # of Adam
FLOOR, SPREAD = 0.001, 0.45
COEFFICIENTS = (
    (15.076044, -148.072247, 493.18022, -634.18999, 275.990897),
    (7.156015, -17.471005, 14.678788, -4.776712, 0.526693),
    (5.241841, -11.956875, 10.488346, -3.659654, 0.43724),
)
SMALLEST = 1e-36  # a Gram matrix below counts as zero
ROUNDING = 1.001  # the bound of the largest eigenvalue is met by a matrix of rank 1: a little above it
LARGE = 2**22  # operations of a product that uses all threads by itself
TERMS = 2  # numbers in a row of Ω that are not zero
NO_SIGNS = np.empty((0, 0), np.int64), np.empty((0, 0), np.float32)
JITTER = 1e-13  # of a Gram matrix of size 1, so that it can be decomposed also without full rank


class HybridMuonConfig(Section):
    """Muon for matrices, Adam for vectors: needs several times fewer steps than Adam."""

    type: Literal["HybridMuon"] = key("HybridMuon", TYPE_HELP)
    momentum: float = key(0.95, "Decay of the mean of a matrix's gradient.", ge=0, lt=1, aliases=("muon_momentum",))
    adam_beta1: float = key(0.9, "Decay of the mean of a vector's gradient.", ge=0, lt=1)
    adam_beta2: float = key(0.95, "Decay of the mean of its square.", ge=0, lt=1)
    weight_decay: float = key(0.001, "Weight decay of matrices, apart from the gradient.", ge=0)
    lr_adjust: float = key(
        0.0,
        "0 or less: the update of a matrix of m rows and n columns is scaled by lr_adjust_coeff · √max(m, n), vectors "
        "have the same rate. Greater: it is scaled by √max(1, m/n), and the rate of vectors is divided by lr_adjust.",
    )
    lr_adjust_coeff: float = key(0.18, "Size of the entries of an update, see lr_adjust.", gt=0)
    muon_mode: Literal["slice", "2d", "flat"] = key(
        "slice",
        "Parameters of three and more dimensions: matrices of the last two (slice), by Adam (2d), or one matrix with "
        "the last dimension as columns (flat).",
    )
    rank: Int = key(
        32,
        "Directions of a matrix that are followed, those with the largest singular values, a multiple of 8; matrices "
        "with a short side below twice as many are taken whole.",
        ge=8,
        le=WIDEST,
        own=True,
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.rank % 8:  # whole registers: products must not depend on where a matrix lies in a stack
            yield "rank", f"found {self.rank}; expected a multiple of 8"


class Matrices:
    """Parameters that are matrices of one shape and precision, the worker's own, and their momentum, in one stack."""

    def __init__(self, shape: tuple[int, int], names: list[str], parameters: Parameters, scale: float, rank: int):
        self.shape, self.names, self.scale = shape, names, scale
        self.tall = shape[0] >= shape[1]
        values, gradients = parameters.split(parameters.flat), parameters.gradient_views
        device = values[names[0]].device
        counts = [values[n].numel() // prod(shape) for n in names]
        self.momentum = torch.zeros(sum(counts), *shape, dtype=torch.float32, device=device)  # (k, m, n)
        self.ahead = torch.empty_like(self.momentum)  # X, of the last step
        self.used = self.momentum.new_ones(len(self.momentum), 1, 1)
        self.views = dict(zip(names, self.momentum.split(counts), strict=True))
        self._copies = list(self.ahead.split(counts))
        self._gradients = [gradients[n].view(-1, *shape) for n in names]
        self._values = [values[n].view(-1, *shape) for n in names]
        self._counts = counts
        self._matrices = [matrix for value in self._values for matrix in value]
        self._compiled = compiled(self.momentum)
        self._flat = next(flat for flat in parameters.flat if flat.dtype == values[names[0]].dtype)
        self._flat_gradient = parameters.gradient
        self._places = places_in(self._matrices, self._flat)
        self._gradient_places = places_in([matrix for g in self._gradients for matrix in g], parameters.gradient)
        width = kept_side(shape, rank)
        cut = width < min(shape)
        self._omega = random_matrix(max(shape), width).to(device) if cut else None
        self._basis, self._narrow = self.ahead, self.ahead  # P (k, short, r) and B (k, long, r) of the last step
        whole = width % 16 == 0 and min(shape) % 8 == 0  # the loops take whole registers
        self._loops = cut and self.tall and whole and self._compiled
        self._signs = random_signs(shape[0], width) if self._loops else NO_SIGNS
        sections = -(-shape[0] // muon_kernels.SECTION)
        self._sketch = torch.empty(sum(counts), sections, width if self._loops else 0, shape[1])  # parts of (Xᵀ Ω)ᵀ
        large = 2 * prod(shape) * width >= LARGE
        self._in_place = self._values[0].dtype == torch.float32 and large
        self._small = self._compiled and not cut and not large
        self.by_loops = self._loops or self._small  # `update` does it all; else `gram`, a root of it, and `move`

    def update(self, beta: float, rate: float, weight_decay: float) -> None:
        """The whole update in one call of compiled loops."""
        flat, pool = self._flat.numpy(), threads(self.momentum.numel() // 16)
        gradient = self._flat_gradient.numpy(), self._gradient_places, np.float32(1 - beta)
        moving = self.momentum.numpy(), self.ahead.numpy(), self.used.view(-1).numpy()
        root = loop_coefficients(), SMALLEST, ROUNDING, np.float32(-rate * self.scale)
        target = flat, self._places, flat.dtype.type(1 - rate * weight_decay)
        if self._loops:
            muon_kernels.update(*gradient, *moving, *self._signs, self._sketch.numpy(), JITTER, *root, *target, pool)
        else:
            muon_kernels.update_small(*gradient, *moving, self._sketch.numpy(), self.tall, *root, *target, pool)

    def gram(self, beta: float) -> Tensor:
        """Take the gradient into the momentum; R (k, r, r)."""
        if self._compiled:
            self._follow(beta)
        else:
            torch._foreach_copy_(self._copies, self._gradients)
            length = torch.linalg.vector_norm(self.ahead.flatten(1), dim=1)  # the fastest look at all entries
            self.used = (length != 0).view(-1, 1, 1).float()  # (k, 1, 1)
            self.momentum.lerp_(self.ahead, (1 - beta) * self.used)
            self.ahead.lerp_(self.momentum, beta)
        X = self.ahead if self.tall else self.ahead.mT  # (k, long, short)
        if self._omega is None:
            self._narrow = X
            return product(X.mT, X)
        self._basis = orthonormal(product(X.mT, self._omega.expand(len(X), -1, -1)))
        self._narrow = product(X, self._basis)
        return product(self._narrow.mT, self._narrow)

    def _follow(self, beta: float) -> None:
        """Momentum, X and `used` by compiled loops, which read the gradient where it lies."""
        gradient, pool = (self._flat_gradient.numpy(), self._gradient_places), threads(self.momentum.numel() // 16)
        moving = self.momentum.numpy(), self.ahead.numpy(), self.used.view(-1).numpy()
        muon_kernels.follow(*gradient, np.float32(1 - beta), *moving, *self._signs, self._sketch.numpy(), pool)

    def move(self, root: Tensor, rate: float, weight_decay: float) -> None:
        """Along U = B R^(-1/2) Pᵀ; large matrices of the same precision take the product where they lie."""
        root, keep = root * (-rate * self.scale * self.used), 1 - rate * weight_decay
        left, right = self._narrow, root if self._omega is None else product(root, self._basis.mT)
        if not self.tall:
            left, right = right.mT, left.mT
        if self._in_place:
            for value, a, b in zip(self._matrices, left, right, strict=True):
                value.addmm_(a, b, beta=keep)
            return
        if weight_decay:
            torch._foreach_mul_(self._values, keep)
        step = product(left, right)  # (k, m, n)
        torch._foreach_add_(self._values, list(step.split(self._counts)))


class HybridMuon(Optimizer):
    """Momentum of the worker's matrices, both moments of all vectors."""

    Config = HybridMuonConfig
    shards = True

    def __init__(self, parameters: Parameters, config: HybridMuonConfig, comm: Comm | None = None):
        self.parameters, self.config, self.updates = parameters, config, 0
        self.comm = comm if comm is not None and comm.size > 1 else None  # given: each worker has its share
        values = parameters.split(parameters.flat)
        shapes = {name: matrix_shape(v, config.muon_mode) for name, v in values.items()}
        self.matrix_names = [name for name, shape in shapes.items() if shape is not None]
        self.vector_names = [name for name, shape in shapes.items() if shape is None]
        costs = {n: cost(values[n], shapes[n], config.rank) for n in self.matrix_names}
        owner = deal(costs, comm.size if self.comm and comm else 1)
        rank = comm.rank if self.comm and comm else 0
        equal: dict[tuple[tuple[int, int], torch.dtype], list[str]] = defaultdict(list)
        for name in self.matrix_names:
            if owner[name] == rank:
                equal[shapes[name], values[name].dtype].append(name)  # type: ignore[index]
        self.groups = [
            Matrices(shape, names, parameters, self._scale(*shape), config.rank) for (shape, _), names in equal.items()
        ]
        self._others = [values[n] for n in self.matrix_names if owner[n] != rank]
        self._others += [values[n] for n in self.vector_names] if rank > 0 else []  # all move them, rank 0 tells
        self._set_vectors(values)

    def _scale(self, m: int, n: int) -> float:
        c = self.config
        return c.lr_adjust_coeff * sqrt(max(m, n)) if c.lr_adjust <= 0 else sqrt(max(1.0, m / n))

    def _set_vectors(self, values: dict[str, Tensor]) -> None:
        names, gradients = self.vector_names, self.parameters.gradient_views
        self._vectors = [values[n].view(-1) for n in names]
        self._vector_gradients = [gradients[n].view(-1) for n in names]
        self._sizes = [v.numel() for v in self._vectors]
        like = self.parameters.flat[0]
        self.exp_avg, self.exp_avg_sq = like.new_zeros(sum(self._sizes)), like.new_zeros(sum(self._sizes))
        self._vectors_by_loops = compiled(like) and len(self.parameters.flat) == 1
        if self._vectors_by_loops:
            places = places_in(self._vectors, like), places_in(self._vector_gradients, self.parameters.gradient)
            self._vector_places = np.stack([*places, np.array(self._sizes)], 1)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.updates += 1
        beta, decay = self.config.momentum, self.config.weight_decay
        for group in self.groups:
            if group.by_loops:
                group.update(beta, rate, decay)
        rest = [group for group in self.groups if not group.by_loops]
        for group, root in zip(rest, inverse_roots([group.gram(beta) for group in rest]), strict=True):
            group.move(root, rate, decay)
        if self._vectors:
            self._move_vectors(rate if self.config.lr_adjust <= 0 else rate / self.config.lr_adjust)
        if self.comm is not None:
            self._gather()

    def _move_vectors(self, rate: float) -> None:
        """Adam, for all vectors in one."""
        b1, b2, t = self.config.adam_beta1, self.config.adam_beta2, self.updates
        if self._vectors_by_loops:
            arrays = self.parameters.flat[0], self.parameters.gradient, self.exp_avg, self.exp_avg_sq
            muon_kernels.adam(*(x.numpy() for x in arrays), self._vector_places, b1, b2, t, EPSILON, rate)
            return
        g = torch.cat(self._vector_gradients)
        self.exp_avg.lerp_(g, 1 - b1)
        self.exp_avg_sq.mul_(b2).addcmul_(g, g, value=1 - b2)
        denominator = (self.exp_avg_sq / (1 - b2**t)).sqrt_().add_(EPSILON)
        direction = (self.exp_avg / (1 - b1**t)).div_(denominator)
        torch._foreach_add_(self._vectors, list(direction.split(self._sizes)), alpha=-rate)

    def _gather(self) -> None:
        """Every parameter from its owner: others add zero to it, so that the sum is its value to the bit."""
        assert self.comm is not None
        if self._others:
            torch._foreach_zero_(self._others)
        for flat in self.parameters.flat:
            self.comm.all_reduce_start(flat).wait()

    # ---- state

    def tensors(self) -> dict[str, Tensor]:
        values = self.parameters.split(self.parameters.flat)
        found: dict[str, Tensor] = {}
        own = {n: view for group in self.groups for n, view in group.views.items()}
        for name in self.matrix_names:
            whole = torch.zeros_like(values[name], dtype=torch.float32)
            if name in own:
                whole.copy_(own[name].view(whole.shape))
            if self.comm is not None:
                self.comm.all_reduce(whole)  # one is its owner's, the others are zero
            found[f"momentum/{name}"] = whole
        for what in ("exp_avg", "exp_avg_sq"):
            pieces = getattr(self, what).clone().split(self._sizes)
            found |= {f"{what}/{n}": p.view(values[n].shape) for n, p in zip(self.vector_names, pieces, strict=True)}
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        for group in self.groups:
            for name, view in group.views.items():
                view.copy_(tensors[f"momentum/{name}"].view(view.shape))
        for what in ("exp_avg", "exp_avg_sq"):
            for name, piece in zip(self.vector_names, getattr(self, what).split(self._sizes), strict=True):
                piece.copy_(tensors[f"{what}/{name}"].reshape(-1))

    def numbers(self) -> dict[str, Any]:
        return {"updates": float(self.updates)}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        self.updates = int(numbers["updates"])


def matrix_shape(value: Tensor, mode: str) -> tuple[int, int] | None:
    """Rows and columns of the matrices that a parameter is made of; None: a vector, or by Adam for another reason."""
    sides = [n for n in value.shape if n > 1]
    if len(sides) < 2 or (len(sides) > 2 and mode == "2d"):
        return None
    return (prod(sides[:-1]), sides[-1]) if mode == "flat" else (sides[-2], sides[-1])


def kept_side(shape: tuple[int, int], rank: int) -> int:
    """Directions of the short side that are followed."""
    return rank if min(shape) >= 2 * rank else min(shape)


def cost(value: Tensor, shape: tuple[int, int] | None, rank: int) -> int:
    """Multiplications of an update: products with the long side, 5 a step of the iteration without the ends."""
    assert shape is not None
    short, long = sorted(shape)
    r = kept_side(shape, rank)
    along = r * r * long + short * r * long * (1 if r == short else 3)
    return value.numel() // (short * long) * (along + (5 * len(COEFFICIENTS) - 3) * r**3)


def deal(costs: dict[str, int], workers: int) -> dict[str, int]:
    """Who owns what: the dearest first, each to the worker that has least so far."""
    load, owner = [0] * workers, {}
    for name in sorted(costs, key=lambda n: -costs[n]):
        owner[name] = load.index(min(load))
        load[owner[name]] += costs[name]
    return owner


def product(a: Tensor, b: Tensor) -> Tensor:
    """a_k b_k for stacks (k, ·, ·): small ones together, large ones one by one.

    So a result does not depend on how many others are in the stack, that is on how the matrices were dealt out.
    """
    if a.shape[-2] * a.shape[-1] * b.shape[-1] * 2 < LARGE:
        return torch.bmm(a, b)
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for x, y, z in zip(a, b, out, strict=True):
        torch.mm(x, y, out=z)
    return out


def places_in(views: list[Tensor], flat: Tensor) -> np.ndarray:
    """Where views of a flat tensor begin in it."""
    return np.array([view.storage_offset() - flat.storage_offset() for view in views], dtype=np.int64)


@lru_cache(maxsize=64)
def random_signs(long: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Where in a row of Ω there are numbers, and these, 1 or -1: (long, TERMS) each.

    The same in every step, on every worker and in every run. Of `rank` successive rows every column gets as many.
    """
    rng = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(rank, generator=rng) for _ in range(0, long, rank)])[:long]
    columns = (order[:, None] + torch.arange(TERMS)) % rank
    signs = 2 * torch.randint(2, columns.shape, generator=rng) - 1
    return columns.numpy(), signs.float().numpy()


def random_matrix(long: int, rank: int) -> Tensor:
    """Ω (long, rank)."""
    columns, signs = random_signs(long, rank)
    return torch.zeros(long, rank).scatter_(1, torch.from_numpy(columns), torch.from_numpy(signs))


def orthonormal(Y: Tensor) -> Tensor:
    """P (k, s, r), orthonormal columns that span those of Y: Y L^(-T) with Cholesky's Yᵀ Y = L Lᵀ.

    In float64, because Yᵀ Y squares the condition of Y.
    """
    Y = Y.double()
    Y = Y / torch.linalg.matrix_norm(Y, keepdim=True).clamp_(min=SMALLEST)
    L = torch.linalg.cholesky_ex(plus_diagonal(product(Y.mT, Y), JITTER)).L
    return torch.linalg.solve_triangular(L, Y.mT, upper=False).mT.float()


def inverse_roots(grams: list[Tensor]) -> list[Tensor]:
    """R^(-1/2) of stacks of Gram matrices (k, s, s), equal sides together."""
    roots: list[Tensor] = [grams[0]] * len(grams) if grams else []
    for side in {R.shape[-1] for R in grams}:
        places = [k for k, R in enumerate(grams) if R.shape[-1] == side]
        together = inverse_root(torch.cat([grams[k] for k in places]))
        for k, root in zip(places, together.split([grams[k].shape[0] for k in places]), strict=True):
            roots[k] = root
    return roots


def inverse_root(R: Tensor) -> Tensor:
    """Q with Q R Q ≈ 1 for a stack of Gram matrices (k, s, s); see the head of this file.

    (tr R⁴)^(1/4) bounds the largest eigenvalue from above, closely, and R² is needed anyway.
    """
    if compiled(R):
        Q, pool = torch.empty_like(R), threads(R.numel() // 4)
        muon_kernels.inverse_root(R.numpy(), loop_coefficients(), SMALLEST, ROUNDING, Q.numpy(), pool)
        return Q
    size = torch.linalg.matrix_norm(R, keepdim=True).clamp_(min=SMALLEST)  # (k, 1, 1)
    R = R / size
    square = torch.bmm(R, R)
    bound = torch.linalg.matrix_norm(square, keepdim=True).sqrt_().clamp_(min=1e-3).mul_(ROUNDING)
    R, square = R / bound, square / bound**2
    half = plus_diagonal(R.clone(), -0.5)  # powers of R - 1/2: those of R would cancel each other, and digits with them
    Z = Q = polynomial(half, plus_diagonal(square - R, 0.25), *about(0.5, COEFFICIENTS[0]))
    for coefficients in COEFFICIENTS[1:]:
        R = torch.bmm(torch.bmm(R, Z), Z)
        Z = polynomial(R, torch.bmm(R, R), *coefficients)
        Q = torch.bmm(Q, Z)
    return Q / (size * bound).sqrt()


@cache
def loop_coefficients() -> np.ndarray:
    """(steps, 5); those of the first step for powers of R - 1/2."""
    return np.array([about(0.5, COEFFICIENTS[0]), *COEFFICIENTS[1:]], dtype=np.float32)


def polynomial(R: Tensor, square: Tensor, a: float, b: float, c: float, d: float, e: float) -> Tensor:
    """a + b R + R² (c + d R + e R²)."""
    inner = plus_diagonal((e * square).add_(R, alpha=d), c)
    return plus_diagonal(torch.bmm(square, inner).add_(R, alpha=b), a)


def about(x: float, coefficients: tuple[float, ...]) -> list[float]:
    """The coefficients of the same polynomial in powers of R - x."""
    n = len(coefficients)
    return [sum(comb(j, k) * coefficients[j] * x ** (j - k) for j in range(k, n)) for k in range(n)]


def plus_diagonal(M: Tensor, number: float) -> Tensor:
    """M + number·1 of a stack (k, s, s), in place."""
    M.diagonal(dim1=-2, dim2=-1).add_(number)
    return M
