"""Every exchange ends in time: one deadline for all of it, and limits on an engine's silence."""

from __future__ import annotations

import pytest
import trio

from tests.e2e.serving import error_code, serving, tenant
from trio_gateway.testing import (
    Chunk,
    Head,
    Hold,
    Json,
    Raw,
    Repeat,
    Script,
    WaitFor,
    chat_answer,
    chat_chunk,
    chat_request,
    chat_stream,
    open_engine,
)

HEAD, ROLE, ONE = chat_stream("one")[:3]
SOON = (("x-gateway-timeout-ms", "100"),)
SIZED = (("content-type", "application/json"), ("content-length", "900"))
NEVER: dict[str, Script] = {
    "before the head": (Hold(),),
    "before the first event": (HEAD, Hold()),
    "after the role": (HEAD, ROLE, Hold()),
    "with comments only": (HEAD, Repeat((Chunk(b": hm\n\n"),), every=0.01)),
    "with roles only": (HEAD, Repeat((ROLE,), every=0.01)),
}


# The deadline of the request --------------------------------------------------------------------------------


@pytest.mark.parametrize("script", NEVER.values(), ids=NEVER.keys())
async def test_a_deadline_before_content_is_a_504(script: Script) -> None:
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(headers=SOON))
        assert (answer.status, error_code(answer)) == (504, "deadline_exceeded")
        record = await gateway.settled()
        assert (record.outcome, record.phase, record.status) == ("deadline_exceeded", "before_headers", 504)
        assert gateway.gateway.fleet.books["w1"].faults == 0
        with trio.fail_after(5):
            await engine.requests[0].closed.wait()


@pytest.mark.parametrize(
    "script", [(Hold(),), (Head(200, SIZED), Raw(b"{"), Hold())], ids=["nothing", "half"]
)
async def test_a_deadline_of_a_buffered_answer_is_a_504(script: Script) -> None:
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(stream=False, headers=SOON))
        assert (answer.status, error_code(answer)) == (504, "deadline_exceeded")
        assert (await gateway.settled()).outcome == "deadline_exceeded"
        with trio.fail_after(5):
            await engine.requests[0].closed.wait()


async def test_a_deadline_within_a_stream_is_an_error_event() -> None:
    script = (HEAD, ROLE, ONE, Hold())
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(headers=SOON))
        reading = answer.chat()
        assert (answer.ended, reading.text, reading.done) == ("complete", "one", 0)
        (error,) = reading.errors
        assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
        assert isinstance(error["gateway"], dict)
        assert (error["gateway"]["outcome"], error["gateway"]["phase"]) == (
            "deadline_exceeded",
            "after_content",
        )
        record = await gateway.settled()
        assert (record.outcome, record.phase, record.status) == ("deadline_exceeded", "after_content", 200)


async def test_a_deadline_after_a_heartbeat_is_an_error_event() -> None:
    async with (
        open_engine((HEAD, ROLE, Hold())) as engine,
        serving(engine, stream={"heartbeat_after": 0.02}) as gateway,
    ):
        reading = (await gateway.ask(chat_request(headers=SOON))).chat()
        assert ([error["code"] for error in reading.errors], reading.roles) == (["deadline_exceeded"], {})
        assert (await gateway.settled()).phase == "before_content"


async def test_a_stream_that_never_pauses_ends_at_its_deadline_too() -> None:
    async with open_engine((HEAD, ROLE, Repeat((ONE,)))) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(headers=SOON))
        reading = answer.chat()
        assert answer.ended == "complete"
        assert answer.events is not None
        assert answer.events.problems == []
        assert ([error["code"] for error in reading.errors], reading.done) == (["deadline_exceeded"], 0)


async def test_the_shortest_of_all_limits_counts() -> None:
    tenants = [
        tenant("hasty", "key-h", default_timeout=0.1),
        tenant("bound", "key-b", max_timeout=0.1),
        tenant("free", "key-f"),
    ]
    async with (
        open_engine((Hold(),)) as engine,
        serving(engine, tenants=tenants, deadlines={"default": 20, "maximum": 30}) as gateway,
    ):
        for key, asked in (
            ("key-h", None),
            ("key-h", "50"),
            ("key-b", "9000"),
            ("key-b", None),
            ("key-f", "50"),
            ("key-f", "00000000000000050"),
        ):
            headers = () if asked is None else (("x-gateway-timeout-ms", asked),)
            answer = await gateway.ask(chat_request(key=key, headers=headers))
            assert error_code(answer) == "deadline_exceeded", (key, asked)


async def test_nobody_gets_more_than_the_servers_maximum() -> None:
    async with (
        open_engine((Hold(),)) as engine,
        serving(engine, deadlines={"default": 0.1, "maximum": 0.1}) as gateway,
    ):
        for asked in ("60000", "999999999999999999999"):
            answer = await gateway.ask(chat_request(headers=(("x-gateway-timeout-ms", asked),)))
            assert error_code(answer) == "deadline_exceeded"


