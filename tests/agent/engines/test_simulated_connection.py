"""A connection to the simulated engine writes without waiting, and keeps what the socket does not take."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from trio_gateway.agent.engines._simulated_connection import EngineConnection


@pytest.fixture
async def pair() -> AsyncIterator[tuple[trio.socket.SocketType, trio.socket.SocketType]]:
    ours, theirs = trio.socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    yield ours, theirs
    ours.close()
    theirs.close()


Pair = tuple[trio.socket.SocketType, trio.socket.SocketType]


async def read(sock: trio.socket.SocketType, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await sock.recv(size - len(data))
    return data


def fill(sock: trio.socket.SocketType) -> int:
    """Write until the socket takes nothing more."""
    size = 0
    while True:
        try:
            size += os.write(sock.fileno(), b"x")
        except BlockingIOError:
            return size


async def test_what_a_full_socket_does_not_take_is_sent_later_in_its_order(pair: Pair) -> None:
    connection = EngineConnection(trio.SocketStream(pair[0]))
    filled = fill(pair[0])
    pieces = [bytes([65 + at]) * 5000 for at in range(20)]
    for piece in pieces:
        connection.write(piece)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.flush)
            assert await read(pair[1], filled + 100_000) == b"x" * filled + b"".join(pieces)


async def test_one_task_flushes_and_another_waits_for_it(pair: Pair) -> None:
    connection = EngineConnection(trio.SocketStream(pair[0]))
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.keep_flushing)
            await connection.wait_sent()
            for _ in range(2):
                connection.write(bytes(200_000))
                nursery.start_soon(read, pair[1], 200_000)
                await connection.wait_sent()
            nursery.cancel_scope.cancel()


async def test_a_peer_that_is_gone_breaks_the_connection_and_nothing_more(pair: Pair) -> None:
    connection = EngineConnection(trio.SocketStream(pair[0]))
    pair[1].close()
    connection.write(b"x")
    assert connection.broken
    connection.write(b"x")
    with trio.fail_after(5):
        await connection.flush()
        await connection.wait_sent()
    assert not await connection.wait_spoken()


async def test_a_write_after_the_end_goes_to_nobody_else(pair: Pair) -> None:
    connection = EngineConnection(trio.SocketStream(pair[0]))
    number = pair[0].fileno()
    connection.abort()
    connection.abort()
    first, second = socket.socketpair()  # the number comes again
    with first, second:
        assert number in (first.fileno(), second.fileno())
        connection.write(b"x")
        for sock in (first, second):
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)


async def test_a_close_wakes_who_flushes(pair: Pair) -> None:
    connection = EngineConnection(trio.SocketStream(pair[0]))
    connection.write(bytes(200_000))
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.flush)
            await trio.testing.wait_all_tasks_blocked()
            connection.abort()
