"""Addresses at which nothing good happens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections for the length of the block.

    The port is bound and never listened on, so nobody else can take it meanwhile.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@contextmanager
def silent_port() -> Iterator[int]:
    """A port of 127.0.0.1 where connecting takes for ever, for the length of the block.

    The accept queue is full and nobody accepts: Linux drops further SYNs.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        for _ in range(2):  # the queue of a backlog of 0 holds one; the second finds it full
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        yield address[1]
