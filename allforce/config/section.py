"""The ground of the schema: a section of the input file, a key of it, and words for the types of values."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

WIDEST = 16_384  # of a number that memory is taken for; told when it is exceeded, not in the manual


def key(
    default: Any, help: str, *, aliases: tuple[str, ...] = (), own: bool = False, free: bool = False, **limits: Any
) -> Any:
    """A key of the input file. `own`: Allforce has it, DeePMD-kit does not. A default of `...` means required.

    `free`: may differ from the model that a run begins with, because it does not change what the same weights mean.
    """
    extra: dict[str, Any] = {"aliases": list(aliases), "own": own, "free": free}
    if isinstance(default, (list, dict, BaseModel)):
        return Field(default_factory=lambda: _copy(default), description=help, json_schema_extra=extra, **limits)
    return Field(default, description=help, json_schema_extra=extra, **limits)


def _copy(default: Any) -> Any:
    return default.model_copy(deep=True) if isinstance(default, BaseModel) else type(default)(default)


class Section(BaseModel):
    """One object of the input file. `problems` yields (key, what is wrong) for values that do not go together."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, defer_build=True)
    type_aliases: ClassVar[tuple[str, ...]] = ()  # other names of `type`
    type_required: ClassVar[bool] = False  # when false, the first class of a choice is the default

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from ()

    def problems_with_types(self, ntypes: int) -> Iterator[tuple[str, str]]:
        """The same for what is given per type, once the number of types is known."""
        yield from ()

    def named_labels(self) -> dict[str, tuple[str, int]]:
        """Labels whose name in the data is said here: label -> (name, numbers of a frame or an atom)."""
        return {}

    def plain(self) -> dict[str, Any]:
        """All values as JSON has them. For model_dump pydantic first makes what it needs, which takes 50 ms."""
        return {name: _plain(getattr(self, name)) for name in type(self).model_fields}

    @model_validator(mode="after")
    def _no_problems(self) -> Section:
        if found := list(self.problems()):
            text = "; ".join(f"{name}: {what}" for name, what in found)
            raise PydanticCustomError("impossible", "{text}", {"text": text, "problems": found})
        return self


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.plain()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def one_of(parts: Mapping[str, Any]) -> Any:
    """The annotation of a key whose object belongs to one of these parts, by its `type`: a choice of their `Config`."""
    choices = tuple(dict.fromkeys(part.Config for part in parts.values()))
    if len(choices) == 1:
        return choices[0]
    first = choices[0]

    def named(value: Any) -> Any:
        """With its type, where the first of the choices is the default."""
        unnamed = isinstance(value, dict) and "type" not in value and not first.type_required
        return {**value, "type": first.model_fields["type"].default} if unnamed else value

    return Annotated[reduce(or_, choices), Field(discriminator="type"), BeforeValidator(named)]


class Words(NamedTuple):
    """How a type of value is called in messages and in the manual, where its pattern would not be understood."""

    text: str


NOUNS = {int: ("an integer", "integers"), float: ("a number", "numbers"), str: ("a text", "texts")}
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def expected(field: FieldInfo) -> str:
    """The values that a key takes, in words: "a list of integers ≥ 1"."""
    return _words(field.annotation, field.metadata, many=False)


def _words(annotation: Any, metadata: list[Any], many: bool) -> str:
    for item in metadata:
        if isinstance(item, Words):
            return item.text
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [m for item in args[1:] for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _words(args[0], [*metadata, *inner], many)
    if origin in (Union, types.UnionType):
        text = " or ".join(dict.fromkeys(_words(arg, metadata, many) for arg in args))
        return f"({text})" if many else text
    if origin is Literal:
        return " or ".join(quoted(arg) for arg in args)
    if origin is list:
        exact = [m.min_length for m in metadata if hasattr(m, "min_length") and m.min_length > 1]
        number = f"{exact[0]} " if exact else ""
        return f"{'lists' if many else 'a list'} of {number}{_words(args[0], [], many=True)}"
    if annotation in NOUNS:
        found = [(sign, getattr(m, name)) for m in metadata for name, sign in SIGNS.items() if hasattr(m, name)]
        limits = [f" {sign} {value}" for sign, value in found if (sign, value) != ("≤", WIDEST)]
        return NOUNS[annotation][many] + " and".join(limits)
    return {bool: "true or false", type(None): "null"}.get(annotation, "objects" if many else "an object")


def quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def sections(annotation: Any) -> tuple[type[Section], ...]:
    """The classes of objects that an annotation names: LearningRateExp | LearningRateCosine -> both."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(dict.fromkeys(cls for arg in get_args(annotation) for cls in sections(arg)))


def takes_dicts(annotation: Any) -> bool:
    """Whether an annotation also names objects with any keys."""
    return get_origin(annotation) is dict or any(takes_dicts(arg) for arg in get_args(annotation))


def aliases(field: FieldInfo) -> list[str]:
    return list(field.json_schema_extra["aliases"])  # type: ignore[index, arg-type]


def is_own(field: FieldInfo) -> bool:
    return bool(field.json_schema_extra["own"])  # type: ignore[index]


def is_free(field: FieldInfo) -> bool:
    return bool(field.json_schema_extra["free"])  # type: ignore[index]


def walk(
    cls: type[Section], path: str = "", above: tuple[type[Section], ...] = ()
) -> Iterator[tuple[str, type[Section]]]:
    """All objects of the input file with their paths, in the order of the schema.

    An object that is also a choice one level above (a descriptor in the list of `hybrid`) is told there, once.
    """
    yield path, cls
    for name, field in cls.model_fields.items():
        choices = sections(field.annotation)
        for inner in choices:
            if inner not in above:
                yield from walk(inner, f"{path}/{name}" if path else name, choices)
