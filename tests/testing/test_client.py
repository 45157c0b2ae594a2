"""The misbehaving client does what it is told, and reads strictly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from trio_gateway.testing import (
    CloseFin,
    EndChunks,
    Event,
    Head,
    Hold,
    MessageError,
    Raw,
    RawClient,
    Repeat,
    ScriptedEngine,
    chat_answer,
    chat_request,
    chat_stream,
    open_engine,
)
from trio_gateway.testing._client_answers import AnswerReader

SMALL_BUFFER = 4096


@asynccontextmanager
async def connect(engine: ScriptedEngine, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    with await RawClient.connect(("127.0.0.1", engine.port), receive_buffer=receive_buffer) as client:
        yield client


def answers_of(raw: bytes, methods: tuple[str, ...] = ()) -> AnswerReader:
    reader = AnswerReader()
    reader.methods.extend(methods)
    for byte in raw:
        reader.feed(bytes([byte]))
    return reader


def test_answers_are_told_apart_byte_by_byte() -> None:
    raw = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab"
        b"HTTP/1.1 204 No\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nz\r\n0\r\n\r\n"
    )
    reader = answers_of(raw, ("POST", "POST", "HEAD", "POST"))
    assert reader.interims == [100]
    assert [(a.status, a.body, a.ended) for a in reader.answers] == [
        (200, b"ab", "complete"),
        (204, b"", "complete"),
        (200, b"", "complete"),
        (200, b"z", "complete"),
    ]


@pytest.mark.parametrize("raw", [b"HTTP/2 200 OK\r\n\r\n", b"HTTP/1.1 20 OK\r\n\r\n", b"junk junk\r\n\r\n"])
def test_what_is_no_answer_is_an_error(raw: bytes) -> None:
    with pytest.raises(MessageError):
        answers_of(raw)


def test_an_end_within_a_head_is_an_error() -> None:
    reader = answers_of(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(MessageError):
        reader.end_of_stream("fin")


@pytest.mark.parametrize(
    ("raw", "how", "ended"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", "fin", "fin"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n", "fin", "fin"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n", "reset", "reset"),
        (b"HTTP/1.0 200 OK\r\n\r\nab", "fin", "complete"),
        (b"HTTP/1.0 200 OK\r\n\r\nab", "reset", "reset"),
    ],
)
def test_a_cut_is_told_from_a_proper_end(raw: bytes, how: str, ended: str) -> None:
    reader = answers_of(raw)
    reader.end_of_stream("fin" if how == "fin" else "reset")
    (answer,) = reader.answers
    assert (answer.ended, answer.was_cut) == (ended, ended != "complete")


def test_a_cut_inside_an_event_is_no_problem_of_the_stream_and_an_end_is() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: x\n"
    problems = {}
    for how in ("fin", "reset"):
        reader = answers_of(head)
        reader.end_of_stream("fin" if how == "fin" else "reset")
        events = reader.answers[0].events
        assert events is not None
        problems[how] = events.problems
    assert problems == {"fin": ["ends inside an event"], "reset": []}


async def test_an_error_event_is_read_and_no_done_is_seen() -> None:
    script = (Head(), Event({"error": {"message": "no"}}), EndChunks())
    async with open_engine(script) as engine, connect(engine) as client:
        await client.send(chat_request())
        answer = await client.read_to_end()
    assert answer.chat().errors == [{"message": "no"}]
    assert answer.chat().done == 0


async def test_a_refusal_is_no_event_stream() -> None:
    async with open_engine(chat_answer()) as engine, connect(engine) as client:
        await client.send(chat_request(stream=False))
        with pytest.raises(AssertionError, match="no event stream"):
            await client.read_events(1)
        answer = await client.read_to_end()
        with pytest.raises(MessageError):
            answer.chat()
        with pytest.raises(MessageError):
            answer.error()


async def test_waiting_for_more_events_than_come_is_an_error() -> None:
    async with open_engine(chat_stream("a")) as engine, connect(engine) as client:
        await client.send(chat_request())
        with pytest.raises(AssertionError, match="ended after 4"):
            await client.read_events(5)


async def test_waiting_for_bytes_on_a_closed_connection_is_an_error() -> None:
    script = (Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"), CloseFin())
    async with open_engine(script) as engine, connect(engine) as client:
        await client.send(chat_request())
        await client.read_until(b"\r\n\r\nx")
        with pytest.raises(ConnectionError):
            await client.read_until(b"more")


async def test_a_half_closed_client_still_reads() -> None:
    script = (Head(), Event("early"), Hold())
    async with open_engine(script) as engine, connect(engine) as client:
        await client.send(chat_request())
        request = await engine.request()
        client.half_close()
        await request.closed.wait()  # for an engine a FIN is the end
        assert await client.read_closed() == "fin"
    assert request.closed_by == "fin"
    assert b"early" in client.received


@pytest.mark.parametrize("leave", [RawClient.leave_fin, RawClient.leave_reset])
async def test_a_client_that_left_owns_nothing_any_more(leave: Callable[[RawClient], None]) -> None:
    async with open_engine((Head(), Hold())) as engine, connect(engine) as client:
        await client.send(chat_request())
        await client.read_head()
        leave(client)
        await engine.wait_disconnected()
        with pytest.raises((trio.ClosedResourceError, OSError)):
            await client.send(b"x")


async def test_a_stalled_client_reads_nothing_and_notices_a_reset() -> None:
    endless = (Head(), Repeat((Event("x" * 1000),)))
    async with (
        open_engine(endless, send_buffer=SMALL_BUFFER) as engine,
        connect(engine, SMALL_BUFFER) as client,
    ):
        await client.send(chat_request())
        request = await engine.request()
        await request.stalled.wait()
        engine.close_connections(reset=True)
        await client.stall()
    assert not client.received


async def test_a_stalled_client_notices_a_fin_that_gets_through() -> None:
    async with open_engine((Raw(b"x"), CloseFin())) as engine, connect(engine) as client:
        await client.send(chat_request())
        await client.stall()
    assert not client.received


async def test_a_trickling_client_gets_the_whole_answer_at_its_pace() -> None:
    async with open_engine(chat_answer("x" * 400)) as engine, connect(engine) as client:
        await client.send(chat_request(stream=False))
        started = trio.current_time()
        answer = await client.trickle(2000)
        took = trio.current_time() - started
    assert answer.ended == "complete"
    assert took >= 0.9 * len(client.received) / 2000  # pacing is a floor, whatever the machine does


@pytest.mark.parametrize(
    "read",
    [
        lambda c: c.read_head(),
        lambda c: c.read_until(b"never"),
        lambda c: c.read_closed(),
        lambda c: c.stall(),
    ],
)
async def test_every_read_can_be_cancelled(read: Callable[[RawClient], Awaitable[object]]) -> None:
    async with open_engine((Hold(),)) as engine, connect(engine) as client:
        await client.send(chat_request())
        await engine.request()
        with trio.move_on_after(0.05) as scope:
            await read(client)
        assert scope.cancelled_caught
        client.leave_reset()
        await engine.wait_idle()
