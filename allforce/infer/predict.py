"""Energies, forces and virials of structures: `DeepPot`, the Python interface of a trained model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allforce.data.batch import Batch, Frame
from allforce.data.loader import collate
from allforce.errors import UserError
from allforce.infer.model_file import load_model
from allforce.infer.tree import precision
from allforce.models.potential import Potential
from allforce.neighbors import check_distances, limit_to_sel, neighbor_list

log = logging.getLogger("deepmd.infer")

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}  # of the embedding table relative to the nets, values and slopes


@dataclass
class Result:
    """What a model says of one frame, atoms in the order of the frame; virtual atoms have zeros."""

    energy: float
    force: np.ndarray  # (n, 3)
    virial: np.ndarray  # (9,); nan when not asked for
    atom_energy: np.ndarray  # (n,)
    atom_virial: np.ndarray | None = None  # (n, 9)


class DeepPot:
    """A trained model.

        model = DeepPot("model.dp")
        energy, force, virial = model.eval(coords, cells, atom_types)

    table: evaluate the embedding nets through their spline table ("table", fast) or for every neighbour ("exact").
    The two differ by less than 1e-9 of the nets' range in float64.
    """

    def __init__(self, model: str | Path | Potential, table: str = "table", device: str | torch.device | None = None):
        self.model = model if isinstance(model, Potential) else load_model(model)
        self.model.requires_grad_(False)  # nobody reads gradients with respect to parameters here
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model.to(self.device)
        self.fitting = self.model.config.fitting_net
        self.max_atoms = _max_atoms(os.environ.get("DP_INFER_BATCH_SIZE", "1024"))  # of a batch, frames × atoms
        self.dropped = 0  # neighbours beyond sel so far
        self._seen = _seen(self.model)
        self._lay_table(table)

    def _lay_table(self, mode: str) -> None:
        if mode not in ("table", "exact"):
            raise UserError(f"DeepPot: table is {mode!r}; expected 'table' or 'exact'.")
        self.model.set_table(mode, TOLERANCE[self.precision])
        if grown := self.model.check_table():
            log.debug(grown)

    # ---- what the model is

    @property
    def precision(self) -> str:
        """Of the descriptor's nets: float64 or float32."""
        return precision(self.model.descriptor.nets)

    def get_ntypes(self) -> int:
        return len(self.model.type_map)

    def get_rcut(self) -> float:
        return self.model.rcut

    def get_type_map(self) -> list[str]:
        return list(self.model.type_map)

    def get_sel_type(self) -> list[int]:
        return list(range(self.get_ntypes()))

    def get_dim_fparam(self) -> int:
        return self.fitting.numb_fparam

    def get_dim_aparam(self) -> int:
        return self.fitting.numb_aparam

    # ---- arrays in, arrays out

    def eval(
        self,
        coords: Any,
        cells: Any,
        atom_types: Any,
        atomic: bool = False,
        fparam: Any = None,
        aparam: Any = None,
        mixed_type: bool = False,
    ) -> tuple[np.ndarray, ...]:
        """Energies (nf, 1), forces (nf, n, 3), virials (nf, 9); with atomic also (nf, n, 1) and (nf, n, 9).

        coords (nf, n·3) or (nf, n, 3) in Å; cells (nf, 9) or (nf, 3, 3), None when not periodic; atom_types (n,), or
        (nf, n) with mixed_type: indices into get_type_map(), -1 for a virtual atom. fparam (nf, nfp), (nfp,);
        aparam (nf, n, nap), (n, nap), (nap,). No frames (nf = 0, coords may be an empty list) give arrays of none.
        """
        frames = self._frames(coords, cells, atom_types, fparam, aparam, mixed_type)
        results = list(self.evaluate(frames, atom_virial=atomic))
        n = np.shape(atom_types)[-1]  # known without frames as well
        out = [
            np.array([x.energy for x in results]).reshape(-1, 1),
            np.array([x.force for x in results]).reshape(-1, n, 3),
            np.array([x.virial for x in results]).reshape(-1, 9),
        ]
        if atomic:
            out.append(np.array([x.atom_energy for x in results]).reshape(-1, n, 1))
            out.append(np.array([x.atom_virial for x in results]).reshape(-1, n, 9))
        return tuple(out)

    def eval_descriptor(
        self, coords: Any, cells: Any, atom_types: Any, fparam: Any = None, aparam: Any = None, mixed_type: bool = False
    ) -> np.ndarray:
        """Descriptors (nf, n, ndesc) in the order of the input."""
        frames = self._frames(coords, cells, atom_types, fparam, aparam, mixed_type)
        n = np.shape(atom_types)[-1]
        return np.array(list(self.descriptors(frames))).reshape(-1, n, self.model.descriptor.dim)

    def _frames(
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

    # ---- frames in, results out

    def evaluate(self, frames: Iterable[Frame], atom_virial: bool = False) -> Iterator[Result]:
        """One Result for each frame; frames are read and evaluated in batches of at most max_atoms atoms."""
        for group in self._groups(frames):
            yield from self.results(self._batch(group), group, atom_virial=atom_virial)

    def descriptors(self, frames: Iterable[Frame]) -> Iterator[np.ndarray]:
        """D (n, ndesc) for each frame."""
        for group in self._groups(frames):
            batch = self._batch(group)
            with torch.no_grad():
                D, _ = self.model.descriptor(batch, batch.edges.r)
            yield from _to_frames(D.double(), batch, group)

    def results(
        self, batch: Batch, frames: Sequence[Frame], virial: bool = True, atom_virial: bool = False
    ) -> Iterator[Result]:
        """The Results of frames that are in a batch already."""
        with torch.no_grad():
            p = self.model(batch, virial=virial, atom_virial=atom_virial)
        energies = p.energy.cpu().numpy()
        virials = np.full((len(frames), 9), np.nan) if p.virial is None else p.virial.cpu().numpy()
        force, atom_energy = _to_frames(p.force, batch, frames), _to_frames(p.atom_energy, batch, frames)
        atomic = _to_frames(p.atom_virial, batch, frames) if atom_virial else [None] * len(frames)
        for k in range(len(frames)):
            yield Result(float(energies[k]), force[k], virials[k], atom_energy[k], atomic[k])

    def _groups(self, frames: Iterable[Frame]) -> Iterator[list[Frame]]:
        """Consecutive frames of at most max_atoms atoms together, at least one."""
        group: list[Frame] = []
        atoms = 0
        for frame in frames:
            if group and atoms + len(frame.type) > self.max_atoms:
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
        fparam, aparam = frame.fparam, frame.aparam
        if self.get_dim_fparam() == 0:
            fparam = None
        elif fparam is None and self.fitting.default_fparam is not None:
            fparam = np.array(self.fitting.default_fparam, dtype=np.float64)
        if self.get_dim_aparam() == 0:
            aparam = None
        for name, value, width in (
            ("fparam", fparam, self.get_dim_fparam()),
            ("aparam", aparam, self.get_dim_aparam()),
        ):
            if width and (value is None or value.shape[-1] != width):
                found = "none" if value is None else f"{value.shape[-1]}"
                raise UserError(f"The model needs {width} {name} value(s), found {found}. Give `{name}` with the data.")
        return replace(frame, labels={}, fparam=fparam, aparam=aparam)

    def _batch(self, frames: Sequence[Frame]) -> Batch:
        sorted_frames = [frame.by_type() for frame in frames]
        pairs = [self._pairs(frame) for frame in sorted_frames]
        return collate(sorted_frames, pairs, self.get_ntypes()).to(self.device)

    def _pairs(self, frame: Frame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        i, j, r = neighbor_list(frame.coord, frame.cell, self.model.rcut, where=frame.name)
        check_distances(i, j, r, frame.name, frame.order)
        return self.limit(i, j, np.array(r), frame.type)

    def limit(
        self, i: np.ndarray, j: np.ndarray, r: np.ndarray, types: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Without the pairs of pair_exclude_types and without those beyond sel, which are counted."""
        if self._seen is not None:
            keep = self._seen[types[i], types[j]]
            i, j, r = i[keep], j[keep], r[keep]
        i, j, r, dropped = limit_to_sel(i, j, r, types, self.model.sel)
        if dropped and not self.dropped:
            log.warning(
                "%d neighbours are beyond sel = %s of the model and are left out, the farthest of each type first",
                dropped,
                self.model.sel,
            )
        self.dropped += dropped
        return i, j, r


def _max_atoms(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"The environment variable DP_INFER_BATCH_SIZE is {text!r}; expected a number of atoms.")
    return int(text)


def _seen(model: Potential) -> np.ndarray | None:
    """(nt, nt) bool: False for pair_exclude_types; None when there are none."""
    if not model.config.pair_exclude_types:
        return None
    seen = np.ones((len(model.type_map),) * 2, dtype=bool)
    for a, b in model.config.pair_exclude_types:
        seen[a, b] = seen[b, a] = False
    return seen


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
