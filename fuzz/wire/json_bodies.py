"""Callers' JSON: what is let in is what Python's own reader lets in, strictly, with the same value."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any, Final, NoReturn

from trio_gateway.errors import Refused
from trio_gateway.wire import may_hold_infinity, read_object, with_finite_numbers
from trio_gateway.wire._json import join_members, raw_members
from trio_gateway.wire._scan import MAX_DEPTH, MAX_FIELDS, scan_object

from ..target import Target, seed, split

PLENTY: Final = 100_000
LEAST_WINDOW: Final = 12  # bytes of an escaped surrogate pair
_DECODER: Final[Any] = importlib.import_module(
    "json.decoder"
)  # whose stubs leave out what is written in Python
_SCANNER: Final[Any] = importlib.import_module("json.scanner")


class _Doubtful(ValueError):
    """What Python's reader lets in and ours must not."""


def check(data: bytes) -> None:
    """See `Target`. Options: the bound of the number of values, when it is not 255; the scan's window."""
    body, (values, window) = split(data, 2)
    most = PLENTY if values == 255 else values
    ours, theirs = _ours(body, most), read_by_python(body, most)
    assert (ours is None) == (theirs is None), (ours, theirs)
    _expect_finite(body)
    _expect_same_of_scan(body, most, window + LEAST_WINDOW, theirs)
    if ours is None:
        return
    assert _same(ours, theirs)
    members = raw_members(body)
    assert list(members) == list(ours)
    assert all(_same(json.loads(raw), ours[key]) for key, raw in members.items())
    joined = join_members(members)
    assert raw_members(joined) == members
    assert _same(_ours(joined, most), ours)


def _ours(body: bytes, most: int) -> dict[str, Any] | None:
    try:
        return dict(read_object(body, most).value)
    except Refused as refused:
        _expect_clear(refused)
        return None


def _expect_clear(refused: Refused) -> str:
    problem = refused.problem
    assert (problem.status, problem.code) == (400, "invalid_json")
    assert problem.message.isascii()
    assert problem.message.isprintable()
    return problem.message


def _expect_same_of_scan(body: bytes, most: int, window: int, theirs: dict[str, Any] | None) -> None:
    """A scan in short steps finds what a parser finds, but for names and numbers longer than a step."""
    try:
        found = scan_object(body, most, window)
    except Refused as refused:
        message = _expect_clear(refused)
        assert theirs is None or any(words in message for words in ("too long", "too many blanks")), message
        return
    assert theirs is not None
    assert list(found.members) == list(theirs)
    for name, raw in found.members.items():
        assert _same(json.loads(bytes(raw)), theirs[name])
        if name in found.long:
            assert len(raw) > window
            assert _same(found.value[name], _kind(theirs[name]))
        else:
            assert _same(found.value[name], theirs[name])


def _kind(value: Any) -> Any:
    """What stands for a long value."""

    def empty(item: Any) -> Any:
        return None if item is None else True if isinstance(item, bool) else type(item)()

    return [empty(item) for item in value] if isinstance(value, list) else empty(value)


class _Python(json.JSONDecoder):
    """Python's reader in its form that is written in Python: coverage sees where it goes."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
        self.parse_string = _DECODER.py_scanstring
        self.scan_once = _SCANNER.py_make_scanner(self)


def read_by_python(body: bytes, most: int) -> dict[str, Any] | None:
    """Read with Python's reader, and refuse what the contract refuses beyond it; None: refused."""
    try:
        json.loads(body.decode("utf-8"))  # the one in C knows that a blank is no digit of an escape
        value = _Python().decode(body.decode("utf-8"))
        if not isinstance(value, dict):
            raise _Doubtful
        _expect_plain(value, 1)
        if _count(value) > most or len(value) > MAX_FIELDS:
            raise _Doubtful
    except (ValueError, RecursionError):
        return None
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise _Doubtful
    return dict(pairs)


def _no_constant(word: str) -> NoReturn:
    raise _Doubtful(word)


def _finite(text: str) -> float:
    if math.isinf(float(text)):
        raise _Doubtful
    return float(text)


def _expect_plain(value: Any, depth: int) -> None:
    """Refuse lone surrogates, and too many levels."""
    if isinstance(value, str):
        value.encode()  # UnicodeEncodeError is a ValueError
    elif isinstance(value, dict | list):
        if depth > MAX_DEPTH:
            raise _Doubtful
        for item in value.items() if isinstance(value, dict) else value:
            for part in item if isinstance(value, dict) else (item,):
                _expect_plain(part, depth + 1)


def _count(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(items) + sum(map(_count, items))


def _same(one: Any, other: Any) -> bool:
    """Equal, and of equal types at any depth: 1 is not true, and 1.0 is not 1."""
    return repr(one) == repr(other)


def _expect_finite(text: bytes) -> None:
    """What engines print beyond JSON becomes JSON; what is JSON stays."""
    finite = with_finite_numbers(text)
    assert may_hold_infinity(text) or finite == text
    if read_by_python(text, PLENTY) is not None:
        assert finite == text


_BODIES: Final = (
    b'{"model": "m1", "messages": [{"role": "user", "content": "hi"}], "stream": true}',
    b'{"a": 1e0, "b": 123456789012345678901234567890, "c": -0, "d": 1E+2, "e": [[], {}, null, false]}',
    b' \t\r\n{"\\u0061": "\\ud83d\\ude00 \\" \\\\ \\/ \xc3\xa9", "a b": {"x": {"y": [1, 2.5]}}}\n',
    b'{"a": 1, "a": 2}',
    b'{"a": 1, "\\u0061": 2}',
    b'{"a": NaN}',
    b'{"a": [Infinity, -Infinity, "NaN"]}',
    b'{"a": 1e999}',
    b'{"a": "\\ud800"}',
    b'{"a": "\xed\xa0\x80"}',
    b'\xef\xbb\xbf{"a": 1}',
    b'{"a": 1} {"b": 2}',
    b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}",
    b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"a": 01}',
    b'{"a": "\x01"}',
    b'[{"a": 1}]',
    b"",
)

TARGET: Final = Target(
    check,
    tuple(seed(body, *options) for body in _BODIES for options in ((255, 0), (255, 52), (3, 52))),
    (
        b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\u00", b"\\ud800", b"\\udc00", b"1e308", b"1e309",
        b"-0", b".5",
        b"NaN", b"Infinity", b"-Infinity", b"null", b"true", b"false", b"\\", b'{"a":', b"\xc3\xa9", b"\xff",
        b"e+", b"E-", b"00", b"\xef\xbb\xbf", b"[[[[[[[[", b'{"a":{"a":{"a":',
    ),
)  # fmt: skip
