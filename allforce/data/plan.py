"""Batches of frames of the same few atoms: what is the same in all of them is made once, the rest in a few calls.

The batch is that of collate (loader.py), bit for bit: which way a batch was made is not seen in a training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from allforce.data.batch import LABELS, Batch, Edges, Frames
from allforce.data.prepare import Needs
from allforce.neighbors import TOUCHING, edges_of_frames
from allforce.trace import NEIGHBORS, phase


class Plan:
    """Batches of B = `count` frames with atoms of these types (n,)."""

    def __init__(self, types: np.ndarray, count: int, needs: Needs):
        self.rcut, most, nt = needs.limit.rcut, needs.limit.most, needs.ntypes
        self.most = np.atleast_1d(np.iinfo(np.int64).max if most is None else most)  # (nt,), or (1,) of all together
        self.sort = np.argsort(types, kind="stable")  # (n,) a frame's atoms by type
        by_type = types[self.sort]
        self.kind = by_type if len(self.most) == nt else np.zeros_like(types)
        self.rows = np.argsort(np.tile(by_type, count), kind="stable")  # (N,) atom of the sorted frames, all in a row
        frame, atom = np.divmod(self.rows, len(types))
        self.order = frame * len(types) + self.sort[atom]  # (N,) place in the files
        counts = tuple((count * np.bincount(types, minlength=nt)).tolist())
        self.type, self.no_box = torch.from_numpy(by_type[atom]), np.zeros((count, 3, 3))
        self.same: dict[str, Any] = {
            "type": self.type,
            "frame": torch.from_numpy(frame),
            "natoms": torch.full((count,), float(len(types)), dtype=torch.float64),
            "lowest": torch.full((count,), int(types.min())),
            "type_counts": counts,
            "order": torch.from_numpy(self.order),
        }

    @property
    def nbytes(self) -> int:
        return 5000 + 40 * len(self.rows)  # the constant stands for the objects themselves

    def batch(self, frames: Frames, name: str) -> Batch | None:
        """The batch of these frames; None where one of them has a flaw, or more neighbours than the limit."""
        coord, cell = frames.coord.take(self.sort, axis=1), frames.cell  # indexing would give another layout
        box, periodic = self.no_box if cell is None else cell, np.full(3, cell is not None)
        with phase(NEIGHBORS):
            found = edges_of_frames(coord, box, periodic, self.rcut, self.rows, self.kind, len(self.most))
        nearest = float(found.nearest.min())
        if nearest < TOUCHING or (found.most > self.most).any():
            return None
        return Batch(
            **self.same,
            coord=torch.from_numpy(coord.reshape(-1, 3)[self.rows]),
            cell=None if cell is None else torch.from_numpy(cell),
            edges=Edges(
                i=torch.from_numpy(found.i),
                j=torch.from_numpy(found.j),
                r=torch.from_numpy(found.r),
                first=torch.from_numpy(found.first),
                type=self.type,
                type_counts=self.same["type_counts"],
                nearest=nearest,
            ),
            labels={x: self._label(x, frames.labels[x]) for x in sorted(frames.labels)},
            name=name,
        )

    def _label(self, name: str, value: np.ndarray) -> torch.Tensor:
        per_atom, width = LABELS[name]
        if per_atom:
            value = value.reshape(len(self.rows), -1)[self.order]
        return torch.from_numpy(np.ascontiguousarray(value[:, 0]) if width == 1 else value)
