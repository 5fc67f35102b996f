"""A trained model on structures: frames in, what is wanted of them out."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allforce.data.batch import Batch, Frame
from allforce.data.blocks import NOTHING
from allforce.data.loader import collate, collate_parts
from allforce.data.prepare import Preparation
from allforce.distributed.devices import keep_freed_memory
from allforce.errors import UserError
from allforce.files.model_file import load_model
from allforce.infer.threads import divided, together
from allforce.infer.workers import ALONE, all_workers, divisible
from allforce.models import Model
from allforce.models.model import per_atom
from allforce.models.table import InferenceTable

log = logging.getLogger("deepmd.infer")

TOLERANCE = {torch.float64: 2e-10, torch.float32: 1e-5}  # of embedding tables relative to the nets, values and slopes
Result = dict[str, np.ndarray]  # output -> (…) of a frame or (n, …) of its atoms, in the frame's order


class Evaluator:
    """Evaluates a model on frames, in batches.

    table: evaluate embedding nets through their spline table ("table", fast) or for every neighbour ("exact").
    The two differ by less than 2e-10 of the nets' range in float64.
    parallel: together with all workers that a launcher started, if one did (workers.py). All of them construct it, and
    call it, alike, with the same frames, and have the same results; with False everybody is alone.
    """

    kind: str | None = "energy"  # the output that a model must have to be used by this class; None: any

    def __init__(
        self,
        model: str | Path | Model,
        table: str = "table",
        device: str | torch.device | None = None,
        parallel: bool = True,
    ):
        self.workers = all_workers() if parallel else ALONE
        self.model = model if isinstance(model, Model) else load_model(model)
        if self.kind is not None and self.kind not in self.model.outputs:
            found = ", ".join(self.model.outputs)
            raise UserError(f"{type(self).__name__}: the model does not predict {self.kind}; it predicts {found}.")
        if table not in ("table", "exact"):
            raise UserError(f"{type(self).__name__}: table is {table!r}; expected 'table' or 'exact'.")
        self.model.requires_grad_(False)  # nobody reads gradients with respect to parameters here
        keep_freed_memory()
        own = self.workers.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(device or own)
        self.model.to(self.device)
        self.needs = self.model.needs
        self.preparation = Preparation(self.needs)
        self.max_atoms = _max_atoms(os.environ.get("DP_INFER_BATCH_SIZE", "1024"))  # of a batch, frames × atoms
        self.model.prepare(InferenceTable(mode=table, tolerance=TOLERANCE[self.model.precision]))  # type: ignore[arg-type]
        if grown := self.model.refresh():
            log.debug(grown)

    # ---- what the model is

    @property
    def precision(self) -> str:
        """Of the nets: float64 or float32."""
        return str(self.model.precision).removeprefix("torch.")

    def get_ntypes(self) -> int:
        return len(self.model.type_map)

    def get_rcut(self) -> float:
        return self.needs.limit.rcut

    def get_type_map(self) -> list[str]:
        return list(self.model.type_map)

    def get_sel_type(self) -> list[int]:
        """Types that have a value of what is predicted."""
        return list(range(self.get_ntypes()))

    def get_dim_fparam(self) -> int:
        return self.needs.numb_fparam

    def get_dim_aparam(self) -> int:
        return self.needs.numb_aparam

    # ---- frames in, results out

    def evaluate(self, frames: Iterable[Frame], wanted: Collection[str]) -> Iterator[Result]:
        """A Result for each frame; frames are read and evaluated in batches of about max_atoms atoms, one on each core
        at a time; a frame alone is cut (threads.py)."""
        if self.workers.size > 1:
            yield from self._with_others(frames, wanted)
            return
        batches = torch.get_num_threads() if self.device.type == "cpu" else 1
        for group in self._groups(frames, batches * self.max_atoms):
            chunks = divided(group, [len(frame.type) for frame in group], batches)
            for results in together([partial(self._evaluated, chunk, wanted) for chunk in chunks]):
                yield from results

    def _evaluated(self, frames: list[Frame], wanted: Collection[str]) -> list[Result]:
        prepared = [self.preparation(frame, frame.name) for frame in frames]
        batch = collate([f for f, _ in prepared], [pairs for _, pairs in prepared], self.get_ntypes())
        return list(self.results(batch.to(self.device), frames, wanted))

    def _with_others(self, frames: Iterable[Frame], wanted: Collection[str]) -> Iterator[Result]:
        """The same by all workers: batches are larger, and each computes a part of them (workers.py)."""
        count = len(frames) if isinstance(frames, list) else -1
        for group in self._groups(frames, self.workers.size * self.max_atoms):
            batch = self.workers.attempt(partial(self._divided, group, count, wanted))
            yield from self.results(batch.to(self.device), group, wanted)

    def _divided(self, group: list[Frame], count: int, wanted: Collection[str]) -> Batch:
        """The frames side by side, whose part is what this worker computes of them."""
        whole, parts = [], []
        for k, frame in enumerate(self.workers.same(group, count)):
            block = self.workers.block(k, len(group), divisible(self.model, wanted))
            frame, part = (
                (frame.by_type(), NOTHING) if block is None else self.preparation.part(frame, frame.name, *block)
            )
            whole.append(frame)
            parts.append(part)
        return collate_parts(whole, parts, self.get_ntypes())

    def results(self, batch: Batch, frames: Sequence[Frame], wanted: Collection[str]) -> Iterator[Result]:
        """The Results of frames that are in a batch already; virtual atoms have zeros."""
        prediction = self.workers.predict(self.model, batch, wanted)
        columns = {
            name: _to_frames(value, batch, frames) if per_atom(name) else list(value.cpu().numpy())
            for name, value in prediction.items()
            if name in wanted
        }
        for k in range(len(frames)):
            yield {name: values[k] for name, values in columns.items()}

    def _groups(self, frames: Iterable[Frame], most: int) -> Iterator[list[Frame]]:
        """Consecutive frames of at most `most` atoms together, at least one."""
        group: list[Frame] = []
        atoms = 0
        for frame in frames:
            if group and atoms + len(frame.type) > most:
                yield group
                group, atoms = [], 0
            group.append(self.checked(frame))
            atoms += len(frame.type)
        if group:
            yield group

    def checked(self, frame: Frame) -> Frame:
        """The frame without labels, with the parameters that the model wants."""
        bad = (frame.type < -1) | (frame.type >= self.get_ntypes())
        if bad.any():
            raise UserError(
                f"Atom {int(bad.argmax())} has type {int(frame.type[bad.argmax()])}; the model's type_map "
                f"{self.get_type_map()} allows 0 … {self.get_ntypes() - 1}, and -1 for a virtual atom."
            )
        return replace(self.preparation.with_parameters(frame, frame.name), labels={})

    # ---- arrays in

    def frames(
        self, coords: Any, cells: Any, atom_types: Any, fparam: Any, aparam: Any, mixed_type: bool
    ) -> list[Frame]:
        types = np.asarray(atom_types, dtype=np.int64)
        n = types.shape[-1] if types.ndim else 0
        if types.ndim != (2 if mixed_type else 1) or n == 0:
            expected = "(nframes, natoms), because mixed_type is true" if mixed_type else "(natoms,)"
            raise UserError(f"atom_types has shape {types.shape}, expected {expected}.")
        x = _shaped("coords", coords, (-1, n, 3))
        nf = len(x)
        cell = None if cells is None else _shaped("cells", cells, (nf, 3, 3))
        fp = _parameters("fparam", fparam, self.get_dim_fparam(), (nf,))
        ap = _parameters("aparam", aparam, self.get_dim_aparam(), (nf, n))
        if mixed_type and len(types) != nf:
            raise UserError(f"atom_types has {len(types)} frames, coords has {nf}.")
        return [
            Frame(
                coord=x[k],
                type=types[k] if mixed_type else types,
                cell=None if cell is None else cell[k],
                fparam=None if fp is None else fp[k],
                aparam=None if ap is None else ap[k],
            )
            for k in range(nf)
        ]


class AnyModel(Evaluator):
    """A model, whatever it predicts."""

    kind = None


def _max_atoms(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"The environment variable DP_INFER_BATCH_SIZE is {text!r}; expected a number of atoms.")
    return int(text)


def _to_frames(value: torch.Tensor, batch: Batch, frames: Sequence[Frame]) -> list[np.ndarray]:
    """Per-atom results (N, …) in the order of the frames' atoms, zero for virtual atoms."""
    sizes = [len(frame.type) for frame in frames]
    array = value.cpu().numpy()
    out = np.zeros((sum(sizes), *array.shape[1:]))
    out[batch.order.cpu().numpy()] = array
    return np.split(out, np.cumsum(sizes)[:-1])


def _shaped(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(value, dtype=np.float64)
    try:
        if array.size == 0 and len(array) > 0:  # frames without atoms, which would become no frames
            raise ValueError
        return array.reshape(shape)
    except ValueError:
        raise UserError(f"{name} has shape {array.shape}, which does not make {shape} (-1: any number).") from None


def _parameters(name: str, value: Any, width: int, shape: tuple[int, ...]) -> np.ndarray | None:
    """(…, width) for every frame (and atom), from one for all or one for each."""
    if value is None or width == 0:
        return None
    array = np.asarray(value, dtype=np.float64)
    for k in range(len(shape) + 1):
        if array.size == width * int(np.prod(shape[k:])):
            return np.broadcast_to(array.reshape(*shape[k:], width), (*shape, width))
    raise UserError(f"{name} has shape {array.shape}; expected {(*shape, width)} or one for all.")
