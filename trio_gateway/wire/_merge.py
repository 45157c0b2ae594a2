"""Joining deltas that wait for a slow reader: the same text in fewer, larger events. Pure.

Two events are joined if they are *plain* and neighbours, and differ in nothing but what may
be put together: the texts and lists that `_EVENT` names. Texts are joined as their JSON
bytes, so no character is read or written anew; everything else has to be the same, byte for
byte. An event that says more than that (a finish, usage, an error, a role that the last one
did not have, the name of a function) is passed as it is, and nothing is moved past it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from ..units import KiB

MOST_JOINED: Final = 4 * KiB  # bytes of an event that others were joined to: a slow reader waits for its end
MOST_SPLIT: Final = 24 * KiB  # bytes of a block that is looked at
MOST_CUTS: Final = 64  # events of a block that are taken apart, each of which takes 10 us

_EMPTY: Final = frozenset({b"null", b'""', b"[]", b"{}"})
_INSIDE_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class Joined(NamedTuple):
    """Whole events, as they wait from now on.

    Attributes:
        more: events that were joined to the one in here.
        old: something of what waited before is in it.
    """

    data: bytes
    more: int
    old: bool


class DeltaJoiner:
    """Joins what comes to what waits. Events must be JSON by its grammar.

    Args:
        most: bytes that a joined event may have.
    """

    def __init__(self, most: int = MOST_JOINED) -> None:
        self._most = most
        self._last = b""
        self._open: _Plain | None = None  # the last event that waits, if it can grow

    def join(self, last: bytes, block: bytes) -> list[Joined]:
        """Answer what is to wait in the place of ``last``, which waits, and ``block``, which follows it.

        Args:
            last: whole events, none of which was joined; or the last that was answered here.
        """
        out: list[Joined] = []
        if last is self._last:
            out.append(Joined(last, 0 if self._open is None else self._open.more, True))
        else:
            self._open = None
            self._add(last, out, old=True)
        self._add(block, out, old=False)
        self._last = out[-1].data
        return out

    def _add(self, block: bytes, out: list[Joined], *, old: bool) -> None:
        """Add the events of a block, joined to each other and to what is open as far as they can be."""
        if len(block) > MOST_SPLIT:
            self._open = None
            out.append(Joined(block, 0, old))
            return
        cuts, grew = 0, False
        for event in _events(block):
            opened = self._open
            fits = opened is not None and opened.size_with(event) <= self._most
            if opened is not None and fits and (text := opened.text_of(event)) is not None:
                opened.grow([text])
                grew = True
                continue
            plain = _cut(event) if cuts < MOST_CUTS and len(event) <= self._most else None
            cuts += 1
            if opened is not None and fits and plain is not None and plain.fixed == opened.fixed:
                opened.grow(plain.grown)
                grew = True
                continue
            if opened is not None and grew:
                out[-1] = Joined(opened.written(), opened.more, out[-1].old)
            self._open, grew = plain, False
            out.append(Joined(event, 0, old))
        if self._open is not None and grew:
            out[-1] = Joined(self._open.written(), self._open.more, out[-1].old)


class _Plain:
    """An event to which others can be joined, cut where it can grow.

    Attributes:
        fixed: what stands before, between and behind ``grown``; nothing else in it can differ.
        grown: texts without their quotes, lists without their brackets.
        more: events that were joined to it.
    """

    def __init__(self, fixed: tuple[bytes, ...], grown: list[bytes], event: bytes) -> None:
        self.fixed = fixed
        self.grown = grown
        self.more = 0
        self._frame = sum(map(len, fixed))
        self._size = self._frame + sum(map(len, grown))
        self._lists = [before.endswith(b"[") for before in fixed[:-1]]
        # What most events are: one text grows, and all around it is written as we write it.
        self._simple = self._lists == [False] and self.written() == event

    def size_with(self, event: bytes) -> int:
        """Answer how many bytes it may have with another one joined to it, commas between lists included."""
        return self._size + len(event) - self._frame + sum(self._lists)

    def text_of(self, event: bytes) -> bytes | None:
        """Answer the text of an event that is the same around it; None: look closer."""
        if not self._simple or len(event) < self._frame:
            return None
        before, behind = self.fixed
        if not (event.startswith(before) and event.endswith(behind)):
            return None
        text = event[len(before) : len(event) - len(behind)]
        # Up to here both are read alike, so the text ends at the first quote that is none of its own.
        if (b'"' in text or text.endswith(b"\\")) and _INSIDE_STRING.fullmatch(text) is None:
            return None
        return text

    def grow(self, grown: list[bytes]) -> None:
        """Put these behind what is in it."""
        for at, more in enumerate(grown):
            comma = b"," if self._lists[at] and more and self.grown[at] else b""
            self.grown[at] += comma + more
            self._size += len(comma) + len(more)
        self.more += 1

    def written(self) -> bytes:
        """Write it as it is by now."""
        parts = [self.fixed[0]]
        for text, behind in zip(self.grown, self.fixed[1:], strict=True):
            parts += [text, behind]
        return b"".join(parts)


def _events(block: bytes) -> Iterator[bytes]:
    """Cut a block behind each blank line."""
    at = 0
    while at < len(block):
        end = block.find(b"\n\n", at) + 2
        yield block[at : end if end > 1 else None]
        at = end if end > 1 else len(block)


# What a plain event may hold -------------------------------------------------------------------------


class _NotPlain(Exception):
    """The event says something that can not be joined."""


class _Cutter:
    """Writes an event without the blanks between its parts, and cuts it where it can grow."""

    def __init__(self) -> None:
        self._since = bytearray(b"data: ")
        self.fixed: list[bytes] = []
        self.grown: list[bytes] = []

    def end(self, event: bytes) -> _Plain:
        """Answer what came of it."""
        if not self.grown:
            raise _NotPlain
        return _Plain((*self.fixed, bytes(self._since + b"\n\n")), self.grown, event)

    def put(self, raw: bytes) -> None:
        """Take what has to be the same in both events."""
        self._since += raw

    def grow(self, raw: bytes) -> None:
        """Take a text, or a list, that can grow."""
        self.fixed.append(bytes(self._since + raw[:1]))
        self.grown.append(raw[1:-1] if raw.startswith(b'"') else raw[1:-1].strip(b" \t\r\n"))
        self._since = bytearray(raw[-1:])


_Rule = Callable[[_Cutter, bytes], None]


def _scalar(cutter: _Cutter, raw: bytes) -> None:
    """The same in both, and of no weight if it is said once."""
    if raw[:1] in b"[{" and raw not in _EMPTY:
        raise _NotPlain
    cutter.put(raw)


def _nothing(cutter: _Cutter, raw: bytes) -> None:
    """Empty, or it would be lost: clients put such things together, or expect each of them."""
    if raw not in _EMPTY:
        raise _NotPlain
    cutter.put(raw)


def _text(cutter: _Cutter, raw: bytes) -> None:
    """A string that grows, or nothing."""
    if raw.startswith(b'"'):
        cutter.grow(raw)
    else:
        _nothing(cutter, raw)


def _list(cutter: _Cutter, raw: bytes) -> None:
    """An array that grows, or nothing."""
    if raw.startswith(b"["):
        cutter.grow(raw)
    else:
        _nothing(cutter, raw)


def _object(rules: Mapping[str, _Rule], others: _Rule) -> _Rule:
    """An object whose members follow ``rules``, or nothing."""

    def rule(cutter: _Cutter, raw: bytes) -> None:
        if not raw.startswith(b"{"):
            _nothing(cutter, raw)
            return
        between = b"{"
        for key, value in _members(raw).items():
            cutter.put(between + _encode(key) + b":")
            rules.get(key, others)(cutter, bytes(value))
            between = b","
        cutter.put(b"{}" if between == b"{" else b"}")

    return rule


def _only(rule_of_item: _Rule) -> _Rule:
    """An array of one, or nothing."""

    def rule(cutter: _Cutter, raw: bytes) -> None:
        items = _items(raw) if raw.startswith(b"[") else ()
        if len(items) != 1:
            _nothing(cutter, raw)
            return
        cutter.put(b"[")
        rule_of_item(cutter, bytes(items[0]))
        cutter.put(b"]")

    return rule


_LOGPROBS: Final = _object(
    dict.fromkeys(("content", "refusal", "tokens", "token_logprobs", "top_logprobs", "text_offset"), _list),
    _nothing,
)
_FUNCTION: Final = _object({"arguments": _text}, _nothing)
_TOOL_CALL: Final = _object({"index": _scalar, "type": _scalar, "function": _FUNCTION}, _nothing)
_DELTA: Final = _object(
    {
        "role": _scalar,
        "content": _text,
        "reasoning": _text,
        "reasoning_content": _text,
        "refusal": _text,
        "tool_calls": _only(_TOOL_CALL),
    },
    _nothing,
)
_CHOICE: Final = _object(
    {
        "finish_reason": _nothing,
        "delta": _DELTA,
        "text": _text,
        "token_ids": _list,
        "logprobs": _LOGPROBS,
    },
    _scalar,
)
_EVENT: Final = _object({"choices": _only(_CHOICE), "usage": _nothing, "error": _nothing}, _scalar)


def _cut(event: bytes) -> _Plain | None:
    """Cut an event where it can grow; None: it is not plain."""
    if not event.startswith(b"data: {") or event.find(b"\n") != len(event) - 2:
        return None
    cutter = _Cutter()
    try:
        _EVENT(cutter, event[6:-2])
        return cutter.end(event)
    except (_NotPlain, msgspec.MsgspecError, RecursionError):
        return None
