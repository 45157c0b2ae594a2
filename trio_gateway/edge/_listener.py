"""Listening sockets and the accept loop: a permit before each accept, options set once."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from ._connection import SILENT_LIMIT

BACKLOG: Final = 4096  # the kernel has a bound of its own, often the same
SEND_BUFFER: Final = 64 * 1024  # bytes; the kernel doubles it for its own bookkeeping
NOT_SENT: Final = 16 * 1024  # bytes that may wait in the kernel unsent

_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_AFTER: Final = 0.1  # seconds, when the process has no descriptor left
_TCP_NOTSENT_LOWAT: Final = 25
_COURTESY: Final = 0.001  # seconds; a process that has nothing to do wakes up in less

_ACCEPTS: Final = 32  # connections of one wake-up: each has a request that takes about half a millisecond

Handler = Callable[[socket.socket], Awaitable[None]]


async def open_listeners(binds: tuple[str, ...]) -> list[trio.SocketListener]:
    """Open the sockets of ``server.bind``.

    Args:
        binds: ``host:port``, ``[v6]:port`` or ``unix:path``.

    Raises:
        OSError: an address can not be had; its ``filename`` says which.
    """
    listeners: list[trio.SocketListener] = []
    try:
        for bind in binds:
            try:
                if bind.startswith("unix:"):
                    listeners.append(_listen_unix(bind.removeprefix("unix:")))
                else:
                    listeners += await _listen_tcp(bind)
            except OSError as exc:
                raise OSError(exc.errno, exc.strerror, bind) from exc  # the system's own words name none
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    return listeners


async def _listen_tcp(bind: str) -> list[trio.SocketListener]:
    host, _, port = bind.rpartition(":")
    listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]") or None, backlog=BACKLOG)
    for listener in listeners:
        sock = listener.socket
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        for option, value in (
            (socket.TCP_KEEPIDLE, 15),
            (socket.TCP_KEEPINTVL, 5),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, int(SILENT_LIMIT * 1000)),
            (_TCP_NOTSENT_LOWAT, NOT_SENT),
            (socket.TCP_NODELAY, 1),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return listeners


def _listen_unix(path: str) -> trio.SocketListener:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        sock.bind(path)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        return trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    except BaseException:
        sock.close()
        raise


def _remove_stale(path: str) -> None:
    """Take away a socket that nobody serves any more; anything else at that path is kept."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


class OthersPort(Protocol):
    """Other processes that accept connections of the same listener."""

    def count(self, more: int) -> None:
        """Note that connections came, or went."""

    def ahead(self) -> bool:
        """Whether another process has fewer."""


class AcceptLoop:
    """Accepts connections of one listener while there are permits.

    Args:
        permits: shared by all listeners; the backlog of the kernel holds whoever has none.
        complain: told once per episode that the process has run out of descriptors.
        others: that accept at the same listener, and are let first where they have fewer; None: there are
            none.
    """

    def __init__(
        self,
        permits: trio.Semaphore,
        handler: Handler,
        complain: Callable[[OSError], None],
        others: OthersPort | None = None,
    ) -> None:
        self._permits = permits
        self._handler = handler
        self._complain = complain
        self._others = others

    async def run(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        """Accept until cancelled or until the listener is closed."""
        # Trio's own accept lets all other tasks run after each: in a rush the backlog would overflow.
        accepting = socket.socket(fileno=listener.socket.fileno())
        try:
            await self._accept_from(accepting, listener, nursery)
        except trio.ClosedResourceError:
            return
        finally:
            accepting.detach()  # the descriptor is the listener's

    async def _accept_from(
        self, accepting: socket.socket, listener: trio.SocketListener, nursery: trio.Nursery
    ) -> None:
        complained = False
        while listener.socket.fileno() >= 0:
            if not self._permits.value:
                async with self._permits:
                    pass
            await trio.lowlevel.wait_readable(listener.socket)
            if self._is_ahead():
                await trio.sleep(_COURTESY)
            try:
                self._accept_some(accepting, nursery)
                complained = False
            except OSError as exc:
                if not complained:
                    self._complain(exc)
                complained = True
                await trio.sleep(_RETRY_AFTER)

    def _is_ahead(self) -> bool:
        """Whether another process, to which the kernel told of a connection as well, should have it."""
        return self._others is not None and self._others.ahead()

    def _accept_some(self, accepting: socket.socket, nursery: trio.Nursery) -> None:
        """Accept who is there, while there are permits.

        Raises:
            OSError: the process can have no more descriptors.
        """
        for number in range(_ACCEPTS):
            if number and self._is_ahead():
                return
            try:
                self._permits.acquire_nowait()
            except trio.WouldBlock:
                return
            try:
                accepted, _ = accepting.accept()
            except OSError as exc:
                self._permits.release()
                if isinstance(exc, BlockingIOError):
                    return
                if exc.errno in _FULL:
                    raise
                continue  # that one left before it was accepted
            accepted.setblocking(False)
            if self._others is not None:
                self._others.count(1)
            nursery.start_soon(self._serve, accepted, self._handler)

    # -- connections that another process accepted

    def admit(self) -> bool:
        """Take a permit for one connection more, if there is any."""
        try:
            self._permits.acquire_nowait()
        except trio.WouldBlock:
            return False
        return True

    def dismiss(self) -> None:
        """Give it back."""
        self._permits.release()

    def adopt(self, sock: socket.socket, handler: Handler, nursery: trio.Nursery) -> None:
        """Serve a connection for which there is a permit."""
        if self._others is not None:
            self._others.count(1)
        nursery.start_soon(self._serve, sock, handler)

    async def _serve(self, sock: socket.socket, handler: Handler) -> None:
        try:
            await handler(sock)
        finally:
            sock.close()
            self._permits.release()
            if self._others is not None:
                self._others.count(-1)
