"""The relay core: what may leave, in which form, until when; the same for any cut of any stream."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.grammar import (
    DONES,
    PUBLIC_MODEL,
    UPSTREAM_MODEL,
    bytewise,
    cut,
    engine_streams,
    pieces_of,
)
from tests.wire.standard import events_by_the_standard
from trio_gateway.contract import CHAT, COMPLETIONS
from trio_gateway.wire._answers import EngineError, Usage
from trio_gateway.wire._relay import StreamRelay, StreamShape, failed_chunk
from trio_gateway.wire._sse import Event

ROOMY = 10_000


def shape(
    choices: int = 1,
    *,
    usage: bool = False,
    running: bool = False,
    rename: bool = False,
    limit: int = ROOMY,
    secrets: tuple[str, ...] = (),
) -> StreamShape:
    public = PUBLIC_MODEL if rename else UPSTREAM_MODEL
    return StreamShape(choices, usage, running, UPSTREAM_MODEL, public, limit, secrets)


shapes = st.builds(shape, st.integers(1, 2), usage=st.booleans(), running=st.booleans(), rename=st.booleans())


def chunk(*choices: dict[str, Any], **fields: Any) -> bytes:
    """A chunk as most engines write it, in its event."""
    value = {"id": "x", "model": UPSTREAM_MODEL, "choices": choices, **fields}
    return event(value)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def says(text: str, index: int = 0, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text}, "finish_reason": reason}


def ends(reason: Any = "stop", index: int = 0) -> dict[str, Any]:
    return {"index": index, "delta": {}, "finish_reason": reason}


ROLE = chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
EMPTY = chunk(ends(None))
A, B = chunk(says("a")), chunk(says("b"))
STOP = chunk(ends())
USAGE = chunk(usage={"prompt_tokens": 3, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"
NO_JSON = EngineError(502, "an event is not valid JSON", code="engine_protocol_error")
FAILED = event({"error": {"message": "m", "code": 503}})


def relayed(*pieces: bytes, like: StreamShape | None = None) -> tuple[bytes, StreamRelay]:
    relay = StreamRelay(like or shape())
    return b"".join(map(relay.feed, pieces)), relay


def state(relay: StreamRelay) -> dict[str, Any]:
    """All that a relay tells about itself, but what it dropped behind the end."""
    told = (
        "committed",
        "done",
        "fault",
        "aborted",
        "events",
        "content_events",
        "progress",
        "all_finished",
        "over",
        "usage",
    )
    return {name: getattr(relay, name) for name in told}


# Any cut ----------------------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(st.data(), shapes)
def test_any_cut_of_a_stream_gives_the_same_answer(data: st.DataObject, like: StreamShape) -> None:
    stream = data.draw(engine_streams(like.choices))
    whole, one = relayed(stream, like=like)
    pieces = data.draw(pieces_of(stream))
    cut_up, many = relayed(*pieces, like=like)
    assert cut_up == whole
    assert state(many) == state(one)
    for relay in (one, many):
        relay.end()
    assert state(many) == state(one)
    if not one.over:
        assert many.dropped == one.dropped


@given(st.data(), shapes)
def test_events_that_come_one_by_one_are_the_same_answer(data: st.DataObject, like: StreamShape) -> None:
    """Whole events in a read take the fast path; the slow one must say the same."""
    stream = data.draw(engine_streams(like.choices))
    ends_of_events = [at + 2 for at in range(len(stream)) if stream[at : at + 2] == b"\n\n"]
    fast, quick = relayed(*cut(stream, ends_of_events), like=like)
    slow, careful = relayed(*bytewise(stream), like=like)
    assert fast == slow
    assert state(quick) == state(careful)


@given(st.data(), shapes, st.integers(0, 150))
def test_the_bound_of_an_event_does_not_depend_on_the_cut(
    data: st.DataObject, like: StreamShape, limit: int
) -> None:
    stream = data.draw(engine_streams(like.choices))
    bounded = StreamShape(
        like.choices,
        like.wants_usage,
        like.wants_running_usage,
        like.upstream_model,
        like.public_model,
        limit,
    )
    whole, one = relayed(stream, like=bounded)
    cut_up, many = relayed(*data.draw(pieces_of(stream)), like=bounded)
    assert cut_up == whole
    assert state(many) == state(one)


@given(
    st.data(),
    st.lists(st.sampled_from([A, ROLE, STOP, USAGE, b"data: ", b"{", b"}", b"\n", b"\r", b'"', b"x"])),
    shapes,
)
def test_any_bytes_at_all_are_relayed_the_same_in_any_cut(
    data: st.DataObject, parts: list[bytes], like: StreamShape
) -> None:
    stream = b"".join(parts)
    whole, one = relayed(stream, like=like)
    cut_up, many = relayed(*data.draw(pieces_of(stream)), like=like)
    assert cut_up == whole
    assert state(many) == state(one)


# What the contract says -------------------------------------------------------------------------------------


@dataclass
class Expected:
    """An answer by the contract, read event by event without any thought of speed."""

    like: StreamShape
    events: list[bytes | dict[str, Any]] = field(default_factory=list)
    held: list[bytes | dict[str, Any]] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    usage: Any = None
    end: str | None = None

    def take(self, event: Event) -> None:
        data = event.data.strip() if not event.data.startswith(b"{") else event.data
        if event.name == b"error":
            self.end = "fault"
        elif data == b"[DONE]":
            self.end = "done"
        elif data.startswith(b"{"):
            self.take_object(data, json.loads(data))

    def take_object(self, data: bytes, value: dict[str, Any]) -> None:
        if value.get("error") or value.get("object") == "error":
            self.end = "fault"
            return
        for choice in value["choices"]:
            reason, output = choice["finish_reason"], has_output(choice)
            if reason in ("abort", "error"):
                self.end = "aborted" if reason == "abort" and not output else "fault"
                return
            if reason and isinstance(reason, str):
                self.finished.add(choice["index"])
        commits = any(c["finish_reason"] or has_output(c) for c in value["choices"])
        usage = value.get("usage")
        self.usage = usage or self.usage
        if usage and not value["choices"] and not self.like.wants_usage:
            return
        edited = self.edit(value)
        self.held.append(data if edited == value else edited)
        if commits or "prompt_progress" in value or self.events:
            self.events += self.held
            self.held = []

    def edit(self, value: dict[str, Any]) -> dict[str, Any]:
        edited = dict(value)
        if value.get("usage") and value["choices"] and not self.like.wants_running_usage:
            del edited["usage"]
        if value["model"] == self.like.upstream_model:
            edited["model"] = self.like.public_model
        return edited


def has_output(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    output = [value for key, value in delta.items() if key != "role"]
    return any([*output, choice.get("text"), choice.get("logprobs"), choice.get("token_ids")])


@settings(max_examples=400)
@given(st.data(), shapes)
def test_the_answer_is_what_the_contract_says(data: st.DataObject, like: StreamShape) -> None:
    stream = data.draw(engine_streams(like.choices))
    expected = Expected(like)
    for found in events_by_the_standard(stream):
        if expected.end is None:
            expected.take(found)

    answer, relay = relayed(stream, like=like)

    events = events_by_the_standard(answer)
    assert len(events) == len(expected.events) == relay.events
    for sent, wanted in zip(events, expected.events, strict=True):
        assert sent.name is None
        if isinstance(wanted, bytes):
            assert sent.data == wanted
        else:
            assert list(json.loads(sent.data).items()) == list(wanted.items())
    assert relay.committed is bool(expected.events)
    ended = {"done": relay.done, "fault": relay.fault is not None, "aborted": relay.aborted}
    assert [name for name, true in ended.items() if true] == ([expected.end] if expected.end else [])
    whole = len(expected.finished) >= like.choices and expected.end in (None, "done")
    assert relay.all_finished is whole
    assert relay.content_events <= relay.events <= relay.progress


@pytest.mark.parametrize("stream", [A, ROLE + A + STOP, chunk(says("\n\ndata: x"))])
def test_what_needs_no_edit_leaves_as_it_came(stream: bytes) -> None:
    for pieces in ([stream], bytewise(stream)):
        assert relayed(*pieces)[0] == stream


@pytest.mark.parametrize("rename", [False, True])
@pytest.mark.parametrize("together", [1, 3, 40])
def test_a_long_stream_is_the_same_answer_however_many_events_a_read_brings(
    together: int, rename: bool
) -> None:
    """Some have no form, and after so many of them nobody looks for one, until one that has is known."""
    formless = chunk({"index": 0, "delta": {"tokens": [1]}, "finish_reason": None})
    for stream in ([formless] * 40, [ROLE, *[formless] * 20, *[A, B] * 10], [ROLE, A, *[formless, B] * 19]):
        expected, one_by_one = relayed(*stream, like=shape(rename=rename))
        pieces = [b"".join(stream[at : at + together]) for at in range(0, len(stream), together)]
        answer, relay = relayed(*pieces, STOP, DONE, like=shape(rename=rename))
        assert answer.startswith(expected)
        assert relay.events == one_by_one.events + 1 == len(stream) + 1
        assert relay.all_finished
        assert (UPSTREAM_MODEL.encode() in answer) is not rename


# Before the commit ------------------------------------------------------------------------------------------

NO_COMMIT = [
    ROLE,
    EMPTY,
    chunk({"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}),
    chunk({"index": 0, "delta": {"content": None, "reasoning_content": None}, "finish_reason": None}),
    chunk({"index": 0, "delta": {"tool_calls": []}, "logprobs": None, "finish_reason": None}),
    chunk({"index": 0, "text": "", "finish_reason": None}),
    chunk({"index": 0, "text": "", "finish_reason": ""}),
    chunk({"index": 0, "delta": None, "finish_reason": 0}),
    chunk(),
    chunk(usage=None),
    event({"choices": None}),
    event({"choices": "x"}),
    event({"choices": [None, "x"]}),
    event({}),
]
COMMIT = [
    A,
    STOP,
    chunk({"index": 0, "delta": {"reasoning": "r"}, "finish_reason": None}),
    chunk({"index": 0, "delta": {"reasoning_content": "r"}, "finish_reason": None}),
    chunk({"index": 0, "delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}),
    chunk({"index": 0, "delta": {"refusal": "no"}, "finish_reason": None}),
    chunk({"index": 0, "delta": {}, "logprobs": {"content": []}, "finish_reason": None}),
    chunk({"index": 0, "delta": {}, "token_ids": [1], "finish_reason": None}),
    chunk({"index": 0, "text": "t", "finish_reason": None}),
    chunk({"index": 0, "text": "", "finish_reason": "length"}),
    chunk({"index": 0, "delta": {}, "finish_reason": None}, prompt_progress={"processed": 1}),
    chunk(ends(None), says("b", 1)),
]


@pytest.mark.parametrize("held", NO_COMMIT, ids=range(len(NO_COMMIT)))
def test_what_is_no_output_is_held_until_output_comes(held: bytes) -> None:
    answer, relay = relayed(held)
    assert (answer, relay.committed, relay.events) == (b"", False, 0)
    assert relay.progress == 1
    assert relay.feed(A) == held + A
    assert (relay.committed, relay.events, relay.content_events) == (True, 2, 1)


@pytest.mark.parametrize("first", COMMIT, ids=range(len(COMMIT)))
def test_output_of_any_kind_commits(first: bytes) -> None:
    answer, relay = relayed(first)
    assert (answer, relay.committed, relay.events) == (first, True, 1)


@pytest.mark.parametrize(
    "end", [FAILED, DONE, b"event: error\ndata: x\n\n", chunk(ends("abort")), chunk(ends("error"))]
)
def test_what_was_held_dies_with_a_failed_attempt(end: bytes) -> None:
    answer, relay = relayed(ROLE, EMPTY, end, A)
    assert (answer, relay.committed, relay.events) == (b"", False, 0)
    assert relay.over


def test_what_is_held_is_bounded() -> None:
    limit = 3 * len(ROLE)
    answer, relay = relayed(ROLE, ROLE, ROLE, like=shape(limit=limit))
    assert (answer, relay.fault) == (b"", None)
    assert relay.feed(ROLE) == b""
    assert relay.fault == EngineError(
        502, "the engine sends events without end and without content", code="engine_protocol_error"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"{}x",
        b'{"choices":[{"delta":{"content":"a"}]}',
        b'{"a":nan}',
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b"{" * 10,
        b'{"a":' + b"[" * 4000 + b"]" * 4000 + b"}",
    ],
)
def test_an_event_that_is_no_json_is_a_fault_before_the_commit(data: bytes) -> None:
    answer, relay = relayed(ROLE, b"data: " + data + b"\n\n", A)
    assert answer == b""
    assert relay.fault == NO_JSON


@pytest.mark.parametrize("rename", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"{}x",
        b"{}}",
        b'{"a":}',
        b"{a:1}",
        b'{"a":1,}',
        b'{"a":"\\x"}',
        b'{"choices":[{"delta":{"content":"a"}]}',
        b'{"choices":[{"delta":{"content":"a}',
        b'{"a":nan}',
        b'{"a":' + b"[" * 4000 + b"]" * 4000 + b"}",
    ],
)
def test_an_event_that_is_no_json_is_a_fault_after_the_commit_too(data: bytes, rename: bool) -> None:
    bad, like = b"data: " + data + b"\n\n", shape(rename=rename)
    begun = relayed(A, B, like=like)[0]
    for pieces in ([bad], [bad + B], bytewise(bad)):
        answer, relay = relayed(A, B, *pieces, B, like=like)
        assert answer == begun
        assert relay.fault == NO_JSON


@pytest.mark.parametrize("rename", [False, True])
def test_events_that_are_json_together_only_are_none(rename: bool) -> None:
    like = shape(rename=rename)
    answer, relay = relayed(A, b'data: {"a":[1,\n\ndata: {"b":2}]}\n\n' + B, like=like)
    assert (answer, relay.fault) == (relayed(A, like=like)[0], NO_JSON)


def test_an_event_that_must_be_edited_and_can_not_be_is_a_fault_after_the_commit() -> None:
    for broken in (b'{"choices": [', b'{"usage":', b'{"a":"finish_reason"', b'{"choices":[],"model":"\xff"}'):
        answer, relay = relayed(A, b"data: " + broken + b"\n\n", B, like=shape(rename=True))
        assert b'"a"' in answer
        assert b'"b"' not in answer
        assert relay.fault == NO_JSON


def test_output_in_front_of_a_too_large_event_is_handed_out() -> None:
    big = chunk(says("x" * 1000))
    for pieces in ([A + B + big], [A, B, big], bytewise(A + B + big)):
        answer, relay = relayed(*pieces, like=shape(limit=500))
        assert answer == A + B
        assert relay.fault == EngineError(502, "an event is over 500 bytes", code="engine_protocol_error")


def test_a_large_event_behind_the_end_is_nobody_s_business() -> None:
    answer, relay = relayed(A + STOP + DONE + chunk(says("x" * 1000)), like=shape(limit=500))
    assert answer == A + STOP
    assert relay.done
    assert relay.fault is None


# The end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", DONES)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_done_has_many_spellings(done: bytes, line_end: bytes) -> None:
    text = (done + b"\n\n").replace(b"\n", line_end)
    for pieces in ([A, text], [A, *bytewise(text)]):
        answer, relay = relayed(*pieces)
        assert (answer, relay.done, relay.over) == (A, True, True)


@pytest.mark.parametrize("last", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE] \r\n", b"data:[DONE]"])
def test_done_may_lack_its_blank_line_at_the_end(last: bytes) -> None:
    _, relay = relayed(A, last)
    assert not relay.done
    relay.end()
    assert relay.done


@pytest.mark.parametrize("last", [b"", b"data: [DON", b"data: {}", b": [DONE]", b"data: [DONE]\ndata: x"])
def test_an_end_without_done_is_not_done(last: bytes) -> None:
    _, relay = relayed(A, last)
    relay.end()
    assert not relay.done
    assert not relay.over


@pytest.mark.parametrize("nearly", [b"[DONE]]", b"DONE", b"[done]", b'"[DONE]"', b"[DONE] x", b"x [DONE]"])
def test_what_is_only_nearly_done_is_noise(nearly: bytes) -> None:
    answer, relay = relayed(A, b"data: " + nearly + b"\n\n", B)
    assert answer == A + B
    assert (relay.done, relay.noise, relay.dropped) == (False, 1, 1)


@pytest.mark.parametrize("end", [DONE, FAILED, chunk(ends("abort"))])
def test_nothing_is_read_behind_the_end(end: bytes) -> None:
    for pieces in ([A + end + B + FAILED + STOP], [A, end, B, FAILED, STOP]):
        answer, relay = relayed(*pieces)
        before = state(relay)
        assert answer == A
        assert relay.feed(B + USAGE) == b""
        relay.end()
        assert state(relay) == before


def test_an_error_that_lost_its_end_is_not_done_later() -> None:
    _, relay = relayed(FAILED + b"data: [DONE]")
    relay.end()
    assert not relay.done


@pytest.mark.parametrize(
    ("choices", "stream", "finished"),
    [
        (1, A, False),
        (1, STOP, True),
        (2, STOP, False),
        (2, STOP + STOP, False),
        (2, STOP + chunk(ends("length", 1)), True),
        (2, chunk(ends("stop", 1), ends("stop", 0)), True),
        (3, chunk(ends("stop", 2), ends("stop", 0)), False),
        (1, chunk({"delta": {}, "finish_reason": "stop"}), True),
        (1, chunk(ends("")), False),
        (1, chunk(ends(0)), False),
        (1, chunk(ends([])), False),
        (1, chunk(ends({"a": 1})), False),
        (1, chunk(ends(True)), False),
        (1, STOP + FAILED, False),
        (1, STOP + chunk(ends("abort")), False),
        (1, STOP + chunk(ends("error")), False),
        (0, b"", True),
    ],
)
def test_an_answer_is_whole_when_every_choice_has_a_finish(
    choices: int, stream: bytes, finished: bool
) -> None:
    _, relay = relayed(stream + DONE, like=shape(choices))
    assert relay.all_finished is finished


def test_a_finish_is_seen_in_every_spelling() -> None:
    for text in (b'{"choices":[{"finish_reason":"stop"}]}', b'{"choices" : [{"finish_reason" : "stop"}]}'):
        _, relay = relayed(A, b"data: " + text + b"\n\n")
        assert relay.all_finished


# Errors in the stream ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (FAILED, EngineError(503, "m")),
        (event({"error": "text"}), EngineError(500, "text")),
        (event({"object": "error", "message": "m", "code": 400}), EngineError(400, "m")),
        (event({"error": {"message": "m"}, "choices": [says("x")]}), EngineError(500, "m")),
        (b'data: {"\\u0065rror":{"message":"m","code":503}}\n\n', EngineError(503, "m")),
        (b'data: {"id":"x","err\\u006Fr":"text"}\n\n', EngineError(500, "text")),
        (b'data: {"object":"\\u0065rror","message":"m","code":400}\n\n', EngineError(400, "m")),
        (b'data: {"choices":[{"finish_reaso\\u006e":"error"}]}\n\n', EngineError(500)),
        (b'event: error\ndata: {"error":{"message":"m","code":429}}\n\n', EngineError(429, "m")),
        (b"event: error\ndata: text\n\n", EngineError(500, "text")),
        (b"event: error\ndata: [DONE]\n\n", EngineError(500, "[DONE]")),
        (b"event: error\ndata\n\n", EngineError(500, "")),
        (chunk(ends("error")), EngineError(500)),
        (chunk(says("x", reason="abort")), EngineError(500)),
    ],
)
def test_an_error_ends_the_stream_before_and_after_the_commit(failure: bytes, error: EngineError) -> None:
    for pieces in ([failure], bytewise(failure)):
        assert relayed(*pieces)[1].fault == error
        answer, relay = relayed(A, *pieces)
        assert (answer, relay.fault, relay.done, relay.aborted) == (A, error, False, False)


def test_escaped_names_are_seen_and_escaped_text_is_text() -> None:
    finish = b'data: {"choices":[{"index":0,"delta":{},"\\u0066inish_reason":"stop"}]}\n\n'
    usage = b'data: {"choices":[],"us\\u0061ge":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
    text = b'data: {"choices":[{"index":0,"delta":{"content":"\\u0022\\u0065rror\\u0022"}}]}\n\n'
    answer, relay = relayed(A, text, text + text, finish, usage, DONE)
    assert answer == A + text * 3 + finish  # nobody asked for usage
    assert relay.usage == Usage(3, None, 2)
    assert (relay.fault, relay.all_finished, relay.content_events) == (None, True, 4)


@pytest.mark.parametrize("nothing", [None, False, 0, "", {}, []])
def test_an_error_of_nothing_is_none(nothing: Any) -> None:
    harmless = chunk(says("a"), error=nothing)
    for pieces in ([harmless], [A, harmless]):
        answer, relay = relayed(*pieces)
        assert answer == b"".join(pieces)
        assert relay.fault is None


def test_an_error_in_the_stream_keeps_secrets() -> None:
    _, relay = relayed(
        event({"error": {"message": "at sk-secret", "code": 400}}), like=shape(secrets=("sk-secret",))
    )
    assert relay.fault == EngineError(400, "at ***")
    named = b"event: error\ndata: sk-secret\n\n"
    assert relayed(named, like=shape(secrets=("sk-secret",)))[1].fault == EngineError(500, "***")


def test_giving_up_is_told_apart_from_failing() -> None:
    _, relay = relayed(ROLE, chunk(ends("abort")))
    assert (relay.aborted, relay.fault, relay.over, relay.all_finished) == (True, None, True, False)


# Usage ------------------------------------------------------------------------------------------------------

RUNNING = chunk(says("a"), usage={"prompt_tokens": 3, "completion_tokens": 1})
IN_FRONT = event({"usage": {"completion_tokens": 1}, "model": UPSTREAM_MODEL, "choices": [says("a")]})


@pytest.mark.parametrize("wanted", [True, False])
def test_usage_at_the_end_passes_only_if_it_was_asked_for(wanted: bool) -> None:
    for pieces in ([A + STOP + USAGE + DONE], bytewise(A + STOP + USAGE + DONE)):
        answer, relay = relayed(*pieces, like=shape(usage=wanted))
        assert answer == A + STOP + (USAGE if wanted else b"")
        assert relay.usage == Usage(3, None, 2)
        assert relay.content_events == 1
        assert relay.events == (3 if wanted else 2)


@pytest.mark.parametrize("running", [RUNNING, IN_FRONT], ids=["at the end", "in front"])
@pytest.mark.parametrize("wanted", [True, False])
def test_running_usage_passes_only_if_it_was_asked_for(running: bytes, wanted: bool) -> None:
    for before in ([], [B]):
        answer, relay = relayed(*before, running, like=shape(usage=True, running=wanted))
        value = json.loads(answer.removeprefix(b"".join(before))[6:])
        assert ("usage" in value) is wanted
        assert value["choices"] == [says("a")]
        assert relay.usage is not None
        assert relay.usage.generated == 1


def test_the_last_usage_counts() -> None:
    _, relay = relayed(RUNNING, chunk(says("b"), usage={"completion_tokens": 2}), STOP)
    assert relay.usage == Usage(generated=2)
    assert relayed(A)[1].usage is None
    assert relayed(chunk(says("a"), usage={"completion_tokens": []}))[1].usage is None


def test_a_null_usage_is_no_usage() -> None:
    with_null = chunk(says("a"), usage=None)
    answer, relay = relayed(with_null)
    assert answer == with_null
    assert relay.usage is None


# Names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b'{"id":"x","object":"o","created":1,"model":"org/m\xc3\xa9","choices":[%s]}',
        b'{ "model" : "org/m\xc3\xa9" , "choices":[%s]}',
        b'{"id":"x\\"","model":"org/m\\u00e9","choices":[%s]}',
        b'{"choices":[%s],"model":"org\\/m\xc3\xa9"}',
        b'{"other":{"model":"org/m\xc3\xa9"},"choices":[%s],"model":"org/m\xc3\xa9"}',
    ],
)
def test_the_model_gets_its_public_name_wherever_it_stands(data: bytes) -> None:
    for choice in (says("a"), ends()):
        whole = b"data: " + data % json.dumps(choice).encode() + b"\n\n"
        for pieces in ([whole], [A, whole]):
            answer, _ = relayed(*pieces, like=shape(rename=True))
            before, after = json.loads(whole[6:]), json.loads(answer.split(b"\n\n")[-2][6:])
            assert after == {**before, "model": PUBLIC_MODEL}


@pytest.mark.parametrize("model", ["another", "", None, ["org/m\u00e9"]])
def test_another_name_stays(model: Any) -> None:
    whole = event({"id": "x", "model": model, "choices": [says("a")]})
    answer, _ = relayed(A, whole, like=shape(rename=True))
    assert answer.endswith(whole)


def test_event_names_of_chat_streams_do_not_pass() -> None:
    answer, _ = relayed(b"event: message\nid: 7\n" + A)
    assert answer == A


# Numbers that JSON has no word for --------------------------------------------------------------------------


def test_infinities_leave_as_numbers_before_and_after_the_commit() -> None:
    printed = A.replace(b'"id":"x"', b'"id":"x","p":[-Infinity,NaN,"NaN"]')
    written = A.replace(b'"id":"x"', b'"id":"x","p":[-9999.0,null,"NaN"]')
    for pieces in ([printed, printed, B], bytewise(printed * 2 + B), [printed * 2 + B]):
        answer, relay = relayed(*pieces)
        assert answer == written * 2 + B
        assert relay.fault is None


# Stray bytes, and events in two reads -----------------------------------------------------------------------


def test_a_stray_carriage_return_ends_a_line_on_either_path() -> None:
    split = b'data: {"id":"x","choices":[],\rdata: "a":1}\n\n'
    fast, _ = relayed(A, split, B)
    slow, _ = relayed(A, *bytewise(split), B)
    assert fast == slow == A + split.replace(b"\r", b"\n") + B
    inside = b'data: {"id":"x","choices":[],"a":"\r"}\n\n'  # ends the event in the middle of a string
    for pieces in ([inside], bytewise(inside)):
        answer, relay = relayed(A, *pieces, B)
        assert answer == A
        assert relay.fault == NO_JSON


@pytest.mark.parametrize("begun", [b"event: error\n", b"data: {\n", b": note\n", b"data: "])
def test_what_looks_like_a_whole_event_may_be_the_rest_of_one(begun: bytes) -> None:
    cut_up, one = relayed(A, begun, B, B)
    whole, other = relayed(A + begun + B + B)
    assert cut_up == whole
    assert state(one) == state(other)


@pytest.mark.parametrize(
    "noise", [b": note\n\n", b"data: hello\n\n", b"id: 7\n\n", b"\n\n", b"data: [1]\n\n", b"event: x\n\n"]
)
def test_noise_in_the_same_read_as_events_does_not_leave(noise: bytes) -> None:
    for read in (noise + B, B + noise + B, B + noise):
        answer, relay = relayed(A, read)
        assert answer == A + B * read.count(B)
        assert relay.events == 1 + read.count(B)


# Receipts ---------------------------------------------------------------------------------------------------


def test_a_receipt_covers_what_was_handed_out_and_stands_in_front_of_the_end() -> None:
    like = StreamShape(1, False, False, UPSTREAM_MODEL, UPSTREAM_MODEL, ROOMY, (), True)
    for pieces in ([ROLE, A, B * 3, STOP, USAGE, DONE], bytewise(ROLE + A + B * 3 + STOP + USAGE + DONE)):
        answer, relay = relayed(*pieces, like=like)
        sent = events_by_the_standard(answer)
        digest = hashlib.sha256(b"".join(e.data + b"\n" for e in sent)).hexdigest()
        assert (relay.receipt, len(sent)) == (digest, 6)
        assert relay.closing == f": receipt sha256={digest} events=6\n\n".encode() + DONE
        assert events_by_the_standard(relay.closing) == [Event(None, b"[DONE]")]


def test_without_a_receipt_the_end_is_done_alone() -> None:
    _, relay = relayed(A, STOP)
    assert (relay.closing, relay.receipt, relay.sequence) == (DONE, None, 0)


# Counting ---------------------------------------------------------------------------------------------------


def test_what_is_dropped_is_counted_and_no_failure() -> None:
    stream = b": ping\n\nid: 1\n\ndata: hello\n\nevent: x\n\ndata: []\n\ndata: null\n\ndata\n\n"
    for pieces in ([A + stream + B], [A, *bytewise(stream), B]):
        answer, relay = relayed(*pieces)
        assert answer == A + B
        assert (relay.noise, relay.dropped) == (4, 7)
        assert (relay.events, relay.content_events, relay.progress) == (2, 2, 2)


def test_many_events_in_one_read_are_counted_one_by_one() -> None:
    answer, relay = relayed(ROLE, A * 3, B * 4 + EMPTY, STOP)
    assert answer == ROLE + A * 3 + B * 4 + EMPTY + STOP
    assert (relay.events, relay.progress) == (10, 10)


@pytest.mark.parametrize(("operation", "key"), [(CHAT, "delta"), (COMPLETIONS, "text")])
def test_a_failed_chunk_ends_a_choice_with_an_error(operation: Any, key: str) -> None:
    (found,) = events_by_the_standard(failed_chunk(operation))
    (choice,) = json.loads(found.data)["choices"]
    assert choice["finish_reason"] == "error"
    assert not choice[key]


@pytest.mark.parametrize(
    ("choices", "indices", "whole"),
    [(1, [7], False), (2, [0, 7], False), (2, [1, 0], True), (1, [0, 7], True)],
)
def test_only_the_expected_choices_make_an_answer_whole(
    choices: int, indices: list[int], whole: bool
) -> None:
    _, relay = relayed(A, *(chunk(ends(index=index)) for index in indices), DONE, like=shape(choices))
    assert relay.all_finished is whole
