"""WebSocket frames: any cut gives what a slow reader of RFC 6455 hears; messages are JSON."""

from __future__ import annotations

import codecs
import json
import struct
from collections.abc import Iterator
from typing import Any, Final

from trio_gateway.wire import Close, Heard, MalformedMessage, SocketReader, read_client_message

from ..target import Target, cuts, seed, split

ROOMY: Final = 1 << 20
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
Event = str | tuple[bytes, bytes] | int


class Fault(Exception):
    """The frames break a rule; its argument is the close code."""


def check(data: bytes) -> None:
    """See `Target`. Option: the bound of one message; 0: a large one."""
    stream, (option,) = split(data, 1)
    most = option or ROOMY
    expected = list(heard_by_the_standard(stream, most))
    assert _alike(_read([stream], most), expected)
    for pieces in cuts(stream):
        assert _alike(_read(pieces, most), expected)
    for event in expected:
        if isinstance(event, str):
            _expect_message(event)
    _expect_message(stream.decode(errors="replace"))


def _alike(events: list[Event], expected: list[Event]) -> bool:
    """Of a text that is too long and no UTF-8 either may be said: that depends on what comes at a time."""
    if events[-1:] in ([1007], [1009]) and expected[-1:] in ([1007], [1009]):
        return events[:-1] == expected[:-1]
    return events == expected


def _read(pieces: list[bytes], most: int) -> list[Event]:
    reader = SocketReader(most)
    events: list[Event] = []
    for piece in pieces:
        for event in reader.feed(piece):
            assert not (events and type(events[-1]) is int), "something behind the end"
            if isinstance(event, Close):
                events.append(event.code)
            elif isinstance(event, Heard):
                events.append((event.payload, event.reply))
            else:
                assert len(event.encode()) <= most
                events.append(event)
    return events


def heard_by_the_standard(data: bytes, most: int) -> Iterator[Event]:
    """What a client says, byte by byte as RFC 6455 section 5 has it."""
    try:
        yield from _heard(data, most)
    except Fault as fault:
        yield fault.args[0]


def _heard(data: bytes, most: int) -> Iterator[Event]:
    message: bytes | None = None
    while True:
        head = _head_of(data)
        if head is None:
            return
        fin, opcode, size, mask, data = head
        payload = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data[:size]))
        whole = len(data) >= size
        data = data[size:]
        if opcode >= CLOSE:
            if not whole:
                return
            if opcode == CLOSE:
                yield _close_code(payload)
                return
            yield payload, bytes((0x80 | PONG, size)) + payload if opcode == PING else b""
            continue
        if size and not payload:
            return  # a frame is judged by its header first, and then with its payload
        if (opcode == 0) == (message is None):
            raise Fault(1002)  # a continuation of nothing, or a message within a message
        if opcode == BINARY:
            raise Fault(1003)
        message = (message or b"") + payload
        finished = fin and whole
        text = _decode(message, finished)
        if len(text.encode()) > most:
            raise Fault(1009)
        if not whole:
            return
        if finished:
            yield text
            message = None


def _head_of(data: bytes) -> tuple[bool, int, int, bytes, bytes] | None:
    """Whether it is the last fragment, opcode, size, mask, and what follows; None: it is not whole."""
    if len(data) < 2:
        return None
    fin, reserved, opcode = bool(data[0] & 0x80), data[0] & 0x70, data[0] & 0x0F
    masked, size = data[1] & 0x80, data[1] & 0x7F
    at = 2
    if opcode not in (0, TEXT, BINARY, CLOSE, PING, PONG):
        raise Fault(1002)
    if opcode >= CLOSE and (not fin or size > 125):
        raise Fault(1002)
    if size > 125:
        form, least = (("!H", 126), ("!Q", 1 << 16))[size - 126]
        at += struct.calcsize(form)
        if len(data) < at:
            return None
        (size,) = struct.unpack(form, data[2:at])
        if size < least or size >= 1 << 63:
            raise Fault(1002)
    if reserved or not masked:
        raise Fault(1002)
    if len(data) < at + 4:
        return None
    return fin, opcode, size, data[at : at + 4], data[at + 4 :]


def _decode(data: bytes, finished: bool) -> str:
    """Decode what there is of a text; a character that is not whole yet may still become one."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, finished)
    except UnicodeDecodeError:
        raise Fault(1007) from None


def _close_code(payload: bytes) -> int:
    if not payload:
        return 1000
    if len(payload) == 1:
        raise Fault(1002)
    (code,) = struct.unpack("!H", payload[:2])
    if not (1000 <= code <= 1003 or 1007 <= code <= 1013 or 3000 <= code <= 4999):
        raise Fault(1002)
    _decode(payload[2:], True)
    return int(code)


def _expect_message(text: str) -> None:
    """A message that is read is JSON, and is of the type that it says."""
    try:
        message = read_client_message(text)
    except MalformedMessage as malformed:
        assert str(malformed)
        return
    names: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names[:] = [name for name, _ in pairs]  # the outermost object comes last
        return dict(pairs)

    value = json.loads(text, object_pairs_hook=note)
    if len(set(names)) == len(names):
        assert value["type"] == type(message).__struct_config__.tag


def _frame(opcode: int, payload: bytes = b"", *, fin: bool = True, mask: bytes = b"\0\0\0\0") -> bytes:
    """Write a frame. Without a mask that changes anything, mutations of it stay readable."""
    size = len(payload)
    length = bytes((0x80 | size,)) if size < 126 else struct.pack("!BH", 0x80 | 126, size)
    return bytes((0x80 * fin | opcode,)) + length + mask + payload


_STREAMS: Final = (
    _frame(TEXT, b'{"type":"generate","stream_id":"s","body":{"model":"m","messages":[]},"credit":7}'),
    _frame(TEXT, b'{"type":"ack","stream_id":"s","seq":3,"credit":null}') + _frame(PING, b"p"),
    _frame(TEXT, b'{"type":"resume","stream_', fin=False)
    + _frame(PONG, b"q")
    + _frame(0, b'id":"s","request_id":"r","after_seq":0}'),
    _frame(TEXT, b'{"type":"cancel","stream_id":"\xc3\xa9"}') + _frame(CLOSE, b"\x03\xe8bye"),
    _frame(TEXT, b'{"type":"auth","key":"\\ud83d\\ude00"}', mask=b"abcd"),
    _frame(TEXT, "κόσμε".encode()[:3], fin=False) + _frame(0, "κόσμε".encode()[3:]),
    _frame(TEXT, b"x" * 300) + _frame(BINARY, b"y"),
    _frame(CLOSE) + _frame(TEXT, b"late"),
    b"\xff\xff",
)

TARGET: Final = Target(
    check,
    tuple(seed(stream, most) for stream in _STREAMS for most in (0, 20)),
    (
        _frame(TEXT, b"{}"), _frame(TEXT, b"a", fin=False), _frame(0, b"b"), _frame(PING), _frame(BINARY),
        _frame(CLOSE, b"\x0f\xa0"), b"\x81\xfe\x00\x7e", b"\x81\xff\x00\x00\x00\x00\x00\x01\x00\x00",
        b"\xed\xa0\x80", b"\xf4\x90", b'"type":"ack"', b'"seq":', b'"credit":', b'"stream_id":', b"1e400",
        b"9007199254740993", b"null", b"[" * 40,
    ),
)  # fmt: skip
