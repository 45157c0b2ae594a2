"""Messages of the token protocol: what is read, what is refused, and what a stream's events say."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.contract import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Operation
from trio_gateway.wire import (
    Ack,
    Auth,
    CancelStream,
    DeltaWriter,
    GenerateStream,
    MalformedMessage,
    Resume,
    StreamEnds,
    as_text,
    read_client_message,
    write_token_message,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=128)
COUNTS = st.integers(0, 2**53)
CREDITS = st.none() | st.integers(1, 2**31)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_key_is_read(key: str) -> None:
    assert read_client_message(json.dumps({"type": "auth", "key": key})) == Auth(key)


@given(NAMES, COUNTS, CREDITS)
def test_acknowledgements_are_read_with_and_without_credit(name: str, seq: int, credit: int | None) -> None:
    message = {"type": "ack", "stream_id": name, "seq": seq, "credit": credit}
    assert read_client_message(json.dumps(message)) == Ack(name, seq, credit)
    del message["credit"]
    assert read_client_message(json.dumps(message)) == Ack(name, seq)


@given(NAMES, NAMES, COUNTS, CREDITS)
def test_cancels_and_resumes_are_read(name: str, request_id: str, seq: int, credit: int | None) -> None:
    assert read_client_message(json.dumps({"type": "cancel", "stream_id": name})) == CancelStream(name)
    message = {
        "type": "resume",
        "stream_id": name,
        "request_id": request_id,
        "after_seq": seq,
        "credit": credit,
    }
    assert read_client_message(json.dumps(message)) == Resume(name, request_id, seq, credit)


def test_a_body_keeps_its_bytes_and_unknown_members_are_ignored() -> None:
    body = '{"big": 123456789012345678901234567890, "e": 1e0, "twice": 1, "twice": 2}'
    text = f'{{"new": {{"a": [1]}}, "type": "generate", "stream_id": "s", "body": {body}}}'
    message = read_client_message(text)
    assert isinstance(message, GenerateStream)
    assert bytes(message.body).decode() == body
    assert (message.operation, message.timeout_ms, message.priority) == ("chat.completions", None, None)
    assert (message.credit, message.resumable, message.session) == (None, False, None)


def test_all_that_can_be_said_of_a_stream_is_read() -> None:
    members = {
        "operation": "completions",
        "timeout_ms": 1500,
        "priority": "batch",
        "credit": 7,
        "resumable": True,
        "session": "abc",
    }
    message = read_client_message(json.dumps({"type": "generate", "stream_id": "s", "body": {}, **members}))
    assert {name: getattr(message, name) for name in members} == members


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "1",
        "{}",
        "{",
        '{"type":1}',
        '{"type":"hello"}',
        '{"type":"auth"}',
        '{"type":"auth","key":1}',
        '{"type":"auth","key":"\\ud800"}',
        '{"type":"ack","stream_id":"s"}',
        '{"type":"ack","stream_id":"s","seq":-1}',
        '{"type":"ack","stream_id":"s","seq":1.5}',
        '{"type":"ack","stream_id":"s","seq":true}',
        '{"type":"ack","stream_id":"s","seq":9007199254740993}',
        '{"type":"ack","stream_id":"s","seq":1e400}',
        '{"type":"ack","stream_id":"","seq":1}',
        '{"type":"ack","stream_id":1,"seq":1}',
        '{"type":"ack","stream_id":"s","seq":1,"credit":0}',
        '{"type":"ack","stream_id":"s","seq":1,"credit":2147483649}',
        '{"type":"cancel","stream_id":"' + "x" * 129 + '"}',
        '{"type":"generate","stream_id":"s","body":{},"session":"' + "x" * 1025 + '"}',
        '{"type":"generate","stream_id":"s"}',
        '{"type":"generate","stream_id":"s","body":{},"timeout_ms":0}',
        '{"type":"generate","stream_id":"s","body":{},"resumable":1}',
        '{"type":"generate","stream_id":"s","body":{}}{}',
        '{"type":"resume","stream_id":"s","request_id":"r","after_seq":"1"}',
        "[" * 100_000,
        '{"type":"generate","stream_id":"s","body":' + "[" * 100_000,
        "9" * 10_000,
    ],
)
def test_what_is_no_message_is_malformed(text: str) -> None:
    with pytest.raises(MalformedMessage):
        read_client_message(text)


@given(
    st.text(max_size=200)
    | st.builds(json.dumps, st.dictionaries(st.sampled_from(["type", "seq"]), st.none()))
)
def test_any_text_is_a_message_or_malformed(text: str) -> None:
    with suppress(MalformedMessage):
        read_client_message(text)


def test_messages_of_ours_are_json_of_a_stream_or_of_the_socket_itself() -> None:
    assert write_token_message("queued", "s", position=1) == b'{"type":"queued","stream_id":"s","position":1}'
    assert write_token_message("going_away", deadline_ms=5) == b'{"type":"going_away","deadline_ms":5}'


@given(NAMES, COUNTS, COUNTS, COUNTS)
def test_deltas_are_json_around_the_engine_s_own_bytes(name: str, seq: int, tokens: int, size: int) -> None:
    chunk = b'{"choices":[{"delta":{"content":"%d %s"}}]}'
    written = DeltaWriter(name).write(seq, chunk, tokens, size)
    assert chunk in written
    assert msgspec.json.decode(written) == {
        "type": "delta",
        "stream_id": name,
        "seq": seq,
        "chunk": json.loads(chunk),
        "tokens": tokens,
        "bytes": size,
    }


@given(st.binary())
def test_data_of_engines_is_sent_as_utf_8_whatever_it_is(data: bytes) -> None:
    sent = as_text(data)
    assert sent.decode() == data.decode(errors="replace")


# What events say --------------------------------------------------------------------------------------------


def choice(index: object = 0, reason: object = None, **delta: object) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": reason}]}


def ends_of(operation: Operation, *events: object) -> StreamEnds:
    ends = StreamEnds(operation)
    for event in events:
        ends.take(event if isinstance(event, bytes) else json.dumps(event).encode())
    return ends


def test_events_with_output_are_counted_and_choices_finish_by_index() -> None:
    ends = ends_of(
        CHAT,
        choice(role="assistant"),
        choice(content="a"),
        choice(2, content="b"),
        choice(2, "length", content="c"),
        choice(0, "stop"),
        {"choices": [], "usage": {}},
    )
    assert (ends.tokens, ends.finish_reasons) == (3, ["stop", None, "length"])


def test_an_event_may_stand_for_several() -> None:
    ends = StreamEnds(CHAT)
    ends.take(json.dumps(choice(content="abc")).encode(), 3)
    ends.take(json.dumps(choice(role="assistant")).encode(), 3)
    assert ends.tokens == 3


@pytest.mark.parametrize("index", [None, -1, "0", True, 1.0, 10**9])
def test_an_odd_index_counts_as_the_first(index: object) -> None:
    assert ends_of(CHAT, choice(index, "stop")).finish_reasons == ["stop"]


@pytest.mark.parametrize(
    "event",
    [
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        {"choices": 1},
        {"choices": [1]},
        choice(0, 7),
        choice(0, ""),
    ],
)
def test_odd_events_say_nothing(event: object) -> None:
    ends = ends_of(CHAT, event)
    assert (ends.tokens, ends.finish_reasons) == (0, [])


def test_completions_have_text_in_their_choices() -> None:
    ends = ends_of(COMPLETIONS, {"choices": [{"index": 0, "text": "a", "finish_reason": None}]})
    assert ends.tokens == 1


@pytest.mark.parametrize(
    ("event", "reasons"),
    [
        ({"type": "response.completed", "response": {"status": "completed"}}, ["completed"]),
        ({"type": "response.incomplete", "response": {"status": "incomplete"}}, ["incomplete"]),
        ({"type": "response.completed", "response": {}}, ["completed"]),
        ({"type": "response.incomplete"}, ["incomplete"]),
        ({"type": "response.created", "response": {"status": "in_progress"}}, []),
    ],
)
def test_a_response_ends_with_its_status(event: object, reasons: list[str]) -> None:
    ends = ends_of(RESPONSES, {"type": "response.output_text.delta", "delta": "a"}, {"type": 7}, event)
    assert (ends.tokens, ends.finish_reasons) == (1, reasons)


@pytest.mark.parametrize(
    ("delta", "reasons"),
    [({"stop_reason": "end_turn"}, ["end_turn"]), ({"stop_reason": None}, []), ("x", [])],
)
def test_a_message_ends_with_its_reason(delta: object, reasons: list[str]) -> None:
    ends = ends_of(
        MESSAGES,
        {"type": "content_block_delta", "delta": {"text": "a"}},
        {"type": "content_block_start"},
        {"type": "message_delta", "delta": delta},
    )
    assert (ends.tokens, ends.finish_reasons) == (1, reasons)
