"""Comments against silence: when they come, in every phase, and that they are nothing else than that."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.exchange.rig import error_of, is_whole, rigged, text_of
from trio_gateway.testing import (
    Chunk,
    FakeScript,
    Head,
    RecordingClient,
    Wait,
    WorkerSet,
    chat_answer,
    chat_chunk,
    chat_stream,
    error_answer,
    make_request,
    make_worker,
)

HEARTBEAT = b": keep-alive\n\n"
WORD = chat_chunk({"content": "x"})
END: FakeScript = chat_stream()[2:]


def moments(client: RecordingClient) -> list[float]:
    return [at for at, _ in client.times]


async def test_headers_and_a_comment_go_out_after_silence_and_again_after_each_further_one(
    autojump_clock: MockClock,
) -> None:
    async with rigged((Wait(35), *chat_stream("x"))) as rig:
        running = rig.start()
        await trio.sleep(9)
        assert not running.client.begun
        await trio.sleep(2)
        assert running.client.head is not None
        assert running.client.received == HEARTBEAT
        await running.over.wait()
        assert moments(running.client)[:4] == [10, 20, 30, 35]
        assert running.client.received.startswith(HEARTBEAT * 3 + b"data:")
        assert is_whole(running.client)
        assert rig.record.events_delivered == len(running.client.events)  # comments are none


async def test_silence_is_counted_from_the_last_event(autojump_clock: MockClock) -> None:
    script = (Head(), WORD, Wait(8), WORD, Wait(13), WORD, *END)
    async with rigged(script) as rig:
        running = await rig.run()
        assert moments(running.client)[:4] == [0, 8, 18, 21]
        assert running.client.comments == 1
        assert text_of(running.client) == "xxx"


async def test_an_engines_own_comments_do_not_count_and_do_not_pass(autojump_clock: MockClock) -> None:
    script = (Head(), *(Chunk(b": engine\n\n"), Wait(4)) * 6, WORD, *END)
    async with rigged(script) as rig:
        running = await rig.run()
        assert moments(running.client)[:3] == [10, 20, 24]
        assert b"engine" not in running.client.received
        assert rig.record.events_dropped == 6


async def test_zero_is_never(autojump_clock: MockClock) -> None:
    async with rigged((Wait(250), *chat_stream("x")), heartbeat_after=0) as rig:
        running = await rig.run()
        assert running.client.comments == 0


async def test_a_buffered_answer_has_no_heartbeats(autojump_clock: MockClock) -> None:
    async with rigged((Wait(250), *chat_answer())) as rig:
        running = await rig.run(make_request(stream=False))
        assert running.client.head is not None
        assert running.client.head.length == len(running.client.received)


async def test_back_in_the_queue_heartbeats_go_on(autojump_clock: MockClock) -> None:
    full = error_answer(503, headers=(("retry-after", "25"),))
    async with rigged(full, chat_stream("x"), workers=WorkerSet(make_worker("w1"))) as rig:
        running = await rig.run()
        assert moments(running.client)[:3] == [10, 20, 25]
        assert is_whole(running.client)


async def test_while_queued_for_the_first_time_they_come_only_if_that_is_wanted(
    autojump_clock: MockClock,
) -> None:
    one_slot = WorkerSet(make_worker("w1", slots=1))
    async with rigged((Wait(25), *chat_stream("x")), workers=one_slot, heartbeat_while_queued=True) as rig:
        rig.start()
        await wait_all_tasks_blocked()
        waiting = rig.start(make_request(seconds=22))
        await waiting.over.wait()
        assert moments(waiting.client) == [10, 20, 22]
        assert error_of(waiting.client)["code"] == "deadline_exceeded"
        assert error_of(waiting.client)["gateway"]["phase"] == "before_content"


async def test_after_a_client_was_slow_heartbeats_still_come(autojump_clock: MockClock) -> None:
    script = (Head(), WORD, WORD, Wait(35), WORD, *END)
    async with rigged(script) as rig:
        client = RecordingClient(room=30)
        running = rig.start(client=client)
        await trio.sleep(1)
        assert client.pending
        client.read(1_000_000)  # from now on it keeps up
        await running.over.wait()
        assert [at for at in moments(client) if at > 1][:4] == [10, 20, 30, 35]
        assert client.comments == 3
        assert is_whole(client)
        assert rig.record.events_delivered == len(client.events)


async def test_while_bytes_wait_for_a_slow_client_none_are_added(autojump_clock: MockClock) -> None:
    script = (Head(), WORD, WORD, Wait(25), WORD, *END)
    async with rigged(script) as rig:
        client = RecordingClient(room=30)
        running = rig.start(client=client)
        await trio.sleep(24)
        client.read(1_000_000)
        await running.over.wait()
        assert client.comments == 0
        assert text_of(client) == "xxx"


async def test_after_the_last_event_none_come(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("x" * 100)) as rig:
        client = RecordingClient(room=30)
        running = rig.start(client=client)
        await trio.sleep(25)
        client.read(1_000_000)
        await running.over.wait()
        assert client.comments == 0
        assert is_whole(client)


async def test_a_comment_that_can_not_be_written_at_once_is_not_lost_nor_torn(
    autojump_clock: MockClock,
) -> None:
    script = (Head(), WORD, Wait(15), WORD, *END)
    async with rigged(script) as rig:
        first = len(
            b'data: {"id":"","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
        )
        client = RecordingClient(room=0)
        running = rig.start(client=client)
        await trio.sleep(1)
        assert client.pending > first
        client.read(client.pending + 5)  # all of the event, and some bytes of what comes next
        await trio.sleep(20)
        client.read(1_000_000)
        await running.over.wait()
        assert client.comments == 1
        assert text_of(client) == "xx"
        assert is_whole(client)


async def test_a_comment_to_a_client_that_is_gone_ends_the_exchange(autojump_clock: MockClock) -> None:
    async with rigged((Wait(100), *chat_stream("x"))) as rig:
        client = RecordingClient()
        running = rig.start(client=client)
        await trio.sleep(5)
        client.gone = True  # without a hint; only a write finds out
        await running.over.wait()
        assert running.ended_after == 10
        assert rig.record.outcome == "client_gone"
