"""What an engine's failure means: who tries again, what it says of the worker, what the client is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pytest
import trio
from trio.testing import MockClock

from tests.exchange.rig import error_of, is_whole, rigged, text_of
from trio_gateway.contract import Ending, Outcome
from trio_gateway.errors import UpstreamFailed, UpstreamFault
from trio_gateway.testing import (
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    Event,
    FakeAttempt,
    FakeScript,
    Head,
    Hold,
    RecordingClient,
    Wait,
    WorkerSet,
    chat_answer,
    chat_chunk,
    chat_stream,
    completion_stream,
    error_answer,
    error_event,
    make_request,
    make_worker,
    unreachable,
)

SSE: Final = Head()
JSON_HEAD: Final = Head(200, (("content-type", "application/json"), ("transfer-encoding", "chunked")))
WORD: Final = chat_chunk({"content": "x"})
STOP: Final = chat_chunk({}, finish="stop")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table, before commit, with the failure at the first worker.

    Attributes:
        elsewhere: tried again, at another worker.
        fault, out: counted against the worker; the worker is left alone for a while.
        code, status: what a client is told when there is no other worker.
    """

    script: FakeScript | Exception
    elsewhere: bool
    fault: bool
    out: bool
    code: str
    status: int
    stream: bool = True


def _row(name: str, row: Row) -> object:
    return pytest.param(row, id=name)


def _inside(event: Event, *, stream: bool = True) -> FakeScript:
    return (SSE, event, EndChunks())


ROWS: Final = [
    # -- never executed
    _row("refused", Row(unreachable(), True, True, False, "engine_failed", 502)),
    _row("503", Row(error_answer(503), True, False, True, "engine_overloaded", 503)),
    _row("429", Row(error_answer(429), True, False, True, "engine_overloaded", 429)),
    _row("503 in a stream", Row(_inside(error_event(code=503)), True, False, True, "engine_overloaded", 503)),
    _row("429 in a stream", Row(_inside(error_event(code=429)), True, False, True, "engine_overloaded", 429)),
    _row(
        "503 in a 200",
        Row(error_answer(200, code=503), True, False, True, "engine_overloaded", 503, stream=False),
    ),
    _row(
        "abort without content",
        Row((SSE, chat_chunk({}, finish="abort"), EndChunks()), True, False, True, "engine_overloaded", 503),
    ),
    _row("404", Row(error_answer(404, "no such model"), True, False, False, "model_not_found", 404)),
    # -- perhaps executed
    _row("500", Row(error_answer(500), True, True, False, "engine_failed", 502)),
    _row("502", Row(error_answer(502), True, True, False, "engine_failed", 502)),
    _row("424", Row(error_answer(424), True, True, False, "engine_failed", 502)),
    _row("504", Row(error_answer(504), True, True, False, "engine_failed", 502)),
    _row("500 in a stream", Row(_inside(error_event()), True, True, False, "engine_failed", 502)),
    _row(
        "an event named error",
        Row(_inside(Event({"message": "x"}, "error")), True, True, False, "engine_failed", 502),
    ),
    _row("cut before a head", Row((CloseReset(),), True, True, False, "engine_failed", 502)),
    _row("cut after the head", Row((SSE, CloseFin()), True, True, False, "engine_failed", 502)),
    _row(
        "cut after the role",
        Row((SSE, chat_chunk({"role": "assistant"}), CloseReset()), True, True, False, "engine_failed", 502),
    ),
    _row("ended without content", Row((SSE, EndChunks()), True, True, False, "engine_failed", 502)),
    _row(
        "DONE without content",
        Row((SSE, Event("[DONE]"), EndChunks()), True, True, False, "engine_failed", 502),
    ),
    _row(
        "no JSON",
        Row((SSE, Event("{nonsense"), EndChunks()), True, True, False, "engine_protocol_error", 502),
    ),
    _row("JSON for a stream", Row(chat_answer(), True, True, False, "engine_protocol_error", 502)),
    _row(
        "a stream for JSON",
        Row(chat_stream("x"), True, True, False, "engine_protocol_error", 502, stream=False),
    ),
    _row(
        "a cut answer",
        Row(
            (JSON_HEAD, Chunk(b'{"choices":['), CloseFin()),
            True,
            True,
            False,
            "engine_failed",
            502,
            stream=False,
        ),
    ),
    _row(
        "half an answer",
        Row(
            (JSON_HEAD, Chunk(b'{"choices":['), EndChunks()),
            True,
            True,
            False,
            "engine_failed",
            502,
            stream=False,
        ),
    ),
    _row(
        "an answer without a finish",
        Row(chat_answer(finish=None), True, True, False, "engine_failed", 502, stream=False),  # type: ignore[arg-type]
    ),
    _row(
        "an illegal head",
        Row(UpstreamFailed(UpstreamFault.MALFORMED, "?"), True, True, False, "engine_protocol_error", 502),
    ),
    # -- never to be repeated
    _row(
        "out of memory",
        Row(error_answer(500, "CUDA out of memory"), False, False, False, "engine_out_of_memory", 503),
    ),
    _row("400", Row(error_answer(400, "bad"), False, False, False, "invalid_value", 400)),
    _row("413", Row(error_answer(413, "big"), False, False, False, "request_too_large", 413)),
    _row("422", Row(error_answer(422, "odd"), False, False, False, "invalid_value", 422)),
    _row("501", Row(error_answer(501, "not here"), False, False, False, "invalid_value", 400)),
    _row(
        "400 in a stream",
        Row(_inside(error_event("bad", code=400)), False, False, False, "invalid_value", 400),
    ),
    _row("401", Row(error_answer(401), False, False, False, "engine_credentials", 502)),
    _row("403", Row(error_answer(403), False, False, False, "engine_credentials", 502)),
    _row("307", Row(error_answer(307), False, False, False, "engine_credentials", 502)),
]


