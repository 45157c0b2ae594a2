"""Clients that read slowly or not at all: what is bounded, who is stalled, and by which rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.exchange.rig import error_of, is_whole, rigged, text_of
from trio_gateway.contract import Ending, Outcome
from trio_gateway.testing import (
    Chunk,
    CloseReset,
    EndChunks,
    Event,
    FakeScript,
    Head,
    Hold,
    RecordingClient,
    Repeat,
    Wait,
    chat_answer,
    chat_chunk,
    chat_stream,
    make_request,
)
from trio_gateway.units import KiB

WORD = chat_chunk({"content": "x" * 900})
STOP = chat_chunk({}, finish="stop")
END: FakeScript = (STOP, Event("[DONE]"), EndChunks())
ENDLESS: FakeScript = (Head(), Repeat((WORD,)))
FULL_SPEED: dict[str, Any] = {"max_lag": 10_000.0, "heartbeat_after": 0.0}


# Bounds ---------------------------------------------------------------------------------------------------


async def test_a_client_that_never_reads_holds_no_more_than_its_buffer_and_the_engine_waits(
    autojump_clock: MockClock,
) -> None:
    async with rigged(ENDLESS, buffer_bytes=200 * KiB) as rig:
        client = RecordingClient(room=0)
        running = rig.start(client=client)
        await trio.sleep(20)
        held = running.exchange.buffered
        assert 100 * KiB < held <= 200 * KiB + 1000
        assert rig.pool.used == held
        await trio.sleep(5)
        assert running.exchange.buffered == held  # the engine is not read
        assert running.exchange.channel.statistics().sender_waiting


async def test_a_small_buffer_is_used_as_well_as_a_large_one(autojump_clock: MockClock) -> None:
    async with rigged((Head(), Repeat((WORD, Wait(0.1)))), buffer_bytes=16 * KiB) as rig:
        running = rig.start(client=RecordingClient(room=0))
        await trio.sleep(20)
        assert 7 * KiB < running.exchange.buffered <= 16 * KiB + 1000
        assert running.exchange.channel.statistics().sender_waiting


async def test_all_clients_together_hold_no_more_than_the_process_has(autojump_clock: MockClock) -> None:
    async with rigged(ENDLESS, buffer_bytes=100 * KiB, total_buffer_bytes=150 * KiB) as rig:
        stuck = [rig.start(client=RecordingClient(room=0)) for _ in range(4)]
        await trio.sleep(20)
        # Each leaves for others as much as it has, and a read more; an event passes when it has none.
        assert 75 * KiB < rig.pool.used <= 150 * KiB + 4 * 1000
        assert all(running.exchange.buffered > 0 for running in stuck)


async def test_a_fast_client_beside_slow_ones_gets_its_answer(autojump_clock: MockClock) -> None:
    async with rigged(ENDLESS, ENDLESS, (Head(), *(WORD,) * 50, *END)) as rig:
        for _ in range(2):
            rig.start(client=RecordingClient(room=0))
        await trio.sleep(1)
        fast = await rig.run()
        assert fast.ended_after < 0.1
        assert is_whole(fast.client)


async def test_nothing_is_dropped_or_reordered_however_slowly_it_is_read(autojump_clock: MockClock) -> None:
    words = [f"[{number}]" for number in range(400)]
    async with rigged(chat_stream(*words), buffer_bytes=2 * KiB, **FULL_SPEED) as rig:
        client = RecordingClient(room=100)
        await rig.trickle(client, 333)
        running = await rig.run(client=client)
        assert text_of(client) == "".join(words)
        assert is_whole(client)
        assert running.ended_after > 100
        assert rig.record.outcome == "completed"


async def test_an_event_over_the_buffer_passes(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("a" * 50_000, "b" * 50_000), buffer_bytes=4 * KiB, **FULL_SPEED) as rig:
        client = RecordingClient(room=100)
        await rig.trickle(client, 5000)
        await rig.run(client=client)
        assert text_of(client) == "a" * 50_000 + "b" * 50_000


async def test_the_slot_goes_back_when_the_engine_is_done_not_when_the_client_is(
    autojump_clock: MockClock,
) -> None:
    async with rigged(chat_stream("x" * 5000)) as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        await trio.sleep(1)
        counts = rig.workers.admission.statistics()
        assert (counts.held, counts.draining, counts.returned) == (0, 0, 1)
        assert not running.over.is_set()
        client.read(10_000)
        await running.over.wait()
        assert is_whole(client)


async def test_a_client_that_catches_up_is_an_ordinary_one_again(autojump_clock: MockClock) -> None:
    script = (Head(), WORD, WORD, Wait(60), WORD, *END)
    async with rigged(script, heartbeat_after=0) as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        await trio.sleep(10)
        client.read(1_000_000)
        await running.over.wait()  # 50 s of silence, in which nothing waited
        assert is_whole(client)


# Stalled --------------------------------------------------------------------------------------------------


async def test_a_client_that_takes_no_byte_for_the_stall_time_is_cut(autojump_clock: MockClock) -> None:
    async with rigged(ENDLESS, stall_timeout=30.0) as rig:
        client = RecordingClient(room=5000)
        running = await rig.run(client=client)
        assert running.ended_after == pytest.approx(30, abs=1)
        assert running.ended_after >= 30
        assert client.was_cut
        assert len(client.received) == 5000
        record = rig.record
        assert (record.outcome, record.phase, record.code) == ("client_stalled", "after_content", None)
        assert rig.workers.fleet.books["w1"].faults == 0


async def test_a_byte_now_and_then_is_no_stall(autojump_clock: MockClock) -> None:
    script = (Head(), WORD, *END)
    async with rigged(script, stall_timeout=30.0, **FULL_SPEED) as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        for _ in range(10):
            await trio.sleep(29)
            client.read(1)
        assert not running.over.is_set()
        client.read(10_000)
        await running.over.wait()
        assert is_whole(client)


async def test_an_acknowledgement_alone_is_a_sign_of_life(autojump_clock: MockClock) -> None:
    script = (Head(), WORD, *END)
    async with rigged(script, stall_timeout=30.0, **FULL_SPEED) as rig:
        client = RecordingClient(room=100)
        client.unacknowledged = 100
        running = rig.start(client=client)
        for _ in range(5):
            await trio.sleep(29)
            client.unacknowledged -= 20
        assert not running.over.is_set()
        await running.over.wait()
        assert running.ended_after == pytest.approx(5 * 29 + 30, abs=2)
        assert rig.record.outcome == "client_stalled"


async def test_silence_of_the_engine_is_no_stall_of_the_client(autojump_clock: MockClock) -> None:
    script = (Head(), WORD, WORD, Wait(100), WORD, *END)
    async with rigged(script, stall_timeout=10.0, heartbeat_after=0) as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        await trio.sleep(1)
        client.read(1_000_000)
        await running.over.wait()
        assert is_whole(client)


@pytest.mark.parametrize(
    ("silence", "least", "most"),
    [(50.0, 59.0, 62.5), (50.7, 60.7, 61.7)],
    ids=["at a look", "between two looks"],
)
async def test_bytes_wait_for_the_whole_stall_time_counted_anew_after_silence(
    silence: float, least: float, most: float, autojump_clock: MockClock
) -> None:
    script = (Head(), WORD, WORD, Wait(silence), WORD, Hold())
    async with rigged(script, stall_timeout=10.0, heartbeat_after=0, between_events=500.0) as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        await trio.sleep(1)
        client.read(client.pending + running.exchange.buffered)
        await running.over.wait()
        assert least <= running.ended_after <= most
        assert rig.record.outcome == "client_stalled"


async def test_a_heartbeat_that_no_socket_takes_is_seen_to_at_once(autojump_clock: MockClock) -> None:
    """It is the first of which something waits; the next heartbeat would be far away."""
    script = (Head(), WORD, Hold())
    async with rigged(script, stall_timeout=10.0, heartbeat_after=60.0, between_events=500.0) as rig:
        client = RecordingClient()
        running = rig.start(client=client)
        await trio.sleep(1)
        client.stop_reading()
        await running.over.wait()
        assert running.ended_after == pytest.approx(70, abs=1)
        assert rig.record.outcome == "client_stalled"


async def test_the_end_of_a_stream_stalls_too(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("x" * 5000), stall_timeout=30.0) as rig:
        running = await rig.run(client=RecordingClient(room=100))
        assert running.ended_after == pytest.approx(30, abs=1)
        assert rig.record.outcome == "client_stalled"


async def test_a_buffered_answer_stalls_too(autojump_clock: MockClock) -> None:
    async with rigged(chat_answer("x" * 100_000), stall_timeout=30.0) as rig:
        client = RecordingClient(room=50_000)
        running = await rig.run(make_request(stream=False), client)
        assert running.ended_after == pytest.approx(30, abs=1)
        assert (rig.record.outcome, len(client.received)) == ("client_stalled", 50_000)


async def test_an_error_at_the_end_of_a_stream_does_not_wait_for_ever(autojump_clock: MockClock) -> None:
    """All that arrived is for the client, as long as it takes some of it."""
    script = (*chat_stream("x" * 5000, finish=None, done=False, end=False), CloseReset())
    async with rigged(script, stall_timeout=30.0, **FULL_SPEED) as rig:
        client = RecordingClient(room=100)
        running = await rig.run(client=client)
        assert 30 <= running.ended_after <= 33.5  # and its farewell
        assert rig.record.outcome == "upstream_failed"  # the first cause
        slow = RecordingClient(room=100)
        await rig.trickle(slow, 100)
        running = await rig.run(client=slow)
        assert running.ended_after > 50
        assert text_of(slow) == "x" * 5000
        assert error_of(slow)["code"] == "engine_failed"


@pytest.mark.parametrize("slow_before", [True, False])
async def test_a_question_to_a_half_closed_client_that_is_stuck_goes_on_when_the_client_reads(
    slow_before: bool, autojump_clock: MockClock
) -> None:
    """The port asks by itself; the socket takes half of the question, and the engine is silent."""
    script = (Head(), WORD, WORD, Wait(100), WORD, *END)
    async with rigged(script, stall_timeout=30.0, heartbeat_after=0) as rig:
        client = RecordingClient()
        if slow_before:
            client.stop_reading()
        running = rig.start(client=client)
        await trio.sleep(1)
        client.read(client.pending + running.exchange.buffered)
        await trio.sleep(1)
        client.stop_reading()
        client.read(5)
        client.half_close()
        await trio.sleep(1)
        assert 0 < client.pending < 20
        client.read(1_000_000)
        await running.over.wait()
        assert is_whole(client)
        assert text_of(client) == "x" * 2700
        assert client.comments > 0


# Lag ------------------------------------------------------------------------------------------------------


async def test_the_oldest_waiting_event_may_wait_so_long_and_no_longer(autojump_clock: MockClock) -> None:
    async with rigged(ENDLESS, max_lag=50.0, buffer_bytes=100 * KiB) as rig:
        client = RecordingClient(room=100)
        await rig.trickle(client, 100)
        running = await rig.run(client=client)
        assert running.ended_after == pytest.approx(50, abs=1)
        assert running.ended_after >= 50
        assert rig.record.outcome == "client_stalled"


async def test_an_event_in_the_writers_hand_waits_too(autojump_clock: MockClock) -> None:
    """Nothing stands behind it in the channel, and the engine says no more."""
    script = (Head(), chat_chunk({"content": "x" * 8000}), Hold())
    async with rigged(script, max_lag=50.0, stall_timeout=30.0, between_events=500.0) as rig:
        client = RecordingClient(room=1000)
        await rig.trickle(client, 10)
        running = rig.start(client=client)
        await trio.sleep(1)
        assert (running.exchange.buffered, client.pending > 5000) == (0, True)
        await running.over.wait()
        assert running.ended_after == pytest.approx(50, abs=1)
        assert rig.record.outcome == "client_stalled"


async def test_the_last_event_in_the_writers_hand_waits_too(autojump_clock: MockClock) -> None:
    events = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":"stop"}]}\n\n' % (
        b"x" * 20_000
    )
    async with rigged((Head(), Chunk(events), EndChunks()), max_lag=50.0, stall_timeout=30.0) as rig:
        client = RecordingClient(room=len(events))
        await rig.trickle(client, 0.1)
        running = rig.start(client=client)
        await trio.sleep(1)
        assert (running.exchange.buffered, client.ended) == (0, True)
        assert 0 < client.pending < 20
        await running.over.wait()
        assert running.ended_after == pytest.approx(50, abs=1)
        assert rig.record.outcome == "client_stalled"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_comes_late_is_not_late_itself(stream: bool, autojump_clock: MockClock) -> None:
    """All of it fits in one write, of which the socket takes a part at first."""
    async with rigged(max_lag=50.0) as rig:
        await trio.sleep(500)
        client = RecordingClient(room=10)
        running = rig.start(make_request(stream=stream), client)
        await trio.sleep(20)
        client.read(10_000)
        await running.over.wait()
        assert rig.record.outcome == "completed"


async def test_a_slow_client_that_keeps_within_the_lag_goes_on(autojump_clock: MockClock) -> None:
    """Each event waits for five seconds; together they wait for longer than one may."""
    script = (Head(), *(WORD, Wait(10)) * 20, *END)
    async with rigged(script, max_lag=50.0, heartbeat_after=0) as rig:
        client = RecordingClient(room=0)
        running = rig.start(client=client)
        for _ in range(20):
            await trio.sleep(5)
            assert client.pending
            client.read(client.pending + running.exchange.buffered)
            await trio.sleep(5)
        client.read(1_000_000)
        await running.over.wait()
        assert is_whole(client)
        assert running.ended_after >= 200


async def test_an_event_waits_from_when_it_came_though_it_finds_no_room(autojump_clock: MockClock) -> None:
    """It is larger than the room, so it stays in the pump's hand until what stands before it is gone."""
    early = (chat_chunk({"content": "x" * 9_900}),) * 4
    script = (Head(), *early, chat_chunk({"content": "y" * 90_000}), Hold())
    async with rigged(script, max_lag=50.0, buffer_bytes=95 * KiB, between_events=500.0) as rig:
        client = RecordingClient(room=0)
        await rig.trickle(client, 1000)
        running = rig.start(client=client)
        await trio.sleep(1)
        assert running.exchange.channel.statistics().sender_waiting
        await running.over.wait()
        assert running.ended_after == pytest.approx(50, abs=1)
        assert len(client.received) > 40_000  # the large one had begun
        assert rig.record.outcome == "client_stalled"


