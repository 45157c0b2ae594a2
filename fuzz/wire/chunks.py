"""Message bodies: any cut gives the same bytes and the same end, and other readers agree where they end."""

from __future__ import annotations

from typing import Final

import h11

from trio_gateway.errors import EngineProtocolError
from trio_gateway.testing import BodyReader as ThirdReader
from trio_gateway.testing import MessageError
from trio_gateway.wire import CHUNKED, LAST_CHUNK, UNTIL_CLOSE, BodyReader, write_chunk
from trio_gateway.wire._http1 import MAX_CHUNK_LINE

from ..target import Target, cuts, seed, split

Read = tuple[bytes, bool, bytes, bool]  # body, ended, what follows, malformed


def check(data: bytes) -> None:
    """See `Target`. Option: the framing, or the length of a body."""
    raw, (kind,) = split(data, 1)
    body = {0: CHUNKED, 1: UNTIL_CLOSE}.get(kind, kind - 2)
    whole = _read([raw], body)
    for pieces in cuts(raw):
        read = _read(pieces, body)
        # What was malformed says nothing about what follows.
        assert read[:2] == whole[:2]
        assert read[3] == whole[3]
        assert whole[3] or read[2] == whole[2]
        if body == CHUNKED:
            lines = _read(pieces, body, as_lines=True)
            assert lines[1:] == read[1:]
            # Of a line that was cut nothing may have come; what is kept is no whole one.
            assert read[0].startswith(lines[0])
            assert b"\n" not in read[0][len(lines[0]) : -1]
    if body == CHUNKED:
        _expect_others_agree(raw, whole)
        if whole[1]:
            framed = b"".join(write_chunk(whole[0][at : at + 7]) for at in range(0, len(whole[0]), 7))
            assert _read([framed + LAST_CHUNK + whole[2]], CHUNKED) == whole


def _read(pieces: list[bytes], body: int, *, as_lines: bool = False) -> Read:
    reader = BodyReader(body)
    read = b""
    for given in pieces:
        piece = given
        try:
            end = reader.chunk_end(piece) if as_lines else 0
            if 0 < end < len(piece):
                # What completes a chunk comes by itself, as in answers.
                read += b"".join(reader.feed(piece[:end]))
                piece = piece[end:]
            lines = reader.take_lines(piece) if as_lines else None
            read += b"".join(reader.feed(piece) if lines is None else [line + b"\n\n" for line in lines])
        except EngineProtocolError as exc:
            assert str(exc).isascii()
            return read + b"".join(reader.whole), reader.ended, b"", True
        assert len(reader._line) <= MAX_CHUNK_LINE
    return read, reader.ended, reader.rest, False


def _expect_others_agree(raw: bytes, ours: Read) -> None:
    """What ends for us ends there for them, with the same bytes, unless they find fault with it."""
    for theirs in (_read_apart(raw), _read_by_h11(raw)):
        if theirs is not None and ours[1]:
            assert theirs == ours


def _read_apart(raw: bytes) -> Read | None:
    reader, buffer = ThirdReader("chunked"), bytearray(raw)
    try:
        reader.feed(buffer)
    except MessageError:
        return None
    return bytes(reader.data), reader.complete, bytes(buffer) if reader.complete else b"", False


def _read_by_h11(raw: bytes) -> Read | None:
    peer = h11.Connection(h11.CLIENT)
    peer.send(h11.Request(method="GET", target="/", headers=[("host", "g")]))
    peer.send(h11.EndOfMessage())
    peer.receive_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + raw)
    body = b""
    try:
        while True:
            event = peer.next_event()
            if isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return body, True, peer.trailing_data[0], False
            elif not isinstance(event, h11.Response):
                return body, False, b"", False
    except h11.RemoteProtocolError:
        return None


_CHUNKED: Final = (
    b"5\r\nhello\r\n0\r\n\r\n",
    b'00A;x="a;b"\r\n0123456789\r\n1 ;q\r\nx\r\n000\r\nA: b\r\nC:\r\n\r\nGET / HTTP/1.1\r\n\r\n',
    b"5\r\nhelloX\r\n0\r\n\r\n",
    b"5\nhello\n0\n\n",
    b"0x5\r\nhello\r\n0\r\n\r\n",
    b"-1\r\n\r\n",
    b"fffffffffffffff\r\n",
    b"10000000000000000\r\nx",
    b"0\r\nA\rB: c\r\n\r\n",
    b"0;\r\n\x00: x\r\n\r\n",
    b"1;" + b"x" * 1100 + b"\r\na\r\n0\r\n\r\n",
)

TARGET: Final = Target(
    check,
    (
        *(seed(raw, 0) for raw in _CHUNKED),
        seed(b"until the end", 1),
        *(seed(b"0123456789 and the next", length + 2) for length in (0, 1, 10, 100)),
    ),
    (
        b"\r\n",
        b"0\r\n\r\n",
        b"\r\n0\r\n",
        b";",
        b"5\r\nhello\r\n",
        b"\r",
        b"\n",
        b"a",
        b"F",
        b"\r\n\r\n",
        b": ",
    ),
)
