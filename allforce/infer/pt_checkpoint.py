"""Checkpoints of DeePMD-kit's PyTorch backend (.pt), read weights-only: no code of the file is ever run.

model/_extra_state/model_params       the normalised model section of the input
model/model.Default.<path>            tensors; a multi-task file has its task's name instead of Default
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allforce.config.load import validated_config
from allforce.config.schema import DescriptorSeE2A, FittingEner, ModelConfig
from allforce.errors import UserError
from allforce.infer.tree import (
    DESCRIPTORS,
    FITTINGS,
    copy_array,
    copy_nets,
    numpy,
    set_bias,
    set_environment_statistics,
)
from allforce.models.potential import Potential

DESCRIPTOR = "atomic_model.descriptor.sea"
FITTING = "atomic_model.fitting_net"


def potential_from_pt(path: Path) -> Potential:
    state, params = read_pt(path)
    source = str(path)
    potential = Potential(_config(params, source))
    copy_nets(potential.descriptor.nets, _nets(state, DESCRIPTOR, source), f"{source}: embedding net")
    copy_nets(potential.fitting.nets, _nets(state, FITTING, source), f"{source}: fitting net")
    try:
        davg, dstd = numpy(state[f"{DESCRIPTOR}.mean"]), numpy(state[f"{DESCRIPTOR}.stddev"])
    except KeyError as error:
        raise UserError(f"{path}: no tensor {error} in the checkpoint.") from None
    set_environment_statistics(potential, davg, dstd, source)
    biases = (state.get(f"{FITTING}.bias_atom_e"), state.get("atomic_model.out_bias"))
    set_bias(potential, source, *(None if b is None else numpy(b) for b in biases))
    for name in ("fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std"):
        if state.get(f"{FITTING}.{name}") is not None:
            copy_array(getattr(potential.fitting, name), numpy(state[f"{FITTING}.{name}"]), f"{source}: {name}")
    distance = state.get("min_nbor_dist")
    potential.min_nbor_dist = None if distance is None or float(distance) <= 0.0 else float(distance)
    return potential


def read_pt(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by their path below the model, and the model section."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is something else makes the unpickler fail in any way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not a readable PyTorch checkpoint of DeePMD-kit: {reason}") from None
    state = content.get("model", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or "_extra_state" not in state:
        raise UserError(f"{path} is not a DeePMD-kit checkpoint: it has no entry model/_extra_state.")
    params = state["_extra_state"]["model_params"]
    tasks = sorted({key.split(".")[1] for key in state if key.startswith("model.")})
    if "model_dict" in params or len(tasks) != 1:
        raise UserError(f"{path} holds a multi-task model (branches {', '.join(tasks)}), which is not supported.")
    prefix = f"model.{tasks[0]}."
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}, params


def _config(params: dict[str, Any], source: str) -> ModelConfig:
    """The keys of the model section that this program knows; the parts have to be of known types."""
    section = {k: v for k, v in params.items() if k in ModelConfig.model_fields}
    if params.get("type", "standard") != "standard" or "descriptor" not in params:
        raise UserError(f"{source}: model type '{params.get('type')}' is not supported. Supported: standard.")
    for key, table, default in (("descriptor", DESCRIPTORS, None), ("fitting_net", FITTINGS, "ener")):
        kind = params[key].get("type", default)
        if kind not in table:
            raise UserError(f"{source}: {key} of type '{kind}' is not supported. Supported: {', '.join(table)}.")
    for key in ("spin", "use_srtab", "modifier", "type_embedding"):
        if params.get(key):
            raise UserError(f"{source}: model/{key} is not supported.")
    section["descriptor"] = _known(params["descriptor"], DescriptorSeE2A)
    section["fitting_net"] = _known(params["fitting_net"], FittingEner)
    if params["fitting_net"].get("dim_case_embd"):
        raise UserError(f"{source}: model/fitting_net/dim_case_embd is not supported.")
    return validated_config(section, source)


def _known(section: dict, schema: type[DescriptorSeE2A] | type[FittingEner]) -> dict:
    return {k: v for k, v in section.items() if k in schema.model_fields}


def _nets(state: dict[str, Tensor], part: str, source: str) -> list[dict]:
    """The nets of a part in the layout of the model tree."""
    pattern = re.compile(re.escape(part) + r"\.filter_layers\.networks\.(\d+)\.layers\.(\d+)\.(matrix|bias|idt)")
    names = {"matrix": "w", "bias": "b", "idt": "idt"}
    found: dict[int, dict[int, dict]] = {}
    for key, value in state.items():
        if (match := pattern.fullmatch(key)) and value is not None:
            net, layer, name = int(match[1]), int(match[2]), names[match[3]]
            found.setdefault(net, {}).setdefault(layer, {})[name] = numpy(value)
    if not found:
        raise UserError(f"{source}: no weights {part}.filter_layers.networks.* in the checkpoint.")
    return [{"layers": [{"@variables": found[n][k]} for k in sorted(found[n])]} for n in sorted(found)]
