"""The writing end of one socket of the two: at once where the kernel takes it, else as soon as it does."""

from __future__ import annotations

import contextlib
import socket

import trio


class Speaker:
    """Sends bytes without waiting. `run` is one task, and sends what the kernel did not take.

    Args:
        sock: not blocking; stays the caller's.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting = b""
        self._news = trio.Event()
        self._said = trio.lowlevel.ParkingLot()

    def send(self, data: bytes) -> None:
        """Send; what a peer that is gone does not take is dropped: its end is seen where it is read from."""
        if not self._waiting:
            data = self._write(data)
        if data:
            self._waiting += data
            self._news.set()

    def _write(self, data: bytes) -> bytes:
        """Hand over what is taken now; answers the rest."""
        try:
            return data[self._sock.send(data) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""

    async def run(self) -> None:
        """Send what waits, for ever."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._waiting:
                with contextlib.suppress(trio.ClosedResourceError):
                    await trio.lowlevel.wait_writable(self._sock)
                self._waiting = self._write(self._waiting)
            self._said.unpark_all()

    async def flush(self) -> None:
        """Wait until nothing waits to be sent; only while `run` runs."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._waiting:
            await self._said.park()
