"""Ollama's records as chat events: what leaves, in which form, until when; the same for any cut."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.grammar import bytewise, json_objects, pieces_of
from tests.wire.standard import events_by_the_standard
from trio_gateway.errors import EngineProtocolError
from trio_gateway.wire._answers import EngineError, Usage
from trio_gateway.wire._ollama import OllamaRelay, ollama_answer
from trio_gateway.wire._relay import StreamShape

ROOMY = 10_000
ANSWER_ID = "chatcmpl-ab12-01"
CREATED = 1_700_000_000
MODEL = 'pub"lic/m\u00e9'


def shape(
    *, usage: bool = False, limit: int = ROOMY, secrets: tuple[str, ...] = (), receipt: bool = False
) -> StreamShape:
    return StreamShape(1, usage, False, "up:latest", MODEL, limit, secrets, receipt)


shapes = st.builds(shape, usage=st.booleans(), receipt=st.booleans(), limit=st.sampled_from([60, ROOMY]))


def record(message: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """A record as Ollama writes it, without its line end."""
    value = {"model": "up:latest", "created_at": "2025-01-01T00:00:00Z", **fields}
    if message is not None:
        value["message"] = {"role": "assistant", "content": "", **message}
    return json.dumps({"done": False, **value}, separators=(",", ":"), ensure_ascii=False).encode()


def says(text: str) -> bytes:
    return record({"content": text})


def ends(reason: str | None = "stop", message: dict[str, Any] | None = None, **counts: Any) -> bytes:
    reasons = {} if reason is None else {"done_reason": reason}
    return record(message or {}, done=True, total_duration=5, **reasons, **counts)


A, B, STOP = says("a"), says("b"), ends(prompt_eval_count=3, eval_count=2)
FAILED = b'{"error":"model runner has unexpectedly stopped"}'
CALL = {"function": {"name": "f", "arguments": {"x": 1}}}


def lines(*records: bytes) -> bytes:
    return b"".join(one + b"\n" for one in records)


def relayed(*pieces: bytes, like: StreamShape | None = None, ended: bool = True) -> tuple[bytes, OllamaRelay]:
    relay = OllamaRelay(like or shape(), ANSWER_ID, CREATED)
    out = b"".join(map(relay.feed, pieces))
    return out + (relay.end() if ended else b""), relay


def events(out: bytes) -> list[dict[str, Any]]:
    """The chunks in what leaves, read as the standard says."""
    found = events_by_the_standard(out)
    assert b"".join(b"data: " + event.data + b"\n\n" for event in found) == out
    return [json.loads(event.data) for event in found]


def deltas(out: bytes) -> list[tuple[dict[str, Any], str | None]]:
    return [
        (choice["delta"], choice["finish_reason"]) for chunk in events(out) for choice in chunk["choices"]
    ]


def state(relay: OllamaRelay) -> dict[str, Any]:
    told = (
        "committed", "done", "fault", "aborted", "events", "content_events", "progress", "dropped",
        "all_finished", "over", "usage", "receipt", "closing", "sequence",
    )  # fmt: skip
    return {name: getattr(relay, name) for name in told}


# Any cut ----------------------------------------------------------------------------------------------------

_texts = st.one_of(
    st.sampled_from(
        ["a", "", "\n", "\r\n\r\ndata: [DONE]\n\n", '{"error":1}', "\u2028", "\U0001f600", "\x00"]
    ),
    st.text(max_size=5),
)
_calls = st.lists(
    st.builds(
        lambda name, arguments, call_id: {
            **({} if call_id is None else {"id": call_id}),
            "function": {"index": 0, "name": name, **({} if arguments is None else {"arguments": arguments})},
        },
        st.text(max_size=3),
        st.none() | st.dictionaries(st.text(max_size=2), st.integers() | st.none(), max_size=2),
        st.none() | st.sampled_from(["", "call_1"]),
    ),
    max_size=2,
)
_messages = st.fixed_dictionaries(
    {}, optional={"content": st.none() | _texts, "thinking": _texts, "tool_calls": st.none() | _calls}
)
_logprobs: st.SearchStrategy[Any] = st.sampled_from([None, [], [{"token": "a", "logprob": -0.5}]])
_counts = st.sampled_from([None, 0, 3, 2**60, -1, "many", 1.5, True])
_records = st.one_of(
    st.builds(says, _texts),
    st.builds(lambda message, logprobs: record(message, logprobs=logprobs), _messages, _logprobs),
    st.builds(
        lambda reason, message, prompt, made: ends(
            reason, message, prompt_eval_count=prompt, eval_count=made
        ),
        st.sampled_from(["stop", "stop", "length", None, "", "load", "unload", "content_filter"]),
        st.just({}) | _messages,
        _counts,
        _counts,
    ),
)
_odd = st.sampled_from(
    [
        b"", b" ", b"{}", b"[]", b"null", b"{", b"data: {}", b'{"done":1}', b'{"message":"text"}',
        b'{"message":{"content":1}}', b'{"message":{"tool_calls":[{}]}}', FAILED, b'{"error":""}',
        b'{"error":{"message":"m","code":429}}', b'{"error":"m","message":"text"}', b'{"object":"error"}',
        b'{"message":{"content":"\xff"}}', b'{"message":{"content":"x"},"logprobs":[NaN]}', b"\xff",
        b'\t{"message":\r{"content":"x"}\r,"logprobs":[{"token":\r"x"}]}',
    ]
)  # fmt: skip
_line = st.one_of(st.builds(says, _texts), _records, _records, _odd)
streams = st.builds(
    lambda records, end, last: b"".join(one + end for one in records) + last,
    st.lists(_line, max_size=8),
    st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n"]),
    st.sampled_from([b"", b"", STOP, STOP[:-3], FAILED, b"\r"]),
)


@settings(max_examples=400)
@given(st.data(), shapes)
def test_any_cut_of_a_stream_gives_the_same_answer(data: st.DataObject, like: StreamShape) -> None:
    stream = data.draw(streams)
    whole, one = relayed(stream, like=like)
    cut_up, many = relayed(*data.draw(pieces_of(stream)), like=like)
    assert cut_up == whole
    assert state(many) == state(one)


@settings(max_examples=300)
@given(streams, shapes)
def test_what_leaves_is_whole_chunks_in_canonical_events_and_the_counts_agree(
    stream: bytes, like: StreamShape
) -> None:
    out, relay = relayed(stream, like=like)
    chunks = events(out)
    assert len(chunks) == relay.events
    for chunk in chunks:
        assert {key: chunk[key] for key in ("id", "object", "created", "model")} == {
            "id": ANSWER_ID,
            "object": "chat.completion.chunk",
            "created": CREATED,
            "model": MODEL,
        }
    finishes = [reason for _, reason in deltas(out) if reason is not None]
    assert len(finishes) == relay.done == relay.all_finished
    assert relay.committed == bool(chunks)
    roles = [delta.get("role") for delta, _ in deltas(out)]
    assert roles == ["assistant", *[None] * len(roles)][: len(roles)]
    assert [relay.done, relay.fault is not None, relay.aborted].count(True) <= 1


@given(st.lists(_texts, max_size=6), st.booleans())
def test_content_survives_exactly(texts: list[str], escaped: bool) -> None:
    stream = [json.dumps({"message": {"content": text}}, ensure_ascii=escaped).encode() for text in texts]
    out, relay = relayed(lines(*stream, STOP))
    assert "".join(delta.get("content", "") for delta, _ in deltas(out)) == "".join(texts)
    assert relay.content_events == sum(map(bool, texts))
    assert relay.dropped == len(texts) - relay.content_events


# Deltas -----------------------------------------------------------------------------------------------------


def test_the_role_goes_with_the_first_event_only() -> None:
    out, relay = relayed(lines(A, B, STOP))
    assert deltas(out) == [
        ({"role": "assistant", "content": "a"}, None),
        ({"content": "b"}, None),
        ({}, "stop"),
    ]
    assert (relay.events, relay.content_events, relay.progress, relay.dropped) == (3, 2, 3, 0)


def test_records_without_output_are_dropped_and_commit_nothing() -> None:
    out, relay = relayed(lines(says(""), record(), record({"content": None}), b"{}"))
    assert (out, relay.committed, relay.dropped, relay.progress) == (b"", False, 4, 4)


def test_an_empty_answer_has_its_role_and_its_finish() -> None:
    out, relay = relayed(lines(STOP))
    assert deltas(out) == [({"role": "assistant", "content": ""}, "stop")]
    assert (relay.done, relay.content_events) == (True, 0)


def test_thinking_stands_in_an_event_of_its_own() -> None:
    out, relay = relayed(lines(record({"thinking": "hm"}), record({"thinking": "so", "content": "a"}), STOP))
    assert deltas(out) == [
        ({"role": "assistant", "reasoning": "hm"}, None),
        ({"reasoning": "so"}, None),
        ({"content": "a"}, None),
        ({}, "stop"),
    ]
    assert relay.content_events == 3


def test_content_in_the_last_record_goes_in_front_of_the_finish() -> None:
    out, _ = relayed(lines(ends("length", {"content": "a"})))
    assert deltas(out) == [({"role": "assistant", "content": "a"}, None), ({}, "length")]


def test_tool_calls_are_numbered_through_the_answer_and_finish_it() -> None:
    named = {**CALL, "id": "call_x"}
    out, relay = relayed(
        lines(record({"content": "a", "tool_calls": [CALL, named]}), record({"tool_calls": [CALL]}), STOP)
    )
    function = {"name": "f", "arguments": '{"x":1}'}
    assert deltas(out) == [
        (
            {
                "role": "assistant",
                "content": "a",
                "tool_calls": [
                    {"index": 0, "id": "call_ab12-01_0", "type": "function", "function": function},
                    {"index": 1, "id": "call_x", "type": "function", "function": function},
                ],
            },
            None,
        ),
        (
            {"tool_calls": [{"index": 2, "id": "call_ab12-01_2", "type": "function", "function": function}]},
            None,
        ),
        ({}, "tool_calls"),
    ]
    assert relay.all_finished


def test_an_answer_that_was_too_long_is_not_finished_by_its_tool_calls() -> None:
    out, _ = relayed(lines(record({"tool_calls": [CALL]}), ends("length")))
    assert deltas(out)[-1] == ({}, "length")


def test_tool_calls_in_the_last_record_count() -> None:
    out, _ = relayed(lines(ends("stop", {"tool_calls": [CALL]})))
    assert deltas(out)[-1] == ({}, "tool_calls")


@given(json_objects(), st.booleans())
def test_arguments_are_text_that_holds_the_engines_bytes(arguments: str, as_text: bool) -> None:
    spelled = json.dumps(arguments) if as_text else arguments.replace("\n", " ")
    line = b'{"message":{"tool_calls":[{"function":{"name":"f","arguments":%b}}]}}' % spelled.encode()
    out, _ = relayed(lines(line))
    ((delta, _),) = deltas(out)
    found = delta["tool_calls"][0]["function"]["arguments"]
    assert found == (arguments if as_text else arguments.replace("\n", " "))


@pytest.mark.parametrize("function", [{"name": "f"}, {"name": "f", "arguments": None}])
def test_no_arguments_are_an_empty_object(function: dict[str, Any]) -> None:
    out, _ = relayed(lines(record({"tool_calls": [{"function": function}]})))
    ((delta, _),) = deltas(out)
    assert delta["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


TOKEN = b'{"token":"a","logprob":-1.50e-2,"bytes":[97],"top_logprobs":[{"token":"b","logprob":-7}]}'


def test_logprobs_keep_their_bytes_and_stand_once() -> None:
    line = b'{"message":{"thinking":"t","content":"a"},"logprobs":[%b]}' % TOKEN
    out, _ = relayed(lines(line, STOP))
    first, second, _ = events(out)
    assert first["choices"][0]["logprobs"] == {"content": [json.loads(TOKEN)], "refusal": None}
    assert "logprobs" not in second["choices"][0]
    assert TOKEN in out


def test_logprobs_alone_are_output() -> None:
    out, relay = relayed(lines(b'{"message":{"content":""},"logprobs":[%b]}' % TOKEN, B))
    assert deltas(out) == [({"role": "assistant"}, None), ({"content": "b"}, None)]
    assert (relay.committed, relay.content_events) == (True, 2)


def test_infinities_are_written_as_numbers() -> None:
    out, relay = relayed(lines(b'{"message":{"content":"a"},"logprobs":[{"token":"a","logprob":-Infinity}]}'))
    assert events(out)[0]["choices"][0]["logprobs"]["content"] == [{"token": "a", "logprob": -9999.0}]
    assert relay.fault is None


def test_a_cr_between_the_tokens_of_a_record_ends_no_line_of_the_client() -> None:
    out, _ = relayed(lines(b'{"message":\r{"content":"a"},"logprobs":[\r{"token":\r"a"}\r]\r}'))
    assert b"\r" not in out
    assert events(out)[0]["choices"][0]["logprobs"]["content"] == [{"token": "a"}]


# Usage ------------------------------------------------------------------------------------------------------


def test_usage_is_read_always_and_said_when_it_was_asked_for() -> None:
    quiet, relay = relayed(lines(A, STOP))
    assert relay.usage == Usage(3, None, 2)
    assert b"usage" not in quiet
    out, relay = relayed(lines(A, STOP), like=shape(usage=True))
    assert out.startswith(quiet)
    last = events(out)[-1]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (relay.events, relay.content_events) == (3, 1)


@pytest.mark.parametrize(
    ("counts", "usage"),
    [
        ({"eval_count": 2}, Usage(None, None, 2)),
        ({"prompt_eval_count": 3}, Usage(3, None, None)),
        ({"prompt_eval_count": -1, "eval_count": 2}, Usage(None, None, 2)),
        ({"prompt_eval_count": 3, "eval_count": True}, Usage(3, None, None)),
        ({"prompt_eval_count": 2**31 + 1, "eval_count": 2}, Usage(None, None, 2)),
    ],
)
def test_a_count_that_is_missing_or_no_count_is_nought_for_the_client_and_unknown_to_us(
    counts: dict[str, Any], usage: Usage
) -> None:
    out, relay = relayed(lines(A, ends(**counts)), like=shape(usage=True))
    prompt, generated = usage.prompt or 0, usage.generated or 0
    assert relay.usage == usage
    assert events(out)[-1]["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def test_counts_that_the_last_record_does_not_repeat_stay() -> None:
    _, relay = relayed(lines(record({"content": "a"}, prompt_eval_count=3, eval_count=1), ends()))
    assert relay.usage == Usage(3, None, 1)


def test_no_usage_is_made_up() -> None:
    out, relay = relayed(lines(A, ends()), like=shape(usage=True))
    assert relay.usage is None
    assert deltas(out)[-1] == ({}, "stop")
    assert b"usage" not in out


# How a stream ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["stop", "", None])
def test_an_end_without_a_reason_is_the_ordinary_one(reason: str | None) -> None:
    out, relay = relayed(lines(A, ends(reason)))
    assert deltas(out)[-1] == ({}, "stop")
    assert relay.all_finished


@pytest.mark.parametrize("reason", ["load", "unload", "content_filter", "abort"])
def test_another_reason_without_output_finishes_nothing(reason: str) -> None:
    for before in ((), (A,)):
        out, relay = relayed(lines(*before, ends(reason), B, STOP))
        assert len(events(out)) == len(before)
        assert (relay.aborted, relay.fault, relay.done, relay.all_finished) == (True, None, False, False)
        assert relay.over


def test_another_reason_beside_output_is_a_failure() -> None:
    out, relay = relayed(lines(A, ends("unload", {"content": "x"})))
    assert deltas(out) == [({"role": "assistant", "content": "a"}, None)]
    assert (relay.aborted, relay.fault, relay.done) == (False, EngineError(500), False)


@given(st.integers(0, 3), st.sampled_from([b"", b"\n", b"\r\n"]))
def test_an_error_in_place_of_any_record_is_a_fault_after_what_came_before(before: int, end: bytes) -> None:
    out, relay = relayed(lines(*[A] * before) + FAILED + end)
    assert len(events(out)) == before
    assert relay.fault == EngineError(500, "model runner has unexpectedly stopped")
    assert not relay.all_finished
    assert relay.feed(lines(B, STOP)) == relay.end() == b""


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        (b'{"error":"busy","status":503}', 503, "busy"),
        (b'{"error":{"message":"slow down","code":429}}', 429, "slow down"),
        (b'{"error":"m","message":"text","done":1}', 500, "m"),
        (b'{"object":"error","message":"m","code":400}', 400, "m"),
        (b'{"object":"error","message":"m"}', 500, "m"),
        (b'{"object":"error","detail":"m"}', 500, "m"),
        (b'{"error":"m","done":true,"done_reason":"stop","message":{"content":"x"}}', 500, "m"),
    ],
)
def test_an_error_has_its_class_whatever_stands_beside_it(line: bytes, status: int, message: str) -> None:
    out, relay = relayed(lines(line))
    assert out == b""
    assert relay.fault is not None
    assert (relay.fault.status, relay.fault.message) == (status, message)


@pytest.mark.parametrize("nothing", [b'""', b"null", b"false", b"0", b"{}", b"[]"])
def test_an_error_that_is_none_is_no_error(nothing: bytes) -> None:
    out, relay = relayed(lines(b'{"message":{"content":"a"},"error":' + nothing + b"}"))
    assert deltas(out) == [({"role": "assistant", "content": "a"}, None)]
    assert relay.fault is None


def test_an_error_tells_no_secret_and_a_lack_of_memory_is_known() -> None:
    line = b'{"error":"llama runner at 127.0.0.1:4 died: CUDA error: out of memory"}'
    _, relay = relayed(lines(line), like=shape(secrets=("127.0.0.1:4",)))
    assert relay.fault is not None
    assert relay.fault.out_of_memory
    assert "127.0.0.1" not in relay.fault.message


MALFORMED = [
    b"{", b"[]", b"7", b'"x"', b"hello", b"data: {}", b'{"done":1}', b'{"message":"text"}', b"{}{}",
    b'{"message":{"content":1}}', b'{"message":{"tool_calls":[{}]}}', b'{"done_reason":1}', b"\xff",
    b'{"message":{"content":"\xff"}}', b'{"message":{"content":"\xed\xa0\x80"}}',
    b'{"message":{"content":"\r"}}', b'{"message":{"content":"a"},"logprobs":["\xff"]}',
    b'{"message":{"tool_calls":[{"function":{"name":"f","arguments":{"a":"\xff"}}}]}}',
    b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("line", MALFORMED)
def test_a_line_that_is_no_record_is_a_fault_after_what_came_before(line: bytes) -> None:
    out, relay = relayed(lines(A, line, STOP), like=shape(limit=1_000_000))
    assert deltas(out) == [({"role": "assistant", "content": "a"}, None)]
    assert relay.fault is not None
    assert (relay.fault.status, relay.fault.code) == (502, "engine_protocol_error")


def test_a_record_over_the_bound_is_a_fault_before_its_end_comes() -> None:
    limit = max(len(A), len(STOP))
    out, relay = relayed(lines(A), says("x" * limit)[: limit + 1], like=shape(limit=limit))
    assert len(events(out)) == 1
    assert relay.fault is not None
    assert relay.fault.code == "engine_protocol_error"
    _, relay = relayed(*bytewise(lines(A, STOP)), like=shape(limit=limit))
    assert relay.all_finished


@pytest.mark.parametrize("rest", [b"", STOP[:-1], b"{", b"\xff", b'{"message":'])
def test_a_stream_that_ends_without_its_last_record_is_cut(rest: bytes) -> None:
    out, relay = relayed(lines(A, B) + rest)
    assert len(events(out)) == 2
    assert (relay.over, relay.fault, relay.all_finished) == (False, None, False)


def test_a_last_record_without_its_line_end_counts() -> None:
    early, relay = relayed(lines(A) + STOP, ended=False)
    assert len(events(early)) == 1
    assert not relay.done
    assert deltas(relay.end()) == [({}, "stop")]
    assert relay.all_finished
    out, relay = relayed(lines(A) + B)
    assert len(events(out)) == 2
    assert not relay.over


def test_blank_lines_and_line_ends_of_either_kind_are_nothing() -> None:
    plain, one = relayed(lines(A, B, STOP))
    spaced, other = relayed(b"\n\r\n" + A + b"\r\n\n  \n" + B + b"\n\r\n" + STOP + b"\r\n\r\n")
    assert spaced == plain
    assert state(other) == state(one)


def test_nothing_is_read_behind_the_end() -> None:
    out, relay = relayed(lines(A, STOP, FAILED), lines(B), b"{")
    assert len(events(out)) == 2
    assert relay.all_finished
    assert relay.progress == 2


# Receipts ---------------------------------------------------------------------------------------------------


def test_a_receipt_covers_every_event_and_stands_in_front_of_the_end() -> None:
    out, relay = relayed(lines(A, B, STOP), like=shape(usage=True, receipt=True))
    told = hashlib.sha256(b"".join(event.data + b"\n" for event in events_by_the_standard(out))).hexdigest()
    assert relay.receipt == told
    assert relay.closing == f": receipt sha256={told} events=4\n\ndata: [DONE]\n\n".encode()
    _, plain = relayed(lines(A, STOP))
    assert (plain.receipt, plain.closing) == (None, b"data: [DONE]\n\n")


# Whole answers ----------------------------------------------------------------------------------------------


def answered(body: bytes) -> tuple[dict[str, Any], Usage | None]:
    found = ollama_answer(body, ANSWER_ID, CREATED, MODEL)
    assert not isinstance(found, EngineError)
    return json.loads(found[0]), found[1]


def test_a_whole_answer_is_a_chat_completion() -> None:
    value, usage = answered(ends(message={"content": "hi"}, prompt_eval_count=3, eval_count=2))
    assert value == {
        "id": ANSWER_ID,
        "object": "chat.completion",
        "created": CREATED,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    assert usage == Usage(3, None, 2)


@given(_texts, _texts, st.booleans())
def test_the_texts_of_a_whole_answer_survive_exactly(content: str, thinking: str, escaped: bool) -> None:
    message = {"content": content, "thinking": thinking}
    value, _ = answered(json.dumps({"message": message, "done": True}, ensure_ascii=escaped).encode())
    said = value["choices"][0]["message"]
    assert said == {"role": "assistant", "content": content} | ({"reasoning": thinking} if thinking else {})


def test_tool_calls_finish_a_whole_answer() -> None:
    (choice,) = answered(ends(message={"tool_calls": [CALL, CALL]}))[0]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["call_ab12-01_0", "call_ab12-01_1"]
    assert choice["message"]["tool_calls"][1] == {
        "id": "call_ab12-01_1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x":1}'},
    }
    (choice,) = answered(ends("length", {"tool_calls": [CALL]}))[0]["choices"]
    assert choice["finish_reason"] == "length"


def test_logprobs_of_a_whole_answer_keep_their_bytes() -> None:
    body = b'{"message":{"content":"a"},"logprobs":[%b],"done":true}' % TOKEN
    found = ollama_answer(body, ANSWER_ID, CREATED, MODEL)
    assert not isinstance(found, EngineError)
    assert b'"logprobs":{"content":[%b],"refusal":null}' % TOKEN in found[0]


def test_a_whole_answer_without_counts_has_no_usage() -> None:
    value, usage = answered(ends(message={"content": "hi"}))
    assert "usage" not in value
    assert usage is None


@given(
    st.sampled_from([json.dumps, lambda v: json.dumps(v, indent=1), lambda v: f" \r\n{json.dumps(v)}\r\n"])
)
def test_a_whole_answer_may_be_spaced_as_it_likes(spelled: Any) -> None:
    assert answered(spelled({"message": {"content": "a"}, "done": True}).encode())[0]["choices"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (FAILED, EngineError(500, "model runner has unexpectedly stopped")),
        (b'{"error":"m","done":true,"message":{"content":"x"}}', EngineError(500, "m")),
        (ends("load"), EngineError(503, gave_up=True)),
        (ends("unload", {"content": "x"}), EngineError(500)),
        (ends("unload", {"thinking": "x"}), EngineError(500)),
        (ends("unload", {"tool_calls": [CALL]}), EngineError(500)),
    ],
)
def test_an_answer_that_says_that_it_failed_is_an_error(body: bytes, found: EngineError) -> None:
    assert ollama_answer(body, ANSWER_ID, CREATED, MODEL) == found


def test_an_error_in_a_whole_answer_tells_no_secret() -> None:
    found = ollama_answer(b'{"error":"at 10.0.0.1:80"}', ANSWER_ID, CREATED, MODEL, ("10.0.0.1:80",))
    assert isinstance(found, EngineError)
    assert found.message == "at ***"


@pytest.mark.parametrize("body", [*MALFORMED, b"", A, record({"content": "x"}, done=False), b"{}"])
def test_an_answer_that_is_none_or_not_whole_breaks_the_protocol(body: bytes) -> None:
    with pytest.raises(EngineProtocolError):
        ollama_answer(body, ANSWER_ID, CREATED, MODEL)
