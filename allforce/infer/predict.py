"""Energies, forces and virials of structures: `DeepPot`, the Python interface of a trained model."""

from __future__ import annotations

from typing import Any

import numpy as np

from allforce.infer.evaluate import Evaluator

DEFAULT = ("energy", "forces", "virial")


class DeepPot(Evaluator):
    """A trained potential.

    model = DeepPot("model.dp")
    energy, force, virial = model.eval(coords, cells, atom_types)
    """

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
        frames = self.frames(coords, cells, atom_types, fparam, aparam, mixed_type)
        wanted = (*DEFAULT, "atomic energy", "atomic virial") if atomic else DEFAULT
        results = list(self.evaluate(frames, wanted))
        n = np.shape(atom_types)[-1]  # known without frames as well
        out = [
            np.array([x["energy"] for x in results]).reshape(-1, 1),
            np.array([x["forces"] for x in results]).reshape(-1, n, 3),
            np.array([x["virial"] for x in results]).reshape(-1, 9),
        ]
        if atomic:
            out.append(np.array([x["atomic energy"] for x in results]).reshape(-1, n, 1))
            out.append(np.array([x["atomic virial"] for x in results]).reshape(-1, n, 9))
        return tuple(out)

    def eval_descriptor(
        self, coords: Any, cells: Any, atom_types: Any, fparam: Any = None, aparam: Any = None, mixed_type: bool = False
    ) -> np.ndarray:
        """Descriptors (nf, n, ndesc) in the order of the input."""
        frames = self.frames(coords, cells, atom_types, fparam, aparam, mixed_type)
        results = [x["descriptor"] for x in self.evaluate(frames, ("descriptor",))]
        return np.array(results).reshape(-1, np.shape(atom_types)[-1], self.model.dim_descriptor)
