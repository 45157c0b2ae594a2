"""Connections to engines: when they are used again, and every form in which an answer may come."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Final

import pytest
import trio

from tests.e2e.serving import error_code, serving
from trio_gateway.testing import (
    Chunk,
    CloseFin,
    EndChunks,
    Event,
    Head,
    Hold,
    Raw,
    ReadOnly,
    Repeat,
    Script,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    error_answer,
    open_engine,
    until,
)

ANSWER = json.dumps(
    {"choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}]}
).encode()
STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"content":"ok"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
JSON_TYPE = ("content-type", "application/json")
SSE_TYPE = ("content-type", "text/event-stream")


def sized(body: bytes, *headers: tuple[str, str]) -> Script:
    """An answer whose length is told."""
    return (Head(200, (*headers, ("content-length", str(len(body))))), Raw(body))


def chunked(body: bytes, *headers: tuple[str, str], size: int = 1000) -> Script:
    """An answer in chunks."""
    pieces = tuple(Chunk(body[at : at + size]) for at in range(0, len(body), size))
    return (Head(200, (*headers, ("transfer-encoding", "chunked"))), *pieces, EndChunks())


def until_close(body: bytes, *headers: tuple[str, str]) -> Script:
    """An answer that ends with its connection."""
    return (Head(200, headers), Raw(body), CloseFin())


# Used again -------------------------------------------------------------------------------------------------


async def test_a_connection_is_used_again_after_every_clean_end() -> None:
    scripts = [
        chat_stream("ok"),
        chat_answer(),
        error_answer(400),
        error_answer(500),
        chunked(ANSWER, JSON_TYPE),
        chunked(STREAM, SSE_TYPE),
        sized(STREAM, SSE_TYPE),
        chat_answer(),
    ]
    streams = [True, False, True, False, False, True, True, False]
    async with open_engine(*scripts) as engine, serving(engine) as gateway:
        for number, stream in enumerate(streams, 1):
            await gateway.ask(chat_request(stream=stream))
            await gateway.settled(number)
        assert [request.connection for request in engine.requests] == [1] * len(scripts)


NOT_AGAIN: dict[str, Script] = {
    "says close": sized(ANSWER, JSON_TYPE, ("connection", "close")),
    "ends by closing": until_close(ANSWER, JSON_TYPE),
    "speaks HTTP/1.0": (
        Raw(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)),
        Raw(ANSWER),
    ),
    "sends more than its length": (*sized(ANSWER, JSON_TYPE)[:1], Raw(ANSWER + b"HTTP/1.1 200 OK\r\n")),
    "did not read the request": (ReadOnly(10), *error_answer(400), Hold()),
}


@pytest.mark.parametrize("script", NOT_AGAIN.values(), ids=NOT_AGAIN.keys())
async def test_a_connection_is_not_used_again_after_an_answer_that(script: Script) -> None:
    async with open_engine(script, chat_answer()) as engine, serving(engine) as gateway:
        large = "x" * 3_000_000 if isinstance(script[0], ReadOnly) else "hi"
        first = await gateway.ask(chat_request(large, stream=False))
        assert first.status in (200, 400)
        await gateway.settled()
        assert gateway.gateway.connections.idle == 0
        assert (await gateway.ask(chat_request(stream=False))).status == 200
        assert [request.connection for request in engine.requests] == [1, 2]


async def test_bytes_that_an_engine_sends_unasked_end_its_connection() -> None:
    go = trio.Event()
    script = (*chat_answer(), WaitFor(go), Raw(b"HTTP/1.1 408 Too Late\r\ncontent-length: 0\r\n\r\n"))
    async with open_engine(script, chat_answer()) as engine, serving(engine) as gateway:
        await gateway.ask(chat_request(stream=False))
        await gateway.settled()
        assert gateway.gateway.connections.idle == 1
        go.set()
        with trio.fail_after(5):
            await engine.requests[0].over.wait()
        assert (await gateway.ask(chat_request(stream=False))).status == 200
        assert [request.connection for request in engine.requests] == [1, 2]


async def test_each_attempt_has_a_connection_of_its_own(nursery: trio.Nursery) -> None:
    go = trio.Event()
    async with open_engine((WaitFor(go), *chat_stream("ok"))) as engine, serving(engine) as gateway:
        for number in (1, 2, 3):
            nursery.start_soon(gateway.ask, chat_request())
            await engine.wait_open(number)
        go.set()
        await gateway.settled(3)
        await gateway.until(lambda: gateway.gateway.connections.idle == 3)
        await gateway.ask(chat_request())
        assert engine.statistics().connections == 3


async def test_idle_connections_are_closed_after_three_seconds() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        await gateway.ask(chat_request())
        await gateway.settled()
        before = trio.current_time()
        assert gateway.gateway.connections.idle == 1
        with trio.fail_after(6):
            await engine.wait_disconnected()
        assert trio.current_time() - before > 2.5
        assert gateway.gateway.connections.idle == 0
        assert (await gateway.ask(chat_request())).status == 200


# Forms of an answer -----------------------------------------------------------------------------------------


FORMS: dict[str, tuple[Script, bool]] = {
    "a stream with a length": (sized(STREAM, SSE_TYPE), True),
    "a stream until close": (until_close(STREAM, SSE_TYPE), True),
    "a stream of HTTP/1.0": (
        (Raw(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + STREAM), CloseFin()),
        True,
    ),
    "an answer in chunks": (chunked(ANSWER, JSON_TYPE, size=3), False),
    "an answer until close": (until_close(ANSWER, JSON_TYPE), False),
    "an interim answer before": ((Raw(b"HTTP/1.1 100 Continue\r\n\r\n"), *sized(ANSWER, JSON_TYPE)), False),
    "early hints before": (
        (Raw(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * 3), *sized(ANSWER, JSON_TYPE)),
        False,
    ),
    "a type with parameters": (sized(ANSWER, ("Content-Type", "Application/JSON; charset=utf-8")), False),
    "a reason that is empty": (
        (
            Raw(
                b"HTTP/1.1 200 \r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
            ),
            Raw(ANSWER),
        ),
        False,
    ),
    "a trailer": (
        (
            Head(200, (JSON_TYPE, ("transfer-encoding", "chunked"))),
            Chunk(ANSWER),
            Raw(b"0\r\nx-checksum: 1\r\n\r\n"),
        ),
        False,
    ),
}


@pytest.mark.parametrize(("script", "stream"), FORMS.values(), ids=FORMS.keys())
async def test_an_answer_is_read_in_every_form_that_is_allowed(script: Script, stream: bool) -> None:
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(stream=stream))
        assert answer.status == 200, answer.body
        if stream:
            assert (answer.chat().text, answer.chat().done) == ("ok", 1)
        else:
            assert answer.body == ANSWER


async def test_a_stream_until_close_needs_its_done_or_its_finishes() -> None:
    cut = STREAM.replace(b"data: [DONE]\n\n", b"").replace(b'"stop"', b"null")
    async with open_engine(until_close(cut, SSE_TYPE)) as engine, serving(engine) as gateway:
        reading = (await gateway.ask(chat_request())).chat()
        assert (reading.text, reading.done, len(reading.errors)) == ("ok", 0, 1)


def in_members(plain: bytes) -> bytes:
    """Gzip each half by itself, with nothing between them."""
    half = len(plain) // 2
    return gzip.compress(plain[:half]) + gzip.compress(b"") + gzip.compress(plain[half:])


def bare(plain: bytes) -> bytes:
    """Deflate without what zlib puts around it."""
    coder = zlib.compressobj(wbits=-15)
    return coder.compress(plain) + coder.flush()


CODERS: Final[dict[str, tuple[str, Callable[[bytes], bytes]]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "gzip in members": ("gzip", in_members),
    "deflate": ("deflate", zlib.compress),
    "deflate, bare": ("deflate", bare),
    "deflate, bare and stored": ("deflate", lambda plain: zlib.compress(plain, 0)[2:-4]),
}


@pytest.mark.parametrize(("coding", "coder"), CODERS.values(), ids=CODERS)
@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "buffered"])
async def test_answers_that_come_coded_all_the_same_are_decoded(
    coding: str, coder: Callable[[bytes], bytes], size: int, stream: bool
) -> None:
    plain, kind = (STREAM, SSE_TYPE) if stream else (ANSWER, JSON_TYPE)
    script = chunked(coder(plain), kind, ("content-encoding", coding), size=size)
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(stream=stream))
        assert answer.status == 200
        assert answer.header("content-encoding") is None
        assert answer.chat().text == "ok" if stream else answer.body == plain


async def test_the_end_of_an_answer_does_not_stay_in_its_decoder() -> None:
    """It may take all that is coded before it has given all of the text, which comes in pieces of 64 KiB."""
    blanks = b" " * (64 * 1024 + 1 - len(ANSWER))
    coder = zlib.compressobj(wbits=-15)
    coded = coder.compress(ANSWER) + coder.flush(zlib.Z_FULL_FLUSH) + coder.compress(blanks) + coder.flush()
    script = sized(coded, JSON_TYPE, ("content-encoding", "deflate"))
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(stream=False))
        assert (answer.status, answer.body) == (200, ANSWER + blanks)


@pytest.mark.parametrize(
    "coded",
    [
        gzip.compress(ANSWER)[:-9],
        in_members(ANSWER)[:-9],
        b"no gzip at all",
        gzip.compress(ANSWER)[:20] + b"\xff" * 30,
    ],
    ids=["cut", "cut in a later member", "none", "broken"],
)
async def test_a_broken_coding_is_a_protocol_error(coded: bytes) -> None:
    script = sized(coded, JSON_TYPE, ("content-encoding", "gzip"))
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request(stream=False))
        assert (answer.status, error_code(answer)) == (502, "engine_protocol_error")


@pytest.mark.parametrize(("coding", "coder"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_what_follows_the_end_of_a_coding_is_a_protocol_error_at_once(
    coding: str, coder: Callable[[bytes], bytes]
) -> None:
    coded = coder(STREAM.replace(b"data: [DONE]\n\n", b""))
    script = (
        Head(200, (SSE_TYPE, ("transfer-encoding", "chunked"), ("content-encoding", coding))),
        Chunk(coded),
        Repeat((Chunk(b"x" * 1000),)),
    )
    async with open_engine(script) as engine, serving(engine) as gateway:
        reading = (await gateway.ask(chat_request())).chat()
        assert (reading.text, reading.done) == ("ok", 0)
        assert [error["code"] for error in reading.errors] == ["engine_protocol_error"]


async def test_a_small_coded_answer_can_not_blow_up() -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    script = sized(bomb, JSON_TYPE, ("content-encoding", "gzip"))
    async with (
        open_engine(script) as engine,
        serving(engine, limits={"answer_bytes": 1_000_000}) as gateway,
    ):
        answer = await gateway.ask(chat_request(stream=False))
        assert (answer.status, error_code(answer)) == (502, "engine_protocol_error")


async def test_redirects_are_never_followed() -> None:
    async with open_engine() as other:
        location = ("location", f"{other.url}/v1/chat/completions")
        for status in (301, 302, 303, 307, 308):
            async with (
                open_engine(error_answer(status, headers=(location,))) as engine,
                serving(engine) as gateway,
            ):
                answer = await gateway.ask(chat_request())
                assert (answer.status, error_code(answer)) == (502, "engine_credentials")
                assert answer.header("location") is None
        assert other.statistics().connections == 0


# Sending ----------------------------------------------------------------------------------------------------


async def test_an_answer_is_read_while_the_request_is_still_being_sent() -> None:
    script = (ReadOnly(1000), *error_answer(413, "too large for me"), Hold())
    async with open_engine(script) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request("x" * 8_000_000))
        assert (answer.status, answer.error()["message"]) == (413, "too large for me")
        assert len(engine.requests[0].body) == 1000


async def test_a_large_request_arrives_whole_at_an_engine_that_reads_slowly() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request("y" * 8_000_000))
        assert answer.status == 200
        (message,) = json.loads(engine.requests[0].body)["messages"]
        assert message["content"] == "y" * 8_000_000


async def test_a_client_that_leaves_while_its_request_is_being_sent_ends_the_sending() -> None:
    async with open_engine((ReadOnly(1000), Hold())) as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request("x" * 8_000_000))
            request = await engine.request()
            client.leave_reset()
            await request.closed.wait()
        assert (await gateway.settled()).outcome == "client_gone"


async def test_the_kernel_holds_little_of_what_an_engine_sends_ahead() -> None:
    endless = (Head(), *chat_stream("one")[1:3], Repeat((Event({"choices": [], "x": "y" * 4000}),)))
    async with (
        open_engine(endless, send_buffer=16 * 1024) as engine,
        serving(engine, delivery={"buffer_bytes": 32 * 1024, "stall_timeout": 0.2}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect(receive_buffer=4096) as client:
            await client.send(chat_request())
            request = await engine.request()
            await request.stalled.wait()
            await until(lambda: gateway.gateway.buffers.used > 0)
            await client.stall()
        assert request.bytes_sent < 500_000
