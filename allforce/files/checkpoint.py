"""Checkpoints: one safetensors file holds a run whole, tensors and (JSON in its header) everything else. No pickle.

    <save_ckpt>-<step>.safetensors     model/<name>, optimizer/<what>/<name>, ema/<name> (averaged weights)
    <save_ckpt>.safetensors            link to the newest
    checkpoint                         text: the name of the newest

A file is written under a temporary name, flushed to the disk, read again and renamed, so a name always stands for a
whole file. It holds the SHA-256 of all its bytes (with zeros in its own place), so that damage is noticed. A name that
is not a file itself stands for the newest intact one: the one pointed at, else the one written last.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load as deserialise
from safetensors.torch import save as serialise
from torch import Tensor

from allforce.errors import UserError
from allforce.writing import write_whole

SUFFIX = ".safetensors"
FORMAT, VERSION = "allforce checkpoint", 2  # version 1 had no checksum
DIGEST = re.compile(rb'\\"sha256\\": \\"([0-9a-f]{64})\\"')  # in the header: JSON within JSON
AVERAGE = "ema"
log = logging.getLogger("deepmd.checkpoint")
LEFT = 60.0  # seconds: nobody writes as long at a file of a few bytes
NEWEST = "checkpoint"  # the text file that names the newest one


@dataclass
class Checkpoint:
    """`meta` has step, run (its name, kept by a restart), model (the normalised model section with sel as numbers), and
    what else the trainer put in.
    """

    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    path: Path | None = None

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    def weights(self) -> dict[str, Tensor]:
        """Those of the model as it is used: averaged where the run kept an average."""
        return self.part("model") | self.part(AVERAGE)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors below `prefix/`, without it."""
        return {k.removeprefix(prefix + "/"): v for k, v in self.tensors.items() if k.startswith(prefix + "/")}


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write whole or not at all."""
    write_whole(path, encode(checkpoint), intact)


def encode(checkpoint: Checkpoint) -> bytes:
    header = {**checkpoint.meta, "sha256": "0" * 64, "format": FORMAT, "version": VERSION}  # of a copy: not the old sum
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in checkpoint.tensors.items()}
    data = bytearray(serialise(tensors, metadata={"allforce": json.dumps(header)}))
    match = DIGEST.search(data)
    assert match is not None
    data[match.start(1) : match.end(1)] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def intact(data: bytes) -> bool:
    """The bytes are those that were written; files of version 1 do not tell."""
    match = DIGEST.search(data, 8, 8 + int.from_bytes(data[:8], "little"))
    if match is None:
        return (_header(data) or {}).get("version", VERSION) in (0, 1)
    digest = hashlib.sha256(data[: match.start(1)])
    digest.update(b"0" * 64)
    digest.update(memoryview(data)[match.end(1) :])
    return digest.hexdigest().encode() == match[1]


def read(path: str | Path) -> Checkpoint:
    """Read a checkpoint; a file that is damaged or something else is a UserError that names an intact one."""
    path = Path(path)
    try:
        data = path.read_bytes()
        tensors, header = deserialise(data), _header(data)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: {_no_checkpoint(path, error)}{_instead_of(path)}") from None
    if header is None:
        raise UserError(
            f"{path}: a safetensors file, but not a checkpoint of allforce. Give one that `dp train` wrote."
        )
    if not isinstance(header.get("version", 0), int):
        raise UserError(f"{path}: this checkpoint is damaged (version {header['version']!r}).{_instead_of(path)}")
    if header.get("version", 0) > VERSION:
        raise UserError(
            f"{path}: checkpoint of version {header['version']}, this program reads up to {VERSION}. Install a newer"
            " one."
        )
    if not intact(data):
        raise UserError(f"{path}: this checkpoint is damaged (its checksum is wrong).{_instead_of(path)}")
    if not isinstance(header.get("step"), int) or not isinstance(header.get("model"), dict):
        raise UserError(f"{path}: not a checkpoint of `dp train`: what it says about itself lacks step or model.")
    return Checkpoint(tensors, header, path)


def _header(data: bytes) -> dict[str, Any] | None:
    """What a checkpoint says about itself; None: a safetensors file of somebody else."""
    length = int.from_bytes(data[:8], "little")
    text = (json.loads(data[8 : 8 + length]).get("__metadata__") or {}).get("allforce")
    header = None if text is None else json.loads(text)
    if header is not None and not isinstance(header, dict):
        raise ValueError("what it says about itself is not an object")
    return header


def _instead_of(path: Path) -> str:
    """The newest intact checkpoint beside a damaged one."""
    prefix = path.with_name(re.sub(r"-\d+$", "", path.name.removesuffix(SUFFIX)))
    for other in _by_time(prefix):
        if other != path and _problem(other) is None:
            return f" The newest intact one is {other}."
    return " There is no intact one of the same name."


def _problem(path: Path) -> str | None:
    """Why a checkpoint cannot be used, None when it can."""
    if not path.is_file():
        return f"{path} does not exist"
    try:
        data = path.read_bytes()
        return None if _header(data) is not None and intact(data) and deserialise(data) else f"{path} is damaged"
    except (SafetensorError, OSError, ValueError) as error:
        return f"{path} is damaged ({error})"


def _no_checkpoint(path: Path, error: Exception) -> str:
    """Why a file cannot be read, by how it begins: 8 bytes (the length of the header), then the header, a JSON text."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as problem:
        return f"cannot be read ({problem.strerror})."
    if head[8:9] == b"{" and b"\0" in head[:8]:
        return f"this checkpoint is damaged ({error})."
    if not head:
        return "the file is empty."
    first = head.split(b"\n")[0]
    is_text = all(byte >= 32 or byte in b"\t\r\n" for byte in head)
    what = f"a text that begins with {first.decode(errors='replace')!r}" if is_text else "a file of another kind"
    remedy = "Give a checkpoint that `dp train` wrote, or a model file (.dp, .yaml, .pt)."
    return f"not a checkpoint or model, but {what}. {remedy}"


