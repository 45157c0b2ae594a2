"""The relay core for named events: what may leave, until when; the same for any cut of any stream."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.grammar import bytewise, pieces_of
from tests.wire.standard import events_by_the_standard
from trio_gateway.contract import Style
from trio_gateway.wire._answers import EngineError, Usage
from trio_gateway.wire._named_relay import NamedRelay
from trio_gateway.wire._relay import StreamShape

ROOMY = 10_000
STYLES = (Style.RESPONSES, Style.MESSAGES)


def shape(
    *, rename: bool = False, limit: int = ROOMY, secrets: tuple[str, ...] = (), receipt: bool = False
) -> StreamShape:
    return StreamShape(0, False, False, "org/m", "m" if rename else "org/m", limit, secrets, receipt)


def event(kind: str, *, named: bool = True, **fields: Any) -> bytes:
    name = f"event: {kind}\n".encode() if named else b""
    return name + b"data: " + json.dumps({"type": kind, **fields}).encode() + b"\n\n"


def relayed(style: Style, *pieces: bytes, like: StreamShape | None = None) -> tuple[bytes, NamedRelay]:
    relay = NamedRelay(like or shape(), style, "chatcmpl-1-01")
    return b"".join(map(relay.feed, pieces)), relay


def state(relay: NamedRelay) -> dict[str, Any]:
    told = (
        "committed done fault aborted events content_events progress all_finished over usage sequence closing"
    )
    return {name: getattr(relay, name) for name in (*told.split(), "receipt")}


# One answer of each API, as its engine sends it.
USED = {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
CREATED = event("response.created", sequence_number=0, response={"model": "org/m", "error": None})
ITEM = event("response.output_item.added", sequence_number=1, item={"type": "message", "content": []})
DELTA = event("response.output_text.delta", sequence_number=2, delta="a")
COMPLETED = event(
    "response.completed", sequence_number=3, response={"model": "org/m", "usage": USED, "error": None}
)

START = event("message_start", message={"model": "org/m", "usage": {"input_tokens": 3, "output_tokens": 1}})
BLOCK = event("content_block_start", index=0, content_block={"type": "text", "text": ""})
TEXT = event("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})
STOPPED = event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2})
STOP = event("message_stop")
PING = event("ping")
UNKNOWN = event("of_a_kind_yet_to_come")

# What begins a message that its engine did not begin.
OURS = (
    event(
        "message_start",
        message={
            "id": "msg_1-01",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": "org/m",
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        },
    )
    .replace(b": ", b":")
    .replace(b", ", b",")
    .replace(b"event:", b"event: ")
    .replace(b"data:", b"data: ")
)


def begun(style: Style, *events: bytes) -> list[bytes]:
    """Answer events as clients get them."""
    first = next((each for each in events if each != PING), b"")
    if not first.startswith((b"event: content_block_start", b"event: content_block_delta", STOPPED)):
        return list(events)
    place = events.index(first)
    return [*events[:place], OURS, *events[place:]]


ANSWERS = {
    Style.RESPONSES: ([CREATED, ITEM, DELTA], COMPLETED),
    Style.MESSAGES: ([START, PING, BLOCK, TEXT, STOPPED], STOP),
}
USAGES = {Style.RESPONSES: Usage(3, 1, 2), Style.MESSAGES: Usage(3, None, 2)}
styles = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name.lower())


@styles
def test_an_answer_leaves_as_it_came_and_its_end_is_said_last(style: Style) -> None:
    events, terminal = ANSWERS[style]
    for pieces in ([b"".join(events) + terminal], [*events, terminal], bytewise(b"".join(events) + terminal)):
        answer, relay = relayed(style, *pieces)
        assert answer == b"".join(events)
        assert (relay.closing, relay.all_finished, relay.over) == (terminal, True, True)
        assert relay.usage == USAGES[style]
        assert relay.events == relay.progress == len(events) + 1


@styles
def test_an_answer_without_its_terminal_event_is_cut(style: Style) -> None:
    events, terminal = ANSWERS[style]
    for rest in (b"", b"data: [DONE]\n\n", terminal[:-1], terminal[:-2]):
        _, relay = relayed(style, *events, rest)
        assert relay.end() == b""
        assert (relay.all_finished, relay.over, relay.closing) == (False, False, b"")


def test_an_incomplete_response_is_whole_too() -> None:
    _, relay = relayed(Style.RESPONSES, DELTA, event("response.incomplete", response={}))
    assert relay.all_finished


# Any cut ----------------------------------------------------------------------------------------------------

PARTS: dict[Style, list[bytes]] = {
    Style.RESPONSES: [
        CREATED,
        ITEM,
        DELTA,
        DELTA,
        COMPLETED,
        event("response.failed", response={"error": {"message": "m"}}),
    ],
    Style.MESSAGES: [START, PING, BLOCK, TEXT, TEXT, STOPPED, STOP, event("error", error={"message": "m"})],
}
ODD = [
    b": note\n\n",
    b"data: [DONE]\n\n",
    b"data: hello\n\n",
    b"event: error\ndata: text\n\n",
    b'event: x\ndata: {"error": {"code": 429}}\n\n',
    b"event: x\ndata: {broken\n\n",
    b'data: {"type": "unnamed.delta"}\n\n',
    b'data: {"item": {"type": "error"}}\n\n',
    b'event: x\ndata: {"a":\ndata: NaN}\n\n',
    b"event: x\ndata: {",
]


@st.composite
def streams(draw: st.DrawFn, style: Style) -> bytes:
    usual = st.sampled_from(PARTS[style])
    parts = draw(st.lists(st.one_of(usual, usual, usual, st.sampled_from(ODD)), max_size=8))
    return b"".join(parts).replace(b"\n", draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])))


@settings(max_examples=300)
@given(st.data(), st.sampled_from(STYLES), st.booleans(), st.booleans(), st.sampled_from([ROOMY, 150, 60]))
def test_any_cut_of_a_stream_gives_the_same_answer(
    data: st.DataObject, style: Style, rename: bool, receipt: bool, limit: int
) -> None:
    like = shape(rename=rename, receipt=receipt, limit=limit)
    stream = data.draw(streams(style))
    whole, one = relayed(style, stream, like=like)
    cut_up, many = relayed(style, *data.draw(pieces_of(stream)), like=like)
    assert cut_up == whole
    assert state(many) == state(one)
    if not one.over:
        assert many.dropped == one.dropped


@given(
    st.data(),
    st.sampled_from(STYLES),
    st.lists(st.sampled_from([b"data: ", b"event: ", b"{", b"}", b"\n", b'"type"', b":", b'"error"'])),
)
def test_any_bytes_at_all_are_relayed_the_same_in_any_cut(
    data: st.DataObject, style: Style, parts: list[bytes]
) -> None:
    stream = b"".join(parts)
    whole, one = relayed(style, stream)
    cut_up, many = relayed(style, *data.draw(pieces_of(stream)))
    assert (cut_up, state(many)) == (whole, state(one))


# Before the commit ------------------------------------------------------------------------------------------

QUIET = {
    Style.RESPONSES: [
        CREATED,
        ITEM,
        event("response.in_progress"),
        event("response.queued"),
        event("response.content_part.added"),
        event("response.output_item.added", item={"type": "reasoning"}),
        event("response.output_item.added", item=None),
        event("response.output_item.added", item="x"),
    ],
    Style.MESSAGES: [
        START,
        PING,
        BLOCK,
        event("content_block_start", content_block={"type": "thinking", "thinking": ""}),
    ],
}
LOUD = {
    Style.RESPONSES: [
        DELTA,
        event("response.output_item.added", item={"type": "function_call"}),
        event("response.output_item.added", item={"type": "message", "text": "a"}),
        event("response.reasoning_text.delta", delta="r"),
        event("response.of_a_kind_yet_to_come"),
    ],
    Style.MESSAGES: [
        UNKNOWN,
        STOPPED,
        TEXT,
        event("content_block_start", content_block={"type": "tool_use"}),
        event("content_block_start", content_block={"type": "text", "text": "a"}),
        event("content_block_start", content_block={"type": "thinking", "thinking": "a"}),
    ],
}


@styles
def test_what_is_no_output_is_held_until_output_comes(style: Style) -> None:
    for quiet in QUIET[style]:
        for loud in LOUD[style]:
            answer, relay = relayed(style, quiet)
            assert (answer, relay.committed, relay.events) == (b"", False, 0)
            expected = begun(style, quiet, loud)
            assert relay.feed(loud) == b"".join(expected)
            assert (relay.committed, relay.events) == (True, len(expected))


@styles
def test_what_was_held_dies_with_a_failed_attempt(style: Style) -> None:
    answer, relay = relayed(style, *QUIET[style][:2], event("error", error={"message": "m"}), *LOUD[style])
    assert (answer, relay.events, relay.over) == (b"", 0, True)


@styles
def test_what_is_held_is_bounded(style: Style) -> None:
    quiet = QUIET[style][0]
    _, relay = relayed(style, quiet, quiet, like=shape(limit=2 * len(quiet)))
    assert relay.fault is None
    relay.feed(quiet)
    assert relay.fault == EngineError(
        502, "the engine sends events without end and without content", code="engine_protocol_error"
    )


@styles
@pytest.mark.parametrize("data", [b"{", b'{"a":}', b'{"a":"\xff"}', b'{"a":' + b"[" * 4000])
def test_an_event_that_is_no_json_is_a_fault_before_the_commit(style: Style, data: bytes) -> None:
    answer, relay = relayed(style, b"event: x.delta\ndata: " + data + b"\n\n")
    assert answer == b""
    assert relay.fault == EngineError(502, "an event is not valid JSON", code="engine_protocol_error")


@styles
@pytest.mark.parametrize("name", [b"event: x.delta\n", b""])
@pytest.mark.parametrize("data", [b"{", b'{"a":}', b'{"a":nan}', b'{"a":' + b"[" * 4000, b"{}x"])
def test_an_event_that_is_no_json_is_a_fault_after_the_commit_too(
    style: Style, name: bytes, data: bytes
) -> None:
    loud = LOUD[style][0]
    answer, relay = relayed(style, loud, name + b"data: " + data + b"\n\n" + loud)
    assert answer == loud
    assert relay.fault == EngineError(502, "an event is not valid JSON", code="engine_protocol_error")


@styles
def test_output_in_front_of_a_too_large_event_is_handed_out(style: Style) -> None:
    loud = LOUD[style][0]
    answer, relay = relayed(style, loud + event("x.delta", text="x" * 1000), like=shape(limit=500))
    assert answer == loud
    assert relay.fault == EngineError(502, "an event is over 500 bytes", code="engine_protocol_error")


# Failures ---------------------------------------------------------------------------------------------------


TOLD = {"message": "m", "code": "server_error"}
FAILURES: list[tuple[Style, bytes, tuple[Any, ...]]] = [
    (Style.RESPONSES, event("response.failed", response={"error": TOLD}), ("m", None, "server_error")),
    (
        Style.RESPONSES,
        event("response.failed", response={"error": None}, message="m"),
        ("m", "response.failed"),
    ),
    (Style.RESPONSES, event("response.failed", response=[]), ("", "response.failed")),
    (Style.RESPONSES, event("error", message="m", code="x"), ("m", "error", "x")),
    (
        Style.MESSAGES,
        event("error", error={"type": "overloaded_error", "message": "m"}),
        ("m", "overloaded_error"),
    ),
    (Style.MESSAGES, b"event: error\ndata: text\n\n", ("text",)),
    (Style.MESSAGES, b'event: ping\ndata: {"type": "error", "message": "m"}\n\n', ("m", "error")),
    (Style.MESSAGES, b'data: {"type": "error", "error": {"message": "m"}}\n\n', ("m",)),
    (Style.MESSAGES, b'event: x\ndata: {"error": {"code": "x"}}\n\n', ("", None, "x")),
    (Style.MESSAGES, b'event: x\ndata: {"\\u0065rror": {"code": "x"}}\n\n', ("", None, "x")),
    (Style.MESSAGES, b'event: x\ndata: {"type": "e\\u0072ror", "message": "m"}\n\n', ("m", "error")),
    (Style.RESPONSES, b'event: x.delta\ndata: {"err\\u006fr": {"message": "m"}}\n\n', ("m",)),
]


@pytest.mark.parametrize(
    ("style", "failure", "error"),
    [
        *((style, failure, EngineError(500, *words)) for style, failure, words in FAILURES),
        (Style.RESPONSES, event("error", error={"message": "m", "code": 429}), EngineError(429, "m")),
        (Style.MESSAGES, event("error", error={"status": 503}), EngineError(503)),
    ],
)
def test_a_failure_ends_the_stream_before_and_after_the_commit(
    style: Style, failure: bytes, error: EngineError
) -> None:
    loud = LOUD[style][0]
    for pieces in ([failure], bytewise(failure)):
        assert relayed(style, *pieces)[1].fault == error
        answer, relay = relayed(style, loud, *pieces, loud)
        assert (answer, relay.fault, relay.all_finished) == (loud, error, False)


@styles
def test_an_error_in_the_stream_keeps_secrets(style: Style) -> None:
    for failure in (
        event("error", error={"message": "at sk-secret"}),
        b"event: error\ndata: at sk-secret\n\n",
    ):
        _, relay = relayed(style, failure, like=shape(secrets=("sk-secret",)))
        assert relay.fault == EngineError(500, "at ***")


@styles
def test_nothing_is_read_behind_the_end(style: Style) -> None:
    events, terminal = ANSWERS[style]
    _, relay = relayed(style, *events, terminal + events[-1])
    before = state(relay)
    assert relay.feed(events[-1]) == b""
    assert state(relay) == before


# A message that its engine does not begin -------------------------------------------------------------------


@pytest.mark.parametrize("before", [[], [PING], [b": note\n\n"], [UNKNOWN]])
@pytest.mark.parametrize(
    "first",
    [
        BLOCK,
        TEXT,
        event("content_block_start", content_block={"type": "tool_use"}),
        STOPPED,
    ],
)
def test_a_message_that_begins_amid_is_begun_for_the_client(before: list[bytes], first: bytes) -> None:
    """llama.cpp leaves the beginning out where the first token is half a character."""
    pieces = [*before, first, TEXT, STOPPED, STOP]
    for cut in (pieces, [b"".join(pieces)], bytewise(b"".join(pieces))):
        answer, relay = relayed(Style.MESSAGES, *cut, like=shape(rename=True, receipt=True))
        kept = [each for each in before if each in (PING, UNKNOWN)]
        ours = OURS.replace(b'"org/m"', b'"m"')
        assert answer == b"".join([*kept, ours, first, TEXT, STOPPED])
        assert (relay.all_finished, relay.events) == (True, len(kept) + 5)
        assert relay.usage == Usage(None, None, 2)
        data = [each.data for each in events_by_the_standard(answer + STOP)]
        assert relay.receipt == hashlib.sha256(b"".join(each + b"\n" for each in data)).hexdigest()


@pytest.mark.parametrize("end", [[], [event("content_block_stop", index=0)]])
def test_a_message_without_a_whole_character_is_begun_for_the_client(end: list[bytes]) -> None:
    """llama.cpp then ends a block that it has not begun, which Anthropic's SDKs look for in vain."""
    answer, relay = relayed(Style.MESSAGES, *end, STOPPED, STOP)
    assert answer + relay.closing == OURS + STOPPED + STOP
    assert (relay.all_finished, relay.events, relay.usage) == (True, 3, Usage(None, None, 2))
    assert relay.dropped == len(end)