@pytest.mark.parametrize("row", ROWS)
async def test_before_content_a_failure_is_tried_again_where_that_may_help(
    row: Row, autojump_clock: MockClock
) -> None:
    good = chat_stream("good") if row.stream else chat_answer("good")
    async with rigged(row.script, good) as rig:
        running = await rig.run(make_request(stream=row.stream))
        book = rig.workers.fleet.books["w1"]
        assert (book.faults, "m1" in book.outages) == (int(row.fault), row.out)
        if row.elsewhere:
            assert rig.engine.workers == ["w1", "w2"]
            assert [a.attempt_id[-3:] for a in rig.engine.attempts] == ["-01", "-02"]
            assert rig.record.outcome == "completed"
            assert b"good" in running.client.received
            assert (rig.record.attempts, rig.record.worker) == (2, "w2")
            assert sum(rig.books.retries.values()) == 1
        else:
            assert rig.engine.workers == ["w1"]
            assert running.client.problem is not None
            assert (running.client.problem.code, running.client.problem.status) == (row.code, row.status)


@pytest.mark.parametrize("row", ROWS)
async def test_a_failure_that_can_not_be_tried_elsewhere_is_an_ordinary_error_answer(
    row: Row, autojump_clock: MockClock
) -> None:
    alone = WorkerSet(make_worker("w1"))
    async with rigged(row.script, workers=alone, max_attempts=1) as rig:
        running = await rig.run(make_request(stream=row.stream))
        problem = running.client.problem
        assert problem is not None
        assert (problem.code, problem.status) == (row.code, row.status)
        assert running.client.finished
        record = rig.record
        assert (record.code, record.status, record.phase) == (row.code, row.status, "before_headers")
        expected = Outcome.UPSTREAM_FAILED if row.status in (502, 504) else Outcome.REFUSED
        assert record.outcome == expected
        assert (problem.retry_after is not None) is (row.code == "engine_overloaded")
        assert problem.final is (
            row.code not in ("engine_overloaded", "engine_failed", "engine_protocol_error")
        )
        assert rig.workers.fleet.books["w1"].faults == int(row.fault)


async def test_an_engines_words_reach_the_caller_that_caused_them_but_no_secrets(
    autojump_clock: MockClock,
) -> None:
    worker = make_worker("w1", api_key="sk-secret")
    message = f"prompt is too long; see {worker.url} with sk-secret"
    async with rigged(error_answer(400, message, type_="odd_error"), workers=WorkerSet(worker)) as rig:
        running = await rig.run()
        problem = running.client.problem
        assert problem is not None
        assert problem.message == "prompt is too long; see *** with ***"
        assert problem.type == "odd_error"


