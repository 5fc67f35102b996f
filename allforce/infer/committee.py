"""Several models of the same system: where they disagree, none of them has learned enough.

σ_i = √ Σ_a var_m F_ia,m      deviation of the force on atom i over the models m, as `dp model-devi` has it
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from ase.io import write

from allforce.data.batch import Batch, Frame
from allforce.errors import UserError
from allforce.infer.evaluate import Evaluator

if TYPE_CHECKING:
    from ase import Atoms

log = logging.getLogger("deepmd.committee")


def force_deviation(forces: np.ndarray) -> np.ndarray:
    """σ (n,) from the forces (models, n, 3)."""
    return np.linalg.norm(forces.std(axis=0), axis=1)


def check_alike(members: Sequence[Evaluator]) -> None:
    """Models of a committee see the same edges: equal types, cutoff, limits on neighbours and parameters."""
    first = members[0]
    if len(members) > 1 and not all("forces" in member.model.outputs for member in members):
        raise UserError("A committee is of models that give forces; found one that predicts something else.")
    for other in members[1:]:
        if other.get_type_map() != first.get_type_map() or other.needs != first.needs:
            raise UserError(
                "The models of a committee are evaluated on one neighbour list, so their type_map, rcut, sel and "
                f"parameters must be equal; found {first.needs} and {other.needs}, types {first.get_type_map()} and "
                f"{other.get_type_map()}."
            )


def deviation_of(members: Sequence[Evaluator], forces: np.ndarray, batch: Batch, frame: Frame) -> np.ndarray:
    """σ (n,) of all members on a batch; forces (n, 3) are those of the first, which are known."""
    others = [next(iter(m.results(batch, [frame], ("forces",))))["forces"] for m in members[1:]]
    return force_deviation(np.array([forces, *others]))


class SimulationStopped(Exception):
    """Raised out of a simulation by `Deviation` with stop=True."""


class Deviation:
    """An observer of ASE's dynamics: keeps the frames in which the largest σ_i is above a threshold, or stops there.

    dyn.attach(Deviation(atoms, 0.2, "uncertain.xyz"), interval=10)
    """

    def __init__(self, atoms: Atoms, threshold: float, file: str | Path | None = None, stop: bool = False):
        if "force_devi" not in getattr(atoms.calc, "implemented_properties", ()):
            raise UserError("Deviation: the atoms need a committee as calculator, such as DP(['a.dp', 'b.dp']).")
        self.atoms, self.threshold, self.file, self.stop = atoms, threshold, file, stop
        self.largest: list[float] = []  # σ of the most uncertain atom, at each call

    def __call__(self) -> None:
        assert self.atoms.calc is not None
        deviation = self.atoms.calc.get_property("force_devi", self.atoms)
        self.largest.append(float(deviation.max()))
        if self.largest[-1] <= self.threshold:
            return
        if self.file is not None:
            frame = self.atoms.copy()
            frame.arrays["force_devi"] = deviation
            write(self.file, frame, format="extxyz", append=True)
        if self.stop:
            raise SimulationStopped(f"largest force deviation {self.largest[-1]:.3f} eV/Å > {self.threshold} eV/Å")
