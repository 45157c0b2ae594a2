"""Clients that misbehave, on raw sockets.

A `RawClient` sends the bytes it is given and does what real clients do and HTTP
libraries hide: it leaves by FIN or by reset, half-closes, stops reading, reads a
few bytes a second. What it reads is judged strictly, so that a test can tell an
answer that was *cut* from one that *ended*.

No method has a time limit of its own; put ``trio.fail_after`` around them.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

import trio

from ._client_answers import Answer, AnswerReader, http_request
from ._steps import Headers

Address: TypeAlias = tuple[str, int] | str | os.PathLike[str]

RECEIVE_BYTES: Final = 64 * 1024
TRICKLE_ROUNDS_PER_SECOND: Final = 20


class RawClient:
    """One connection to the gateway, closed at the end of its ``with`` block.

    Attributes:
        received: every byte that came, as it came.
        closed_by_gateway: how the gateway closed, None while it has not.
    """

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock
        self._reader = AnswerReader()
        self._handed_out = 0
        self.received = bytearray()
        self.closed_by_gateway: Literal["fin", "reset"] | None = None

    @classmethod
    async def connect(cls, address: Address, *, receive_buffer: int | None = None) -> Self:
        """Connect to a ``(host, port)`` or to a unix socket's path.

        Args:
            address: where the gateway listens.
            receive_buffer: bytes of the kernel's receive buffer, set before
                connecting so that the window never was larger; the kernel doubles it.
        """
        unix = not isinstance(address, tuple)
        sock = trio.socket.socket(trio.socket.AF_UNIX if unix else trio.socket.AF_INET)
        try:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await sock.connect(address if isinstance(address, tuple) else str(Path(address)))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    # -- sending

    async def send(self, data: bytes) -> None:
        """Send bytes as they are.

        Raises:
            OSError: the gateway closed the connection.
        """
        view = memoryview(data)
        while view:
            sent = await self._socket.send(view)
            view = view[sent:]

    async def request(
        self,
        method: str,
        target: str,
        *,
        headers: Headers = (),
        body: bytes | None = None,
        host: str = "gateway",
    ) -> None:
        """Send a request, remembering its method: an answer to HEAD has no body."""
        self._reader.methods.append(method)
        await self.send(http_request(method, target, headers=headers, body=body, host=host))

    # -- leaving

    def half_close(self) -> None:
        """Send a FIN and go on reading."""
        self._socket.shutdown(socket.SHUT_WR)

    def leave_fin(self) -> None:
        """Close. The kernel sends a FIN, or a reset if unread bytes are waiting."""
        self._socket.close()

    def leave_reset(self) -> None:
        """Close with a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    # -- reading

    @property
    def answers(self) -> list[Answer]:
        """The answers so far, the last one perhaps unfinished."""
        return self._reader.answers

    @property
    def interims(self) -> list[int]:
        """Status codes of the interim answers so far, such as 100."""
        return self._reader.interims

    async def read_head(self) -> Answer:
        """Read until the next answer's head is there, and answer what there is of it."""
        await self._read_while(lambda: len(self.answers) <= self._handed_out)
        return self.answers[self._handed_out]

    async def read_until(self, marker: bytes) -> None:
        """Read until these bytes have come, counted from the connection's first."""
        await self._read_while(lambda: marker not in self.received)

    async def read_events(self, count: int) -> None:
        """Read until the next answer's stream has dispatched at least `count` events.

        Raises:
            AssertionError: the answer ended before, or is no event stream.
        """
        answer = await self.read_head()
        events = answer.events
        if events is None:
            raise AssertionError(f"no event stream but {answer!r}: {answer.body[:300]!r}")
        await self._read_while(lambda: len(events.events) < count and answer.ended is None)
        if len(events.events) < count:
            raise AssertionError(f"{answer!r} ended after {len(events.events)} events")

    async def read_to_end(self) -> Answer:
        """Read the next answer until it is complete or was cut, and answer it.

        Each call answers one further answer of the connection.
        """
        answer = await self.read_head()
        await self._read_while(lambda: answer.ended is None)
        self._handed_out += 1
        return answer

    async def read_closed(self) -> Literal["fin", "reset"]:
        """Read until the gateway closes the connection, and answer how it did."""
        while self.closed_by_gateway is None:
            await self._read_some(RECEIVE_BYTES)
        return self.closed_by_gateway

    async def trickle(self, bytes_per_second: int) -> Answer:
        """Read the next answer to its end at this pace, and answer it."""
        piece = max(1, bytes_per_second // TRICKLE_ROUNDS_PER_SECOND)
        answer: Answer | None = None
        while answer is None or answer.ended is None:
            await self._read_some(piece)
            await trio.sleep(piece / bytes_per_second)
            if answer is None and len(self.answers) > self._handed_out:
                answer = self.answers[self._handed_out]
        self._handed_out += 1
        return answer

    async def stall(self) -> None:
        """Read nothing until the gateway gives the connection up.

        Returns when a FIN could be delivered or a reset came. While bytes wait
        unread only a reset gets through, since a FIN queues behind them.
        """
        with select.epoll() as poller:
            # readability stays true while bytes wait, so only the peer's close is asked
            poller.register(self._socket.fileno(), select.EPOLLRDHUP)
            await trio.lowlevel.wait_readable(poller.fileno())

    async def _read_while(self, wanted: Callable[[], bool]) -> None:
        while wanted():
            if self.closed_by_gateway is not None:
                raise ConnectionError(
                    f"closed by {self.closed_by_gateway} after {bytes(self.received[-300:])!r}"
                )
            await self._read_some(RECEIVE_BYTES)

    async def _read_some(self, size: int) -> None:
        how: Literal["fin", "reset"] = "fin"
        try:
            data = await self._socket.recv(size)
        except ConnectionResetError:
            data, how = b"", "reset"
        if data:
            self.received += data
            self._reader.feed(data)
        else:
            self.closed_by_gateway = how
            self._reader.end_of_stream(how)
