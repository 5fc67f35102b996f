"""Adam and AdamW on flat tensors: torch's fused kernels, called directly.

    m ← β1 m + (1-β1) g     v ← β2 v + (1-β2) g²     p ← p - rate·m̂/(√v̂ + ε),  m̂ = m/(1-β1^t),  v̂ = v/(1-β2^t)

torch.optim.Adam calls the same kernels, but making one imports torch's compiler, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from allforce.config.section import Section, key
from allforce.distributed.comm import Comm
from allforce.optim.optimizer import TYPE_HELP, Optimizer, Parameters

EPSILON = 1e-8


class AdamConfig(Section):
    """Adam."""

    type: Literal["Adam"] = key("Adam", TYPE_HELP)
    adam_beta1: float = key(0.9, "Decay of the mean of the gradient.", ge=0, lt=1)
    adam_beta2: float = key(0.999, "Decay of the mean of its square.", ge=0, lt=1)
    weight_decay: float = key(0.0, "Weight decay, added to the gradient.", ge=0)


class AdamWConfig(Section):
    """Adam with decoupled weight decay."""

    type: Literal["AdamW"] = key("AdamW", TYPE_HELP)
    adam_beta1: float = key(0.9, "Decay of the mean of the gradient.", ge=0, lt=1)
    adam_beta2: float = key(0.999, "Decay of the mean of its square.", ge=0, lt=1)
    weight_decay: float = key(
        0.0, "Weight decay, apart from the gradient. (0 is also what DeePMD-kit 3.2 uses in effect.)", ge=0
    )


class Adam(Optimizer):
    """First and second moments of flat tensors; `step` changes tensors and moments in place."""

    Config: type[Section] = AdamConfig
    kernel: Callable[..., Any] = staticmethod(torch._fused_adam_)  # weight decay inside the gradient

    def __init__(self, parameters: Parameters, config: AdamConfig | AdamWConfig, comm: Comm | None = None):
        self.parameters, self.config = parameters, config
        self.exp_avg = [torch.zeros_like(t) for t in parameters.flat]
        self.exp_avg_sq = [torch.zeros_like(t) for t in parameters.flat]
        self.updates = [torch.zeros((), dtype=torch.float32, device=t.device) for t in parameters.flat]  # t above

    @torch.no_grad()
    def step(self, rate: float) -> None:
        torch._foreach_add_(self.updates, 1.0)
        self.kernel(
            self.parameters.flat,
            self.parameters.gradients(),
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

    def tensors(self) -> dict[str, Tensor]:
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {f"{what}/{k}": v for what, flat in moments.items() for k, v in self.parameters.split(flat).items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])

    def numbers(self) -> dict[str, Any]:
        return {"updates": float(self.updates[0])}

    def set_numbers(self, numbers: dict[str, Any]) -> None:
        for count in self.updates:
            count.fill_(numbers["updates"])


class AdamW(Adam):
    """Adam with the weight decay beside the gradient."""

    Config = AdamWConfig
    kernel = staticmethod(torch._fused_adamw_)
