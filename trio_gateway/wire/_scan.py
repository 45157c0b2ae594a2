"""Strict reading of a long JSON object in short steps (RFC 8259). Sans-IO.

A parser in C holds the interpreter until it has read a whole body, and the loop
with it, even from a thread. So a long body is checked here token by token, no
step longer than a window, and only what is short is parsed: of a long value,
what kind of items it has is all that anybody asks.
"""

from __future__ import annotations

import codecs
import math
import re
from dataclasses import dataclass, field
from typing import Final, NoReturn

import jiter

from ..contract import RawJson
from ..errors import Problem, Refused

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_DEPTH: Final = 100
MAX_FIELDS: Final = 1000  # at the top: each of them is handled by itself, for every attempt
WINDOW: Final = 64 * 1024  # bytes looked at in one step
_MAX_DIGITS: Final = 4300  # of an integer: what Python's own reader takes, and so most engines
_CUT: Final = 2  # bytes at a window's end that may belong to a number: the half of an exponent
_MAYBE_HUGE: Final = 300  # digits; shorter ones are finite
_STEP: Final = (
    16 * 1024
)  # bytes of a long string at a time: if all are escapes, each takes as long as ten others
# One for all, since new ones by the thousand would call the collector of circles. Nobody changes them.
_AN_OBJECT: Final[dict[str, Json]] = {}
_AN_ARRAY: Final[list[Json]] = []
_NAMES_IN_A_SET: Final = 16 * 1024  # a larger set takes milliseconds to grow

_SPACE: Final = rb"[ \t\n\r]*+"
_HEX: Final = rb"[0-9a-fA-F]"
# Halves of surrogate pairs stand for nothing alone, and engines read them differently.
_CHARACTERS: Final = (
    rb"(?:[^\"\\\x00-\x1f]++|\\(?:[\"\\/bfnrt]|u(?![dD][89a-fA-F])"
    + _HEX
    + rb"{4}|u[dD][89abAB]"
    + _HEX
    + rb"{2}\\u[dD][c-fC-F]"
    + _HEX
    + rb"{2}))*+"
)
_STRING: Final = rb'"' + _CHARACTERS + rb'"'
_NUMBER: Final = rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"

_space = re.compile(_SPACE)
_characters = re.compile(_CHARACTERS)
_name = re.compile(_SPACE + rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE)
_value = re.compile(_SPACE + rb"(?:(" + _STRING + rb")|(" + _NUMBER + rb")|([{\[])|(true|false)|(null))")
# Token ids come in long rows, which need no look at each of them.
_integers = re.compile(rb"(?:" + _SPACE + rb"-?(?:0|[1-9][0-9]{0,18})" + _SPACE + rb",)++")
_after = re.compile(_SPACE + rb"([,}\]])")
_TEXT, _DIGITS, _OPEN, _TRUTH, _NULL = range(1, 6)  # groups of `_value`


@dataclass(slots=True)  # frozen, its fields would be set by calls
class JsonObject:
    """A body that is an object.

    Attributes:
        value: the fields as Python has them; a long one is only an empty value of its type, and a
            long array one that holds such values.
        members: the fields as the caller's bytes, in order, without blanks around them.
        long: names of the fields whose value was not parsed.
    """

    value: dict[str, Json]
    members: dict[str, RawJson]
    long: frozenset[str] = frozenset()


def scan_object(body: bytes, max_values: int, window: int = WINDOW) -> JsonObject:
    """Read an object.

    Args:
        window: most bytes that are looked at, or parsed, in one step.

    Raises:
        Refused: ``invalid_json``; the message names a position, never content.
    """
    _check_text(body, window)
    return _Scan(body, max_values, window).run()


def invalid(message: str) -> Refused:
    """Say what is wrong with a body."""
    return Refused(Problem.of("invalid_json", message))


def _check_text(body: bytes, window: int) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for at in range(0, len(body), window):
            decoder.decode(body[at : at + window])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise invalid("the body is not UTF-8") from None


