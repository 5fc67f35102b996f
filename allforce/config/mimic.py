"""The object of `systems` that names the files of MiMiC runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from allforce.config.section import Section, key

Name = Annotated[str, Field(min_length=1)]
Names = Name | Annotated[list[Name], Field(min_length=1)]


class MimicData(Section):
    """Files of MiMiC runs (data.md); lists of equal length for several runs."""

    mpt: Names = key(..., "Topology of MiMiCPy (.mpt).", own=True)
    trr: Names = key(..., "Trajectory of GROMACS (.trr).", own=True)
    energies: Names = key(..., "The file ENERGIES of CPMD.", own=True)
    match: Literal["step", "line"] = key(
        "step", "Frame and energy go together by their step numbers, or the k-th frame has the k-th line.", own=True
    )
    energy_column: Annotated[int, Field(ge=0)] | None = key(
        None, "Column of the energy, counted from 0; found from the form of the file when left out.", own=True
    )
    forces: bool = key(True, "Whether the forces of the .trr are used.", own=True)


class MimicSystem(Section):
    """A system of MiMiC: {"mimic": {"mpt": …, "trr": …, "energies": …}}."""

    mimic: MimicData = key(..., "Its files.", own=True)
