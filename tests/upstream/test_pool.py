"""The free list of connections to engines, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from trio_gateway.contract import Worker
from trio_gateway.fleet import DIALECTS
from trio_gateway.upstream import ConnectionPool
from trio_gateway.upstream._connection import Connection


class Hand:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
async def pool(hand: Hand) -> AsyncIterator[ConnectionPool]:
    pool = ConnectionPool(3.0, hand.now)
    yield pool
    pool.close()


def worker(name: str) -> Worker:
    return Worker(name, f"http://{name}", DIALECTS["openai"], "127.0.0.1", 1, name, "", 4, 0.5)


ONE, TWO = worker("one"), worker("two")


def connected() -> tuple[Connection, trio.SocketStream]:
    """A connection, and the engine's end of it."""
    ours, theirs = trio.socket.socketpair()
    return Connection(trio.SocketStream(ours)), trio.SocketStream(theirs)


def is_open(connection: Connection) -> bool:
    assert isinstance(connection.stream, trio.SocketStream)
    return connection.stream.socket.fileno() >= 0


async def test_the_newest_is_taken_first_and_each_worker_has_its_own(pool: ConnectionPool) -> None:
    (first, a), (second, b), (other, c) = connected(), connected(), connected()
    async with a, b, c:
        pool.give(ONE, first)
        pool.give(ONE, second)
        pool.give(TWO, other)
        assert pool.idle == 3
        assert pool.take(ONE) is second
        assert pool.take(ONE) is first
        assert pool.take(ONE) is None
        assert pool.take(TWO) is other
        assert all(connection.reused for connection in (first, second, other))
        for connection in (first, second, other):
            connection.abort()


async def test_one_that_was_idle_too_long_is_closed_instead_of_taken(
    pool: ConnectionPool, hand: Hand
) -> None:
    (old, a), (young, b) = connected(), connected()
    async with a, b:
        pool.give(ONE, old)
        hand.time += 2.9
        pool.give(ONE, young)
        hand.time += 0.2
        assert pool.take(ONE) is young
        assert pool.take(ONE) is None
        assert not is_open(old)
        young.abort()


async def test_the_sweep_closes_what_was_idle_too_long(pool: ConnectionPool, hand: Hand) -> None:
    (old, a), (young, b) = connected(), connected()
    async with a, b:
        pool.give(ONE, old)
        hand.time += 2.9
        pool.give(TWO, young)
        hand.time += 0.2
        pool.sweep()
        assert (is_open(old), is_open(young), pool.idle) == (False, True, 1)


@pytest.mark.parametrize("act", ["close", "speak"])
async def test_one_whose_engine_closed_or_spoke_is_not_taken(act: str, pool: ConnectionPool) -> None:
    connection, theirs = connected()
    async with theirs:
        pool.give(ONE, connection)
        if act == "close":
            await theirs.aclose()
        else:
            await theirs.send_all(b"HTTP/1.1 408 ")
        assert pool.take(ONE) is None
        assert not is_open(connection)


async def test_closing_closes_all(pool: ConnectionPool) -> None:
    (first, a), (other, b) = connected(), connected()
    async with a, b:
        pool.give(ONE, first)
        pool.give(TWO, other)
        pool.close()
        assert (is_open(first), is_open(other), pool.idle) == (False, False, 0)


async def test_what_nobody_swept_away_in_time_is_overdue(hand: Hand, pool: ConnectionPool) -> None:
    connection, theirs = connected()
    async with theirs:
        pool.give(ONE, connection)
        hand.time += 3.0
        assert pool.overdue() == []
        hand.time += 1.5
        assert pool.overdue() == [("one", 1.5)]
        pool.sweep()
        assert pool.overdue() == []
