"""Systems of MiMiC runs: atoms from the topology (.mpt), structures and forces from GROMACS's .trr, energies from CPMD.

    file                  there           here
    .trr  x, box          nm              Å           × 10
    .trr  f               kJ/mol/nm       eV/Å        × 0.00103642696562622
    ENERGIES  EKS         Hartree         eV          × 27.211386245988

A frame and a line of ENERGIES belong together when their step numbers (step, NFI) are the same. GROMACS also writes the
structure before the first step, for which CPMD has no line: that frame is left out. A step that both files have several
times, because the run was restarted, is paired in order; a step of one frame and several lines has the last of them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ase.data
import numpy as np

from allforce.config.mimic import MimicData
from allforce.data.batch import Frame
from allforce.data.cpmd import read_energies
from allforce.data.mpt import Topology, read_mpt
from allforce.data.system import System, check_finite
from allforce.data.trr import TrrFile
from allforce.errors import UserError

log = logging.getLogger("deepmd.data")

NM = 10.0  # Å
HARTREE = 27.211386245988  # eV
KJ_PER_MOL_NM = 0.00103642696562622  # eV/Å


@dataclass(frozen=True)
class MimicFiles:
    """The three files of a run, and how to read them."""

    mpt: str
    trr: str
    energies: str
    match: Literal["step", "line"] = "step"  # line: the k-th frame has the k-th line
    energy_column: int | None = None  # counted from 0; None: found from the form of the file
    forces: bool = True  # False: those of the .trr are not used


def mimic_files(data: MimicData) -> list[MimicFiles]:
    """One for each run of an entry of `systems`."""
    lists = {name: _listed(getattr(data, name)) for name in ("mpt", "trr", "energies")}
    check_lengths(lists, "systems: mimic")
    how: dict[str, Any] = {"match": data.match, "energy_column": data.energy_column, "forces": data.forces}
    return [MimicFiles(*files, **how) for files in zip(*lists.values(), strict=True)]


def check_lengths(lists: Mapping[str, Sequence], where: str) -> None:
    """Lists whose entries belong together are equally long."""
    if len({len(files) for files in lists.values()}) > 1:
        found = ", ".join(f"{len(files)} in {name}" for name, files in lists.items())
        raise UserError(f"{where}: as many files of each kind are expected, found {found}")


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


class MimicSystem(System):
    """The frames of a .trr file. Opening reads headers, topology and energies; a frame is read when it is asked for."""

    numbered = False

    def __init__(self, files: MimicFiles):
        self.files, self.name = files, files.trr
        self.trr = TrrFile(files.trr)
        self.natoms = self.trr.natoms
        self._set_types(read_mpt(files.mpt))
        self.wanted = ("box", "x", "f") if files.forces else ("box", "x")
        frames, energies = self._pair(self._structures())
        self.frames = frames  # (nframes,) place in the file
        self.energies = energies * HARTREE  # (nframes,) eV
        self.nframes = len(frames)
        if not self.nframes:
            raise UserError(f"{self.name}: has zero frames with positions and an energy in {files.energies}")
        self.label_names = frozenset({"energy", "force"} if files.forces else {"energy"})
        self.periodic = bool(self.trr.read(int(frames[0]), ["box"])["box"].any())  # GROMACS: a box of zeros is none

    def paths(self) -> list[str]:
        return [self.files.mpt, self.files.trr, self.files.energies]

    def _set_types(self, topology: Topology) -> None:
        if topology.natoms != self.natoms:
            raise UserError(
                f"{self.files.mpt}: has {topology.natoms} atoms, but {self.name} has {self.natoms} in a frame. Give the"
                " topology and the trajectory of the same run"
            )
        symbols = [str(symbol).strip().capitalize() for symbol in topology.elements()]
        for k, symbol in enumerate(symbols):
            if ase.data.atomic_numbers.get(symbol, 0) < 1:
                raise UserError(
                    f"{self.files.mpt}: atom {k} (counted from 0) has the element {symbol!r}. Expected the symbol of an"
                    " element for every atom: give MiMiCPy the atomic numbers, and make the file again"
                )
        self.type_names = sorted(set(symbols), key=lambda x: ase.data.atomic_numbers[x])
        number = {name: t for t, name in enumerate(self.type_names)}
        self.types = np.array([number[symbol] for symbol in symbols], dtype=np.int64)

    def _structures(self) -> np.ndarray:
        """Frames with positions; those with velocities alone are no structures. Box and forces must be there."""
        there = self.trr.has("x")
        if (~there).any():
            log.info("%s: %d frame(s) without positions are left out", self.name, int((~there).sum()))
        for name, what in (("box", "box"), ("f", "forces")):
            lacking = np.flatnonzero(there & ~self.trr.has(name))
            if name in self.wanted and len(lacking):
                remedy = " Set nstfout to nstxout in GROMACS, or forces to false" if name == "f" else ""
                raise UserError(f"{self.trr.where(int(lacking[0]))}: has positions, but no {what}.{remedy}")
        return np.flatnonzero(there)

    def _pair(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Frames that have an energy, and it (Hartree)."""
        path = self.files.energies
        steps, energies = read_energies(path, self.files.energy_column)
        if self.files.match == "line":
            if len(steps) != len(frames):
                raise UserError(
                    f'{path}: has {len(steps)} lines, but {self.name} has {len(frames)} frames. With match "line" every'
                    " frame has a line of its own"
                )
            return frames, energies
        lines, frames_of_step = _by_step(steps), _by_step(self.trr.step[frames])
        pairs = []
        for step, here in frames_of_step.items():
            there = lines.get(step, [])
            if not there and step == 0:
                log.info("%s: the structure before the first step has no energy in %s: left out", self.name, path)
            elif len(there) == len(here) or (there and len(here) == 1):
                pairs += list(zip(frames[here], there[-len(here) :], strict=True))
            else:
                raise UserError(
                    f"{self.trr.where(int(frames[here[0]]))}: {len(here)} frame(s) of this step, but {len(there)}"
                    f" line(s) in {path}, which has the steps {steps.min()} … {steps.max()}. Frames and energies go"
                    ' together by their step numbers; where these mean nothing, set match to "line"'
                )
        pairs.sort()
        found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return found[:, 0], energies[found[:, 1]]

    def frame(self, k: int) -> Frame:
        index = int(self.frames[k])
        where = self.trr.where(index)
        blocks = self.trr.read(index, self.wanted)
        for name, value in blocks.items():
            check_finite(value, self.name, f"{name} (at byte {self.trr.start[index]})", index)
        cell = blocks["box"] * NM
        if bool(cell.any()) != self.periodic:
            raise UserError(f"{where}: {'no box' if self.periodic else 'a box'}, unlike the first frame of the file")
        labels = {"energy": self.energies[k : k + 1]}
        if self.files.forces:
            labels["force"] = blocks["f"] * KJ_PER_MOL_NM
        return Frame(blocks["x"] * NM, self.model_types, cell if self.periodic else None, labels, name=where)


def _by_step(steps: np.ndarray) -> dict[int, list[int]]:
    """step -> where it is, in order"""
    found: dict[int, list[int]] = defaultdict(list)
    for k, step in enumerate(steps.tolist()):
        found[step].append(k)
    return found
