"""Dipoles and polarizabilities of structures: the Python interface of models that predict tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from allforce.infer.evaluate import Evaluator


class DeepTensor(Evaluator):
    """A trained model of a tensor; see DeepDipole and DeepPolar."""

    kind: str
    width: int  # numbers of the tensor

    def get_sel_type(self) -> list[int]:
        return [t for t, kept in enumerate(self.model.fitting.keep.tolist()) if kept]  # type: ignore[union-attr, operator]

    def eval(
        self,
        coords: Any,
        cells: Any,
        atom_types: Any,
        atomic: bool = True,
        fparam: Any = None,
        aparam: Any = None,
        mixed_type: bool = False,
    ) -> np.ndarray:
        """Tensors (nf, n, width) of the atoms, zero for types without; with atomic false those of frames (nf, width).

        Arguments as those of DeepPot.eval.
        """
        frames = self.frames(coords, cells, atom_types, fparam, aparam, mixed_type)
        name = f"atomic {self.kind}" if atomic else self.kind
        found = np.array([x[name] for x in self.evaluate(frames, (name,))])
        return found.reshape(-1, np.shape(atom_types)[-1], self.width) if atomic else found.reshape(-1, self.width)


class DeepDipole(DeepTensor):
    """model = DeepDipole("dipole.dp"); dipoles = model.eval(coords, cells, atom_types, atomic=False)"""

    kind, width = "dipole", 3


class DeepPolar(DeepTensor):
    """model = DeepPolar("polar.dp"); 3 × 3 row-major."""

    kind, width = "polar", 9
