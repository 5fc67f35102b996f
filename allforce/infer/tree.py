"""Potential <-> the backend-independent model tree of DeePMD-kit.

The tree's descriptor and fitting carry the keys of the input file, so a tree is read by building the ModelConfig from
it, constructing the Potential and copying the weights. What backends keep in two places is added on reading:

    bias_τ = fitting.bias_atom_e[τ] + out_bias[τ]        written: bias_atom_e = bias, out_bias = 0, out_std = 1
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from ase.data import atomic_numbers
from torch import Tensor

from allforce.config.load import validated_config
from allforce.config.schema import DescriptorSeE2A, FittingEner, ModelConfig
from allforce.data.stats import LEAST_STD
from allforce.errors import UserError
from allforce.models.layers import Layer
from allforce.models.potential import Potential

# the newest version of each part that this reader understands
CEILINGS = {
    "Model": 2,
    "Descriptor": 3,
    "Fitting": 4,
    "NetworkCollection": 1,
    "EmbeddingNetwork": 2,
    "FittingNetwork": 1,
    "Layer": 2,
}
DESCRIPTORS = {"se_e2_a": DescriptorSeE2A, "se_a": DescriptorSeE2A}
FITTINGS = {"ener": FittingEner}


# ---------------------------------------------------------------- reading


def potential_from_tree(tree: dict, source: str) -> Potential:
    """The model of a tree with numpy arrays; source names the file in messages."""
    model = tree["model"]
    check_versions(model, source)
    potential = Potential(config_from_tree(tree, source))
    descriptor, fitting = model["descriptor"], model["fitting"]
    copy_nets(potential.descriptor.nets, descriptor["embeddings"]["networks"], f"{source}: embedding net")
    copy_nets(potential.fitting.nets, fitting["nets"]["networks"], f"{source}: fitting net")
    set_environment_statistics(potential, descriptor["@variables"]["davg"], descriptor["@variables"]["dstd"], source)

    stored, out = fitting["@variables"], model.get("@variables") or {}
    out_std = out.get("out_std")
    if tree.get("backend") == "TensorFlow" and out_std is not None and not np.all(out_std == 1.0):
        raise UserError(
            f"{source}: written by DeePMD-kit's TensorFlow backend with out_std = {np.ravel(out_std).tolist()}. "
            "Only out_std = 1 can be read, because the backends disagree on its meaning."
        )
    set_bias(potential, source, stored.get("bias_atom_e"), out.get("out_bias"))
    for name in ("fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std"):
        if stored.get(name) is not None:
            copy_array(getattr(potential.fitting, name), stored[name], f"{source}: {name}")
    distance = (tree.get("@variables") or {}).get("min_nbor_dist")
    potential.min_nbor_dist = None if distance is None else float(distance)
    return potential


def config_from_tree(tree: dict, source: str) -> ModelConfig:
    """The model section of an input file that describes the tree."""
    model, script = tree["model"], tree.get("model_def_script") or {}
    if model.get("type", "standard") != "standard":
        raise UserError(f"{source}: model type '{model['type']}' is not supported. Supported: standard.")
    parts = {}
    for key, found, table, script_key in (
        ("descriptor", model["descriptor"], DESCRIPTORS, "descriptor"),
        ("fitting_net", model["fitting"], FITTINGS, "fitting_net"),
    ):
        kind = found.get("type")
        if kind not in table:
            raise UserError(f"{source}: {key} of type '{kind}' is not supported. Supported: {', '.join(table)}.")
        parts[key] = {k: v for k, v in found.items() if k in table[kind].model_fields}
        parts[key]["type"] = table[kind].model_fields["type"].default  # not an alias
        seed = (script.get(script_key) or {}).get("seed")
        if seed is not None:
            parts[key]["seed"] = seed
    _refuse_unsupported(model, source)
    if parts["fitting_net"].get("atom_ener") is not None:
        parts["fitting_net"]["atom_ener"] = [
            None if x is None else float(np.ravel(x)[0]) for x in parts["fitting_net"]["atom_ener"]
        ]
    section = {k: v for k, v in script.items() if k.startswith("data_") and k in ModelConfig.model_fields}
    for key in ("type_map", "pair_exclude_types", "atom_exclude_types", "preset_out_bias"):
        if model.get(key) is not None:
            section[key] = model[key]
    return validated_config(section | parts, source)


def _refuse_unsupported(model: dict, source: str) -> None:
    """Features that DeePMD-kit can write into a se_e2_a energy model and that change its energies."""
    descriptor, fitting = model["descriptor"], model["fitting"]
    for part, key, harmless in (
        (descriptor, "spin", None),
        (fitting, "spin", None),
        (fitting, "tot_ener_zero", False),
        (fitting, "layer_name", None),
        (fitting, "dim_case_embd", 0),
        (fitting, "mixed_types", False),
        (descriptor.get("env_mat") or {}, "use_exp_switch", False),
    ):
        if part.get(key) not in (harmless, None):
            raise UserError(f"{source}: '{key}': {part[key]!r} is not supported. Supported: {harmless!r}.")
    if set(fitting.get("exclude_types") or ()) - set(model.get("atom_exclude_types") or ()):
        raise UserError(
            f"{source}: 'exclude_types' of the fitting is not supported; use the model's atom_exclude_types."
        )


def check_versions(node: Any, source: str) -> None:
    if isinstance(node, list):
        for child in node:
            check_versions(child, source)
    if not isinstance(node, dict):
        return
    kind, found = node.get("@class"), node.get("@version", 1)
    if kind in CEILINGS and found > CEILINGS[kind]:
        raise UserError(
            f"{source}: {kind} has version {found}, the newest one known here is {CEILINGS[kind]}. "
            "The file comes from a newer DeePMD-kit; write it with DeePMD-kit 3.2 or update Allforce."
        )
    for child in node.values():
        check_versions(child, source)


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


def set_environment_statistics(potential: Potential, davg: Any, dstd: Any, source: str) -> None:
    """(nt, nnei, 4) arrays of the file -> our (nt, 4): equal in all slots, davg of x, y, z zero, their dstd equal."""
    davg, dstd = np.asarray(davg, dtype=np.float64), np.asarray(dstd, dtype=np.float64)
    shape = (len(potential.type_map), sum(potential.sel), 4)
    for name, found in (("davg", davg), ("dstd", dstd)):
        if found.shape != shape:
            raise UserError(f"{source}: {name} has shape {found.shape}, expected {shape}.")
        if not np.array_equal(found, np.broadcast_to(found[:, :1], shape)):
            raise UserError(f"{source}: {name} differs between neighbour slots, which is not supported.")
    if np.any(davg[..., 1:]) or np.any(dstd[..., 1] != dstd[..., 2]) or np.any(dstd[..., 1] != dstd[..., 3]):
        raise UserError(
            f"{source}: statistics that differ between x, y and z (davg {davg[:, 0].tolist()}, dstd "
            f"{dstd[:, 0].tolist()}) break the rotational symmetry and are not supported."
        )
    copy_array(potential.descriptor.davg, davg[:, 0], f"{source}: davg")
    copy_array(potential.descriptor.dstd, dstd[:, 0], f"{source}: dstd")


def set_bias(potential: Potential, source: str, bias_atom_e: Any, out_bias: Any) -> None:
    total = np.zeros(len(potential.type_map))
    for name, part in (("bias_atom_e", bias_atom_e), ("out_bias", out_bias)):
        if part is None:
            continue
        if np.size(part) != total.size:
            raise UserError(f"{source}: {name} has shape {np.shape(part)}, expected {total.size} values.")
        total += np.asarray(part, dtype=np.float64).reshape(total.size)
    copy_array(potential.fitting.bias_atom_e, total, f"{source}: bias")


# ---------------------------------------------------------------- writing


def tree_from_potential(potential: Potential) -> dict:
    """The tree that DeePMD-kit 3.2 reads, with numpy arrays below the keys "@variables"."""
    nt = len(potential.type_map)
    config = potential.config
    model = {
        "@class": "Model",
        "type": "standard",
        "@version": 2,
        "type_map": list(potential.type_map),
        "descriptor": _descriptor(potential),
        "fitting": _fitting(potential),
        "atom_exclude_types": list(config.atom_exclude_types),
        "pair_exclude_types": [list(pair) for pair in config.pair_exclude_types],
        "rcond": config.fitting_net.rcond,
        "preset_out_bias": config.preset_out_bias,
        "@variables": {"out_bias": np.zeros((1, nt, 1)), "out_std": np.ones((1, nt, 1))},
    }
    distance = potential.min_nbor_dist
    script = config.model_dump(mode="json") | {"type_map": list(potential.type_map)}
    return {
        "software": "allforce",
        "version": _version(),
        "time": str(datetime.now(tz=timezone.utc)),
        "backend": "Allforce",
        "model": model,
        "model_def_script": script | {"info": {"observed_type": types_with_data(potential)}},
        "@variables": {"min_nbor_dist": None if distance is None else np.float64(distance)},
    }


def types_with_data(potential: Potential) -> list[str]:
    """Types that had atoms in the statistics of the training data, by atomic number; other names come last.

    A type without atoms has one default in all columns of dstd: 0.1, or 1/rcut by DeePMD-kit's TensorFlow backend.
    With atoms the radial and the angular deviation differ, unless both are at the floor for want of neighbours. The
    energy bias is no such sign: it may be given by hand, and without energies in the data it is 0.
    """
    radial, angular = numpy(potential.descriptor.dstd)[:, :2].T
    seen = (radial != angular) | np.isclose(radial, LEAST_STD)
    names = [name for name, has_atoms in zip(potential.type_map, seen, strict=True) if has_atoms]
    return sorted(names, key=lambda name: atomic_numbers.get(name) or np.inf)


def _descriptor(potential: Potential) -> dict:
    descriptor, nt = potential.descriptor, len(potential.type_map)
    c = descriptor.config
    nnei = sum(potential.sel)

    def slots(x: Tensor) -> np.ndarray:
        return np.repeat(numpy(x)[:, None, :], nnei, axis=1)  # (nt, nnei, 4)

    settings = {"activation_function": c.activation_function.lower(), "precision": precision(descriptor.nets)}
    trainable = [c.trainable] * len(c.neuron)
    return {
        "@class": "Descriptor",
        "type": "se_e2_a",
        "@version": 2,
        "rcut": float(c.rcut),
        "rcut_smth": float(c.rcut_smth),
        "sel": [int(n) for n in potential.sel],
        "neuron": list(c.neuron),
        "axis_neuron": c.axis_neuron,
        "resnet_dt": c.resnet_dt,
        "trainable": c.trainable,
        "type_one_side": c.type_one_side,
        "exclude_types": [list(pair) for pair in c.exclude_types],
        "env_protection": c.env_protection,
        "set_davg_zero": c.set_davg_zero,
        **settings,
        "embeddings": {
            "@class": "NetworkCollection",
            "@version": 1,
            "ndim": 1 if c.type_one_side else 2,
            "ntypes": nt,
            "network_type": "embedding_network",
            "networks": [
                {
                    "@class": "EmbeddingNetwork",
                    "@version": 2,
                    "in_dim": 1,
                    "neuron": list(c.neuron),
                    "resnet_dt": c.resnet_dt,
                    "bias": True,
                    **settings,
                    "layers": _layers(net, settings["precision"], trainable),
                }
                for net in descriptor.nets
            ],
        },
        "env_mat": {
            "rcut": float(c.rcut),
            "rcut_smth": float(c.rcut_smth),
            "protection": c.env_protection,
            "use_exp_switch": False,
        },
        "@variables": {"davg": slots(descriptor.davg), "dstd": slots(descriptor.dstd)},
        "type_map": list(potential.type_map),
        "spin": None,
    }


def _fitting(potential: Potential) -> dict:
    fitting, nt = potential.fitting, len(potential.type_map)
    c = fitting.config
    settings = {"activation_function": c.activation_function.lower(), "precision": precision(fitting.nets)}
    trainable = list(c.trainable) if isinstance(c.trainable, list) else [c.trainable] * (len(c.neuron) + 1)
    statistics = {
        name: numpy(getattr(fitting, name)) if count else None
        for count, kind in ((c.numb_fparam, "fparam"), (c.numb_aparam, "aparam"))
        for name in (f"{kind}_avg", f"{kind}_inv_std")
    }
    return {
        "@class": "Fitting",
        "type": "ener",
        "@version": 4,
        "var_name": "energy",
        "ntypes": nt,
        "dim_descrpt": potential.descriptor.dim,
        "mixed_types": False,
        "dim_out": 1,
        "neuron": list(c.neuron),
        "resnet_dt": c.resnet_dt,
        "numb_fparam": c.numb_fparam,
        "numb_aparam": c.numb_aparam,
        "dim_case_embd": 0,
        "default_fparam": c.default_fparam,
        "rcond": c.rcond,
        "tot_ener_zero": False,
        "trainable": trainable,
        "atom_ener": list(c.atom_ener or []),
        **settings,
        "layer_name": None,
        "use_aparam_as_mask": c.use_aparam_as_mask,
        "spin": None,
        "exclude_types": [],
        "nets": {
            "@class": "NetworkCollection",
            "@version": 1,
            "ndim": 1,
            "ntypes": nt,
            "network_type": "fitting_network",
            "networks": [
                {
                    "@class": "FittingNetwork",
                    "@version": 1,
                    "in_dim": net.layers[0].w.shape[0],
                    "out_dim": 1,
                    "neuron": list(c.neuron),
                    "resnet_dt": c.resnet_dt,
                    "bias_out": True,
                    **settings,
                    "layers": _layers(net, settings["precision"], trainable),
                }
                for net in fitting.nets
            ],
        },
        "@variables": {"bias_atom_e": numpy(fitting.bias_atom_e)[:, None], **statistics, "case_embd": None},
        "type_map": list(potential.type_map),
    }


def _layers(net: Any, dtype: str, trainable: list[bool]) -> list[dict]:
    return [
        {
            "@class": "Layer",
            "@version": 2,
            "bias": True,
            "use_timestep": layer.idt is not None,
            "activation_function": layer.activation.lower(),
            "resnet": bool(layer.resnet),
            "precision": dtype,
            "trainable": flag,
            "@variables": {
                "w": numpy(layer.w),
                "b": numpy(layer.b),
                "idt": None if layer.idt is None else numpy(layer.idt),
            },
        }
        for layer, flag in zip(net.layers, trainable, strict=True)
    ]


def numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


def precision(nets: Any) -> str:
    return str(nets[0].layers[0].w.dtype).removeprefix("torch.")


def _version() -> str:
    try:
        return version("allforce")
    except PackageNotFoundError:  # run from the source tree without installation
        return "unknown"
