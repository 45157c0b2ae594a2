"""Strict reading of a caller's JSON: what was checked here is what the engine gets.

jiter reads what is short (duplicate keys, invalid UTF-8, lone surrogates, NaN
and trailing bytes are its errors); depth, number of values and overflowing
numbers are checked here. What is long is read in short steps by `_scan`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

import jiter
import msgspec

from ..contract import RawJson
from ._scan import MAX_DEPTH, MAX_FIELDS, Json, JsonObject, invalid, scan_object

MANY_BYTES: Final = 256 * 1024
MANY_MARKS: Final = 10_000  # about as many values, each some 0.2 us

# A string without an end is one token too: looking for its end from each of its quotes would take for ever.
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_TOKEN = re.compile(_STRING + rb"|[\[\]{},]", re.DOTALL)
_EMPTY = re.compile(rb"[ \t\r\n]*+[\]}]")
_POSITION = re.compile(r"line (\d+) column (\d+)$")

# Alone: what stands in the middle of something else made no sense before, and must make none after.
# What is none is passed over in long strides, since one Infinity may stand among millions of numbers
# and strings; they have an end, so that a thread lets others in.
_IN_WORDS: Final = rb"[0-9A-Za-z_.+-]"
_PASSED: Final = rb'(?:[^"NI-]{1,4096}+|' + _STRING + rb"|-(?!Infinity)|I(?!nfinity)|N(?!aN)){1,1000}+"
_NO_JSON = re.compile(
    rb"%b|(?<!%b)(-?Infinity|NaN)(?!%b)|[NI-]%b*+" % (_PASSED, _IN_WORDS, _IN_WORDS, _IN_WORDS), re.DOTALL
)
_FINITE: Final = {b"-Infinity": b"-9999.0", b"Infinity": b"9999.0", b"NaN": b"null"}

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_object(body: bytes, max_values: int) -> JsonObject:
    """Read a caller's body, in a thread if it `needs_thread`.

    Raises:
        Refused: ``invalid_json``; the message names a position, never content.
    """
    if needs_thread(body):
        return scan_object(body, max_values)
    try:
        value = jiter.from_json(body, catch_duplicate_keys=True, allow_inf_nan=False)
    except ValueError as exc:
        raise invalid(_describe(str(exc))) from None
    if not isinstance(value, dict):
        raise invalid("the body is not a JSON object")
    _check_shape(body, max_values)
    if len(value) > MAX_FIELDS:
        raise invalid(f"more than {MAX_FIELDS} fields")
    if _has_infinity(value):
        raise invalid("a number is too large")
    return JsonObject(value, {**raw_members(body)})


def raw_members(body: RawJson) -> dict[str, bytes]:
    """Cut a JSON object into its top-level fields, each value as its own bytes.

    Raises:
        ValueError: the body is no JSON object.
    """
    return {key: bytes(raw) for key, raw in _members.decode(body).items()}


def join_members(members: dict[str, bytes]) -> bytes:
    """Write an object whose values are JSON already."""
    parts = [msgspec.json.encode(key) + b":" + raw for key, raw in members.items()]
    return b"{" + b",".join(parts) + b"}"


def object_pieces(members: Mapping[str, RawJson]) -> list[RawJson]:
    """Write an object in pieces, so that what is long is not copied."""
    pieces: list[RawJson] = []
    short = bytearray()
    for key, raw in members.items():
        short += (b"," if pieces or short else b"{") + msgspec.json.encode(key) + b":"
        if isinstance(raw, bytes):
            short += raw
        else:
            pieces += [bytes(short), raw]
            short.clear()
    pieces.append(bytes(short) + (b"}" if pieces or short else b"{}"))
    return pieces


def is_null(raw: RawJson) -> bool:
    """Whether a value, without blanks around it, is null."""
    return raw == b"null"


def may_hold_infinity(data: bytes) -> bool:
    """Whether an engine's JSON may hold what JSON has no word for."""
    return b"Infinity" in data or b"NaN" in data


def with_finite_numbers(data: bytes) -> bytes:
    """Write infinities as the -9999.0 that OpenAI uses for logprobs (or 9999.0), and NaN as null.

    Engines print them as Python does; most clients then fail on the whole event.
    """
    return _NO_JSON.sub(lambda found: found[0] if found[1] is None else _FINITE[found[1]], data)


def needs_thread(body: bytes) -> bool:
    """Whether reading this JSON may hold the loop for more than a few milliseconds."""
    if len(body) <= MANY_MARKS:
        return False
    return len(body) > MANY_BYTES or sum(map(body.count, (b",", b"{", b"["))) > MANY_MARKS


def _describe(error: str) -> str:
    """Keep jiter's kind of error and position, and drop what it quotes of the body."""
    if error.startswith("recursion limit"):
        return f"nested over {MAX_DEPTH} levels"
    place = _POSITION.search(error)
    twice = error.startswith("Detected duplicate key")
    kind = "a key stands twice in one object" if twice else "not valid JSON"
    return f"the body is {kind}" if place is None else f"{kind} at line {place[1]} column {place[2]}"


def _check_shape(body: bytes, max_values: int) -> None:
    """Count in a body that is valid and not long."""
    opens = body.count(b"{") + body.count(b"[")
    # Brackets and commas inside strings only raise these bounds.
    if opens <= MAX_DEPTH and (len(body) < max_values or opens + body.count(b",") < max_values):
        return
    depth = values = 0
    for token in _TOKEN.finditer(body):
        byte = body[token.start()]
        if byte in b"[{":
            depth += 1
            values += _EMPTY.match(body, token.end()) is None
            if depth > MAX_DEPTH:
                raise invalid(f"nested over {MAX_DEPTH} levels")
        elif byte in b"]}":
            depth -= 1
        elif byte == 0x2C:
            values += 1
        if values > max_values:
            raise invalid(f"more than {max_values} values")


def _has_infinity(value: Json) -> bool:
    """Whether a number overflowed. Looks at values: they are bounded in number, while bytes are many."""
    todo: list[Json] = [value]
    for item in todo:
        kind = type(item)  # what a parser makes is of no type derived from these
        if kind is str:
            continue
        if kind is dict:
            todo.extend(item.values())  # type: ignore[union-attr]
        elif kind is list:
            todo.extend(item)  # type: ignore[arg-type]
        elif kind is float and math.isinf(item):  # type: ignore[arg-type]
            return True
    return False
