"""HTTP/1.1 requests read slowly, a whole connection at once, for the fuzz target to compare with.

Written apart from the package's reading on purpose, line by line from RFC 9112 and
the house's stricter rules, without any thought of speed or of cut input.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Ending = Literal["fin", "silence"]

_LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/(1\.[01])\Z")
_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):(.*)\Z", re.DOTALL)
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[^\x00-\x08\x0a-\x1f\x7f]*)?\Z")
_ONCE: Final = (
    b"content-length",
    b"transfer-encoding",
    b"host",
    b"authorization",
    b"content-type",
    b"x-api-key",
)


@dataclass(frozen=True)
class Limits:
    """Bounds, in bytes and counts."""

    head_bytes: int
    head_count: int
    body_bytes: int
    kept_rest: int
    chunk_line: int
    trailer: int


@dataclass(frozen=True)
class Expected:
    """One answer.

    Attributes:
        statuses: those that are right; several where a request is wrong in several ways.
        told: what the handler read, if the body was asked for and is whole.
        interim: 100 comes in front.
    """

    method: str
    statuses: tuple[int, ...]
    told: tuple[str, str, bytes] | None = None
    interim: bool = False


@dataclass(frozen=True)
class _Head:
    method: str
    target: str
    body: int | None  # None: chunked
    keep_alive: bool
    expects: bool


@dataclass(frozen=True)
class _Body:
    """A body in front of ``data``: whole up to ``end``, malformed, or cut."""

    data: bytes
    end: int
    state: Literal["whole", "malformed", "cut"]


def expected_answers(data: bytes, ending: Ending, limits: Limits) -> list[Expected]:
    """Say what a connection that sends ``data`` and then ends so has to get back."""
    answers: list[Expected] = []
    at = 0
    while True:
        while data.startswith(b"\r\n", at):
            at += 2
        if at == len(data):
            return answers  # blank lines are no request
        end = data.find(b"\r\n\r\n", at)
        seen = data[at : end + 4] if end >= 0 else data[at:]
        wrong = _wrong_characters(seen, whole=end >= 0)
        if len(seen) > limits.head_bytes:
            return [*answers, Expected("", (431, 400) if wrong else (431,))]
        if wrong:
            return [*answers, Expected("", (400,))]
        if end < 0:
            return [*answers, Expected("", (408,))] if ending == "silence" else answers
        head = _read_head(seen, limits)
        if isinstance(head, int):
            return [*answers, Expected("", (head,))]
        answer, at = _answer(head, data, end + 4, ending, limits)
        answers.append(answer)
        if at < 0:
            return answers


def _wrong_characters(seen: bytes, *, whole: bool) -> bool:
    if not whole and seen.endswith(b"\r"):
        seen = seen[:-1]
    inside = b"".join(seen.split(b"\r\n"))
    return any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in inside)


def _read_head(raw: bytes, limits: Limits) -> _Head | int:
    """Read a head, or answer the status that refuses it."""
    first, *lines = raw[:-4].split(b"\r\n")
    if len(lines) > limits.head_count:
        return 431
    line = _LINE.match(first)
    fields = [_FIELD.match(field) for field in lines]
    if line is None or None in fields:
        return 400
    found: dict[bytes, list[bytes]] = {}
    for field in fields:
        assert field is not None
        found.setdefault(field[1].lower(), []).append(field[2].strip(b" \t"))
    modern = line[3] == b"1.1"
    if any(len(found.get(name, ())) > 1 for name in _ONCE) or (modern and b"host" not in found):
        return 400
    length, coding = found.get(b"content-length"), found.get(b"transfer-encoding")
    if length is not None and (coding is not None or not re.fullmatch(rb"[0-9]{1,18}", length[0])):
        return 400
    if coding is not None and (coding[0].lower() != b"chunked" or not modern):
        return 400
    if _two_keys(found):
        return 400
    tokens = {token.strip().lower() for value in found.get(b"connection", ()) for token in value.split(b",")}
    return _Head(
        line[1].decode(),
        line[2].decode(),
        None if coding else int(length[0]) if length else 0,
        b"close" not in tokens and (modern or b"keep-alive" in tokens),
        modern and any(value.lower() == b"100-continue" for value in found.get(b"expect", ())),
    )


def _two_keys(found: dict[bytes, list[bytes]]) -> bool:
    named, bearer = found.get(b"x-api-key"), found.get(b"authorization")
    if named is None or bearer is None:
        return False
    scheme, _, key = bearer[0].partition(b" ")
    return scheme.lower() == b"bearer" and key.strip() != named[0].strip()


def _answer(head: _Head, data: bytes, at: int, ending: Ending, limits: Limits) -> tuple[Expected, int]:
    """What one request gets, and where the next one begins (-1: the connection ends)."""
    body = _read_body(head.body, data, at, limits)
    expects = head.expects and head.body != 0
    kept = body.end if head.keep_alive and body.state == "whole" else -1
    if not head.target.startswith("/read"):  # the handler does not want the body
        status = 200 if head.target.startswith("/drop") else 404
        too_long = head.body is not None and head.body > limits.kept_rest
        return Expected(head.method, (status,)), -1 if expects or too_long else kept
    if head.body is not None and head.body > limits.body_bytes:
        too_long = head.body > limits.kept_rest
        return Expected(head.method, (413,)), -1 if expects or too_long else kept
    late = 400 if ending == "fin" else 408
    statuses: tuple[int, ...] = ({"malformed": 400, "cut": late, "whole": 200}[body.state],)
    if len(body.data) > limits.body_bytes:
        statuses = (413, 400) if body.state == "malformed" else (413,)
    told = (head.method, head.target, body.data) if statuses == (200,) else None
    return Expected(head.method, statuses, told, expects), kept


def _read_body(size: int | None, data: bytes, at: int, limits: Limits) -> _Body:
    if size is not None:
        end = at + size
        return _Body(data[at:end], end, "whole" if end <= len(data) else "cut")
    body = b""
    while True:
        line = _line(data, at, limits.chunk_line)
        if not isinstance(line, bytes):
            return _Body(body, -1, line)
        found = _SIZE.match(line)
        if found is None:
            return _Body(body, -1, "malformed")
        at += len(line) + 2
        left = int(found[1], 16)
        if not left:
            return _read_trailer(body, data, at, limits)
        body += data[at : at + left]
        at += left
        behind = _line(data, at, limits.chunk_line)
        if behind != b"":
            return _Body(body, -1, "malformed" if isinstance(behind, bytes) else behind)
        at += 2


def _read_trailer(body: bytes, data: bytes, at: int, limits: Limits) -> _Body:
    begin = at
    while True:
        line = _line(data, at, limits.chunk_line)
        if not isinstance(line, bytes):
            return _Body(body, -1, line)
        at += len(line) + 2
        if at - begin > limits.trailer or (line and not _plain_field(line)):
            return _Body(body, -1, "malformed")
        if not line:
            return _Body(body, at, "whole")


def _plain_field(line: bytes) -> bool:
    return _FIELD.match(line) is not None and not _wrong_characters(line, whole=True)


def _line(data: bytes, at: int, most: int) -> bytes | Literal["malformed", "cut"]:
    """One line of framing without its end."""
    end = data.find(b"\n", at)
    line = data[at : end + 1] if end >= 0 else data[at:]
    if len(line) > most:
        return "malformed"
    if end < 0:
        return "cut"
    return line[:-2] if line.endswith(b"\r\n") else "malformed"