async def test_what_the_socket_took_of_a_write_waits_no_longer(autojump_clock: MockClock) -> None:
    """Many events leave in one write, the first of them long before the last."""
    script = (Head(), chat_chunk({"content": "x" * 7000}), *(Wait(1), chat_chunk({"content": "y"})) * 40)
    limits: dict[str, Any] = {"max_lag": 50.0, "stall_timeout": 100.0, "heartbeat_after": 0.0}
    async with rigged((*script, *END), **limits) as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        await trio.sleep(40.5)
        waiting = running.exchange.buffered
        client.read(client.pending)
        await wait_all_tasks_blocked()
        assert client.pending > waiting * 0.9  # all in one write
        for _ in range(20):  # two events a second
            assert not running.over.is_set()
            client.read(waiting / 20)
            await trio.sleep(1)
        client.read(1_000_000)
        await running.over.wait()
        assert is_whole(client)
        assert running.ended_after > 59


async def test_what_is_left_of_a_write_still_waits_from_when_it_came(autojump_clock: MockClock) -> None:
    """As above, but the client stops in the middle: the oldest that is left decides."""
    script = (Head(), chat_chunk({"content": "x" * 7000}), *(Wait(1), chat_chunk({"content": "y"})) * 40)
    limits: dict[str, Any] = {"max_lag": 50.0, "stall_timeout": 100.0, "heartbeat_after": 0.0}
    async with rigged((*script, Hold()), **limits) as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        await trio.sleep(40.5)
        waiting = running.exchange.buffered
        client.read(client.pending + waiting / 2 + 2)  # twenty events, and two bytes of the next
        await running.over.wait()
        assert running.ended_after == pytest.approx(21 + 50, abs=1)
        assert rig.record.outcome == "client_stalled"


