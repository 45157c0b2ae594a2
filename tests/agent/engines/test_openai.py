"""A server behind the agent's port, with scripted servers on real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.agent.rig import HELLO, records, running, said
from trio_gateway.agent import Rejected, Work
from trio_gateway.agent.engines import OpenAIEngine
from trio_gateway.contract import CHAT, MESSAGES, RESPONSES, TRANSCRIPTIONS
from trio_gateway.testing import (
    Chunk,
    CloseReset,
    Event,
    Head,
    Hold,
    Raw,
    Repeat,
    ScriptedEngine,
    ScriptedOllama,
    Scripting,
    Step,
    Wait,
    WaitFor,
    chat_answer,
    chat_chunk,
    chat_stream,
    error_answer,
    open_engine,
    refusing_port,
    until,
)
from trio_gateway.wire import (
    Accepted,
    AgentRelay,
    AnswerForm,
    Delta,
    End,
    EngineRecord,
    Failed,
    Finish,
    NamedEvent,
    RecordWriter,
    Result,
    StreamShape,
    Usage,
    UsageCounts,
)


@asynccontextmanager
async def behind(
    *scripts: Scripting, dialect: str = "vllm", **options: Any
) -> AsyncIterator[tuple[OpenAIEngine, ScriptedEngine]]:
    """An engine in front of a scripted server; nothing is open at the end."""
    async with open_engine(*scripts, models=("m", "other")) as server, trio.open_nursery() as nursery:
        engine = OpenAIEngine(server.url, dialect, **options)
        await nursery.start(engine.run)
        await until(lambda: engine.status().ready)
        yield engine, server
        await until(lambda: engine.status().running == 0)
        nursery.cancel_scope.cancel()


def work(operation: str = CHAT.name, *, stream: bool = True, choices: int = 1, **body: Any) -> Work:
    data = json.dumps({"model": "m", "messages": HELLO, **body}).encode()
    return Work("e" * 32, 2, operation, "m", 60.0, "standard", stream, data, None, choices)


async def read(engine: OpenAIEngine, asked: Work) -> list[EngineRecord]:
    stream = await engine.open(asked)
    found = []
    while (record := await stream.receive()) is not None:
        found.append(record)
    await stream.wait_released()
    return found


async def test_it_is_ready_when_its_server_lists_its_models(autojump_clock: MockClock) -> None:
    async with behind() as (engine, _):
        assert engine.status().models == ("m", "other")
        assert not engine.can_pause
    async with behind(models=("m",), slots=3) as (engine, _):
        assert (engine.status().models, engine.status().slots) == (("m",), 3)


async def test_a_server_that_goes_is_not_ready_after_some_looks(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        async with open_engine() as server:
            engine = OpenAIEngine(server.url)
            await nursery.start(engine.run)
            await until(lambda: engine.status().ready)
        went = trio.current_time()
        await until(lambda: not engine.status().ready)
        assert 2 < trio.current_time() - went < 10
        with pytest.raises(Rejected) as caught:
            await engine.open(work())
        assert caught.value.code == "engine_unready"
        nursery.cancel_scope.cancel()


async def test_a_stream_is_records_and_its_connection_is_used_again(autojump_clock: MockClock) -> None:
    async with behind(chat_stream("a", "b", usage=(3, 2), model="m")) as (engine, server):
        for _ in range(2):
            assert await read(engine, work()) == [
                Delta(0, "a"),
                Delta(0, "b"),
                Finish(0, "stop"),
                UsageCounts(3, 2, None),
            ]
        asked = server.requests[0]
        assert asked.json()["stream"] is True
        assert asked.json()["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert asked.header("x-request-id") == "e" * 32 + "-02"
        # One connection looks at the models, one is for requests.
        assert server.statistics().connections == 2


async def test_a_whole_answer_is_a_result_with_its_bytes(autojump_clock: MockClock) -> None:
    async with behind(chat_answer("ok", model="m")) as (engine, server):
        (record,) = await read(engine, work(stream=False))
        assert isinstance(record, Result)
        assert json.loads(bytes(record.body))["choices"][0]["message"]["content"] == "ok"
        assert server.requests[0].json()["stream"] is False


async def test_named_events_are_records_with_their_names(autojump_clock: MockClock) -> None:
    done = {"type": "response.completed", "response": {"status": "completed"}}
    script: list[Step] = [Head(), Event(done, "response.completed"), Event("[DONE]")]
    async with behind(script) as (engine, _):
        found = await read(engine, work(RESPONSES.name, input="hi", choices=0))
        assert [(each.event, json.loads(each.data)) for each in found if isinstance(each, NamedEvent)] == [
            ("response.completed", done)
        ]


async def test_a_message_that_the_server_does_not_begin_is_begun_by_the_gateway(
    autojump_clock: MockClock,
) -> None:
    """It knows that nobody has counted the prompt; of an agent it would believe that it has no tokens."""
    script: list[Step] = [
        Head(),
        Event({"type": "content_block_delta", "delta": {"text": "a"}}, "content_block_delta"),
        Event({"type": "message_delta", "usage": {"output_tokens": 2}}, "message_delta"),
        Event({"type": "message_stop"}, "message_stop"),
    ]
    async with behind(script) as (engine, _):
        found = await read(engine, work(MESSAGES.name, max_tokens=2, choices=0))
    shape = StreamShape(0, False, False, "m", "m", 10_000)
    writer, relay = RecordWriter(AnswerForm.EVENTS, 0), AgentRelay(shape, MESSAGES, "chatcmpl-1", 0)
    data = b"".join(relay.feed(writer.write(each)) for each in (Accepted(0), *found, End()))
    assert relay.all_finished
    assert data.startswith(b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1"')
    assert relay.usage == Usage(None, None, 2)


async def test_a_form_goes_to_the_server_as_it_came(autojump_clock: MockClock) -> None:
    named = "content-disposition: form-data; name="
    body = (
        f'--xyz\r\n{named}"model"\r\n\r\nm\r\n--xyz\r\n{named}"file"; filename="a"\r\n\r\n\x00\r\n--xyz--\r\n'
    ).encode()
    kind = "multipart/form-data; boundary=xyz"
    asked = Work("e" * 32, 1, TRANSCRIPTIONS.name, "m", 60.0, "standard", False, body, kind, 0)
    text: list[Step] = [Head(200, (("content-type", "text/vtt"), ("content-length", "6")))]
    async with behind([*text, Raw(b"WEBVTT")]) as (engine, server):
        (record,) = await read(engine, asked)
        assert isinstance(record, Result)
        assert (record.content_type, bytes(record.body)) == ("text/vtt", b'"WEBVTT"')
        assert server.requests[0].body == body


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (error_answer(429), "capacity"),
        (error_answer(503), "capacity"),
        (error_answer(404), "model_not_loaded"),
    ],
)
async def test_a_server_without_room_or_model_takes_nothing(
    script: Any, code: str, autojump_clock: MockClock
) -> None:
    async with behind(script) as (engine, _):
        with pytest.raises(Rejected) as caught:
            await engine.open(work())
        assert caught.value.code == code


BROKE = Failed("engine_failed", "the connection to the engine broke")


@pytest.mark.parametrize(
    ("script", "failed"),
    [
        (error_answer(500), Failed("engine_failed", "the engine failed", status=500)),
        (
            error_answer(500, "CUDA out of memory"),
            Failed("out_of_memory", "the engine is out of memory", "never"),
        ),
        (error_answer(401), Failed("engine_credentials", "the agent could not use its engine", "never")),
        (
            error_answer(400, "too long", type_="t", code="c"),
            Failed("c", "too long", "never", 400, "t"),
        ),
        ([CloseReset()], Failed("engine_failed", "the connection to the engine broke")),
        (
            [Head(), Chunk(b"data: {"), CloseReset()],
            Failed("engine_failed", "the connection to the engine broke"),
        ),
        (chat_stream("a", finish=None), Failed("engine_protocol_error", "the engine's answer was cut")),
        (chat_answer(), Failed("engine_protocol_error", "the engine's answer is no stream")),
    ],
)
async def test_failures_are_the_last_record(script: Any, failed: Failed, autojump_clock: MockClock) -> None:
    async with behind(script) as (engine, _):
        assert (await read(engine, work()))[-1] == failed


async def test_a_whole_answer_that_is_none_is_a_failure(autojump_clock: MockClock) -> None:
    script: list[Step] = [Head(200, (("content-type", "application/json"), ("content-length", "1")))]
    async with behind([*script, Raw(b"{")]) as (engine, _):
        (record,) = await read(engine, work(stream=False))
        assert record == Failed(
            "engine_protocol_error", "the engine's answer is not the JSON that was asked for"
        )


async def test_a_body_that_can_not_be_said_is_the_caller_s_fault(autojump_clock: MockClock) -> None:
    async with behind() as (engine, server):
        bad = Work("e" * 32, 1, CHAT.name, "m", 60.0, "standard", True, b"[]")
        (record,) = await read(engine, bad)
        assert isinstance(record, Failed)
        assert (record.status, record.retry) == (400, "never")
        assert server.requests == []


async def test_ollama_is_asked_in_its_own_words(autojump_clock: MockClock) -> None:
    async with behind(ScriptedOllama(models=("m",)), dialect="ollama") as (engine, server):
        found = await read(engine, work())
        assert isinstance(found[0], Delta)
        assert server.requests[0].target == "/api/chat"
        (whole,) = await read(engine, work(stream=False))
        assert isinstance(whole, Result)
        assert json.loads(bytes(whole.body))["object"] == "chat.completion"


# Letting go -------------------------------------------------------------------------------------------------

ENDLESS: list[Step] = [Head(), Repeat((chat_chunk({"content": "x" * 100}, model="m"),), every=0.1)]


async def test_a_cancelled_request_is_held_for_the_cancel_grace(autojump_clock: MockClock) -> None:
    async with behind(ENDLESS, dialect="sglang") as (engine, server):
        stream = await engine.open(work())
        assert isinstance(await stream.receive(), Delta)
        began = trio.current_time()
        stream.cancel()
        stream.cancel()
        assert await stream.receive() is None
        await server.requests[0].closed.wait()
        assert engine.status().running == 1
        released = await stream.wait_released()
        assert (released.generated, released.kv_released) == (1, False)
        assert trio.current_time() - began == pytest.approx(4.0)
        assert await stream.wait_released() == released


async def test_cancelling_wakes_whoever_reads(autojump_clock: MockClock) -> None:
    async with behind([Head(), Hold()]) as (engine, _):
        stream = await engine.open(work())
        async with trio.open_nursery() as nursery:

            async def read_on() -> None:
                assert await stream.receive() is None

            nursery.start_soon(read_on)
            await trio.testing.wait_all_tasks_blocked()
            stream.cancel()
        assert (await stream.wait_released()).generated == 0


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_request_whose_reader_was_cancelled_is_let_go_of_when_it_is_cancelled(
    at_once: bool, autojump_clock: MockClock
) -> None:
    async with behind([Head(), Hold()]) as (engine, server):
        stream = await engine.open(work())
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.receive)
                await trio.testing.wait_all_tasks_blocked()
                if at_once:
                    stream.cancel()
                scope.cancel()
        stream.cancel()
        with trio.fail_after(5):
            assert (await stream.wait_released()).generated == 0
            await server.requests[0].closed.wait()


async def test_a_request_that_is_given_up_while_it_is_sent_counts_for_the_grace(
    autojump_clock: MockClock,
) -> None:
    async with behind([Hold()], dialect="sglang") as (engine, _):
        with trio.move_on_after(1):
            await engine.open(work())
        assert engine.status().running == 1
        began = trio.current_time()
        await until(lambda: engine.status().running == 0)
        assert trio.current_time() - began == pytest.approx(4.0)


async def test_a_read_that_is_cancelled_loses_nothing(autojump_clock: MockClock) -> None:
    go_on = trio.Event()
    script: list[Step] = [
        Head(),
        chat_chunk({"content": "a"}),
        WaitFor(go_on),
        chat_chunk({"content": "b"}),
        Wait(0),
    ]
    async with behind([*script, *chat_stream("c")[1:]]) as (engine, _):
        stream = await engine.open(work())
        assert await stream.receive() == Delta(0, "a")
        with trio.move_on_after(1):
            await stream.receive()
        go_on.set()
        assert await stream.receive() == Delta(0, "b")
        while await stream.receive() is not None:
            pass
        await stream.wait_released()


# Through an agent -------------------------------------------------------------------------------------------


async def test_a_reader_that_takes_nothing_is_given_up_and_told(autojump_clock: MockClock) -> None:
    flood: list[Step] = [Head(), Repeat((chat_chunk({"content": "x" * 8000}, model="m"),), every=0.001)]
    async with open_engine(flood, models=("m",)) as server:
        engine = OpenAIEngine(server.url, "vllm", slots=1)
        async with running(engine, buffer_bytes=32_768, stall_timeout=30.0) as run:
            await until(lambda: engine.status().ready)
            with await run.connect(receive_buffer=4096) as client:
                await run.ask(client, deadline_ms=500_000)
                await until(lambda: bool(server.requests))
                await server.requests[0].closed.wait()
                assert 29 < trio.current_time() < 90
                answer = await client.read_to_end()
                assert answer.ended == "complete"
                assert records(answer)[-1] == {
                    "t": "error",
                    "code": "reader_stalled",
                    "message": "the reader took nothing for too long",
                    "retry": "never",
                }
                assert set(said(answer)) == {"x"}


async def test_a_reader_that_never_comes_back_is_cut(autojump_clock: MockClock) -> None:
    flood: list[Step] = [Head(), Repeat((chat_chunk({"content": "x" * 8000}, model="m"),), every=0.001)]
    async with open_engine(flood, models=("m",)) as server:
        engine = OpenAIEngine(server.url, "vllm", slots=1)
        async with running(engine, buffer_bytes=32_768) as run:
            await until(lambda: engine.status().ready)
            with await run.connect(receive_buffer=4096) as client:
                await run.ask(client, deadline_ms=500_000)
                await client.stall()
                assert trio.current_time() < 90
            await run.agent.slots.wait_none()


async def test_a_slow_engine_is_no_reader_that_takes_nothing(autojump_clock: MockClock) -> None:
    script: list[Step] = [Head(), chat_chunk({"content": "a"}), Wait(300), *chat_stream("b")[1:]]
    async with open_engine(script, models=("m",)) as server:
        engine = OpenAIEngine(server.url, "vllm", slots=1)
        async with running(engine, stall_timeout=30.0) as run:
            await until(lambda: engine.status().ready)
            answer = await run.generate(deadline_ms=500_000)
            assert said(answer) == "ab"
            assert records(answer)[-1] == {"t": "end"}


@pytest.mark.parametrize("url", ["https://h:1", "http://", "ftp://h", "http://u@h:1", "http://h:1?x", "h"])
def test_what_is_no_url_of_a_server_here_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no http URL"):
        OpenAIEngine(url)


def test_a_dialect_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="no dialect"):
        OpenAIEngine("http://127.0.0.1:1", "dance")


def test_a_prefix_of_the_url_is_kept_and_its_version_not_doubled() -> None:
    upstream = OpenAIEngine("http://[::1]:8000/base/v1/")._upstream
    assert (upstream.authority, upstream.prefix, upstream.host) == ("[::1]:8000", "/base", "::1")


async def test_nobody_at_the_address_is_no_crash(autojump_clock: MockClock) -> None:
    with refusing_port() as port:
        async with trio.open_nursery() as nursery:
            engine = OpenAIEngine(f"http://127.0.0.1:{port}")
            await nursery.start(engine.run)
            await trio.sleep(60)
            assert not engine.status().ready
            assert engine.status().models == ()
            nursery.cancel_scope.cancel()
