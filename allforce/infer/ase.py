"""The ASE calculator.

    from allforce.infer.ase import DP
    atoms.calc = DP("model.dp")

Between steps of a simulation the neighbour list is kept as long as it serves (skin.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes

from allforce.data.batch import Frame
from allforce.errors import UserError
from allforce.files.model_file import load_model
from allforce.infer import ase_world
from allforce.infer.committee import check_alike, deviation_of
from allforce.infer.evaluate import AnyModel, Evaluator
from allforce.infer.predict import DeepPot
from allforce.infer.skin import Steps
from allforce.infer.workers import ALONE, EQUAL
from allforce.models import Model

log = logging.getLogger("deepmd.infer")

WANTED = ("energy", "forces", "atomic energy", "dipole", "charges", "virial")
FAR = 1.0  # Å: so far an atom may be from where rank 0 has it, but in the first structure
VOIGT = [0, 4, 8, 5, 2, 1]  # xx yy zz yz xz xy of a row-major 3 × 3


class DP(Calculator):
    """energy, free_energy, forces, stress, energies (of atoms) and virial of a potential; dipole and charges of a model
    that predicts them.

    type_dict: element -> type index, where the model's type_map does not hold chemical symbols. Frame and atomic
    parameters are taken from atoms.info["fparam"] and atoms.info["aparam"] (or atoms.arrays["aparam"]).

    Under a launcher (mpirun -np 4 python md.py) all workers run the script and compute each structure together, which
    is rank 0's. ASE knows of them, so that its files are written once. With parallel=False each works on its own.

    A list of models is a committee: the first gives all of the above, and results["force_devi"] (n,) is the deviation
    of the forces over the models, all on one neighbour list (committee.py).
    """

    name = "DP"
    implemented_properties = ["energy", "free_energy", "forces", "stress", "energies", "virial"]  # noqa: RUF012

    def __init__(
        self,
        model: str | Path | Model | Evaluator | Sequence[str | Path | Model],
        label: str = "DP",
        type_dict: Mapping[str, int] | None = None,
        skin: float = 1.0,
        table: str = "table",
        parallel: bool = True,
        **kwargs: Any,
    ):
        super().__init__(label=label, **kwargs)
        models: Sequence[Any] = model if isinstance(model, list | tuple) else [model]
        if not models:
            raise UserError("DP: the list of models is empty. Expected a model, or several for a committee.")
        self.members = [m if isinstance(m, Evaluator) else evaluator_of(m, table, parallel) for m in models]
        self.dp = self.members[0]
        self.workers = self.dp.workers
        if self.workers is ALONE:  # by parallel=False, or without a launcher
            ase_world.release()
        check_alike(self.members)
        outputs = self.dp.model.outputs
        energy = type(self).implemented_properties if "energy" in outputs else []
        self.implemented_properties = [*energy, *(name for name in ("dipole", "charges") if name in outputs)]
        if len(self.members) > 1:
            self.implemented_properties.append("force_devi")
        names = self.dp.get_type_map()
        self.type_dict = dict(type_dict) if type_dict else {name: t for t, name in enumerate(names)}
        self.wanted = [name for name in WANTED if name in outputs]
        self.steps = Steps(self.dp, skin, self.wanted)
        self._far: float | None = None  # Å, how far an atom was from where rank 0 had it, at most
        self._numbers: np.ndarray | None = None  # (n,) atomic numbers of the last structure, and their types
        self._types = np.zeros(0, np.int64)
        self._virial = False  # asked for once, it is computed with everything else from then on

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """What changed since the last call, to the bit: ASE's own comparison within tol takes a millisecond a step."""
        old = self.atoms
        if old is None:
            return list(all_changes)
        equal = {"cell": np.array_equal(old.cell.array, atoms.cell.array), "pbc": np.array_equal(old.pbc, atoms.pbc)}
        for name in set(all_changes) - equal.keys():
            a, b = old.arrays.get(name), atoms.arrays.get(name)
            equal[name] = a is b if a is None or b is None else np.array_equal(a, b)
        return [name for name in all_changes if not equal[name]]

    def calculate(
        self, atoms: Atoms | None = None, properties: Any = ("energy",), system_changes: Any = all_changes
    ) -> None:
        if self.workers.size > 1 and atoms is not None:
            self.workers.attempt(partial(self._follow, atoms))
        super().calculate(atoms, properties, system_changes)
        atoms = self.atoms
        frame = self._frame(atoms)
        batch = self.steps.batch(frame, atoms.pbc)
        self._virial = self._virial or "stress" in properties or "virial" in properties
        wanted = [name for name in self.wanted if name != "virial" or self._virial]
        (result,) = self.dp.results(batch, [frame], wanted)
        self.results = {name: result[name] for name in ("forces", "dipole", "charges") if name in result}
        if "energy" in result:
            energy = float(result["energy"])
            self.results |= {"energy": energy, "free_energy": energy, "energies": result["atomic energy"]}
        if len(self.members) > 1:
            self.results["force_devi"] = deviation_of(self.members, result["forces"], batch, frame)
        if "virial" in result:
            virial = self.results["virial"] = result["virial"].reshape(3, 3)
            if atoms.pbc.any() and atoms.cell.rank == 3:
                self.results["stress"] = -0.5 * (virial + virial.T).ravel()[VOIGT] / atoms.get_volume()

    def _follow(self, atoms: Atoms) -> None:
        """Give the atoms of every worker the positions, the cell and the momenta of rank 0's: there is one trajectory,
        even where workers draw random numbers of their own. The first structure must be the same everywhere."""
        own = [atoms.positions, atoms.cell.array, atoms.get_momenta()]
        first = self.workers.of_rank_0(own, (atoms.numbers.tolist(), atoms.pbc.tolist()))
        apart = self.workers.check_apart(own[:2], first[:2], EQUAL if self._far is None else FAR)
        if apart > EQUAL and self._far == 0.0:
            log.warning(
                "rank %d: atoms were up to %.2g Å from where rank 0 has them and are put there, from now on without a "
                "word: %d workers compute one structure. With DP(…, parallel=False) every worker computes its own",
                self.workers.rank, apart, self.workers.size,
            )  # fmt: skip
        self._far = max(self._far or 0.0, apart if apart > EQUAL else 0.0)
        atoms.positions[:], atoms.cell.array[:] = first[:2]
        if atoms.has("momenta"):
            atoms.arrays["momenta"][:] = first[2]

    def _frame(self, atoms: Atoms) -> Frame:
        if self._numbers is None or not np.array_equal(self._numbers, atoms.numbers):
            self._types, self._numbers = self.types_of(atoms), atoms.numbers.copy()
        aparam = atoms.info.get("aparam", atoms.arrays.get("aparam"))
        width, n = self.dp.get_dim_aparam(), len(atoms)
        frame = Frame(
            coord=atoms.get_positions(),
            type=self._types,
            cell=np.array(atoms.cell) if atoms.pbc.any() else None,
            fparam=None if "fparam" not in atoms.info else np.atleast_1d(np.asarray(atoms.info["fparam"], float)),
            aparam=None
            if aparam is None or not width
            else np.broadcast_to(np.reshape(aparam, (-1, width)), (n, width)),
        )
        return self.dp.checked(frame)

    def types_of(self, atoms: Atoms) -> np.ndarray:
        """(n,) types of the model, by the elements of the atoms."""
        symbols = atoms.get_chemical_symbols()
        unknown = sorted({s for s in symbols if s not in self.type_dict})
        if unknown:
            raise UserError(
                f"The structure holds {', '.join(unknown)}, which the model does not know; its types are "
                f"{', '.join(self.type_dict)}. If these are not element names, give type_dict={{symbol: type}}."
            )
        return np.array([self.type_dict[s] for s in symbols], dtype=np.int64)


def evaluator_of(model: str | Path | Model, table: str, parallel: bool = True) -> Evaluator:
    model = model if isinstance(model, Model) else load_model(model)
    return (DeepPot if "energy" in model.outputs else AnyModel)(model, table, parallel=parallel)


ase_world.take()
