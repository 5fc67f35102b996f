"""`dp show`: what is in a model file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from allforce.errors import UserError
from allforce.infer.model_file import load_model, observed_types
from allforce.infer.tree import tree_from_potential

log = logging.getLogger("deepmd.entrypoints.show")

ATTRIBUTES = ("model-branch", "type-map", "descriptor", "fitting-net", "size", "observed-type", "serialization-tree")


def show(model: str, attributes: Sequence[str]) -> None:
    """Log the attributes that are asked for."""
    unknown = [a for a in attributes if a not in ATTRIBUTES]
    if unknown:
        raise UserError(f"dp show: unknown attribute '{unknown[0]}'. Known: {', '.join(ATTRIBUTES)}.")
    potential = load_model(model)
    log.info("This is a singletask model")
    if "model-branch" in attributes:
        raise UserError(f"{model} is a single-task model: it has no branches to show.")
    if "type-map" in attributes:
        log.info("The type_map is %s", potential.type_map)
    for attribute, part in (("descriptor", potential.config.descriptor), ("fitting-net", potential.config.fitting_net)):
        if attribute in attributes:
            log.info("The %s parameter is %s", attribute.replace("-", "_"), part.model_dump(mode="json"))
    if "size" in attributes:
        parts = {"descriptor": potential.descriptor, "fitting-net": potential.fitting}
        sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
        log.info("Parameter counts for a single branch model:")
        for name, size in {**sizes, "total": sum(sizes.values())}.items():
            log.info("Parameters in %s: %s", name, f"{size:,}")
    if "observed-type" in attributes:
        found = observed_types(model)
        log.info("The observed types for this model: ")
        log.info("Number of observed types: %d ", len(found))
        log.info("Observed types: %s ", found)
    if "serialization-tree" in attributes:
        log.info("Model serialization tree:\n%s", "\n".join(_lines("Model", tree_from_potential(potential)["model"])))


def _lines(name: str, node: Any, depth: int = 0) -> Iterator[str]:
    """An indented line for each entry; arrays by dtype and shape."""
    indent = "  " * depth
    if isinstance(node, dict):
        kind = node.get("@class", "")
        yield f"{indent}{name}: {kind}".rstrip()
        for key, value in node.items():
            if not key.startswith("@") or key == "@variables":
                yield from _lines(key, value, depth + 1)
    elif isinstance(node, list) and node and isinstance(node[0], dict):
        yield f"{indent}{name}: list of {len(node)}"
        for n, child in enumerate(node):
            yield from _lines(str(n), child, depth + 1)
    elif isinstance(node, np.ndarray):
        yield f"{indent}{name}: {node.dtype} {node.shape}"
    else:
        yield f"{indent}{name}: {node}"
