"""The nets of se_atten: the embedding of a neighbour by its distance and by the types of the pair (se_atten.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allforce.models.layers import Net, generator
from allforce.models.type_embedding import TypeEmbedding

CHECKED = 256  # pairs of types whose curves the error of the table is measured on, at most


class AttenNets(nn.Module):
    """The nets of the embedding and the type embedding."""

    checked: Tensor  # (pairs, 2) types of centre and neighbour

    def __init__(self, config: Any, ntypes: int, dtype: torch.dtype):
        super().__init__()
        self.strip, self.one_side = config.strip, config.type_one_side
        width = config.tebd_dim * (1 if self.one_side else 2)

        def net(size: int, number: int) -> Net:
            rng = generator(config.seed, 0, number)
            return Net(size, config.neuron, config.activation_function, config.resnet_dt, dtype, rng)

        self.types = TypeEmbedding(ntypes, config.tebd_dim, config.use_tebd_bias, generator(config.seed, 0, 2), dtype)
        self.net = net(1 if self.strip else 1 + width, 0)
        self.strip_net = net(width, 1) if self.strip else None
        pairs = torch.cartesian_prod(torch.arange(1 if self.one_side else ntypes), torch.arange(ntypes))
        keep = torch.linspace(0, len(pairs) - 1, min(CHECKED, len(pairs))).round().long()
        self.register_buffer("checked", pairs[keep], persistent=False)

    def of_pairs(self, center: Tensor, neighbor: Tensor) -> Tensor:
        """What the nets see of a pair of types (n,): [t_neighbour, t_centre] (n, ·)."""
        t = self.types()
        of_neighbor = F.embedding(neighbor, t)
        return of_neighbor if self.one_side else torch.cat([of_neighbor, F.embedding(center, t)], 1)

    def curves(self, x: Tensor, center: Tensor, neighbor: Tensor) -> Tensor:
        """G (P, n, M1) at x (P, 1) of n pairs of types (one curve with strip, where types do not enter)."""
        if self.strip:
            return self.net(x)[:, None]
        types = self.of_pairs(center, neighbor)
        P, n = len(x), len(types)
        rows = torch.cat([x[:, None].expand(P, n, 1), types.expand(P, n, -1)], 2)
        return self.net(rows.flatten(0, 1)).view(P, n, -1)

    def forward(self, x: Tensor) -> Tensor:
        """Curves on which the error of the table is measured: with very many types a sample of them."""
        return self.curves(x, self.checked[:, 0], self.checked[:, 1])
