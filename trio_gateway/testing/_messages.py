"""Strict HTTP/1.1 reading for the fakes: bytes in, heads and bodies out. Sans-IO.

Written apart from the package's own parsers on purpose. A test that reads with
the code under test cannot see a fault that both sides share; these readers judge
what is on the wire and repair nothing. Sections are those of RFC 9112.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

MAX_HEAD_BYTES: Final = 256 * 1024  # four times what the gateway takes: room for tests of its bound
MAX_CHUNK_LINE_BYTES: Final = 4 * 1024

Framing: TypeAlias = Literal["none", "sized", "chunked", "close"]
Fields: TypeAlias = tuple[tuple[str, str], ...]

_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(;[^\r\n]*)?\Z")
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class MessageError(ValueError):
    """Bytes that break HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class MessageHead:
    """A start line in its three parts, and the fields with names in lower case."""

    start: tuple[str, str, str]
    fields: Fields

    def get(self, name: str) -> str | None:
        """The field's value, several joined by a comma; None where it is absent."""
        values = self.all(name)
        return ", ".join(values) if values else None

    def all(self, name: str) -> list[str]:
        """Every value of a field, in order."""
        return [value for key, value in self.fields if key == name.lower()]


def parse_head(raw: bytes) -> MessageHead:
    """Parse a head without its final empty line.

    Raises:
        MessageError: a control character, a bad name, a folded line, or a start
            line of fewer than two parts.
    """
    lines = raw.split(b"\r\n")
    for line in lines:
        if _CONTROL.search(line):
            raise MessageError(f"control character in {line[:80]!r}")
    parts = lines[0].decode("latin-1").split(" ", 2)
    if len(parts) < 2:
        raise MessageError(f"no start line: {lines[0][:80]!r}")
    first, second, third = [*parts, ""][:3]
    return MessageHead((first, second, third), tuple(_parse_field(line) for line in lines[1:]))


def _parse_field(line: bytes) -> tuple[str, str]:
    name, colon, value = line.partition(b":")
    if not colon or not _TOKEN.match(name):
        raise MessageError(f"not a header field: {line[:80]!r}")
    return name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")


def body_framing(head: MessageHead, *, unmarked: Framing) -> tuple[Framing, int]:
    """Tell how the body is delimited, and its size if that is told (6.3).

    Args:
        head: whose body it is.
        unmarked: the answer where neither field is there.

    Raises:
        MessageError: both fields, a repeated or malformed one, or a coding
            other than ``chunked``.
    """
    codings, lengths = head.all("transfer-encoding"), head.all("content-length")
    if codings and lengths:
        raise MessageError("both transfer-encoding and content-length")
    if codings:
        if codings != ["chunked"]:
            raise MessageError(f"transfer-encoding {codings}")
        return "chunked", 0
    if not lengths:
        return unmarked, 0
    if len(lengths) > 1 or not re.fullmatch(r"[0-9]+", lengths[0]):
        raise MessageError(f"content-length {lengths}")
    return "sized", int(lengths[0])


class BodyReader:
    """Collects one body.

    Attributes:
        data: what arrived so far, without framing.
        complete: whether the framing says that this is all.
        chunks: how many chunks of a chunked body arrived whole.
    """

    def __init__(self, framing: Framing, size: int = 0) -> None:
        self.framing = framing
        self.data = bytearray()
        self.complete = framing == "none" or (framing == "sized" and size == 0)
        self.chunks = 0
        self._left = size
        self._part: Literal["size", "data", "after", "trailer"] = "size"

    def feed(self, buffer: bytearray) -> None:
        """Take what belongs to this body out of the front of `buffer`.

        Raises:
            MessageError: broken chunk framing.
        """
        if self.framing == "chunked":
            while not self.complete and self._step(buffer):
                pass
        elif self.framing == "close":
            self._take(buffer, len(buffer))
        elif not self.complete:
            self._take(buffer, self._left)
            self.complete = self._left == 0

    def end_of_stream(self) -> None:
        """Say that the connection ended, which completes a close-delimited body."""
        self.complete = self.complete or self.framing == "close"

    def _take(self, buffer: bytearray, size: int) -> None:
        piece = buffer[:size]
        self.data += piece
        self._left -= len(piece)
        del buffer[:size]

    def _step(self, buffer: bytearray) -> bool:
        """Advance by one part of a chunk; answer False when bytes are missing."""
        if self._part == "data":
            self._take(buffer, self._left)
            if self._left:
                return False
            self._part = "after"
            return True
        line = _take_line(buffer, MAX_CHUNK_LINE_BYTES)
        if line is None:
            return False
        if self._part == "size":
            self._left = _chunk_size(line)
            self._part = "data" if self._left else "trailer"
        elif self._part == "after":
            if line:
                raise MessageError(f"chunk longer than its size: {line[:40]!r}")
            self.chunks += 1
            self._part = "size"
        elif line:
            _parse_field(line)
        else:
            self.complete = True
        return True


def _chunk_size(line: bytes) -> int:
    match = _CHUNK_LINE.match(line)
    if match is None:
        raise MessageError(f"not a chunk size: {line[:40]!r}")
    return int(match.group(1), 16)


def _take_line(buffer: bytearray, limit: int) -> bytes | None:
    end = buffer.find(b"\r\n")
    if end < 0:
        if len(buffer) > limit:
            raise MessageError("line without an end")
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 2]
    return line


def take_head(buffer: bytearray) -> MessageHead | None:
    """Take a whole head out of the front of `buffer`; None while bytes are missing.

    Raises:
        MessageError: as `parse_head`, or a head beyond `MAX_HEAD_BYTES`.
    """
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        if len(buffer) > MAX_HEAD_BYTES:
            raise MessageError("head without an end")
        return None
    raw = bytes(buffer[:end])
    del buffer[: end + 4]
    return parse_head(raw)


def json_object(body: bytes) -> dict[str, object]:
    """Read a body that must be a JSON object.

    Raises:
        MessageError: it is not.
    """
    try:
        value = json.loads(body)
    except ValueError as exc:
        raise MessageError(f"not JSON: {body[:200]!r}") from exc
    if not isinstance(value, dict):
        raise MessageError(f"no JSON object: {body[:200]!r}")
    return value
