"""From the entries of `systems` in the input to open systems.

An entry is a directory (with every system below it), an HDF5 file or group (file.h5#/group, with every system below),
a data set of PiNN (NAME.yml), an object that names the files of MiMiC runs, or any other file, which ASE then reads.
{"file": entry, "energy": key, …} also says what the labels of such a file are called. An entry that ends in @a:b means
the frames a … b-1 of each of its systems, as Python counts them: run.xyz@:-100 and run.xyz@-100: are all but the last
hundred, and those.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import h5py

from allforce.config.mimic import MimicSystem as MimicEntry
from allforce.data.arrays import h5_file
from allforce.data.batch import Named
from allforce.data.deepmd import DeepmdSystem, Folder, Group
from allforce.data.mimic import MimicFiles, MimicSystem, mimic_files
from allforce.data.system import Part, System, adopt_type_map
from allforce.data.tfrecord import read_tfrecord
from allforce.distributed.comm import partition
from allforce.errors import UserError

Entry = str | dict[str, str] | MimicEntry  # of `systems`
Location = str | dict[str, str] | MimicFiles  # of one system
LMDB = (".lmdb", ".mdb")
FILES = (".h5", ".hdf5", ".xyz", ".extxyz", ".traj")  # files, besides directories, that rglob_patterns may find


def open_systems(
    entries: Entry | Sequence[Entry],
    type_map: list[str] | None,
    rglob_patterns: list[str] | None = None,
    rank: int = 0,
    size: int = 1,
    named: Named | None = None,
) -> list[System]:
    """All systems that the entries name, types numbered by type_map, or, when None, by what the data itself says.

    With size > 1 (sharding "partition") only the share of this rank is opened. named: labels that the model names.
    """
    locations = find_systems(entries, rglob_patterns)
    if size > 1:
        if not type_map:
            raise UserError("sharding 'partition' needs model/type_map, because no worker opens all systems")
        if size > len(locations):
            raise UserError(
                f"sharding 'partition' deals {len(locations)} system(s) to {size} workers: some would have none. "
                "Use at most as many workers as systems, or sharding 'global'"
            )
        locations = partition(locations, rank, size)
    systems = [system for location in locations for system in open_location(location, named)]
    type_map = type_map or adopt_type_map(systems)
    for system in systems:
        system.use_type_map(type_map)
    return systems


def below(folder: Path, entries: Entry | Sequence[Entry]) -> list[Entry]:
    """The entries, with relative paths counted from a folder."""

    def join(names: str | list[str]) -> str | list[str]:
        return str(folder / names) if isinstance(names, str) else [str(folder / name) for name in names]

    def moved(entry: Entry) -> Entry:
        if isinstance(entry, str):
            return str(folder / entry)
        if isinstance(entry, dict):
            return {**entry, "file": str(folder / entry["file"])}
        files = {name: join(getattr(entry.mimic, name)) for name in ("mpt", "trr", "energies")}
        return MimicEntry(mimic=entry.mimic.model_copy(update=files))

    return [moved(entry) for entry in ([entries] if isinstance(entries, (str, dict, MimicEntry)) else entries)]


def open_location(location: Location, named: Named | None = None) -> list[System]:
    """The system(s) at one location of find_systems."""
    if isinstance(location, MimicFiles):
        return [MimicSystem(location)]
    path, names = path_and_names(location)
    if frames := frame_range(path):
        base = path[: frames.start()]
        return [_part(s, frames) for s in open_location({"file": base, **names} if names else base, named)]
    file, _, group = path.partition("#")
    is_hdf5 = not os.path.isdir(path) and h5py.is_hdf5(file)
    if names and (is_hdf5 or os.path.isdir(path)):
        raise UserError(
            f"systems: {path} is in DeePMD-kit's layout, where labels have fixed names (energy.npy, …); {names} can be "
            "said of files that ASE reads only. Rename the arrays, or leave the names out"
        )
    if os.path.isdir(path):
        return [DeepmdSystem(Folder(path), named)]
    if is_hdf5:
        return [DeepmdSystem(Group(file, group or "/"), named)]
    if path.endswith(".yml") and not names:
        return list(read_tfrecord(path))
    from allforce.data.ase import read_ase  # ASE's readers are slow to import

    return list(read_ase(path, names, named))


def path_and_names(entry: str | dict[str, str]) -> tuple[str, dict[str, str]]:
    """Where an entry is, and what its labels are called, if it says so."""
    if isinstance(entry, str):
        return entry, {}
    return entry["file"], {label: name for label, name in entry.items() if label != "file"}


def frame_range(entry: str) -> re.Match[str] | None:
    """The end @a:b of an entry; a file of that name is just a file."""
    return None if os.path.exists(entry) else re.search(r"@(-?\d+)?:(-?\d+)?$", entry)


def _part(system: System, frames: re.Match[str]) -> Part:
    first, end = (int(n) if n else None for n in frames.groups())
    chosen = range(system.nframes)[first:end]
    if not chosen:
        raise UserError(f"systems: {system.name}{frames[0]} has no frames, for {system.name} has {system.nframes}")
    return Part(system, chosen)


def find_systems(entries: Entry | Sequence[Entry], rglob_patterns: list[str] | None = None) -> list[Location]:
    """Directories, file#/group and files that hold a system: below each entry sorted, then the entry itself."""
    found: list[Location] = []
    for entry in [entries] if isinstance(entries, (str, dict, MimicEntry)) else entries:
        if isinstance(entry, MimicEntry):
            found += mimic_files(entry.mimic)
            continue
        path, names = path_and_names(entry)
        here = _find(path, rglob_patterns)
        if not here:
            how = f" that matches {rglob_patterns}" if rglob_patterns else ""
            raise UserError(
                f"systems: no system found in {path!r}{how}. A system is a directory (or a group of an HDF5 file) "
                "with type.raw and set.000/coord.npy, or a file that ASE reads"
            )
        found += [{"file": path, **names} for path in here] if names else here
    if not found:
        raise UserError("systems: the list is empty. Name at least one system")
    return found


