"""The ASE calculator.

    from allforce.infer.ase import DP
    atoms.calc = DP("model.dp")

Between steps of a simulation the neighbour list is kept: it is built at rcut + skin, and as long as no atom has moved
more than skin/2 and the cell is the same, no pair within rcut is missing from it. Each step recomputes the edge vectors
and leaves out those beyond rcut.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from ase.geometry import complete_cell

from allforce.data.batch import Frame
from allforce.data.loader import collate
from allforce.errors import UserError
from allforce.files.model_file import load_model
from allforce.infer.evaluate import AnyModel, Evaluator
from allforce.infer.predict import DeepPot
from allforce.models import Model
from allforce.neighbors import neighbor_list

VOIGT = [0, 4, 8, 5, 2, 1]  # xx yy zz yz xz xy of a row-major 3 × 3


class DP(Calculator):
    """energy, free_energy, forces, stress, energies (of atoms) and virial of a potential; dipole and charges of a model
    that predicts them.

    type_dict: element -> type index, where the model's type_map does not hold chemical symbols. Frame and atomic
    parameters are taken from atoms.info["fparam"] and atoms.info["aparam"] (or atoms.arrays["aparam"]).
    """

    name = "DP"
    implemented_properties = ["energy", "free_energy", "forces", "stress", "energies", "virial"]  # noqa: RUF012

    def __init__(
        self,
        model: str | Path | Model | Evaluator,
        label: str = "DP",
        type_dict: Mapping[str, int] | None = None,
        skin: float = 1.0,
        table: str = "table",
        **kwargs: Any,
    ):
        super().__init__(label=label, **kwargs)
        self.dp = model if isinstance(model, Evaluator) else evaluator_of(model, table)
        outputs = self.dp.model.outputs
        energy = type(self).implemented_properties if "energy" in outputs else []
        self.implemented_properties = [*energy, *(name for name in ("dipole", "charges") if name in outputs)]
        names = self.dp.get_type_map()
        self.type_dict = dict(type_dict) if type_dict else {name: t for t, name in enumerate(names)}
        self.skin = skin
        self.rebuilds = 0  # neighbour lists built so far
        self._virial = False  # asked for once, it is computed with everything else from then on
        self._list: _SkinList | None = None

    def calculate(
        self, atoms: Atoms | None = None, properties: Any = ("energy",), system_changes: Any = all_changes
    ) -> None:
        super().calculate(atoms, properties, system_changes)
        atoms = self.atoms
        frame = self._frame(atoms)
        if self._list is None or not self._list.covers(frame, atoms.pbc):
            self._list = _SkinList(frame, atoms.pbc, self.dp.get_rcut(), self.skin)
            self.rebuilds += 1
        i, j, r = self.dp.preparation.limited(*self._list.pairs(frame.coord), frame.type, "the structure")
        batch = collate([frame], [(i, j, r)], self.dp.get_ntypes()).to(self.dp.device)
        self._virial = self._virial or "stress" in properties or "virial" in properties
        wanted = ["energy", "forces", "atomic energy", "dipole", "charges", *(["virial"] if self._virial else [])]
        (result,) = self.dp.results(batch, [frame], [name for name in wanted if name in self.dp.model.outputs])
        self.results = {name: result[name] for name in ("forces", "dipole", "charges") if name in result}
        if "energy" in result:
            energy = float(result["energy"])
            self.results |= {"energy": energy, "free_energy": energy, "energies": result["atomic energy"]}
        if "virial" in result:
            virial = self.results["virial"] = result["virial"].reshape(3, 3)
            if atoms.pbc.any() and atoms.cell.rank == 3:
                self.results["stress"] = -0.5 * (virial + virial.T).ravel()[VOIGT] / atoms.get_volume()

    def _frame(self, atoms: Atoms) -> Frame:
        symbols = atoms.get_chemical_symbols()
        unknown = sorted({s for s in symbols if s not in self.type_dict})
        if unknown:
            raise UserError(
                f"The structure holds {', '.join(unknown)}, which the model does not know; its types are "
                f"{', '.join(self.type_dict)}. If these are not element names, give type_dict={{symbol: type}}."
            )
        aparam = atoms.info.get("aparam", atoms.arrays.get("aparam"))
        width, n = self.dp.get_dim_aparam(), len(atoms)
        frame = Frame(
            coord=atoms.get_positions(),
            type=np.array([self.type_dict[s] for s in symbols], dtype=np.int64),
            cell=np.array(atoms.cell) if atoms.pbc.any() else None,
            fparam=None if "fparam" not in atoms.info else np.atleast_1d(np.asarray(atoms.info["fparam"], float)),
            aparam=None
            if aparam is None or not width
            else np.broadcast_to(np.reshape(aparam, (-1, width)), (n, width)),
        )
        return self.dp.checked(frame)


def evaluator_of(model: str | Path | Model, table: str) -> Evaluator:
    model = model if isinstance(model, Model) else load_model(model)
    return DeepPot(model, table) if "energy" in model.outputs else AnyModel(model, table)


class _SkinList:
    """Pairs (i, j) within rcut + skin and their lattice shifts, for positions near those it was built from."""

    def __init__(self, frame: Frame, pbc: np.ndarray, rcut: float, skin: float):
        self.coord, self.cell, self.type, self.pbc = frame.coord.copy(), frame.cell, frame.type, pbc.copy()
        self.rcut, self.skin = rcut, skin
        self.i, self.j, r = neighbor_list(frame.coord, _search_cell(frame, pbc, rcut + skin), rcut + skin)
        self.shift = r - (frame.coord[self.j] - frame.coord[self.i])  # (E, 3) S·H

    def covers(self, frame: Frame, pbc: np.ndarray) -> bool:
        """Whether no pair within rcut can be missing."""
        same_cell = self.cell is frame.cell or (
            self.cell is not None and frame.cell is not None and np.array_equal(self.cell, frame.cell)
        )
        if not same_cell or not np.array_equal(self.type, frame.type) or not np.array_equal(self.pbc, pbc):
            return False
        moved = frame.coord - self.coord
        return bool(np.einsum("na,na->n", moved, moved).max(initial=0.0) <= (0.5 * self.skin) ** 2)

    def pairs(self, coord: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        r = coord[self.j] - coord[self.i] + self.shift
        keep = np.flatnonzero(np.einsum("ea,ea->e", r, r) <= self.rcut**2)
        return self.i[keep], self.j[keep], r[keep]


def _search_cell(frame: Frame, pbc: np.ndarray, reach: float) -> np.ndarray | None:
    """The cell to look for neighbours in; a direction that is not periodic gets a vector longer than anyone sees."""
    if frame.cell is None or pbc.all():
        return frame.cell
    cell = np.where(pbc[:, None], frame.cell, 0.0)
    full = complete_cell(cell)  # unit vectors, normal to the periodic ones, where there was none
    height = frame.coord @ np.linalg.inv(full)  # (n, 3)
    extent = np.ptp(height, axis=0)
    full[~pbc] *= (extent + reach + 1.0)[~pbc, None]
    return full