@pytest.mark.parametrize("reads", [True, False])
async def test_a_question_of_the_port_waits_from_when_it_was_asked(
    reads: bool, autojump_clock: MockClock
) -> None:
    """Not from when the last event did that had to wait, long ago."""
    script = (Head(), WORD, WORD, Wait(200), *END)
    limits: dict[str, Any] = {"max_lag": 50.0, "stall_timeout": 100.0, "between_events": 500.0}
    async with rigged(script, **limits, heartbeat_after=0) as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        await trio.sleep(1)
        client.read(client.pending + running.exchange.buffered)
        await trio.sleep(99)
        client.stop_reading()
        client.read(5)
        client.half_close()
        await trio.sleep(40)
        assert 0 < client.pending < 20
        assert not running.over.is_set()
        if reads:
            client.read(1_000_000)
        await running.over.wait()
        assert is_whole(client) is reads
        assert running.ended_after == pytest.approx(200 if reads else 150, abs=1)
        assert rig.record.outcome == ("completed" if reads else "client_stalled")


async def test_a_heartbeat_waits_from_when_it_was_written(autojump_clock: MockClock) -> None:
    script = (Head(), WORD, Wait(500), WORD, *END)
    async with rigged(script, max_lag=50.0, stall_timeout=80.0, between_events=600.0) as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        await trio.sleep(1)
        client.read(client.pending + 3 * len(b": keep-alive\n\n") + 5)  # the fourth heartbeat is stuck
        await running.over.wait()
        assert client.comments == 3
        assert rig.record.outcome == "client_stalled"
        assert running.ended_after == pytest.approx(40 + 50, abs=1)


