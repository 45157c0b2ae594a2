"""Exchanges at agents: their answers, rejections and failures, and when their slots are free again."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Final

import pytest
import trio
from trio.testing import MockClock

from tests.exchange.rig import Rig, error_of, is_whole, rigged, text_of
from trio_gateway.contract import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    TRANSCRIPTIONS,
    InternalRequest,
    Operation,
    Worker,
)
from trio_gateway.testing import (
    AGENT_HEAD,
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    FakeAttempt,
    FakeScript,
    Head,
    Hold,
    RecordingClient,
    Step,
    Wait,
    WorkerSet,
    agent_failure,
    agent_record,
    agent_rejection,
    agent_report,
    agent_result,
    agent_stream,
    chat_answer,
    chat_stream,
    error_answer,
    error_body,
    make_request,
    make_worker,
    unreachable,
    until,
)
from trio_gateway.wire import REJECTIONS

GRACE: Final = 5.0  # seconds until a slot at an agent is taken for free
ACCEPTED: Final = agent_record("accepted", slot=0)
WORD: Final = agent_record("delta", i=0, text="x", n=1)
STOP: Final = agent_record("finish", i=0, reason="stop")
END: Final = agent_record("end")
GOOD: Final = agent_stream("good")


def agents(*names: str, registered: bool = False, **options: Any) -> WorkerSet:
    """Workers with agents before them; registered ones tell by themselves how they are."""
    workers = WorkerSet(
        *(make_worker(name, kind="agent", cancel_grace=GRACE) for name in names or ("w1", "w2")), **options
    )
    if registered:
        for book in workers.fleet.books.values():
            book.expires_at = math.inf
    return workers


def buffered(**others: Any) -> InternalRequest:
    return make_request(stream=False, **others)


# Answers ------------------------------------------------------------------------------------------------


async def test_a_stream_of_records_becomes_the_clients_stream(autojump_clock: MockClock) -> None:
    async with rigged(agent_stream("he", "llo", usage=(5, 2)), workers=agents()) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        assert text_of(running.client) == "hello"
        assert not any(b"usage" in event for event in running.client.events)
        record = rig.record
        assert (record.outcome, record.worker, record.tokens_prompt, record.tokens_generated) == (
            "completed",
            "w1",
            5,
            2,
        )
        assert rig.engine.kept == 1


async def test_usage_is_given_to_whoever_asked(autojump_clock: MockClock) -> None:
    async with rigged(agent_stream("a", usage=(5, 1)), workers=agents()) as rig:
        running = await rig.run(make_request(wants_usage=True))
        last = json.loads(running.client.events[-2])
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 6)


async def test_without_usage_the_tokens_of_the_records_count(autojump_clock: MockClock) -> None:
    async with rigged(agent_stream("a", "b", "c"), workers=agents()) as rig:
        await rig.run()
        assert rig.record.tokens_generated == 3


async def test_every_choice_is_told_apart(autojump_clock: MockClock) -> None:
    async with rigged(agent_stream("a", "b", choices=3), workers=agents()) as rig:
        running = await rig.run(make_request(n=3))
        chunks = [json.loads(event) for event in running.client.events[:-1]]
        said = dict.fromkeys(range(3), "")
        for chunk in chunks:
            (choice,) = chunk["choices"]
            said[choice["index"]] += choice["delta"].get("content", "")
        assert said == {0: "ab", 1: "ab", 2: "ab"}


async def test_completions_have_texts(autojump_clock: MockClock) -> None:
    async with rigged(agent_stream("a", "b"), workers=agents()) as rig:
        running = await rig.run(make_request(operation=COMPLETIONS))
        chunks = [json.loads(event) for event in running.client.events[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_tool_calls_and_reasoning_are_output(autojump_clock: MockClock) -> None:
    script = (
        AGENT_HEAD,
        ACCEPTED,
        agent_record("delta", i=0, reasoning="hm"),
        agent_record("tool_call", i=0, index=0, id="c1", name="f", arguments="{}"),
        agent_record("finish", i=0, reason="tool_calls"),
        END,
        EndChunks(),
    )
    async with rigged(script, workers=agents()) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        deltas = [json.loads(event)["choices"][0]["delta"] for event in running.client.events[:-1]]
        assert deltas[0]["reasoning"] == "hm"
        assert deltas[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("operation", "events"),
    [
        (RESPONSES, [("response.output_text.delta", "x"), ("response.completed", None)]),
        (MESSAGES, [("content_block_delta", "x"), ("message_stop", None)]),
    ],
)
async def test_named_events_pass_as_they_are(
    operation: Any, events: list[tuple[str, str | None]], autojump_clock: MockClock
) -> None:
    records = [
        agent_record("event", event=name, data=json.dumps({"type": name, "delta": {"text": text}}))
        for name, text in events
    ]
    script: FakeScript = (AGENT_HEAD, ACCEPTED, *records, END, EndChunks())
    async with rigged(script, workers=agents()) as rig:
        running = await rig.run(make_request(operation=operation))
        assert running.client.finished
        assert [name.encode() in bytes(running.client.received) for name, _ in events] == [True, True]
        assert b"[DONE]" not in running.client.received
        assert rig.record.outcome == "completed"


async def test_records_may_come_in_any_pieces(autojump_clock: MockClock) -> None:
    whole = b"".join(step.data for step in agent_stream("h", "é", "llo") if isinstance(step, Chunk))
    pieces = [Chunk(whole[at : at + 3]) for at in range(0, len(whole), 3)]
    async with rigged((AGENT_HEAD, *pieces, EndChunks()), workers=agents()) as rig:
        running = await rig.run()
        assert (text_of(running.client), is_whole(running.client)) == ("héllo", True)


async def test_the_last_record_may_lack_its_line_end(autojump_clock: MockClock) -> None:
    script = (*agent_stream("a", last=None, end=False), Chunk(b'{"t":"end"}'), EndChunks())
    async with rigged(script, workers=agents()) as rig:
        assert is_whole((await rig.run()).client)


async def test_a_result_is_a_buffered_answer(autojump_clock: MockClock) -> None:
    (answer,) = chat_answer("ok", usage=(3, 1))
    async with rigged(agent_result(answer.body), workers=agents()) as rig:  # type: ignore[union-attr]
        running = await rig.run(buffered())
        assert running.client.head is not None
        assert running.client.head.status == 200
        assert json.loads(running.client.received)["choices"][0]["message"]["content"] == "ok"
        assert (rig.record.tokens_prompt, rig.record.tokens_generated) == (3, 1)


async def test_every_operation_without_choices_is_one_result(autojump_clock: MockClock) -> None:
    vectors = {"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "model": "m1"}
    async with rigged(agent_result(vectors), workers=agents()) as rig:
        running = await rig.run(buffered(operation=EMBEDDINGS))
        assert json.loads(running.client.received) == vectors


async def test_a_text_is_passed_as_its_type(autojump_clock: MockClock) -> None:
    script = agent_result("WEBVTT\n\n00:00 é", content_type="text/vtt")
    async with rigged(script, workers=agents()) as rig:
        running = await rig.run(buffered(operation=TRANSCRIPTIONS))
        assert running.client.head is not None
        assert running.client.head.content_type == "text/vtt"
        assert bytes(running.client.received).decode() == "WEBVTT\n\n00:00 é"


@pytest.mark.parametrize(
    ("operation", "kind"),
    [(CHAT, "text/plain"), (EMBEDDINGS, "text/html"), (TRANSCRIPTIONS, "text/event-stream")],
)
async def test_a_text_that_nobody_asked_for_is_a_fault(
    operation: Operation, kind: str, autojump_clock: MockClock
) -> None:
    async with rigged(agent_result("half of it", content_type=kind), workers=agents("w1")) as rig:
        running = await rig.run(buffered(operation=operation))
        assert running.client.problem is not None
        assert (running.client.problem.status, running.client.problem.code) == (502, "engine_protocol_error")


async def test_the_public_name_stands_in_every_answer(autojump_clock: MockClock) -> None:
    (answer,) = chat_answer("ok", model="engines-own")

    def play(attempt: FakeAttempt) -> FakeScript:
        stream = attempt.request.stream
        return agent_stream("ok") if stream else agent_result(answer.body)  # type: ignore[union-attr]

    async with rigged(play, workers=agents()) as rig:
        for stream in (True, False):
            running = await rig.run(make_request(stream=stream, upstream_model="engines-own"))
            assert b"engines-own" not in running.client.received
            assert b'"m1"' in running.client.received


# Rejections ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """What a rejection means, if nobody else is there, or somebody is.

    Attributes:
        code, status: what a client is told when there is no other worker.
        elsewhere: another worker is tried.
        fault, out: counted against the worker; it is left alone for a while.
        states: what is known of a worker that reports: state, unready, missing and failed models.
    """

    code: str
    status: int
    outcome: str
    elsewhere: bool = True
    fault: bool = False
    out: bool = True
    states: tuple[str, bool, int, int] = ("ready", False, 0, 0)


REJECTED: Final = {
    "capacity": Row("engine_overloaded", 429, "refused"),
    "draining": Row("engine_overloaded", 503, "refused", states=("draining", False, 0, 0)),
    "shutting_down": Row("engine_overloaded", 503, "refused", states=("draining", False, 0, 0)),
    "model_not_loaded": Row("model_not_found", 404, "refused", out=False, states=("ready", False, 1, 0)),
    "model_load_failed": Row(
        "engine_failed", 502, "upstream_failed", fault=True, states=("ready", False, 0, 1)
    ),
    "engine_unready": Row("engine_overloaded", 503, "refused", states=("ready", True, 0, 0)),
    "deadline": Row("deadline_exceeded", 504, "deadline_exceeded", elsewhere=False, out=False),
    "a_newer_word": Row("engine_overloaded", 503, "refused"),
}


def test_every_rejection_has_a_row() -> None:
    assert REJECTED.keys() - {"a_newer_word"} == REJECTIONS.keys()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("reason", "row"), REJECTED.items(), ids=REJECTED)
async def test_a_rejection_says_who_is_tried_and_what_is_told(
    reason: str, row: Row, stream: bool, autojump_clock: MockClock
) -> None:
    workers = agents("w1", registered=True)
    async with rigged(agent_rejection(reason, agent_report()), workers=workers, max_attempts=1) as rig:
        running = await rig.run(make_request(stream=stream))
        problem = running.client.problem
        assert problem is not None
        assert (problem.code, problem.status) == (row.code, row.status)
        assert (problem.retry_after is not None) is (row.status in (429, 503))
        assert rig.record.outcome == row.outcome
        book = rig.workers.fleet.books["w1"]
        assert book.faults == row.fault
        assert bool(book.outages) is row.out
        known = book.snapshot
        assert (known.state, known.unready, len(known.missing), len(known.failed)) == row.states
        assert (book.held, book.draining) == (0, 0)  # nothing was begun
        assert (rig.engine.kept, rig.engine.closed) == (1, 0)


@pytest.mark.parametrize(("reason", "row"), REJECTED.items(), ids=REJECTED)
async def test_a_rejection_is_absorbed_by_another_worker(
    reason: str, row: Row, autojump_clock: MockClock
) -> None:
    workers = agents(registered=True)
    async with rigged(agent_rejection(reason, agent_report()), GOOD, workers=workers) as rig:
        running = await rig.run()
        assert is_whole(running.client) is row.elsewhere
        assert rig.engine.workers == ["w1", "w2"][: 1 + row.elsewhere]
        assert running.ended_after == 0  # at once


async def test_a_rejection_costs_no_retry_budget_but_a_failed_load_does(autojump_clock: MockClock) -> None:
    for reason, attempts in (("capacity", 3), ("model_load_failed", 2)):
        async with rigged(agent_rejection(reason), workers=agents("w1", "w2", "w3")) as rig:
            await rig.run()
            assert len(rig.engine.workers) == attempts  # at most one other worker may try the load too


async def test_a_full_agent_is_asked_again_after_a_pause(autojump_clock: MockClock) -> None:
    async with rigged(agent_rejection("capacity"), GOOD, workers=agents("w1")) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        assert running.ended_after == 1


async def test_a_time_that_a_rejection_names_is_kept(autojump_clock: MockClock) -> None:
    script = agent_rejection("capacity", retry_after="7")
    async with rigged(script, GOOD, workers=agents("w1")) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        assert running.ended_after == 7


async def test_what_a_rejection_tells_of_the_worker_is_known_before_the_next_is_placed(
    autojump_clock: MockClock,
) -> None:
    """A snapshot that was behind is mended by the first who is rejected for it."""
    told = agent_report(9, running=4, slots=4)
    async with rigged(agent_rejection("capacity", told), GOOD, workers=agents(registered=True)) as rig:
        await rig.run()
        book = rig.workers.fleet.books["w1"]
        assert (book.snapshot.seq, book.snapshot.running, book.free) == (9, 4, 0)
        running = await rig.run()
        assert is_whole(running.client)
        assert rig.engine.workers == ["w1", "w2", "w2"]


async def test_a_trial_that_is_rejected_for_room_leaves_the_breaker_half_open(
    autojump_clock: MockClock,
) -> None:
    broken = (AGENT_HEAD, ACCEPTED, CloseReset())
    async with rigged(
        *[broken] * 5, agent_rejection("capacity"), GOOD, workers=agents("w1"), max_attempts=1
    ) as rig:
        for _ in range(5):
            await rig.run()
        refused = await rig.run()
        assert refused.client.problem is not None
        assert refused.client.problem.code == "engine_unavailable"
        assert refused.client.problem.retry_after == 10
        assert len(rig.engine.workers) == 5
        await trio.sleep(10)
        rejected = await rig.run()
        assert rejected.client.problem is not None
        assert rejected.client.problem.code == "engine_overloaded"
        await trio.sleep(1)
        assert is_whole((await rig.run()).client)


@pytest.mark.parametrize(
    ("script", "code", "status"),
    [
        (error_answer(400, "bad temperature"), "invalid_value", 400),
        (error_answer(401, "no"), "engine_credentials", 502),
        (error_answer(409, "the attempt is being served"), "invalid_value", 409),
        (error_answer(413, "too long"), "request_too_large", 413),
        (error_answer(500), "engine_failed", 502),
        (error_answer(503), "engine_overloaded", 503),
        ((Head(503, ()), CloseFin()), "engine_overloaded", 503),
        (unreachable(), "engine_failed", 502),
        (chat_stream("of another kind"), "engine_protocol_error", 502),
        (chat_answer("of another kind"), "engine_protocol_error", 502),
    ],
    ids=["400", "401", "409", "413", "500", "503", "503 without a body", "refused", "events", "JSON"],
)
async def test_answers_that_are_no_typed_rejections_are_judged_as_engines_are(
    script: Any, code: str, status: int, autojump_clock: MockClock
) -> None:
    for stream in (True, False):
        async with rigged(script, workers=agents("w1"), max_attempts=1) as rig:
            running = await rig.run(make_request(stream=stream))
            assert running.client.problem is not None
            assert (running.client.problem.code, running.client.problem.status) == (code, status)


# Failures within an answer ------------------------------------------------------------------------------

# Code, further fields, and whether: it is tried elsewhere, counts as a fault; then what is told.
FAILURES: Final[dict[str, tuple[str, dict[str, Any], bool, bool, str, int]]] = {
    "no room": ("capacity", {}, True, False, "engine_overloaded", 429),
    "overloaded": ("overloaded", {}, True, False, "engine_overloaded", 503),
    "draining": ("draining", {}, True, False, "engine_overloaded", 503),
    "aborted": ("aborted", {}, True, False, "engine_overloaded", 503),
    "unready": ("engine_unready", {}, True, False, "engine_overloaded", 503),
    "not loaded": ("model_not_loaded", {}, True, False, "model_not_found", 404),
    "load failed": ("model_load_failed", {}, True, True, "engine_failed", 502),
    "failed": ("engine_failed", {}, True, True, "engine_failed", 502),
    "failed for ever": ("engine_failed", {"retry": "never"}, False, True, "engine_failed", 502),
    "no room, never": ("capacity", {"retry": "never"}, True, False, "engine_overloaded", 429),
    "broke off": ("engine_protocol_error", {}, True, True, "engine_protocol_error", 502),
    "of 500": ("strange", {"status": 500}, True, True, "engine_failed", 502),
    "of 500 for ever": ("strange", {"status": 500, "retry": "never"}, False, True, "engine_failed", 502),
    "nobody read": ("reader_stalled", {}, False, False, "engine_failed", 502),
    "unknown": ("strange", {}, True, True, "engine_failed", 502),
    "out of memory": ("out_of_memory", {}, False, False, "engine_out_of_memory", 503),
    "out of memory, as we say it": (
        "engine_out_of_memory",
        {"retry": "elsewhere"},
        False,
        False,
        "engine_out_of_memory",
        503,
    ),
    "credentials": ("engine_credentials", {}, False, False, "engine_credentials", 502),
    "bad request": ("too_hot", {"status": 400, "message": "cool down"}, False, False, "too_hot", 400),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("code", "fields", "elsewhere", "fault", "told", "status"), FAILURES.values(), ids=FAILURES.keys()
)
async def test_a_failure_before_any_output(
    code: str,
    fields: dict[str, Any],
    elsewhere: bool,
    fault: bool,
    told: str,
    status: int,
    stream: bool,
    autojump_clock: MockClock,
) -> None:
    failing = agent_failure(code, **fields)
    async with rigged(failing, workers=agents("w1"), max_attempts=1) as rig:
        running = await rig.run(make_request(stream=stream))
        problem = running.client.problem
        assert problem is not None
        assert (problem.code, problem.status) == (told, status)
        assert rig.workers.fleet.books["w1"].faults == fault
    (answer,) = chat_answer("good")
    good = GOOD if stream else agent_result(answer.body)  # type: ignore[union-attr]
    async with rigged(failing, good, workers=agents()) as rig:
        running = await rig.run(make_request(stream=stream))
        assert running.client.finished
        assert (running.client.problem is None) is elsewhere
        assert rig.engine.workers == ["w1", "w2"][: 1 + elsewhere]


@pytest.mark.parametrize(
    ("code", "fields", "elsewhere", "fault", "told", "status"), FAILURES.values(), ids=FAILURES.keys()
)
async def test_a_failure_after_some_output_ends_the_stream_and_is_not_tried_again(
    code: str,
    fields: dict[str, Any],
    elsewhere: bool,
    fault: bool,
    told: str,
    status: int,
    autojump_clock: MockClock,
) -> None:
    async with rigged(agent_failure(code, "a", "b", **fields), GOOD, workers=agents()) as rig:
        running = await rig.run()
        assert text_of(running.client) == "ab"
        assert b"[DONE]" not in running.client.received
        # Given up in the middle, it is a failure like any other.
        gave_up = code in ("draining", "aborted")
        assert error_of(running.client)["code"] == ("engine_failed" if gave_up else told)
        assert rig.engine.workers == ["w1"]
        assert rig.record.outcome == "upstream_failed"
        assert rig.workers.fleet.books["w1"].faults == (fault or gave_up)


async def test_an_agent_that_gave_up_a_slow_client_has_not_failed(autojump_clock: MockClock) -> None:
    """It is the client that stalled; the worker is as good as before."""
    script = agent_failure("reader_stalled", "x" * 5000, "b", retry="never")
    async with rigged(script, workers=agents("w1")) as rig:
        client = RecordingClient(room=100)
        running = await rig.run(client=client)
        assert rig.record.outcome == "client_stalled"
        assert client.was_cut
        assert running.ended_after < 1
        assert rig.workers.fleet.books["w1"].faults == 0


async def test_why_an_agent_gave_up_a_slow_client_is_told_to_operators(autojump_clock: MockClock) -> None:
    async with rigged(agent_failure("reader_stalled", retry="never"), workers=agents("w1")) as rig:
        running = await rig.run()
    (failed,) = (step for step in running.exchange.flight if step.what == "attempt_failed")
    assert (failed.detail["worker"], failed.detail["reason"]) == ("w1", "unread")


async def test_an_engines_words_for_its_callers_mistake_are_passed_on(autojump_clock: MockClock) -> None:
    script = agent_failure("too_hot", message="at most 2", status=422, type="BadRequestError", param="t")
    for stream in (True, False):
        async with rigged(script, workers=agents()) as rig:
            problem = (await rig.run(make_request(stream=stream))).client.problem
            assert problem is not None
            assert (problem.status, problem.code, problem.message, problem.type, problem.param) == (
                422,
                "too_hot",
                "at most 2",
                "BadRequestError",
                "t",
            )


@pytest.mark.parametrize(
    ("status", "message", "elsewhere", "code", "told"),
    [
        (400, "bad", False, "invalid_value", 400),
        (404, "no such model", True, "model_not_found", 404),
        (429, "slow down", True, "engine_overloaded", 429),
        (500, "broke", True, "engine_failed", 502),
        (500, "CUDA out of memory", False, "engine_out_of_memory", 503),
        (503, "busy", True, "engine_overloaded", 503),
    ],
)
async def test_a_result_with_an_error_is_judged_by_its_status(
    status: int, message: str, elsewhere: bool, code: str, told: int, autojump_clock: MockClock
) -> None:
    failing = agent_result(error_body(message), status)
    async with rigged(failing, workers=agents("w1"), max_attempts=1) as rig:
        problem = (await rig.run(buffered())).client.problem
        assert problem is not None
        assert (problem.code, problem.status) == (code, told)
    (answer,) = chat_answer("good")
    async with rigged(failing, agent_result(answer.body), workers=agents()) as rig:  # type: ignore[union-attr]
        await rig.run(buffered())
        assert rig.engine.workers == ["w1", "w2"][: 1 + elsewhere]


def _line(text: bytes) -> Chunk:
    return Chunk(text + b"\n")


# What leaves the grammar, behind a good beginning; none of it is ever taken for a whole answer.
OUT_OF_GRAMMAR: Final[dict[str, tuple[Step, ...]]] = {
    "no JSON": (ACCEPTED, _line(b"nonsense")),
    "no beginning": (WORD,),
    "two beginnings": (ACCEPTED, ACCEPTED),
    "a choice that nobody asked for": (ACCEPTED, agent_record("delta", i=1, text="x")),
    "output behind the finish": (ACCEPTED, STOP, WORD),
    "two finishes": (ACCEPTED, STOP, STOP),
    "the end before the finish": (ACCEPTED, WORD, END),
    "a named event": (ACCEPTED, agent_record("event", data="{}")),
    "a result": (ACCEPTED, agent_record("result", status=200, body={})),
    "no text": (ACCEPTED, agent_record("delta", i=0, text=1)),
    "no UTF-8": (ACCEPTED, _line(b'{"t":"delta","i":0,"text":"\xff"}')),
    "half a surrogate": (ACCEPTED, _line(b'{"t":"delta","i":0,"text":"\\ud800"}')),
    "a long line": (ACCEPTED, _line(b'{"t":"delta","i":0,"text":"' + b"x" * 1_100_000 + b'"}')),
    "an endless line": (ACCEPTED, Chunk(b"x" * 1_100_000), Hold()),
}
CUT: Final[dict[str, tuple[Step, ...]]] = {
    "no end": (ACCEPTED, WORD, STOP, EndChunks()),
    "nothing": (EndChunks(),),
    "half a record": (ACCEPTED, WORD, Chunk(b'{"t":"fini'), EndChunks()),
    "broken within a record": (ACCEPTED, WORD, Chunk(b'{"t":"fini'), CloseReset()),
    "broken between records": (ACCEPTED, WORD, CloseFin()),
    "broken before the end": (ACCEPTED, WORD, STOP, CloseReset()),
}


@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize(
    ("steps", "code"),
    [
        *(pytest.param(steps, "engine_protocol_error", id=name) for name, steps in OUT_OF_GRAMMAR.items()),
        *(pytest.param(steps, "engine_failed", id=name) for name, steps in CUT.items()),
    ],
)
async def test_what_leaves_the_grammar_or_is_cut_is_a_fault_and_never_looks_finished(
    steps: tuple[Step, ...], code: str, output: bool, autojump_clock: MockClock
) -> None:
    if output and steps[0] is ACCEPTED:
        steps = (ACCEPTED, WORD, *steps[1:])
    committed = WORD in steps or STOP in steps
    async with rigged((AGENT_HEAD, *steps), GOOD, workers=agents()) as rig:
        running = await rig.run()
        assert rig.workers.fleet.books["w1"].faults == 1
        if committed and steps[0] is ACCEPTED:
            assert b"[DONE]" not in running.client.received
            assert error_of(running.client)["code"] == code
            assert rig.engine.workers == ["w1"]
        else:
            assert is_whole(running.client)
            assert rig.engine.workers == ["w1", "w2"]


BAD_RESULTS: Final[dict[str, tuple[Step, ...]]] = {
    "no result": (ACCEPTED, END, EndChunks()),
    "no end": (ACCEPTED, agent_record("result", status=200, body={"choices": []}), EndChunks()),
    "two results": (ACCEPTED, *[agent_record("result", status=200, body={})] * 2, END, EndChunks()),
    "no JSON": (ACCEPTED, _line(b'{"t":"result","status":200,"body":{]}'), END, EndChunks()),
    "not what was asked for": (ACCEPTED, agent_record("result", status=200, body=[1]), END, EndChunks()),
    "a text that is none": (
        ACCEPTED,
        agent_record("result", status=200, body={"a": 1}, content_type="text/plain"),
        END,
        EndChunks(),
    ),
    "broken": (ACCEPTED, CloseReset()),
    "too large": (ACCEPTED, agent_record("result", status=200, body="x" * 3000), END, EndChunks()),
}


@pytest.mark.parametrize("steps", BAD_RESULTS.values(), ids=BAD_RESULTS.keys())
async def test_a_buffered_answer_that_is_none_is_a_fault(
    steps: tuple[Step, ...], autojump_clock: MockClock
) -> None:
    async with rigged((AGENT_HEAD, *steps), workers=agents("w1"), answer_bytes=2000) as rig:
        running = await rig.run(buffered())
        assert running.client.problem is not None
        assert running.client.problem.status == 502
        assert rig.record.outcome == "upstream_failed"


async def test_an_infinity_in_an_answer_does_not_fail_it(autojump_clock: MockClock) -> None:
    scores = _line(b'{"t":"result","status":200,"body":{"data":[{"embedding":[NaN,-Infinity]}]}}')
    async with rigged((AGENT_HEAD, ACCEPTED, scores, END, EndChunks()), workers=agents()) as rig:
        running = await rig.run(buffered(operation=EMBEDDINGS))
        assert running.client.problem is None
        json.loads(running.client.received, parse_constant=lambda name: pytest.fail(name))


# Time ---------------------------------------------------------------------------------------------------


def pings(*generated: int, every: float) -> tuple[Step, ...]:
    steps: list[Step] = []
    for number in generated:
        steps += [Wait(every), agent_record("ping", generated=number, paused=False)]
    return tuple(steps)


async def test_pings_that_tell_of_work_keep_a_committed_stream(autojump_clock: MockClock) -> None:
    steps = (AGENT_HEAD, ACCEPTED, WORD, *pings(2, 3, 4, 5, every=9), STOP, END, EndChunks())
    async with rigged(steps, workers=agents(), between_events=10) as rig:
        assert is_whole((await rig.run()).client)


async def test_pings_that_tell_of_nothing_do_not(autojump_clock: MockClock) -> None:
    steps = (AGENT_HEAD, ACCEPTED, WORD, *pings(1, 1, 1, 1, 1, every=3), Hold())
    async with rigged(steps, workers=agents(), between_events=10) as rig:
        running = await rig.run()
        assert error_of(running.client)["code"] == "engine_failed"
        assert running.ended_after == 10


async def test_pings_before_the_first_output_do_not_hold_off_its_limit(autojump_clock: MockClock) -> None:
    steps = (AGENT_HEAD, ACCEPTED, *pings(*range(1, 100), every=1), Hold())
    async with rigged(steps, GOOD, workers=agents(), first_token=10) as rig:
        running = await rig.run()
        assert is_whole(running.client)
        assert running.ended_after == 10
        assert rig.books.retries == {"first_token": 1}


async def test_pings_of_a_buffered_answer_are_its_first_output_and_its_progress(
    autojump_clock: MockClock,
) -> None:
    (answer,) = chat_answer("ok")
    result = agent_result(answer.body)[2:]  # type: ignore[union-attr]
    steps = (AGENT_HEAD, ACCEPTED, *pings(1, 2, 3, 4, every=9), *result)
    async with rigged(steps, workers=agents(), first_token=10, between_events=10) as rig:
        assert (await rig.run(buffered())).client.problem is None
    still = (AGENT_HEAD, ACCEPTED, *pings(1, 1, 1, every=9), *result)
    async with rigged(still, workers=agents("w1"), first_token=10, between_events=10) as rig:
        running = await rig.run(buffered())
        assert running.client.problem is not None
        assert running.client.problem.code == "engine_failed"
        assert running.ended_after == 19


async def test_an_agent_that_only_accepts_is_too_slow(autojump_clock: MockClock) -> None:
    for stream in (True, False):
        async with rigged((AGENT_HEAD, ACCEPTED, Hold()), workers=agents("w1"), first_token=5) as rig:
            running = await rig.run(make_request(stream=stream))
            assert running.client.problem is not None
            assert running.client.problem.code == "first_token_timeout"


# Slots --------------------------------------------------------------------------------------------------


def draining(rig: Rig) -> int:
    return rig.workers.admission.statistics().draining


async def returned_after(rig: Rig) -> float:
    """Seconds until nothing drains."""
    began = trio.current_time()
    await until(lambda: draining(rig) == 0)
    return trio.current_time() - began


async def test_a_whole_answer_gives_the_slot_back_at_once(autojump_clock: MockClock) -> None:
    async with rigged(GOOD, workers=agents()) as rig:
        await rig.run()
        assert draining(rig) == 0


@pytest.mark.parametrize(
    "script",
    [
        agent_stream("a", end=False),
        agent_stream("a", finish=None, last=agent_record("error", code="engine_failed"), end=False),
        agent_stream(finish=None, last=agent_record("error", code="capacity"), end=False),
        (*agent_result({}, 400)[:-1], Hold()),
        agent_stream(finish=None, last=agent_record("error", code="engine_failed"), end=False),
    ],
    ids=["end", "error after output", "error before it", "result", "error of a buffered answer"],
)
async def test_the_last_record_gives_the_slot_back_at_once(
    script: FakeScript, autojump_clock: MockClock
) -> None:
    """An agent says it when its engine has let go, whatever becomes of the HTTP message."""
    stream = not any(b"result" in step.data for step in script if isinstance(step, Chunk))
    async with rigged(script, workers=agents("w1"), max_attempts=1) as rig:
        await rig.run(make_request(stream=stream))
        assert draining(rig) == 0


@pytest.mark.parametrize(
    "script",
    [
        agent_stream("a", last=None),
        (AGENT_HEAD, ACCEPTED, WORD, CloseReset()),
        (AGENT_HEAD, ACCEPTED, ACCEPTED, Hold()),
        (AGENT_HEAD, ACCEPTED, WORD, Chunk(b"nonsense\n"), Hold()),
    ],
    ids=["ended without a last record", "broken", "out of grammar", "nonsense"],
)
async def test_without_a_last_word_the_slot_drains(script: FakeScript, autojump_clock: MockClock) -> None:
    ended = isinstance(script[-1], EndChunks)
    async with rigged(script, workers=agents("w1"), max_attempts=1) as rig:
        await rig.run()
        assert draining(rig) == (0 if ended else 1)  # a message that was read to its end is over
        assert await returned_after(rig) == (0 if ended else GRACE)


async def leave_in_the_middle(rig: Rig) -> Worker:
    """Have a client leave while its answer streams."""
    running = rig.start(client=RecordingClient())
    await until(lambda: bool(running.client.events))
    running.client.leave()
    await running.over.wait()
    assert draining(rig) == 1
    return rig.engine.attempts[-1].worker


STREAMING: Final = (AGENT_HEAD, ACCEPTED, WORD, Hold())


async def test_the_slot_of_a_client_that_left_drains_until_its_grace_is_over(
    autojump_clock: MockClock,
) -> None:
    async with rigged(STREAMING, workers=agents("w1")) as rig:
        await leave_in_the_middle(rig)
        assert await returned_after(rig) == GRACE


@pytest.mark.parametrize("how", ["released", "released_all", "listed"])
async def test_the_slot_of_a_client_that_left_is_free_when_its_agent_says_so(
    how: str, autojump_clock: MockClock
) -> None:
    async with rigged(STREAMING, workers=agents("w1")) as rig:
        worker = await leave_in_the_middle(rig)
        attempt_id = rig.engine.attempts[0].attempt_id
        keeper = rig.workers.drain
        await trio.sleep(2)
        keeper.released(worker, attempt_id[:-2] + "02")  # another attempt, another worker
        keeper.released(make_worker("w1", kind="agent"), attempt_id)
        keeper.listed(worker, [attempt_id])
        assert draining(rig) == 1
        match how:
            case "released":
                keeper.released(worker, attempt_id)
            case "released_all":
                keeper.released_all(worker)
            case _:
                keeper.listed(worker, [])
        assert draining(rig) == 0


async def test_a_tenant_does_not_wait_for_what_drains_but_the_next_placement_does(
    autojump_clock: MockClock,
) -> None:
    workers = WorkerSet(make_worker("w1", kind="agent", slots=1, cancel_grace=GRACE))
    async with rigged(STREAMING, GOOD, workers=workers) as rig:
        worker = await leave_in_the_middle(rig)
        waiting = rig.start()
        await trio.sleep(3)
        assert len(rig.engine.attempts) == 1
        rig.workers.drain.released(worker, rig.engine.attempts[0].attempt_id)
        await waiting.over.wait()
        assert is_whole(waiting.client)
        assert waiting.ended_after == 3
