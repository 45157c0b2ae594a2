"""The tree of tasks by exchange, and where each waits."""

from __future__ import annotations

from typing import Any

import trio

from tests.e2e.serving import serving
from tests.exchange.rig import rigged
from trio_gateway.admin import SHAPES, complaints
from trio_gateway.operations._tasks import TaskTree
from trio_gateway.testing import (
    Head,
    Hold,
    RecordingClient,
    Repeat,
    Wait,
    chat_chunk,
    chat_request,
    open_engine,
)

WORD = chat_chunk({"content": "x" * 900})


def places(rows: list[dict[str, Any]]) -> set[str]:
    return {row["doing"].partition(" ")[2] for row in rows if row["doing"] is not None}.union(
        *(places(row["children"]) for row in rows)
    )


def of(rows: list[dict[str, Any]], exchange: str | None) -> list[dict[str, Any]]:
    return next((row["tasks"] for row in rows if row["exchange"] == exchange), [])


async def test_each_exchange_has_its_tasks_with_the_place_where_they_wait(autojump_clock: object) -> None:
    async with rigged((Head(), Wait(5), WORD, Hold()), (Head(), Repeat((WORD,)))) as rig:
        first = rig.start()
        await trio.sleep(1)
        slow = rig.start(client=RecordingClient(room=1000))
        await trio.sleep(1)
        rows = await TaskTree().rows()
        assert list(complaints({"tasks": rows}, SHAPES["Tasks"], SHAPES)) == []
        waiting = places(of(rows, first.exchange.request.exchange_id))
        assert "_Player._next_output" in waiting
        stalled = places(of(rows, slow.exchange.request.exchange_id))
        assert {"RecordingClient.flush", "ByteChannel.wait_room"} <= stalled
        (top,) = of(rows, None)
        assert top["name"] == "<init>"
        for running in (first, slow):
            running.client.leave()
        await rig.live.wait_none()
        assert of(await TaskTree().rows(), first.exchange.request.exchange_id) == []


async def test_no_more_than_so_many_are_described(autojump_clock: object) -> None:
    async with rigged((Head(), Hold())) as rig:
        many = [rig.start() for _ in range(10)]
        await trio.sleep(1)
        rows = await TaskTree().rows(most=12)
        last = of(rows, None)[-1]
        assert last["name"].endswith(" further tasks")
        assert count(rows) == 13
        for running in many:
            running.client.leave()


def count(rows: list[dict[str, Any]]) -> int:
    def below(tasks: list[dict[str, Any]]) -> int:
        return sum(1 + below(task["children"]) for task in tasks)

    return sum(below(row["tasks"]) for row in rows)


async def test_a_gateway_tells_its_own_tasks_too() -> None:
    async with open_engine((Head(), WORD, Hold())) as engine, serving(engine) as gateway:
        with await gateway.connect() as client:
            await client.send(chat_request(stream=True))
            await client.read_events(1)
            (exchange,) = gateway.gateway.live
            rows = await gateway.gateway._operations.tasks()
            assert places(of(rows, exchange.request.exchange_id))
            assert "SelfAudit.run" in places(of(rows, None))
            client.leave_reset()
