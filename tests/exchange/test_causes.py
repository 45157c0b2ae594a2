"""Whatever ends an exchange, at whatever point: what the client still gets, and what is recorded.

The table of endings: upstream failure says all that arrived, then the error; deadline, operator, owner and
shutdown drop what was not sent, finish a half-written event, then say the error; stall and gone cut.
"""

from __future__ import annotations

import json
from typing import Final

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.exchange.rig import GRACE, Rig, Running, error_of, rigged, text_of
from trio_gateway.contract import Ending, Outcome, Phase
from trio_gateway.errors import Problem
from trio_gateway.testing import (
    Chunk,
    CloseReset,
    FakeScript,
    Head,
    Hold,
    RecordingClient,
    Wait,
    WorkerSet,
    chat_answer,
    chat_chunk,
    chat_stream,
    make_request,
    make_worker,
)

OPERATOR: Final = Ending(Outcome.OPERATOR_CANCELLED, Problem.of("operator_cancelled", "an operator ended it"))
SHUTDOWN: Final = Ending(Outcome.GATEWAY_SHUTDOWN, Problem.of("gateway_draining", "going", retry_after=1.0))
OWNER: Final = Ending(Outcome.CLIENT_CANCELLED, Problem.of("request_cancelled", "its owner cancelled it"))
STALLED: Final = Ending(Outcome.CLIENT_STALLED)

BY_DEADLINE: Final = "deadline"
GONE: Final = "gone"
AT: Final = 5.0  # seconds, when it is ended

TOLD: Final = [
    pytest.param(OPERATOR, "operator_cancelled", 503, id="operator"),
    pytest.param(SHUTDOWN, "gateway_draining", 503, id="shutdown"),
    pytest.param(OWNER, "request_cancelled", 409, id="owner"),
    pytest.param(BY_DEADLINE, "deadline_exceeded", 504, id="deadline"),
]
CUT: Final = [pytest.param(GONE, id="gone"), pytest.param(STALLED, id="stalled")]
Cause = Ending | str


def started(rig: Rig, cause: Cause, client: RecordingClient | None = None, *, stream: bool = True) -> Running:
    """Start an exchange that `end_at` will end."""
    request = make_request(stream=stream, seconds=AT if cause == BY_DEADLINE else 600.0)
    return rig.start(request, client)


async def happen(running: Running, cause: Cause) -> None:
    """Let `AT` seconds pass, and then the cause happen."""
    await trio.sleep(AT)
    if isinstance(cause, Ending):
        running.exchange.end(cause)
    elif cause == GONE:
        running.client.leave()


async def end_by(running: Running, cause: Cause) -> None:
    """Let the cause happen and the exchange end of it, at once."""
    await happen(running, cause)
    with trio.fail_after(0.01):
        await running.over.wait()


def outcome_of(cause: Cause) -> str:
    if isinstance(cause, Ending):
        return cause.outcome.value
    return {GONE: "client_gone", BY_DEADLINE: "deadline_exceeded"}[cause]


def check_record(rig: Rig, running: Running, cause: Cause, phase: Phase) -> None:
    (record,) = [r for r in rig.records if r.exchange_id == running.exchange.request.exchange_id]
    assert (record.outcome, record.phase) == (outcome_of(cause), phase.value)
    assert running.ending is not None
    assert running.ending.outcome.value == record.outcome
    assert record.settled_at - record.arrived_at == pytest.approx(AT)


# Before any byte ------------------------------------------------------------------------------------------


def queue_of_one() -> WorkerSet:
    return WorkerSet(make_worker("w1", slots=1, cancel_grace=GRACE))


@pytest.mark.parametrize(("cause", "code", "status"), TOLD)
async def test_while_it_waits_the_client_is_told_why_with_a_status(
    cause: Cause, code: str, status: int, autojump_clock: MockClock
) -> None:
    async with rigged((Wait(20), *chat_stream("x")), workers=queue_of_one()) as rig:
        rig.start()
        await trio.testing.wait_all_tasks_blocked()
        waiting = started(rig, cause)
        await trio.testing.wait_all_tasks_blocked()
        assert rig.workers.admission.statistics().queued == 1
        await end_by(waiting, cause)
        assert rig.workers.admission.statistics().queued == 0
        assert waiting.client.finished
        assert waiting.client.problem is not None
        assert (waiting.client.problem.code, waiting.client.problem.status) == (code, status)
        assert waiting.client.extra is not None
        assert (waiting.client.extra["outcome"], waiting.client.extra["phase"]) == (
            outcome_of(cause),
            "queued",
        )
        check_record(rig, waiting, cause, Phase.QUEUED)
        assert waiting.placed == 0


