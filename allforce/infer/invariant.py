"""Densities of states and properties of structures: the Python interface of models of numbers that do not turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from allforce.infer.evaluate import Evaluator


class DeepInvariant(Evaluator):
    """A trained model of some numbers of a frame, and of what atoms add to them; see DeepDOS and DeepProperty."""

    kind: str

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
        """(numbers of frames (nf, width),), with atomic also of atoms (nf, n, width). Arguments as of DeepPot.eval."""
        frames = self.frames(coords, cells, atom_types, fparam, aparam, mixed_type)
        names = (self.kind, f"atomic {self.kind}") if atomic else (self.kind,)
        found = list(self.evaluate(frames, names))
        return tuple(np.array([x[name] for x in found]) for name in names)


class DeepDOS(DeepInvariant):
    """model = DeepDOS("dos.dp"); (dos,) = model.eval(coords, cells, atom_types)"""

    kind = "dos"

    @property
    def numb_dos(self) -> int:
        return self.get_numb_dos()

    def get_numb_dos(self) -> int:
        return self.model.config.fitting_net.numb_dos


class DeepProperty(DeepInvariant):
    """model = DeepProperty("gap.dp"); (gap,) = model.eval(coords, cells, atom_types)"""

    kind = "property"

    @property
    def task_dim(self) -> int:
        return self.get_task_dim()

    def get_task_dim(self) -> int:
        """Numbers of the property."""
        return self.model.config.fitting_net.task_dim

    def get_intensive(self) -> bool:
        """Whether the property of a frame is the mean over its atoms, not the sum."""
        return self.model.config.fitting_net.intensive

    def get_var_name(self) -> str:
        """The name of the property."""
        return self.model.config.fitting_net.property_name
