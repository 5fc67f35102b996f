"""The two containers of DeePMD-kit's backend-independent model: HDF5 (.dp) and YAML (.yaml).

Both hold one tree of dicts and lists. In .dp the tree is the root attribute `json`, and every leaf below a key
"@variables" is the path of a root dataset /variable_NNNN (or null). In .yaml an array is written in place as
{"@class": "np.ndarray", "@is_variable": true, "@version": 1, "dtype": ..., "value": nested lists}.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import yaml

from allforce.config.read import check_aliases
from allforce.errors import UserError

YAML_SUFFIXES = (".yaml", ".yml")
LARGEST = 1 << 31  # bytes of an array
MOST_NODES = 10**8  # values of a YAML file


def read_tree(path: Path) -> dict:
    """The tree with numpy arrays in place of the variables."""
    tree = _read_yaml(path) if path.suffix in YAML_SUFFIXES else _read_hdf5(path)
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict) or (model.get("type", "standard") == "standard" and "descriptor" not in model):
        raise UserError(f"{path} is not a model file: its tree has no entry 'model' with a descriptor.")
    return tree


def write_tree(path: Path, tree: dict) -> None:
    """Write under a temporary name, then rename: a file of this name is always whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        (_write_yaml if path.suffix in YAML_SUFFIXES else _write_hdf5)(temporary, tree)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _map_variables(tree: Any, function: Callable[[Any], Any], variable: bool = False) -> Any:
    """A copy of the tree in which function has replaced every non-null leaf below a key "@variables"."""
    if isinstance(tree, dict) and not tree.get("@is_variable"):
        return {k: _map_variables(v, function, variable or k == "@variables") for k, v in tree.items()}
    if isinstance(tree, list) and (not variable or _holds_variable(tree)):
        return [_map_variables(v, function, variable) for v in tree]
    return function(tree) if variable and tree is not None else tree


def _holds_variable(value: Any) -> bool:
    """Whether an array, or what stands for one, is in it: then it is a list of variables, else one itself."""
    if isinstance(value, list):
        return any(_holds_variable(v) for v in value)
    return isinstance(value, (dict, np.ndarray)) or (isinstance(value, str) and value.startswith("/"))


def _read_hdf5(path: Path) -> dict:
    try:
        with h5py.File(path, "r") as file:
            tree = json.loads(file.attrs["json"])
            return _map_variables(tree, lambda name: _variable(file, name))
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a readable .dp model: {error}. Expected an HDF5 file with the attribute 'json' as "
            "written by `dp freeze -o model.dp` or `dp convert-backend`."
        ) from None


def _variable(file: h5py.File, name: Any) -> np.ndarray:
    data = file[name]
    if not isinstance(data, h5py.Dataset) or data.dtype.kind not in "fiub" or data.shape is None:
        raise ValueError(f"{name} is no array of numbers, but {data}")
    if (size := data.dtype.itemsize * math.prod(data.shape)) > LARGEST:
        raise ValueError(f"{name} promises {size:.1e} bytes, at most {LARGEST:.1e} are read")
    return np.asarray(data[()])


def _write_hdf5(path: Path, tree: dict) -> None:
    with h5py.File(path, "w") as file:
        count = 0

        def store(value: Any) -> str:
            nonlocal count
            name = f"/variable_{count:04d}"
            file.create_dataset(name, data=np.asarray(value))
            count += 1
            return name

        file.attrs["json"] = json.dumps(_map_variables(tree, store), separators=(",", ":"))


def _read_yaml(path: Path) -> dict:
    def array(leaf: Any) -> np.ndarray:
        if isinstance(leaf, dict):
            return np.asarray(leaf["value"], dtype=leaf["dtype"])  # also mends floats that YAML 1.1 reads as text
        return np.asarray(leaf, dtype=np.float64)

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(path.read_text(encoding="utf-8"))
        if (node := loader.get_single_node()) is None:
            return {}
        check_aliases(node, str(path), MOST_NODES)
        return _map_variables(loader.construct_document(node), array)
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not a readable .yaml model: {error}.") from None


def _write_yaml(path: Path, tree: dict) -> None:
    def leaf(value: Any) -> Any:
        array = np.asarray(value)
        if array.ndim == 0:
            return array.item()
        return {
            "@class": "np.ndarray",
            "@is_variable": True,
            "@version": 1,
            "dtype": array.dtype.name,
            "value": array.tolist(),
        }

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(_map_variables(tree, leaf), file, Dumper=dumper, sort_keys=True, default_flow_style=None)
