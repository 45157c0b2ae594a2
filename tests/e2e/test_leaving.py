"""The client leaves by FIN, by reset or only half, at every stage of its request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from tests.e2e.serving import Leaving, Serving, leave, serving
from trio_gateway.testing import (
    Head,
    Raw,
    RawClient,
    Script,
    ScriptedEngine,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    open_engine,
    until,
)

STREAM = chat_stream("one", "two")
BODY = b'{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant",'
REST = b'"content":"whole"},"finish_reason":"stop"}]}'
SIZED = (("content-type", "application/json"), ("content-length", str(len(BODY + REST))))
HEARTBEAT_AFTER = 0.05
COMMENT_CHUNK = b"e\r\n: keep-alive\n\n\r\n"

Reach = Callable[[ScriptedEngine, RawClient], Awaitable[None]]


@dataclass(frozen=True)
class Stage:
    """One point in the life of a request.

    Attributes:
        begin: what the engine says before that point; then it waits.
        rest: what it says afterwards.
        reach: waits until the client is there.
        phase: what the record calls it.
    """

    begin: Script
    rest: Script
    reach: Reach
    phase: str
    stream: bool = True


async def engine_has_it(engine: ScriptedEngine, client: RawClient) -> None:
    await engine.wait_open(1)


async def engine_has_spoken(engine: ScriptedEngine, client: RawClient) -> None:
    request = await engine.request()
    await until(lambda: request.bytes_sent > 0)


async def client_has_a_heartbeat(engine: ScriptedEngine, client: RawClient) -> None:
    await client.read_until(b": keep-alive")


async def client_has_content(engine: ScriptedEngine, client: RawClient) -> None:
    await client.read_events(2)


STAGES = {
    "before the head": Stage((), STREAM, engine_has_it, "before_headers"),
    "before the first event": Stage(STREAM[:1], STREAM[1:], engine_has_spoken, "before_headers"),
    "after the role": Stage(STREAM[:2], STREAM[2:], engine_has_spoken, "before_headers"),
    "after a heartbeat": Stage(STREAM[:2], STREAM[2:], client_has_a_heartbeat, "before_content"),
    "while streaming": Stage(STREAM[:3], STREAM[3:], client_has_content, "after_content"),
    "before a buffered head": Stage((), chat_answer("whole"), engine_has_it, "before_headers", False),
    "within a buffered body": Stage(
        (Head(200, SIZED), Raw(BODY)), (Raw(REST),), engine_has_spoken, "before_headers", False
    ),
}
STAGE = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
LEAVING = pytest.mark.parametrize("how", ["fin", "reset"])


def script_of(stage: Stage, go: trio.Event) -> Script:
    return (*stage.begin, WaitFor(go), *stage.rest)


def heartbeats(stage: Stage) -> dict[str, float]:
    """Heartbeats come early where the stage is about them, else not during a test."""
    return {"heartbeat_after": HEARTBEAT_AFTER if stage.phase == "before_content" else 60.0}


def bind_of(folder: Path | None) -> dict[str, list[str]]:
    return {"bind": ["127.0.0.1:0" if folder is None else f"unix:{folder / 'gw.sock'}"]}


async def expect_gone(gateway: Serving, engine: ScriptedEngine, stage: Stage) -> None:
    """The engine was left at once, its slot drains, and the record says why."""
    request = await engine.request()
    with trio.fail_after(5):
        await request.closed.wait()
    record = await gateway.settled()
    assert (record.outcome, record.phase) == ("client_gone", stage.phase)
    assert (record.code, record.attempts) == (None, 1)
    book = gateway.gateway.fleet.books["w1"]
    assert (book.held, book.draining, book.faults) == (0, 1, 0)


@STAGE
@LEAVING
async def test_the_engine_is_left_when_the_client_leaves(stage: Stage, how: Leaving) -> None:
    async with (
        open_engine(script_of(stage, trio.Event())) as engine,
        serving(engine, stream=heartbeats(stage)) as gateway,
    ):
        with await gateway.connect() as client:
            await client.send(chat_request(stream=stage.stream))
            await stage.reach(engine, client)
            leave(client, how)
            await expect_gone(gateway, engine, stage)


@STAGE
async def test_the_engine_is_left_when_the_client_of_a_unix_socket_leaves(
    stage: Stage, tmp_path: Path
) -> None:
    async with (
        open_engine(script_of(stage, trio.Event())) as engine,
        serving(engine, stream=heartbeats(stage), server=bind_of(tmp_path)) as gateway,
    ):
        with await gateway.connect() as client:
            await client.send(chat_request(stream=stage.stream))
            await stage.reach(engine, client)
            client.leave_fin()
            await expect_gone(gateway, engine, stage)


@STAGE
async def test_to_a_client_of_http_1_0_a_fin_is_a_farewell(stage: Stage) -> None:
    async with (
        open_engine(script_of(stage, trio.Event())) as engine,
        serving(engine, stream=heartbeats(stage)) as gateway,
    ):
        with await gateway.connect() as client:
            await client.send(chat_request(stream=stage.stream).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"))
            await stage.reach(engine, client)
            client.half_close()
            await expect_gone(gateway, engine, stage)
            assert client.interims == []


@STAGE
@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_a_client_that_only_stops_sending_gets_its_whole_answer(
    stage: Stage, unix: bool, tmp_path: Path
) -> None:
    go = trio.Event()
    bind = bind_of(tmp_path if unix else None)
    async with (
        open_engine(script_of(stage, go)) as engine,
        serving(engine, stream=heartbeats(stage), server=bind) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request(stream=stage.stream))
            await stage.reach(engine, client)
            client.half_close()
            await client.read_until(b"100 Continue" if stage.phase == "before_headers" else b": keep-alive")
            go.set()
            answer = await client.read_to_end()
            assert answer.ended == "complete"
            if stage.stream:
                reading = answer.chat()
                assert (reading.text, reading.done, reading.finishes) == ("onetwo", 1, {0: "stop"})
            else:
                assert b"whole" in answer.body
            assert await client.read_closed() == "fin"
        record = await gateway.settled()
        assert (record.outcome, record.phase) == ("completed", "after_content")


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_a_half_closed_client_keeps_its_place_in_the_queue(
    unix: bool, nursery: trio.Nursery, tmp_path: Path
) -> None:
    go = trio.Event()
    bind = bind_of(tmp_path if unix else None)
    async with (
        open_engine((WaitFor(go), *STREAM)) as engine,
        serving(engine, worker={"slots": 1}, server=bind) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request())
        await engine.wait_open(1)
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await gateway.queued(1)
            client.half_close()
            await client.read_until(b"100 Continue")
            assert gateway.depth == 1
            go.set()
            assert (await client.read_to_end()).chat().text == "onetwo"
        await gateway.settled(2)


async def test_before_headers_a_half_closed_client_is_asked_four_times_and_then_counts_as_gone() -> None:
    async with (
        open_engine((WaitFor(trio.Event()),)) as engine,
        serving(engine, limits={"gone_probe_interval": 0.05}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await engine.wait_open(1)
            client.half_close()
            assert await client.read_closed() == "fin"
            assert client.interims == [100] * 4
        record = await gateway.settled()
        assert (record.outcome, record.phase, record.status) == ("client_gone", "before_headers", None)


async def test_in_a_stream_a_half_closed_client_is_asked_by_comments_for_as_long_as_it_takes() -> None:
    go = trio.Event()
    async with (
        open_engine((*STREAM[:3], WaitFor(go), *STREAM[3:])) as engine,
        serving(engine, limits={"gone_probe_interval": 0.02}, stream={"heartbeat_after": 0}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_events(2)
            client.half_close()
            await client.read_until(COMMENT_CHUNK * 6)
            go.set()
            answer = await client.read_to_end()
            assert answer.events is not None
            assert set(answer.events.comments) == {" keep-alive"}
            assert (answer.chat().text, answer.chat().done, answer.events.problems) == ("onetwo", 1, [])


@LEAVING
async def test_a_half_closed_client_that_then_leaves_is_noticed_by_the_question(how: Leaving) -> None:
    async with (
        open_engine((*STREAM[:3], WaitFor(trio.Event()))) as engine,
        serving(engine, limits={"gone_probe_interval": 0.05}) as gateway,
    ):
        with await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_events(2)
            client.half_close()
            await client.read_until(b": keep-alive")
            leave(client, how)
            await expect_gone(gateway, engine, STAGES["while streaming"])


async def test_watching_a_half_closed_client_does_not_spin() -> None:
    async with (
        open_engine((WaitFor(trio.Event()),)) as engine,
        serving(engine) as gateway,
    ):
        with await gateway.connect() as client:
            await client.send(chat_request(headers=(("x-gateway-timeout-ms", "400"),)))
            await engine.wait_open(1)
            client.half_close()
            await client.read_until(b"100 Continue")
            steps = StepCounter()
            trio.lowlevel.add_instrument(steps)
            answer = await client.read_to_end()
            trio.lowlevel.remove_instrument(steps)
            assert answer.status == 504
            assert steps.count < 100


class StepCounter(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def test_a_request_cut_by_a_fin_reaches_no_worker() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        whole = chat_request()
        for size in (10, len(whole) - 60, len(whole) - 1):
            with trio.fail_after(10), await gateway.connect() as client:
                await client.send(whole[:size])
                client.half_close()
                assert await client.read_closed() == "fin"
        await gateway.until(lambda: gateway.gateway.books.reading == 0)
        assert engine.statistics().connections == 0
        assert gateway.records == []


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_client_that_leaves_within_its_body_reaches_no_worker(how: Leaving) -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with await gateway.connect() as client:
            await client.send(chat_request("x" * 3000)[:-50])
            await gateway.until(lambda: gateway.gateway.books.reading == 1)
            leave(client, how)
            await gateway.until(lambda: gateway.gateway.books.reading == 0)
        assert sum(gateway.turned_away().values()) == 1
        assert engine.statistics().connections == 0


async def test_bytes_of_the_next_request_are_not_eaten_by_watching() -> None:
    go = trio.Event()
    async with (
        open_engine((*STREAM[:3], WaitFor(go), *STREAM[3:]), chat_stream("next")) as engine,
        serving(engine) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_events(2)
            await client.send(chat_request())
            go.set()
            assert (await client.read_to_end()).chat().text == "onetwo"
            assert (await client.read_to_end()).chat().text == "next"


async def test_a_client_that_pipelines_and_then_leaves_is_noticed_behind_its_unread_bytes() -> None:
    async with (
        open_engine((*STREAM[:3], WaitFor(trio.Event()))) as engine,
        serving(engine) as gateway,
    ):
        with await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_events(2)
            await client.send(b"POST /v1/chat/completions HTTP/1.1\r\n")
            client.leave_fin()
            await expect_gone(gateway, engine, STAGES["while streaming"])


async def test_a_client_that_leaves_after_its_answer_has_got_it() -> None:
    async with open_engine(STREAM) as engine, serving(engine) as gateway:
        with await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_until(b"[DONE]")
            client.leave_reset()
        record = await gateway.settled()
        assert record.outcome == "completed"
