"""What counts as delivered: whole events that the client's kernel has, and never more than was made."""

from __future__ import annotations

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.exchange.rig import Rig, error_of, rigged
from trio_gateway.contract import Ending, Outcome
from trio_gateway.errors import Problem
from trio_gateway.testing import (
    CloseReset,
    Event,
    FakeEngine,
    FakeScript,
    Head,
    Hold,
    RecordingClient,
    Wait,
    chat_answer,
    chat_chunk,
    chat_stream,
    make_request,
)

ENDED = Ending(Outcome.OPERATOR_CANCELLED)
TOLD = Ending(Outcome.OPERATOR_CANCELLED, Problem.of("operator_cancelled", "an operator ended it"))
ROLE = chat_chunk({"role": "assistant", "content": ""})


def unfinished(*texts: str) -> FakeScript:
    return (*chat_stream(*texts, finish=None, done=False, end=False), Hold())


async def test_a_whole_answer_is_delivered_as_the_engine_counted_it(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("a", "b", usage=(5, 17))) as rig:
        await rig.run()
        record = rig.record
        assert (record.tokens_generated, record.tokens_delivered) == (17, 17)
        assert record.usage_source == "engine"


async def test_who_has_the_whole_answer_can_not_be_cut_off_from_it_any_more(
    autojump_clock: MockClock,
) -> None:
    async with rigged((*chat_stream("a", "b", usage=(5, 17), end=False), Hold())) as rig:
        running = rig.start()
        await trio.sleep(0.01)  # the end of the engine's message is still awaited
        assert running.client.finished
        assert rig.records == []
        running.exchange.end(TOLD)
        await running.over.wait()
        record = rig.record
        assert (record.outcome, record.code, record.tokens_delivered) == ("completed", None, 17)


async def test_without_usage_events_with_content_are_counted(autojump_clock: MockClock) -> None:
    async with rigged(unfinished("a", "b", "c")) as rig:
        running = rig.start()
        await trio.sleep(1)
        running.client.leave()
        await running.over.wait()
        record = rig.record
        assert (record.tokens_generated, record.usage_source) == (3, "estimated")
        assert record.tokens_delivered == 3
        assert record.prompt_source == "estimated"


async def test_with_no_output_there_are_no_tokens(autojump_clock: MockClock) -> None:
    async with rigged((Hold(),)) as rig:
        await rig.run(make_request(seconds=5))
        record = rig.record
        assert (record.tokens_generated, record.tokens_delivered, record.usage_source) == (0, 0, "estimated")
        assert (record.first_content_at, record.last_content_at) == (None, None)


async def test_what_a_slow_client_did_not_take_is_not_delivered(autojump_clock: MockClock) -> None:
    texts = ["x" * 1000] * 10
    async with rigged(unfinished(*texts)) as rig:
        client = RecordingClient(room=3600)
        running = rig.start(client=client)
        await trio.sleep(1)
        client.leave()
        await running.over.wait()
        record = rig.record
        assert record.tokens_generated == 10
        whole = sum(b"xx" in event for event in client.events)
        assert whole == 2
        assert record.tokens_delivered == whole
        assert record.bytes_delivered == 3600


async def test_what_its_kernel_did_not_acknowledge_is_not_delivered(autojump_clock: MockClock) -> None:
    async with rigged(unfinished("x" * 1000, "x" * 1000, "x" * 1000)) as rig:
        client = RecordingClient()
        running = rig.start(client=client)
        await trio.sleep(1)
        client.unacknowledged = 1200
        running.exchange.end(ENDED)
        await running.over.wait()
        record = rig.record
        assert len(client.events) == 4  # the role and three words
        assert (record.events_delivered, record.tokens_delivered) == (2, 1)
        assert record.bytes_delivered == len(client.received) - 1200


