"""Processes of one machine that are replicas of a cluster, too: its store grants slots to each of them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.cluster.redis_server import RedisServer, needs_redis, open_server
from tests.e2e.serving import serving, tenant
from tests.e2e.test_processes import STREAM, Processes, processes, refusing_engine
from trio_gateway.testing import WaitFor, chat_request, open_engine

pytestmark = needs_redis
SLOTS = 4


@pytest.fixture
def server() -> Iterator[RedisServer]:
    yield from open_server()


async def joined(gateway: Processes, replicas: int) -> None:
    """Wait until every process shares with so many."""
    await gateway.until(
        lambda found: (
            found["cluster"]["standing"]["shared"] == 1 and len(found["cluster"]["replicas"]) == replicas
        ),
        "statistics",
    )


async def test_processes_and_another_gateway_never_use_more_slots_than_there_are(
    server: RedisServer, tmp_path: Path
) -> None:
    cluster = {"url": server.url}
    async with (
        refusing_engine(slots=SLOTS) as url,
        processes(url, folder=tmp_path, worker={"slots": SLOTS}, cluster=cluster) as gateway,
        serving(url, worker={"slots": SLOTS}, cluster=cluster) as other,
    ):
        await joined(gateway, 3)
        statuses: Counter[int] = Counter()

        async def client(number: int) -> None:
            for _ in range(5):
                request = chat_request(max_tokens=3)
                answer = await (gateway.ask(max_tokens=3) if number % 3 else other.ask(request))
                statuses[answer.status] += 1

        async with trio.open_nursery() as nursery:
            for number in range(24):
                nursery.start_soon(client, number)
        assert statuses == {200: 120}
        found = await gateway.read("statistics")
        assert await gateway.metric("trio_gateway_retries_total") == 0
        assert found["counts"].get("retries", {"values": []})["values"] == []
        assert found["lending"] is None
        assert [(each["slots"], each["held"]) for each in found["workers"]] == [(SLOTS, 0)]
        assert found["cluster"]["granted"] >= 1
        assert (await gateway.read("self-audit"))["ok"]
        rows = (await gateway.read("requests?limit=1000"))["requests"]
        assert {row["process"] for row in rows} == {0, 1}


async def test_a_process_that_is_killed_is_a_replica_less_and_its_slots_come_back(
    server: RedisServer, tmp_path: Path
) -> None:
    script = (*STREAM[:3], WaitFor(trio.Event()), *STREAM[3:])
    async with (
        open_engine(script) as engine,
        processes(
            engine,
            folder=tmp_path,
            worker={"slots": SLOTS, "cancel_grace": 0.1},
            cluster={"url": server.url, "lease": 1.5},
            tenants=[tenant("a", "ka"), tenant("b", "kb")],
        ) as gateway,
    ):
        await joined(gateway, 2)
        clients = [await gateway.send(key="ka") for _ in range(SLOTS)]
        for client in clients:
            await client.read_events(1)
        await gateway.act("tenants/b/freeze")
        of_process = Counter(row["process"] for row in await gateway.running())
        victim = max(of_process, key=lambda number: of_process[number])
        pids = {each["number"]: each["pid"] for each in (await gateway.read("statistics"))["processes"]}
        os.kill(pids[victim], signal.SIGKILL)
        more = [await gateway.send(key="ka") for _ in range(of_process[victim])]
        for client in more:
            await client.read_events(1)
        await joined(gateway, 2)
        (row,) = [row for row in (await gateway.read("tenants"))["tenants"] if row["id"] == "b"]
        assert row["frozen"]
        for client in (*clients, *more):
            client.__exit__(None, None, None)
        assert (await gateway.read("self-audit"))["ok"]
