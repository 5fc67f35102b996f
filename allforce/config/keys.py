"""Types of values and words that keys of several sections share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from allforce.config.section import WIDEST, Words
from allforce.errors import UserError

LARGEST = 10**15  # of any whole number
MOST_WEIGHTS = 2e8  # of one net


def _whole(value: Any) -> Any:
    """1e6 is how people write a million: a float without fraction counts as an integer."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(whole, int) and abs(whole) > LARGEST:
        raise PydanticCustomError("too_large", "at most {le}", {"le": LARGEST})
    return whole


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def precision_name(precision: str, env: Mapping[str, str] = os.environ) -> str:
    """The floating-point type behind a precision: "default" is float64, or float32 with DP_INTERFACE_PREC=low."""
    if precision != "default":
        return precision
    interface = env.get("DP_INTERFACE_PREC", "high").lower()
    if interface not in ("high", "low"):
        raise UserError(f'The environment variable DP_INTERFACE_PREC is "{interface}"; expected "high" or "low".')
    return "float64" if interface == "high" else "float32"


def _affordable(widths: list[int]) -> list[int]:
    if (weights := sum(a * b for a, b in pairwise(widths))) > MOST_WEIGHTS:
        raise ValueError(f"a net of these widths has {weights:.1e} weights, at most {MOST_WEIGHTS:.0e} are possible")
    return widths


Int = Annotated[int, BeforeValidator(_whole)]
NonNegative = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Width = Annotated[int, Field(ge=1, le=WIDEST), BeforeValidator(_whole)]  # of something that is allocated
Widths = Annotated[list[Width], AfterValidator(_affordable)]  # of the layers of a net
Seed = NonNegative | list[NonNegative] | None
Pair = Annotated[list[NonNegative], Field(min_length=2, max_length=2)]
Name = Annotated[str, Field(min_length=1)]
AutoSel = Annotated[str, Field(pattern=r"^auto(:\d+(\.\d*)?)?$"), Words('"auto" or "auto:1.1"')]
Sel = AutoSel | list[NonNegative]
# "default" is resolved when the input is read, so that a run and its files have one precision wherever they go
Precision = Annotated[Literal["default", "float32", "float64"], AfterValidator(lambda text: precision_name(text))]
ACTIVATIONS = ("tanh", "relu", "relu6", "softplus", "sigmoid", "gelu", "gelu_tf", "silu", "linear", "none")
WITH_THRESHOLD = ("silut", "custom_silu")  # two names of one, "silut" or "silut:3.0"
ACTIVATION_WORDS = ", ".join(f'"{name}"' for name in (*ACTIVATIONS, "silut")) + ' or "silut:T"'
Activation = Annotated[
    str,
    Field(pattern=rf"^({'|'.join(ACTIVATIONS)}|({'|'.join(WITH_THRESHOLD)})(:\d+(\.\d*)?)?)$"),
    BeforeValidator(_lower),
    Words(ACTIVATION_WORDS),
]

PRECISION_HELP = (
    'Precision of the parameters: "float32", "float64", or "default" = float64 (float32 when the '
    "environment has DP_INTERFACE_PREC=low)."
)
ACTIVATION_HELP = f"Activation function: {ACTIVATION_WORDS}; capitals do not matter."
SEED_HELP = "Seed of the initial parameters; a different one each run when left out."


def per_type(name: str, values: Any, ntypes: int) -> Iterator[tuple[str, str]]:
    """A problem where a list does not have one entry for each type; an empty list is none."""
    if isinstance(values, list) and values and len(values) != ntypes:
        yield name, f"{values} has {len(values)} entries; expected {ntypes}, one for each type of type_map"


def known_types(name: str, types: list[Any], ntypes: int) -> Iterator[tuple[str, str]]:
    """A problem where a list of types, or of pairs of them, names one that the model does not have."""
    if any(t >= ntypes for item in types for t in (item if isinstance(item, list) else [item])):
        yield name, f"{types} names a type outside 0 … {ntypes - 1} of type_map"
