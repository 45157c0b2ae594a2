"""Deltas that are joined for slow clients: what such a client reads, what others get, and what counts."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.exchange.rig import Rig, is_whole, rigged, text_of
from tests.wire.deltas import read, streams
from tests.wire.grammar import cut
from trio_gateway.contract import Ending, Outcome
from trio_gateway.testing import (
    Chunk,
    FakeEngine,
    FakeScript,
    Head,
    Hold,
    RecordingClient,
    Wait,
    chat_chunk,
    chat_stream,
    make_request,
)
from trio_gateway.units import KiB

WORDS = [f"[{number}]" for number in range(2000)]
MERGING: dict[str, Any] = {
    "merge_deltas": True,
    "buffer_bytes": 64 * KiB,
    "max_lag": 10_000.0,
    "heartbeat_after": 0.0,
    "between_events": 10_000.0,
}
ENDED = Ending(Outcome.OPERATOR_CANCELLED)


async def test_a_slow_client_gets_the_same_text_in_far_fewer_bytes(autojump_clock: MockClock) -> None:
    took: dict[bool, int] = {}
    for merge in (False, True):
        async with rigged(chat_stream(*WORDS, usage=(5, 2000)), **{**MERGING, "merge_deltas": merge}) as rig:
            client = RecordingClient(room=1000)
            await rig.trickle(client, 1000)
            running = await rig.run(client=client)
            assert text_of(client) == "".join(WORDS)
            assert is_whole(client)
            took[merge] = len(client.received)
            record = rig.record
            assert (record.tokens_generated, record.tokens_delivered) == (2000, 2000)
            assert record.events_delivered == 2000 + 3  # a role, a finish and the end, which are events too
            assert running.ended_after == pytest.approx(took[merge] / 1000, abs=15)
    assert took[True] * 8 < took[False]


async def test_an_answer_that_fits_when_it_is_joined_does_not_hold_up_its_engine(
    autojump_clock: MockClock,
) -> None:
    for merge, waits in ((True, False), (False, True)):
        script = (*chat_stream(*WORDS, finish=None, done=False, end=False), Hold())
        async with rigged(script, **{**MERGING, "merge_deltas": merge}) as rig:
            client = RecordingClient(room=0)
            running = rig.start(client=client)
            await trio.sleep(5)
            assert running.exchange.channel.statistics().sender_waiting is waits
            assert running.exchange.buffered <= 64 * KiB + 1000
            assert rig.pool.used == running.exchange.buffered
            client.leave()


async def test_a_client_that_keeps_up_gets_every_event_as_the_engine_sent_it(
    autojump_clock: MockClock,
) -> None:
    script = chat_stream("a", "b", "c")
    async with rigged(script, script, **MERGING) as rig:
        plain = (await rig.run()).client
        slow = RecordingClient(room=10)  # a writer comes to life, and then has all the time it needs
        running = rig.start(client=slow)
        await trio.sleep(1)
        slow.read(1_000_000)
        await running.over.wait()
        assert len(plain.events) == 6
        assert text_of(slow) == text_of(plain) == "abc"


async def test_each_event_of_a_stream_with_a_receipt_stays_itself(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream(*WORDS[:100]), **MERGING) as rig:
        client = RecordingClient(room=100)
        await rig.trickle(client, 1000)
        await rig.run(make_request(receipt=True), client)
        assert sum(b'"content":"[' in event for event in client.events) == 100


async def test_the_error_at_the_end_follows_whole_events_and_is_no_token(autojump_clock: MockClock) -> None:
    script = (*chat_stream(*WORDS, finish=None, done=False, end=False), Hold())
    async with rigged(script, **MERGING) as rig:
        client = RecordingClient(room=20_000)
        running = rig.start(client=client)
        await trio.sleep(1)
        running.exchange.end(ENDED)
        client.read(1_000_000)
        await running.over.wait()
        assert rig.record.tokens_delivered == text_of(client).count("[")


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    room=st.integers(0, 8000),
    unacknowledged=st.integers(0, 2000),
)
def test_what_is_delivered_is_counted_in_the_engines_events(
    sizes: list[int], room: int, unacknowledged: int
) -> None:
    words = (chat_chunk({"content": "~" + "x" * size}) for size in sizes)
    script: FakeScript = (Head(), chat_chunk({"role": "assistant", "content": ""}), *words, Hold())

    async def story() -> None:
        async with trio.open_nursery() as nursery:
            rig = Rig(FakeEngine(script), nursery, **MERGING)
            nursery.start_soon(rig.workers.run)
            client = RecordingClient(room)
            running = rig.start(client=client)
            await trio.sleep(1)
            client.unacknowledged = min(unacknowledged, len(client.received))
            client.leave()
            await running.over.wait()
            there = bytes(client.received[: len(client.received) - client.unacknowledged])
            whole = there[: there.rfind(b"\n\n") + 2]
            assert rig.record.tokens_generated == len(sizes)
            assert (rig.record.tokens_delivered or 0) == whole.count(b"~")
            nursery.cancel_scope.cancel()

    trio.run(story, clock=MockClock(autojump_threshold=0))


@settings(max_examples=60)
@given(
    events=streams(halves=False),
    data=st.data(),
    room=st.integers(0, 2000),
    pace=st.sampled_from([50, 500, 5000]),
)
def test_content_arguments_and_logprobs_equal_the_engines_for_any_split_merge_delay_and_coalescing(
    events: list[bytes], data: st.DataObject, room: int, pace: int
) -> None:
    stream = b"".join(events)
    pieces = cut(stream, data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    delays = st.sampled_from([0.0, 0.0, 1.0, 30.0])
    script: FakeScript = (
        Head(),
        *(step for piece in pieces if piece for step in (Chunk(piece), Wait(data.draw(delays)))),
        *chat_stream()[-3:],
    )

    async def story() -> None:
        async with trio.open_nursery() as nursery:
            rig = Rig(FakeEngine(script), nursery, **{**MERGING, "buffer_bytes": 2 * KiB})
            nursery.start_soon(rig.workers.run)
            client = RecordingClient(room)
            await rig.trickle(client, pace)
            request = make_request(wants_usage=True, wants_running_usage=True, seconds=100_000)
            await rig.run(request, client)
            assert rig.record.outcome == "completed"
            *delivered, finish, done = [b"data: " + event + b"\n\n" for event in client.events]
            assert (b'"stop"' in finish, done) == (True, b"data: [DONE]\n\n")
            assert read(delivered) == read(events)
            nursery.cancel_scope.cancel()

    trio.run(story, clock=MockClock(autojump_threshold=0))