@pytest.mark.parametrize("cause", CUT)
async def test_while_it_waits_one_that_is_gone_leaves_its_place(
    cause: Cause, autojump_clock: MockClock
) -> None:
    async with rigged((Wait(20), *chat_stream("x")), workers=queue_of_one()) as rig:
        rig.start()
        await trio.testing.wait_all_tasks_blocked()
        waiting = started(rig, cause)
        await end_by(waiting, cause)
        assert rig.workers.admission.statistics().queued == 0
        assert waiting.client.was_cut
        assert not waiting.client.begun
        check_record(rig, waiting, cause, Phase.QUEUED)


BEFORE_CONTENT: Final[list[FakeScript]] = [
    (Hold(),),
    (Head(), Hold()),
    (Head(), chat_chunk({"role": "assistant"}), Hold()),
]


JSON: Final = Head(200, (("content-type", "application/json"), ("transfer-encoding", "chunked")))


@pytest.mark.parametrize(
    ("script", "stream"),
    [
        *((script, True) for script in BEFORE_CONTENT),
        ((Hold(),), False),
        ((JSON, Chunk(b'{"choices":['), Hold()), False),
    ],
    ids=["no head", "head", "role", "buffered, no head", "buffered, half"],
)
@pytest.mark.parametrize(("cause", "code", "status"), TOLD)
async def test_before_headers_the_client_is_told_why_with_a_status(
    cause: Cause, code: str, status: int, script: FakeScript, stream: bool, autojump_clock: MockClock
) -> None:
    async with rigged(script) as rig:
        running = started(rig, cause, stream=stream)
        await end_by(running, cause)
        assert running.client.finished
        assert running.client.problem is not None
        assert (running.client.problem.code, running.client.problem.status) == (code, status)
        check_record(rig, running, cause, Phase.BEFORE_HEADERS)
        assert rig.record.status == status
        assert rig.record.code == code
        assert (rig.engine.reading, rig.engine.closed) == (0, 1)
        assert rig.workers.admission.statistics().draining == 1
        assert rig.workers.fleet.books["w1"].faults == 0


@pytest.mark.parametrize("script", BEFORE_CONTENT, ids=["no head", "head", "role"])
@pytest.mark.parametrize("cause", CUT)
async def test_before_headers_one_that_is_gone_is_cut_and_its_engine_closed(
    cause: Cause, script: FakeScript, autojump_clock: MockClock
) -> None:
    async with rigged(script) as rig:
        running = started(rig, cause)
        await end_by(running, cause)
        assert running.client.was_cut
        assert not running.client.begun
        check_record(rig, running, cause, Phase.BEFORE_HEADERS)
        assert rig.workers.admission.statistics().draining == 1


# After headers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cause", "code", "status"), TOLD)
async def test_after_early_headers_the_client_is_told_why_by_an_event(
    cause: Cause, code: str, status: int, autojump_clock: MockClock
) -> None:
    async with rigged((Hold(),), heartbeat_after=2.0) as rig:
        running = started(rig, cause)
        await end_by(running, cause)
        assert running.client.comments == 2
        assert [json.loads(event)["error"]["code"] for event in running.client.events] == [code]
        assert running.client.finished  # a proper end of the message, and no [DONE]
        check_record(rig, running, cause, Phase.BEFORE_CONTENT)
        assert rig.record.status == 200
        assert error_of(running.client)["gateway"] == {
            "request_id": running.exchange.request.exchange_id,
            "outcome": outcome_of(cause),
            "phase": "before_content",
            "tokens_delivered": 0,
            "retryable": cause not in (OPERATOR, OWNER),
        }


ENDLESS: Final[FakeScript] = (*chat_stream("a", "b", finish=None, done=False, end=False), Hold())


