"""One connection of a gateway to its agent: requests in, answers out, over HTTP/1.1."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from ..errors import BadFraming, EngineProtocolError
from ..units import KiB
from ..wire import (
    CONTINUE,
    LAST_CHUNK,
    BodyReader,
    HeadBuffer,
    RequestHead,
    parse_request_head,
    write_chunk,
    write_response_head,
)

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]

READ_SIZE: Final = 64 * KiB
TLS_PIECE: Final = 16 * KiB  # one record
MAX_HEAD: Final = 64 * KiB
MAX_HEADERS: Final = 100
_RESET: Final = struct.pack("ii", 1, 0)  # linger for no time: closing sends a reset
_JSON: Final = "application/json"
_NDJSON: Final = "application/x-ndjson"


class Gone(Exception):
    """The other side has left, or does not take what is written."""


@dataclass(frozen=True, slots=True)
class Refusal(Exception):
    """A request that is answered with an error."""

    status: int
    message: str


class Connection:
    """A gateway's connection, with or without TLS.

    One task reads and answers; while it streams, `watch` is the only reader.

    Attributes:
        begun: the head of an answer was written.
        reusable: another request may follow.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        transport = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
        self._socket = transport.socket
        self._heads = HeadBuffer(MAX_HEAD)
        self.begun = False
        self.reusable = True

    async def read_head(self) -> RequestHead | None:
        """Read the next request's head; None: the other side has nothing more to ask.

        Raises:
            Refusal: it is malformed.
            Gone: the connection broke in the middle of one.
        """
        self.begun = False
        try:
            while True:
                self._heads.skip_blank_lines()
                head = self._heads.next_head()
                if head is not None:
                    parsed = parse_request_head(head, MAX_HEADERS)
                    self.reusable = parsed.keep_alive
                    return parsed
                data = await self._receive()
                if not data:
                    if len(self._heads):
                        raise Gone
                    return None
                self._heads.feed(data)
        except BadFraming as exc:
            self.reusable = False
            raise Refusal(400, str(exc)) from None

    async def read_body(self, head: RequestHead, max_bytes: int) -> bytes:
        """Read the body that belongs to a head.

        Raises:
            Refusal: it is too large or malformed.
            Gone: the connection broke.
        """
        reader = BodyReader(head.body)
        pieces: list[bytes] = []
        size = 0
        if head.expects_continue:
            await self.send(CONTINUE)
        data = self._heads.take_rest()
        try:
            while True:
                for piece in reader.feed(data):
                    size += len(piece)
                    pieces.append(piece)
                if size > max_bytes or head.body > max_bytes:
                    raise Refusal(413, f"the body is over {max_bytes} bytes")
                if reader.ended:
                    self._heads.feed(reader.rest)
                    return b"".join(pieces)
                data = await self._receive()
                if not data:
                    raise Gone
        except EngineProtocolError as exc:
            self.reusable = False
            raise Refusal(400, str(exc)) from None
        except Refusal:
            self.reusable = False
            raise

    async def watch(self) -> None:
        """Return when the other side is gone; what it sends meanwhile is kept, within the bound of a head."""
        try:
            while data := await self._receive():
                self._heads.feed(data)
                if len(self._heads) > MAX_HEAD:
                    return
        except Gone:
            return

    async def respond(self, status: int, body: bytes, content_type: str = _JSON) -> None:
        """Write a whole answer.

        Raises:
            Gone: the connection broke.
        """
        headers = [("content-type", content_type), ("content-length", str(len(body)))]
        self.begun = True
        await self.send(write_response_head(status, headers + self._closing()) + body)

    def begin(self) -> bytes:
        """Answer the head of an NDJSON stream, to be sent in front of its first piece."""
        self.begun = True
        headers = [("content-type", _NDJSON), ("transfer-encoding", "chunked"), ("cache-control", "no-store")]
        return write_response_head(200, headers + self._closing())

    def piece(self, lines: bytes, *, last: bool = False) -> bytes:
        """Frame lines of a stream."""
        return (write_chunk(lines) if lines else b"") + (LAST_CHUNK if last else b"")

    def _closing(self) -> list[tuple[str, str]]:
        return [] if self.reusable else [("connection", "close")]

    async def send(self, data: bytes, taken: Callable[[], None] | None = None) -> None:
        """Write all of ``data``.

        Args:
            taken: told whenever the socket took some.

        Raises:
            Gone: the connection broke.
        """
        view = memoryview(data)
        try:
            while view:
                view = view[await self._send_some(view) :]
                if taken is not None:
                    taken()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            raise Gone from None

    async def _send_some(self, view: memoryview) -> int:
        """Write a part; answers how much. Over TLS by the record, so that progress is seen."""
        if isinstance(self._stream, trio.SSLStream):
            piece = view[:TLS_PIECE]
            await self._stream.send_all(piece)
            return len(piece)
        return await self._socket.send(view)

    async def _receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(READ_SIZE))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Gone from None

    def close(self, *, reset: bool = False) -> None:
        """Close at once; with ``reset`` what was not sent is thrown away. Idempotent, never waits."""
        self.reusable = False
        sock = self._socket
        if reset and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.close()
