"""The self-audit finds what tests let go astray, names its holder, and else finds nothing."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.e2e.serving import LIMIT, Serving, leave, serving
from trio_gateway.exchange import Exchange
from trio_gateway.operations import _self_audit
from trio_gateway.operations._self_audit import SelfAudit
from trio_gateway.testing import (
    Head,
    Repeat,
    chat_chunk,
    chat_request,
    chat_stream,
    make_request,
    open_engine,
    until,
)

WORD = chat_chunk({"content": "word "})
ENDLESS = (Head(), Repeat((WORD,), every=0.005))


@pytest.fixture(autouse=True)
def _no_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held a moment too long is a leak at once."""
    monkeypatch.setattr(_self_audit, "SLACK", 0.0)
    monkeypatch.setattr(_self_audit, "FAREWELL", 0.3)


@asynccontextmanager
async def audited(*scripts: Any, **sections: Any) -> AsyncIterator[tuple[Serving, SelfAudit]]:
    async with open_engine(*scripts) as engine, serving(engine, **sections) as gateway:
        yield gateway, gateway.gateway._operations.auditor


def found(auditor: SelfAudit) -> list[tuple[str, str, str | None]]:
    return [(leak.kind, leak.holder, leak.worker) for leak in auditor.leaks()]


async def test_a_lease_that_nobody_gives_back_is_named() -> None:
    async with audited() as (gateway, auditor):
        request = make_request(tenant="anonymous")
        ticket = gateway.gateway.admission.enter(request)
        lease = await ticket.wait()
        assert found(auditor) == [("lease", request.exchange_id, "w1")]
        report = await auditor.look()
        assert (report["ok"], report["leaks"][0]["holder"]) == (False, request.exchange_id)
        lease.release()
        assert found(auditor) == []
        assert await auditor.look() == {"ok": True, "equations": [], "leaks": []}


async def test_a_position_that_nobody_waits_at_is_named() -> None:
    async with audited(worker={"slots": 1}) as (gateway, auditor):
        first, second = make_request(tenant="anonymous"), make_request(tenant="anonymous")
        lease = await gateway.gateway.admission.enter(first).wait()
        ticket = gateway.gateway.admission.enter(second)
        assert ("position", second.exchange_id, None) in found(auditor)
        ticket.leave()
        lease.release()
        assert found(auditor) == []


async def test_a_lease_that_drains_for_ever_is_named() -> None:
    async with audited(worker={"cancel_grace": 60}) as (gateway, auditor):
        request = make_request(tenant="anonymous")
        lease = await gateway.gateway.admission.enter(request).wait()
        lease.engine_started(request.attempt_id(1))
        lease.drain()
        assert found(auditor) == []  # it has its time
        lease.draining_since = trio.current_time() - 61
        assert found(auditor) == [("lease", request.exchange_id, "w1")]
        lease.release()


async def test_bytes_in_the_channel_of_an_ended_exchange_are_named() -> None:
    kept: list[Exchange] = []
    async with audited(ENDLESS) as (gateway, auditor):
        with await gateway.connect() as client:
            await client.send(chat_request(stream=True))
            await client.read_events(2)
            kept += gateway.gateway.live
            client.leave_reset()
            await gateway.settled()
        (exchange,) = kept
        gateway.may_report_bugs = True
        exchange.channel.put_nowait(b"forgotten")
        gateway.broken.clear()
        assert found(auditor) == [("buffer", exchange.request.exchange_id, None)]
        exchange.channel.clear()
        assert found(auditor) == []
        await trio.lowlevel.checkpoint()
        gateway.broken.clear()


async def test_bytes_that_nobody_has_are_told() -> None:
    async with audited() as (gateway, auditor):
        gateway.gateway.buffers.take(5)
        assert found(auditor) == []  # first seen now
        gateway.broken.clear()
        with trio.fail_after(LIMIT):
            await until(lambda: found(auditor) == [("buffer", "unknown", None)])
        gateway.gateway.buffers.give(5)
        assert found(auditor) == []
        await trio.lowlevel.checkpoint()
        gateway.broken.clear()


async def test_a_task_that_outlives_its_exchange_is_named_with_its_place() -> None:
    async with audited(ENDLESS) as (gateway, auditor), trio.open_nursery() as nursery:
        with await gateway.connect() as client:
            await client.send(chat_request(stream=True))
            await client.read_events(1)
            (exchange,) = gateway.gateway.live
            assert exchange.task is not None
            exchange.task.context.run(nursery.start_soon, trio.sleep_forever)
            assert found(auditor) == []
            client.leave_reset()
            await gateway.settled()
        await gateway.until(lambda: len(gateway.gateway.live) == 0)
        with trio.fail_after(LIMIT):
            await until(lambda: found(auditor) == [("task", exchange.request.exchange_id, None)])
        assert "sleep_forever" in auditor.leaks()[0].detail
        nursery.cancel_scope.cancel()


async def test_random_requests_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit looks all the time, and never finds a thing."""
    monkeypatch.setattr(_self_audit, "SLACK", 0.1)
    dice = random.Random(7)
    looks = 0
    scripts = (ENDLESS, chat_stream(*"abcdef"), chat_stream("a"))

    async with audited(lambda request: dice.choice(scripts), worker={"slots": 6}) as (gateway, auditor):

        async def ask() -> None:
            for _ in range(12):
                with trio.move_on_after(dice.uniform(0.001, 0.1)), await gateway.connect() as client:
                    await client.send(chat_request(stream=dice.random() < 0.8))
                    if dice.random() < 0.5:
                        await client.read_to_end()
                    else:
                        await client.read_head()
                        leave(client, dice.choice(("fin", "reset")))

        async def look() -> None:
            nonlocal looks
            while True:
                report = await auditor.look()
                assert report == {"ok": True, "equations": [], "leaks": []}
                looks += 1
                await trio.sleep(0.002)

        async with trio.open_nursery() as looking:
            looking.start_soon(look)
            async with trio.open_nursery() as asking:
                for _ in range(16):
                    asking.start_soon(ask)
            looking.cancel_scope.cancel()
    assert looks > 10


async def test_what_it_finds_by_itself_is_logged_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_self_audit, "EVERY", 0.01)
    async with audited() as (gateway, _):
        house = gateway.gateway.house
        request = make_request(tenant="anonymous")
        lease = await gateway.gateway.admission.enter(request).wait()
        await gateway.until(lambda: house.leaks == 1)
        assert gateway.gateway._operations.statistics()["conservation"]["leaks"] == 1
        lease.release()
        await gateway.until(lambda: house.leaks == 0)
    (failed,) = gateway.logged("self_audit_failed")
    assert request.exchange_id in failed["leaks"][0]
    assert len(gateway.logged("self_audit_passed")) == 1
