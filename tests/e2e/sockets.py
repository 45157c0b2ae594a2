"""Clients of ``/v1/tokens``, frame by frame, so that they can also do what no library lets them do.

What the gateway sends is judged strictly: unmasked whole frames without reserved bits, JSON of the
protocol, deltas numbered without gaps, nothing behind a close.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import trio

from tests.e2e.serving import LIMIT, Serving
from trio_gateway.testing import Address

PATH: Final = "/v1/tokens"
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
LAST: Final = ("done", "error", "cancelled")  # types of the message that ends a stream
Message = dict[str, Any]


class Frame(NamedTuple):
    """One frame of the gateway."""

    opcode: int
    payload: bytes


class Closed(NamedTuple):
    """How the gateway closed. ``code`` None: without a close frame."""

    code: int | None
    reason: str = ""


class SocketClosed(Exception):
    """Nothing more will come."""


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    reserved: int = 0,
    mask: bytes | None = b"\x12\x34\x56\x78",
    length: int | None = None,
) -> bytes:
    """Write a frame of a client.

    Args:
        reserved: the three bits, as a number up to 7.
        mask: None: it has none, against the rules.
        length: that is claimed instead of the payload's own.
    """
    size = len(payload) if length is None else length
    masked = 0 if mask is None else 0x80
    first = (0x80 if fin else 0) | reserved << 4 | opcode
    if size < 126:
        head = bytes((first, masked | size))
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, masked | 126, size)
    else:
        head = struct.pack("!BBQ", first, masked | 127, size)
    return head + payload if mask is None else head + mask + _masked(payload, mask)


def _masked(payload: bytes, mask: bytes) -> bytes:
    size = len(payload)
    stream = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload) ^ int.from_bytes(stream)).to_bytes(size)


def close_payload(code: int, reason: bytes = b"") -> bytes:
    """Write what a close frame carries."""
    return struct.pack("!H", code) + reason


def handshake(
    *headers: str, path: str = PATH, key: str = "key-a", host: str = "gateway", version: str = "13"
) -> bytes:
    """Write a handshake. An empty ``key``: it shows none."""
    shown = [f"authorization: Bearer {key}"] if key else []
    lines = [
        f"GET {path} HTTP/1.1",
        f"host: {host}",
        "upgrade: websocket",
        "connection: Upgrade",
        f"sec-websocket-version: {version}",
        f"sec-websocket-key: {base64.b64encode(os.urandom(16)).decode()}",
        *shown,
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1")


class TokenSocket:
    """One socket of a client.

    Attributes:
        messages: all that came, oldest first.
        status, headers: of the answer to the handshake.
        close: how the gateway closed, once it has.
        answers_pings: as every client should.
    """

    def __init__(self, stream: trio.abc.Stream, raw: trio.SocketStream) -> None:
        self.stream: Final = stream
        self.raw: Final = raw
        self.messages: list[Message] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.close: Closed | None = None
        self.answers_pings = True
        self._said_goodbye = False
        self._buffer = bytearray()
        self._last_seq: dict[str, int] = {}

    # -- the handshake

    async def shake_hands(self, request: bytes) -> None:
        """Send a handshake and read the answer's head, and the body of a refusal."""
        await self.stream.send_all(request)
        while b"\r\n\r\n" not in self._buffer:
            if not await self._more():
                raise SocketClosed
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer = bytearray(rest)
        status, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(status.split(" ")[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
        if self.status != 101:
            size = int(self.headers["content-length"])
            while len(self._buffer) < size:
                assert await self._more()
            self.body = bytes(self._buffer)

    @property
    def error_code(self) -> str:
        """Code of a refusal of the handshake."""
        return str(json.loads(self.body)["error"]["code"])

    # -- sending

    async def send_bytes(self, data: bytes) -> None:
        """Send any bytes."""
        await self.stream.send_all(data)

    async def send_frame(self, opcode: int, payload: bytes = b"", **options: Any) -> None:
        """Send one frame; options are those of `frame`."""
        await self.send_bytes(frame(opcode, payload, **options))

    async def send_text(self, text: str) -> None:
        """Send a text message as one frame."""
        await self.send_frame(TEXT, text.encode())

    async def send(self, kind: str, **members: Any) -> None:
        """Send a message of the protocol."""
        await self.send_text(json.dumps({"type": kind, **members}))

    async def generate(self, name: str = "s1", *, model: str = "m1", **members: Any) -> None:
        """Ask for a stream of chat."""
        body = members.pop("body", {"model": model, "messages": [{"role": "user", "content": "hi"}]})
        await self.send("generate", stream_id=name, body=body, **members)

    async def ack(self, seq: int, name: str = "s1", **members: Any) -> None:
        """Acknowledge."""
        await self.send("ack", stream_id=name, seq=seq, **members)

    async def say_goodbye(self, code: int = 1000) -> Closed:
        """Close as one should, and wait for the answer and the end."""
        self._said_goodbye = True
        await self.send_frame(CLOSE, close_payload(code))
        return await self.read_closed()

    def reset(self) -> None:
        """Leave with a reset."""
        self.raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.raw.socket.close()

    # -- reading

    async def read_frame(self) -> Frame:
        """Read one frame.

        Raises:
            SocketClosed: the connection ended.
        """
        with trio.fail_after(LIMIT):
            first, second = await self._take(2)
            assert first & 0xF0 == 0x80, "a fragment, or a reserved bit"
            assert not second & 0x80, "a masked frame"
            size = second
            if second == 126:
                (size,) = struct.unpack("!H", await self._take(2))
                assert size > 125
            elif second == 127:
                (size,) = struct.unpack("!Q", await self._take(8))
                assert size >= 1 << 16
            opcode = first & 0x0F
            assert opcode == TEXT or (opcode in (CLOSE, PING, PONG) and size < 126)
            return Frame(opcode, await self._take(size))

    async def read(self) -> Message:
        """Read the next message, and answer pings meanwhile.

        Raises:
            SocketClosed: there is none; ``close`` says how it ended.
        """
        while True:
            found = await self.read_frame()
            if found.opcode == TEXT:
                return self._note(json.loads(found.payload.decode()))
            if found.opcode == PING and self.answers_pings:
                await self.send_frame(PONG, found.payload)
            if found.opcode == CLOSE:
                if not self._said_goodbye:
                    with suppress(trio.BrokenResourceError, trio.BusyResourceError):
                        await self.send_frame(CLOSE, found.payload[:2])
                code = struct.unpack("!H", found.payload[:2])[0] if found.payload else 1005
                self.close = Closed(code, found.payload[2:].decode())
                raise SocketClosed

    async def read_until(self, holds: Callable[[Message], bool]) -> Message:
        """Read until a message is such, and answer it."""
        while not holds(message := await self.read()):
            pass
        return message

    async def read_last(self, name: str = "s1") -> Message:
        """Read until a stream has ended, and answer its last message."""
        return await self.read_until(lambda m: m.get("stream_id") == name and m["type"] in LAST)

    async def read_delta(self, seq: int, name: str = "s1") -> Message:
        """Read until this delta has come."""
        return await self.read_until(lambda m: m.get("stream_id") == name and m.get("seq") == seq)

    async def read_closed(self) -> Closed:
        """Read until nothing more comes, and answer how it was closed."""
        try:
            while True:
                await self.read()
        except SocketClosed:
            pass
        if self.close is None:
            return Closed(None)
        with trio.fail_after(LIMIT):
            assert not self._buffer, "bytes behind a close"
            assert not await self._more(), "bytes behind a close"
        return self.close

    async def stall(self) -> None:
        """Read nothing more, for ever."""
        await trio.sleep_forever()

    def deltas(self, name: str = "s1") -> list[Message]:
        """Deltas of one stream."""
        return [m for m in self.messages if m["type"] == "delta" and m["stream_id"] == name]

    def text(self, name: str = "s1") -> str:
        """What a stream of chat said so far."""
        return text_of(self.deltas(name))

    def types(self, name: str = "s1") -> list[str]:
        """Types of a stream's messages."""
        return [m["type"] for m in self.messages if m.get("stream_id") == name]

    def _note(self, message: Message) -> Message:
        self.messages.append(message)
        kind, name = message["type"], message.get("stream_id", "")
        if kind == "accepted":
            self._last_seq.pop(name, None)  # another stream, or a resumed one
        elif kind == "delta":
            assert message["seq"] == self._last_seq.get(name, message["seq"] - 1) + 1, "a gap"
            self._last_seq[name] = message["seq"]
        return message

    async def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not await self._more():
                raise SocketClosed
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def _more(self) -> bool:
        try:
            data = await self.stream.receive_some(16 * 1024)
        except trio.BrokenResourceError:
            return False
        self._buffer += data
        return bool(data)


def text_of(deltas: Sequence[Message]) -> str:
    """What deltas of chat say."""
    choices = (choice for delta in deltas for choice in delta["chunk"]["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def _connect(address: Address, receive_buffer: int | None) -> trio.SocketStream:
    unix = not isinstance(address, tuple)
    sock = trio.socket.socket(trio.socket.AF_UNIX if unix else trio.socket.AF_INET)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await sock.connect(address if isinstance(address, tuple) else str(address))
    return trio.SocketStream(sock)


@asynccontextmanager
async def connected(
    gateway: Serving,
    request: bytes | None = None,
    *,
    trust: ssl.SSLContext | None = None,
    receive_buffer: int | None = None,
) -> AsyncIterator[TokenSocket]:
    """Connect for the length of the block, and shake hands with this request; nothing is judged of that."""
    raw = await _connect(gateway.address, receive_buffer)
    stream: trio.abc.Stream = raw
    if trust is not None:
        stream = trio.SSLStream(raw, trust, server_hostname="127.0.0.1", https_compatible=True)
    client = TokenSocket(stream, raw)
    try:
        with trio.fail_after(LIMIT):
            await client.shake_hands(handshake() if request is None else request)
        yield client
    finally:
        raw.socket.close()


@asynccontextmanager
async def opened(
    gateway: Serving, request: bytes | None = None, **options: Any
) -> AsyncIterator[TokenSocket]:
    """Open a socket for the length of the block. Arguments are those of `connected`."""
    async with connected(gateway, request, **options) as client:
        assert client.status == 101, (client.status, client.body)
        yield client
