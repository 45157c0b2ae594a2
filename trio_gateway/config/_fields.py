"""What all settings have in common: strictness, units, and the words of the reference page."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from trio_gateway.units import HOURS, parse_duration, parse_size

Applies = Literal["now", "new requests", "restart"]
"""When a change counts: for what runs already, for requests that arrive later, or from the next start."""

LONGEST = 24 * HOURS
"""Bound of every duration: whoever writes 600000 meant milliseconds."""

T = TypeVar("T")


class Section(BaseModel):
    """Base of all settings: exact types, no unknown keys, never changed after loading."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )


def about(unit: str, meaning: str, *, applies: Applies = "restart", **bounds: Any) -> Any:
    """Describe a setting for `reference_page`, and bound it.

    Args:
        unit: what the number counts, or the shape of what is no number.
        meaning: one sentence.
        applies: when a change is taken that a running gateway reads or is told.
        bounds: as `pydantic.Field` takes them: ``ge``, ``gt``, ``le``, ``min_length``, ...
    """
    return Field(description=meaning, json_schema_extra={"unit": unit, "applies": applies}, **bounds)


def seconds(meaning: str, *, zero: bool = False, applies: Applies = "restart") -> Any:
    """Describe a duration of more than nothing, or with `zero` of nothing too, and of a day at most."""
    lowest: dict[str, Any] = {"ge": 0} if zero else {"gt": 0}
    return about("seconds", meaning, applies=applies, **lowest, le=LONGEST)


def switch(meaning: str, *, applies: Applies = "restart") -> Any:
    """Describe what is on or off."""
    return about("true or false", meaning, applies=applies)


def as_text(value: object) -> str:
    """Write an address, a network, a share or a word as the string that means it in a file."""
    return f"{value.numerator}/{value.denominator}" if isinstance(value, Fraction) else str(value)


def _read_size(value: object) -> object:
    match value:
        case str():
            return parse_size(value)
        case int() if not isinstance(value, bool):
            return value
    raise ValueError('must be a whole number of bytes or a string such as "4 MiB"')


def _read_duration(value: object) -> object:
    match value:
        case str():
            return parse_duration(value)
        case int() | float() if not isinstance(value, bool):
            return value
    raise ValueError('must be a number of seconds or a string such as "1.5 s"')


def _read_share(value: object) -> object:
    if isinstance(value, Fraction):
        return value
    parts = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", value) if isinstance(value, str) else None
    if parts is None or not 0 < int(parts[1]) <= int(parts[2]):
        raise ValueError('must be a fraction such as "1/4", in quotes, of more than 0 and at most "1/1"')
    return Fraction(int(parts[1]), int(parts[2]))


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _named_once(values: tuple[T, ...]) -> tuple[T, ...]:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"names {value!s} twice")
    return values


def _check_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise ValueError("must have 1 to 64 letters, digits, dots, underscores or hyphens")
    return text


def _check_model_name(text: str) -> str:
    if not 1 <= len(text) <= 200 or not text.isprintable() or " " in text:
        raise ValueError("must have 1 to 200 printable characters and no blanks")
    return text


def _check_public_name(text: str) -> str:
    if text == "*":
        raise ValueError('must not be "*", by which tenants mean all models')
    return text


Size = Annotated[int, BeforeValidator(_read_size)]
"""Whole bytes, from a number or a string with a unit."""

Duration = Annotated[float, BeforeValidator(_read_duration)]
"""Seconds, from a number or a string with a unit."""

Share = Annotated[Fraction, BeforeValidator(_read_share)]
"""More than nothing and at most the whole, from a string; exact, so that all shares make up the whole."""

Items = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
"""An immutable list."""

Many = Annotated[Items[T], AfterValidator(_named_once)]
"""An immutable list without repetitions."""

Id = Annotated[str, AfterValidator(_check_id)]
"""A name that fits into headers, labels, file names and environment variables."""

ModelName = Annotated[str, AfterValidator(_check_model_name)]
"""What callers or engines call a model; slashes and colons are common in it."""

PublicName = Annotated[ModelName, AfterValidator(_check_public_name)]
"""What callers call a model."""
