"""Seeing that a client left, without reading from its socket.

Trio can wait until a socket is readable, but after a FIN it stays readable, and
reading would eat the next request. One epoll set of our own tells the half-close
(EPOLLRDHUP) and the reset (EPOLLERR, EPOLLHUP) of all connections; after a FIN a
connection is asked for errors only, so nothing spins.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, final

import trio

_FIN: Final = select.EPOLLRDHUP
_GONE: Final = select.EPOLLERR | select.EPOLLHUP


@final
class Hangup:
    """What is known of the other side of one connection.

    Attributes:
        fin: it will send nothing more.
        gone: it was reset, or both directions are closed.
    """

    def __init__(self, watch: HangupWatch, fd: int) -> None:
        self.fin = False
        self.gone = False
        self._watch = watch
        self._fd = fd
        self._told: Callable[[], None] | None = None
        self._lot: trio.lowlevel.ParkingLot | None = None

    def __enter__(self) -> Self:
        """Start to watch; the descriptor must stay open until `__exit__`."""
        self._watch.attach(self._fd, self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Stop to watch; before the descriptor is closed, whose number would come again."""
        self.stop()

    def stop(self) -> None:
        """Stop to watch. Idempotent."""
        self._watch.detach(self._fd, self)

    def on_end(self, told: Callable[[], None] | None) -> None:
        """Call this once, when the other side sent a FIN or is gone: now, if it has. None: call nobody."""
        self._told = told
        if self.fin or self.gone:
            self._tell()

    async def wait_fin(self) -> None:
        """Wait until the other side sent a FIN, or is gone."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not (self.fin or self.gone):
            await self._park()

    async def wait_gone(self) -> None:
        """Wait until the other side is gone."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self.gone:
            await self._park()

    async def _park(self) -> None:
        if self._lot is None:
            self._lot = trio.lowlevel.ParkingLot()
        await self._lot.park()

    def tell(self, events: int) -> None:
        """Take what epoll said."""
        self.gone = self.gone or bool(events & _GONE)
        self.fin = self.fin or bool(events & _FIN)
        self._tell()

    def lost(self) -> None:
        """A write failed, which tells the same."""
        self.gone = True
        self._tell()

    def _tell(self) -> None:
        told, self._told = self._told, None
        if told is not None:
            told()
        if self._lot is not None:
            self._lot.unpark_all()


class HangupWatch:
    """The epoll set of a process. `run` is one task of the gateway."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Hangup] = {}

    def attach(self, fd: int, hangup: Hangup) -> None:
        """Watch a descriptor."""
        self._watched[fd] = hangup
        self._epoll.register(fd, _FIN)

    def detach(self, fd: int, hangup: Hangup) -> None:
        """Stop to watch; only if the number still means this connection. Idempotent."""
        if self._watched.get(fd) is hangup:
            del self._watched[fd]
            self._epoll.unregister(fd)

    def __len__(self) -> int:
        return len(self._watched)

    async def run(self) -> None:
        """Pass on what happens, for ever."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for fd, events in self._epoll.poll(0, 256):
                self._pass_on(fd, events)

    def _pass_on(self, fd: int, events: int) -> None:
        hangup = self._watched.get(fd)
        if hangup is None:
            return
        if events & _GONE:
            self.detach(fd, hangup)  # nothing more can happen to it
        else:
            self._epoll.modify(fd, 0)  # errors are always told
        hangup.tell(events)

    def close(self) -> None:
        """Give the set back."""
        self._epoll.close()
