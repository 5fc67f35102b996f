"""The switch function and the rows of the environment matrix.

    u = clip((r − rs)/(rc − rs), 0, 1)      w(r) = 1 + u³(−6u² + 15u − 10)
    s(r) = w/(r + p),   q(r) = w·r/(r + p)²,   R = (s, q·x/r, q·y/r, q·z/r)

rs = rcut_smth, rc = rcut, p = env_protection; for p = 0, q = s.
"""

from __future__ import annotations

import torch
from torch import Tensor


def switch(r: Tensor, rs: float, rc: float) -> Tensor:
    """w(r): 1 below rs, 0 above rc, twice continuously differentiable."""
    u = ((r - rs) / (rc - rs)).clamp(0.0, 1.0)
    return 1.0 + u**3 * (-6.0 * u**2 + 15.0 * u - 10.0)


def environment(r: Tensor, rs: float, rc: float, protection: float = 0.0) -> Tensor:
    """Rows R of the edges r (E, 3), not normalised; differentiable twice."""
    distance = torch.linalg.vector_norm(r, dim=1, keepdim=True)  # (E, 1)
    shifted = distance + protection
    w = switch(distance, rs, rc)
    return torch.cat([w / shifted, w / shifted**2 * r], dim=1)  # (E, 4)