async def test_what_waits_goes_on_as_soon_as_the_client_reads_though_the_engine_is_silent(
    autojump_clock: MockClock,
) -> None:
    async with rigged((Head(), WORD, Wait(2), WORD, Hold()), heartbeat_after=0) as rig:
        client = RecordingClient()
        running = rig.start(client=client)
        await trio.sleep(1)
        client.stop_reading()
        client.read(100)
        await trio.sleep(5)
        assert client.pending
        client.read(1_000_000)
        await wait_all_tasks_blocked()
        assert text_of(client) == "x" * 1800
        running.exchange.end(Ending(Outcome.OPERATOR_CANCELLED))


# How long an engine waits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.0, 0.25, 5.0])
async def test_a_full_buffer_may_hold_up_an_engine_so_long_and_no_longer(
    limit: float, autojump_clock: MockClock
) -> None:
    async with rigged((Head(), Wait(1), Repeat((WORD,))), buffer_bytes=100 * KiB, stall_timeout=30.0) as rig:
        client = RecordingClient(room=0)
        running = await rig.run(make_request(full_timeout=limit), client)
        assert running.ended_after == pytest.approx(1 + limit, abs=0.01)
        assert client.was_cut
        assert (rig.record.outcome, rig.record.phase) == ("client_stalled", "after_content")
        assert rig.workers.fleet.books["w1"].faults == 0


