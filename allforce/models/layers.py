"""Dense layers and nets, as DeePMD-kit defines them.

y = φ(x·w + b) ⊙ idt + residual,   residual = x if out == in, [x, x] if out == 2·in, else nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allforce.config.keys import WITH_THRESHOLD

Weights = tuple[Tensor, Tensor, Tensor | None]  # w, b and idt of a layer
Shape = tuple[tuple[int, int, int], ...]  # (in, out, copies) of each layer
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def silut(x: Tensor, threshold: float = 3.0) -> Tensor:
    """x·σ(x) below the threshold T, tanh(a(x − T)) + c above it, with value and slope continuous at T."""
    sigma = 1.0 / (1.0 + math.exp(-threshold))
    slope, value = sigma * (1.0 + threshold * (1.0 - sigma)), threshold * sigma
    return torch.where(x < threshold, F.silu(x), torch.tanh(slope * (x - threshold)) + value)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "relu6": F.relu6,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_tf": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "linear": lambda x: x,
    "none": lambda x: x,
}

NOT_SMOOTH = ("relu", "relu6", *WITH_THRESHOLD)  # curves with a kink or a jump in a low derivative


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of a name; silut takes its threshold after a colon: silut:3.0."""
    name, _, parameter = name.lower().partition(":")
    if name in WITH_THRESHOLD:
        return partial(silut, threshold=float(parameter or 3.0))
    return ACTIVATIONS[name]


class Layer(nn.Module):
    """One dense layer; initial values w ~ N(0, 1/√(in+out)), b ~ N(0, 1), idt ~ N(0.1, 0.001)."""

    def __init__(
        self, size_in: int, size_out: int, act: str, resnet: bool, resnet_dt: bool,
        rng: np.random.Generator, dtype: torch.dtype,
    ):  # fmt: skip
        super().__init__()
        self.activation, self.phi, self.resnet = act, activation(act), resnet
        self.copies = {size_in: 1, 2 * size_in: 2}.get(size_out, 0) if resnet else 0  # how often x is added

        def normal(mean: float, std: float, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.from_numpy(rng.normal(mean, std, shape)).to(dtype))

        self.w = normal(0.0, (size_in + size_out) ** -0.5, size_in, size_out)
        self.b = normal(0.0, 1.0, size_out)
        self.idt = normal(0.1, 0.001, size_out) if resnet_dt and self.copies else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.phi(torch.addmm(self.b, x, self.w))
        if self.idt is not None:
            y = y * self.idt
        if self.copies:
            y = y + (x if self.copies == 1 else torch.cat([x, x], dim=-1))
        return y


def side_by_side(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Layers of one kind, each on its own rows: (nets, n, out) from x (nets, n, in)."""
    one = layers[0]
    w, b = torch.stack([layer.w for layer in layers]), torch.stack([layer.b for layer in layers])
    y = one.phi(torch.baddbmm(b[:, None], x, w))
    if one.idt is not None:
        y = y * torch.stack([layer.idt for layer in layers])[:, None]  # type: ignore[misc]
    if one.copies:
        y = y + (x if one.copies == 1 else torch.cat([x, x], dim=-1))
    return y


class Net(nn.Module):
    """A chain of layers; with `size_out` a last linear layer without residual follows the hidden ones."""

    def __init__(
        self, size_in: int, neuron: Sequence[int], act: str, resnet_dt: bool, dtype: torch.dtype,
        rng: np.random.Generator, size_out: int | None = None,
    ):  # fmt: skip
        super().__init__()
        sizes = [size_in, *neuron]
        layers = [Layer(a, b, act, True, resnet_dt, rng, dtype) for a, b in zip(sizes, sizes[1:], strict=False)]
        if size_out is not None:
            layers.append(Layer(sizes[-1], size_out, "none", False, False, rng, dtype))
        self.layers: list[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]

    @cached_property
    def weights(self) -> list[Weights]:
        """Of each layer. Compiled loops ask for them in every step, and a look-up in a module is slow."""
        return [(layer.w, layer.b, layer.idt) for layer in self.layers]

    @cached_property
    def hidden_tanh(self) -> bool:
        """Whether all layers but a last linear one have this activation function, for which there are loops."""
        hidden = list(self.layers)[:-1] if self.layers[-1].activation == "none" else list(self.layers)
        return len(hidden) > 0 and all(layer.activation.lower() == "tanh" for layer in hidden)

    @cached_property
    def shape(self) -> Shape:
        return tuple((layer.w.shape[0], layer.w.shape[1], layer.copies) for layer in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class CurveNets(nn.ModuleList):
    """Nets of one scalar and of the same widths, one for each type or pair of types."""

    @staticmethod
    def variable(x: Tensor) -> Tensor:
        """What the nets are given at x (P, 1)."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        """(P, nets, M) from x (P, 1); layers of the same place together, for each alone is a small one."""
        y = self.variable(x).expand(len(self), *x.shape)  # (nets, P, 1)
        for layers in zip(*(net.layers for net in self), strict=True):
            y = side_by_side(layers, y)
        return y.transpose(0, 1)


def generator(seed: int | Sequence[int] | None, *stream: int) -> np.random.Generator:
    """A stream of its own for every net of a model; without a seed from the system's entropy."""
    return np.random.default_rng(None if seed is None else [*stream, *np.atleast_1d(seed).tolist()])
