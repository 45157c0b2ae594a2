"""Callers' JSON: what is let in is what Python's own reader lets in, strictly, with the same value."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any, Final, NoReturn

from trio_gateway.errors import Refused
from trio_gateway.wire import may_hold_infinity, read_object, with_finite_numbers
from trio_gateway.wire._json import MAX_DEPTH, join_members, raw_members

from ..target import Target, seed, split

PLENTY: Final = 100_000
_DECODER: Final[Any] = importlib.import_module(
    "json.decoder"
)  # whose stubs leave out what is written in Python
_SCANNER: Final[Any] = importlib.import_module("json.scanner")


class _Doubtful(ValueError):
    """What Python's reader lets in and ours must not."""


def check(data: bytes) -> None:
    """See `Target`. Option: the bound of the number of values, when it is not 255."""
    body, (values,) = split(data, 1)
    most = PLENTY if values == 255 else values
    ours, theirs = _ours(body, most), read_by_python(body, most)
    assert (ours is None) == (theirs is None), (ours, theirs)
    _expect_finite(body)
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
        return dict(read_object(body, most))
    except Refused as refused:
        problem = refused.problem
        assert (problem.status, problem.code) == (400, "invalid_json")
        assert problem.message.isascii()
        assert problem.message.isprintable()
        return None


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
        if _count(value) > most:
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
    tuple(seed(body, values) for body in _BODIES for values in (255, 3)),
    (
        b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\u00", b"\\ud800", b"\\udc00", b"1e308", b"1e309",
        b"-0", b".5",
        b"NaN", b"Infinity", b"-Infinity", b"null", b"true", b"false", b"\\", b'{"a":', b"\xc3\xa9", b"\xff",
        b"e+", b"E-", b"00", b"\xef\xbb\xbf", b"[[[[[[[[", b'{"a":{"a":{"a":',
    ),
)  # fmt: skip
