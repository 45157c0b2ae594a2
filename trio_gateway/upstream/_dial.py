"""Connecting to a worker: TCP, TLS or a unix socket, with a bounded receive buffer."""

from __future__ import annotations

import os
import socket
import ssl
from typing import Final

import trio

from ..contract import RawJson, Worker
from ..errors import UpstreamFailed, UpstreamFault
from ..flow import shake_hands

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]

NEXT_ADDRESS_AFTER: Final = 0.25  # seconds
_KEEP_ALIVE: Final = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


async def dial(worker: Worker, limit: float, receive_buffer: int) -> Stream:
    """Connect to a worker.

    Args:
        limit: seconds for name, TCP and TLS together.
        receive_buffer: bytes of kernel memory for what the engine sends ahead; set
            before connecting, since the window is agreed on then.

    Raises:
        UpstreamFailed: UNREACHABLE, for whatever reason.
    """
    with trio.move_on_after(limit):
        try:
            return await _open(worker, receive_buffer)
        except (OSError, trio.BrokenResourceError, ValueError) as exc:
            raise UpstreamFailed(UpstreamFault.UNREACHABLE, f"{worker.id}: {exc}") from None
    raise UpstreamFailed(UpstreamFault.UNREACHABLE, f"{worker.id}: no connection within {limit} s")


async def _open(worker: Worker, receive_buffer: int) -> Stream:
    if worker.socket_path is not None:
        return await _connect(socket.AF_UNIX, worker.socket_path, receive_buffer)
    stream = await _first_that_answers(worker.address or worker.host, worker.port, receive_buffer)
    if worker.tls is None:
        return stream
    try:
        context = worker.tls if isinstance(worker.tls, ssl.SSLContext) else worker.tls.context
        secured = trio.SSLStream(stream, context, server_hostname=worker.host, https_compatible=True)
        why = await shake_hands(secured)
        if why is not None:
            raise UpstreamFailed(UpstreamFault.UNREACHABLE, f"{worker.id}: no TLS: {why}")
    except BaseException:
        stream.socket.close()
        raise
    return secured


async def _first_that_answers(host: str, port: int, receive_buffer: int) -> trio.SocketStream:
    """Connect to whichever address of a name answers first, asked anew each time.

    As RFC 8305 section 5: the next address gets its turn when one failed, or after
    a quarter of a second, so that an address that swallows packets costs no more.
    """
    found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    race = _Race(receive_buffer)
    try:
        async with trio.open_nursery() as nursery:
            for family, _, _, _, address in found:
                failed = trio.Event()
                nursery.start_soon(race.run, family, address, failed, nursery.cancel_scope)
                with trio.move_on_after(NEXT_ADDRESS_AFTER):
                    await failed.wait()
    except BaseException:
        race.drop()
        raise
    return race.winner()


class _Race:
    """Attempts at the addresses of one name, of which one wins."""

    def __init__(self, receive_buffer: int) -> None:
        self._receive_buffer = receive_buffer
        self._stream: trio.SocketStream | None = None
        self._error = OSError("the name has no address")

    async def run(self, family: int, address: object, failed: trio.Event, others: trio.CancelScope) -> None:
        """Try one address; the first that answers ends the others."""
        try:
            stream = await _connect(family, address, self._receive_buffer)
        except OSError as exc:
            self._error = exc
            failed.set()
            return
        if self._stream is None:
            self._stream = stream
            others.cancel(reason="another address answered")
        else:
            stream.socket.close()

    def winner(self) -> trio.SocketStream:
        """Answer the connected stream; raises the last error if none is."""
        if self._stream is None:
            raise self._error
        return self._stream

    def drop(self) -> None:
        """Close what was won in vain."""
        if self._stream is not None:
            self._stream.socket.close()


async def _connect(family: int, address: object, receive_buffer: int) -> trio.SocketStream:
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        await sock.connect(address)
        return trio.SocketStream(sock)
    except BaseException:
        sock.close()
        raise


def try_send(stream: Stream, data: RawJson) -> int:
    """Write what the socket takes at once; answers how many bytes. TLS takes none this way."""
    if isinstance(stream, trio.SSLStream):
        return 0
    try:
        return os.write(stream.socket.fileno(), data)
    except BlockingIOError:
        return 0
    except OSError as exc:
        raise trio.BrokenResourceError from exc
