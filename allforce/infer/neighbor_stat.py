"""`dp neighbor-stat`: the smallest distance and the largest numbers of neighbours in the data."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from allforce.data.sample import count_neighbors
from allforce.distributed.comm import SerialComm
from allforce.errors import UserError
from allforce.infer.systems import select_systems

log = logging.getLogger("deepmd.entrypoints.neighbor_stat")


def neighbor_stat(
    system: str = ".", rcut: float = 6.0, type_map: Sequence[str] | None = None, mixed_type: bool = False
) -> tuple[float, np.ndarray]:
    """Log and return them: neighbours of each type, or, with mixed_type, of all types together."""
    if not 0.0 < rcut < np.inf:
        raise UserError(f"neighbor-stat: rcut is {rcut}, expected a positive number (Å).")
    systems = select_systems(list(type_map) if type_map else None, system)
    log.info("Calculate neighbor statistics...")
    distance, most = count_neighbors(systems, rcut, SerialComm(), mixed=mixed_type)
    if distance is None:
        raise UserError(f"neighbor-stat: no two atoms of {system} are within rcut = {rcut} Å. Choose a larger rcut.")
    log.info("min_nbor_dist: %f", distance)
    log.info("max_nbor_size: %s", most)
    return distance, most