def test_nothing_is_put_before_what_begins_in_another_way() -> None:
    end = event("content_block_stop")
    for pieces in ([START, TEXT], [START, end], [UNKNOWN, START, TEXT], [UNKNOWN, UNKNOWN], [STOP]):
        answer, relay = relayed(Style.MESSAGES, *pieces)
        assert answer + relay.closing == b"".join(pieces)
        assert relay.dropped == 0


def test_a_message_that_somebody_else_begins_is_left_as_it_is() -> None:
    relay = NamedRelay(shape(), Style.MESSAGES, None)
    pieces = [BLOCK, TEXT, STOPPED]
    assert b"".join(map(relay.feed, [*pieces, STOP])) == b"".join(pieces)
    assert (relay.all_finished, relay.events) == (True, 4)


def test_a_beginning_of_ours_counts_towards_what_is_held() -> None:
    answer, relay = relayed(Style.MESSAGES, BLOCK, like=shape(limit=len(BLOCK)))
    assert (answer, relay.over) == (b"", True)
    assert relay.fault is not None


# Names and edits --------------------------------------------------------------------------------------------


def test_an_event_without_a_name_is_known_by_its_type_at_the_top() -> None:
    answer, relay = relayed(Style.RESPONSES, event("response.output_text.delta", named=False, delta="a"))
    assert answer == event("response.output_text.delta", delta="a")
    nested = b'data: {"item":{"type":"response.completed"},"type":"response.x.delta"}\n\n'
    assert relay.feed(nested) == b"event: response.x.delta\n" + nested
    assert relay.feed(b'data: {"type": 7}\n\n') == b'data: {"type": 7}\n\n'
    escaped = b'data: {"type":"response.f\\u0061iled"}\n\n'
    assert relay.feed(escaped) == b""
    assert relay.fault == EngineError(500, type="response.failed")


