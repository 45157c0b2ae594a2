"""Readers that are slow or stuck: what they cost, whom they disturb, and when they are cut off."""

from __future__ import annotations

import pytest
import trio

from tests.e2e.serving import Serving, serving
from trio_gateway.exchange import Exchange
from trio_gateway.testing import (
    Answer,
    Chunk,
    Event,
    Json,
    RawClient,
    Repeat,
    Script,
    chat_request,
    chat_stream,
    open_engine,
    until,
)

KIB = 1024
SMALL_WINDOW = 4 * KIB  # of a client's kernel, so that it fills soon
HEAD, ROLE, ONE, FINISH, LAST, END = chat_stream("one")
BIG = Event({"choices": [{"index": 0, "delta": {"content": "x" * 4000}, "finish_reason": None}]})
EVENT_BYTES = 4200  # at most, with framing
ENDLESS: Script = (HEAD, ROLE, Repeat((BIG,)))


def long_answer(events: int) -> Script:
    return (HEAD, ROLE, Repeat((BIG,), times=events), FINISH, LAST, END)


async def start_stalled(gateway: Serving, *, stream: bool = True) -> RawClient:
    """Ask, and never read."""
    client = await gateway.connect(receive_buffer=SMALL_WINDOW)
    await client.send(chat_request(stream=stream))
    return client


# Bounded memory ---------------------------------------------------------------------------------------------


async def test_a_reader_that_never_reads_stops_its_engine_within_bounds() -> None:
    async with (
        open_engine(ENDLESS, send_buffer=16 * KIB) as engine,
        serving(engine, delivery={"buffer_bytes": 64 * KIB, "stall_timeout": 0.5}) as gateway,
    ):
        most = Most(gateway)
        with most, await start_stalled(gateway) as client:
            request = await engine.request()
            with trio.fail_after(10):
                await request.stalled.wait()
                await client.stall()
            record = await gateway.settled()
        assert (record.outcome, record.phase, record.code) == ("client_stalled", "after_content", None)
        assert 16 * KIB < most.buffered <= 64 * KIB + EVENT_BYTES
        # Ours, and what the kernel holds on the four sides of two connections.
        assert request.bytes_sent < 64 * KIB + 400 * KIB
        assert gateway.gateway.fleet.books["w1"].faults == 0
        with trio.fail_after(5):
            await request.closed.wait()


class Most(trio.abc.Instrument):
    """The most bytes that were ever buffered inside the block."""

    def __init__(self, gateway: Serving) -> None:
        self._gateway = gateway
        self.buffered = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.buffered = max(self.buffered, self._gateway.gateway.buffers.used)

    def __enter__(self) -> Most:
        trio.lowlevel.add_instrument(self)
        return self

    def __exit__(self, *exc: object) -> None:
        trio.lowlevel.remove_instrument(self)


async def test_all_readers_together_are_bounded_too() -> None:
    total = 100 * KIB
    async with (
        open_engine(ENDLESS, send_buffer=16 * KIB) as engine,
        serving(
            engine,
            delivery={"buffer_bytes": 64 * KIB, "total_buffer_bytes": total, "stall_timeout": 0.5},
            limits={"answer_bytes": total},
        ) as gateway,
    ):
        most = Most(gateway)
        with most:
            clients = [await start_stalled(gateway) for _ in range(4)]
            with trio.fail_after(10):
                for number, client in enumerate(clients, 1):
                    await (await engine.request(number)).stalled.wait()
                    await client.stall()
            await gateway.settled(4)
            for client in clients:
                client.leave_reset()
        assert [record.outcome for record in gateway.records] == ["client_stalled"] * 4
        # Each holds no more than is left, and reads nothing for which there is no room; each may be one
        # event over, for one that finds nothing waiting is let through.
        assert 48 * KIB < most.buffered <= total + 4 * EVENT_BYTES


async def test_a_buffered_answer_that_nobody_reads_is_bounded_and_cut() -> None:
    body = {"choices": [{"index": 0, "message": {"content": "x" * 2_000_000}, "finish_reason": "stop"}]}
    async with (
        open_engine((Json(body),)) as engine,
        serving(engine, delivery={"stall_timeout": 0.3}) as gateway,
    ):
        with trio.fail_after(10), await start_stalled(gateway, stream=False) as client:
            await client.stall()
            record = await gateway.settled()
            assert (record.outcome, record.status) == ("client_stalled", 200)
            assert await client.read_closed() == "reset"
            assert client.answers[0].was_cut
        await gateway.returned()


