"""What should not happen: a bug inside, a cancellation from outside. Both are settled like any other end."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.exchange.rig import error_of, rigged, text_of
from trio_gateway.testing import (
    FakeScript,
    FakeScripting,
    Head,
    Hold,
    RecordingClient,
    Wait,
    WaitFor,
    WorkerSet,
    chat_answer,
    chat_chunk,
    chat_stream,
    make_request,
    make_worker,
)

BUG = ValueError("a bug")
WORD = chat_chunk({"content": "x"})


# Bugs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "stream"),
    [
        pytest.param(BUG, True, id="opening"),
        pytest.param((BUG,), True, id="reading a head"),
        pytest.param((Head(), BUG), True, id="reading a stream"),
        pytest.param((BUG,), False, id="reading an answer"),
    ],
)
async def test_a_bug_before_headers_is_a_500_and_is_reported(
    script: FakeScripting, stream: bool, autojump_clock: MockClock
) -> None:
    async with rigged(script, bugs=1) as rig:
        running = await rig.run(make_request(stream=stream))
        problem = running.client.problem
        assert problem is not None
        assert (problem.code, problem.status) == ("internal_error", 500)
        assert "a bug" not in problem.message
        assert running.client.finished
        where, exc = rig.bugs[0]
        assert where == running.exchange.request.exchange_id
        assert _contains(exc, BUG)
        record = rig.record
        assert (record.outcome, record.code, record.phase) == (
            "upstream_failed",
            "internal_error",
            "before_headers",
        )
        assert len(rig.engine.attempts) == 1  # nobody knows what it was: not again
        assert rig.workers.fleet.books["w1"].faults == 0


async def test_a_bug_after_content_is_an_event_at_the_end(autojump_clock: MockClock) -> None:
    async with rigged((Head(), WORD, BUG), bugs=1) as rig:
        running = await rig.run()
        assert text_of(running.client) == "x"
        assert error_of(running.client)["code"] == "internal_error"
        assert running.client.finished
        assert (rig.record.outcome, rig.record.phase) == ("upstream_failed", "after_content")


class BrokenClient:
    """A client port with a bug in one of its methods; else a `RecordingClient`."""

    def __init__(self, method: str, room: float = math.inf) -> None:
        self._client = RecordingClient(room)
        self._method = method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            raise BUG
        return getattr(self._client, name)


@pytest.mark.parametrize(
    ("method", "bugs"),
    [("wait_gone", 1), ("begin", 1), ("push", 2), ("taken", 1)],  # the farewell pushes again
)
async def test_a_bug_in_the_client_port_is_settled_and_nothing_stays_held(
    method: str, bugs: int, autojump_clock: MockClock
) -> None:
    script = (Head(), chat_chunk({"content": "x" * 20_000}), *chat_stream()[2:])
    async with rigged(script, bugs=bugs) as rig:
        client = BrokenClient(method, room=100)
        if method == "wait_gone":
            client.half_close()  # else nobody waits
        running = await rig.run(client=client)  # type: ignore[arg-type]
        assert running.ending is not None
        assert (rig.record.outcome, rig.record.code) == ("upstream_failed", "internal_error")
        assert running.client.was_cut or running.client.finished


async def test_a_bug_before_admission_takes_no_place(autojump_clock: MockClock) -> None:
    async with rigged((Head(), WORD), bugs=1) as rig:
        running = await rig.run(client=BrokenClient("on_leaving"))  # type: ignore[arg-type]
        assert running.client.problem is not None
        assert running.client.problem.status == 500
        assert (rig.records, rig.engine.attempts) == ([], [])


@pytest.mark.parametrize(
    ("script", "method", "bugs"),
    [
        ((Head(), Hold()), "respond", 1),
        ((Head(), WORD, Hold()), "error_event", 1),
        ((Head(), WORD, Hold()), "flush", 1),
        ((Head(), WORD, Hold()), "delivered", 2),  # for the error, and for the record
    ],
)
async def test_a_bug_in_the_farewell_is_reported_and_settled(
    script: FakeScript, method: str, bugs: int, autojump_clock: MockClock
) -> None:
    async with rigged(script, bugs=bugs) as rig:
        running = await rig.run(make_request(seconds=5), BrokenClient(method))  # type: ignore[arg-type]
        assert running.ending is not None
        assert (rig.record.outcome, rig.record.code) == ("deadline_exceeded", "deadline_exceeded")
        assert running.client.was_cut


def _contains(exc: BaseException, wanted: BaseException) -> bool:
    if isinstance(exc, BaseExceptionGroup):
        return any(_contains(inner, wanted) for inner in exc.exceptions)
    return exc is wanted


# From outside ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "stream", "phase"),
    [
        pytest.param((Hold(),), True, "before_headers", id="before headers"),
        pytest.param((Wait(4), Hold()), False, "before_headers", id="buffered"),
        pytest.param((Head(), WORD, Hold()), True, "after_content", id="after content"),
    ],
)
async def test_a_cancellation_from_outside_settles_and_cuts(
    script: FakeScript, stream: bool, phase: str, autojump_clock: MockClock
) -> None:
    async with rigged(script) as rig:
        running = rig.start(make_request(stream=stream))
        await trio.sleep(5)
        running.scope.cancel()
        with trio.fail_after(0.01):
            await running.over.wait()
        assert running.scope.cancelled_caught
        assert running.ending is None  # it did not return
        assert running.client.was_cut
        record = rig.record
        assert (record.outcome, record.phase) == ("gateway_shutdown", phase)
        assert (record.events_delivered, record.bytes_delivered) == (
            len(running.client.events),
            len(running.client.received),
        )


async def test_a_waiter_that_is_cancelled_from_outside_leaves_the_queue(autojump_clock: MockClock) -> None:
    async with rigged((Wait(20), *chat_stream("x")), workers=WorkerSet(make_worker(slots=1))) as rig:
        rig.start()
        await wait_all_tasks_blocked()
        waiting = rig.start()
        await trio.sleep(1)
        waiting.scope.cancel()
        await waiting.over.wait()
        assert rig.workers.admission.statistics().queued == 0
        assert (rig.record.outcome, rig.record.phase) == ("gateway_shutdown", "queued")


async def test_a_farewell_that_is_cancelled_from_outside_still_has_its_two_seconds(
    autojump_clock: MockClock,
) -> None:
    script = (*chat_stream("x" * 6000, finish=None, done=False, end=False), Hold())
    async with rigged(script) as rig:
        running = rig.start(make_request(seconds=5), RecordingClient(room=1000))
        await trio.sleep(6)
        running.scope.cancel()
        await running.over.wait()
        assert running.ended_after == 7
        assert rig.record.outcome == "deadline_exceeded"


async def test_a_bug_in_one_exchange_is_nobody_elses(autojump_clock: MockClock) -> None:
    async with rigged((Head(), Wait(5), BUG), (Wait(10), *chat_answer("fine")), bugs=1) as rig:
        bad = rig.start()
        await wait_all_tasks_blocked()
        good = rig.start(make_request(stream=False))
        await good.over.wait()
        assert bad.over.is_set()
        assert b"fine" in good.client.received


@pytest.mark.parametrize("reading", ["alone"], indirect=True)  # else the cancellation comes first
async def test_a_bug_and_a_cancellation_in_the_same_moment_are_both_seen(autojump_clock: MockClock) -> None:
    go = trio.Event()
    async with rigged((Head(), WORD, WaitFor(go), BUG), bugs=1) as rig:
        running = rig.start()
        running.client.half_close()  # so that a second task has something to say
        await trio.sleep(5)
        go.set()
        running.scope.cancel()
        await running.over.wait()
        assert running.scope.cancelled_caught  # and nothing else came out of it
        assert _contains(rig.bugs[0][1], BUG)
        assert (rig.record.outcome, rig.record.code) == ("upstream_failed", "internal_error")
