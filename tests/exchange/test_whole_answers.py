"""Answers that go well: what the client gets, in which order, and what is recorded."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import MockClock

from tests.exchange.rig import WALL, is_whole, rigged, text_of
from trio_gateway.contract import COMPLETIONS, EMBEDDINGS, Outcome
from trio_gateway.testing import (
    Chunk,
    CloseFin,
    EndChunks,
    FakeScript,
    Head,
    Hold,
    RecordingClient,
    Wait,
    chat_answer,
    chat_chunk,
    chat_stream,
    completion_stream,
    embedding_answer,
    make_request,
)


async def test_a_stream_arrives_whole_and_is_settled(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("Hel", "lo", usage=(7, 2))) as rig:
        running = await rig.run()
        assert running.ending is not None
        assert running.ending.outcome is Outcome.COMPLETED
        assert text_of(running.client) == "Hello"
        assert is_whole(running.client)
        assert running.client.head is not None
        assert (running.client.head.status, running.client.head.length) == (200, None)
        assert running.placed == 1
        assert (rig.engine.kept, rig.engine.closed) == (1, 0)
        record = rig.record
        assert (record.outcome, record.phase, record.code, record.status) == (
            "completed",
            "after_content",
            None,
            200,
        )
        assert (record.worker, record.attempts, record.usage_source) == ("w1", 1, "engine")
        assert (record.tokens_prompt, record.tokens_generated, record.tokens_delivered) == (7, 2, 2)
        assert record.tokens_acknowledged is None
        assert record.events_delivered == len(running.client.events)
        assert record.bytes_delivered == len(running.client.received)


async def test_events_pass_on_with_their_bytes(autojump_clock: MockClock) -> None:
    odd = b'{"choices": [{"index":0, "delta":{"content":"\\u00e9"}, "x": 1e0}], "big": 123456789012345678901}'
    script: FakeScript = (
        Head(),
        Chunk(b"data: " + odd + b"\n\n"),
        chat_chunk({}, finish="stop"),
        Chunk(b"data: [DONE]\n\n"),
        EndChunks(),
    )
    async with rigged(script) as rig:
        running = await rig.run()
        assert running.client.events[0] == odd
        assert is_whole(running.client)


async def test_a_buffered_answer_arrives_whole_with_its_length(autojump_clock: MockClock) -> None:
    async with rigged(chat_answer("hello", usage=(4, 9))) as rig:
        running = await rig.run(make_request(stream=False))
        client, record = running.client, rig.record
        assert client.finished
        assert client.head is not None
        assert (client.head.status, client.head.length) == (200, len(client.received))
        assert json.loads(client.received)["choices"][0]["message"]["content"] == "hello"
        assert (record.outcome, record.phase, record.status) == ("completed", "after_content", 200)
        assert (record.tokens_prompt, record.tokens_generated, record.tokens_delivered) == (4, 9, 9)
        assert (record.events_delivered, record.bytes_delivered) == (0, len(client.received))


async def test_embeddings_need_no_finish_reason(autojump_clock: MockClock) -> None:
    async with rigged(embedding_answer([1.0, 2.0], prompt_tokens=5)) as rig:
        running = await rig.run(make_request(operation=EMBEDDINGS, stream=False))
        assert json.loads(running.client.received)["data"][0]["embedding"] == [1.0, 2.0]
        assert (rig.record.outcome, rig.record.tokens_prompt, rig.record.operation) == (
            "completed",
            5,
            "embeddings",
        )


async def test_completions_stream_too(autojump_clock: MockClock) -> None:
    async with rigged(completion_stream("a", "b")) as rig:
        running = await rig.run(make_request(operation=COMPLETIONS))
        assert is_whole(running.client)
        assert [json.loads(e)["choices"][0]["text"] for e in running.client.events[:-2]] == ["a", "b"]


async def test_the_public_name_of_the_model_stands_in_stream_and_answer(autojump_clock: MockClock) -> None:
    scripts = chat_stream("x", model="engine/name"), chat_answer("x", model="engine/name")
    async with rigged(*scripts) as rig:
        stream = await rig.run(make_request("m1", upstream_model="engine/name"))
        assert {json.loads(event)["model"] for event in stream.client.events[:-1]} == {"m1"}
        answer = await rig.run(make_request("m1", upstream_model="engine/name", stream=False))
        assert json.loads(answer.client.received)["model"] == "m1"


async def test_role_only_events_are_held_until_there_is_content(autojump_clock: MockClock) -> None:
    script = (Head(), chat_chunk({"role": "assistant"}), Wait(5), *chat_stream("hi")[2:])
    async with rigged(script, heartbeat_after=0) as rig:
        running = rig.start()
        await trio.sleep(4)
        assert not running.client.begun
        await trio.sleep(2)
        assert [json.loads(e)["choices"][0]["delta"] for e in running.client.events[:2]] == [
            {"role": "assistant"},
            {"content": "hi"},
        ]


async def test_usage_that_nobody_asked_for_stays_here(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("x", usage=(1, 1)), chat_stream("x", usage=(1, 1))) as rig:
        quiet = await rig.run(make_request())
        assert b"usage" not in quiet.client.received
        asked = await rig.run(make_request(wants_usage=True))
        assert b'"usage"' in asked.client.events[-2]
        assert [record.tokens_generated for record in rig.records] == [1, 1]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param((Chunk(b"data: [DONE]\n\n"), EndChunks()), id="DONE and the end of the message"),
        pytest.param((Chunk(b"data: [DONE]"), EndChunks()), id="no blank line"),
        pytest.param((Chunk(b"data: [DONE]  \n\n"), EndChunks()), id="trailing blanks"),
        pytest.param((EndChunks(),), id="no DONE but a proper end"),
        pytest.param((Chunk(b"data: [DONE]\n\n"), Hold()), id="DONE and no end of the message"),
        pytest.param((Chunk(b"data: [DONE]\n\n"), Wait(0.01), CloseFin()), id="DONE and a cut message"),
    ],
)
async def test_an_answer_is_whole_when_every_choice_has_finished_and_the_engine_says_so(
    end: FakeScript, autojump_clock: MockClock
) -> None:
    async with rigged((*chat_stream("ok", done=False, end=False), *end)) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        assert running.client.events.count(b"[DONE]") == 1
        assert rig.record.outcome == "completed"
        assert rig.workers.fleet.books["w1"].faults == 0


async def test_a_message_that_does_not_end_soon_after_done_is_closed_and_its_lease_drains(
    autojump_clock: MockClock,
) -> None:
    async with rigged(chat_stream("ok", end=False)) as rig:
        running = await rig.run()
        assert running.ended_after == pytest.approx(0.05)
        assert (rig.engine.kept, rig.engine.closed) == (0, 1)
        assert rig.workers.admission.statistics().draining == 1


async def test_the_client_has_its_end_before_the_engines_tail_is_awaited(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("ok", end=False)) as rig:
        running = rig.start()
        await trio.sleep(0.01)
        assert is_whole(running.client)
        assert not running.over.is_set()


async def test_an_answer_until_the_connection_closes_is_read_and_not_reused(
    autojump_clock: MockClock,
) -> None:
    until_close = Head(200, (("content-type", "text/event-stream"),))
    async with rigged((until_close, *chat_stream("ok", end=False)[1:], CloseFin())) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        assert (rig.engine.kept, rig.engine.closed) == (0, 1)
        assert rig.workers.admission.statistics().draining == 0  # its end was seen


async def test_every_expected_choice_has_to_finish(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("a", choices=3)) as rig:
        running = await rig.run(make_request(n=3))
        assert is_whole(running.client)
        assert rig.record.outcome == "completed"


async def test_the_client_is_told_how_long_it_was_queued_and_which_worker_only_if_that_is_wanted(
    autojump_clock: MockClock,
) -> None:
    async with rigged() as rig:
        running = await rig.run()
        assert running.client.head is not None
        assert running.client.head.headers == (("x-gateway-queue-ms", "0"),)
    async with rigged(expose_worker=True) as rig:
        running = await rig.run()
        assert running.client.head is not None
        assert ("x-gateway-worker", "w1") in running.client.head.headers


async def test_the_record_tells_each_time_on_the_wall_clock(autojump_clock: MockClock) -> None:
    script = (
        Wait(1.0),
        Head(),
        chat_chunk({"role": "assistant"}),
        Wait(2.0),
        chat_chunk({"content": "a"}),
        Wait(4.0),
        chat_chunk({"content": "b"}, finish="stop"),
        Chunk(b"data: [DONE]\n\n"),
        EndChunks(),
    )
    async with rigged(script) as rig:
        await trio.sleep(10)
        began = WALL + trio.current_time()
        await rig.run(make_request(client_request_id="mine", key_id="k1", tenant="acme", tier="batch"))
        record = rig.record
        assert (record.client_request_id, record.key_id, record.tenant, record.tier) == (
            "mine",
            "k1",
            "acme",
            "batch",
        )
        assert (record.boot_id, record.model, record.stream) == ("boot", "m1", True)
        times = (
            record.arrived_at,
            record.placed_at,
            record.upstream_opened_at,
            record.headers_at,
            record.first_content_at,
            record.last_content_at,
            record.settled_at,
        )
        assert [round((at or 0) - began, 6) for at in times] == [0, 0, 1, 3, 3, 7, 7]


async def test_attempts_carry_the_exchanges_id_and_their_number(autojump_clock: MockClock) -> None:
    async with rigged() as rig:
        request = make_request()
        await rig.run(request)
        assert [attempt.attempt_id for attempt in rig.engine.attempts] == [f"{request.exchange_id}-01"]


async def test_small_events_that_come_together_leave_together(autojump_clock: MockClock) -> None:
    together = b"".join(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n' for _ in range(50))
    script = (Head(), Chunk(together), *chat_stream()[2:])
    async with rigged(script) as rig:
        running = await rig.run()
        assert running.client.times[0][1] == len(together)
        assert text_of(running.client) == "x" * 50


async def test_events_that_wait_for_a_slow_client_are_joined(autojump_clock: MockClock) -> None:
    script = (Head(), *(chat_chunk({"content": "x" * 100}) for _ in range(20)), *chat_stream()[2:])
    async with rigged(script) as rig:
        client = RecordingClient(room=10)
        running = rig.start(client=client)
        await trio.sleep(1)
        writes = len(client.times)
        client.read(1_000_000)
        await running.over.wait()
        assert is_whole(client)
        assert text_of(client) == "x" * 2000
        assert len(client.times) - writes <= 3
