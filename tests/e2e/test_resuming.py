"""Streams over HTTP that survive their connection: every event once, wherever it was cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from tests.e2e.serving import Leaving, Serving, error_code, leave, serving, tenant
from trio_gateway.testing import (
    Answer,
    CloseReset,
    Event,
    Repeat,
    Script,
    ScriptedEngine,
    WaitFor,
    chat_request,
    chat_stream,
    open_engine,
    until,
)

TEXTS = ("one ", "two ", "three ", "four ", "five ")
STREAM = chat_stream(*TEXTS)
EVENTS = len(TEXTS) + 3  # with the role, the finish and [DONE]
RESUMABLE = (("x-gateway-resumable", "1"),)
BIG = Event({"choices": [{"index": 0, "delta": {"content": "x" * 4000}, "finish_reason": None}]})
KIB = 1024


@asynccontextmanager
async def resuming(*engines: ScriptedEngine, **sections: Any) -> AsyncIterator[Serving]:
    """Run a gateway which at the end need not wait until what it keeps is too old."""
    async with serving(*engines, **sections) as gateway:
        yield gateway
        kept = gateway.gateway.generator.kept
        await gateway.until(lambda: len(gateway.gateway.live) == 0 and gateway.gateway.server.open == 0)
        kept.window = 0.0
        kept.sweep()


async def read_part(gateway: Serving, events: int, how: Leaving = "fin") -> tuple[str, bytes]:
    """Ask for a resumable stream, read so many events and lose the connection; answer id and events."""
    with await gateway.connect() as client, trio.fail_after(10):
        await client.send(chat_request(headers=RESUMABLE))
        answer = await client.read_head()
        await client.read_events(events)
        name = answer.header("x-request-id")
        assert name is not None
        blocks = answer.body.split(b"\n\n")[:events]
        leave(client, how)
    return name, b"".join(block + b"\n\n" for block in blocks)


async def go_on(gateway: Serving, name: str, after: int | str, **headers: str) -> Answer:
    return await gateway.get(f"/v1/requests/{name}/events?after={after}", **headers)


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_wherever_it_is_cut_the_rest_follows_without_a_gap_and_without_a_repetition(
    how: Leaving,
) -> None:
    async with open_engine(STREAM) as engine, resuming(engine) as gateway:
        whole = (await gateway.ask(chat_request())).body
        for cut in range(1, EVENTS + 1):
            name, begun = await read_part(gateway, cut, how)
            rest = await go_on(gateway, name, cut)
            assert (rest.status, rest.header("x-request-id")) == (200, name)
            assert rest.header("content-type") == "text/event-stream; charset=utf-8"
            assert rest.ended == "complete"
            if cut < EVENTS:
                assert begun + rest.body == whole
            else:
                assert begun == whole
                assert rest.events is not None
                assert not rest.events.events
            record = await gateway.settled(cut + 1)
            assert (record.outcome, record.tokens_delivered) == ("completed", record.tokens_generated)


async def test_it_can_be_cut_and_resumed_at_every_event_in_turn() -> None:
    async with open_engine(STREAM) as engine, resuming(engine) as gateway:
        whole = (await gateway.ask(chat_request())).body.split(b"\n\n")
        name, _ = await read_part(gateway, 1)
        for after in range(1, EVENTS - 1):
            with await gateway.connect() as client, trio.fail_after(10):
                await client.request("GET", f"/v1/requests/{name}/events?after={after}")
                answer = await client.read_head()
                await client.read_events(1)
                assert answer.body.split(b"\n\n")[0] == whole[after]
                client.leave_reset()
        rest = await go_on(gateway, name, EVENTS - 1)
        assert rest.body == b"data: [DONE]\n\n"


async def test_while_nobody_reads_the_engine_is_read_on_only_within_the_bound_and_then_goes_on() -> None:
    script: Script = (*STREAM[:2], Repeat((BIG,), times=200), *STREAM[-3:])
    limits = {"buffer_bytes": 64 * KIB}
    async with (
        open_engine(script, send_buffer=16 * KIB) as engine,
        resuming(engine, delivery=limits) as gateway,
    ):
        name, begun = await read_part(gateway, 2)
        request = await engine.request()
        with trio.fail_after(10):
            await request.stalled.wait()
        assert gateway.gateway.buffers.used <= 64 * KIB + 3 * 4200
        rest = await go_on(gateway, name, 2)
        assert rest.ended == "complete"
        assert (begun + rest.body).count(b"x" * 4000) == 200
        record = await gateway.settled()
        assert record.outcome == "completed"


async def test_events_that_do_not_fit_any_more_are_gone_and_that_is_said() -> None:
    script: Script = (*STREAM[:2], Repeat((BIG,), times=50), *STREAM[-3:])
    limits = {"buffer_bytes": 32 * KIB}
    async with open_engine(script) as engine, resuming(engine, delivery=limits) as gateway:
        answer = await gateway.ask(chat_request(headers=RESUMABLE))
        name = answer.header("x-request-id") or ""
        gone = await go_on(gateway, name, 2)
        assert (gone.status, error_code(gone), gone.error()["param"]) == (404, "request_not_found", "after")
        assert (await go_on(gateway, name, 52)).body.endswith(b"data: [DONE]\n\n")


async def test_who_does_not_come_back_within_the_window_is_gone_and_its_engine_stops() -> None:
    hold = trio.Event()
    script: Script = (*STREAM[:3], WaitFor(hold), *STREAM[3:])
    async with open_engine(script) as engine, serving(engine, delivery={"resume_window": 0.2}) as gateway:
        name, _ = await read_part(gateway, 2)
        request = await engine.request()
        record = await gateway.settled()
        assert record.outcome == "client_gone"
        with trio.fail_after(5):
            await request.closed.wait()
        assert error_code(await go_on(gateway, name, 2)) == "request_not_found"


async def test_a_newer_reader_takes_over_and_the_older_one_is_cut() -> None:
    hold = trio.Event()
    script: Script = (*STREAM[:3], WaitFor(hold), *STREAM[3:])
    async with open_engine(script) as engine, resuming(engine) as gateway:
        with await gateway.connect() as first, await gateway.connect() as second, trio.fail_after(10):
            await first.send(chat_request(headers=RESUMABLE))
            name = (await first.read_head()).header("x-request-id")
            await first.read_events(2)
            await second.request("GET", f"/v1/requests/{name}/events?after=0")
            await second.read_events(2)
            await first.read_closed()
            assert first.answers[0].was_cut
            hold.set()
            answer = await second.read_to_end()
        assert answer.chat().text == "".join(TEXTS)


async def test_it_is_there_for_the_key_that_asked_and_for_nobody_else() -> None:
    tenants = [tenant("one", "key-one"), tenant("two", "key-two")]
    async with open_engine(STREAM) as engine, resuming(engine, tenants=tenants) as gateway:
        answer = await gateway.ask(chat_request(key="key-one", headers=RESUMABLE))
        name = answer.header("x-request-id") or ""
        assert (await go_on(gateway, name, 1)).status == 401
        other = await go_on(gateway, name, 1, authorization="Bearer key-two")
        assert (other.status, error_code(other)) == (404, "request_not_found")
        own = await go_on(gateway, name, 1, authorization="Bearer key-one")
        assert (own.status, own.ended) == (200, "complete")


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "", "9" * 20, "1&after=2"])
async def test_a_number_that_is_none_is_refused(after: str) -> None:
    async with open_engine(STREAM) as engine, resuming(engine) as gateway:
        answer = await gateway.ask(chat_request(headers=RESUMABLE))
        refused = await go_on(gateway, answer.header("x-request-id") or "", after)
        assert (refused.status, error_code(refused)) == (400, "invalid_value")


async def test_what_was_not_sent_yet_can_not_have_been_read() -> None:
    async with open_engine(STREAM) as engine, resuming(engine) as gateway:
        answer = await gateway.ask(chat_request(headers=RESUMABLE))
        refused = await go_on(gateway, answer.header("x-request-id") or "", EVENTS + 1)
        assert (refused.status, error_code(refused)) == (400, "invalid_value")


async def test_an_engine_that_fails_in_the_middle_is_told_also_to_who_comes_back() -> None:
    script: Script = (*STREAM[:4], CloseReset())
    async with open_engine(script) as engine, resuming(engine) as gateway:
        answer = await gateway.ask(chat_request(headers=RESUMABLE))
        assert b"[DONE]" not in answer.body
        rest = await go_on(gateway, answer.header("x-request-id") or "", 1)
        assert answer.body.endswith(rest.body)
        assert b'"engine_failed"' in rest.body or b'"engine_protocol_error"' in rest.body


async def test_a_refusal_is_an_ordinary_answer() -> None:
    async with open_engine(STREAM) as engine, resuming(engine) as gateway:
        answer = await gateway.ask(chat_request(model="nobody", headers=RESUMABLE))
        assert (answer.status, error_code(answer)) == (404, "model_not_found")


async def test_a_stream_that_is_not_resumable_is_not_kept() -> None:
    async with open_engine(STREAM) as engine, serving(engine) as gateway:
        answer = await gateway.ask(chat_request())
        assert gateway.gateway.kept_answers == 0
        assert (await go_on(gateway, answer.header("x-request-id") or "", 1)).status == 404


async def test_its_owner_can_cancel_it_while_nobody_reads() -> None:
    hold = trio.Event()
    script: Script = (*STREAM[:3], WaitFor(hold), *STREAM[3:])
    async with open_engine(script) as engine, resuming(engine) as gateway:
        name, _ = await read_part(gateway, 2)
        assert (await gateway.fetch("DELETE", f"/v1/requests/{name}")).status == 200
        record = await gateway.settled()
        assert record.outcome == "client_cancelled"
        with trio.fail_after(10):
            await until(lambda: gateway.held == 0)
