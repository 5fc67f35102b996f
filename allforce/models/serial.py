"""Weights in model files: the pieces from which the trees of DeePMD-kit's parts are made, and arrays by name.

A tree is nested dicts and lists with NumPy arrays below the keys "@variables".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from allforce.errors import UserError
from allforce.models.layers import Layer, Net

# the newest version of each part of DeePMD-kit's trees that is understood
NEWEST = {
    "Model": 2,
    "Descriptor": 3,
    "Fitting": 4,
    "NetworkCollection": 1,
    "EmbeddingNetwork": 2,
    "FittingNetwork": 1,
    "Layer": 2,
    "LayerNorm": 1,
    "NeighborGatedAttention": 1,
    "TypeEmbedNet": 2,
}
NEWEST_OF_TYPE = {("Fitting", "polar"): 5, ("Fitting", "property"): 6}


def to_numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


# ---- arrays by name: the form of a part that DeePMD-kit does not have


def arrays_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: to_numpy(tensor) for name, tensor in module.state_dict().items()}


def part_tree(kind: str, part: Any, type_map: list[str]) -> dict[str, Any]:
    """A descriptor or a fitting that DeePMD-kit does not have: its section of the input and its tensors."""
    section = part.config.plain()
    return {"@class": kind, "@version": 1, **section, "@variables": arrays_of(part), "type_map": type_map}


def fill_arrays(module: nn.Module, stored: dict[str, Any], source: str) -> None:
    own = module.state_dict()
    for name in sorted(own.keys() ^ stored.keys()):
        raise UserError(f"{source}: {name} is {'missing' if name in own else 'not known here'}.")
    for name, tensor in own.items():
        copy_array(tensor, stored[name], f"{source}: {name}")


# ---- reading


def check_versions(node: Any, source: str) -> None:
    if isinstance(node, list):
        for child in node:
            check_versions(child, source)
    if not isinstance(node, dict):
        return
    kind, found = node.get("@class"), node.get("@version", 1)
    newest = NEWEST_OF_TYPE.get((kind, node.get("type")), NEWEST.get(kind))  # type: ignore[arg-type]
    if newest is not None and found > newest:
        raise UserError(
            f"{source}: {kind} has version {found}, the newest one known here is {newest}. "
            "The file comes from a newer DeePMD-kit; write it with DeePMD-kit 3.2 or update Allforce."
        )
    for child in node.values():
        check_versions(child, source)


def refuse(part: dict[str, Any], neutral: dict[str, Any], source: str) -> None:
    """Features of DeePMD-kit that change the result of a part: only their neutral value can be read."""
    for key, value in neutral.items():
        if part.get(key) not in (value, None):
            raise UserError(f"{source}: '{key}': {part[key]!r} is not supported. Supported: {value!r}.")


def part_named(key: str, kind: Any, parts: Any, source: str) -> Any:
    """The class of a part by its type or another name of it."""
    for part in parts.values():
        if kind in (part.Config.model_fields["type"].default, *part.Config.type_aliases):
            return part
    raise UserError(f"{source}: {key} of type '{kind}' is not supported. Supported: {', '.join(parts)}.")


def copy_array(target: Tensor, value: Any, where: str) -> None:
    """Copy after the shapes have been compared; unit axes of old files are dropped."""
    array = np.asarray(value)
    if array.size != target.numel():
        raise UserError(f"{where}: found shape {array.shape}, expected {tuple(target.shape)}.")
    with torch.no_grad():
        target.copy_(torch.from_numpy(np.array(array)).reshape(target.shape))


def copy_nets(nets: Any, stored: Sequence[dict | None], where: str) -> None:
    """Weights of a NetworkCollection, whose order (first index fastest) is also that of our nets."""
    if len(nets) != len(stored):
        raise UserError(f"{where}: found {len(stored)} nets, expected {len(nets)}.")
    for n, (net, found) in enumerate(zip(nets, stored, strict=True)):
        if found is None:  # the net of an excluded pair of types, never evaluated
            continue
        if len(net.layers) != len(found["layers"]):
            raise UserError(f"{where} {n}: found {len(found['layers'])} layers, expected {len(net.layers)}.")
        for k, (layer, entry) in enumerate(zip(net.layers, found["layers"], strict=True)):
            copy_layer(layer, entry["@variables"], f"{where} {n} layer {k}")


def copy_layer(layer: Layer, stored: dict, where: str) -> None:
    copy_array(layer.w, stored["w"], f"{where} w")
    if stored.get("b") is None:
        with torch.no_grad():
            layer.b.zero_()
    else:
        copy_array(layer.b, stored["b"], f"{where} b")
    idt = stored.get("idt")
    if layer.idt is None:
        if idt is not None:
            raise UserError(f"{where}: found a time step 'idt' where the layer has no residual connection.")
    elif idt is None:
        with torch.no_grad():
            layer.idt.fill_(1.0)  # a residual without time step
    else:
        copy_array(layer.idt, idt, f"{where} idt")


def tensor_of(state: dict[str, Tensor], name: str, source: str) -> Tensor:
    if name not in state:
        raise UserError(f"{source}: no tensor '{name}' in the checkpoint.")
    return state[name]


def nets_from_pt(state: dict[str, Tensor], part: str, source: str) -> list[dict]:
    """The nets of a part of a .pt checkpoint in the layout of the model tree."""
    pattern = re.compile(re.escape(part) + r"\.networks\.(\d+)\.layers\.(\d+)\.(matrix|bias|idt)")
    names = {"matrix": "w", "bias": "b", "idt": "idt"}
    found: dict[int, dict[int, dict]] = {}
    for key, value in state.items():
        if (match := pattern.fullmatch(key)) and value is not None:
            net, layer, name = int(match[1]), int(match[2]), names[match[3]]
            found.setdefault(net, {}).setdefault(layer, {})[name] = to_numpy(value)
    if not found:
        raise UserError(f"{source}: no weights {part}.networks.* in the checkpoint.")
    return [{"layers": [{"@variables": found[n][k]} for k in sorted(found[n])]} for n in sorted(found)]


def layer_from_pt(state: dict[str, Tensor], name: str, source: str) -> dict:
    """A layer (or the normalisation of one) of a .pt checkpoint in the layout of the model tree."""
    b = state.get(f"{name}.bias")
    w = to_numpy(tensor_of(state, f"{name}.matrix", source))
    return {"@variables": {"w": w, "b": None if b is None else to_numpy(b)}}


# ---- writing


def precision_of(nets: Any) -> str:
    return str(nets[0].layers[0].w.dtype).removeprefix("torch.")


def collection(nets: Any, kind: str, ndim: int, ntypes: int, settings: dict, trainable: list[bool]) -> dict:
    """A NetworkCollection. settings: keys that every net repeats, activation_function and precision among them."""
    version = NEWEST["EmbeddingNetwork" if kind == "embedding_network" else "FittingNetwork"]
    return {
        "@class": "NetworkCollection",
        "@version": 1,
        "ndim": ndim,
        "ntypes": ntypes,
        "network_type": kind,
        "networks": [
            {
                "@class": "".join(word.capitalize() for word in kind.split("_")),
                "@version": version,
                "in_dim": net.layers[0].w.shape[0],
                **settings,
                "layers": layers_tree(net, settings["precision"], trainable),
            }
            for net in nets
        ],
    }


def layers_tree(net: Net, precision: str, trainable: list[bool]) -> list[dict]:
    return [layer_tree(layer, precision, flag) for layer, flag in zip(net.layers, trainable, strict=True)]


def layer_tree(layer: Layer, precision: str, trainable: bool) -> dict:
    return {
        "@class": "Layer",
        "@version": 2,
        "bias": True,
        "use_timestep": layer.idt is not None,
        "activation_function": layer.activation.lower(),
        "resnet": bool(layer.resnet),
        "precision": precision,
        "trainable": trainable,
        "@variables": {
            "w": to_numpy(layer.w),
            "b": to_numpy(layer.b),
            "idt": None if layer.idt is None else to_numpy(layer.idt),
        },
    }