@styles
def test_the_model_gets_its_public_name_where_it_stands(style: Style) -> None:
    events, terminal = ANSWERS[style]
    answer, relay = relayed(style, *events, terminal, like=shape(rename=True))
    read = [json.loads(e.data) for e in events_by_the_standard(answer + relay.closing)]
    sent = [json.loads(e.data) for e in events_by_the_standard(b"".join(events) + terminal)]
    for holder in ("response", "message"):
        for value in sent:
            if "model" in value.get(holder, {}):
                value[holder]["model"] = "m"
    assert read == sent


def test_another_name_stays() -> None:
    other = event("response.created", response={"model": "else"})
    for odd in (other, event("response.created", response=None), event("response.created", response="org/m")):
        assert relayed(Style.RESPONSES, odd, DELTA, like=shape(rename=True))[0] == odd + DELTA


def test_an_event_that_must_be_edited_and_can_not_be_is_a_fault() -> None:
    broken = b'event: response.x.delta\ndata: {"response": {"model"\n\n'
    answer, relay = relayed(Style.RESPONSES, DELTA, broken, like=shape(rename=True))
    assert answer == DELTA
    assert relay.fault == EngineError(502, "an event is not valid JSON", code="engine_protocol_error")


def test_infinities_leave_as_numbers() -> None:
    answer, _ = relayed(Style.RESPONSES, b'event: x.delta\ndata: {"p": -Infinity}\n\n')
    assert answer == b'event: x.delta\ndata: {"p": -9999.0}\n\n'


