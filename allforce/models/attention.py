"""Attention among the neighbours of an atom, as se_atten gates its embedding with it.

[q, k, v] = G W_in + b_in,  each divided by its length if `normalize`       G: rows of the neighbours of one atom
a_jk = α q_j·k_k            α = temperature, or 1/√(h · scaling_factor)
smooth:      a ← softmax_k((a + 20) w_j w_k − 20) w_j w_k                   an empty slot has w = 0 and stays in the sum
not smooth:  a ← softmax_k(a)  over neighbours
dotr:        a_jk ← a_jk n_j·n_k                                            n = r/|r|
G ← LayerNorm(G + (a v) W_out + b_out)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allforce.models.attention_core import Attend, Norm, Rule
from allforce.models.attention_kernels import SHIFT
from allforce.models.kernels import compiled
from allforce.models.layers import Layer
from allforce.models.serial import copy_array, copy_layer, layer_from_pt, layer_tree, to_numpy


@dataclass
class Neighbors:
    """Of each of N atoms at most n neighbours, one beside the other."""

    mask: Tensor  # (N, n) 1, and 0 where there is none
    w: Tensor  # (N, n) switch function, 0 where there is none
    unit: Tensor  # (N, n, 3) r/|r|
    beyond: float  # empty slots of `sel` that are not among the n


class AttentionLayer(nn.Module):
    """One layer, with one head."""

    def __init__(self, config: Any, width: int, rng: np.random.Generator, dtype: torch.dtype):
        super().__init__()
        h = config.attn
        self.hidden, self.config = h, config
        self.in_proj = Layer(width, 3 * h, "none", False, False, rng, dtype)
        self.out_proj = Layer(h, width, "none", False, False, rng, dtype)
        self.norm_w = nn.Parameter(torch.ones(width, dtype=dtype), requires_grad=config.trainable_ln)
        self.norm_b = nn.Parameter(torch.zeros(width, dtype=dtype), requires_grad=config.trainable_ln)
        self.eps = 1e-5 if config.ln_eps is None else config.ln_eps
        alpha = config.temperature or (h * config.scaling_factor) ** -0.5
        self.rule = Rule(alpha, config.smooth, config.attn_dotr, config.normalize)

    def forward(self, G: Tensor, at: Neighbors) -> Tensor:
        """G (N, n, M1) -> the same."""
        qkv = self.in_proj(G.flatten(0, 1)).view(*G.shape[:2], 3 * self.hidden)
        if compiled(G):
            w = at.w if self.config.smooth else at.mask
            o = Attend.apply(qkv, w, at.unit, at.beyond, self.rule)[0]
        else:
            o = self.attend(qkv, at)
        return self.norm(G + self.out_proj(o.flatten(0, 1)).view_as(G))

    def attend(self, qkv: Tensor, at: Neighbors) -> Tensor:
        """What attention_core.py does by hand, as plain equations."""
        qkv = qkv.unflatten(2, (3, self.hidden))
        if self.config.normalize:
            qkv = F.normalize(qkv, dim=-1)
        q, k, v = qkv.unbind(2)
        a = self.softmax(self.rule.alpha * (q @ k.transpose(1, 2)), at)  # (N, n, n)
        if self.config.attn_dotr:
            a = a * (at.unit @ at.unit.transpose(1, 2))
        return a @ v

    def softmax(self, a: Tensor, at: Neighbors) -> Tensor:
        if not self.config.smooth:
            a = a.masked_fill(at.mask[:, None, :] == 0.0, -torch.inf)
            lonely = ~at.mask.any(1)[:, None, None]  # no key at all: softmax would give nan
            return torch.softmax(a.masked_fill(lonely, 0.0), dim=-1) * at.mask[:, :, None]
        ww = at.w[:, :, None] * at.w[:, None, :]
        a = (a + SHIFT) * ww - SHIFT
        top = a.detach().amax(-1, keepdim=True).clamp(min=-SHIFT)
        e = torch.exp(a - top)
        return e / (e.sum(-1, keepdim=True) + at.beyond * torch.exp(-SHIFT - top)) * ww

    def norm(self, G: Tensor) -> Tensor:
        if compiled(G):
            return torch.addcmul(self.norm_b, Norm.apply(G, self.eps)[0], self.norm_w)
        return F.layer_norm(G, G.shape[-1:], self.norm_w, self.norm_b, self.eps)

    def alone(self, G: Tensor) -> Tensor:
        """An empty slot: nothing is added to it but the bias."""
        return self.norm(G + self.out_proj.b)

    def to_tree(self, settings: dict[str, Any], precision: str, trainable: bool) -> dict[str, Any]:
        """settings: what DeePMD-kit repeats on each level."""
        c = self.config
        inner = {k: v for k, v in settings.items() if k not in ("trainable_ln", "ln_eps")}
        return {
            **settings,
            "attention_layer": {
                **inner,
                "num_heads": 1,
                "bias": True,
                "smooth": c.smooth,
                "in_proj": layer_tree(self.in_proj, precision, trainable),
                "out_proj": layer_tree(self.out_proj, precision, trainable),
            },
            "attn_layer_norm": {
                "@class": "LayerNorm",
                "@version": 1,
                "eps": self.eps,
                "trainable": c.trainable_ln,
                "precision": precision,
                "@variables": {"w": to_numpy(self.norm_w), "b": to_numpy(self.norm_b)},
            },
        }

    def load_tree(self, tree: dict[str, Any], where: str) -> None:
        inner, norm = tree["attention_layer"], tree["attn_layer_norm"]["@variables"]
        copy_layer(self.in_proj, inner["in_proj"]["@variables"], f"{where} in_proj")
        copy_layer(self.out_proj, inner["out_proj"]["@variables"], f"{where} out_proj")
        copy_array(self.norm_w, norm["w"], f"{where} layer norm w")
        copy_array(self.norm_b, norm["b"], f"{where} layer norm b")

    def tree_from_pt(self, state: dict[str, Tensor], name: str, source: str) -> dict[str, Any]:
        """What `load_tree` takes, from the tensors of a .pt checkpoint."""
        inner = {key: layer_from_pt(state, f"{name}.attention_layer.{key}", source) for key in ("in_proj", "out_proj")}
        return {"attention_layer": inner, "attn_layer_norm": layer_from_pt(state, f"{name}.attn_layer_norm", source)}