async def test_a_wide_bound_keeps_an_answer_small(autojump_clock: MockClock) -> None:
    async with rigged(chat_answer("x" * 5000), answer_bytes=4000) as rig:
        running = await rig.run(make_request(stream=False))
        assert running.client.problem is not None
        assert running.client.problem.code == "engine_protocol_error"
        assert rig.engine.workers == ["w1"]  # it would be as large elsewhere


async def test_an_event_over_its_bound_is_a_malformed_stream(autojump_clock: MockClock) -> None:
    async with rigged(chat_stream("x" * 5000), chat_stream("y"), event_bytes=4000) as rig:
        running = await rig.run()
        assert rig.engine.workers == ["w1", "w2"]
        assert text_of(running.client) == "y"


# After content --------------------------------------------------------------------------------------------

TRUNCATED: Final = [
    pytest.param((CloseFin(),), "engine_failed", id="closed"),
    pytest.param((CloseReset(),), "engine_failed", id="reset"),
    pytest.param((EndChunks(),), "engine_failed", id="a proper end"),
    pytest.param((Event("[DONE]"), EndChunks()), "engine_failed", id="DONE"),
    pytest.param((error_event(), EndChunks()), "engine_failed", id="an error"),
    pytest.param((error_event(code=503), EndChunks()), "engine_overloaded", id="an overload"),
    pytest.param((error_event(code=400), EndChunks()), "invalid_value", id="a complaint"),
    pytest.param((STOP, error_event(), EndChunks()), "engine_failed", id="an error after the finish"),
    pytest.param((chat_chunk({}, finish="abort"), Event("[DONE]")), "engine_overloaded", id="abort"),
    pytest.param((STOP, CloseReset()), "engine_failed", id="a reset after the finish"),
]


@pytest.mark.parametrize(("end", "code"), TRUNCATED)
async def test_a_truncated_answer_never_looks_finished_and_never_moves(
    end: FakeScript, code: str, autojump_clock: MockClock
) -> None:
    async with rigged((SSE, WORD, *end), chat_stream("other")) as rig:
        running = await rig.run()
        client = running.client
        assert text_of(client) == "x"
        assert b"[DONE]" not in client.events
        assert error_of(client)["code"] == code
        assert client.finished
        assert rig.engine.workers == ["w1"]
        record = rig.record
        assert (record.outcome, record.phase, record.code) == ("upstream_failed", "after_content", code)
        gateway = error_of(client)["gateway"]
        assert (gateway["outcome"], gateway["phase"]) == ("upstream_failed", "after_content")
        assert gateway["retryable"] is False


async def test_one_unfinished_choice_of_several_is_a_truncated_answer(autojump_clock: MockClock) -> None:
    script = (SSE, chat_chunk({"content": "x"}, index=1), STOP, Event("[DONE]"), EndChunks())
    async with rigged(script) as rig:
        running = await rig.run(make_request(n=2))
        assert error_of(running.client)["code"] == "engine_failed"
        assert rig.workers.fleet.books["w1"].faults == 1


@pytest.mark.parametrize("stream", [chat_stream, completion_stream])
async def test_clients_that_look_only_for_a_finish_reason_can_get_one(
    stream: type, autojump_clock: MockClock
) -> None:
    script = (*chat_stream("x", finish=None, done=False, end=False), CloseReset())
    async with rigged(script, error_style="finish_reason") as rig:
        running = await rig.run()
        assert b'"finish_reason":"error"' in running.client.events[-2]
        assert error_of(running.client)["code"] == "engine_failed"
        assert b"[DONE]" not in running.client.events


async def test_a_deadline_in_that_style_says_the_finish_reason_too(autojump_clock: MockClock) -> None:
    script = (*chat_stream("x", finish=None, done=False, end=False), Hold())
    async with rigged(script, error_style="finish_reason") as rig:
        running = await rig.run(make_request(seconds=5))
        assert b'"finish_reason":"error"' in running.client.events[-2]
        assert error_of(running.client)["code"] == "deadline_exceeded"