class _Names:
    """The names of one object, each of which may stand there once."""

    __slots__ = ("_sets",)

    def __init__(self) -> None:
        self._sets: list[set[bytes | str]] = [set()]

    def add(self, name: bytes | str) -> bool:
        """Take a name; False: it is there already."""
        for known in self._sets:
            if name in known:
                return False
        if len(known) >= _NAMES_IN_A_SET:
            known = set()
            self._sets.append(known)
        known.add(name)
        return True

    def forget(self) -> None:
        """Let go of all names, in short steps."""
        for known in self._sets:
            known.clear()


@dataclass(slots=True)
class _Member:
    """A field at the top: where its value begins and ends, and what it and its items are."""

    name: str
    start: int = 0
    end: int = 0
    kind: Json = None
    items: list[Json] = field(default_factory=list)


class _Scan:
    """One pass over one body. ``_at`` is the next byte to look at."""

    def __init__(self, body: bytes, max_values: int, window: int) -> None:
        self._body = body
        self._window = window
        self._max_values = max_values
        self._values = 0
        self._at = 0
        self._names: _Names | None = None  # of the object that is read; None: it is an array
        self._stack: list[_Names | None] = []  # of the containers around it
        self._members: list[_Member] = []

    def run(self) -> JsonObject:
        """See `scan_object`."""
        self._skip_space()
        if not self._body.startswith(b"{", self._at):
            raise invalid("the body is not a JSON object")
        self._at += 1
        if self._enter(is_object=True):
            self._read_items()
        self._skip_space()
        if self._at < len(self._body):
            self._fail()
        return self._made()

    def _read_items(self) -> None:
        while True:
            if self._names is not None:
                self._read_name(self._names)
            else:
                self._skip_integers()
            if self._read_value():
                continue
            if not self._leave():
                return

    def _enter(self, *, is_object: bool) -> bool:
        """Go into a container whose bracket was read; False: it is empty, and left already."""
        found = _after.match(self._body, self._at, self._at + self._window)
        if found is None and self._skip_space():
            found = _after.match(self._body, self._at, self._at + self._window)
        if found is not None and found[1] == (b"}" if is_object else b"]"):
            if len(self._stack) >= MAX_DEPTH:
                raise invalid(f"nested over {MAX_DEPTH} levels")
            self._at = found.end()
            return False
        self._stack.append(self._names)
        if len(self._stack) > MAX_DEPTH:
            raise invalid(f"nested over {MAX_DEPTH} levels")
        self._names = _Names() if is_object else None
        return True

    def _leave(self) -> bool:
        """Read what stands behind a value, out of all containers that end there; False: it was the last."""
        body, window = self._body, self._window
        while True:
            if len(self._stack) == 1:
                self._members[-1].end = self._at
            found = _after.match(body, self._at, self._at + window)
            if found is None:
                self._skip_space()
                found = _after.match(body, self._at, self._at + window) or self._fail()
            mark = found[1]
            if mark != b"," and mark != (b"]" if self._names is None else b"}"):
                self._at = found.start(1)
                self._fail()
            self._at = found.end()
            if mark == b",":
                return True
            if self._names is not None:
                self._names.forget()
            self._names = self._stack.pop()
            if not self._stack:
                return False

    def _read_name(self, names: _Names) -> None:
        found = _name.match(self._body, self._at, self._at + self._window)
        if found is None:
            self._skip_space()
            found = _name.match(self._body, self._at, self._at + self._window) or self._fail_at_name()
        quoted = found[1]
        name: bytes | str = jiter.from_json(quoted) if b"\\" in quoted else quoted[1:-1].decode()
        if not names.add(name):
            self._at = found.start(1)
            self._fail("a key stands twice in one object")
        self._at = found.end()
        if len(self._stack) == 1:
            if len(self._members) == MAX_FIELDS:
                raise invalid(f"more than {MAX_FIELDS} fields")
            assert isinstance(name, str)
            self._members.append(_Member(name))

    def _fail_at_name(self) -> NoReturn:
        """Tell a name that is too long, or has too many blanks around it, from what is none."""
        start = self._at
        if self._body.startswith(b'"', start):
            self._skip_long_string()
            if self._at - start >= self._window:
                self._at = start
                self._fail("a field's name is too long")
        self._skip_space()
        if self._body.startswith(b":", self._at):
            self._fail("too many blanks")
        self._fail()

    def _skip_integers(self) -> None:
        """Go to the last of a row of short integers."""
        while (found := _integers.match(self._body, self._at, self._at + self._window)) is not None:
            count = self._body.count(b",", self._at, found.end())
            self._count(count)
            self._at = found.end()
            if len(self._stack) == 2:
                self._members[-1].items += [0] * count

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > self._max_values:
            raise invalid(f"more than {self._max_values} values")

    def _read_value(self) -> bool:
        """Read a value; True: it is a container that is not empty, and its items come next."""
        self._count(1)
        if len(self._stack) == 1:
            self._skip_space()
            self._members[-1].start = self._at
        end = self._at + self._window
        found = _value.match(self._body, self._at, end)
        if found is None or found.end() >= end - _CUT:
            self._skip_space()
            if self._body.startswith(b'"', self._at):
                self._note_kind("")
                self._skip_long_string()
                return False
            found = _value.match(self._body, self._at, self._at + self._window) or self._fail()
        self._at = found.end()
        return self._take(found)

    def _take(self, found: re.Match[bytes]) -> bool:
        group = found.lastindex
        if group == _TEXT:
            self._note_kind("")
        elif group == _OPEN:
            is_object = found[_OPEN] == b"{"
            self._note_kind(_AN_OBJECT if is_object else _AN_ARRAY)
            return self._enter(is_object=is_object)
        elif group == _DIGITS:
            self._note_kind(self._check_number(found))
        else:
            self._note_kind(None if group == _NULL else True)
        return False

    def _check_number(self, found: re.Match[bytes]) -> Json:
        digits = found[_DIGITS]
        start, end = found.span(_DIGITS)
        if end - start >= self._window - _CUT:
            self._at = start
            self._fail("a number is too long")
        if digits.lstrip(b"-").isdigit():
            if len(digits) > _MAX_DIGITS:
                self._at = start
                self._fail("a number is too long")
            return 0
        if (len(digits) > _MAYBE_HUGE or b"e" in digits or b"E" in digits) and math.isinf(float(digits)):
            raise invalid("a number is too large")
        return 0.0

    def _note_kind(self, kind: Json) -> None:
        """Remember what the value of a field at the top is, or an item of it."""
        depth = len(self._stack)
        if depth == 1:
            self._members[-1].kind = kind
        elif depth == 2 and self._names is None:
            self._members[-1].items.append(kind)

    def _skip_space(self) -> bool:
        """Go to what is no blank; answers whether there were blanks."""
        begun = self._at
        while True:
            end = self._at + self._window
            found = _space.match(self._body, self._at, end)
            assert found is not None
            self._at = found.end()
            if self._at < end:
                return self._at > begun

    def _skip_long_string(self) -> None:
        """Go behind a string of any length, which begins here."""
        body, step = self._body, min(self._window, _STEP)
        self._at += 1
        while True:
            found = _characters.match(body, self._at, self._at + step)
            assert found is not None
            if body.startswith(b'"', found.end()):
                self._at = found.end() + 1
                return
            if found.end() == self._at:
                self._fail()
            self._at = found.end()

    def _fail(self, what: str = "not valid JSON") -> NoReturn:
        line, begin = 1, 0
        for at in range(0, self._at, self._window):
            end = min(at + self._window, self._at)
            line += self._body.count(b"\n", at, end)
            begin = self._body.rfind(b"\n", at, end) + 1 or begin
        raise invalid(f"{what} at line {line} column {self._at - begin + 1}")

    def _made(self) -> JsonObject:
        """Parse what is short, and let the kind of what is long stand for it."""
        value: dict[str, Json] = {}
        members: dict[str, RawJson] = {}
        for member in self._members:
            if member.end - member.start <= self._window:
                raw = members[member.name] = self._body[member.start : member.end]
                value[member.name] = jiter.from_json(raw)
            else:
                members[member.name] = memoryview(self._body)[member.start : member.end]
                value[member.name] = member.items if isinstance(member.kind, list) else member.kind
        long = frozenset(name for name, raw in members.items() if isinstance(raw, memoryview))
        return JsonObject(value, members, long)
