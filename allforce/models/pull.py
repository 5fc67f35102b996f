"""Values and the map that pulls a gradient by them back to their variable, by automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Pull = Callable[[Tensor], Tensor]  # ∂E/∂y -> ∂E/∂x


def by_autograd(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Pull]:
    """y = function(x), and the map from ∂E/∂y to ∂E/∂x; in grad mode both can be differentiated once more."""
    training = torch.is_grad_enabled()
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = function(x)

    def pull(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(
                y, x, gradient, create_graph=training, allow_unused=True, materialize_grads=True
            )[0]

    return y if training else y.detach(), pull
