"""States (of models, optimizers, schedulers) as JSON and tensors: to files and to other workers, without pickle.

{"lr": 0.1, "betas": (0.9, 0.99), "exp_avg": tensor}  →  JSON {"dict": [["lr", 0.1], …, ["exp_avg", {"tensor": 0}]]}
                                                         and [tensor]
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from ..errors import UserError
from ..writing import write_whole
from .comm import Comm

FORMAT = "allforce state"
KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
PIECE = 1 << 28  # bytes of one broadcast


def pack(value: Any, tensors: list[Tensor], where: str = "state") -> Any:
    """The JSON of a tree; its tensors are appended to a list."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind = type(value).__name__
    if isinstance(value, dict):
        items = [[pack(k, tensors, where), pack(v, tensors, f"{where}/{k}")] for k, v in value.items()]
        return {kind if kind in KINDS else "dict": items}
    if isinstance(value, (list, tuple)):
        items = [pack(v, tensors, f"{where}/{n}") for n, v in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    raise UserError(
        f"{where} is a {kind}, which cannot be saved or sent. Expected tensors, numbers, texts, and lists and dicts of"
        " them: turn it into these first"
    )


def unpack(tree: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, inside),) = tree.items()
    if kind == "tensor":
        return tensors[inside]
    if kind in ("list", "tuple"):
        return KINDS[kind](unpack(item, tensors) for item in inside)
    return KINDS[kind]({unpack(k, tensors): unpack(v, tensors) for k, v in inside})


def write_tree(path: str | Path, value: Any) -> None:
    tensors: list[Tensor] = []
    header = {FORMAT: json.dumps({"version": 1, "tree": pack(value, tensors)})}
    named = {str(n): t.cpu().contiguous().clone() for n, t in enumerate(tensors)}
    write_whole(path, serialise(named, metadata=header))


def read_tree(path: str | Path) -> Any:
    """What write_tree wrote; anything else is a UserError."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(FORMAT)
            tensors = [file.get_tensor(str(n)) for n in range(len(file.keys()))]
        if header is not None:
            return unpack(json.loads(header)["tree"], tensors)
    except (
        SafetensorError,
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UserError(
            f"{path}: cannot be read as a file of allforce.distributed.save ({error}). It is damaged, missing or"
            " something else: give another one"
        ) from None
    raise UserError(f"{path}: is a safetensors file, but not one of allforce.distributed.save")


def send(comm: Comm, value: Any, root: int) -> Any:
    """The root's value on every worker."""
    if comm.size == 1:
        return value
    tensors: list[Tensor] = []
    is_root = comm.rank == root
    tree = pack(value, tensors) if is_root else None
    forms = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    tree, forms = comm.gather([tree, forms])[root]
    if not is_root:
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in forms]
    flat = [t.cpu().contiguous().view(-1).view(torch.uint8) for t in tensors]
    block = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    for piece in block.split(PIECE):
        comm.broadcast(piece, root)
    if is_root:
        return value
    for tensor, part in zip(tensors, block.split([len(f) for f in flat]), strict=True):
        tensor.view(-1).view(torch.uint8).copy_(part)
    return unpack(tree, tensors)
