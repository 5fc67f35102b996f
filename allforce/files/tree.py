"""A model <-> the tree of a model file, in DeePMD-kit's layout: what is around the model's own entry."""

from __future__ import annotations

from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from ase.data import atomic_numbers

from allforce.config.load import normalised, validated_config
from allforce.errors import UserError
from allforce.models import MODELS, Model
from allforce.models.serial import check_versions


def model_from_tree(tree: dict[str, Any], source: str) -> Model:
    """The model of a tree with numpy arrays; source names the file in messages."""
    stored = tree["model"]
    check_versions(stored, source)
    kind = stored.get("type", "standard")
    if kind not in MODELS:
        raise UserError(f"{source}: model type '{kind}' is not supported. Supported: {', '.join(MODELS)}.")
    script = tree.get("model_def_script") or {}
    section = MODELS[kind].section_from_tree(stored, script, source)
    model = MODELS[kind](validated_config(section, source))
    model.load_tree(stored, tree.get("backend"), source)
    distance = (tree.get("@variables") or {}).get("min_nbor_dist")
    model.min_nbor_dist = None if distance is None else float(distance)
    model.observed = (script.get("info") or {}).get("observed_type")
    return model


def tree_from_model(model: Model) -> dict[str, Any]:
    """The tree that DeePMD-kit 3.2 reads, with numpy arrays below the keys "@variables"."""
    distance = model.min_nbor_dist
    script = normalised(model.config) | {"type_map": list(model.type_map)}
    return {
        "software": "allforce",
        "version": _version(),
        "time": str(datetime.now(tz=timezone.utc)),
        "backend": "Allforce",
        "model": model.to_tree(),
        "model_def_script": script | {"info": {"observed_type": observed_types(model)}},
        "@variables": {} if distance is None else {"min_nbor_dist": np.float64(distance)},  # null stops TensorFlow
    }


def observed_types(model: Model) -> list[str]:
    """Types that had atoms in the training data, by atomic number; other names come last."""
    return sorted(model.observed_types(), key=lambda name: atomic_numbers.get(name) or np.inf)


def _version() -> str:
    try:
        return version("allforce")
    except PackageNotFoundError:  # run from the source tree without installation
        return "unknown"