def find(name: str | Path) -> Path:
    """The file meant by a file name, a prefix (model.ckpt), a directory that has a file `checkpoint`, or that file."""
    path = Path(name)
    if path.name == NEWEST and path.is_file():
        path = path.parent
    if path.is_file():
        return path
    candidates = _pointed_at(path) if path.is_dir() else _named(path)
    problems: list[str] = []
    for candidate in candidates:
        problem = None if candidate.suffix == ".pt" else _problem(candidate)
        if problem is None:
            for words in problems:
                log.warning(f"{words}: {candidate} is taken instead, the newest that is intact")
            return candidate
        problems.append(problem)
    if problems:
        raise UserError(f"{path}: no intact checkpoint. {'; '.join(problems[:5])}. Begin a new run.")
    if path.is_dir():
        raise UserError(f"{path}: no checkpoint in this directory. Give a file or a prefix.")
    raise UserError(
        f"{path}: no such checkpoint. Looked for this file, for {path.name}{SUFFIX} and for {path.name}-<step>{SUFFIX} "
        f"in {path.parent.absolute()}."
    )


def _pointed_at(folder: Path) -> list[Path]:
    """The checkpoints of a folder: first the one that the file `checkpoint` names, then those written before."""
    if (folder / NEWEST).is_file():
        first = folder / (folder / NEWEST).read_text(errors="replace").strip().replace("\0", "")
        prefix = first.with_name(re.sub(r"-\d+$", "", first.name.removesuffix(SUFFIX)))
        return list(dict.fromkeys([first, *_by_time(prefix)]))
    prefixes = {m[1] for name in os.listdir(folder) if (m := re.fullmatch(rf"(.+)-\d+{re.escape(SUFFIX)}", name))}
    return sorted((p for prefix in prefixes for p in _by_time(folder / prefix)), key=_time, reverse=True)


def _named(prefix: Path) -> list[Path]:
    """The checkpoints of a prefix: what its link points at, then the others, then DeePMD-kit's."""
    link, foreign = (prefix.with_name(prefix.name + suffix) for suffix in (SUFFIX, ".pt"))
    first = [link.parent / os.readlink(link)] if link.is_symlink() else [link] if link.is_file() else []
    return list(dict.fromkeys([*first, *_by_time(prefix), *([foreign] if foreign.is_file() else [])]))


def _by_time(prefix: Path) -> list[Path]:
    return sorted((p for _, p in numbered(prefix)), key=_time, reverse=True)


def _time(path: Path) -> tuple[int, int]:
    """When it was written, and its step."""
    step = re.search(r"-(\d+)" + re.escape(SUFFIX) + "$", path.name)
    try:
        return path.stat().st_mtime_ns, int(step[1]) if step else 0
    except OSError:
        return 0, 0


def numbered(prefix: Path) -> list[tuple[int, Path]]:
    """(step, file) of all checkpoints of a prefix, by step."""
    pattern = re.compile(re.escape(prefix.name) + r"-(\d+)" + re.escape(SUFFIX))
    names = os.listdir(prefix.parent) if prefix.parent.is_dir() else []
    return sorted((int(m[1]), prefix.parent / m[0]) for m in map(pattern.fullmatch, names) if m)


def of_run(prefix: Path, run: str | None, step: int) -> list[Path]:
    """Checkpoints of a prefix that this run wrote up to a step, the newest last; what others left there is not among
    them, nor are later steps, which a restart from an earlier one leaves behind.
    """
    return [p for s, p in numbered(prefix) if s <= step and run is not None and _run(p) == run]


def _run(path: Path) -> str | None:
    """The run that wrote a file, None when the file does not tell."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {}).get("allforce", "{}")).get("run")
    except (SafetensorError, OSError, ValueError, AttributeError):
        return None


def save(prefix: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write <prefix>-<step>, point the link and `checkpoint` at it, remove the run's oldest beyond `keep`."""
    path = prefix.with_name(f"{prefix.name}-{checkpoint.step}{SUFFIX}")
    write(path, checkpoint)
    link = prefix.with_name(prefix.name + SUFFIX)
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)
    os.replace(temporary, link)
    for folder in {Path.cwd(), prefix.parent.absolute()}:  # where `dp freeze` and `dp train --restart .` look
        write_whole(folder / NEWEST, os.path.relpath(path, folder).encode())
    for old in of_run(prefix, checkpoint.meta.get("run"), checkpoint.step)[: -max(keep, 1)]:
        old.unlink(missing_ok=True)
    return path


def sweep(prefix: Path) -> None:
    """Remove what a killed run left half-written; only who holds the lock of the prefix's folder may.

    The working folder may be that of other runs, too, which are writing: there a file counts as left when it is old.
    """
    own = prefix.parent.absolute()
    for folder in {Path.cwd(), own}:
        for pattern in (f".{glob.escape(prefix.name)}*{SUFFIX}.*.tmp", f".{NEWEST}.*.tmp"):
            for path in folder.glob(pattern):
                with suppress(FileNotFoundError):  # its writer has ended meanwhile
                    if folder == own or time.time() - path.stat().st_mtime > LEFT:
                        path.unlink()