async def test_what_fits_into_the_buffer_holds_up_nobody(autojump_clock: MockClock) -> None:
    async with rigged((Head(), *(WORD,) * 30, *END), buffer_bytes=100 * KiB, stall_timeout=30.0) as rig:
        client = RecordingClient(room=0)
        running = rig.start(make_request(full_timeout=0.0), client)
        await trio.sleep(20)
        client.read(1_000_000)
        await running.over.wait()
        assert is_whole(client)


async def test_a_reader_who_makes_room_in_time_again_and_again_is_slow_and_no_more(
    autojump_clock: MockClock,
) -> None:
    """What counts is the time between two reads of the engine, not their sum."""
    async with rigged((Head(), *(WORD,) * 600, *END), buffer_bytes=100 * KiB, **FULL_SPEED) as rig:
        client = RecordingClient(room=0)
        await rig.trickle(client, 10_000)
        running = rig.start(make_request(full_timeout=10.0), client)
        await trio.sleep(30)
        assert running.exchange.held_up
        assert rig.live.held_up == 1
        await running.over.wait()
        assert is_whole(client)
        assert running.ended_after > 50


# Lag between generation and delivery ----------------------------------------------------------------------


async def test_what_is_taken_at_once_has_no_lag(autojump_clock: MockClock) -> None:
    async with rigged((Head(), WORD, Wait(3), WORD, *END)) as rig:
        await rig.run()
        lags = rig.books.lags
        assert (lags.count, lags.total) == (4, 0.0)
        assert dict(lags.buckets())["0.01"] == 4


