"""Adam and AdamW on flat tensors: torch's fused kernels, called directly.

    m ← β1 m + (1-β1) g     v ← β2 v + (1-β2) g²     p ← p - rate·m̂/(√v̂ + ε),  m̂ = m/(1-β1^t),  v̂ = v/(1-β2^t)

torch.optim.Adam calls the same kernels, but making one imports torch's compiler, which takes seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allforce.config.schema import OptimizerAdam, OptimizerAdamW

KERNELS = {"Adam": torch._fused_adam_, "AdamW": torch._fused_adamw_}  # weight decay inside the gradient, or beside it
EPSILON = 1e-8


class Adam:
    """First and second moments of flat tensors; `step` changes tensors and moments in place."""

    def __init__(self, tensors: list[Tensor], config: OptimizerAdam | OptimizerAdamW):
        self.tensors, self.config, self.kernel = tensors, config, KERNELS[config.type]
        self.exp_avg = [torch.zeros_like(t) for t in tensors]
        self.exp_avg_sq = [torch.zeros_like(t) for t in tensors]
        self.updates = [torch.zeros((), dtype=torch.float32, device=t.device) for t in tensors]  # t of the formula

    @torch.no_grad()
    def step(self, gradients: list[Tensor], rate: float) -> None:
        torch._foreach_add_(self.updates, 1.0)
        self.kernel(
            self.tensors,
            gradients,
            self.exp_avg,
            self.exp_avg_sq,
            [],
            self.updates,
            lr=rate,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            weight_decay=self.config.weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )
