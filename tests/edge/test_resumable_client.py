"""The port of a stream that survives its connection: what it counts as delivered, whoever reads."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from tests.ports.test_client_port import COMMENT, LIMIT, ONE, STREAM, TWO, HttpPeer, over_tcp
from trio_gateway.contract import CHAT
from trio_gateway.edge._resumable_client import KeepTerms, ResumableClient
from trio_gateway.errors import ClientGone
from trio_gateway.flow import BufferPool


def port() -> ResumableClient:
    client = ResumableClient(CHAT, KeepTerms(10_000, 30.0), BufferPool(100_000))
    client.begin(STREAM)
    client.push(ONE + TWO[:5], joined=[(len(ONE), 4)])
    client.push(TWO[5:] + COMMENT + ONE, joined=[(len(TWO) - 5, 2)])
    return client


@asynccontextmanager
async def reading(client: ResumableClient, after: int) -> AsyncIterator[HttpPeer]:
    """Read from behind an event on, with a connection of its own."""

    async def serve(peer: HttpPeer) -> None:
        with contextlib.suppress(ClientGone):  # another one came, or nothing more will
            await client.serve(peer.http, after)

    async with (
        trio.open_nursery() as watching,
        over_tcp(watching) as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, peer)  # noqa: ASYNC113 - what it serves is waited for
        await peer.read(COMMENT + ONE)
        yield peer


async def test_an_event_that_stands_for_more_counts_as_all_of_them_and_has_one_number() -> None:
    client = port()
    assert client.delivered() == (0, 0)
    with trio.fail_after(LIMIT):
        async with reading(client, 0):
            assert client.delivered()[0] == 5 + 3 + 1
            async with reading(client, 1):
                assert client.delivered()[0] == 5 + 3 + 1
                client.cut()


async def test_what_is_withdrawn_before_anybody_took_it_stands_for_nothing() -> None:
    client = port()
    client.push(TWO[:5])
    client.withdraw()
    client.push(TWO[5:] + COMMENT + ONE, joined=[(len(TWO) - 5 + len(COMMENT + ONE), 7)])
    with trio.fail_after(LIMIT):
        async with reading(client, 0):
            assert client.delivered()[0] == 8
            client.cut()


async def test_who_takes_nothing_of_an_answer_that_is_over_is_cut_off() -> None:
    client = ResumableClient(CHAT, KeepTerms(1 << 24, 0.1), BufferPool(1 << 24))
    client.begin(STREAM)
    client.push(b"data: " + b"x" * (100_000) + b"\n\n", last=True)
    client.settle(accepted=True)
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as watching, over_tcp(watching) as peer:
            with pytest.raises(ClientGone):
                await client.serve(peer.http, 0)
    assert client.over
    client.forget()
