"""A network between clients and the gateway that loses connections where a test says so."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

Plan = Callable[[int, bytes], int | None]
"""Is given the number of a connection, from 1, and all that came down on it; answers how many bytes of that
still reach the client before it is cut. None: it goes on."""


def never(number: int, came: bytes) -> int | None:
    """Cut nothing."""
    return None


class Network:
    """See the module's docstring.

    Attributes:
        target: where connections lead to; may be changed at any time, as may be
        plan: where they are cut.
        connections: how many there were.
        last: what came down on the newest of them.
    """

    def __init__(self, target: tuple[str, int], listener: trio.SocketListener) -> None:
        self.target = target
        self._listener = listener
        self._open: dict[int, tuple[trio.SocketStream, trio.SocketStream]] = {}
        self.plan: Plan = never
        self.connections = 0
        self.last = b""

    @property
    def address(self) -> tuple[str, int]:
        """Where clients connect."""
        host, port = self._listener.socket.getsockname()
        return host, port

    @property
    def url(self) -> str:
        """The same as a URL."""
        return "http://{}:{}".format(*self.address)

    def cut(self) -> None:
        """Lose all connections that there are."""
        for number in tuple(self._open):
            self._cut(number)

    def _cut(self, number: int) -> None:
        for stream in self._open.pop(number, ()):
            # Lingering for no second: the other side gets a reset, at once.
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.socket.close()

    async def serve(self) -> None:
        """Carry connections until cancelled."""
        await trio.serve_listeners(self._carry, [self._listener])

    async def _carry(self, client: trio.SocketStream) -> None:
        self.connections += 1
        number = self.connections
        try:
            gateway = await trio.open_tcp_stream(*self.target)
        except OSError:
            await trio.aclose_forcefully(client)
            return
        self._open[number] = client, gateway
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._up, number, client, gateway)
            await self._down(number, gateway, client)
        self._cut(number)

    async def _up(self, number: int, client: trio.SocketStream, gateway: trio.SocketStream) -> None:
        try:
            async for data in client:
                await gateway.send_all(data)
            await gateway.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._cut(number)

    async def _down(self, number: int, gateway: trio.SocketStream, client: trio.SocketStream) -> None:
        came = b""
        try:
            async for data in gateway:
                before, came = len(came), came + data
                end = self.plan(number, came)
                piece = data if end is None else data[: max(end - before, 0)]
                await client.send_all(piece)
                self.last = came
                if end is not None:
                    self._cut(number)
                    return
            await client.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._cut(number)


BACKLOG: Final = 64


@asynccontextmanager
async def network_to(target: tuple[str, int]) -> AsyncIterator[Network]:
    """Carry connections to ``target`` for the length of the block."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=BACKLOG)
    network = Network(target, listener)
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(network.serve)  # noqa: ASYNC113 - it listens already
        yield network
        network.cut()
        nursery.cancel_scope.cancel()