# Silence --------------------------------------------------------------------------------------------------


async def test_an_engine_without_a_first_token_is_tried_elsewhere_once(autojump_clock: MockClock) -> None:
    async with rigged((Hold(),), chat_stream("good"), first_token=7.0) as rig:
        running = await rig.run()
        assert (text_of(running.client), rig.engine.workers) == ("good", ["w1", "w2"])
        assert running.ended_after == 7
        assert rig.workers.fleet.books["w1"].faults == 1
        assert rig.books.retries == {"first_token": 1}


async def test_two_engines_without_a_first_token_are_a_timeout(autojump_clock: MockClock) -> None:
    async with rigged((Hold(),), first_token=7.0, heartbeat_after=0) as rig:
        running = await rig.run()
        assert running.client.problem is not None
        assert (running.client.problem.code, running.client.problem.status) == ("first_token_timeout", 504)
        assert running.client.problem.final  # our own retry was made
        assert running.ended_after == 14
        assert rig.record.outcome == "upstream_failed"


ERROR_TEXT: Final = b'{"error":{"message":"top_k is too small"}}'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "rest",
    [
        pytest.param((Hold(),), id="that is not ended"),
        pytest.param((Chunk(b" "), Wait(0.5)) * 400, id="that goes on and on"),
        pytest.param((Wait(2.9), Chunk(b" "), EndChunks()), id="that ends late"),
    ],
)
async def test_an_error_is_judged_by_what_came_of_it_in_time(
    stream: bool, rest: FakeScript, autojump_clock: MockClock
) -> None:
    script = (Head(400, JSON_HEAD.headers), Chunk(ERROR_TEXT), *rest)
    async with rigged(script, first_token=100.0) as rig:
        running = await rig.run(make_request(stream=stream))
        problem = running.client.problem
        assert problem is not None
        assert (problem.status, problem.message) == (400, "top_k is too small")
        assert 2.5 < running.ended_after <= 3
        assert (rig.engine.closed, rig.engine.kept) == ((0, 1) if EndChunks() in rest else (1, 0))


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_of_which_nothing_comes_is_judged_by_its_status(
    stream: bool, autojump_clock: MockClock
) -> None:
    good = chat_stream("good") if stream else chat_answer("good")
    async with rigged((Head(500), Hold()), good, first_token=100.0) as rig:
        running = await rig.run(make_request(stream=stream))
        assert running.client.problem is None
        assert rig.engine.workers == ["w1", "w2"]
        assert running.ended_after == 3
        assert rig.books.retries == {"error": 1}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param((SSE, Wait(6), chat_chunk({"role": "assistant"}), Hold()), id="a role is no output"),
        pytest.param((SSE, *(Chunk(b": ping\n\n"), Wait(1)) * 20), id="comments are none"),
        pytest.param((SSE, *(chat_chunk({"content": ""}), Wait(1)) * 20), id="empty deltas are none"),
    ],
)
async def test_only_a_committing_event_stops_the_first_clock(
    script: FakeScript, autojump_clock: MockClock
) -> None:
    async with rigged(script, chat_stream("good"), first_token=7.0) as rig:
        running = await rig.run()
        assert text_of(running.client) == "good"
        assert running.ended_after == 7


async def test_each_attempt_has_a_first_clock_of_its_own_and_the_deadline_is_over_all(
    autojump_clock: MockClock,
) -> None:
    async with rigged((Hold(),), first_token=7.0) as rig:
        running = await rig.run(make_request(seconds=10))
        assert running.client.problem is not None
        assert running.client.problem.code == "deadline_exceeded"
        assert running.ended_after == 10
        assert [round(attempt.at) for attempt in rig.engine.attempts] == [0, 7]
        assert [book.faults for book in rig.workers.fleet.books.values()] == [1, 0]


async def test_after_content_silence_is_an_upstream_failure(autojump_clock: MockClock) -> None:
    script = (SSE, WORD, Wait(4), WORD, Hold())
    async with rigged(script, between_events=5.0) as rig:
        running = await rig.run()
        assert text_of(running.client) == "xx"
        assert error_of(running.client)["code"] == "engine_failed"
        assert running.ended_after == 9
        assert rig.workers.fleet.books["w1"].faults == 1


