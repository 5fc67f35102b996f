"""From a frame to what a model sees of it: parameters, atoms sorted by type, neighbour pairs.

One preparation for training, statistics and prediction.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from allforce.data.batch import Frame
from allforce.data.blocks import Part, pairs_of_block, part_of
from allforce.errors import UserError
from allforce.neighbors import Pairs, check_distances, limit_neighbors, neighbor_list, visible_pairs
from allforce.trace import NEIGHBORS, phase

log = logging.getLogger("deepmd.data")


@dataclass(frozen=True)
class Limit:
    """Which neighbours are seen: those within rcut, at most so many of each type (a list), or of all types together."""

    rcut: float
    most: list[int] | int | None = None  # None: no limit
    key: str = "model"  # of the input, for messages
    depth: int = 1  # how many edges away an atom has an influence: the layers of a model that passes messages

    def __or__(self, other: Limit) -> Limit:
        """The limit of two parts that look at the same edges: the larger one in everything."""
        if isinstance(self.most, list) and isinstance(other.most, list):
            most: list[int] | int | None = [max(a, b) for a, b in zip(self.most, other.most, strict=True)]
        elif isinstance(self.most, int) and isinstance(other.most, int):
            most = max(self.most, other.most)
        else:
            most = None
        return Limit(max(self.rcut, other.rcut), most, self.key, max(self.depth, other.depth))


@dataclass(frozen=True)
class Needs:
    """What a model needs to see of a frame."""

    ntypes: int
    limit: Limit
    excluded_pairs: tuple[tuple[int, int], ...] = ()  # types that do not see each other
    numb_fparam: int = 0
    numb_aparam: int = 0
    default_fparam: list[float] | None = None
    parameters_key: str = "model/fitting_net"  # of the input, for messages


class Preparation:
    """Makes of a frame what the model sees of it, and counts the neighbours beyond its limit."""

    def __init__(self, needs: Needs):
        self.needs = needs
        self.visible = visible_pairs(needs.ntypes, needs.excluded_pairs) if needs.excluded_pairs else None
        self.dropped = 0  # neighbours beyond the limit so far

    def __call__(self, frame: Frame, where: str) -> tuple[Frame, Pairs]:
        """The frame sorted by type, without virtual atoms and with its parameters, and its neighbour pairs."""
        frame = self.with_parameters(frame, where).by_type()
        with phase(NEIGHBORS):
            i, j, r = neighbor_list(frame.coord, frame.cell, self.needs.limit.rcut, where=where)
        check_distances(i, j, r, where, frame.order)
        return frame, self.limited(i, j, r, frame.type, where)

    def part(self, frame: Frame, where: str, number: int, of: int) -> tuple[Frame, Part]:
        """The whole frame as above, and what worker `number` of `of` computes of it: its block of space."""
        frame, limit = self.with_parameters(frame, where).by_type(), self.needs.limit
        with phase(NEIGHBORS):
            own, centers, (i, j, r) = pairs_of_block(
                frame.coord, frame.cell, limit.rcut, number, of, limit.depth, where
            )
        check_distances(i, j, r, where, frame.order)
        return frame, part_of(own, centers, self.limited(i, j, r, frame.type, where), len(frame.type))

    def with_parameters(self, frame: Frame, where: str) -> Frame:
        """The frame with the parameters that the model takes, and no others."""
        needs, fparam, aparam = self.needs, frame.fparam, frame.aparam
        if needs.numb_fparam and fparam is None and needs.default_fparam is not None:
            fparam = np.array(needs.default_fparam, dtype=np.float64)
        for name, value, width in (("fparam", fparam, needs.numb_fparam), ("aparam", aparam, needs.numb_aparam)):
            if width and (value is None or value.shape[-1] != width):
                found = "none" if value is None else f"{value.shape[-1]}"
                raise UserError(
                    f"{where}: the model needs {width} {name} value(s), found {found}. Give `{name}` with the data."
                )
        return replace(
            frame, fparam=fparam if needs.numb_fparam else None, aparam=aparam if needs.numb_aparam else None
        )

    def limited(self, i: np.ndarray, j: np.ndarray, r: np.ndarray, types: np.ndarray, where: str) -> Pairs:
        """Without the pairs of types that do not see each other, and without those beyond the limit."""
        if self.visible is not None:
            keep = self.visible[types[i], types[j]]
            i, j, r = i[keep], j[keep], r[keep]
        limit = self.needs.limit
        if limit.most is None:
            return i, j, r
        i, j, r, dropped = limit_neighbors(i, j, r, types, limit.most)
        if dropped and not self.dropped:
            log.warning(
                "%s: %d neighbours are beyond %s = %s and are left out, the farthest of each type first. "
                "In the input of a new training raise it, or set it to auto",
                where, dropped, limit.key, limit.most,
            )  # fmt: skip
        self.dropped += dropped
        return i, j, r
