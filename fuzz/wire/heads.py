"""Heads: any cut gives the same, both parsers say the same, and a third reader agrees with what is let in."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trio_gateway.errors import WireError
from trio_gateway.testing import body_framing, parse_head
from trio_gateway.wire import (
    CHUNKED,
    HeadBuffer,
    RequestHead,
    ResponseHead,
    parse_request_head,
    parse_response_head,
    write_request_head,
)
from trio_gateway.wire._head_parser import H11, PARSER, HeadParser

from ..smuggling import CASES
from ..target import Target, cuts, seed, split

ROOMY: Final = 1 << 20
MOST_HEADERS: Final = 12

Head = RequestHead | ResponseHead


def check(data: bytes) -> None:
    """See `Target`. Options: whether it is an engine's head, and an eighth of the bound, less 1."""
    raw, (kind, bound) = split(data, 2)
    response, bound = bool(kind & 1), bound * 8 + 8
    whole, bounded = _read([raw], ROOMY, response), _read([raw], bound, response)
    for pieces in cuts(raw):
        assert _read(pieces, ROOMY, response) == whole
        # Of a head that is wrong and too long, whichever is seen first is told.
        assert _read(pieces, bound, response) == bounded


def _read(pieces: list[bytes], bound: int, response: bool) -> tuple[list[Head], bool]:
    """Read a connection's heads one after the other; answers them, and whether the last was wrong."""
    buffer = HeadBuffer(bound)
    found: list[Head] = []
    for piece in pieces:
        buffer.feed(piece)
        try:
            while (raw := _next(buffer)) is not None:
                assert len(raw) <= bound
                found.append(_response(raw) if response else _request(raw))
        except WireError:
            return found, True
        assert len(buffer) <= bound
    return found, False


def _next(buffer: HeadBuffer) -> bytes | None:
    buffer.skip_blank_lines()
    return buffer.next_head()


def _request(raw: bytes) -> RequestHead:
    head = _agreed(_try_request(raw, PARSER), _try_request(raw, H11))
    assert isinstance(head, RequestHead)
    _expect_third_reader(raw, head, max(head.body, 0), head.body == CHUNKED)
    if head.version == b"1.1":
        again = write_request_head(head.method.encode(), head.target.encode(), list(head.headers))
        assert parse_request_head(again, MOST_HEADERS) == head
    return head


def _response(raw: bytes) -> ResponseHead:
    head = _agreed(_try_response(raw, PARSER), _try_response(raw, H11))
    assert isinstance(head, ResponseHead)
    if head.status >= 200 and head.status not in (204, 304):
        _expect_third_reader(raw, head, max(head.body, 0), head.body == CHUNKED)
    return head


def _try_request(raw: bytes, parser: HeadParser) -> Head | WireError:
    try:
        return parse_request_head(raw, MOST_HEADERS, parser)
    except WireError as exc:
        return exc


def _try_response(raw: bytes, parser: HeadParser) -> Head | WireError:
    try:
        return parse_response_head(raw, MOST_HEADERS, parser)
    except WireError as exc:
        return exc


def _agreed(one: Head | WireError, other: Head | WireError) -> Head:
    """Both parsers let the same head in, or neither lets it in."""
    if isinstance(one, WireError):
        assert isinstance(other, WireError), (one, other)
        assert str(one).isascii()
        assert str(one).isprintable()
        raise one
    assert _told(one) == _told(other)
    return one


def _told(head: Head | WireError) -> tuple[object, ...]:
    """All of a head, but for the letters of ``Transfer-Encoding: Chunked``, which h11 makes small."""
    assert not isinstance(head, WireError), head
    rest = [getattr(head, name) for name in head.__slots__ if name != "headers"]
    return *rest, [(n, v.lower() if n == b"transfer-encoding" else v) for n, v in head.headers]


def _expect_third_reader(raw: bytes, head: Head, size: int, chunked: bool) -> None:
    """A reader that was written apart sees the same fields, and the same end of the body."""
    read = parse_head(raw[:-4])
    fields = tuple((name.encode(), value.encode("latin-1")) for name, value in read.fields)
    assert _told(replace(head, headers=fields)) == _told(head)
    small = tuple((n, v.lower() if n == "transfer-encoding" else v) for n, v in read.fields)
    framing, told = body_framing(replace(read, fields=small), unmarked="none")
    assert (framing == "chunked", told) == (chunked, size)


_REQUESTS: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 5\r\n\r\n",
    b"\r\n\r\nGET /a?b=c HTTP/1.0\r\nConnection: keep-alive, x\r\n\r\nGET / HTTP/1.1\r\nhost:\r\n\r\n",
    b"PUT * HTTP/1.1\r\nHost: g\r\nTransfer-Encoding:\tChunked \r\nExpect: 100-continue\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: g\r\nx: a\r\n b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: g\r\nx: \xff\xc3\xa4 \t\r\nX:\r\n\r\n",
)
_RESPONSES: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nX: y\r\n\r\n",
    b"HTTP/1.1 204\r\nConnection: close\r\n\r\nHTTP/1.1 503 \xff\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n",
)

TARGET: Final = Target(
    check,
    (
        *(seed(head, 0, bound) for head in _REQUESTS for bound in (255, 8)),
        *(seed(head, 1, bound) for head in _RESPONSES for bound in (255, 8)),
        *(seed(case.raw[:600], 0, 255) for case in CASES),
    ),
    (
        b"\r\n", b"\r\n\r\n", b": ", b"Content-Length: ", b"Transfer-Encoding: chunked", b"Host: g\r\n",
        b"Connection: ", b"close", b"keep-alive", b"Expect: 100-continue", b" HTTP/1.1\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"GET / HTTP/1.1\r\n", b"\x00", b"\x0b", b"\x85", b"\xa0", b"Upgrade: websocket", b"Authorization: ",
    ),
)  # fmt: skip
