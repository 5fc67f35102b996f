"""`dp show`: what is in a model file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from allforce.errors import UserError
from allforce.files.model_file import load_model
from allforce.files.tree import observed_types

log = logging.getLogger("deepmd.entrypoints.show")

ATTRIBUTES = ("model-branch", "type-map", "descriptor", "fitting-net", "size", "observed-type", "serialization-tree")


def show(model: str, attributes: Sequence[str]) -> None:
    """Log the attributes that are asked for."""
    unknown = [a for a in attributes if a not in ATTRIBUTES]
    if unknown:
        raise UserError(f"dp show: unknown attribute '{unknown[0]}'. Known: {', '.join(ATTRIBUTES)}.")
    loaded = load_model(model)
    log.info("This is a singletask model")
    if "model-branch" in attributes:
        raise UserError(f"{model} is a single-task model: it has no branches to show.")
    if "type-map" in attributes:
        log.info("The type_map is %s", loaded.type_map)
    parts = loaded.parts()
    for attribute in ("descriptor", "fitting-net"):
        if attribute in attributes and attribute not in parts:
            raise UserError(f"{model}: a model of type '{loaded.config.type}' has no {attribute}.")
        if attribute in attributes:
            section = parts[attribute].config.plain()  # type: ignore[union-attr, operator]
            log.info("The %s parameter is %s", attribute.replace("-", "_"), section)
    if "size" in attributes:
        sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
        log.info("Parameter counts for a single branch model:")
        for name, size in {**sizes, "total": sum(p.numel() for p in loaded.parameters())}.items():
            log.info("Parameters in %s: %s", name, f"{size:,}")
    if "observed-type" in attributes:
        found = observed_types(loaded)
        log.info("The observed types for this model: ")
        log.info("Number of observed types: %d ", len(found))
        log.info("Observed types: %s ", found)
    if "serialization-tree" in attributes:
        log.info("Model serialization tree:\n%s", "\n".join(_lines("Model", loaded.to_tree())))


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
