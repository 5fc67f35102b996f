"""JSON and YAML files, with exact places of syntax errors; a key may be there once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from allforce.errors import UserError

LARGEST = 1 << 26  # bytes of an input file
MOST_NODES = 1_000_000  # values of a YAML file


def read_file(path: Path) -> dict[str, Any]:
    """The object in a .json, .yaml or .yml file."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise UserError(f"{path}: the name of an input file must end in .json, .yaml or .yml.")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: the input file cannot be read: it is not a file, but a folder, pipe or device.")
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise UserError(f"{path}: the input file has {size} bytes, at most {LARGEST} are expected.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: the input file cannot be read: {reason}.") from None
    try:
        data = _parse_json(text, path) if path.suffix == ".json" else _parse_yaml(text, path)
    except RecursionError:
        raise UserError(f"{path}: objects or lists in it are nested too deeply.") from None
    except ValueError as error:  # a number of thousands of digits, a date that does not exist
        raise UserError(f"{path}: a value in it cannot be read: {error}.") from None
    _refuse_nul(data, str(path))
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"a {type(data).__name__}"
        raise UserError(
            f"{path}: expected an object with the keys model, learning_rate, loss, training; found {found}."
        )
    return data


def _parse_json(text: str, path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice([key for key, _ in pairs], str(path))
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UserError(_syntax(path, "JSON", error.lineno, error.colno, error.msg, text)) from None


class _Yaml(yaml.SafeLoader):
    """Safe YAML, with numbers such as 1e-3 (texts in YAML 1.1), and keys that may be there once only."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        _refuse_twice(keys, f"{self.name}, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        loader = _Yaml(text)
        loader.name = str(path)
        node = loader.get_single_node()
        if node is None:
            return None
        check_aliases(node, str(path), MOST_NODES)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise UserError(_syntax(path, "YAML", line, column, error.problem or str(error), text)) from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: this is not YAML: {error}.") from None


def check_aliases(node: yaml.Node, where: str, most: int) -> None:
    if (size := expanded(node, {}, where)) > most:
        raise UserError(f"{where}: with its aliases written out it has {size:.1e} values, at most {most} are possible.")


def expanded(node: yaml.Node, known: dict[int, int], where: str) -> int:
    """Values below a node when every alias is replaced by what it stands for: a few lines can mean billions."""
    if id(node) in known:
        if known[id(node)] == 0:
            raise UserError(f"{where}: an alias in line {node.start_mark.line + 1} contains itself.")
        return known[id(node)]
    known[id(node)] = 0
    children = node.value if isinstance(node, yaml.CollectionNode) else ()
    flat = (n for c in children for n in (c if isinstance(c, tuple) else (c,)))
    known[id(node)] = 1 + sum(expanded(child, known, where) for child in flat)
    return known[id(node)]


def _syntax(path: Path, kind: str, line: int, column: int, reason: str, text: str) -> str:
    lines = text.splitlines()
    shown = f" in: {lines[line - 1].strip()[:80]}" if line <= len(lines) else ", at the end of the file"
    return f"{path}: not valid {kind} at line {line}, column {column}: {reason}{shown}"


def _refuse_nul(value: Any, where: str) -> None:
    """No name of a file has this character."""
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{where}: the text {value[:60]!r} has the character NUL, which no text of an input may have.")
    children = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _refuse_nul(child, where)


def _refuse_twice(keys: list[Any], where: str) -> None:
    twice = {key for key in keys if keys.count(key) > 1 and not str(key).startswith("_")}
    if twice:
        raise UserError(
            f"{where}: the key {', '.join(map(str, sorted(twice)))} is there twice in one object; keep one."
        )
