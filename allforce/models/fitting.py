"""The energy fitting net: one net per type of the centre atom.

e_i = net_τ([D_i, (fparam − avg)/std, (aparam − avg)/std]) − [net_τ with D = 0, if atom_ener[τ] is given] + bias_τ
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allforce.config.schema import FittingEner
from allforce.data.batch import Batch
from allforce.models.layers import DTYPES, Net, generator
from allforce.models.scalar_net import value_and_gradient


class EnergyFitting(nn.Module):
    """Atomic energies, and their gradient with respect to the descriptor."""

    bias_atom_e: Tensor  # (nt,)
    fparam_avg: Tensor  # (numb_fparam,)
    fparam_inv_std: Tensor
    aparam_avg: Tensor  # (numb_aparam,)
    aparam_inv_std: Tensor

    def __init__(self, config: FittingEner, ntypes: int, dim_descrpt: int):
        super().__init__()
        self.config, self.ntypes, self.dim_descrpt = config, ntypes, dim_descrpt
        self.dtype = DTYPES[config.dtype]
        extra = config.numb_fparam + (0 if config.use_aparam_as_mask else config.numb_aparam)
        self.nets: list[Net] = nn.ModuleList(  # type: ignore[assignment]
            Net(
                dim_descrpt + extra,
                config.neuron,
                config.activation_function,
                config.resnet_dt,
                self.dtype,
                generator(config.seed, 1, t),
                1,
            )
            for t in range(ntypes)
        )
        for net in self.nets:
            flags = config.trainable if isinstance(config.trainable, list) else [config.trainable] * len(net.layers)
            for layer, flag in zip(net.layers, flags, strict=True):
                layer.requires_grad_(flag)
        self.vacuum = [t < len(config.atom_ener) and config.atom_ener[t] is not None for t in range(ntypes)]

        def buffer(name: str, n: int, value: float) -> None:
            self.register_buffer(name, torch.full((n,), value, dtype=torch.float64))

        buffer("bias_atom_e", ntypes, 0.0)
        buffer("fparam_avg", config.numb_fparam, 0.0)
        buffer("fparam_inv_std", config.numb_fparam, 1.0)
        buffer("aparam_avg", config.numb_aparam, 0.0)
        buffer("aparam_inv_std", config.numb_aparam, 1.0)

    def parameters_of_atoms(self, batch: Batch) -> list[Tensor]:
        """Normalised frame and atomic parameters, each (N, ·)."""
        out = []
        if self.config.numb_fparam:
            assert batch.fparam is not None
            out.append(((batch.fparam - self.fparam_avg) * self.fparam_inv_std)[batch.frame])
        if self.config.numb_aparam and not self.config.use_aparam_as_mask:
            assert batch.aparam is not None
            out.append((batch.aparam - self.aparam_avg) * self.aparam_inv_std)
        return [p.to(self.dtype) for p in out]

    def forward(self, D: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """e (N,) in float64, and ∂e_i/∂D_i (N, M) in the precision of D."""
        x = D.to(self.dtype)
        if extra := self.parameters_of_atoms(batch):
            x = torch.cat([x, *extra], dim=1)
        e, gradient = value_and_gradient(self.nets, batch.type_counts, x)
        if any(self.vacuum):
            e = e - self.in_vacuum(x, batch.type_counts)
        return e.double() + self.bias_atom_e[batch.type], gradient[:, : self.dim_descrpt].to(D.dtype)

    def in_vacuum(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """The nets with D = 0, for types whose energy in vacuum is given; 0 for the others."""
        x = torch.cat([torch.zeros_like(x[:, : self.dim_descrpt]), x[:, self.dim_descrpt :]], dim=1)
        parts = zip(self.nets, x.split(counts), self.vacuum, strict=True)
        return torch.cat([net(part)[:, 0] if given else part.new_zeros(len(part)) for net, part, given in parts])