async def test_the_lag_of_a_batch_is_the_time_that_its_oldest_byte_had_to_wait(
    autojump_clock: MockClock,
) -> None:
    async with rigged((Head(), WORD, Wait(2), WORD, WORD, Wait(18), *END)) as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        await trio.sleep(7)
        client.read(1000)  # the rest of the first word, and some of the others
        await trio.sleep(4)
        client.read(100_000)
        await running.over.wait()
        lags = rig.books.lags
        assert lags.total == pytest.approx(7 + 9)
        assert dict(lags.buckets()) == {
            "0.01": lags.count - 2,
            "0.1": lags.count - 2,
            "1.0": lags.count - 2,
            "5.0": lags.count - 2,
            "30.0": lags.count,
            "120.0": lags.count,
            "+Inf": lags.count,
        }


async def test_what_waits_for_one_client_is_told_of_the_worst(autojump_clock: MockClock) -> None:
    async with rigged(ENDLESS, buffer_bytes=100 * KiB) as rig:
        assert rig.live.most_buffered() == (0, 0)
        running = [rig.start(client=RecordingClient(room=room)) for room in (0, 5000)]
        await trio.sleep(1)
        held = [each.exchange.buffered for each in running]
        assert rig.live.most_buffered() == (max(held), max(held))  # of two, one is a half


# Back on the short way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [900, 9 * KiB, 20 * KiB])
async def test_a_client_that_was_slow_once_gets_everything_and_what_comes_later_at_once(
    autojump_clock: MockClock, size: int
) -> None:
    word = chat_chunk({"content": "x" * size})
    script: FakeScript = (Head(), *(word,) * 6, Wait(5), *(word, Wait(1)) * 4, *END)
    async with rigged(script, **FULL_SPEED) as rig:
        client = RecordingClient(room=2 * size)
        running = rig.start(client=client)
        await trio.sleep(2)
        assert running.exchange.buffered > 0
        client.read(math.inf)
        await trio.sleep(3.5)
        for count in range(7, 11):
            assert text_of(client) == "x" * size * count
            assert running.exchange.buffered == 0
            await trio.sleep(1)
        await running.over.wait()
        assert is_whole(client)
        assert text_of(client) == "x" * size * 10
        assert rig.record.events_delivered == 12
        assert rig.record.bytes_delivered == len(client.received)


async def test_a_client_that_was_slow_costs_no_more_beyond_its_buffer_when_it_is_slow_again(
    autojump_clock: MockClock,
) -> None:
    word = chat_chunk({"content": "x" * 12 * KiB})
    async with rigged((Head(), word, word, Wait(5), word, Hold()), **FULL_SPEED) as rig:
        client = RecordingClient(room=1000)
        running = rig.start(client=client)
        await trio.sleep(1)
        client.read(64 * KiB)
        await trio.sleep(1)
        assert (client.pending, running.exchange.buffered) == (0, 0)  # it has caught up
        client.stop_reading()
        await trio.sleep(4)
        assert 0 < client.pending <= 8 * KiB
        assert running.exchange.buffered > 0
        running.scope.cancel()


async def test_a_client_that_is_slow_again_and_again_gets_every_byte_in_order(
    autojump_clock: MockClock,
) -> None:
    words = [chat_chunk({"content": f"<{number}>" + "x" * (number * 700 % 20_000)}) for number in range(60)]
    script: FakeScript = (Head(), *(step for word in words for step in (word, Wait(0.3))), *END)
    async with rigged(script, **FULL_SPEED) as rig:
        client = RecordingClient(room=5000)
        running = rig.start(client=client)
        for _ in range(40):
            await trio.sleep(0.7)
            client.read(30_000)
        client.read(math.inf)
        await running.over.wait()
        assert is_whole(client)
        wanted = "".join(f"<{number}>" + "x" * (number * 700 % 20_000) for number in range(60))
        assert text_of(client) == wanted
