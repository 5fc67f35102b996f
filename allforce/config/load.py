"""From an input file to `Input`, and back to the normalised form that goes to out.json.

read (JSON, YAML) → old forms → tidy (comments, aliases, unknown keys) → schema. All mistakes are told at once.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from allforce.config import unsupported
from allforce.config.legacy import V0_KEYS, Clash, is_v0, modernise
from allforce.config.pinn import from_pinn, is_pinn
from allforce.config.read import read_file
from allforce.config.schema import Input, ModelAlone
from allforce.config.section import WIDEST, Section, aliases, expected, is_own, quoted, sections, takes_dicts, walk
from allforce.errors import UserError

log = logging.getLogger("deepmd.config")

SECTION = TypeVar("SECTION", bound=Section)


class Mistake(NamedTuple):
    path: str  # training/training_data/batch_size
    text: str
    whole: str | None = None  # path of the object that was not looked into any further


def load_input(path: str | Path) -> Input:
    """Read and check an input file; UserError names every mistake in it."""
    return parse_input(read_file(Path(path)), str(path))


def parse_input(data: dict[str, Any], name: str = "input") -> Input:
    """Check an input that is already in memory; `name` is how messages call it."""
    if is_pinn(data):
        data, name = from_pinn(data, name), f"{name} (network and model/params of PiNN are `model` and `loss` here)"
    v0 = is_v0(data)
    data, notes, clashes = modernise(data)
    mistakes = [_clash(clash) for clash in clashes]
    result = _checked(Input, data, "", mistakes, V0_KEYS if v0 else {})
    if mistakes or result is None:
        raise UserError(_message(name, mistakes, notes))
    for note in notes:
        log.warning("%s: %s", name, note)
    return result


def validated_config(section: dict[str, Any], name: str) -> Any:
    """Check the section `model` that a model file carries; messages are those of an input file."""
    mistakes: list[Mistake] = []
    result = _checked(ModelAlone, {"model": section}, "", mistakes, {})
    if mistakes or result is None:
        raise UserError(_message(name, mistakes, []))
    return result.model


def _checked(
    cls: type[SECTION], data: dict[str, Any], path: str, mistakes: list[Mistake], more: dict[str, str]
) -> SECTION | None:
    """The object at a path of the input ("": the whole); what is wrong in it goes to `mistakes`."""
    clean = _tidy(cls, data, path, mistakes, more)
    try:
        return cls.model_validate(clean)
    except ValidationError as error:
        mistakes += _from_schema(error, path, clean, mistakes)
        return None


def _clash(clash: Clash) -> Mistake:
    text = f"found {_show(clash.old_value)}, but {clash.path}, where this key is now, has {_show(clash.value)}"
    return Mistake(clash.old_path, f"{text}; remove {clash.old_path} and keep the value you want in {clash.path}")


def normalised(section: Section) -> dict[str, Any]:
    """The input with all defaults and current names. Reading it again gives the same input.

    Keys without a value are left out, and Allforce's own keys at their defaults too, so that DeePMD-kit reads it.
    """
    out: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        default = field.get_default(call_default_factory=True)
        if value is None or (is_own(field) and value == default):
            continue
        out[name] = _plain(value)
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return normalised(value) if isinstance(value, Section) else copy.deepcopy(value)


# ------------------------------------------------------------------------------------------------------------ tidy


def _tidy(
    cls: type[Section], data: dict[Any, Any], path: str, mistakes: list[Mistake], more: dict[str, str]
) -> dict[str, Any]:
    """Comments away, aliases to names; unknown keys, and those that DeePMD-kit alone has, to `mistakes`."""
    names = {alias: name for name, field in cls.model_fields.items() for alias in (name, *aliases(field))}
    clean: dict[str, Any] = {}
    for key, value in data.items():
        where = _join(path, key)
        if str(key).startswith("_"):
            continue
        if key not in names:
            mistakes += _unknown(cls, path, key, value, more)
        elif names[key] in clean:
            mistakes.append(
                Mistake(where, f"is another name of {names[key]}, which is given as well; keep one of them")
            )
        else:
            clean[names[key]] = _tidy_value(cls.model_fields[names[key]], value, where, mistakes)
    return clean


def _tidy_value(field: FieldInfo, value: Any, where: str, mistakes: list[Mistake]) -> Any:
    choices = sections(field.annotation)
    if isinstance(value, list) and choices:
        return [_tidy_value(field, item, f"{where}/{n}", mistakes) for n, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if not choices:
        return {key: item for key, item in value.items() if not str(key).startswith("_")}
    if _is_plain(field, value):
        return {key: item for key, item in value.items() if not str(key).startswith("_")}
    if "type" not in choices[0].model_fields:
        return _tidy(choices[0], value, where, mistakes, {})
    kinds = {name: cls for cls in choices for name in (cls.model_fields["type"].default, *cls.type_aliases)}
    kind = value.get("type", None if choices[0].type_required else choices[0].model_fields["type"].default)
    if not isinstance(kind, str) or kind not in kinds:
        mistakes.append(_unknown_type(where, kind, [cls.model_fields["type"].default for cls in choices]))
        return value
    cls = kinds[kind]
    named = {**value, "type": cls.model_fields["type"].default}
    others = {
        key: f"type {quoted(c.model_fields['type'].default)}" for c in choices if c is not cls for key in c.model_fields
    }
    return _tidy(cls, named, where, mistakes, others)


def _is_plain(field: FieldInfo, value: dict[Any, Any]) -> bool:
    """An object with keys of its own choice, where a field takes such objects beside others."""
    known = {name for cls in sections(field.annotation) for name in cls.model_fields}
    return takes_dicts(field.annotation) and not value.keys() & known


def _unknown_type(where: str, kind: Any, known: list[str]) -> Mistake:
    allowed = f"allowed: {', '.join(map(quoted, known))}"
    if kind is None:
        text = f"required key is missing; {allowed}"
    elif kind in unsupported.TYPES.get(re.sub(r"/list/\d+$", "", where), ()):
        instead = f"{unsupported.INSTEAD[kind]}; " if kind in unsupported.INSTEAD else ""
        text = f"found {_show(kind)}; DeePMD-kit has this type, Allforce does not yet; {instead}{allowed}"
    else:
        text = f"found {_show(kind)}{_did_you_mean(kind, known)}; {allowed}"
    return Mistake(f"{where}/type", text, whole=where)


def _unknown(cls: type[Section], path: str, key: Any, value: Any, more: dict[str, str]) -> Iterator[Mistake]:
    """What to say of a key that the object has not. `more`: keys that belong elsewhere, and where."""
    where, neutral = _join(path, key), unsupported.KEYS.get(path, {}).get(key)
    if neutral is not None:
        if not unsupported.is_neutral(value, neutral):
            yield from _not_yet(where, value, neutral)
        return
    known = list(cls.model_fields)
    homes = dict.fromkeys(p for p, c in walk(Input) if p and key in c.model_fields and key != "type")
    if key in more:
        hint = f"; it belongs to {more[key]}"
    elif homes:
        hint = f"; there is such a key in {' and '.join(homes)}"
    else:
        hint = _did_you_mean(key, [*known, *(more if not path else ())])
    yield Mistake(where, f"unknown key, with the value {_show(value)}{hint}; allowed here: {', '.join(known)}")


def _not_yet(where: str, value: Any, neutral: Any) -> Iterator[Mistake]:
    """A key that DeePMD-kit has, at a value that would have an effect."""
    if isinstance(neutral, dict) and isinstance(value, dict):
        for key, item in value.items():
            if key in neutral and not unsupported.is_neutral(item, neutral[key]):
                yield from _not_yet(f"{where}/{key}", item, neutral[key])
            elif key not in neutral and not str(key).startswith("_"):
                yield Mistake(
                    f"{where}/{key}", f"unknown key, with the value {_show(item)}{_did_you_mean(key, neutral)}"
                )
        return
    off = [_show(item) for item in neutral if item is not None] if isinstance(neutral, list) else []
    remedy = f"remove it or set it to {off[0]}" if off else "remove it"
    yield Mistake(where, f"found {_show(value)}; DeePMD-kit has this key, Allforce does not yet: {remedy}")


# ---------------------------------------------------------------------------------------------------------- schema


def _from_schema(error: ValidationError, top: str, data: dict[str, Any], known: list[Mistake]) -> list[Mistake]:
    """pydantic's errors in our words, one for each key; nothing below an object that was given up already.

    data is the object of the input called `top`, or the whole input.
    """
    above = (top,) if top else ()
    data = {top: data} if top else data
    found: dict[str, tuple[int, Mistake]] = {}
    closed = [m.whole for m in known if m.whole is not None]
    for item in error.errors():
        path = _real_path((*above, *item["loc"]), data, missing=item["type"] == "missing")
        if any(path[: len(c.split("/"))] == c.split("/") for c in closed):
            continue
        if item["type"] == "impossible":
            for key, text in item["ctx"]["problems"]:
                where = "/".join([*path, key])
                found.setdefault(where, (0, Mistake(where, text)))
            continue
        depth, field = _field_at(path, data)
        owner = "/".join(path[:depth])
        if owner not in found or len(path) > found[owner][0]:
            found[owner] = (len(path), Mistake("/".join(path), _wrong_value(item, field, path, depth)))
    return [mistake for _, mistake in found.values()]


def _real_path(loc: tuple[int | str, ...], data: Any, missing: bool) -> list[str]:
    """The keys of a location that are in the input; pydantic adds the names of the members of a choice."""
    path: list[str] = []
    for number, part in enumerate(loc):
        if isinstance(data, dict) and (part in data or (missing and number == len(loc) - 1)):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part]
        else:
            continue
        path.append(str(part))
    return path


def _field_at(path: list[str], data: Any) -> tuple[int, FieldInfo]:
    """The key that a path is in (its depth in the path) and its field."""
    cls: type[Section] = Input
    for depth, name in enumerate(path, start=1):
        if isinstance(data, list):  # an object in a list: the field is still that of the list
            data = data[int(name)]
        else:
            field = cls.model_fields[name]
            data = data.get(name)
        choices = sections(field.annotation)
        inside = data[int(path[depth])] if isinstance(data, list) and depth < len(path) else data
        if depth == len(path) or not choices or not isinstance(inside, dict) or _is_plain(field, inside):
            return depth, field
        if isinstance(data, list):
            continue
        kinds = {c.model_fields["type"].default: c for c in choices if "type" in c.model_fields}
        cls = kinds.get(data.get("type"), choices[0])
    raise AssertionError("an error of the schema without a key")


def _wrong_value(item: Any, field: FieldInfo, path: list[str], depth: int) -> str:
    if item["type"] == "missing":
        return f"required key is missing; expected {expected(field)}: {(field.description or '').rstrip('.')}"
    key, value = path[depth - 1], item["input"]
    if item["type"] == "too_large" or (item["type"] == "less_than_equal" and item["ctx"]["le"] == WIDEST):
        return f"found {_show(value)}; expected at most {item['ctx']['le']:,}"
    if item["type"] == "value_error":
        return f"found {_show(value)}; {item['ctx']['error']}"
    other = unsupported.VALUES.get(key, ())
    starts = unsupported.PREFIXES.get(key, ())
    if isinstance(value, str) and (value in other or value.startswith(starts)):
        return f"found {_show(value)}; DeePMD-kit has this value, Allforce does not yet; expected {expected(field)}"
    words = re.findall(r'"([^"]+)"', expected(field))
    of = "" if depth == len(path) else f" for {key}"
    return f"found {_show(value)}{_did_you_mean(value, words)}; expected{of} {expected(field)}"


# --------------------------------------------------------------------------------------------------------- message


def _message(name: str, mistakes: list[Mistake], notes: list[str]) -> str:
    note = f" (Note: {'; '.join(notes)}.)" if notes else ""
    if len(mistakes) == 1:
        return f"{name}: {mistakes[0].path}: {mistakes[0].text}.{note}"
    return f"{name}: {len(mistakes)} mistakes:{note}" + "".join(f"\n  - {m.path}: {m.text}." for m in mistakes)


def _did_you_mean(value: Any, known: Any) -> str:
    names = {str(name).lower(): str(name) for name in known}
    close = difflib.get_close_matches(str(value).lower(), list(names), 1, 0.6) if isinstance(value, str) else []
    return f" (did you mean {names[close[0]]}?)" if close else ""


def _show(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)
