"""Checkpoints: one safetensors file holds a run whole, tensors and (JSON in its header) everything else. No pickle.

    <save_ckpt>-<step>.safetensors     model/<name>, optimizer/<what>/<name>, ema/<name> (averaged weights)
    <save_ckpt>.safetensors            link to the newest
    checkpoint                         text: the name of the newest

A file is written under a temporary name, flushed to the disk and renamed, so a name always stands for a whole file.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from allforce.errors import UserError
from allforce.writing import write_whole

SUFFIX = ".safetensors"
FORMAT, VERSION = "allforce checkpoint", 1
AVERAGE = "ema"
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
    header = {"allforce": json.dumps({"format": FORMAT, "version": VERSION, **checkpoint.meta})}
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in checkpoint.tensors.items()}
    write_whole(path, serialise(tensors, metadata=header))


def read(path: str | Path) -> Checkpoint:
    """Read a checkpoint; a file that is truncated or something else is a UserError."""
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get("allforce")
            tensors = {k: file.get_tensor(k) for k in file.keys()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: {_no_checkpoint(path, error)}") from None
    if header is None:
        raise UserError(
            f"{path}: a safetensors file, but not a checkpoint of allforce. Give one that `dp train` wrote."
        )
    meta = json.loads(header)
    if meta.get("version", 0) > VERSION:
        raise UserError(
            f"{path}: checkpoint of version {meta['version']}, this program reads up to {VERSION}. Install a newer one."
        )
    return Checkpoint(tensors, meta, path)


def _no_checkpoint(path: Path, error: Exception) -> str:
    """Why a file cannot be read, by how it begins: 8 bytes (the length of the header), then the header, a JSON text."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as problem:
        return f"cannot be read ({problem.strerror})."
    if head[8:9] == b"{" and b"\0" in head[:8]:
        return f"this checkpoint is damaged ({error}). Take an earlier one of the same run."
    if not head:
        return "the file is empty. Take an earlier checkpoint of the same run."
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
    if path.is_dir():
        if not (path / NEWEST).is_file():
            raise UserError(
                f"{path}: no file `{NEWEST}` in this directory to name the newest checkpoint. Give a file or a prefix."
            )
        found = path / (path / NEWEST).read_text().strip()
        if not found.is_file():
            raise UserError(
                f"{path / NEWEST}: names {found.name}, which does not exist. Give an existing file or a prefix."
            )
        return found
    candidates = [path.with_name(path.name + suffix) for suffix in (SUFFIX, ".pt")]
    candidates += [p for _, p in numbered(path)[::-1]]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(
        f"{path}: no such checkpoint. Looked for this file, for {path.name}{SUFFIX} and for {path.name}-<step>{SUFFIX} "
        f"in {path.parent.absolute()}."
    )


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
    except (SafetensorError, OSError):
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
        _write_text(folder / NEWEST, os.path.relpath(path, folder))
    for old in of_run(prefix, checkpoint.meta.get("run"), checkpoint.step)[: -max(keep, 1)]:
        old.unlink(missing_ok=True)
    return path


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
