"""A trained vector for each type of atom."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from allforce.errors import UserError
from allforce.models.serial import copy_array, to_numpy


class TypeEmbedding(nn.Module):
    """t (nt, tebd_dim): a linear layer of the one-hot vector of a type, with the residual rule of layers.py."""

    residual: Tensor  # (nt, tebd_dim)

    def __init__(self, ntypes: int, dim: int, bias: bool, rng: np.random.Generator, dtype: torch.dtype):
        super().__init__()
        self.w = nn.Parameter(torch.from_numpy(rng.normal(0.0, (ntypes + dim) ** -0.5, (ntypes, dim))).to(dtype))
        self.b = nn.Parameter(torch.from_numpy(rng.normal(0.0, 1.0, dim)).to(dtype)) if bias else None
        copies = {ntypes: 1, 2 * ntypes: 2}.get(dim, 0)
        residual = torch.eye(ntypes, dtype=dtype).repeat(1, copies) if copies else torch.zeros(ntypes, dim, dtype=dtype)
        self.register_buffer("residual", residual, persistent=False)

    def forward(self) -> Tensor:
        return self.w + self.residual if self.b is None else self.w + self.b + self.residual

    def to_tree(self, type_map: list[str], precision: str, trainable: bool) -> dict[str, Any]:
        ntypes, dim = self.w.shape
        common = {"activation_function": "Linear", "precision": precision}
        bias = self.b is not None
        arrays = {"w": to_numpy(self.w), "b": None if self.b is None else to_numpy(self.b), "idt": None}
        layer = {
            "@class": "Layer",
            "@version": 2,
            "bias": bias,
            "use_timestep": False,
            "resnet": True,
            **common,
            "trainable": trainable,
            "@variables": arrays,
        }
        net = {"neuron": [dim], "resnet_dt": False, **common}
        return {
            "@class": "TypeEmbedNet",
            "@version": 2,
            "ntypes": ntypes,
            **net,
            "trainable": trainable,
            "padding": True,
            "use_econf_tebd": False,
            "use_tebd_bias": bias,
            "type_map": type_map,
            "embedding": {
                "@class": "EmbeddingNetwork",
                "@version": 2,
                "in_dim": ntypes,
                **net,
                "bias": bias,
                "layers": [layer],
            },
        }

    def load_tree(self, tree: dict[str, Any], source: str) -> None:
        layers = tree["embedding"]["layers"]
        if len(layers) != 1:
            raise UserError(f"{source}: the type embedding has {len(layers)} layers; expected 1.")
        copy_array(self.w, layers[0]["@variables"]["w"], f"{source}: type embedding w")
        if self.b is not None:
            copy_array(self.b, layers[0]["@variables"]["b"], f"{source}: type embedding b")