async def test_reading_a_buffered_answer_pauses_while_there_is_no_room() -> None:
    size = 200 * KIB
    content = "x" * size
    body = {"choices": [{"index": 0, "message": {"content": content}, "finish_reason": "stop"}]}
    async with (
        open_engine((Json(body),), send_buffer=16 * KIB) as engine,
        serving(
            engine,
            delivery={"buffer_bytes": 64 * KIB, "total_buffer_bytes": 300 * KIB, "stall_timeout": 5},
            limits={"answer_bytes": 300 * KIB},
            worker={"slots": 8},
        ) as gateway,
    ):
        most = Most(gateway)
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await gateway.ask(chat_request(stream=False)))

        with most:
            async with trio.open_nursery() as asking:
                for _ in range(6):
                    asking.start_soon(ask)
        assert [answer.status for answer in answers] == [200] * 6
        # One of them may go over the bound until it is whole; the others wait for room.
        assert 250 * KIB < most.buffered <= 500 * KIB


# Whom they disturb ------------------------------------------------------------------------------------------


async def test_a_slow_reader_gets_its_whole_answer_and_the_fast_ones_do_not_wait(
    nursery: trio.Nursery,
) -> None:
    events = 50
    async with (
        open_engine(long_answer(events), send_buffer=16 * KIB) as engine,
        serving(
            engine,
            worker={"slots": 8},
            delivery={"buffer_bytes": 32 * KIB, "stall_timeout": 1, "max_lag": 60},
        ) as gateway,
    ):
        slow: list[Answer] = []

        async def read_slowly() -> None:
            with await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
                await client.send(chat_request())
                slow.append(await client.trickle(200_000))

        nursery.start_soon(read_slowly)
        request = await engine.request()
        with trio.fail_after(10):
            await request.stalled.wait()
        for _ in range(5):
            fast = await gateway.ask(chat_request())
            assert (len(fast.chat().text), fast.chat().done) == (4000 * events, 1)
        assert not slow
        await gateway.settled(6)
        await gateway.until(lambda: len(slow) == 1)
        assert (len(slow[0].chat().text), slow[0].chat().done, slow[0].ended) == (
            4000 * events,
            1,
            "complete",
        )
        assert [record.outcome for record in gateway.records] == ["completed"] * 6


# When they are cut off --------------------------------------------------------------------------------------


async def test_a_reader_that_takes_a_little_all_the_time_is_not_stalled() -> None:
    events = 60
    async with (
        open_engine(long_answer(events), send_buffer=16 * KIB) as engine,
        serving(engine, delivery={"buffer_bytes": 32 * KIB, "stall_timeout": 0.4, "max_lag": 60}) as gateway,
    ):
        with trio.fail_after(20), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request())
            answer = await client.trickle(400_000)
        assert (answer.ended, len(answer.chat().text)) == ("complete", 4000 * events)
        assert (await gateway.settled()).outcome == "completed"


async def test_a_reader_whose_oldest_event_waits_too_long_is_cut_off_however_steadily_it_reads() -> None:
    async with (
        open_engine(ENDLESS, send_buffer=16 * KIB) as engine,
        serving(engine, delivery={"buffer_bytes": 256 * KIB, "stall_timeout": 20, "max_lag": 0.4}) as gateway,
    ):
        with trio.fail_after(20), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request())
            answer = await client.trickle(100_000)
        assert answer.was_cut
        assert answer.chat().done == 0
        assert (await gateway.settled()).outcome == "client_stalled"


async def test_a_model_can_say_how_long_its_engine_waits_for_a_reader() -> None:
    async with (
        open_engine(ENDLESS, send_buffer=16 * KIB) as engine,
        serving(
            engine, delivery={"buffer_bytes": 64 * KIB}, models=[{"id": "m1", "full_timeout": 0.2}]
        ) as gateway,
    ):
        with trio.fail_after(10), await start_stalled(gateway) as client:
            await client.stall()
        assert (await gateway.settled()).outcome == "client_stalled"


async def test_an_answer_whose_deltas_are_joined_frees_its_worker_before_its_reader_reads() -> None:
    words = [f"[{number}]" for number in range(5000)]
    async with (
        open_engine(chat_stream(*words)) as engine,
        serving(engine, delivery={"buffer_bytes": 128 * KIB, "merge_deltas": True}) as gateway,
    ):
        with trio.fail_after(20), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request())
            await engine.request()
            await gateway.until(lambda: gateway.held == 0)
            assert 0 < gateway.gateway.buffers.used < 64 * KIB
            answer = await client.read_to_end()
        assert answer.chat().text == "".join(words)
        assert len(answer.body) < 500_000  # all events have 880,000
        record = await gateway.settled()
        assert (record.outcome, record.tokens_delivered) == ("completed", 5000)


