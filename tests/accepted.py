"""The socket of a connection as the accept loop hands it over."""

from __future__ import annotations

import socket

import trio


def socket_of(stream: trio.SocketStream) -> socket.socket:
    """Take the socket out of a stream, which is of no use afterwards."""
    sock = socket.socket(fileno=stream.socket.detach())
    sock.setblocking(False)
    return sock
