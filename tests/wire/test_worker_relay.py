"""An agent's records as a client's events: what leaves, in which form, until when; the same for any cut."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wire.grammar import bytewise, pieces_of
from tests.wire.standard import events_by_the_standard
from tests.wire.worker_answers import (
    ACCEPTED,
    END,
    PING,
    STOP,
    STREAMS,
    USAGE,
    A,
    B,
    event,
    finish,
    line,
    lines,
    says,
)
from trio_gateway.contract import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Operation
from trio_gateway.wire._answers import EngineError, Usage
from trio_gateway.wire._relay import StreamShape
from trio_gateway.wire._worker_messages import ReleasedRequest
from trio_gateway.wire._worker_relay import AgentAnswer, AgentRelay, ReleaseReader
from trio_gateway.wire._worker_stream import MAX_LINE

ROOMY = 2 * MAX_LINE
ANSWER_ID = "chatcmpl-ab12-01"
CREATED = 1_700_000_000
MODEL = 'pub"lic/m\u00e9'


def shape(
    *, choices: int = 1, usage: bool = False, running: bool = False, limit: int = ROOMY, receipt: bool = False
) -> StreamShape:
    return StreamShape(choices, usage, running, "up", MODEL, limit, ("sk-secret",), receipt)


shapes = st.builds(
    shape,
    choices=st.sampled_from([1, 1, 2]),
    usage=st.booleans(),
    running=st.booleans(),
    receipt=st.booleans(),
    limit=st.sampled_from([60, ROOMY]),
)


def relayed(
    *pieces: bytes, like: StreamShape | None = None, operation: Operation = CHAT, ended: bool = True
) -> tuple[bytes, AgentRelay]:
    relay = AgentRelay(like or shape(), operation, ANSWER_ID, CREATED)
    out = b"".join(map(relay.feed, pieces))
    return out + (relay.end() if ended else b""), relay


def chunks(out: bytes) -> list[dict[str, Any]]:
    found = events_by_the_standard(out)
    assert b"".join(b"data: " + each.data + b"\n\n" for each in found) == out
    return [json.loads(each.data) for each in found]


def choices(out: bytes) -> list[dict[str, Any]]:
    return [choice for chunk in chunks(out) for choice in chunk["choices"]]


def state(relay: AgentRelay) -> dict[str, Any]:
    told = (
        "committed", "done", "fault", "aborted", "events", "content_events", "progress", "dropped",
        "all_finished", "over", "usage", "receipt", "closing", "sequence", "generated",
    )  # fmt: skip
    return {name: getattr(relay, name) for name in told}


PROTOCOL_ERROR = "engine_protocol_error"


def fault_of(*records: bytes, **like: Any) -> EngineError:
    _, relay = relayed(lines(*records), **like)
    assert relay.fault is not None
    assert relay.over
    assert not relay.all_finished
    return relay.fault


# Any cut ----------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.data(), shapes, st.sampled_from([CHAT, COMPLETIONS, RESPONSES]))
def test_any_cut_of_a_stream_gives_the_same_answer(
    data: st.DataObject, like: StreamShape, operation: Operation
) -> None:
    stream = data.draw(STREAMS)
    whole, one = relayed(stream, like=like, operation=operation)
    cut_up, many = relayed(*data.draw(pieces_of(stream)), like=like, operation=operation)
    assert cut_up == whole
    assert state(many) == state(one)


@settings(max_examples=200)
@given(STREAMS, shapes, st.sampled_from([CHAT, COMPLETIONS]))
def test_what_leaves_is_chunks_in_the_clients_words(
    stream: bytes, like: StreamShape, operation: Operation
) -> None:
    out, relay = relayed(stream, like=like, operation=operation)
    found = chunks(out)
    assert len(found) == relay.events
    assert relay.committed is bool(found)
    for chunk in found:
        assert (chunk["id"], chunk["model"], chunk["created"]) == (ANSWER_ID, MODEL, CREATED)
        assert "error" not in chunk
        assert "usage" not in chunk or like.wants_usage or like.wants_running_usage
        for choice in chunk["choices"]:
            assert choice["index"] < like.choices
    finished = [choice["index"] for chunk in found for choice in chunk["choices"] if choice["finish_reason"]]
    assert len(finished) == len(set(finished))
    assert not relay.done or set(finished) == set(range(like.choices))
    told = hashlib.sha256(b"".join(each.data + b"\n" for each in events_by_the_standard(out))).hexdigest()
    assert relay.receipt == (told if like.receipt else None)
    assert b"sk-secret" not in repr(relay.fault).encode()


# Chat and completions ---------------------------------------------------------------------------------------


def test_a_chat_gets_its_role_once_and_a_finish() -> None:
    out, relay = relayed(lines(ACCEPTED, A, B, STOP, END))
    assert [(c["delta"], c["finish_reason"]) for c in choices(out)] == [
        ({"role": "assistant", "content": "a"}, None),
        ({"content": "b"}, None),
        ({}, "stop"),
    ]
    assert relay.all_finished
    assert relay.closing == b"data: [DONE]\n\n"
    assert relay.usage == Usage(generated=2)
    assert (relay.events, relay.content_events, relay.progress) == (3, 2, 3)
    assert {chunk["object"] for chunk in chunks(out)} == {"chat.completion.chunk"}


def test_a_completion_has_text_in_each_choice() -> None:
    out, _ = relayed(
        lines(ACCEPTED, A, says("b", 1), finish(1), STOP, END), like=shape(choices=2), operation=COMPLETIONS
    )
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices(out)] == [
        (0, "a", None),
        (1, "b", None),
        (1, "", "stop"),
        (0, "", "stop"),
    ]
    assert {chunk["object"] for chunk in chunks(out)} == {"text_completion"}


def test_an_answer_without_output_has_a_role_beside_empty_content() -> None:
    out, _ = relayed(lines(ACCEPTED, STOP, END))
    assert [c["delta"] for c in choices(out)] == [{"role": "assistant", "content": ""}]


def test_thinking_stands_alone_in_front_of_what_is_said_with_it() -> None:
    out, relay = relayed(lines(ACCEPTED, says("a", reasoning="hm"), STOP, END))
    assert [c["delta"] for c in choices(out)][:2] == [
        {"role": "assistant", "reasoning": "hm"},
        {"content": "a"},
    ]
    assert relay.content_events == 2


def test_a_completion_that_says_something_else_has_text_all_the_same() -> None:
    records = (says("", reasoning="hm"), line("tool_call", i=0, name="f"), STOP, END)
    out, _ = relayed(lines(ACCEPTED, *records), operation=COMPLETIONS)
    assert [c["text"] for c in choices(out)] == ["", "", ""]
    assert choices(out)[0]["reasoning"] == "hm"


def test_a_tool_call_comes_in_pieces() -> None:
    first = line("tool_call", i=0, index=0, id="call_1", name="f", arguments="")
    then = line("tool_call", i=0, index=0, arguments='{"x":1}')
    out, relay = relayed(lines(ACCEPTED, first, then, finish(reason="tool_calls"), END))
    assert [c["delta"].get("tool_calls") for c in choices(out)][:2] == [
        [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"x":1}'}}],
    ]
    assert relay.all_finished


def test_fields_without_a_name_here_pass_but_never_in_place_of_ours() -> None:
    raw = {
        "chunk": {"system_fingerprint": "f", "id": "x", "error": {"message": "m"}},
        "choice": {"token_ids": [1], "index": 7},
        "delta": {"refusal": "no", "content": "mine"},
    }
    out, _ = relayed(lines(ACCEPTED, says("", raw=raw), STOP, END))
    chunk = chunks(out)[0]
    assert (chunk["system_fingerprint"], chunk["id"]) == ("f", ANSWER_ID)
    assert "error" not in chunk
    assert chunk["choices"][0]["token_ids"] == [1]
    assert chunk["choices"][0]["index"] == 0
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "refusal": "no"}


@pytest.mark.parametrize(
    ("raw", "commits"),
    [
        ({"delta": {"refusal": ""}}, False),
        ({"choice": {"stop_reason": None}}, False),
        ({"chunk": {"system_fingerprint": "f"}}, False),
        ({"chunk": {"prompt_progress": {"total": 3}}}, True),
        ({"choice": {"token_ids": [1]}}, True),
        ({"delta": {"refusal": "n"}}, True),
    ],
)
def test_only_output_commits(raw: dict[str, Any], commits: bool) -> None:
    out, relay = relayed(lines(ACCEPTED, PING, USAGE, says("", raw=raw)), ended=False)
    assert relay.committed is commits
    assert bool(out) is commits


def test_numbers_that_json_has_no_word_for_are_finite() -> None:
    record = b'{"t":"delta","i":0,"text":"a","n":1,"logprobs":{"content":[{"logprob":-Infinity}]}}'
    out, _ = relayed(lines(ACCEPTED, record, STOP, END))
    assert choices(out)[0]["logprobs"] == {"content": [{"logprob": -9999.0}]}


@pytest.mark.parametrize(("asked", "running"), [(False, False), (True, False), (True, True)])
def test_usage_goes_to_whoever_asked_for_it(asked: bool, running: bool) -> None:
    last = line("usage", prompt_tokens=3, completion_tokens=2, cached_tokens=1, details={"service": 1})
    out, relay = relayed(lines(ACCEPTED, USAGE, A, STOP, last, END), like=shape(usage=asked, running=running))
    told = [chunk.get("usage") for chunk in chunks(out)]
    assert relay.usage == Usage(3, 1, 2)
    total = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert told[:2] == ([total, total] if running else [None, None])
    if asked:
        assert told[2] == {**total, "prompt_tokens_details": {"cached_tokens": 1}, "service": 1}
        assert chunks(out)[2]["choices"] == []
    assert len(told) == 2 + asked


def test_usage_counts_what_came_since_it_was_told() -> None:
    early = line("usage", prompt_tokens=3, completion_tokens=1)
    only_prompt = line("usage", prompt_tokens=4)
    _, relay = relayed(lines(ACCEPTED, A, early, A, B))
    assert relay.usage == Usage(3, None, 3)
    _, relay = relayed(lines(ACCEPTED, A, only_prompt, A))
    assert relay.usage == Usage(4, None, 2)
    _, relay = relayed(lines(ACCEPTED, A, A, A, early, STOP, END))
    assert relay.usage == Usage(3, None, 1)  # the engine knows best
    _, relay = relayed(lines(ACCEPTED, PING, early))
    assert relay.usage == Usage(3, None, 1)
    _, relay = relayed(lines(ACCEPTED, PING, A))
    assert relay.usage == Usage(generated=7)


def test_a_receipt_is_a_comment_in_front_of_the_end() -> None:
    out, relay = relayed(lines(ACCEPTED, A, STOP, END), like=shape(receipt=True))
    digest = hashlib.sha256(b"".join(each.data + b"\n" for each in events_by_the_standard(out))).hexdigest()
    assert relay.closing == f": receipt sha256={digest} events=2\n\ndata: [DONE]\n\n".encode()


def test_pings_are_progress_only_while_more_is_generated() -> None:
    pings = [line("ping", generated=n, paused=False) for n in (0, 1, 1, 4)]
    _, relay = relayed(lines(ACCEPTED, *pings), ended=False)
    assert (relay.progress, relay.generated, relay.committed) == (2, 4, False)


def test_a_record_of_a_kind_that_is_not_known_is_ignored() -> None:
    out, relay = relayed(lines(ACCEPTED, b'{"t":"news","i":"x","text":1}', A, STOP, END))
    assert relay.all_finished
    assert relay.dropped == 1
    assert len(chunks(out)) == 2


def test_the_last_record_may_lack_its_line_end() -> None:
    _, relay = relayed(lines(ACCEPTED, A, STOP) + END)
    assert relay.all_finished


# Endings that are none --------------------------------------------------------------------------------------


def test_a_stream_that_ends_in_the_middle_of_a_line_is_cut() -> None:
    out, relay = relayed(lines(ACCEPTED, A) + b'{"t":"del')
    assert (relay.over, relay.all_finished, relay.fault) == (False, False, None)
    assert len(chunks(out)) == 1


def test_a_stream_without_its_end_is_not_whole() -> None:
    _, relay = relayed(lines(ACCEPTED, A, STOP))
    assert not relay.all_finished


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ((A,), "at the beginning"),
        ((END,), "at the beginning"),
        ((line("error", code="x"),), "at the beginning"),
        ((ACCEPTED, ACCEPTED), "in the middle"),
        ((ACCEPTED, A, END), "before every choice"),
        ((ACCEPTED, STOP, A), "that has its finish"),
        ((ACCEPTED, STOP, STOP), "that has its finish"),
        ((ACCEPTED, says("a", 1)), "nobody asked for"),
        ((ACCEPTED, event({})), "another form"),
        ((ACCEPTED, line("result", status=200, body={})), "another form"),
        ((ACCEPTED, b'{"t":"delta","i":"0","text":"a"}'), "delta can not be read"),
        ((ACCEPTED, b"data: {}"), "can not be read"),
        ((ACCEPTED, b'{"t":"delta","i":0,"text":"x","raw":{"choice":{"a":"\xff"}}}'), "can not be read"),
    ],
)
def test_a_step_outside_of_the_grammar_is_a_protocol_error(records: tuple[bytes, ...], why: str) -> None:
    fault = fault_of(*records)
    assert (fault.status, fault.code) == (502, PROTOCOL_ERROR)
    assert why in fault.message


def test_a_line_over_the_bound_is_a_protocol_error_and_what_stood_before_it_is_kept() -> None:
    huge = says("x" * MAX_LINE)
    out, relay = relayed(lines(ACCEPTED, A, huge, B))
    assert relay.fault is not None
    assert relay.fault.code == PROTOCOL_ERROR
    assert len(chunks(out)) == 1
    fits = says("x" * (MAX_LINE - len(says(""))))
    assert len(fits) == MAX_LINE
    assert relayed(lines(ACCEPTED, fits, STOP, END))[1].all_finished


def test_a_line_that_never_ends_is_given_up_at_the_bound() -> None:
    relay = AgentRelay(shape(limit=100), CHAT, ANSWER_ID, CREATED)
    relay.feed(lines(ACCEPTED))
    relay.feed(b"x" * 101)
    assert relay.fault is not None


@pytest.mark.parametrize(
    ("record", "meaning"),
    [
        (line("error", code="capacity", message="m", retry="elsewhere"), EngineError(429)),
        (line("error", code="capacity", message="m", retry="never"), EngineError(429)),
        (line("error", code="engine_unready", retry="elsewhere"), EngineError(503)),
        (
            line("error", code="out_of_memory", retry="never"),
            EngineError(500, out_of_memory=True, final=True),
        ),
        (
            line("error", code="model_load_failed", retry="elsewhere"),
            EngineError(500, code="model_load_failed"),
        ),
        (line("error", code="engine_failed", retry="elsewhere"), EngineError(500)),
        (line("error", code="engine_failed", retry="never"), EngineError(500, final=True)),
        (line("error", code="whatever", message="secret words"), EngineError(500)),
        (line("error", code="whatever", status=503), EngineError(503)),
        (line("error", code="engine_credentials"), EngineError(401)),
        (
            line("error", code="too_long", message="at sk-secret", status=400, param="messages", type="t"),
            EngineError(400, "at ***", "t", "too_long", "messages"),
        ),
    ],
)
def test_an_error_record_means_what_an_engine_would_have_said(record: bytes, meaning: EngineError) -> None:
    assert fault_of(ACCEPTED, record) == meaning


@pytest.mark.parametrize("code", ["draining", "shutting_down", "aborted"])
def test_a_worker_that_gives_a_request_up_before_output_has_not_executed_it(code: str) -> None:
    _, relay = relayed(lines(ACCEPTED, line("error", code=code, retry="elsewhere")))
    assert (relay.aborted, relay.fault, relay.over) == (True, None, True)
    assert fault_of(ACCEPTED, A, line("error", code=code)) == EngineError(500)


def test_a_choice_that_is_given_up_without_output_has_not_been_executed() -> None:
    _, relay = relayed(lines(ACCEPTED, finish(reason="abort")))
    assert (relay.aborted, relay.over, relay.committed) == (True, True, False)
    assert fault_of(ACCEPTED, A, finish(reason="abort")) == EngineError(500)
    assert fault_of(ACCEPTED, finish(reason="error")) == EngineError(500)


def test_nothing_is_read_behind_the_end() -> None:
    out, relay = relayed(lines(ACCEPTED, STOP, END, A), lines(A))
    assert relay.done
    assert len(chunks(out)) == 1
    assert relay.feed(b"x") == b""


# Responses and messages -------------------------------------------------------------------------------------

CREATED_EVENT = {"type": "response.created", "response": {"model": "up", "status": "in_progress"}}
TEXT_EVENT = {"type": "response.output_text.delta", "sequence_number": 4, "delta": "a"}
DONE_EVENT = {
    "type": "response.completed",
    "sequence_number": 5,
    "response": {"model": "up", "status": "completed", "usage": {"input_tokens": 3, "output_tokens": 2}},
}


def named(*records: bytes, operation: Operation = RESPONSES) -> tuple[list[tuple[str, Any]], AgentRelay]:
    out, relay = relayed(lines(ACCEPTED, *records), operation=operation)
    found = events_by_the_standard(out)
    return [((each.name or b"").decode(), json.loads(each.data)) for each in found], relay


def test_named_events_pass_with_the_public_name_and_the_terminal_one_is_the_closing_word() -> None:
    records = [event(data, data["type"]) for data in (CREATED_EVENT, TEXT_EVENT, DONE_EVENT)]  # type: ignore[arg-type]
    found, relay = named(PING, *records, END)
    assert [name for name, _ in found] == ["response.created", "response.output_text.delta"]
    assert found[0][1]["response"]["model"] == MODEL
    assert found[1][1] == TEXT_EVENT
    assert relay.all_finished
    assert relay.closing.startswith(b"event: response.completed\n")
    assert relay.usage == Usage(3, None, 2)
    assert relay.sequence == 6


def test_named_events_without_a_terminal_one_are_no_whole_answer() -> None:
    _, relay = named(event(TEXT_EVENT), END)
    assert relay.fault == EngineError(502, "the end before the terminal event", code=PROTOCOL_ERROR)


def test_a_terminal_event_is_nothing_before_the_agent_says_that_it_is_the_end() -> None:
    stop = event({"type": "message_stop"})
    _, relay = named(stop, operation=MESSAGES)
    assert (relay.committed, relay.events, relay.all_finished, relay.over) == (False, 0, False, False)
    _, relay = named(stop, END, operation=MESSAGES)
    assert (relay.committed, relay.events, relay.all_finished) == (True, 1, True)


def test_a_failure_among_named_events_is_one() -> None:
    _, relay = named(event({"type": "error", "error": {"message": "m", "code": 429}}, "error"))
    assert relay.fault is not None
    assert relay.fault.status == 429


def test_an_event_behind_the_terminal_one_is_dropped() -> None:
    stop = {"type": "message_stop"}
    found, relay = named(event(stop), event({"type": "ping"}), END, operation=MESSAGES)
    assert relay.all_finished
    assert found == []
    assert relay.dropped == 2  # the terminal one is the closing word
    assert relay.content_events == 0
    assert relay.receipt is None


def test_a_carriage_return_in_an_event_can_not_end_its_line() -> None:
    out, _ = relayed(
        lines(ACCEPTED, line("event", data='{"type":"response.x",\r"delta":"a"}')), operation=RESPONSES
    )
    (found,) = events_by_the_standard(out)
    assert json.loads(found.data) == {"type": "response.x", "delta": "a"}


def test_usage_records_say_nothing_to_a_stream_of_named_events() -> None:
    found, relay = named(USAGE, event(TEXT_EVENT))
    assert len(found) == 1
    assert relay.usage is None
    assert relay.fault is None


# Buffered answers -------------------------------------------------------------------------------------------

BODY = {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}
RESULT = line("result", status=200, body=BODY)


def answered(stream: bytes, *, limit: int = 10_000, pieces: list[bytes] | None = None) -> AgentAnswer:
    answer = AgentAnswer(1, limit, ("sk-secret",))
    for piece in [stream] if pieces is None else pieces:
        answer.feed(piece)
    answer.end()
    return answer


def told(answer: AgentAnswer) -> tuple[object, ...]:
    return answer.result, answer.done, answer.fault, answer.aborted, answer.progress, answer.generated


@settings(max_examples=150)
@given(st.data())
@example(None)
def test_any_cut_of_a_buffered_answer_gives_the_same(data: st.DataObject | None) -> None:
    if data is None:
        stream, pieces = lines(ACCEPTED, RESULT, END), bytewise(lines(ACCEPTED, RESULT, END))
    else:
        stream = data.draw(STREAMS) + data.draw(st.sampled_from([b"", lines(RESULT, END), RESULT]))
        pieces = data.draw(pieces_of(stream))
    assert told(answered(stream)) == told(answered(stream, pieces=pieces))


def test_a_buffered_answer_is_its_result() -> None:
    answer = answered(lines(ACCEPTED, PING, A, STOP, USAGE, RESULT, END))
    assert answer.done
    assert json.loads(answer.body) == BODY
    assert answer.result is not None
    assert answer.result.status == 200
    assert (answer.progress, answer.generated) == (5, 7)


def test_the_bytes_of_a_result_stay_as_they_are() -> None:
    answer = answered(
        lines(ACCEPTED, b'{"t":"result","status":200,"body":{"x":1e0,"y" : 12345678901234567890}}', END)
    )
    assert answer.body == b'{"x":1e0,"y" : 12345678901234567890}'


def test_a_result_may_be_text() -> None:
    answer = answered(
        lines(ACCEPTED, line("result", status=200, body="WEBVTT\n\u00e9", content_type="text/vtt"), END)
    )
    assert answer.body == "WEBVTT\n\u00e9".encode()
    wrong = answered(lines(ACCEPTED, line("result", status=200, body={}, content_type="text/vtt"), END))
    with pytest.raises(ValueError, match="can not be read"):
        _ = wrong.body


@pytest.mark.parametrize(
    "records",
    [
        (RESULT,),
        (ACCEPTED, END),
        (ACCEPTED, RESULT, A),
        (ACCEPTED, RESULT, RESULT),
        (ACCEPTED, event({})),
        (ACCEPTED, b"{"),
    ],
)
def test_a_buffered_answer_outside_of_the_grammar_is_a_protocol_error(records: tuple[bytes, ...]) -> None:
    fault = answered(lines(*records)).fault
    assert fault is not None
    assert (fault.status, fault.code) == (502, PROTOCOL_ERROR)


def test_a_buffered_answer_without_its_end_is_not_done() -> None:
    answer = answered(lines(ACCEPTED, RESULT) + b'{"t":"e')
    assert (answer.done, answer.fault, answer.over) == (False, None, False)
    assert answered(lines(ACCEPTED, RESULT) + END).done


def test_a_result_is_bounded_by_the_answer_and_all_other_lines_by_theirs() -> None:
    roomy = 3 * MAX_LINE
    text = line("result", status=200, body={"x": "y" * (2 * MAX_LINE)})
    assert answered(lines(ACCEPTED, text, END), limit=roomy).done
    over = answered(lines(ACCEPTED, line("result", status=200, body={"x": "y" * roomy}), END), limit=roomy)
    assert over.fault is not None
    never = answered(lines(ACCEPTED) + b"y" * (roomy + MAX_LINE), limit=roomy)
    assert never.fault is not None
    long = answered(lines(ACCEPTED, says("y" * (2 * MAX_LINE)), RESULT, END), limit=roomy)
    assert long.fault is not None
    assert "over" in long.fault.message


def test_failures_of_a_buffered_answer_mean_what_those_of_a_stream_do() -> None:
    assert answered(lines(ACCEPTED, line("error", code="out_of_memory"))).fault == EngineError(
        500, out_of_memory=True
    )
    gave_up = answered(lines(ACCEPTED, line("error", code="draining")))
    assert (gave_up.aborted, gave_up.fault, gave_up.over) == (True, None, True)
    gave_up.feed(lines(RESULT))
    assert gave_up.result is None


def test_a_kind_of_record_that_is_not_known_is_no_part_of_a_buffered_answer() -> None:
    assert answered(lines(ACCEPTED, b'{"t":"news"}', RESULT, END)).done


# Releases ---------------------------------------------------------------------------------------------------

RELEASE = b'{"released":{"id":"ab-1","attempt":2,"generated":5,"kv_released":true}}'


def test_releases_are_read_line_by_line() -> None:
    stream = b"\n" + RELEASE + b'\n\n{"later":1}\n' + RELEASE + b"\n" + RELEASE[:10]
    for pieces in ([stream], bytewise(stream)):
        reader = ReleaseReader()
        found = [release for piece in pieces for release in reader.feed(piece)]
        assert found == [ReleasedRequest("ab-1", 2, 5, True)] * 2
        assert not reader.broken


@pytest.mark.parametrize("bad", [b"{\n", b'{"released":{"id":""}}\n', b"x" * 70_000])
def test_a_line_of_releases_that_can_not_be_read_ends_the_reading(bad: bytes) -> None:
    reader = ReleaseReader()
    assert len(reader.feed(RELEASE + b"\n" + bad)) == 1
    assert reader.broken
    assert reader.feed(RELEASE + b"\n") == []
