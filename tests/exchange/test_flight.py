"""What is told of one exchange: its steps, and what it waits for right now."""

from __future__ import annotations

from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.exchange.rig import Running, rigged
from trio_gateway.exchange import OPERATOR, Flight, Step
from trio_gateway.exchange._flight import FIRST, LAST, ROWS, Track
from trio_gateway.testing import (
    FakeScript,
    Head,
    Hold,
    RecordingClient,
    Repeat,
    Wait,
    WorkerSet,
    chat_answer,
    chat_chunk,
    chat_stream,
    error_answer,
    make_request,
    make_worker,
)
from trio_gateway.units import KiB

WORD = chat_chunk({"content": "x" * 900})
ENDLESS: FakeScript = (Head(), Repeat((WORD,)))
SLOW: FakeScript = (Head(), Wait(2), WORD, Hold())


@given(st.integers(0, 200))
def test_a_long_story_loses_its_middle_and_tells_how_much(steps: int) -> None:
    flight = Flight(lambda: 7.0)
    for number in range(steps):
        flight.note("step", number=number)
    kept = [step.detail["number"] for step in flight]
    assert len(kept) == len(flight) == min(steps, FIRST + LAST)
    assert flight.lost == steps - len(kept)
    assert kept[:FIRST] == list(range(min(steps, FIRST)))
    assert kept[FIRST:] == list(range(max(steps - LAST, FIRST), steps)) if steps > FIRST else not kept[FIRST:]
    assert all((step.at, step.what) == (7.0, "step") for step in flight)


ROW = st.tuples(st.floats(0, 1e9), st.integers(1, 2**40), st.integers(0, 2**40))


@given(st.lists(st.lists(ROW, max_size=2 * ROWS), max_size=6), st.booleans())
def test_a_track_keeps_its_last_rows_whenever_they_are_packed(
    batches: list[list[tuple[float, int, int]]], packed_at_once: bool
) -> None:
    track = Track()
    add = (lambda row: track.add(*row)) if packed_at_once else track.adder()
    for batch in batches:
        for row in batch:
            add(row)
        track.pack()
    added = [row for batch in batches for row in batch]
    assert track.rows == added[len(added) - min(len(added), ROWS) :]


def told(running: Running) -> list[str]:
    return [step.what for step in running.exchange.flight]


def step(running: Running, what: str) -> Step:
    (found,) = (step for step in running.exchange.flight if step.what == what)
    return found


async def test_a_stream_tells_its_steps_from_arrival_to_settlement(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("a", "b")) as rig:
        running = await rig.run()
    assert told(running) == [
        "arrived",
        "accepted",
        "placed",
        "opened",
        "first_content",
        "last_content",
        "ended",
        "settled",
    ]
    assert step(running, "placed").detail == {"worker": "w1", "attempt": 1}
    assert step(running, "ended").detail == {"outcome": "completed", "code": None}
    assert step(running, "settled").detail["generated"] == 2


async def test_no_word_of_a_request_or_an_answer_is_in_its_steps(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("secret word")) as rig:
        running = await rig.run()
    assert "secret" not in str(list(running.exchange.flight))


async def test_a_failed_attempt_and_the_way_back_are_told(autojump_clock: MockClock) -> None:
    async with rigged(error_answer(500), chat_answer("a")) as rig:
        running = await rig.run(make_request(stream=False))
    assert told(running)[3:7] == ["opened", "attempt_failed", "sent_back", "placed"]
    detail = step(running, "attempt_failed").detail
    assert detail == {"worker": "w1", "reason": "error", "status": 502, "code": "engine_failed"}


async def test_a_pause_for_a_slow_client_is_told_while_it_lasts_and_when_it_is_over(
    autojump_clock: MockClock,
) -> None:
    async with rigged(ENDLESS, buffer_bytes=100 * KiB) as rig:
        client = RecordingClient(room=0)
        running = rig.start(client=client)
        await trio.sleep(3)
        assert told(running)[-1] == "full"
        assert running.exchange.held_up
        assert running.exchange.doing() == "waits for the client, and reads no further"
        now = trio.current_time()
        assert 2.5 < running.exchange.lag(now) <= 3
        assert 2 <= running.exchange.stalled_for(now) <= 3
        client.read(3000 * KiB)
        await trio.sleep(0.5)
        assert told(running)[-2:] == ["full", "room"]
        running.exchange.end(OPERATOR)
        await running.over.wait()


async def test_what_it_waits_for_is_told_in_each_phase(autojump_clock: MockClock) -> None:
    async with rigged(SLOW, workers=WorkerSet(make_worker(slots=1))) as rig:
        running = rig.start()
        assert running.exchange.doing() == "is about to be admitted"
        assert (running.exchange.why, running.exchange.task) == (None, None)
        await wait_all_tasks_blocked()
        behind = rig.start()
        await wait_all_tasks_blocked()
        assert running.exchange.doing() == "waits for the first token"
        assert running.exchange.task is not None
        assert (behind.exchange.doing(), behind.exchange.why) == ("waits for a worker", "no_slot")
        await trio.sleep(2.5)
        assert running.exchange.doing() == "reads the engine's answer"
        assert running.exchange.tokens() == {
            "prompt": None,
            "generated": 1,
            "delivered": 1,
            "acknowledged": None,
        }
        assert running.exchange.lag(trio.current_time()) == 0
        assert running.exchange.stalled_for(trio.current_time()) == 0
        for each in (behind, running):
            each.exchange.end(OPERATOR)
            await each.over.wait()
        assert running.exchange.task is None


async def test_what_an_operator_ends_is_told_so_and_not_to_be_repeated(autojump_clock: MockClock) -> None:
    async with rigged((Hold(),)) as rig:
        running = rig.start()
        await trio.sleep(1)
        running.exchange.end(OPERATOR)
        await running.over.wait()
    answer: Any = running.client.problem
    assert (answer.status, answer.code, answer.final) == (503, "operator_cancelled", True)
    assert rig.record.outcome == "operator_cancelled"
    flight = rig.live.flight(running.exchange.request.exchange_id)
    assert flight is running.exchange.flight


async def test_what_is_under_way_can_be_found_and_what_nobody_knows_can_not(
    autojump_clock: MockClock,
) -> None:
    async with rigged(SLOW) as rig:
        running = rig.start()
        await wait_all_tasks_blocked()
        name = running.exchange.request.exchange_id
        assert rig.live.find(name) is running.exchange
        assert rig.live.flight(name) is running.exchange.flight
        assert rig.live.find("nobody") is None
        assert rig.live.flight("nobody") is None
        running.exchange.end(OPERATOR)
        await running.over.wait()
