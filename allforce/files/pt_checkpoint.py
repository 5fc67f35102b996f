"""Checkpoints of DeePMD-kit's PyTorch backend (.pt), read weights-only: no code of the file is ever run.

model/_extra_state/model_params       the normalised model section of the input
model/model.Default.<path>            tensors; a multi-task file has its task's name instead of Default
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allforce.config.load import validated_config
from allforce.errors import UserError
from allforce.models import MODELS, Model


def model_from_pt(path: Path) -> Model:
    state, params = read_pt(path)
    source, kind = str(path), params.get("type", "standard")
    if kind not in MODELS:
        raise UserError(f"{source}: model type '{kind}' is not supported. Supported: {', '.join(MODELS)}.")
    model = MODELS[kind](validated_config(MODELS[kind].section_from_pt(params, source), source))
    model.load_pt(state, source)
    model.observed = (params.get("info") or {}).get("observed_type")
    return model


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
