"""Densities of states of structures: the Python interface of models that predict them."""

from __future__ import annotations

from typing import Any

import numpy as np

from allforce.infer.evaluate import Evaluator


class DeepDOS(Evaluator):
    """model = DeepDOS("dos.dp"); (dos,) = model.eval(coords, cells, atom_types)"""

    kind = "dos"

    @property
    def numb_dos(self) -> int:
        return self.get_numb_dos()

    def get_numb_dos(self) -> int:
        return self.model.fitting.out_width  # type: ignore[union-attr, return-value]

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
        """(dos (nf, numb_dos),), with atomic also of atoms (nf, n, numb_dos). Arguments as those of DeepPot.eval."""
        frames = self.frames(coords, cells, atom_types, fparam, aparam, mixed_type)
        names = ("dos", "atomic dos") if atomic else ("dos",)
        found = list(self.evaluate(frames, names))
        return tuple(np.array([x[name] for x in found]) for name in names)
