"""Listening sockets and the accept loop: a permit before each accept, options set once."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from ._connection import SILENT_LIMIT

BACKLOG: Final = 1024
SEND_BUFFER: Final = 64 * 1024  # bytes; the kernel doubles it for its own bookkeeping
NOT_SENT: Final = 16 * 1024  # bytes that may wait in the kernel unsent

_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_AFTER: Final = 0.1  # seconds, when the process has no descriptor left
_TCP_NOTSENT_LOWAT: Final = 25

Handler = Callable[[trio.SocketStream], Awaitable[None]]


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


class AcceptLoop:
    """Accepts connections of one listener while there are permits.

    Args:
        permits: shared by all listeners; the backlog of the kernel holds whoever has none.
        complain: told once per episode that the process has run out of descriptors.
    """

    def __init__(
        self, permits: trio.Semaphore, handler: Handler, complain: Callable[[OSError], None]
    ) -> None:
        self._permits = permits
        self._handler = handler
        self._complain = complain

    async def run(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        """Accept until cancelled or until the listener is closed."""
        complained = False
        while True:
            await self._permits.acquire()
            try:
                stream = await listener.accept()
            except trio.ClosedResourceError:
                self._permits.release()
                return
            except OSError as exc:
                self._permits.release()
                if exc.errno not in _FULL:
                    continue  # that one left before it was accepted
                if not complained:
                    self._complain(exc)
                    complained = True
                await trio.sleep(_RETRY_AFTER)
                continue
            except BaseException:
                self._permits.release()
                raise
            complained = False
            nursery.start_soon(self._serve, stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            await self._handler(stream)
        finally:
            stream.socket.close()
            self._permits.release()
