"""An engine's answer as records: gateways make of them what they would have made of the answer itself."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.grammar import pieces_of
from tests.wire.standard import events_by_the_standard
from trio_gateway.contract import CHAT, COMPLETIONS, RESPONSES, Operation
from trio_gateway.wire._answers import EngineError
from trio_gateway.wire._engine_records import EngineRecords, failed_of
from trio_gateway.wire._named_relay import NamedRelay
from trio_gateway.wire._ollama import OllamaRelay
from trio_gateway.wire._relay import StreamRelay, StreamShape
from trio_gateway.wire._worker_messages import (
    Accepted,
    Delta,
    End,
    EngineRecord,
    Failed,
    Finish,
    NamedEvent,
    RawFields,
    ToolCall,
    UsageCounts,
)
from trio_gateway.wire._worker_relay import AgentRelay
from trio_gateway.wire._worker_stream import AnswerForm, RecordWriter, failure_of


def shape(choices: int = 1, usage: bool = True) -> StreamShape:
    return StreamShape(choices, usage, False, "m", "m", 100_000, ("sk-secret",))


def chunk(*choices: dict[str, Any], **fields: Any) -> bytes:
    value = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
    return b"data: " + json.dumps({**value, **fields}).encode() + b"\n\n"


def choice(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": finish, **fields}


DONE = b"data: [DONE]\n\n"
ROLE = chunk(choice({"role": "assistant", "content": ""}))
STOP = chunk(choice(finish="stop"))
USAGE = chunk(usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5})


def recorded(*pieces: bytes, operation: Operation = CHAT, choices: int = 1) -> list[EngineRecord]:
    relay = StreamRelay(shape(choices)) if operation.choices else NamedRelay(shape(), operation.style, "id-1")
    reader = EngineRecords(relay, operation)
    found = [record for piece in pieces for record in reader.feed(piece)]
    return found + reader.end()


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def test_a_chat_stream_becomes_deltas_finishes_and_usage() -> None:
    pieces = (ROLE, chunk(choice({"content": "a"})), chunk(choice({"content": "b"})), STOP, USAGE, DONE)
    assert recorded(*pieces) == [
        Delta(0, "a"),
        Delta(0, "b"),
        Finish(0, "stop"),
        UsageCounts(3, 2, None),
    ]


def test_text_of_completions_is_text_too() -> None:
    found = recorded(
        chunk({"index": 1, "text": "a", "finish_reason": None}),
        chunk({"index": 1, "text": "b", "finish_reason": "length"}),
        chunk({"index": 0, "text": "", "finish_reason": "stop"}),
        DONE,
        operation=COMPLETIONS,
        choices=2,
    )
    assert found == [Delta(1, "a"), Delta(1, "b"), Finish(1, "length"), Finish(0, "stop")]


def test_thinking_logprobs_and_what_has_no_name_are_kept() -> None:
    said = {"content": "a", "reasoning": "hm", "refusal": "no", "reasoning_content": None}
    around: dict[str, Any] = {"logprobs": {"content": [{"token": "a"}, {"token": "b"}]}, "token_ids": [1]}
    found = recorded(
        chunk(choice(said, **around), system_fingerprint="f", service_tier=None),
        chunk(choice(finish="stop", stop_reason=7)),
        DONE,
    )
    assert found == [
        Delta(
            0,
            "a",
            2,
            "hm",
            raw(around["logprobs"]),
            RawFields({"system_fingerprint": raw("f")}, {"token_ids": raw([1])}, {"refusal": raw("no")}),
        ),
        Finish(0, "stop", RawFields(choice={"stop_reason": raw(7)})),
    ]


def test_tool_calls_become_pieces_of_calls() -> None:
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    then = {"index": 0, "function": {"arguments": "{}"}}
    found = recorded(
        chunk(choice({"tool_calls": [first]})),
        chunk(choice({"tool_calls": [then]}, "tool_calls", stop_reason=1)),
        DONE,
    )
    assert found == [
        ToolCall(0, 0, "call_1", "f", ""),
        ToolCall(0, 0, arguments="{}"),
        Finish(0, "tool_calls", RawFields(choice={"stop_reason": raw(1)})),
    ]


def test_fields_of_a_call_that_goes_on_stand_with_its_first_piece() -> None:
    calls = [{"index": at, "function": {"arguments": "x"}} for at in range(2)]
    found = recorded(chunk(choice({"tool_calls": calls}, token_ids=[1])), STOP, DONE)
    assert found[:2] == [
        ToolCall(0, 0, arguments="x", raw=RawFields(choice={"token_ids": raw([1])})),
        ToolCall(0, 1, arguments="x"),
    ]


def test_progress_of_a_prompt_is_a_record_without_tokens() -> None:
    found = recorded(chunk(choice(), prompt_progress={"total": 3}), STOP, DONE)
    assert found[0] == Delta(0, "", 0, raw=RawFields({"prompt_progress": raw({"total": 3})}))


ONLY_GENERATED = UsageCounts(None, 2, None, {"cost": raw(1)})


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}, UsageCounts(3, None, 2)),
        (
            {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 0}},
            UsageCounts(None, 2, 2, {"prompt_tokens_details": raw({"cached_tokens": 2, "audio_tokens": 0})}),
        ),
        ({"prompt_tokens": -1, "completion_tokens": 1e300, "x": "y"}, None),
        (
            {"prompt_tokens": "many", "completion_tokens": 2, "cost": 1},
            UsageCounts(None, 2, None, {"cost": raw(1)}),
        ),
    ],
)
def test_usage_keeps_what_can_be_counted(usage: dict[str, Any], told: UsageCounts | None) -> None:
    found = recorded(chunk(choice({"content": "a"})), STOP, chunk(usage=usage), DONE)
    assert found[2:] == ([told] if told else [])


def test_usage_inside_of_another_event_is_told_at_the_end() -> None:
    last = chunk(choice(finish="stop"), usage={"prompt_tokens": 3, "completion_tokens": 2})
    assert recorded(chunk(choice({"content": "a"})), last, DONE)[-1] == UsageCounts(3, 2, None)


CUT = Failed("engine_protocol_error", "the engine's answer was cut")
A = chunk(choice({"content": "a"}))
ERROR = b'data: {"error":{"message":"sk-secret","code":500}}\n\n'


@pytest.mark.parametrize(
    ("pieces", "failed"),
    [
        (
            (chunk(choice({"content": "a"})), DONE),
            Failed("engine_protocol_error", "the engine's answer was cut"),
        ),
        ((chunk(choice({"content": "a"})),), Failed("engine_protocol_error", "the engine's answer was cut")),
        (
            (b'data: {"error":{"message":"sk-secret","code":500}}\n\n',),
            Failed("engine_failed", "the engine failed", status=500),
        ),
        ((chunk(choice(finish="abort")),), Failed("aborted", "the engine gave the request up")),
        ((b"data: {\n\n",), Failed("engine_protocol_error", "an event is not valid JSON")),
    ],
)
def test_what_is_no_whole_answer_ends_with_a_failure(pieces: tuple[bytes, ...], failed: Failed) -> None:
    assert recorded(*pieces)[-1] == failed


def test_named_events_pass_and_the_terminal_one_comes_last() -> None:
    stream = [
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n',
    ]
    found = recorded(*stream, operation=RESPONSES)
    assert [record.event for record in found if isinstance(record, NamedEvent)] == [
        "response.output_text.delta",
        "response.completed",
    ]
    unnamed = recorded(b'data: {"x":1}\n\n', operation=RESPONSES)
    assert unnamed[0] == NamedEvent('{"x":1}')


def test_ollama_s_records_become_records_too() -> None:
    reader = EngineRecords(OllamaRelay(shape(), "chatcmpl-1", 0), CHAT)
    found = reader.feed(b'{"message":{"content":"a"}}\n')
    found += reader.feed(b'{"message":{"content":""},"done":true,"prompt_eval_count":3,"eval_count":2}\n')
    assert reader.over
    assert [*found, *reader.end()] == [Delta(0, "a"), Finish(0, "stop"), UsageCounts(3, 2, None)]


def test_progress_is_that_of_the_engine_s_stream() -> None:
    reader = EngineRecords(StreamRelay(shape()), CHAT)
    reader.feed(ROLE)
    assert reader.progress == 1
    assert not reader.over


@pytest.mark.parametrize(
    "data",
    [b'{"choices":[[]]}', b'{"choices":[{"index":0,"delta":[],"finish_reason":"stop","text":1}]}',
     b'{"choices":[{"index":0,"delta":{"content":"x","tool_calls":{}}}]}', b'{"choices":5}'],
)  # fmt: skip
def test_chunks_of_another_form_say_what_they_can(data: bytes) -> None:
    recorded(b"data: " + data + b"\n\n", STOP, DONE)  # and nothing is raised


# Both ways --------------------------------------------------------------------------------------------------

_texts = st.sampled_from(["a", "b", "\n", "\u2028", "", '{"error":1}'])
_deltas = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        "content": _texts,
        "reasoning": _texts,
        "tool_calls": st.just(
            [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}]
        ),
        "refusal": st.sampled_from([None, "no"]),
    },
)
_chunks = st.builds(
    lambda delta, fields: chunk(choice(delta, **fields)),
    _deltas,
    st.fixed_dictionaries({}, optional={"token_ids": st.just([1]), "stop_reason": st.none()}),
)
_streams = st.builds(
    lambda chunks, end: b"".join([*chunks, *end]),
    st.lists(_chunks, max_size=5),
    st.sampled_from([[STOP, USAGE, DONE], [STOP, DONE], [DONE], [], [USAGE, STOP, DONE]]),
)


def content(out: bytes) -> list[tuple[str, Any]]:
    """What chunks say, kind by kind, with pieces of text joined."""
    found: dict[str, Any] = {}
    for event in events_by_the_standard(out):
        for each in json.loads(event.data)["choices"]:
            for key, value in each["delta"].items():
                if isinstance(value, str):
                    found[key] = found.get(key, "") + value
                elif value:
                    found.setdefault(key, []).append(value)
            for key in ("finish_reason", "token_ids"):
                if each.get(key):
                    found.setdefault(key, []).append(each[key])
    return sorted((key, value) for key, value in found.items() if value and key != "role")


@settings(max_examples=150)
@given(st.data())
def test_a_gateway_gets_through_an_agent_what_it_would_have_got_itself(data: st.DataObject) -> None:
    stream = data.draw(_streams)
    direct = StreamRelay(shape())
    straight = direct.feed(stream) + (direct.end() if not direct.over else b"")
    reader, writer = EngineRecords(StreamRelay(shape()), CHAT), RecordWriter(AnswerForm.CHOICES, 1)
    relay = AgentRelay(shape(), CHAT, "chatcmpl-1", 1)
    around = relay.feed(writer.write(Accepted(0)))
    failed = False
    for piece in data.draw(pieces_of(stream)):
        for record in reader.feed(piece) if not reader.over else []:
            around += relay.feed(writer.write(record))
    for record in reader.end():
        failed |= isinstance(record, Failed)
        around += relay.feed(writer.write(record))
    if not failed:
        around += relay.feed(writer.write(End()))
    assert relay.all_finished is (direct.all_finished and direct.done)
    assert failed is not relay.all_finished
    assert content(around) == content(straight)
    if relay.all_finished and direct.usage is not None:
        assert relay.usage == direct.usage


@pytest.mark.parametrize(
    "error",
    [
        EngineError(500, gave_up=True), EngineError(503, gave_up=True), EngineError(429), EngineError(503),
        EngineError(500, out_of_memory=True), EngineError(401), EngineError(302), EngineError(404),
        EngineError(400, "m", "t", "c", "p"), EngineError(422, "m"), EngineError(501), EngineError(424),
        EngineError(500), EngineError(507), EngineError(502, "bad", code="engine_protocol_error"),
        EngineError(413, "m", code="413"),
    ],
    ids=lambda error: f"{error.status}-{error.code}",
)  # fmt: skip
def test_an_error_means_the_same_behind_an_agent(error: EngineError) -> None:
    again = failure_of(failed_of(error))
    assert again.gave_up is error.gave_up
    if error.gave_up:
        return
    assert again.out_of_memory is error.out_of_memory
    alike = {302: 401, 424: 500, 507: 500}  # of one class
    assert again.status == alike.get(error.status, error.status)
    if 400 <= error.status < 500 and error.status not in (401, 404, 424, 429):
        assert (again.message, again.type, again.param) == (error.message, error.type, error.param)
        assert again.code == (error.code if error.code == "c" else "invalid_value")
