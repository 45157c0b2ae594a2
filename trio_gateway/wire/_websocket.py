"""WebSockets, the server's side, by RFC 6455. Sans-IO: wsproto reads frames, and says what breaks the rules.

No extension is ever agreed on: what a few bytes inflate to would be anybody's guess.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import struct
from typing import Final, NamedTuple

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason

from ._http1 import RequestHead

VERSION: Final = b"13"
REASON_BYTES: Final = 123  # of a close frame, as UTF-8
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_STEP: Final = 16 * 1024  # bytes read at a time, so that what follows a fault is not even looked at


class Close(NamedTuple):
    """The other side wants to end it, or broke a rule and has to be told so (``fault``)."""

    code: int
    reason: str
    fault: bool


class Heard(NamedTuple):
    """A control frame that says the other side is there. ``reply``: the pong that is due, or nothing."""

    payload: bytes
    reply: bytes


SocketEvent = str | Heard | Close


def wants_upgrade(head: RequestHead) -> bool:
    """Whether a request asks for a WebSocket, well or badly."""
    return b"websocket" in _tokens(head, b"upgrade")


def upgrade_fault(head: RequestHead) -> str | None:
    """Say what is wrong with a handshake (RFC 6455 4.2.1); None: nothing."""
    if head.version != b"1.1":
        return "a WebSocket needs HTTP/1.1"
    if b"upgrade" not in _tokens(head, b"connection"):
        return "Connection does not say Upgrade"
    if head.all(b"sec-websocket-version") != [VERSION]:
        return "the version of the WebSocket protocol is not 13"
    keys = head.all(b"sec-websocket-key")
    if len(keys) != 1 or not _is_key(keys[0].strip()):
        return "Sec-WebSocket-Key is not 16 bytes in base64"
    if head.body:
        return "a handshake has no body"
    if not all(value.isascii() for name, value in head.headers if name.startswith(b"sec-websocket-")):
        return "the headers of a handshake are ASCII"
    return None


def accept_of(head: RequestHead) -> str:
    """Answer the value of ``Sec-WebSocket-Accept`` for a handshake without fault."""
    key = (head.header(b"sec-websocket-key") or b"").strip()
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest()).decode("ascii")


def offered_protocols(head: RequestHead) -> list[str]:
    """Answer the subprotocols that a client offers, in its order; of what can not be one, nothing."""
    values = b",".join(head.all(b"sec-websocket-protocol")).decode("latin-1")
    return [name for value in values.split(",") if (name := value.strip())]


def _tokens(head: RequestHead, name: bytes) -> list[bytes]:
    return [token.strip().lower() for value in head.all(name) for token in value.split(b",")]


def _is_key(value: bytes) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == 16
    except binascii.Error:
        return False


class SocketReader:
    """Takes a client's bytes apart into messages and control frames.

    Args:
        max_message: bytes of one message, its fragments together.

    Attributes:
        max_message: may be changed at any time.
    """

    def __init__(self, max_message: int) -> None:
        self.max_message = max_message
        self._frames = Connection(ConnectionType.SERVER)
        self._message = io.BytesIO()  # as text, one wide character would make its neighbours as wide
        self._size = 0
        self._over = False

    @property
    def held(self) -> int:
        """Bytes of a message that is not whole yet."""
        return self._size

    def feed(self, data: bytes) -> list[SocketEvent]:
        """Take in bytes; answers what they complete. After a `Close` nothing is read any more."""
        events: list[SocketEvent] = []
        for at in range(0, len(data), _STEP):
            if self._over:
                break
            self._frames.receive_data(data[at : at + _STEP])
            self._take(events)
        return events

    def _take(self, events: list[SocketEvent]) -> None:
        for event in self._frames.events():
            if isinstance(event, TextMessage):
                found = self._gather(event)
                if found is not None:
                    events.append(found)
            elif isinstance(event, BytesMessage):
                events.append(Close(1003, "messages are text", fault=True))
            elif isinstance(event, Ping):
                events.append(Heard(bytes(event.payload), control_frame(_PONG, bytes(event.payload))))
            elif isinstance(event, Pong):
                events.append(Heard(bytes(event.payload), b""))
            else:
                assert isinstance(event, CloseConnection)
                events.append(self._closed(event))
            if events and isinstance(events[-1], Close):
                self._over = True
                return

    def _gather(self, part: TextMessage) -> str | Close | None:
        data = part.data.encode()
        self._size += len(data)
        if self._size > self.max_message:
            return Close(1009, f"a message is over {self.max_message} bytes", fault=True)
        if part.message_finished and not self._message.tell():
            self._size = 0
            return part.data
        self._message.write(data)
        if not part.message_finished:
            return None
        whole, self._message, self._size = self._message.getvalue(), io.BytesIO(), 0
        return whole.decode()

    def _closed(self, event: CloseConnection) -> Close:
        # A fault of the other side leaves the frames' state as it was; its close frame does not.
        if self._frames.state is ConnectionState.OPEN:
            return Close(int(event.code), "the frames break the rules of RFC 6455", fault=True)
        if event.code == CloseReason.NO_STATUS_RCVD:
            return Close(1000, "", fault=False)
        return Close(int(event.code), event.reason or "", fault=False)


_TEXT: Final = 0x81
_CLOSE: Final = 0x88
_PING: Final = 0x89
_PONG: Final = 0x8A


def text_frame(message: bytes) -> bytes:
    """Write a message, which is UTF-8, as one frame."""
    return _header(_TEXT, len(message)) + message


def ping_frame(payload: bytes) -> bytes:
    """Write a ping of up to 125 bytes."""
    return control_frame(_PING, payload)


def close_frame(code: int, reason: str) -> bytes:
    """Write the frame that ends a socket; a reason over 123 bytes is cut between two characters."""
    text = reason.encode(errors="replace")[:REASON_BYTES].decode(errors="ignore").encode()
    return control_frame(_CLOSE, struct.pack("!H", code) + text)


def control_frame(opcode: int, payload: bytes) -> bytes:
    """Write a control frame of up to 125 bytes."""
    return bytes((opcode, len(payload))) + payload


def _header(opcode: int, length: int) -> bytes:
    if length < 126:
        return bytes((opcode, length))
    if length < 1 << 16:
        return struct.pack("!BBH", opcode, 126, length)
    return struct.pack("!BBQ", opcode, 127, length)
