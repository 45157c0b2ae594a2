"""Strict reading of a caller's JSON: what was checked here is what the engine gets.

jiter reads (duplicate keys, invalid UTF-8, lone surrogates, NaN and trailing
bytes are its errors); depth, number of values and overflowing numbers are
checked here. Costs are linear, and an over-full body is refused before it is
parsed, because building millions of small objects would stop the loop.
"""

from __future__ import annotations

import math
import re
from typing import Final

import jiter
import msgspec

from ..errors import Problem, Refused

MAX_DEPTH: Final = 100
MANY_BYTES: Final = 256 * 1024
MANY_COMMAS: Final = 10_000  # about as many values, each some 0.3 us
_WINDOW: Final = 1024 * 1024  # bytes looked at in one step, so that a thread lets others run in between

# A string without an end is one token too: looking for its end from each of its quotes would take for ever.
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_TOKEN = re.compile(_STRING + rb"|[\[\]{},]", re.DOTALL)
_EMPTY = re.compile(rb"[ \t\r\n]*+[\]}]")
_POSITION = re.compile(r"line (\d+) column (\d+)$")

_NO_JSON = re.compile(_STRING + rb"|-?Infinity|NaN", re.DOTALL)
_FINITE: Final = {b"-Infinity": b"-9999.0", b"Infinity": b"9999.0", b"NaN": b"null"}

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def read_object(body: bytes, max_values: int) -> dict[str, Json]:
    """Read a caller's body.

    Raises:
        Refused: ``invalid_json``; the message names a position, never content.
    """
    _check_shape(body, max_values)
    try:
        value = jiter.from_json(body, catch_duplicate_keys=True, allow_inf_nan=False)
    except ValueError as exc:
        raise _invalid(_describe(str(exc))) from None
    if not isinstance(value, dict):
        raise _invalid("the body is not a JSON object")
    if _has_infinity(value):
        raise _invalid("a number is too large")
    return value


def raw_members(body: bytes) -> dict[str, bytes]:
    """Cut a JSON object into its top-level fields, each value as its own bytes.

    Raises:
        ValueError: the body is no JSON object.
    """
    return {key: bytes(raw) for key, raw in _members.decode(body).items()}


def join_members(members: dict[str, bytes]) -> bytes:
    """Write an object whose values are JSON already."""
    parts = [msgspec.json.encode(key) + b":" + raw for key, raw in members.items()]
    return b"{" + b",".join(parts) + b"}"


def may_hold_infinity(data: bytes) -> bool:
    """Whether an engine's JSON may hold what JSON has no word for."""
    return b"Infinity" in data or b"NaN" in data


def with_finite_numbers(data: bytes) -> bytes:
    """Write infinities as the -9999.0 that OpenAI uses for logprobs (or 9999.0), and NaN as null.

    Engines print them as Python does; most clients then fail on the whole event.
    """
    return _NO_JSON.sub(lambda found: _FINITE.get(found[0], found[0]), data)


def needs_thread(body: bytes) -> bool:
    """Whether reading this body may hold the loop for more than a few milliseconds."""
    return len(body) > MANY_BYTES or body.count(b",") > MANY_COMMAS


def _invalid(message: str) -> Refused:
    return Refused(Problem.of("invalid_json", message))


def _describe(error: str) -> str:
    """Keep jiter's kind of error and position, and drop what it quotes of the body."""
    place = _POSITION.search(error)
    kind = (
        "a key stands twice in one object" if error.startswith("Detected duplicate key") else "not valid JSON"
    )
    return f"the body is {kind}" if place is None else f"{kind} at line {place[1]} column {place[2]}"


def _check_shape(body: bytes, max_values: int) -> None:
    opens = _count(body, b"{") + _count(body, b"[")
    # Brackets and commas inside strings only raise these bounds.
    if opens <= MAX_DEPTH and opens + _count(body, b",") < max_values:
        return
    depth = values = 0
    for token in _TOKEN.finditer(body):
        byte = body[token.start()]
        if byte in b"[{":
            depth += 1
            values += _EMPTY.match(body, token.end()) is None
            if depth > MAX_DEPTH:
                raise _invalid(f"nested over {MAX_DEPTH} levels")
        elif byte in b"]}":
            depth -= 1
        elif byte == 0x2C:
            values += 1
        if values > max_values:
            raise _invalid(f"more than {max_values} values")


def _count(body: bytes, byte: bytes) -> int:
    return sum(body.count(byte, at, at + _WINDOW) for at in range(0, len(body), _WINDOW))


def _has_infinity(value: Json) -> bool:
    """Whether a number overflowed. Looks at values: they are bounded in number, while bytes are many."""
    todo: list[Json] = [value]
    for item in todo:
        if isinstance(item, float):
            if math.isinf(item):
                return True
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
    return False