# Counting ---------------------------------------------------------------------------------------------------


def test_an_error_of_ours_continues_the_numbers() -> None:
    assert relayed(Style.RESPONSES)[1].sequence == 0
    assert relayed(Style.RESPONSES, CREATED, ITEM, DELTA)[1].sequence == 3
    assert relayed(Style.RESPONSES, event("x.delta", delta='"sequence_number": 7'))[1].sequence == 0


@styles
def test_what_is_dropped_is_counted(style: Style) -> None:
    loud = LOUD[style][0]
    answer, relay = relayed(style, loud + b": note\n\ndata: hello\n\ndata: [DONE]\n\ndata: [1]\n\n" + loud)
    assert answer == loud + loud
    assert (relay.dropped, relay.events, relay.over) == (3, 2, False)


def test_without_usage_there_is_none() -> None:
    assert relayed(Style.MESSAGES, TEXT)[1].usage is None
    assert relayed(Style.MESSAGES, event("message_delta", usage=[]))[1].usage is None


@styles
def test_a_receipt_covers_what_was_handed_out_and_stands_in_front_of_the_end(style: Style) -> None:
    events, terminal = ANSWERS[style]
    answer, relay = relayed(style, *events, terminal, like=shape(receipt=True))
    sent = events_by_the_standard(answer + terminal)
    digest = hashlib.sha256(b"".join(e.data + b"\n" for e in sent)).hexdigest()
    assert relay.receipt == digest
    comment = f": receipt sha256={digest} events={len(sent)}\n\n".encode()
    assert relay.closing == comment + terminal
    assert relayed(style)[1].receipt is None