async def test_with_usage_a_cut_answer_is_delivered_in_proportion(autojump_clock: MockClock) -> None:
    counted = [
        Event(
            {
                "choices": [{"index": 0, "delta": {"content": "x" * 1000}}],
                "usage": {"completion_tokens": 2 * number},
            }
        )
        for number in range(1, 11)
    ]
    async with rigged((Head(), *counted, Hold())) as rig:
        client = RecordingClient(room=5500)
        running = rig.start(make_request(wants_usage=True, wants_running_usage=True), client)
        await trio.sleep(1)
        client.leave()
        await running.over.wait()
        record = rig.record
        assert (record.tokens_generated, record.usage_source) == (20, "engine")
        assert len(client.events) == 5
        assert record.tokens_delivered == 10


async def test_the_error_at_the_end_is_no_token(autojump_clock: MockClock) -> None:
    """Words that waited are dropped, the error is sent in their place."""
    async with rigged(unfinished(*["x" * 9000] * 5), error_style="finish_reason") as rig:
        client = RecordingClient(room=100)
        running = rig.start(client=client)
        await trio.sleep(1)
        running.exchange.end(TOLD)
        client.read(1_000_000)
        await running.over.wait()
        words = sum(b"xx" in event for event in client.events)
        assert 0 < words < 5
        assert error_of(client)["code"] == "operator_cancelled"
        assert (rig.record.tokens_generated, rig.record.tokens_delivered) == (5, words)


async def test_an_error_tells_how_many_tokens_came_before_it(autojump_clock: MockClock) -> None:
    script = (*chat_stream("a", "b", "c", finish=None, done=False, end=False), Wait(1), CloseReset())
    async with rigged(script) as rig:
        running = await rig.run()
        assert error_of(running.client)["gateway"]["tokens_delivered"] == 3


async def test_a_buffered_answer_that_is_not_taken_whole_is_delivered_in_bytes_only(
    autojump_clock: MockClock,
) -> None:
    async with rigged(chat_answer("x" * 50_000, usage=(3, 90))) as rig:
        client = RecordingClient(room=10_000)
        running = rig.start(make_request(stream=False), client)
        await trio.sleep(1)
        client.leave()
        await running.over.wait()
        record = rig.record
        assert (record.bytes_delivered, record.events_delivered) == (10_000, 0)
        assert (record.tokens_generated, record.tokens_delivered) == (90, 0)


# At any moment --------------------------------------------------------------------------------------------


@given(
    roles=st.integers(0, 2),
    sizes=st.lists(st.integers(2, 3000), min_size=1, max_size=12),
    room=st.integers(0, 20_000),
    unacknowledged=st.integers(0, 5000),
    cause=st.sampled_from(["leaves", "ended", "told"]),
    finished=st.booleans(),
)
def test_never_more_is_delivered_than_the_client_has(
    roles: int, sizes: list[int], room: int, unacknowledged: int, cause: str, finished: bool
) -> None:
    """And so ``generated >= queued + delivered``, since what waits has not arrived."""
    end = [chat_chunk({}, finish="stop")] if finished else []
    script: FakeScript = (
        Head(),
        *[ROLE] * roles,
        *(chat_chunk({"content": "x" * size}) for size in sizes),
        *end,
        Hold(),
    )

    async def story() -> None:
        async with trio.open_nursery() as nursery:
            rig = Rig(FakeEngine(script), nursery)
            nursery.start_soon(rig.workers.run)
            client = RecordingClient(room)
            running = rig.start(client=client)
            await trio.sleep(3)
            client.unacknowledged = min(unacknowledged, len(client.received))
            if cause == "leaves":
                client.leave()
            else:
                running.exchange.end(TOLD if cause == "told" else ENDED)
            await running.over.wait()
            there = bytes(client.received[: len(client.received) - client.unacknowledged])
            has = sum(b"xx" in event for event in there.split(b"\n\n")[:-1])
            generated, delivered = rig.record.tokens_generated or 0, rig.record.tokens_delivered or 0
            assert delivered <= min(has, generated)
            assert delivered >= has - finished - (cause == "told")  # a bound that is close
            nursery.cancel_scope.cancel()

    trio.run(story, clock=MockClock(autojump_threshold=0))
