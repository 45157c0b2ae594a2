"""One client connection: its bytes in, its bytes out, and whether the other side is there."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import termios
from typing import Final

import trio

from ..errors import ClientGone
from ..wire import HeadBuffer
from ._watch import Hangup

READ_SIZE: Final = 64 * 1024
SILENT_LIMIT: Final = 30.0  # seconds without an acknowledgement until a peer counts as vanished
_RESET: Final = struct.pack("ii", 1, 0)  # linger for no time: closing sends a reset


class Connection:
    """A client's socket.

    Reading is the connection task's alone, and only between exchanges: what a
    client sends meanwhile stays in the kernel. Writing is synchronous as far as
    the socket takes bytes; `wait_writable` waits for the rest.

    Args:
        max_head: bytes of one request head.
    """

    def __init__(self, stream: trio.SocketStream, hangup: Hangup, max_head: int) -> None:
        self._stream = stream
        self._fd: Final = stream.socket.fileno()
        self.is_tcp: Final = stream.socket.family != socket.AF_UNIX
        self.hangup: Final = hangup
        self.heads: Final = HeadBuffer(max_head)
        self._silent_limit = SILENT_LIMIT
        self.written = 0
        self.closed = False

    async def receive(self) -> bytes:
        """Answer some bytes; ``b""``: the client will send nothing more.

        Raises:
            ClientGone: the connection was reset.
        """
        try:
            return bytes(await self._stream.receive_some(READ_SIZE))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ClientGone from None

    def write(self, data: bytes) -> int:
        """Write what the socket takes now; answers how many bytes.

        Raises:
            ClientGone: it was reset, or closed here.
        """
        if self.closed:
            raise ClientGone
        try:
            count = os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError:
            self.hangup.lost()
            raise ClientGone from None
        self.written += count
        return count

    async def wait_writable(self) -> None:
        """Wait until the socket takes bytes.

        Raises:
            ClientGone: it was closed meanwhile.
        """
        if self.closed:
            raise ClientGone
        try:
            await trio.lowlevel.wait_writable(self._fd)
        except trio.ClosedResourceError:
            raise ClientGone from None

    async def write_all(self, data: bytes) -> None:
        """Write all of something short, such as an interim answer."""
        rest = memoryview(data)
        while rest := rest[self.write(bytes(rest)) :]:
            await self.wait_writable()

    def unacknowledged(self) -> int | None:
        """Bytes written that the peer's kernel has not acknowledged; None on unix sockets."""
        if not self.is_tcp or self.closed:
            return None
        queued = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.TIOCOUTQ, queued)
        return queued[0]

    def silent_limit(self, seconds: float) -> None:
        """Set how long unacknowledged bytes are repeated until the peer counts as vanished."""
        if self.is_tcp and not self.closed and seconds != self._silent_limit:
            self._silent_limit = seconds
            self._stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def finish_sending(self) -> None:
        """Send a FIN; the client may still be sending."""
        if not self.closed:
            try:
                self._stream.socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.hangup.lost()

    def close(self, *, reset: bool = False) -> None:
        """Close at once; with ``reset`` what was not sent is thrown away. Idempotent, never waits."""
        if self.closed:
            return
        self.closed = True
        self.hangup.stop()
        if reset and self.is_tcp:
            self._stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._stream.socket.close()
