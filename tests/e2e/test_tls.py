"""Requests over TLS, from the handshake to the last byte, and every way in which they end before."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import openai
import pytest
import trio

from tests.e2e.serving import Serving, error_code, serving
from tests.e2e.test_leaving import STAGE, Stage, expect_gone, heartbeats, script_of
from tests.e2e.tls import Issued, TlsClient, issue
from trio_gateway.testing import (
    CloseReset,
    EngineRequest,
    Event,
    Hold,
    Json,
    Repeat,
    Script,
    ScriptedEngine,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    http_request,
    open_engine,
    until,
)

KIB: Final = 1024
SMALL_WINDOW: Final = 4 * KIB  # of a client's kernel, so that it fills soon
WINDOW_OF_A_RECORD: Final = 32 * KIB  # so that it can read the beginning of a large answer
HEAD, ROLE, ONE, FINISH, LAST, END = chat_stream("one")
BIG: Final = Event({"choices": [{"index": 0, "delta": {"content": "x" * 4000}, "finish_reason": None}]})
EVENT_BYTES: Final = 4200  # at most, with framing
ENDLESS: Final[Script] = (HEAD, ROLE, Repeat((BIG,)))
OLD: Final = (b" HTTP/1.1\r\n", b" HTTP/1.0\r\n")

Leaving = Literal["notify", "notify and close", "fin", "half", "reset", "garbage"]
LEAVING: Final = pytest.mark.parametrize(
    "how", ["notify", "notify and close", "fin", "half", "reset", "garbage"]
)


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("certificate"))


def text_of(request: EngineRequest) -> str:
    """What the user said."""
    messages: Any = request.json()["messages"]
    return str(messages[0]["content"])


class Secured:
    """A gateway that speaks TLS, and clients that trust it."""

    def __init__(self, gateway: Serving, issued: Issued) -> None:
        self.gateway: Final = gateway
        self.trust: Final = issued.trust()

    async def connect(self, *, receive_buffer: int | None = None) -> TlsClient:
        return await TlsClient.dial(self.gateway.address, self.trust, receive_buffer=receive_buffer)


@asynccontextmanager
async def secured(issued: Issued, *engines: ScriptedEngine, **sections: Any) -> AsyncIterator[Secured]:
    """Run a gateway that speaks TLS for the length of the block."""
    async with serving(*engines, server=issued.server, **sections) as gateway:
        yield Secured(gateway, issued)


async def leave(client: TlsClient, how: Leaving) -> None:
    if how.startswith("notify"):
        await client.secured.notify()
    if how in ("notify and close", "fin"):
        client.leave_fin()
    elif how == "half":
        client.half_close()
    elif how == "reset":
        client.leave_reset()
    elif how == "garbage":
        await client.secured.sock.send(b"\x17\x03\x03\x00\x20" + bytes(32))


# Requests and answers ---------------------------------------------------------------------------------------


async def test_streams_and_buffered_answers_follow_each_other_on_one_connection(issued: Issued) -> None:
    async with open_engine() as engine, secured(issued, engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            for stream in (True, False, True, True, False):
                await client.send(chat_request(stream=stream))
                answer = await client.read_to_end()
                assert (answer.status, answer.header("connection")) == (200, None)
                assert answer.chat().done == 1 if stream else answer.json()["object"] == "chat.completion"
            await client.send(http_request("POST", "/v1/chat/completions", body=b"{"))
            assert error_code(await client.read_to_end()) == "invalid_json"
            await client.send(http_request("GET", "/v1/models"))
            assert (await client.read_to_end()).status == 200
            assert gateway.gateway.gateway.server.open == 1


async def test_a_token_leaves_before_the_next_one_comes(issued: Issued) -> None:
    go = [trio.Event(), trio.Event()]
    script = (HEAD, ROLE, ONE, WaitFor(go[0]), ONE, WaitFor(go[1]), FINISH, END)
    async with open_engine(script) as engine, secured(issued, engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            for number, event in enumerate(go, 2):
                await client.read_events(number)
                event.set()
            assert (await client.read_to_end()).chat().text == "oneone"


async def test_pipelined_requests_are_answered_in_order(issued: Issued) -> None:
    texts = ["one", "two", "three"]

    def play(request: EngineRequest) -> Script:
        return chat_stream(text_of(request))

    async with open_engine(play) as engine, secured(issued, engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(b"".join(map(chat_request, texts)))
            assert [(await client.read_to_end()).chat().text for _ in texts] == texts
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request(texts[0]))
            await client.read_events(1)
            for text in texts[1:]:  # while the answer runs
                await client.send(chat_request(text))
            assert [(await client.read_to_end()).chat().text for _ in texts] == texts


async def test_a_request_may_come_byte_by_byte_in_records_of_its_own(issued: Issued) -> None:
    async with open_engine() as engine, secured(issued, engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            request = chat_request(stream=False)
            for at in range(len(request)):
                await client.send(request[at : at + 1])
            assert (await client.read_to_end()).status == 200
        assert (await engine.request()).json()["model"] == "m1"


async def test_a_client_that_waits_for_100_continue_gets_it(issued: Issued) -> None:
    async with open_engine() as engine, secured(issued, engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            head, _, body = chat_request(headers=(("expect", "100-continue"),)).partition(b"\r\n\r\n")
            await client.send(head + b"\r\n\r\n")
            await client.read_until(b"100 Continue")
            await client.send(body)
            assert (await client.read_to_end()).chat().text == "ok"


async def test_large_bodies_pass_both_ways_unchanged(issued: Issued) -> None:
    text = "".join(hashlib.sha256(str(number).encode()).hexdigest() for number in range(60_000))

    def echo(request: EngineRequest) -> Script:
        return chat_answer(text_of(request))

    async with open_engine(echo) as engine, secured(issued, engine) as gateway:
        with trio.fail_after(20), await gateway.connect() as client:
            await client.send(chat_request(text, stream=False))
            answer = await client.read_to_end()
            assert len(text) > 3_500_000
            choices: Any = answer.json()["choices"]
            assert choices[0]["message"]["content"] == text
            await client.send(chat_request(stream=False))
            assert (await client.read_to_end()).status == 200


async def test_a_long_stream_to_a_slow_reader_is_whole(issued: Issued) -> None:
    events = 60
    script = (HEAD, ROLE, Repeat((BIG,), times=events), FINISH, LAST, END)
    async with open_engine(script) as engine, secured(issued, engine) as gateway:
        with trio.fail_after(20), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request())
            answer = await client.trickle(400 * KIB)
            assert answer.chat().text == "x" * 4000 * events
            assert answer.chat().done == 1
        record = await gateway.gateway.settled()
        assert record.outcome == "completed"


# How an answer ended can be told ----------------------------------------------------------------------------


async def test_a_proper_end_is_announced(issued: Issued) -> None:
    async with (
        open_engine() as engine,
        secured(issued, engine, limits={"keep_alive": 0.1, "head_timeout": 0.2}) as gateway,
    ):

        async def expect_announced(*requests: bytes) -> None:
            with trio.fail_after(10), await gateway.connect() as client:
                for request in requests:
                    await client.send(request)
                    assert (await client.read_to_end()).ended == "complete"
                assert await client.read_closed() == "fin"
                assert client.secured.notified

        await expect_announced()  # nothing was asked
        await expect_announced(chat_request())  # nothing more was asked
        await expect_announced(chat_request(headers=(("connection", "close"),)))
        await expect_announced(chat_request().replace(*OLD))
        await expect_announced(b"GET / HTTP/1.1\r\nbad head\r\n\r\n")
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(b"GET /livez HT")
            assert (await client.read_to_end()).status == 408
            assert await client.read_closed() == "fin"
            assert client.secured.notified


async def test_an_idle_connection_is_told_of_the_shutdown(issued: Issued) -> None:
    async with open_engine() as engine, secured(issued, engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_to_end()
            server = gateway.gateway.gateway.server
            await until(lambda: len(server._idle) == 1)
            server.close_idle()
            assert await client.read_closed() == "fin"
            assert client.secured.notified


async def test_a_failed_stream_ends_with_its_error_event_properly(issued: Issued) -> None:
    async with open_engine((HEAD, ROLE, ONE, CloseReset())) as engine, secured(issued, engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request(headers=(("connection", "close"),)))
            answer = await client.read_to_end()
            assert (answer.ended, answer.chat().done) == ("complete", 0)
            assert [error["code"] for error in answer.chat().errors] == ["engine_failed"]
            assert await client.read_closed() == "fin"
            assert client.secured.notified


@pytest.mark.parametrize("old", [False, True], ids=["HTTP 1.1", "HTTP 1.0"])
async def test_a_cut_answer_is_not_announced_as_ended(issued: Issued, old: bool) -> None:
    content = {
        "message": {"role": "assistant", "content": "x" * 2_000_000},
        "finish_reason": "stop",
        "index": 0,
    }
    request = chat_request(stream=False, headers=(("x-gateway-timeout-ms", "300"),))
    async with open_engine((Json({"choices": [content]}),)) as engine, secured(issued, engine) as gateway:
        with trio.fail_after(10), await gateway.connect(receive_buffer=WINDOW_OF_A_RECORD) as client:
            await client.send(request.replace(*OLD) if old else request)
            record = await gateway.gateway.settled()
            assert record.outcome == "deadline_exceeded"
            answer = await client.read_head()
            await client.read_closed()
            assert answer.was_cut
            assert not client.secured.notified


async def test_a_cut_stream_of_http_1_0_is_not_announced_as_ended(issued: Issued) -> None:
    async with (
        open_engine(ENDLESS) as engine,
        secured(issued, engine, delivery={"stall_timeout": 0.3}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request().replace(*OLD))
            assert (await gateway.gateway.settled()).outcome == "client_stalled"
            assert await client.read_closed() == "reset"
            assert not client.secured.notified


# Leaving ----------------------------------------------------------------------------------------------------


@STAGE
@LEAVING
async def test_the_engine_is_left_when_the_client_leaves(issued: Issued, stage: Stage, how: Leaving) -> None:
    async with (
        open_engine(script_of(stage, trio.Event())) as engine,
        secured(issued, engine, stream=heartbeats(stage)) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request(stream=stage.stream))
            await stage.reach(engine, client)
            await leave(client, how)
            await expect_gone(gateway.gateway, engine, stage)


@pytest.mark.parametrize("how", ["notify", "fin", "reset"])
async def test_a_client_may_leave_as_soon_as_its_answer_is_whole(issued: Issued, how: Leaving) -> None:
    """The engine says the last word, and is slow to end its message."""
    async with (
        open_engine((HEAD, ROLE, ONE, FINISH, LAST, Hold())) as engine,
        secured(issued, engine) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            assert (await client.read_to_end()).chat().done == 1
            await leave(client, how)
            record = await gateway.gateway.settled()
            assert record.outcome == "completed"


@LEAVING
async def test_a_leaver_gives_its_place_in_the_queue_back(issued: Issued, how: Leaving) -> None:
    go = trio.Event()
    async with (
        open_engine((WaitFor(go), *chat_stream("ok"))) as engine,
        secured(issued, engine, worker={"slots": 1}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as first, await gateway.connect() as second:
            await first.send(chat_request())
            await engine.wait_open(1)
            await second.send(chat_request())
            await gateway.gateway.queued(1)
            await leave(second, how)
            await gateway.gateway.queued(0)
            record = await gateway.gateway.settled()
            assert (record.outcome, record.phase) == ("client_gone", "queued")
            go.set()
            assert (await first.read_to_end()).chat().text == "ok"
        assert engine.statistics().requests == 1


@LEAVING
async def test_a_request_that_is_cut_reaches_no_worker(issued: Issued, how: Leaving) -> None:
    whole = chat_request("x" * 50_000)
    async with open_engine() as engine, secured(issued, engine) as gateway:
        server = gateway.gateway.gateway.server
        for part in (whole[:20], whole[:200], whole[:-1]):
            with trio.fail_after(10), await gateway.connect() as client:
                await client.send(part)
                await gateway.gateway.until(lambda: server.open == 1)
                await leave(client, how)
                if how == "notify":
                    await client.read_closed()
            await gateway.gateway.until(lambda: server.open == 0)
        assert engine.statistics().requests == 0
        # An announced end is a mistake that can be answered, if the client still listens; others are losses.
        codes = {"bad_framing", "client_gone"} if how.startswith("notify") else {"client_gone"}
        assert gateway.gateway.turned_away().keys() <= codes
        assert gateway.gateway.records == []


async def test_a_cut_body_is_answered_where_the_client_can_still_read(issued: Issued) -> None:
    async with open_engine() as engine, secured(issued, engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request("x" * 5000)[:-1])
            await client.secured.notify()
            assert error_code(await client.read_to_end()) == "bad_framing"
            assert await client.read_closed() == "fin"
            assert client.secured.notified
        assert engine.statistics().requests == 0


async def test_the_requests_behind_the_one_that_is_answered_do_not_hide_a_leaver(issued: Issued) -> None:
    go = trio.Event()
    async with (
        open_engine((HEAD, ROLE, ONE, WaitFor(go), FINISH, END)) as engine,
        secured(issued, engine) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request() * 20)
            await client.read_events(1)
            await client.secured.notify()
            await (await engine.request()).closed.wait()
        record = await gateway.gateway.settled()
        assert record.outcome == "client_gone"
        assert engine.statistics().requests == 1


async def test_garbage_in_one_connection_reaches_no_other(issued: Issued) -> None:
    go = trio.Event()
    async with (
        open_engine((HEAD, ROLE, ONE, WaitFor(go), ONE, FINISH, LAST, END)) as engine,
        secured(issued, engine) as gateway,
    ):
        with (
            trio.fail_after(10),
            await gateway.connect() as good,
            await gateway.connect() as bad,
            await gateway.connect() as idle,
        ):
            for client in (good, bad):
                await client.send(chat_request())
                await client.read_events(1)
            for client in (bad, idle):
                await leave(client, "garbage")
                with pytest.raises(ssl.SSLError, match="ALERT"):
                    await client.read_closed()
            go.set()
            assert (await good.read_to_end()).chat().text == "oneone"
        outcomes = {(await gateway.gateway.settled(number)).outcome for number in (1, 2)}
        assert outcomes == {"client_gone", "completed"}


# Slow readers -----------------------------------------------------------------------------------------------


async def test_a_reader_that_never_reads_stops_its_engine_within_bounds_and_is_cut(issued: Issued) -> None:
    async with (
        open_engine(ENDLESS, send_buffer=16 * KIB) as engine,
        secured(issued, engine, delivery={"buffer_bytes": 64 * KIB, "stall_timeout": 0.5}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request())
            request = await engine.request()
            await request.stalled.wait()
            assert gateway.gateway.gateway.buffers.used <= 64 * KIB + EVENT_BYTES
            await client.stall()
            record = await gateway.gateway.settled()
            assert (record.outcome, record.phase, record.code) == ("client_stalled", "after_content", None)
            # Ours, and what the kernel holds on the four sides of two connections.
            assert request.bytes_sent < 64 * KIB + 400 * KIB
            assert await client.read_closed() == "reset"
            await request.closed.wait()


async def test_what_is_delivered_is_no_more_than_the_client_can_have(issued: Issued) -> None:
    async with (
        open_engine(ENDLESS) as engine,
        secured(issued, engine, delivery={"buffer_bytes": 32 * KIB, "stall_timeout": 0.3}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect(receive_buffer=64 * KIB) as client:
            await client.send(chat_request())
            await client.stall()
            record = await gateway.gateway.settled()
            # A reset drops nothing that the client's kernel has acknowledged before.
            await client.read_closed()
            events = client.answers[0].events
            assert events is not None
            assert 0 < record.events_delivered <= len(events.events)
            assert record.bytes_delivered <= len(client.received)


async def test_a_reader_that_goes_on_reading_is_not_stalled(issued: Issued) -> None:
    """Its socket takes ciphertext now and then, while no piece of plaintext gets through in time."""
    events = 40
    script = (HEAD, ROLE, Repeat((BIG,), times=events), FINISH, LAST, END)
    async with (
        open_engine(script) as engine,
        secured(issued, engine, delivery={"stall_timeout": 0.4}) as gateway,
    ):
        with trio.fail_after(20), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request())
            answer = await client.trickle(100 * KIB)
            assert answer.chat().done == 1
        assert (await gateway.gateway.settled()).outcome == "completed"


async def test_a_buffered_answer_that_nobody_reads_is_cut(issued: Issued) -> None:
    content = {
        "message": {"role": "assistant", "content": "x" * 2_000_000},
        "finish_reason": "stop",
        "index": 0,
    }
    async with (
        open_engine((Json({"choices": [content]}),)) as engine,
        secured(issued, engine, delivery={"stall_timeout": 0.3}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect(receive_buffer=WINDOW_OF_A_RECORD) as client:
            await client.send(chat_request(stream=False))
            await client.stall()
            record = await gateway.gateway.settled()
            assert (record.outcome, record.status) == ("client_stalled", 200)
            assert await client.read_closed() == "reset"
            assert client.answers[0].was_cut


# The SDK ----------------------------------------------------------------------------------------------------


async def with_sdk(gateway: Secured, use: Callable[[openai.OpenAI], Any]) -> Any:
    """Use the SDK in a thread of its own, with an HTTP library that verifies the certificate."""

    def run() -> Any:
        http = openai.DefaultHttpxClient(verify=gateway.trust, trust_env=False)
        url = f"{gateway.gateway.gateway.addresses[0]}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0, http_client=http) as client:
            return use(client)

    with trio.fail_after(20):
        return await trio.to_thread.run_sync(run)


MESSAGES: Final = [{"role": "user", "content": "hi"}]


async def test_the_openai_sdk_streams_and_buffers_over_tls(issued: Issued) -> None:
    def play(request: EngineRequest) -> Script:
        return chat_stream("one", "two") if request.json()["stream"] else chat_answer("whole")

    def use(client: openai.OpenAI) -> tuple[str, str]:
        create: Any = client.chat.completions.create
        streamed = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in create(model="m1", messages=MESSAGES, stream=True)
            if chunk.choices
        )
        return streamed, create(model="m1", messages=MESSAGES, stream=False).choices[0].message.content

    async with open_engine(play) as engine, secured(issued, engine) as gateway:
        assert await with_sdk(gateway, use) == ("onetwo", "whole")
        await gateway.gateway.settled(2)
        assert [record.outcome for record in gateway.gateway.records] == ["completed"] * 2


async def test_the_openai_sdk_raises_its_own_exceptions_over_tls(issued: Issued) -> None:
    def ask(client: openai.OpenAI, model: str) -> None:
        create: Any = client.chat.completions.create
        for _ in create(model=model, messages=MESSAGES, stream=True):
            pass

    async with open_engine((HEAD, ROLE, ONE, CloseReset())) as engine, secured(issued, engine) as gateway:
        with pytest.raises(openai.NotFoundError):
            await with_sdk(gateway, lambda client: ask(client, "m9"))
        with pytest.raises(openai.APIError):
            await with_sdk(gateway, lambda client: ask(client, "m1"))
        record = await gateway.gateway.settled()
        assert record.outcome == "upstream_failed"
