"""`dp change-bias`: fit the energy of each type anew, the nets stay.

change   bias += least squares of (label - prediction) over the numbers of atoms of each type
set      bias  = least squares of the labels themselves
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from allforce.data.dataset import DataSet
from allforce.data.stats import EnergyBias, Predict, Sample, fit_frames, stat_sample
from allforce.data.system import System
from allforce.distributed.comm import Comm, SerialComm
from allforce.errors import UserError
from allforce.infer.model_file import WRITTEN, load_model, save_model
from allforce.infer.predict import DeepPot
from allforce.infer.systems import select_systems
from allforce.models.potential import Potential
from allforce.train import checkpoint

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
    potential = load_model(path)
    old = potential.fitting.bias_atom_e.numpy().copy()
    if bias_value is not None:
        new = _given(bias_value, potential)
    else:
        new = fitted_bias(potential, select_systems(potential.type_map, system, datafile), numb_batch, mode)
    out = Path(output) if output is not None else _updated(path)
    _write(potential, new, path, out)
    log.info("Change energy bias of %s from %s to %s.", potential.type_map, old.tolist(), new.tolist())
    log.info("Saved model to %s", out)
    return out


def fitted_bias(potential: Potential, systems: list[System], numb_batch: int = 0, mode: str = "change") -> np.ndarray:
    """The new bias (nt,) of a model on labelled systems."""
    if mode not in ("change", "set"):
        raise UserError(f"change-bias: mode '{mode}' is not known. Known: change, set.")
    dataset = DataSet(systems, "auto")
    sample = stat_sample(dataset, numb_batch or max(s.nframes for s in systems))
    for i in sorted({i for i, _ in sample}):
        if "energy" not in systems[i].label_names:
            raise UserError(f"{systems[i].name}: has no energy labels, which change-bias needs.")

    def predict(members: Sample) -> Iterator[float]:
        return (r.energy for r in DeepPot(potential).evaluate(systems[i].frame(k) for i, k in members))

    fit = fit_bias(potential, systems, sample, SerialComm(), predict if mode == "change" else None)
    log.info("RMSE of energy per atom after linear regression is: %s in the unit of energy.", fit.rmse)
    old = potential.fitting.bias_atom_e.cpu().numpy()
    return fit.bias + (old if mode == "change" else 0.0)


def fit_bias(
    potential: Potential, systems: list[System], mine: Sequence[tuple[int, int]], comm: Comm, predict: Predict | None
) -> EnergyBias:
    """Energy of each type, as the model counts atoms, in what `predict` misses of the labels of all workers' frames."""
    config = potential.config
    return fit_frames(
        systems, mine, comm, rcond=config.fitting_net.rcond, atom_exclude=config.atom_exclude_types, predict=predict
    )


def _given(values: Sequence[float], potential: Potential) -> np.ndarray:
    if len(values) != len(potential.type_map):
        raise UserError(
            f"change-bias -b: found {len(values)} value(s), expected {len(potential.type_map)}, one for each type of "
            f"{potential.type_map}."
        )
    return np.array(values, dtype=np.float64)


def _updated(path: Path) -> Path:
    """model.dp -> model_updated.dp; a .pt, which is only read, becomes a .dp"""
    return path.with_name(f"{path.stem}_updated{'.dp' if path.suffix == '.pt' else path.suffix}")


def _write(potential: Potential, bias: np.ndarray, source: Path, out: Path) -> None:
    """Model files are written anew; a checkpoint keeps all it has but the bias."""
    if out.suffix == checkpoint.SUFFIX and source.suffix == checkpoint.SUFFIX:
        stored = checkpoint.read(source)
        stored.tensors["model/fitting.bias_atom_e"] = torch.from_numpy(bias.copy())
        checkpoint.write(out, stored)
        return
    with torch.no_grad():
        potential.fitting.bias_atom_e.copy_(torch.from_numpy(bias))
    save_model(potential, out)
