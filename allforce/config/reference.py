"""The manual of the input file, made from the schema: markdown for people, JSON schema for editors."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from allforce.config import unsupported
from allforce.config.schema import Input
from allforce.config.section import Section, aliases, expected, is_own, sections, walk

INTRODUCTION = """\
# The input file

JSON (`.json`) or YAML (`.yaml`, `.yml`), with the keys of DeePMD-kit 3.2. Keys that begin with `_` are comments.
Inputs of DeePMD-kit 0.x and 1.x are read as well. A path such as `training/training_data/batch_size` means the key
`batch_size` of the object `training_data` of the object `training`. Lengths are in Å, energies in eV.
Keys marked with * are Allforce's own; DeePMD-kit does not know them.
"""
NOT_YET = """\
## Keys of DeePMD-kit that Allforce does not have

An input that uses one of these is refused, by name. At the values in the last column, which change nothing, they are
accepted and left out.
"""


def reference_markdown() -> str:
    """A section for each object, a row for each key, and the list of what is not supported."""
    parts = [INTRODUCTION, *(_object(path, cls) for path, cls in walk(Input)), _not_yet()]
    return "\n".join(parts)


def json_schema() -> dict[str, Any]:
    """JSON schema of the current form, with comments, aliases and neutral keys of DeePMD-kit allowed."""
    schema = Input.model_json_schema()
    for path, cls in walk(Input):
        part = schema["$defs"][cls.__name__] if path else schema
        part["patternProperties"] = {"^_": {}}
        _allow(part["properties"], cls, unsupported.KEYS.get(path, {}))
    for part in (schema, *schema["$defs"].values()):
        for entry in part.get("properties", {}).values():
            for choice in (entry, entry.get("items", {})):
                if "oneOf" in choice:  # `type` has a default, so more than one may fit
                    choice["anyOf"] = choice.pop("oneOf")
                    choice.pop("discriminator", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _allow(properties: dict[str, Any], cls: type[Section], neutral: dict[str, Any]) -> None:
    """Everything that is tidied away before the schema proper sees the input."""
    for name, entry in list(properties.items()):
        entry.pop("own", None)
        entry.pop("free", None)
        for alias in entry.pop("aliases", []):
            properties[alias] = {**entry, "description": f"Another name of {name}."}
    if cls.type_aliases:
        properties["type"]["enum"] = [properties["type"].pop("const"), *cls.type_aliases]
    for name, values in neutral.items():
        properties[name] = {"enum": values} if isinstance(values, list) else {}


def _object(path: str, cls: type[Section]) -> str:
    kind = cls.model_fields.get("type")
    names = " or ".join(f'"{name}"' for name in (kind.default, *cls.type_aliases)) if kind else ""
    title = f"`{path}`" if path else "The top level"
    title += f", type {names}" if names else ""
    rows = [_row(name, field, cls) for name, field in cls.model_fields.items()]
    head = ["| key | type | default | aliases | meaning |", "|---|---|---|---|---|"]
    return "\n".join([f"## {title}", "", inspect.cleandoc(cls.__doc__ or ""), "", *head, *rows, ""])


def _row(name: str, field: FieldInfo, cls: type[Section]) -> str:
    star = " *" if is_own(field) else ""
    other = ", ".join(f"`{alias}`" for alias in aliases(field)) or "-"
    required = field.is_required() or (name == "type" and cls.type_required)
    cells = [f"`{name}`{star}", expected(field), _default(field, required), other, field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo, required: bool) -> str:
    if required:
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "-"
    return "see below" if sections(field.annotation) else f"`{json.dumps(value)}`"


def _not_yet() -> str:
    head = ["| key | accepted at |", "|---|---|"]
    rows = [f"| `{path}` | {accepted} |" for path, accepted in _not_yet_keys(unsupported.KEYS)]
    types = [
        f"- `{path}/type`: {', '.join(f'`{name}`' for name in names)}" for path, names in unsupported.TYPES.items()
    ]
    values = [f"- `{name}`: {', '.join(f'`{v}`' for v in other)}" for name, other in unsupported.VALUES.items()]
    values += [f"- `{name}`: `{start}N`" for name, starts in unsupported.PREFIXES.items() for start in starts]
    return "\n".join([NOT_YET, *head, *rows, "", "Types:", "", *types, "", "Values:", "", *values, ""])


def _not_yet_keys(table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for path, keys in table.items():
        for name, neutral in keys.items():
            where = f"{path}/{name}" if path else name
            if isinstance(neutral, dict):
                yield from _not_yet_keys({where: neutral})
            elif neutral is unsupported.ANY:
                yield where, "any value (it has no effect without the others)"
            else:
                yield where, ", ".join(f"`{json.dumps(value)}`" for value in neutral)
