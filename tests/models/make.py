"""Small models for tests, with statistics that are not trivial."""

from __future__ import annotations

from typing import Any

import torch

from allforce.models.standard import StandardConfig, StandardModel
from allforce.models.table import TableConfig

TYPES = ["O", "H", "C"]


def small_model(
    descriptor: dict[str, Any] | None = None,
    fitting: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    ntypes: int = 2,
    mode: str = "table",
    nodes: int = 256,
) -> StandardModel:
    """se_e2_a with narrow nets; davg and dstd are set as data would set them."""
    config = StandardConfig.model_validate(
        {
            "type_map": TYPES[:ntypes],
            "descriptor": {
                "type": "se_e2_a", "sel": [30, 30, 30][:ntypes], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8, 16],
                "axis_neuron": 4, "seed": 1, "precision": "float64", **(descriptor or {}),
            },
            "fitting_net": {"neuron": [12, 12], "seed": 2, "precision": "float64", **(fitting or {})},
            **(model or {}),
        }
    )  # fmt: skip
    potential = StandardModel(config)
    rng = torch.Generator().manual_seed(7)
    d = potential.descriptor
    if not config.descriptor.set_davg_zero:
        d.davg[:, 0] = 0.05 + 0.02 * torch.rand(ntypes, generator=rng, dtype=torch.float64)
    d.dstd[:, :1] = 0.15 + 0.05 * torch.rand(ntypes, 1, generator=rng, dtype=torch.float64)
    d.dstd[:, 1:] = 0.09 + 0.03 * torch.rand(ntypes, 1, generator=rng, dtype=torch.float64)
    potential.fitting.bias_atom_e[:] = torch.linspace(-3.0, -1.0, ntypes, dtype=torch.float64)
    potential.min_nbor_dist = 0.8
    potential.prepare(TableConfig(mode=mode, nodes=nodes))
    return potential