async def test_comments_are_no_progress(autojump_clock: MockClock) -> None:
    script: FakeScript = (SSE, WORD, *(Chunk(b": ping\n\n"), Wait(1)) * 20)
    async with rigged(script, between_events=5.0) as rig:
        running = await rig.run()
        assert error_of(running.client)["code"] == "engine_failed"
        assert running.ended_after == 5


async def test_events_that_the_client_does_not_see_are_progress(autojump_clock: MockClock) -> None:
    usage = Event({"choices": [], "usage": {"completion_tokens": 1}})
    script: FakeScript = (SSE, WORD, *(Wait(4), usage) * 3, Wait(4), STOP, Event("[DONE]"), EndChunks())
    async with rigged(script, between_events=5.0) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        assert running.ended_after == 16


async def test_silence_within_a_buffered_answer_is_limited_from_its_first_byte(
    autojump_clock: MockClock,
) -> None:
    script = (JSON_HEAD, Wait(6), Chunk(b'{"choices":'), Wait(4), Chunk(b"["), Hold())
    async with rigged(script, chat_answer("good"), first_token=7.0, between_events=5.0) as rig:
        running = await rig.run(make_request(stream=False))
        assert b"good" in running.client.received
        assert running.ended_after == 15


async def test_a_slow_client_is_not_the_engines_fault(autojump_clock: MockClock) -> None:
    """The channel is full for far longer than the engine may be silent."""
    script: FakeScript = (
        SSE,
        *(chat_chunk({"content": "x" * 3000}) for _ in range(10)),
        STOP,
        Event("[DONE]"),
        EndChunks(),
    )
    async with rigged(
        script, between_events=2.0, buffer_bytes=4000, stall_timeout=30.0, max_lag=500.0
    ) as rig:
        client = RecordingClient(room=1000)
        await rig.trickle(client, 200)
        running = await rig.run(client=client)
        assert is_whole(client)
        assert text_of(client) == "x" * 30_000
        assert running.ended_after > 100
        assert rig.workers.fleet.books["w1"].faults == 0


async def test_a_full_process_is_not_the_engines_fault(autojump_clock: MockClock) -> None:
    """A buffered answer waits for room in the pool for longer than the engine may be silent."""
    opening, closing = b'{"choices":[{"index":0,"message":{"content":"', b'"},"finish_reason":"stop"}]}'
    pieces = [opening, *[b"x" * 500] * 4, closing]
    buffered: FakeScript = (JSON_HEAD, *(Chunk(piece) for piece in pieces), EndChunks())
    big = chat_chunk({"content": "y" * 1000})
    streamed: FakeScript = (SSE, big, big, STOP, Event("[DONE]"), EndChunks())

    def play(attempt: FakeAttempt) -> FakeScript:
        return streamed if attempt.request.stream else buffered

    async with rigged(play, between_events=2.0, first_token=2.0, total_buffer_bytes=1500) as rig:
        client = RecordingClient(room=0)
        slow = rig.start(client=client)
        await trio.sleep(1)
        assert rig.pool.used > 1000
        answers = [rig.start(make_request(stream=False)) for _ in range(2)]
        await trio.sleep(10)
        client.read(10_000)
        for running in (slow, *answers):
            await running.over.wait()
        assert [record.outcome for record in rig.records] == ["completed"] * 3
        assert [book.faults for book in rig.workers.fleet.books.values()] == [0, 0]


async def test_causes_outside_the_engine_are_never_its_fault(autojump_clock: MockClock) -> None:
    async with rigged((Hold(),)) as rig:
        gone, ended = rig.start(), rig.start()
        late = rig.start(make_request(seconds=3))
        await trio.sleep(1)
        gone.client.leave()
        ended.exchange.end(Ending(Outcome.OPERATOR_CANCELLED))
        await late.over.wait()
        assert [book.faults for book in rig.workers.fleet.books.values()] == [0, 0]
        assert [len(book.outages) for book in rig.workers.fleet.books.values()] == [0, 0]