@pytest.mark.parametrize("asked", ["0", "-5", "1.5", "soon", "", "000", "\u00b2"])
async def test_a_timeout_that_is_no_number_is_a_400(asked: str) -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(headers=(("x-gateway-timeout-ms", asked),)))
        assert (answer.status, error_code(answer)) == (400, "invalid_value")
        assert engine.statistics().requests == 0


# The first content of an attempt ----------------------------------------------------------------------------


@pytest.mark.parametrize("script", NEVER.values(), ids=NEVER.keys())
async def test_an_engine_without_first_content_is_given_up(script: Script) -> None:
    async with open_engine(script) as engine, serving(engine, deadlines={"first_token": 0.1}) as gateway:
        answer = await gateway.ask(chat_request())
        assert (answer.status, error_code(answer)) == (504, "first_token_timeout")
        record = await gateway.settled()
        assert (record.outcome, record.phase) == ("upstream_failed", "before_headers")
        assert gateway.gateway.fleet.books["w1"].faults == 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "buffered"])
async def test_another_worker_is_asked_then(stream: bool) -> None:
    async with (
        open_engine((Hold(),)) as first,
        open_engine() as second,
        serving(first, second, deadlines={"first_token": 0.1}) as gateway,
    ):
        answer = await gateway.ask(chat_request(stream=stream))
        assert answer.status == 200
        record = await gateway.settled()
        assert (record.attempts, record.worker) == (2, "w2")
        with trio.fail_after(5):
            await first.requests[0].closed.wait()


async def test_the_last_of_two_that_are_too_slow_is_a_504_that_says_not_to_come_back() -> None:
    async with (
        open_engine((Hold(),)) as first,
        open_engine((Hold(),)) as second,
        serving(first, second, deadlines={"first_token": 0.1}) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        assert (answer.status, error_code(answer)) == (504, "first_token_timeout")
        assert answer.header("x-should-retry") == "false"


async def test_once_there_is_content_the_first_limit_counts_no_more() -> None:
    go = trio.Event()
    script = (HEAD, ROLE, ONE, WaitFor(go), *chat_stream("two")[2:])
    async with open_engine(script) as engine, serving(engine, deadlines={"first_token": 0.1}) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_events(2)
            with trio.move_on_after(0.2):
                await client.read_until(b"error")
            go.set()
            assert (await client.read_to_end()).chat().text == "onetwo"


# Silence within an answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "silence",
    [Hold(), Repeat((Chunk(b": hm\n\n"),), every=0.01), Repeat((Chunk(b"data: {"),), times=1)],
    ids=["silence", "comments", "half an event"],
)
async def test_an_engine_that_stops_within_its_stream_is_given_up(silence: Hold | Repeat) -> None:
    async with (
        open_engine((HEAD, ROLE, ONE, silence)) as engine,
        serving(engine, deadlines={"between_events": 0.1}) as gateway,
    ):
        answer = await gateway.ask(chat_request())
        reading = answer.chat()
        assert (answer.ended, reading.text, reading.done) == ("complete", "one", 0)
        assert [error["code"] for error in reading.errors] == ["engine_failed"]
        assert (await gateway.settled()).outcome == "upstream_failed"
        assert gateway.gateway.fleet.books["w1"].faults == 1


async def test_an_engine_that_stops_within_a_buffered_answer_is_given_up() -> None:
    script = (Head(200, SIZED), Raw(b"{"), Hold())
    async with (
        open_engine(script) as engine,
        serving(engine, deadlines={"between_events": 0.1}) as gateway,
    ):
        answer = await gateway.ask(chat_request(stream=False))
        assert (answer.status, error_code(answer)) == (502, "engine_failed")
        assert gateway.gateway.fleet.books["w1"].faults == 1


async def test_events_without_content_are_progress_once_there_was_content() -> None:
    empty = chat_chunk({})
    script = (HEAD, ROLE, ONE, Repeat((empty,), times=10, every=0.03), *chat_stream("two")[2:])
    async with open_engine(script) as engine, serving(engine, deadlines={"between_events": 0.2}) as gateway:
        assert (await gateway.ask(chat_request())).chat().text == "onetwo"


async def test_a_slow_buffered_answer_that_progresses_is_read_to_its_end() -> None:
    (answer,) = chat_answer("whole")
    assert isinstance(answer, Json)
    pieces = Repeat((Chunk(b" " * 10),), times=10, every=0.03)
    head = Head(200, (("content-type", "application/json"), ("transfer-encoding", "chunked")))
    script = (head, pieces, Chunk(b'{"choices":[{"index":0,"finish_reason":"stop"}]}'), Raw(b"0\r\n\r\n"))
    async with open_engine(script) as engine, serving(engine, deadlines={"between_events": 0.2}) as gateway:
        assert (await gateway.ask(chat_request(stream=False))).status == 200
