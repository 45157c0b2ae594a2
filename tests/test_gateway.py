"""The whole process in one loop: start, shutdown, and running out of descriptors."""

from __future__ import annotations

import io
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from tests.e2e.serving import Serving, error_code, open_descriptors, serving, settings_of
from trio_gateway.gateway import Gateway
from trio_gateway.telemetry import Log
from trio_gateway.testing import (
    Answer,
    Hold,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    open_engine,
)

PATIENT = {"readiness_delay": 20, "grace": 20}


@contextmanager
def descriptors_limited_to(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# Start ------------------------------------------------------------------------------------------------------


async def test_an_address_that_can_not_be_had_is_an_error_and_leaves_nothing_open() -> None:
    async with serving(models=[]) as gateway:
        taken = gateway.gateway.addresses[0].removeprefix("http://")
        before = open_descriptors()
        settings = settings_of(models=[], server={"bind": ["127.0.0.1:0", taken]})
        failing = Gateway(settings, Log(io.StringIO()))
        with pytest.raises(OSError, match="in use"):
            await failing.run()
        failing.watch.close()
        assert open_descriptors() == before


async def test_the_log_tells_where_it_listens() -> None:
    async with serving(models=[]) as gateway:
        pass
    (line,) = gateway.logged("listening")
    assert line["public"] == gateway.gateway.addresses
    assert line["admin"] == gateway.gateway.admin_addresses


async def test_a_gateway_starts_and_lists_its_models_with_dead_workers() -> None:
    async with serving("http://127.0.0.1:1") as gateway:
        assert (await gateway.get("/readyz")).status == 200
        assert b'"m1"' in (await gateway.get("/v1/models")).body


# Descriptors ------------------------------------------------------------------------------------------------


async def test_there_are_never_more_connections_than_descriptors_for_both_sides() -> None:
    with descriptors_limited_to(200):
        async with serving(models=[]):
            pass
        async with serving(models=[], limits={"connections": 50}) as modest:
            pass
        async with serving(models=[]) as gateway:
            pass
    (line,) = gateway.logged("fewer_connections")
    assert (line["wanted"], line["possible"], line["descriptors"]) == (4096, 68, 200)
    assert not modest.logged("fewer_connections")


async def test_without_a_descriptor_left_accepting_pauses_and_goes_on_later() -> None:
    async with serving(models=[]) as gateway:
        with trio.fail_after(10):
            first = await gateway.connect()
            await first.request("GET", "/livez")
            await first.read_to_end()
            with descriptors_limited_to(open_descriptors()):  # one more than are open, for listing opens one
                second = await gateway.connect()
                await second.request("GET", "/livez")
                await gateway.until(lambda: bool(gateway.logged("accept_failed")))
                await first.request("GET", "/livez")
                assert (await first.read_to_end()).status == 200
            assert (await second.read_to_end()).status == 200
            first.leave_fin()
            second.leave_fin()
    assert len(gateway.logged("accept_failed")) == 1


# Shutdown ---------------------------------------------------------------------------------------------------


class Stopping:
    """A shutdown that runs beside the test.

    Attributes:
        hurry: set to skip what it waits for.
        over: set when nothing is left to wait for.
    """

    def __init__(self, gateway: Serving, nursery: trio.Nursery) -> None:
        self.hurry = trio.Event()
        self.over = trio.Event()
        self._gateway = gateway
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        await self._gateway.gateway.shut_down(self.hurry)
        self.over.set()

    async def draining(self) -> None:
        """Wait until new work is refused."""
        await self._gateway.until(lambda: self._gateway.gateway._refusal is not None)


async def test_readiness_fails_first_and_new_work_is_still_served(nursery: trio.Nursery) -> None:
    async with open_engine() as engine, serving(engine, shutdown=PATIENT) as gateway:
        stopping = Stopping(gateway, nursery)
        await gateway.until(lambda: gateway.gateway.not_ready() is not None)
        ready = await gateway.get("/readyz")
        assert (ready.status, ready.json()["reason"]) == (503, "shutting down")
        assert (await gateway.get("/livez")).status == 200
        assert (await gateway.ask(chat_request())).chat().text == "ok"
        assert not stopping.over.is_set()
        stopping.hurry.set()
        with trio.fail_after(5):
            await stopping.over.wait()


async def test_then_what_runs_finishes_what_waits_is_refused_and_what_comes_too(
    nursery: trio.Nursery,
) -> None:
    go = trio.Event()
    stream = chat_stream("one", "two")
    async with (
        open_engine((*stream[:3], WaitFor(go), *stream[3:])) as engine,
        serving(engine, worker={"slots": 1}, shutdown={"readiness_delay": 0, "grace": 20}) as gateway,
    ):
        with (
            trio.fail_after(10),
            await gateway.connect() as running,
            await gateway.connect() as waiting,
            await gateway.connect() as idle,
        ):
            await idle.request("GET", "/livez")
            await idle.read_to_end()
            await running.send(chat_request())
            await running.read_events(2)
            await waiting.send(chat_request())
            await gateway.queued(1)
            stopping = Stopping(gateway, nursery)
            refused = await waiting.read_to_end()
            assert (refused.status, error_code(refused)) == (503, "gateway_draining")
            assert int(refused.header("retry-after") or "") >= 1
            assert refused.header("connection") == "close"
            assert await waiting.read_closed() == "fin"
            assert await idle.read_closed() == "fin"
            late = await gateway.ask(chat_request())
            assert (late.status, error_code(late), late.header("connection")) == (
                503,
                "gateway_draining",
                "close",
            )
            assert (await gateway.get("/livez")).status == 200
            assert (await gateway.get("/readyz")).status == 503
            assert (await gateway.get("/v1/models")).status == 503
            assert not stopping.over.is_set()
            go.set()
            answer = await running.read_to_end()
            assert (answer.chat().text, answer.chat().done) == ("onetwo", 1)
            await stopping.over.wait()
        outcomes = [(record.outcome, record.code) for record in gateway.records]
        assert outcomes == [("gateway_shutdown", "gateway_draining"), ("completed", None)]
        assert engine.statistics().requests == 1


async def test_a_waiter_whose_request_is_streamed_with_heartbeats_gets_an_error_event(
    nursery: trio.Nursery,
) -> None:
    go = trio.Event()
    async with (
        open_engine((WaitFor(go), *chat_stream("ok"))) as engine,
        serving(
            engine,
            worker={"slots": 1},
            stream={"heartbeat_after": 0.03, "heartbeat_while_queued": True},
            shutdown={"readiness_delay": 0, "grace": 20},
        ) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request(stream=False))
        await engine.wait_open(1)
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_until(b": keep-alive")
            Stopping(gateway, nursery)
            reading = (await client.read_to_end()).chat()
        assert ([error["code"] for error in reading.errors], reading.done) == (["gateway_draining"], 0)
        go.set()
        await gateway.settled(2)


@pytest.mark.parametrize("hurried", [False, True], ids=["the grace is over", "in a hurry"])
async def test_what_still_runs_then_is_ended_and_told_why(hurried: bool, nursery: trio.Nursery) -> None:
    begun = chat_stream("one", finish=None, done=False, end=False)
    buffered = (WaitFor(trio.Event()), *chat_answer())
    limits = PATIENT if hurried else {"readiness_delay": 0, "grace": 0.1}
    async with (
        open_engine((*begun, Hold()), (Hold(),), buffered) as engine,
        serving(engine, shutdown=limits) as gateway,
    ):
        answers: dict[str, Answer] = {}

        async def ask(name: str, *, stream: bool) -> None:
            answers[name] = await gateway.ask(chat_request(stream=stream))

        async with trio.open_nursery() as asking:
            for number, (name, stream) in enumerate(
                {"streaming": True, "silent": True, "buffered": False}.items(), 1
            ):
                asking.start_soon(lambda n=name, s=stream: ask(n, stream=s))  # type: ignore[misc]
                await engine.wait_open(number)
            exchange = next(iter(gateway.gateway.live))
            await gateway.until(lambda: exchange.tally.committed)
            stopping = Stopping(gateway, nursery)
            if hurried:
                stopping.hurry.set()
            with trio.fail_after(5):
                await stopping.over.wait()
        reading = answers["streaming"].chat()
        assert (answers["streaming"].ended, reading.text, reading.done) == ("complete", "one", 0)
        assert [error["code"] for error in reading.errors] == ["gateway_draining"]
        for name in ("silent", "buffered"):
            assert (answers[name].status, error_code(answers[name])) == (503, "gateway_draining")
            assert answers[name].header("connection") == "close"
        assert [record.outcome for record in gateway.records] == ["gateway_shutdown"] * 3
        for request in engine.requests:
            with trio.fail_after(5):
                await request.closed.wait()