def _find(entry: str, patterns: list[str] | None) -> list[str]:
    if frames := frame_range(entry):
        return [path + frames[0] for path in _find(entry[: frames.start()], patterns)]
    file, _, group = entry.partition("#")
    if os.path.isfile(entry) and entry.endswith(LMDB):
        raise _lmdb(entry)
    if os.path.isdir(entry):
        return _match_folder(entry, patterns) if patterns else _walk(entry)
    if not os.path.isfile(file) and not os.path.isfile(entry):
        raise UserError(f"systems: {entry!r} does not exist (looked for it from {os.getcwd()})")
    if os.path.isfile(file) and h5py.is_hdf5(file):
        return _walk_h5(file, group or "/", patterns)
    return [entry]


def _walk(root: str) -> list[str]:
    """Directories with type.raw below root, sorted, then root itself. Links are followed, rings of them are not."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()

    def visit(path: str) -> None:
        stat = os.stat(path)
        if (stat.st_dev, stat.st_ino) in seen:
            return
        seen.add((stat.st_dev, stat.st_ino))
        with os.scandir(path) as entries:
            inside = sorted(entries, key=lambda e: e.name)
        is_system = any(e.name == "type.raw" for e in inside)
        if not is_system and any(e.name == "data.mdb" for e in inside):
            raise _lmdb(path)
        for e in inside:
            if e.name.startswith("set.") and not is_system and os.path.isfile(os.path.join(e.path, "coord.npy")):
                raise UserError(f"{path}: has {e.name}/coord.npy, but type.raw is missing, with the type of every atom")
            if not (is_system and e.name.startswith("set.")) and e.is_dir():
                visit(e.path)
        if is_system:
            found.append(path)

    visit(root)
    return found


def _lmdb(path: str) -> UserError:
    return UserError(
        f"{path}: is an LMDB database, a format of data that Allforce does not read. Expected a directory in "
        "DeePMD-kit's npy layout, an HDF5 file or a file that ASE reads: write the frames in one of these"
    )


def _match_folder(root: str, patterns: list[str]) -> list[str]:
    try:
        matches = {p for pattern in patterns for p in Path(root).rglob(pattern)}
    except (NotImplementedError, ValueError) as error:  # "/abs"
        raise UserError(f"rglob_patterns: {patterns} cannot be searched for below {root}: {error}") from None
    return sorted(str(p) for p in matches if (p / "type.raw").is_file() or (p.suffix in FILES and p.is_file()))


def _walk_h5(file: str, group: str, patterns: list[str] | None) -> list[str]:
    root = h5_file(file)
    try:
        start = root.get(group)
    except (OSError, RuntimeError, ValueError) as error:  # a ring of links, a NUL in the name
        raise UserError(f"systems: {file}#{group} cannot be followed ({error})") from None
    if start is None:
        raise UserError(f"systems: the HDF5 file {file} has no group {group!r}. It has {sorted(root)[:20]}")
    if not isinstance(start, h5py.Group):
        raise UserError(f"systems: {file}#{group} is {start}. Expected a group")
    found: list[str] = []
    seen: set[Any] = set()  # links are followed, rings of them are not

    def visit(here: h5py.Group, path: str) -> None:
        info = h5py.h5o.get_info(here.id)
        if (info.fileno, info.addr) in seen:
            return
        seen.add((info.fileno, info.addr))
        for name in sorted(here):
            if not name.startswith("set.") and isinstance(inner := _followed(here, name), h5py.Group):
                visit(inner, f"{path.rstrip('/')}/{name}")
        if "type.raw" in here and (patterns is None or _match(path, group, patterns)):
            found.append(f"{file}#{path}")

    visit(start, start.name)
    return found


def _followed(here: h5py.Group, name: str) -> Any:
    """What a name leads to, None where a link leads nowhere."""
    try:
        return here.get(name)
    except (OSError, RuntimeError, KeyError):
        return None


def _match(name: str, root: str, patterns: list[str]) -> bool:
    path = PurePosixPath(name)
    below = str(path.relative_to(root)) if path.is_relative_to(root) else name
    return any(fnmatch(below, p) or fnmatch(path.name, p) for p in patterns)
