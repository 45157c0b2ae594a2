"""One HTTP/1.1 connection to the simulated engine: requests in, bytes out. Knows nothing of their meaning."""

from __future__ import annotations

import os
from typing import Final, final

import trio

from ...errors import BadFraming, EngineProtocolError
from ...units import KiB, MiB
from ...wire import CONTINUE, BodyReader, HeadBuffer, RequestHead, parse_request_head

READ_SIZE: Final = 64 * KiB
MAX_HEAD: Final = 64 * KiB
MAX_HEADERS: Final = 256
MAX_BODY: Final = 64 * MiB


class PeerLeft(Exception):
    """The caller closed the connection, or asked for what no engine would read."""


@final
class EngineConnection:
    """Owns one accepted stream; requests on it follow each other.

    Writing never waits: no engine slows down because somebody reads slowly, so
    what the socket does not take is kept, however much it is, and sent by `flush`.

    Attributes:
        broken: a write failed; what is written is dropped.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._fd = stream.socket.fileno()
        self._heads = HeadBuffer(MAX_HEAD)
        self._unsent = bytearray()
        self._more = trio.lowlevel.ParkingLot()
        self._sent = trio.lowlevel.ParkingLot()
        self.broken = False

    # -- reading

    async def wait_spoken(self) -> bool:
        """Wait until a request has begun to come; False if the caller left instead."""
        try:
            if not len(self._heads):
                self._heads.feed(await self._receive())
        except PeerLeft:
            return False
        return True

    async def next_request(self) -> tuple[RequestHead, bytes]:
        """Read a request with its body.

        Raises:
            PeerLeft: there is none.
        """
        try:
            head = await self._next_head()
            if head.expects_continue:
                self.write(CONTINUE)
            return head, await self._read_body(head)
        except (BadFraming, EngineProtocolError):
            raise PeerLeft from None

    async def _next_head(self) -> RequestHead:
        while True:
            self._heads.skip_blank_lines()
            head = self._heads.next_head()
            if head is not None:
                return parse_request_head(head, MAX_HEADERS)
            self._heads.feed(await self._receive())

    async def _read_body(self, head: RequestHead) -> bytes:
        reader = BodyReader(head.body)
        pieces = reader.feed(self._heads.take_rest())
        size = sum(map(len, pieces))
        while not reader.ended:
            more = reader.feed(await self._receive())
            pieces += more
            size += sum(map(len, more))
            if size > MAX_BODY:
                raise PeerLeft
        self._heads.feed(reader.rest)
        return b"".join(pieces)

    async def _receive(self) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(READ_SIZE))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise PeerLeft from None
        if not data:
            raise PeerLeft
        return data

    async def wait_left(self) -> None:
        """Wait until the caller has left; like the engines', this one takes a half-close for it.

        What is read meanwhile belongs to the next request.
        """
        try:
            while True:
                self._heads.feed(await self._receive())
        except PeerLeft:
            return

    # -- writing

    def write(self, data: bytes) -> None:
        """Send what the socket takes now, and keep the rest. Never waits, never fails."""
        if self.broken:
            return
        if self._unsent:
            self._unsent += data
            return
        sent = self._try(data)
        if sent < len(data):
            self._unsent += data[sent:]
            self._more.unpark_all()

    def _try(self, data: bytes | memoryview) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError:
            self.broken = True
            return len(data)

    async def flush(self) -> None:
        """Send what was kept, until all is sent or a write fails. Of one task at a time."""
        while self._unsent and not self.broken:
            try:
                await trio.lowlevel.wait_writable(self._stream.socket)
            except trio.ClosedResourceError:
                return
            with memoryview(self._unsent) as view:
                sent = self._try(view[:READ_SIZE])
            del self._unsent[:sent]
        await trio.lowlevel.checkpoint_if_cancelled()

    async def keep_flushing(self) -> None:
        """Send whatever is kept, until cancelled."""
        while True:
            await self.flush()
            self._sent.unpark_all()
            await self._more.park()

    async def wait_sent(self) -> None:
        """Wait until another task's `keep_flushing` has sent everything, or a write has failed."""
        await trio.lowlevel.checkpoint()
        while self._unsent and not self.broken:
            await self._sent.park()

    def abort(self) -> None:
        """Close at once, without a proper end of what was written. Idempotent."""
        self.broken = True
        self._stream.socket.close()