@pytest.mark.parametrize(("cause", "code", "status"), TOLD)
async def test_after_content_the_client_is_told_why_by_an_event(
    cause: Cause, code: str, status: int, autojump_clock: MockClock
) -> None:
    async with rigged(ENDLESS) as rig:
        running = started(rig, cause)
        await end_by(running, cause)
        client = running.client
        assert text_of(client) == "ab"
        assert error_of(client)["code"] == code
        assert b"[DONE]" not in client.events
        assert client.finished
        assert error_of(client)["gateway"]["retryable"] is False
        assert error_of(client)["gateway"]["tokens_delivered"] == 2
        check_record(rig, running, cause, Phase.AFTER_CONTENT)
        assert (rig.record.tokens_generated, rig.record.tokens_delivered) == (2, 2)


@pytest.mark.parametrize("cause", CUT)
async def test_after_content_one_that_is_gone_or_stalled_is_cut_without_a_word(
    cause: Cause, autojump_clock: MockClock
) -> None:
    async with rigged(ENDLESS) as rig:
        running = started(rig, cause)
        await end_by(running, cause)
        assert text_of(running.client) == "ab"
        assert len(running.client.events) == 3  # the role and two words
        assert running.client.was_cut
        check_record(rig, running, cause, Phase.AFTER_CONTENT)


@pytest.mark.parametrize(("cause", "code", "status"), TOLD)
async def test_unsent_events_are_dropped_but_the_begun_one_is_finished(
    cause: Cause, code: str, status: int, autojump_clock: MockClock
) -> None:
    """A slow client holds up many events when the end comes; then it reads on."""
    words = [f"{number:02d}" + "x" * 5998 for number in range(10)]
    script = (*chat_stream(*words, finish=None, done=False, end=False), Hold())
    async with rigged(script) as rig:
        client = RecordingClient(room=20_000)
        running = started(rig, cause, client)
        await happen(running, cause)
        await trio.sleep(0.5)
        assert not running.over.is_set()
        client.read(1_000_000)
        await running.over.wait()
        assert running.ended_after == pytest.approx(AT + 0.5)
        assert client.finished
        assert error_of(client)["code"] == code
        text = text_of(client)
        assert text == "".join(words)[: len(text)]
        assert len(text) % 6000 == 0  # whole events only
        assert 3 <= len(text) / 6000 < 10  # all that was begun, and not all that waited
        assert b"[DONE]" not in client.events
        assert error_of(client)["gateway"]["tokens_delivered"] == 3  # when it was written
        assert rig.record.outcome == outcome_of(cause)


@pytest.mark.parametrize(("cause", "code", "status"), TOLD)
async def test_an_error_answer_that_the_socket_does_not_take_at_once_has_two_seconds_too(
    cause: Cause, code: str, status: int, autojump_clock: MockClock
) -> None:
    async with rigged((Hold(),)) as rig:
        slow, silent = (started(rig, cause, RecordingClient(room=10)) for _ in range(2))
        await happen(slow, cause)
        if isinstance(cause, Ending):
            silent.exchange.end(cause)
        await trio.sleep(1)
        slow.client.read(10_000)
        await slow.over.wait()
        assert slow.client.finished
        assert slow.ended_after == pytest.approx(AT + 1)
        await silent.over.wait()
        assert silent.client.was_cut
        assert silent.ended_after == pytest.approx(AT + 2)


@pytest.mark.parametrize(("cause", "code", "status"), TOLD)
async def test_a_client_that_takes_nothing_has_two_seconds_for_its_farewell(
    cause: Cause, code: str, status: int, autojump_clock: MockClock
) -> None:
    script = (*chat_stream("x" * 6000, finish=None, done=False, end=False), Hold())
    async with rigged(script) as rig:
        running = started(rig, cause, RecordingClient(room=1000))
        await happen(running, cause)
        await running.over.wait()
        assert running.ended_after == pytest.approx(AT + 2)
        assert running.client.was_cut
        assert len(running.client.received) == 1000
        assert (rig.record.outcome, rig.record.code) == (outcome_of(cause), code)
        assert rig.record.events_delivered == len(running.client.events)


async def test_the_engine_is_let_go_before_the_farewell(autojump_clock: MockClock) -> None:
    script = (*chat_stream("x" * 6000, finish=None, done=False, end=False), Hold())
    async with rigged(script) as rig:
        running = started(rig, OPERATOR, RecordingClient(room=1000))
        await happen(running, OPERATOR)
        await trio.sleep(1)
        assert not running.over.is_set()
        assert rig.engine.reading == 0
        assert rig.workers.admission.statistics().held == 0


