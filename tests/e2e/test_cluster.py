"""Two whole gateways before one engine, sharing through a real store: the slots are those of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.admin.test_workers import joinable
from tests.agent.rig import running
from tests.cluster.redis_server import RedisServer, needs_redis, open_server
from tests.e2e.serving import Serving, serving
from tests.e2e.test_fleet_agents import engine as simulated
from tests.e2e.test_fleet_agents import registering
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


async def test_a_worker_that_registers_with_one_gateway_is_used_by_all_until_it_signs_off(
    server: RedisServer, tmp_path: Path
) -> None:
    def gateway(name: str) -> Any:
        (tmp_path / name).mkdir()
        shared: dict[str, Any] = {"cluster": {"url": server.url}, "models": [{"id": "m1"}]}
        return joinable(tmp_path / name, fleet={"heartbeat_interval": 0.2, "ttl": 2}, **shared)

    def states(*gateways: Serving) -> list[str]:
        books = [each.gateway.fleet.books.get("gpu-0") for each in gateways]
        return ["" if book is None else book.snapshot.state for book in books]

    async with (
        gateway("one") as one,
        gateway("other") as other,
        running(simulated(), **registering(0, one)) as agent,
    ):
        await one.until(lambda: states(one, other) == ["ready", "ready"])
        secrets = {each.gateway.fleet.books["gpu-0"].worker.api_key for each in (one, other)}
        assert len(secrets) == 1
        assert (await other.ask(chat_request(max_tokens=5))).status == 200
        # All believe it for as long as it is heard of anywhere.
        book = other.gateway.fleet.books["gpu-0"]
        believed = book.expires_at or 0.0
        await other.until(lambda: (book.expires_at or 0.0) > believed + 1.0)
        assert states(one, other) == ["ready", "ready"]
        await other.returned()
        agent.agent.drain()
        await one.until(lambda: states(one, other) == ["", ""])
        with trio.fail_after(10):
            await agent.over.wait()