async def test_a_reader_for_whom_nothing_waits_is_never_stalled() -> None:
    go = trio.Event()
    script = (HEAD, ROLE, ONE, Repeat((Chunk(b": hm\n\n"),), times=30, every=0.02), FINISH, LAST, END)
    async with open_engine(script) as engine, serving(engine, delivery={"stall_timeout": 0.1}) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request())
            record = await gateway.settled()  # all of it fits into the kernel, so nobody has to read
            assert record.outcome == "completed"
            go.set()
            assert (await client.read_to_end()).chat().text == "one"


async def test_a_reader_that_catches_up_is_served_on_as_if_nothing_had_been() -> None:
    async with (
        open_engine(long_answer(60), send_buffer=16 * KIB) as engine,
        serving(engine, delivery={"buffer_bytes": 32 * KIB}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request())
            await (await engine.request()).stalled.wait()
            answer = await client.read_to_end()
            assert (answer.ended, len(answer.chat().text), answer.chat().done) == ("complete", 4000 * 60, 1)
            await client.send(chat_request())
            assert len((await client.read_to_end()).chat().text) == 4000 * 60
        assert (await gateway.settled(2)).outcome == "completed"


async def test_a_slow_client_is_not_taken_for_a_slow_engine() -> None:
    async with (
        open_engine(long_answer(200), send_buffer=16 * KIB) as engine,
        serving(
            engine,
            deadlines={"between_events": 0.2},
            delivery={"buffer_bytes": 16 * KIB, "stall_timeout": 5},
        ) as gateway,
    ):
        with trio.fail_after(20), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request())
            await (await engine.request()).stalled.wait()
            with trio.move_on_after(0.5):
                await client.stall()
            answer = await client.read_to_end()
        assert (answer.ended, len(answer.chat().text)) == ("complete", 4000 * 200)
        assert gateway.gateway.fleet.books["w1"].faults == 0


# Ends while bytes wait --------------------------------------------------------------------------------------


async def test_a_deadline_cuts_a_stuck_reader_after_a_short_farewell() -> None:
    async with (
        open_engine(ENDLESS, send_buffer=16 * KIB) as engine,
        serving(engine, delivery={"buffer_bytes": 32 * KIB}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request(headers=(("x-gateway-timeout-ms", "300"),)))
            await client.stall()
            assert await client.read_closed() == "reset"
        record = await gateway.settled()
        assert record.outcome == "deadline_exceeded"
        assert gateway.gateway.buffers.used == 0


async def test_at_a_deadline_a_reader_that_wakes_up_gets_whole_events_and_the_reason() -> None:
    async with (
        open_engine(ENDLESS, send_buffer=16 * KIB) as engine,
        serving(engine, delivery={"buffer_bytes": 256 * KIB}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request(headers=(("x-gateway-timeout-ms", "300"),)))
            exchange = await running(gateway)
            await until(lambda: exchange.ending is not None)
            answer = await client.read_to_end()
        assert answer.events is not None
        assert (answer.ended, answer.events.problems) == ("complete", [])
        reading = answer.chat()
        assert [error["code"] for error in reading.errors] == ["deadline_exceeded"]
        assert (reading.done, reading.not_json) == (0, [])


async def running(gateway: Serving) -> Exchange:
    """Wait for the first exchange that runs."""
    await gateway.until(lambda: len(gateway.gateway.live) > 0)
    return next(iter(gateway.gateway.live))


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_client_that_leaves_with_a_full_buffer_frees_it_all(how: str) -> None:
    async with (
        open_engine(ENDLESS, send_buffer=16 * KIB) as engine,
        serving(engine, delivery={"buffer_bytes": 64 * KIB}) as gateway,
    ):
        with await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request())
            request = await engine.request()
            with trio.fail_after(10):
                await request.stalled.wait()
                await gateway.until(lambda: gateway.gateway.buffers.used > 0)
                client.leave_fin() if how == "fin" else client.leave_reset()
                await request.closed.wait()
        record = await gateway.settled()
        assert record.outcome == "client_gone"
        assert gateway.gateway.buffers.used == 0


async def test_delivered_is_what_the_clients_kernel_took() -> None:
    async with (
        open_engine(ENDLESS, send_buffer=16 * KIB) as engine,
        serving(engine, delivery={"buffer_bytes": 32 * KIB, "stall_timeout": 0.3}) as gateway,
    ):
        with trio.fail_after(10), await gateway.connect(receive_buffer=SMALL_WINDOW) as client:
            await client.send(chat_request())
            await client.stall()
            record = await gateway.settled()
            with pytest.raises(ConnectionError):
                await client.read_until(b"never")
            got = len(client.received)
        assert record.tokens_delivered is not None
        assert record.tokens_generated is not None
        assert 0 < record.events_delivered < record.tokens_generated
        # A reset throws away what the client's kernel had and its owner did not read.
        assert record.bytes_delivered >= got
