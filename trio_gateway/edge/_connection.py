"""One client connection: its bytes in, its bytes out, and whether the other side is there."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable
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
        sock: non-blocking, owned from here on.
        max_head: bytes of one request head.

    Attributes:
        buffers: whether something stands between `write` and the socket; if not, nothing is ever `waiting`.
        written: bytes of callers that were taken, by the socket or into `waiting`.
        asks_after_fin: whether a client that ended its sending may still be reading.
    """

    asks_after_fin = True
    buffers = False

    def __init__(self, sock: socket.socket, hangup: Hangup, max_head: int) -> None:
        self._socket = sock
        self._fd: Final = sock.fileno()
        self.is_tcp: Final = sock.family != socket.AF_UNIX
        self.hangup: Final = hangup
        self.heads: Final = HeadBuffer(max_head)
        self._silent_limit = SILENT_LIMIT
        self.written = 0
        self.closed = False
        self._new = True  # nothing was asked for yet

    @property
    def peer(self) -> str | None:
        """Address of the other end; None on unix sockets, and when nobody knows any more."""
        if not self.is_tcp or self.closed:
            return None
        try:
            return str(self._socket.getpeername()[0])
        except OSError:  # it was reset
            return None

    @property
    def waiting(self) -> int:
        """Bytes that `write` took and the socket did not yet: none, where nothing stands between them."""
        return 0

    def receive_now(self) -> bytes | None:
        """Answer bytes that are here already, or ``b""`` as `receive` does; None: none are, ask `receive`.

        Raises:
            ClientGone: the connection was reset.
        """
        return self._read(READ_SIZE)

    async def receive(self) -> bytes:
        """Answer some bytes; ``b""``: the client will send nothing more.

        Raises:
            ClientGone: the connection was reset.
        """
        return await self._receive_raw(READ_SIZE)

    async def discard(self) -> int:
        """Read and drop some of what arrives, once nothing is written any more; 0: nothing more will come.

        Raises:
            ClientGone: the connection was reset.
        """
        return len(await self._receive_raw(READ_SIZE))

    def on_leaving(self, told: Callable[[], None] | None) -> None:
        """Have ``told`` called once, when `wait_end` is worth a task; None: nobody is to be told."""
        self.hangup.on_end(told)

    async def wait_end(self) -> None:
        """Wait until the client ends its sending, or is gone. Takes nothing away from `receive`."""
        await self.hangup.wait_fin()

    def write(self, data: bytes) -> int:
        """Write what the socket takes now, what waits first; answers how many bytes of ``data`` were taken.

        Raises:
            ClientGone: it was reset, or closed here.
        """
        count = self._send(data)
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
        rest = data[self.write(data) :]
        while rest or self.waiting:
            await self.wait_writable()
            rest = rest[self.write(rest) :]

    def progress(self) -> int:
        """A figure that grows whenever the socket accepts bytes or the peer's kernel acknowledges some."""
        return 2 * self.written - (self.unacknowledged() or 0)

    def acknowledged(self) -> int:
        """How many of `written` the peer's kernel surely has; on unix sockets: ours."""
        return self.written - (self.unacknowledged() or 0)

    def unacknowledged(self) -> int | None:
        """Bytes on the wire that the peer's kernel has not acknowledged; None on unix sockets."""
        if not self.is_tcp or self.closed:
            return None
        queued = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.TIOCOUTQ, queued)
        return queued[0]

    def silent_limit(self, seconds: float) -> None:
        """Set how long unacknowledged bytes are repeated until the peer counts as vanished."""
        if self.is_tcp and not self.closed and seconds != self._silent_limit:
            self._silent_limit = seconds
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    @property
    def descriptor(self) -> int | None:
        """By which another process could serve this connection; None: none can."""
        return None if self.closed or self.buffers else self._fd

    async def finish_sending(self) -> None:
        """Say that nothing more will come, properly; the client may still be sending."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self.closed:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.hangup.lost()

    def close(self, *, reset: bool = False) -> None:
        """Close at once; with ``reset`` what was not sent is thrown away. Idempotent, never waits."""
        if self.closed:
            return
        self.closed = True
        self.hangup.stop()
        if reset and self.is_tcp:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        trio.lowlevel.notify_closing(self._fd)
        self._socket.close()

    async def _receive_raw(self, size: int) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        data = self._read(size)
        new, self._new = self._new, False
        if data is not None:
            if not new:  # else this task has just begun, and all others have had their turn
                await trio.lowlevel.cancel_shielded_checkpoint()
            return data
        while data is None:
            try:
                await trio.lowlevel.wait_readable(self._fd)
            except trio.ClosedResourceError:
                raise ClientGone from None
            data = self._read(size)
        return data

    def _read(self, size: int) -> bytes | None:
        if self.closed:
            raise ClientGone
        try:
            return os.read(self._fd, size)
        except BlockingIOError:
            return None
        except OSError:
            raise ClientGone from None

    def _send(self, data: bytes) -> int:
        if self.closed:
            raise ClientGone
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError:
            self.hangup.lost()
            raise ClientGone from None
