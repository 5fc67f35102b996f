"""Models in files: which reader and writer belongs to which name.

.dp, .yaml, .yml     DeePMD-kit's backend-independent model: read and written (container.py, tree.py)
.pt                  a checkpoint of DeePMD-kit's PyTorch backend: read, weights only (pt_checkpoint.py)
.safetensors         a checkpoint of our own, also by its prefix or its directory: read
"""

from __future__ import annotations

from pathlib import Path

import torch

from allforce.config.load import validated_config
from allforce.errors import UserError
from allforce.files import checkpoint
from allforce.files.container import read_tree, write_tree
from allforce.files.pt_checkpoint import model_from_pt
from allforce.files.tree import model_from_tree, tree_from_model
from allforce.models import MODELS, Model

WRITTEN = (".dp", ".yaml", ".yml")
CONVERTIBLE = (".pb", ".pth", ".pbtxt", ".savedmodel", ".savedmodeltf", ".hlo", ".jax", ".pd", ".json", ".pte", ".pt2")

# what reading a tree of the wrong form may raise: a file can be anything
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, AssertionError)


def load_model(path: str | Path) -> Model:
    """The model of a model file or checkpoint; a name without suffix is also tried with .dp."""
    path = _found(Path(path))
    try:
        model = _read(path)
    except MALFORMED as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{path}: what is in it does not make a model ({type(error).__name__}: {reason}).") from error
    for name, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(
                f"{path}: {name} of this model has numbers that are not finite, so all that it predicts would be. "
                "Take an earlier checkpoint, or train it again."
            )
    return model


def _read(path: Path) -> Model:
    if path.suffix in WRITTEN:
        return model_from_tree(read_tree(path), str(path))
    if path.suffix == ".pt":
        return model_from_pt(path)
    return _model_from_checkpoint(path)


def _found(path: Path) -> Path:
    """The file that a name means."""
    if path.suffix in CONVERTIBLE:
        raise UserError(
            f"{path}: files of type '{path.suffix}' can only be opened by DeePMD-kit itself. Convert the model there "
            f"with `dp convert-backend {path.name} {path.stem}.dp` and give {path.stem}.dp."
        )
    if not path.exists() and path.suffix not in (*WRITTEN, ".pt", checkpoint.SUFFIX):
        frozen = path.with_name(path.name + ".dp")
        path = frozen if frozen.exists() else checkpoint.find(path)
    elif path.is_dir():
        path = checkpoint.find(path)
    if not path.is_file():
        raise UserError(f"{path}: no such model file. Known are {', '.join(WRITTEN)}, .pt and {checkpoint.SUFFIX}.")
    return path


def save_model(model: Model, path: str | Path) -> None:
    """Write .dp or .yaml, by the suffix."""
    path = Path(path)
    if path.suffix not in WRITTEN:
        remedy = (
            f" Write {path.stem}.dp and convert it with DeePMD-kit: `dp convert-backend {path.stem}.dp {path.name}`."
            if path.suffix in CONVERTIBLE
            else ""
        )
        raise UserError(f"{path}: models are written as {', '.join(WRITTEN)}, found '{path.suffix}'.{remedy}")
    if not path.parent.is_dir():
        raise UserError(f"{path}: the directory {path.parent} does not exist.")
    write_tree(path, tree_from_model(model))


def _model_from_checkpoint(path: Path) -> Model:
    stored = checkpoint.read(path)
    config = validated_config(stored.meta["model"], str(path))
    model = MODELS[config.type](config)
    try:
        model.load_state_dict(stored.weights())
    except RuntimeError as error:
        raise UserError(f"{path}: the tensors do not belong to the model described in it. {error}") from None
    model.set_numbers(stored.meta.get("model_numbers") or {})
    return model
