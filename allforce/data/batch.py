"""Frames and batches: the shape legend of the whole program.

    B   frames of a batch               N   atoms of all frames of a batch (virtual atoms are left out)
    n   atoms of one frame              E   edges (centre i, neighbour j) within rcut, periodic images included
    nt  types of the model              M1, M2  embedding width, axis neurons
    A   atoms that edges lead to: the N centres; behind them, in a part of a batch, those of other blocks

Units eV, Å, eV/Å. Cell rows are lattice vectors. Edge vector r_e = r_j - r_i + S·H (neighbour minus centre).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor


@dataclass
class Frame:
    """One structure with its labels, as numpy arrays, atoms in the order of the file."""

    coord: np.ndarray  # (n, 3) float64
    type: np.ndarray  # (n,) int64, index into the model's type_map; -1 is a virtual atom
    cell: np.ndarray | None  # (3, 3) float64, None when not periodic
    labels: dict[str, np.ndarray] = field(default_factory=dict)  # what the data has, see LABELS
    fparam: np.ndarray | None = None  # (numb_fparam,)
    aparam: np.ndarray | None = None  # (n, numb_aparam)
    order: np.ndarray | None = None  # (n,) place of each atom in the file when it was sorted, None when as in the file
    nfile: int | None = None  # atoms in the file when virtual ones were left out, None when n
    name: str = "the structure"  # in messages

    def by_type(self) -> Frame:
        """The frame without virtual atoms, atoms sorted by type (stable); `order` and `nfile` remember the file."""
        order = np.argsort(self.type, kind="stable")
        order = order[np.count_nonzero(self.type < 0) :]  # virtual atoms, type -1, come first
        if len(order) == len(self.type) and (np.diff(order) == 1).all():
            return self
        return replace(
            self,
            coord=self.coord[order],
            type=self.type[order],
            labels={k: v[order] if LABELS[k][0] else v for k, v in self.labels.items()},
            aparam=None if self.aparam is None else self.aparam[order],
            order=order if self.order is None else self.order[order],
            nfile=len(self.type) if self.nfile is None else self.nfile,
        )


@dataclass
class Frames:
    """Structures of the same atoms with their labels, as numpy arrays, atoms in the order of the file."""

    coord: np.ndarray  # (B, n, 3) float64
    cell: np.ndarray | None  # (B, 3, 3) float64, None when not periodic
    labels: dict[str, np.ndarray]  # energy (B, 1), force (B, n, 3), …: those of a Frame, with B in front


# name -> (per atom?, width): of a frame energy (1,), force (n, 3), virial (9,), atom_ener (n, 1), ...; 0: any width
LABELS: dict[str, tuple[bool, int]] = {
    "energy": (False, 1),
    "force": (True, 3),
    "virial": (False, 9),
    "atom_ener": (True, 1),
    "atom_pref": (True, 1),
    "atom_ener_coeff": (True, 1),
    "dipole": (False, 3),
    "dipole_norm": (False, 1),
    "e_weight": (False, 1),
    "d_weight": (False, 1),
    "f_weights": (True, 3),
    "atom_dipole": (True, 3),
    "polarizability": (False, 9),
    "atom_polarizability": (True, 9),
    "atom_weight": (True, 1),
    "dos": (False, 0),
    "atom_dos": (True, 0),
    "property": (False, 0),
    "atom_property": (True, 0),
}
# labels that have no name of their own in the data: a model that needs them says it, label -> (name, width)
NAMED_BY_MODEL = ("property", "atom_property")
Named = Mapping[str, tuple[str, int]]
NO_LABELS = ("coord", "box", "fparam", "aparam", "numb_copy", "real_atom_types")  # what else data have


@dataclass
class Edges:
    """Neighbour pairs, sorted by centre: the edges of atom a are first[a] … first[a + 1] - 1."""

    i: Tensor  # (E,) int64 centre, ascending
    j: Tensor  # (E,) int64 neighbour
    r: Tensor  # (E, 3) float64 r_j - r_i + S·H
    first: Tensor  # (N + 1,) int64
    type: Tensor  # (A,) int64 of every atom that i and j name
    type_counts: tuple[int, ...]  # (nt,) atoms of each type among these
    nearest: float = 0.0  # at most the smallest distance, a plain number: nobody waits for a device to know it


@dataclass
class Batch:
    """Frames side by side. Atoms of all frames are sorted by type (stable), so a type is one slice."""

    type: Tensor  # (N,) int64 ascending
    frame: Tensor  # (N,) int64 frame of each atom
    natoms: Tensor  # (B,) float64 real atoms of each frame
    lowest: Tensor  # (B,) int64 lowest type of each frame
    type_counts: tuple[int, ...]  # (nt,) atoms of each type: plain ints, so that slicing never waits for a device
    coord: Tensor  # (N, 3) float64
    cell: Tensor | None  # (B, 3, 3) float64, zeros for a frame that is not periodic; None when no frame is
    edges: Edges
    order: Tensor  # (N,) int64 place of each atom in the frames' concatenated files' order, to put results back
    labels: dict[str, Tensor]  # energy (B,), force (N, 3), virial (B, 9), atom_ener (N,), ...; only what the data has
    fparam: Tensor | None = None  # (B, numb_fparam)
    aparam: Tensor | None = None  # (N, numb_aparam)
    name: str = ""  # the system(s) it came from, for messages
    own: Tensor | None = None  # (N,) float64, 0 for a centre of another block, which is there for its messages only
    rows: Tensor | None = None  # (A,) int64, in a part: where its atoms are in the whole batch
    part: Batch | None = None  # frames cut into blocks: what this worker computes, and then no edges are here

    @property
    def nframes(self) -> int:
        return self.natoms.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device; copies overlap with compute when the memory is pinned."""
        if self.coord.device == torch.device(device):
            return self
        return self._map(lambda t: t.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self._map(lambda t: t.pin_memory())

    def _map(self, f) -> Batch:
        def each(value):
            if isinstance(value, Tensor):
                return f(value)
            if isinstance(value, Batch):
                return value._map(f)
            if isinstance(value, dict):
                return {k: f(v) for k, v in value.items()}
            if isinstance(value, Edges):
                return replace(value, **{x: f(t) for x, t in vars(value).items() if isinstance(t, Tensor)})
            return value

        return replace(self, **{x.name: each(getattr(self, x.name)) for x in fields(self)})
