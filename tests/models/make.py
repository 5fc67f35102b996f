"""Small models for tests, with statistics that are not trivial."""

from __future__ import annotations

from typing import Any

import torch

from allforce.models.standard import StandardConfig, StandardModel
from allforce.models.table import TableConfig

TYPES = ["O", "H", "C"]


def section(given: dict[str, Any], ntypes: int) -> dict[str, Any]:
    """A descriptor with cutoff 4 Å and narrow nets; `given` goes before."""
    kind = given.get("type", "se_e2_a")
    if kind == "hybrid":
        return given | {"list": [section(part, ntypes) for part in given["list"]]}
    common = {"type": kind, "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8, 16], "seed": 1, "precision": "float64"}
    own: dict[str, Any] = {"sel": 90 if kind.startswith("se_atten") else [30, 30, 30][:ntypes]}
    if kind not in ("se_e2_r", "se_e3"):
        own["axis_neuron"] = 4
    if kind.startswith("se_atten"):
        own |= {"attn_layer": 0, "attn": 7, "tebd_dim": 5}
    return common | own | given


def small_model(
    descriptor: dict[str, Any] | None = None,
    fitting: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    ntypes: int = 2,
    mode: str = "table",
    nodes: int = 256,
) -> StandardModel:
    """se_e2_a, or another descriptor, with narrow nets; davg and dstd are set as data would set them."""
    config = StandardConfig.model_validate(
        {
            "type_map": TYPES[:ntypes],
            "descriptor": section(descriptor or {}, ntypes),
            "fitting_net": {"neuron": [12, 12], "seed": 2, "precision": "float64", **(fitting or {})},
            **(model or {}),
        }
    )
    potential = StandardModel(config)
    rng = torch.Generator().manual_seed(7)
    for d in getattr(potential.descriptor, "members", [potential.descriptor]):
        if not d.config.set_davg_zero:
            d.davg[:, 0] = 0.05 + 0.02 * torch.rand(ntypes, generator=rng, dtype=torch.float64)
        d.dstd[:, :1] = 0.15 + 0.05 * torch.rand(ntypes, 1, generator=rng, dtype=torch.float64)
        d.dstd[:, 1:] = 0.09 + 0.03 * torch.rand(ntypes, 1, generator=rng, dtype=torch.float64)
    if config.descriptor.type == "se_e2_r":  # its D is small: forces of a size as in reality
        with torch.no_grad():
            for net in potential.fitting.nets:
                net.layers[-1].w.mul_(50.0)
    if hasattr(potential.fitting, "bias_atom_e"):
        potential.fitting.bias_atom_e[:] = torch.linspace(-3.0, -1.0, ntypes, dtype=torch.float64)
    potential.min_nbor_dist = 0.8
    potential.prepare(TableConfig(mode=mode, nodes=nodes))
    return potential
