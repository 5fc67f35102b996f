"""`dp change-bias`: fit the energy of each type anew, the nets stay.

change   bias += least squares of (label - prediction) over the numbers of atoms of each type
set      bias  = least squares of the labels themselves
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from allforce.data.dataset import DataSet
from allforce.data.loader import Loader
from allforce.data.sample import Sample
from allforce.data.sampler import Sampler
from allforce.data.system import System
from allforce.distributed.comm import SerialComm
from allforce.errors import UserError
from allforce.files import checkpoint
from allforce.files.model_file import WRITTEN, load_model, save_model
from allforce.infer.evaluate import Evaluator
from allforce.infer.systems import select_systems
from allforce.models import Model

log = logging.getLogger("deepmd.entrypoints.change_bias")


def change_bias(
    model: str,
    system: str | None = None,
    datafile: str | None = None,
    bias_value: Sequence[float] | None = None,
    numb_batch: int = 0,
    mode: str = "change",
    output: str | None = None,
) -> Path:
    """Write the model with its new bias and return where; numb_batch batches of each system are used, 0: all."""
    path = Path(model)
    if path.suffix not in WRITTEN and path.suffix != ".pt":
        path = checkpoint.find(path)
    changed = load_model(path)
    if bias_value is not None:
        changed.set_bias(np.array(bias_value, dtype=np.float64))
        log.info("Energy bias of %s set to %s.", changed.type_map, list(bias_value))
    else:
        for line in fit_bias(changed, select_systems(changed.type_map, system, datafile), numb_batch, mode):
            log.info(line)
    out = Path(output) if output is not None else _updated(path)
    _write(changed, path, out)
    log.info("Saved model to %s", out)
    return out


def fit_bias(model: Model, systems: list[System], numb_batch: int = 0, mode: str = "change") -> list[str]:
    """Change the bias of a model by labelled systems; lines for the log."""
    if mode not in ("change", "set"):
        raise UserError(f"change-bias: mode '{mode}' is not known. Known: change, set.")
    for one in systems:
        if "energy" not in one.label_names:
            raise UserError(f"{one.name}: has no energy labels, which change-bias needs.")
    device = Evaluator(model, parallel=False).device  # ready to be evaluated
    dataset = DataSet(systems, "auto")
    loader = Loader(dataset, Sampler(dataset, 0), model.needs, device)
    batches = numb_batch or max(s.nframes for s in systems)
    return model.change_bias(Sample(loader, batches, SerialComm(), spread=True), mode)


def _updated(path: Path) -> Path:
    """model.dp -> model_updated.dp; a .pt, which is only read, becomes a .dp"""
    return path.with_name(f"{path.stem}_updated{'.dp' if path.suffix == '.pt' else path.suffix}")


def _write(model: Model, source: Path, out: Path) -> None:
    """Model files are written anew; a checkpoint keeps all it has but the model's tensors."""
    if out.suffix == checkpoint.SUFFIX and source.suffix == checkpoint.SUFFIX:
        stored = checkpoint.read(source)
        stored.tensors |= {f"model/{name}": tensor.cpu() for name, tensor in model.state_dict().items()}
        checkpoint.write(out, stored)
        return
    save_model(model, out)
