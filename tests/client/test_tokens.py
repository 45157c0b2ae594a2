"""The client on a fake clock: what it sends, when it comes back, and what its consumers see."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.fakes import FakeGateway, FakeSocket, client_of
from trio_gateway.client import (
    Delta,
    SocketLost,
    SocketRejected,
    StreamCancelled,
    StreamFailed,
    TokensError,
    TokenStream,
)

BODY: Final = {"model": "m1", "messages": [{"role": "user", "content": "x"}]}
REFUSED: Final = SocketRejected(401, "invalid_api_key", "no")
BUSY: Final = SocketRejected(503, "gateway_draining", "no", retry_after=3.0)
UNREACHABLE: Final = SocketLost("unreachable", "no")


async def accept(socket: FakeSocket, number: int = 1) -> str:
    """Accept the ``number``-th stream that is asked for, and answer its name."""
    name = str((await socket.wait_sent("generate", number))["stream_id"])
    socket.accept(name)
    return name


async def collect(stream: TokenStream, into: list[int]) -> None:
    async for delta in stream:
        into.append(delta.seq)  # noqa: PERF401


# Answers ----------------------------------------------------------------------------------------------------


async def test_an_answer_comes_with_its_end(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY) as stream:
            assert (stream.request_id, stream.model, stream.position) == ("r-s1", "m1", None)
            assert (stream.finish_reasons, stream.usage, stream.delivery, stream.receipt) == (
                [],
                None,
                None,
                None,
            )
            gateway.socket.deltas("s1", 1, 3)
            gateway.socket.done("s1")
            assert await stream.text() == "t1 t2 t3 "
            assert (stream.finish_reasons, stream.usage, stream.receipt) == (
                ["stop"],
                {"total_tokens": 5},
                None,
            )
            assert stream.delivery is not None
            assert stream.delivery.acknowledged == 1
            assert [delta async for delta in stream] == []
    assert gateway.socket.closed == 1000
    asked, *rest = gateway.socket.sent
    assert asked["body"] == BODY
    assert rest == [{"type": "ack", "stream_id": "s1", "seq": 3}]


async def test_a_body_of_bytes_is_sent_as_it_is(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(b'{"model": "m1", "prompt": "x"}', operation="completions"):
            asked = gateway.socket.sent[0]
    assert (asked["operation"], asked["body"]) == ("completions", {"model": "m1", "prompt": "x"})


async def test_a_place_in_the_queue_ends_the_wait_for_the_first_word(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()

    async def queue() -> None:
        await gateway.socket.wait_sent("generate")
        gateway.socket.say("queued", "s1", request_id="r1", position=4, eta_ms=100)

    async with client_of(gateway) as tokens:
        nursery.start_soon(queue)
        async with tokens.generate(BODY) as stream:
            assert (stream.position, stream.request_id) == (4, "r1")


async def test_a_refusal_is_raised_on_entering(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    gateway = FakeGateway()

    async def refuse() -> None:
        await gateway.socket.wait_sent("generate")
        error = {"code": "queue_full", "message": "full", "type": "rate_limit_error"}
        gateway.socket.say("error", "s1", request_id="r1", error=error, retry_after_ms=2500)

    async with client_of(gateway) as tokens:
        nursery.start_soon(refuse)
        with pytest.raises(StreamFailed) as raised:
            async with tokens.generate(BODY):
                raise AssertionError
    assert (raised.value.code, raised.value.retry_after, raised.value.request_id) == ("queue_full", 2.5, "r1")


async def test_what_came_before_a_failure_is_handed_out_first(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway, got = FakeGateway(), list[int]()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY) as stream:
            gateway.socket.deltas("s1", 1, 2)
            gateway.socket.say("error", "s1", error={"code": "engine_failed", "message": "no"})
            with pytest.raises(StreamFailed):
                await collect(stream, got)
            with pytest.raises(StreamFailed):
                await anext(stream)
    assert got == [1, 2]
    assert not gateway.socket.of("cancel")


async def test_a_stream_that_its_owner_cancels_elsewhere_is_no_whole_answer(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY) as stream:
            gateway.socket.say("cancelled", "s1", request_id="r1")
            with pytest.raises(StreamCancelled):
                await anext(stream)


async def test_a_stream_needs_credit(autojump_clock: MockClock) -> None:
    async with client_of(FakeGateway()) as tokens:
        with pytest.raises(ValueError, match="credit"):
            tokens.generate(BODY, credit=0)


# Credit and acknowledgements --------------------------------------------------------------------------------


async def test_what_nobody_consumes_is_not_acknowledged(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, credit=4) as stream:
            gateway.socket.deltas("s1", 1, 4)
            await trio.sleep(1000)
            assert not gateway.socket.of("ack")
            assert (await anext(stream)).seq == 1
            assert (await anext(stream)).seq == 2
            assert (await anext(stream)).seq == 3
            assert (await gateway.socket.wait_sent("ack"))["seq"] == 2


async def test_a_consumer_that_waits_for_more_acknowledges_what_it_has_after_a_moment(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway, got = FakeGateway(), list[int]()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, credit=100) as stream:
            nursery.start_soon(collect, stream, got)
            gateway.socket.deltas("s1", 1, 3)
            start = trio.current_time()
            assert (await gateway.socket.wait_sent("ack"))["seq"] == 3
            assert 0 < trio.current_time() - start < 1
            await trio.sleep(1000)
            assert len(gateway.socket.of("ack")) == 1
            gateway.socket.done("s1")


async def test_one_slow_consumer_does_not_hold_up_another(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway, got = FakeGateway(), list[int]()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket, 1)
        async with tokens.generate(BODY, credit=8):
            nursery.start_soon(accept, gateway.socket, 2)
            async with tokens.generate(BODY, credit=8) as fast:
                gateway.socket.deltas("s1", 1, 8)
                gateway.socket.deltas("s2", 1, 8)
                gateway.socket.done("s2")
                await collect(fast, got)
    assert got == list(range(1, 9))


async def test_only_so_many_streams_are_under_way_at_a_time(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    entered = trio.Event()

    async def second(stream: TokenStream) -> None:
        async with stream:
            entered.set()

    async with client_of(gateway, max_streams=1) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY):
            nursery.start_soon(second, tokens.generate(BODY))
            await wait_all_tasks_blocked()
            assert len(gateway.socket.of("generate")) == 1
            gateway.socket.done("s1")
            await accept(gateway.socket, 2)
            await entered.wait()


async def test_the_place_of_a_stream_that_was_left_is_free_when_the_gateway_has_ended_it(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()

    async def second(stream: TokenStream) -> None:
        async with stream:
            pass

    async with client_of(gateway, max_streams=1) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY):
            pass
        await gateway.socket.wait_sent("cancel")
        nursery.start_soon(second, tokens.generate(BODY))
        await wait_all_tasks_blocked()
        assert len(gateway.socket.of("generate")) == 1
        gateway.socket.say("cancelled", "s1", request_id="r-s1")
        await accept(gateway.socket, 2)


# Leaving ----------------------------------------------------------------------------------------------------


async def test_leaving_early_cancels_at_the_gateway(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY) as stream:
            gateway.socket.deltas("s1", 1, 5)
            async for delta in stream:
                if delta.seq == 3:
                    break
        assert await gateway.socket.wait_sent("cancel") == {"type": "cancel", "stream_id": "s1"}
        assert gateway.socket.of("ack") == [{"type": "ack", "stream_id": "s1", "seq": 2}]


async def test_a_stream_that_waits_for_its_first_word_can_be_cancelled(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        with trio.move_on_after(5) as scope:
            async with tokens.generate(BODY):
                raise AssertionError
        assert scope.cancelled_caught
        await gateway.socket.wait_sent("cancel")


async def test_what_is_to_be_said_when_the_block_ends_is_said(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY):
            pass
    assert gateway.socket.of("cancel")
    assert gateway.socket.closed == 1000


async def test_a_cancelled_client_cancels_what_would_go_on_without_it(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    with trio.CancelScope() as scope:
        async with client_of(gateway) as tokens:
            nursery.start_soon(accept, gateway.socket)
            async with tokens.generate(BODY, resumable=True):
                scope.cancel()
                await trio.sleep_forever()
    assert gateway.socket.of("cancel")
    assert gateway.socket.closed is None  # it is just gone


async def test_after_half_a_frame_nothing_is_sent_any_more(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    with trio.CancelScope() as scope:
        async with client_of(gateway) as tokens:
            nursery.start_soon(accept, gateway.socket)
            async with tokens.generate(BODY, resumable=True) as stream:
                gateway.socket.takes = trio.Event()
                gateway.socket.deltas("s1", 1, 64)
                for _ in range(50):
                    await anext(stream)
                await wait_all_tasks_blocked()
                assert gateway.socket.torn
                scope.cancel()
                await trio.sleep_forever()
    assert [message["type"] for message in gateway.socket.sent] == ["generate"]
    assert gateway.socket.closed is None


async def test_errors_of_the_block_leave_it_as_they_are(autojump_clock: MockClock) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client_of(FakeGateway()):
            raise ZeroDivisionError


async def test_after_the_block_no_stream_begins(autojump_clock: MockClock) -> None:
    async with client_of(FakeGateway()) as tokens:
        pass
    with pytest.raises(SocketLost, match="the client is closed"):
        async with tokens.generate(BODY):
            raise AssertionError


async def test_the_client_does_not_wait_long_for_a_gateway_that_takes_nothing(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    start = trio.current_time()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY):
            gateway.socket.takes = trio.Event()
    assert trio.current_time() - start < 5


# Losses -----------------------------------------------------------------------------------------------------


async def test_a_lost_stream_goes_on_behind_what_was_consumed(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway, got = FakeGateway(), list[int]()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True) as stream:
            gateway.socket.deltas("s1", 1, 3)
            assert [(await anext(stream)).seq for _ in range(3)] == [1, 2, 3]
            gateway.socket.lose()
            nursery.start_soon(collect, stream, got)
            second = await gateway.wait_socket(2)
            resume = await second.wait_sent("resume")
            assert (resume["request_id"], resume["after_seq"], resume["credit"]) == ("r-s1", 3, 64)
            second.accept("s1")
            second.deltas("s1", 4, 5)
            second.done("s1")
            await trio.sleep(10)
    assert got == [4, 5]
    assert gateway.attempts[1] - gateway.attempts[0] < 0.1  # the first attempt waits for nothing


async def test_deltas_that_come_a_second_time_are_handed_out_once(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway, got = FakeGateway(), list[int]()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True) as stream:
            gateway.socket.deltas("s1", 1, 3)
            gateway.socket.lose()
            second = await gateway.wait_socket(2)
            assert (await second.wait_sent("resume"))["after_seq"] == 0
            second.accept("s1")
            second.deltas("s1", 1, 5)
            second.done("s1")
            await collect(stream, got)
    assert got == [1, 2, 3, 4, 5]


async def test_a_stream_that_is_not_resumable_is_lost_with_its_socket(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY) as stream:
            gateway.socket.deltas("s1", 1, 1)
            gateway.socket.lose()
            assert (await anext(stream)).seq == 1
            with pytest.raises(SocketLost) as raised:
                await anext(stream)
        assert (raised.value.code, raised.value.request_id) == ("socket_lost", "r-s1")
        await trio.sleep(100)
        assert len(gateway.attempts) == 1  # nobody needs another
        nursery.start_soon(_accept_on, gateway, 2)
        async with tokens.generate(BODY):
            pass
    assert len(gateway.sockets) == 2


async def _accept_on(gateway: FakeGateway, number: int) -> None:
    await accept(await gateway.wait_socket(number))


async def test_attempts_go_on_within_the_window_and_then_end_with_the_reason(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway, resume_within=10.0) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True) as stream:
            gateway.refusals = [UNREACHABLE] * 100
            gateway.socket.lose()
            lost = trio.current_time()
            with pytest.raises(SocketLost) as raised:
                await anext(stream)
            assert raised.value.code == "unreachable"
            assert trio.current_time() <= lost + 10
        waits = [
            late - early for early, late in zip(gateway.attempts[1:], gateway.attempts[2:], strict=False)
        ]
        assert waits[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
        gateway.refusals = []
        nursery.start_soon(_accept_on, gateway, 2)
        async with tokens.generate(BODY):  # a new stream is a new attempt
            pass


async def test_a_gateway_that_only_repeats_itself_is_not_asked_for_ever(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()

    async def repeat() -> None:
        for number in itertools.count(2):
            socket = await gateway.wait_socket(number)
            await socket.wait_sent("resume")
            socket.accept("s1")
            socket.deltas("s1", 1, 1)
            socket.lose()

    async with client_of(gateway, resume_within=10.0) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True) as stream:
            gateway.socket.deltas("s1", 1, 1)
            await anext(stream)
            lost = trio.current_time()
            nursery.start_soon(repeat)
            gateway.socket.lose()
            with pytest.raises(SocketLost):
                await anext(stream)
            assert trio.current_time() <= lost + 10
    nursery.cancel_scope.cancel()


async def test_the_gateways_wish_to_come_later_is_kept(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True):
            gateway.refusals = [BUSY]
            gateway.socket.lose()
            await (await gateway.wait_socket(2)).wait_sent("resume")
    assert gateway.attempts[2] - gateway.attempts[1] == pytest.approx(3.0)


@pytest.mark.parametrize(
    "end", [SocketLost("socket_closed", "the key is revoked", 4403), SocketLost("socket_closed", "x", 4429)]
)
async def test_no_other_socket_is_tried_after_a_close_that_would_come_again(
    nursery: trio.Nursery, end: SocketLost, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True) as stream:
            gateway.socket.lose(end)
            with pytest.raises(SocketLost) as raised:
                await anext(stream)
        assert raised.value.close_code == end.close_code
        with pytest.raises(SocketLost):
            async with tokens.generate(BODY):
                raise AssertionError
    assert len(gateway.attempts) == 1


async def test_a_key_that_is_not_known_any_more_ends_the_client(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True) as stream:
            gateway.refusals = [REFUSED]
            gateway.socket.lose()
            with pytest.raises(SocketRejected) as raised:
                await anext(stream)
    assert (raised.value.status, raised.value.request_id) == (401, "r-s1")


@pytest.mark.parametrize("refusal", [REFUSED, BUSY, UNREACHABLE])
async def test_the_first_socket_is_tried_once(refusal: TokensError, autojump_clock: MockClock) -> None:
    gateway = FakeGateway(refusal)
    with pytest.raises(type(refusal)) as raised:
        async with client_of(gateway):
            raise AssertionError
    assert raised.value is refusal
    assert len(gateway.attempts) == 1


async def test_a_stream_that_can_not_be_resumed_says_so(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True) as stream:
            gateway.socket.lose()
            second = await gateway.wait_socket(2)
            await second.wait_sent("resume")
            second.say("error", "s1", error={"code": "request_not_found", "message": "no longer"})
            with pytest.raises(StreamFailed, match="request_not_found"):
                await anext(stream)


async def test_a_stream_that_is_left_while_there_is_no_socket_is_cancelled_over_the_next(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True):
            gateway.refusals = [UNREACHABLE]
            gateway.socket.lose()
            await wait_all_tasks_blocked()
        second = await gateway.wait_socket(2)
        await second.wait_sent("cancel")
        assert [message["type"] for message in second.sent] == ["resume", "cancel"]


async def test_the_block_ends_at_once_while_there_is_no_socket(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True):
            gateway.refusals = [UNREACHABLE] * 100
            gateway.socket.lose()
            await trio.sleep(5)
        left = trio.current_time()
    assert trio.current_time() == left


# What the gateway may do ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["nonsense", '{"type":"delta","stream_id":"s1","seq":2,"chunk":{}}', '{"type":"done"}'],
)
async def test_a_gateway_that_breaks_the_protocol_is_left(
    nursery: trio.Nursery, text: str, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True) as stream:
            gateway.socket.say_text(text)
            with pytest.raises(SocketLost) as raised:
                await anext(stream)
    assert raised.value.code == "protocol_broken"
    assert gateway.socket.closed == 1002


async def test_messages_of_later_versions_and_of_unknown_streams_are_passed_over(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY) as stream:
            gateway.socket.say("weather", "s1")
            gateway.socket.say("error", error={"code": "x", "message": "y"})
            gateway.socket.deltas("s99", 1, 1)
            gateway.socket.deltas("s1", 1, 1)
            gateway.socket.done("s1")
            assert await stream.text() == "t1 "


async def test_a_gateway_that_goes_away_may_finish_and_the_next_stream_takes_another_socket(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        first = gateway.socket
        nursery.start_soon(accept, first)
        async with tokens.generate(BODY) as stream:
            assert tokens.going_away is None
            first.say("going_away", deadline_ms=20_000)
            await wait_all_tasks_blocked()
            assert tokens.going_away == pytest.approx(trio.current_time() + 20)
            assert first.closed is None
            first.deltas("s1", 1, 1)
            first.done("s1")
            assert await stream.text() == "t1 "
        await wait_all_tasks_blocked()
        assert first.closed == 1000
        assert not tokens.connected
        nursery.start_soon(_accept_on, gateway, 2)
        async with tokens.generate(BODY):
            assert tokens.going_away is None
            assert tokens.connected


async def test_a_socket_whose_other_side_is_silent_is_left_and_one_that_answers_is_kept(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, resumable=True):
            await trio.sleep(1000)
            assert len(gateway.sockets) == 1
            gateway.socket.answers_pings = False
            await trio.sleep(50)
            assert len(gateway.sockets) == 2
            assert gateway.sockets[0].closed is None
            assert gateway.socket.of("resume")


async def test_a_socket_that_brings_something_is_not_silent_though_it_answers_no_ping(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    gateway = FakeGateway()
    async with client_of(gateway) as tokens:
        nursery.start_soon(accept, gateway.socket)
        async with tokens.generate(BODY, credit=1000, resumable=True):
            gateway.socket.answers_pings = False
            for seq in range(1, 100):
                await trio.sleep(15)
                gateway.socket.deltas("s1", seq, seq)
            assert len(gateway.sockets) == 1


# The sweep --------------------------------------------------------------------------------------------------


class Sweeper(trio.abc.Instrument):
    """Cancels at the end of the ``moment``-th step of any task; None: only counts."""

    def __init__(self, scope: trio.CancelScope, moment: int | None) -> None:
        self._scope = scope
        self._moment = moment
        self.moments = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.moments += 1
        if self.moments == self._moment:
            self._scope.cancel()


async def story(gateway: FakeGateway, moment: int | None, whole: bool) -> tuple[int, list[Delta]]:
    """Two streams, a loss and a resume, cancelled at one moment: the client, or one of its consumers."""
    got: list[Delta] = []

    async def play() -> None:
        first = await gateway.wait_socket(1)
        await accept(first)
        first.deltas("s1", 1, 3)
        await first.wait_sent("ack")
        first.deltas("s1", 4, 5)
        first.lose()
        second = await gateway.wait_socket(2)
        after = (await second.wait_sent("resume"))["after_seq"]
        second.accept("s1")
        second.deltas("s1", after + 1, 6)
        second.done("s1")
        await accept(second)
        second.deltas("s2", 1, 1)
        second.done("s2")

    async def consume(tokens: Any) -> None:
        async with tokens.generate(BODY, credit=4, resumable=True) as stream:
            got.extend([delta async for delta in stream])
        async with tokens.generate(BODY) as stream:
            got.extend([delta async for delta in stream])

    scope = trio.CancelScope()
    sweeper = Sweeper(scope, moment)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(play)
        trio.lowlevel.add_instrument(sweeper)
        try:
            if whole:
                with scope:
                    async with client_of(gateway) as tokens:
                        await consume(tokens)
            else:
                async with client_of(gateway) as tokens:
                    with scope:
                        await consume(tokens)
                    trio.lowlevel.remove_instrument(sweeper)
                    # Whatever became of it: the next stream is served, and no place was lost.
                    room = tokens._room.value
                    assert room + len(tokens._placed) == 32
                    assert room + len(tokens._streams) == 32
        finally:
            if whole:
                trio.lowlevel.remove_instrument(sweeper)
            nursery.cancel_scope.cancel()
    return sweeper.moments, got


@pytest.mark.parametrize("whole", [True, False], ids=["the client", "its consumer"])
async def test_cancelled_at_every_moment_nothing_is_left(whole: bool, autojump_clock: MockClock) -> None:
    moments, got = await story(FakeGateway(), None, whole)
    assert [delta.seq for delta in got] == [1, 2, 3, 4, 5, 6, 1]
    for moment in range(1, moments + 1):
        gateway = FakeGateway()
        _, got = await story(gateway, moment, whole)
        for socket in gateway.sockets:
            named = {str(message.get("stream_id")) for message in socket.of("generate")}
            ended = {str(message["stream_id"]) for message in socket.of("cancel")}
            assert ended <= named | {"s1"}
