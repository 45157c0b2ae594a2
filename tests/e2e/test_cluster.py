"""Two whole gateways before one engine, sharing through a real store: the slots are those of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio

from tests.cluster.redis_server import RedisServer, needs_redis, open_server
from tests.e2e.serving import serving
from trio_gateway.testing import WaitFor, chat_request, chat_stream, open_engine

pytestmark = needs_redis


@pytest.fixture
def server() -> Iterator[RedisServer]:
    yield from open_server()


async def test_a_slot_that_one_gateway_gives_back_is_the_others_next(server: RedisServer) -> None:
    go = trio.Event()
    scripts = ((WaitFor(go), *chat_stream("a")), chat_stream("b"), chat_stream("c"))
    shared: dict[str, Any] = {"worker": {"slots": 1}, "cluster": {"url": server.url}}
    async with (
        open_engine(*scripts) as engine,
        serving(engine, **shared) as one,
        serving(engine, **shared) as other,
    ):
        with await one.connect() as first, await other.connect() as second:
            await first.send(chat_request())
            await one.until(lambda: one.held == 1)
            await second.send(chat_request())
            await other.queued(1)
            go.set()
            assert (await first.read_to_end()).status == 200
            assert (await second.read_to_end()).status == 200
        assert (await one.ask(chat_request())).status == 200
        figures = one.gateway.statistics()["cluster"]
        assert (figures["standing"]["shared"], figures["scope"]) == (1, "fleet")
        assert sorted(figures["replicas"]) == sorted([one.gateway.boot_id, other.gateway.boot_id])
        assert figures["granted"] == 2


async def test_a_gateway_whose_store_is_lost_serves_its_share_or_refuses(server: RedisServer) -> None:
    url = {"url": server.url}
    async with (
        open_engine(chat_stream("a")) as engine,
        serving(engine, cluster=url) as splits,
        serving(engine, cluster={**url, "on_loss": "refuse"}) as refuses,
    ):
        server.kill()
        await splits.until(lambda: splits.gateway.statistics()["cluster"]["standing"]["alone"] == 1)
        await refuses.until(lambda: refuses.gateway.statistics()["cluster"]["standing"]["alone"] == 1)
        assert (await splits.ask(chat_request())).status == 200
        answer = await refuses.ask(chat_request())
        assert answer.status == 503
        assert b'"no_worker"' in answer.body
        assert answer.header("retry-after") == "1"
        assert refuses.gateway.not_ready() is not None
        assert splits.gateway.not_ready() is None