async def test_a_client_that_leaves_during_its_farewell_ends_it(autojump_clock: MockClock) -> None:
    script = (*chat_stream("x" * 6000, finish=None, done=False, end=False), Hold())
    async with rigged(script) as rig:
        running = started(rig, OPERATOR, RecordingClient(room=1000))
        await happen(running, OPERATOR)
        await trio.sleep(1)
        running.client.leave()
        await running.over.wait()
        assert running.ended_after == pytest.approx(AT + 1)
        assert rig.record.outcome == "operator_cancelled"  # the first cause


# An engine that fails -------------------------------------------------------------------------------------


async def test_after_content_an_upstream_failure_says_all_that_arrived_and_then_the_error(
    autojump_clock: MockClock,
) -> None:
    words = [f"{number:02d}" + "x" * 5998 for number in range(10)]
    script = (*chat_stream(*words, finish=None, done=False, end=False), CloseReset())
    async with rigged(script) as rig:
        client = RecordingClient(room=20_000)
        running = rig.start(client=client)
        await trio.sleep(1)
        assert rig.engine.reading == 0
        assert not running.over.is_set()
        client.read(1_000_000)
        await running.over.wait()
        assert running.ended_after == 1  # at once, when the client had read it all
        assert text_of(client) == "".join(words)
        assert error_of(client)["code"] == "engine_failed"
        assert client.finished
        assert b"[DONE]" not in client.events
        record = rig.record
        assert (record.outcome, record.phase, record.code) == (
            "upstream_failed",
            "after_content",
            "engine_failed",
        )
        assert record.attempts == 1  # never moved, though another worker was free


async def test_a_half_finished_buffered_answer_is_cut(autojump_clock: MockClock) -> None:
    async with rigged(chat_answer("x" * 50_000)) as rig:
        client = RecordingClient(room=20_000)
        running = started(rig, OPERATOR, client, stream=False)
        await happen(running, OPERATOR)
        await running.over.wait()
        assert client.was_cut
        assert running.ended_after == pytest.approx(AT)  # there is nothing to be said in its middle
        assert len(client.received) == 20_000
        assert rig.record.outcome == "operator_cancelled"


# The first cause ------------------------------------------------------------------------------------------


async def test_the_first_cause_wins_and_is_settled_once(autojump_clock: MockClock) -> None:
    async with rigged((Hold(),)) as rig:
        running = started(rig, OPERATOR)
        await trio.sleep(AT)
        running.exchange.end(OPERATOR)
        running.exchange.end(SHUTDOWN)
        running.client.leave()
        await running.over.wait()
        running.exchange.end(OWNER)  # long after
        assert rig.record.outcome == "operator_cancelled"
        assert running.exchange.ending == OPERATOR


async def test_an_exchange_that_is_ended_before_it_began_is_settled(autojump_clock: MockClock) -> None:
    async with rigged() as rig:
        running = rig.prepare()
        running.exchange.end(SHUTDOWN)
        await rig.carry_out(running)
        assert rig.record.outcome == "gateway_shutdown"
        assert running.client.problem is not None
        assert rig.engine.attempts == []


async def test_the_whole_answer_that_a_client_has_is_never_followed_by_an_error(
    autojump_clock: MockClock,
) -> None:
    """It is ended while the engine's tail is awaited, after ``[DONE]``."""
    async with rigged(chat_stream("ok", end=False)) as rig:
        running = rig.start()
        await trio.sleep(0.02)
        running.exchange.end(OPERATOR)
        await running.over.wait()
        assert running.client.events[-1] == b"[DONE]"
        assert running.client.finished


async def test_all_that_runs_can_be_ended_at_once_and_waited_for(autojump_clock: MockClock) -> None:
    async with rigged((Hold(),), workers=queue_of_one()) as rig:
        all_of_them = [rig.start() for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked()
        assert len(rig.live) == 3
        rig.live.end_all(SHUTDOWN)
        with trio.fail_after(0.01):
            await rig.live.wait_none()
        assert [running.client.problem is not None for running in all_of_them] == [True] * 3
        assert rig.books.outcomes["gateway_shutdown"] == 3
        assert list(rig.live) == []
