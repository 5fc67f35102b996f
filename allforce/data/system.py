"""A system: frames with the same number of atoms, in whatever file they are.

Every reader (deepmd.py, ase.py) makes objects of the class System; everything behind it (DataSet, Loader, statistics)
sees nothing but this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from allforce.data.batch import Frame, Frames, Named
from allforce.errors import UserError


class System(ABC):
    """Frames of `natoms` atoms with the same labels; frame(k) reads one of them."""

    name: str  # for messages and tables: where it came from
    natoms: int  # atoms of a frame, virtual ones included
    nframes: int
    periodic: bool
    mixed: bool = False  # the types differ from frame to frame
    at_hand: bool = False  # to read a frame again takes no longer than to look for it among those that were kept
    types: np.ndarray  # (natoms,) int64 in the file's own numbers; meaningless when mixed
    type_names: list[str] | None  # names of the file's own types, None when it only has numbers
    numbered: bool = True  # the file itself numbers its types (an ASE file has names only)
    label_names: frozenset[str]  # names of batch.LABELS that every frame has
    fparam_width: int = 0  # 0 when it has none
    aparam_width: int = 0
    named: Named = MappingProxyType({})  # labels whose name in the data the model says

    type_map: list[str]  # of the model, since use_type_map
    model_types: np.ndarray  # (natoms,) int64 types as the model numbers them; not when mixed
    _to_model: np.ndarray  # (own types,) int64 type of the model

    @property
    def has_fparam(self) -> bool:
        return self.fparam_width > 0

    @property
    def has_aparam(self) -> bool:
        return self.aparam_width > 0

    @property
    def label_hint(self) -> str:
        """Where its labels would be, for a message that they are missing."""
        own = [f"{label} is {name}.npy" for label, (name, _) in self.named.items()]
        return "; ".join(["labels are energy.npy, force.npy, …", *own])

    def paths(self) -> list[str]:
        """The files its frames are read from when they are asked for."""
        return []

    @abstractmethod
    def frame(self, k: int) -> Frame:
        """The k-th frame, types as the model numbers them."""

    def several(self, ks: Sequence[int], labels: bool = True) -> Frames:
        """Frames ks together, with their labels or without, not of a mixed system."""
        frames = [self.frame(k) for k in ks]
        return Frames(
            coord=np.stack([f.coord for f in frames]),
            cell=np.stack([f.cell for f in frames if f.cell is not None]) if self.periodic else None,
            labels={x: np.stack([f.labels[x] for f in frames]) for x in (self.label_names if labels else ())},
        )

    def use_type_map(self, type_map: list[str]) -> None:
        """From now on types are indices into the model's list. Names decide; numbers when the file has no names."""
        self.type_map = type_map
        own = self.type_names
        if own is None:
            self._to_model = np.arange(len(type_map))
        else:
            index = {name: t for t, name in enumerate(type_map)}
            missing = [name for name in own if name not in index]
            if missing:
                raise UserError(
                    f"{self.name}: the type(s) {', '.join(missing)} of its type map {own} are not in the model's "
                    f"type_map {type_map}. Add them to model/type_map or leave the system out"
                )
            self._to_model = np.array([index[name] for name in own], dtype=np.int64)
        if not self.mixed:
            self.model_types = self._map(self.types, "")

    def _map(self, types: np.ndarray, where: str) -> np.ndarray:
        """Own numbers → the model's; -1, a virtual atom of a mixed system, stays."""
        lowest = -1 if self.mixed else 0
        bad = (types < lowest) | (types >= len(self._to_model))
        if bad.any():
            known = self.type_names if self.type_names is not None else self.type_map
            raise UserError(
                f"{self.name}{where}: atom {int(bad.argmax())} has type {int(types[bad.argmax()])}, but the type map "
                f"{known} allows {lowest} … {len(known) - 1}. Mend the types or add the missing names to the type map"
            )
        return np.where(types < 0, -1, self._to_model[types])


class Part(System):
    """Some frames of another system."""

    def __init__(self, whole: System, frames: Sequence[int]):
        self.whole, self.frames = whole, frames
        self.name = f"{whole.name}@{frames.start}:{frames.stop}" if isinstance(frames, range) else whole.name
        self.natoms, self.nframes, self.periodic, self.mixed = (
            whole.natoms,
            len(self.frames),
            whole.periodic,
            whole.mixed,
        )
        self.types, self.type_names, self.numbered = whole.types, whole.type_names, whole.numbered
        self.label_names, self.fparam_width, self.aparam_width = (
            whole.label_names,
            whole.fparam_width,
            whole.aparam_width,
        )
        self.at_hand = whole.at_hand

    @property
    def label_hint(self) -> str:
        return self.whole.label_hint

    def paths(self) -> list[str]:
        return self.whole.paths()

    def frame(self, k: int) -> Frame:
        return self.whole.frame(self.frames[k])

    def several(self, ks: Sequence[int], labels: bool = True) -> Frames:
        return self.whole.several([self.frames[k] for k in ks], labels)

    def use_type_map(self, type_map: list[str]) -> None:
        self.whole.use_type_map(type_map)
        super().use_type_map(type_map)


def adopt_type_map(systems: list[System]) -> list[str]:
    """The type map of a model that has none: the longest of the systems', of which all others must be beginnings.

    Systems whose types are element names without numbers of their own (ASE files) add what is missing. Where no system
    has names, types are called Type_0, Type_1, …
    """
    numbered = [s for s in systems if s.type_names is not None and s.numbered]
    longest = max(numbered, key=lambda s: len(s.type_names or []), default=None)
    adopted = list(longest.type_names or []) if longest is not None else []
    for s in numbered:
        if s.type_names != adopted[: len(s.type_names or [])]:
            assert longest is not None
            raise UserError(
                f"model/type_map is not given and the type maps of the data differ: {adopted} in {longest.name}, "
                f"{s.type_names} in {s.name}. Give model/type_map, the list of all element names"
            )
    unnamed = [s for s in systems if s.type_names is None and not s.mixed]
    if not adopted and unnamed:
        adopted = [f"Type_{t}" for t in range(1 + max(int(s.types.max()) for s in unnamed))]
    for s in systems:
        adopted += [name for name in s.type_names or [] if name not in adopted]
    if not adopted:
        raise UserError("model/type_map is not given and no system names its types: give model/type_map")
    return adopted


def check_finite(value: np.ndarray, system: str, what: str, k: int) -> np.ndarray:
    """The value when all of it is finite; NaN and inf in data are an error."""
    if not np.isfinite(value).all():
        bad = int((~np.isfinite(value)).ravel().argmax())
        raise UserError(
            f"{system}: {what} of frame {k} holds {value.ravel()[bad]} (entry {bad} of {value.size}, counted from 0). "
            "Expected finite numbers: remove the frame or mend the file"
        )
    return value
