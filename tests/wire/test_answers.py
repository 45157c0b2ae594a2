"""What engines say: errors in every shape that an engine is known to use, usage, whole answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.grammar import JSON_VALUES, json_objects, json_texts
from trio_gateway.contract import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    OPERATIONS,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    Operation,
)
from trio_gateway.errors import EngineProtocolError
from trio_gateway.wire._answers import (
    MAX_MESSAGE_BYTES,
    EngineError,
    Usage,
    drop_usage,
    judge_answer,
    read_error,
    read_usage,
    rename_model,
)
from trio_gateway.wire._json import join_members, raw_members


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


# Errors: how engines shape them -----------------------------------------------------------------------------

NESTED = {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}
FLAT = {"object": "error", "message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}

SHAPES = {
    "vllm, nested": ({"error": NESTED}, EngineError(400, "too long", "BadRequestError", None, "messages")),
    "sglang, flat": (FLAT, EngineError(400, "too long", "BadRequestError", None, "messages")),
    "sglang, in a stream": (
        {"error": FLAT},
        EngineError(400, "too long", "BadRequestError", None, "messages"),
    ),
    "sglang, /generate": ({"error": {"message": "no"}}, EngineError(500, "no")),
    "llama.cpp": (
        {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}},
        EngineError(503, "Loading model", "unavailable_error"),
    ),
    "llama.cpp, too long": (
        {"error": {"code": 400, "message": "long", "type": "exceed_context_size_error", "n_ctx": 8}},
        EngineError(400, "long", "exceed_context_size_error"),
    ),
    "ollama, /v1": (
        {"error": {"message": "m", "type": "not_found_error", "param": None, "code": None}},
        EngineError(500, "m", "not_found_error"),
    ),
    "ollama, /api": ({"error": "text"}, EngineError(500, "text")),
    "tgi, flat": ({"error": "text", "error_type": "validation"}, EngineError(500, "text")),
    "tgi, overloaded in a stream": (
        {"error": {"message": "Model is overloaded", "http_status_code": 422}},
        EngineError(429, "Model is overloaded"),
    ),
    "tgi, generation in a stream": (
        {"error": {"message": "Request failed during generation: x", "http_status_code": 422}},
        EngineError(424, "Request failed during generation: x"),
    ),
    "tgi, incomplete in a stream": (
        {"error": {"message": "Incomplete generation", "http_status_code": 422}},
        EngineError(500, "Incomplete generation"),
    ),
    "tgi, validation in a stream": (
        {"error": {"message": "Input validation error: x", "http_status_code": 422}},
        EngineError(422, "Input validation error: x"),
    ),
    "trt-llm, validation": ({"error": "bad"}, EngineError(500, "bad")),
    "lmdeploy, flat": (
        {"message": "m", "type": "server_error", "code": 503, "param": None, "object": "error"},
        EngineError(503, "m", "server_error"),
    ),
    "vllm, no key": ({"error": "Unauthorized"}, EngineError(500, "Unauthorized")),
    "fastapi": ({"detail": "Not Found"}, EngineError(500, "Not Found")),
    "fastapi, validation": (
        {"detail": [{"loc": ["body", "messages", 0], "msg": "Field required"}, {"msg": "too long"}]},
        EngineError(500, "body.messages.0: Field required; too long"),
    ),
    "fastapi, nothing said": ({"detail": [{"loc": ["body"]}, 7, None]}, EngineError(500, "")),
    "several errors": ({"errors": [{"message": "a"}, "b"]}, EngineError(500, "a; b")),
    "a list of errors": ([{"error": {"code": 400, "message": "m"}}], EngineError(400, "m")),
    "a page as message": ({"error": "<html>502</html>"}, EngineError(500, "")),
    "openai": (
        {"error": {"message": "m", "type": "t", "param": "p", "code": "context_length_exceeded"}},
        EngineError(500, "m", "t", "context_length_exceeded", "p"),
    ),
    "a flag beside the message": ({"error": True, "message": "m", "code": 429}, EngineError(429, "m")),
    "an empty error beside the message": ({"error": {}, "message": "m"}, EngineError(500, "m")),
    "a number beside the message": ({"error": 7, "msg": "m"}, EngineError(500, "m")),
    "a list": ({"error": ["a", "b"]}, EngineError(500, "a; b")),
    "text inside the error": ({"error": {"error": "inner"}}, EngineError(500, "inner")),
    "only a string": ("plain", EngineError(500, "plain")),
    "only a list": ([{"message": "m"}], EngineError(500, "m")),
    "null": (None, EngineError(500)),
}


@pytest.mark.parametrize(("body", "error"), SHAPES.values(), ids=SHAPES)
def test_an_error_is_read_in_every_shape(body: Any, error: EngineError) -> None:
    assert read_error(dumped(body), None) == error


@pytest.mark.parametrize(("body", "error"), SHAPES.values(), ids=SHAPES)
def test_an_http_status_counts_whatever_the_body_claims(body: Any, error: EngineError) -> None:
    found = read_error(dumped(body), 418)
    assert (found.status, found.message, found.type, found.param) == (
        418,
        error.message,
        error.type,
        error.param,
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", ""),
        (b"upstream timed out", "upstream timed out"),
        (b"<b>502</b>\r\n\x00", "<b>502</b> "),
        (b"<html>\r\n<b>502</b>\x00</html>", ""),
        (b"\r\n<!DOCTYPE html><title>413</title>", ""),
        (b"caf\xe9 \xff", "caf\ufffd \ufffd"),
        (b'{"error": "cut', '{"error": "cut'),
        (b"[" * 100_000, "[" * MAX_MESSAGE_BYTES),
    ],
)
def test_what_is_no_json_is_read_as_text(body: bytes, message: str) -> None:
    assert read_error(body, 500) == EngineError(500, message)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, 500),
        ({"code": 400}, 400),
        ({"code": 599}, 599),
        ({"code": 529}, 503),
        ({"code": "429"}, 429),
        ({"status": 503}, 503),
        ({"http_status_code": 503}, 503),
        ({"http_status_code": 422}, 422),
        ({"code": 400, "status": 503}, 400),
        ({"code": "rate_limit", "status": 429}, 429),
        ({"code": 399}, 500),
        ({"code": 600}, 500),
        ({"code": 200, "status": "error"}, 500),
        ({"code": True}, 500),
        ({"code": 503.0}, 500),
        ({"code": None}, 500),
        ({"code": "0503"}, 500),
        ({"code": " 503"}, 500),
        ({"code": "\u0665\u0660\u0663"}, 500),
        ({"code": "5" * 5000}, 500),
        ({"code": 10**40}, 500),
        ({"code": [503]}, 500),
    ],
)
def test_an_error_in_a_200_claims_its_own_status(fields: dict[str, Any], status: int) -> None:
    assert read_error(dumped({"error": {"message": "m", **fields}}), None).status == status
    assert read_error(dumped({"object": "error", "message": "m", **fields}), None).status == status
    assert read_error(dumped({"error": "m", **fields}), None).status == status
    # The inner claim goes before the outer one.
    assert read_error(dumped({"error": {"code": 418}, **fields}), None).status == 418


@pytest.mark.parametrize("body", [b"", b"busy", dumped({"error": {"message": "Overloaded", "code": 500}})])
def test_an_overload_under_another_number_is_one_all_the_same(body: bytes) -> None:
    assert read_error(body, 529).status == 503


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("BadRequestError", True),
        ("x" * 64, True),
        ("\u00e9 with blanks", True),
        ("x" * 65, False),
        ("", False),
        ("a\nb", False),
        ("\u202eabc", False),
        (400, False),
        (None, False),
        (["x"], False),
        ({"a": 1}, False),
    ],
)
@pytest.mark.parametrize("field", ["type", "code", "param"])
def test_a_label_is_kept_where_it_is_a_short_printable_string(field: str, value: Any, kept: bool) -> None:
    found = read_error(dumped({"error": {"message": "m", field: value}}), 400)
    assert getattr(found, field) == (value if kept else None)


# Errors: what may be passed on ------------------------------------------------------------------------------


@given(
    st.one_of(
        JSON_VALUES, st.text(), st.dictionaries(st.sampled_from(["error", "message", "code"]), JSON_VALUES)
    )
)
def test_a_message_is_short_and_printable_whatever_the_engine_says(value: Any) -> None:
    for body in (
        dumped(value),
        dumped({"error": value}),
        dumped({"error": {"message": value, "type": value}}),
    ):
        found = read_error(body, None)
        assert len(found.message.encode()) <= MAX_MESSAGE_BYTES
        assert found.message.isprintable()
        assert 400 <= found.status < 600
        assert found.type is None or (found.type.isprintable() and len(found.type) <= 64)


@given(st.binary())
def test_any_body_at_all_is_an_error_that_can_be_passed_on(body: bytes) -> None:
    found = read_error(body, 400)
    assert found.message.isprintable()
    found.message.encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\r\nb", "a b"),
        ("a\x00\x1b[31mb", "a [31mb"),
        ("a\x7f\x9fb", "a b"),
        ("a\u2028\u2029b", "a b"),
        ("a\u202eb", "a b"),
        ("a\u200bb", "a b"),
        ("caf\u00e9 \U0001f600", "caf\u00e9 \U0001f600"),
    ],
)
def test_runs_of_what_can_not_be_printed_become_a_blank(text: str, message: str) -> None:
    assert read_error(dumped({"error": {"message": text}}), 400).message == message


def test_a_lone_surrogate_does_not_get_through() -> None:
    assert read_error(b'{"error": {"message": "a\\ud800b"}}', 400).message.isprintable()


@pytest.mark.parametrize("character", ["x", "\u00e9", "\u20ac", "\U0001f600"])
def test_a_message_is_cut_between_characters(character: str) -> None:
    found = read_error(dumped({"message": character * 2000}), 400).message
    assert set(found) == {character}
    assert MAX_MESSAGE_BYTES - 4 < len(found.encode()) <= MAX_MESSAGE_BYTES


SECRETS = ("sk-secret", "http://10.0.0.5:8000", "10.0.0.5:8000")


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "key sk-secret at http://10.0.0.5:8000/v1 or 10.0.0.5:8000, sk-secret"}},
        {"error": "sk-secret at 10.0.0.5:8000"},
        {
            "object": "error",
            "message": "sk-secret",
            "type": "sk-secret",
            "code": "x10.0.0.5:8000",
            "param": "sk-secret",
        },
        {"message": "x" * 1020 + "sk-secret"},
        "sk-secret",
    ],
)
def test_secrets_are_not_passed_on(body: Any) -> None:
    for status in (None, 400):
        found = read_error(dumped(body), status, SECRETS)
        for text in (found.message, found.type, found.code, found.param):
            assert "secret" not in (text or "")
            assert "10.0.0.5" not in (text or "")
        assert "***" in found.message or len(found.message) == MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2 GiB",
        "torch.OutOfMemoryError",
        "CUDA error: memory",
        "HIP out of memory",
        "the KV cache is full",
    ],
)
def test_a_lack_of_memory_is_found_anywhere_in_an_error(text: str) -> None:
    for body in ({"error": {"message": text}}, {"error": "x", "trace": [text]}, text):
        assert read_error(dumped(body), 500).out_of_memory
    assert read_error(text.encode() + b"\xff", 500).out_of_memory
    assert not read_error(b"memory is fine", 500).out_of_memory


# Usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "found"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}, Usage(3, None, 5)),
        ({"completion_tokens": 0}, Usage(None, None, 0)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}, Usage(3, 2, None)),
        ({"prompt_tokens": 3, "prompt_tokens_details": None}, Usage(3, None, None)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {}}, Usage(3, None, None)),
        ({}, Usage()),
        ({"prompt_tokens": 2**31}, Usage(2**31)),
        (None, None),
        ({"completion_tokens": "5"}, None),
        ({"completion_tokens": -1}, None),
        ({"completion_tokens": 10**30}, None),
        ([], None),
        (7, None),
    ],
)
def test_usage_is_read_where_it_can_be(usage: Any, found: Usage | None) -> None:
    assert read_usage(dumped({"id": "x", "usage": usage})) == found
    assert judge_answer(dumped({"usage": usage}), EMBEDDINGS, 0) == found


def test_without_usage_there_is_none() -> None:
    assert read_usage(b"{}") is None
    assert judge_answer(b"{}", EMBEDDINGS, 0) is None


# Whole answers ----------------------------------------------------------------------------------------------


def chat(*reasons: Any, **fields: Any) -> bytes:
    choices = [
        {"index": at, "message": {"role": "assistant", "content": "hi"}, "finish_reason": reason}
        for at, reason in enumerate(reasons)
    ]
    return dumped({"choices": choices, "usage": {"completion_tokens": 5}, **fields})


@pytest.mark.parametrize(
    "reason", ["stop", "length", "tool_calls", "content_filter", "eos_token", "repetition"]
)
def test_an_answer_with_a_finish_for_each_choice_is_whole(reason: str) -> None:
    assert judge_answer(chat(reason), CHAT, 1) == Usage(generated=5)
    assert judge_answer(chat(reason, "stop"), CHAT, 2) == Usage(generated=5)
    assert judge_answer(chat(reason), COMPLETIONS, 1) == Usage(generated=5)


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        (chat(), 1),
        (chat("stop"), 2),
        (chat("stop", None), 2),
        (chat("stop", ""), 2),
        (chat("stop", 1), 2),
        (chat("stop", index=0), 2),
        (dumped({"choices": [{"finish_reason": "stop"}, {"index": 0, "finish_reason": "stop"}]}), 2),
        (dumped({"choices": {"finish_reason": "stop"}}), 1),
        (dumped({"choices": None}), 1),
        (dumped({}), 1),
        (dumped([]), 1),
        (b"", 1),
        (b"null", 1),
        (b'{"choices": [{"finish_reason": "stop"}]} x', 1),
        (b'{"choices": [{"finish_reason": "stop"', 1),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 1),
        (b'{"error": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 1),
        (b'{"error": 1e999}', 1),
        (b"<html>", 1),
    ],
)
def test_an_answer_without_a_finish_for_each_choice_is_none(body: bytes, choices: int) -> None:
    with pytest.raises(EngineProtocolError):
        judge_answer(body, CHAT, choices)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("broken", [b'"x":"\xff"', b'"\xff":1', b'"x":"\xed\xa0\x80"', b'"x":{"y":["\xc3"]}'])
def test_an_answer_with_bytes_that_are_no_utf_8_is_none_wherever_they_stand(
    operation: Operation, broken: bytes
) -> None:
    body = b'{"choices":[{"finish_reason":"stop"}],"stop_reason":"end_turn",%b}'
    judge_answer(body % b'"x":"\xc3\xa9"', operation, 1)
    with pytest.raises(EngineProtocolError):
        judge_answer(body % broken, operation, 1)


@pytest.mark.parametrize("operation", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("value", [b"1e999", b'"\\ud800"', b"[" * 5000])
def test_an_answer_that_can_not_be_read_is_none(operation: Operation, value: bytes) -> None:
    with pytest.raises(EngineProtocolError):
        judge_answer(b'{"stop_reason":"end_turn","x":%b}' % value, operation, 1)


@pytest.mark.parametrize("body", [b"[]", b"", b'{"a":1', b"data: {}"])
def test_an_embedding_is_a_json_object(body: bytes) -> None:
    with pytest.raises(EngineProtocolError):
        judge_answer(body, EMBEDDINGS, 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"error": {"message": "m", "code": 503}}, 503),
        ({"error": "text", "choices": []}, 500),
        ({"object": "error", "message": "m", "code": 400}, 400),
        ({"error": True}, 500),
        ({"error": [0]}, 500),
        ({"error": {"code": 429}, "choices": [{"finish_reason": "stop"}]}, 429),
    ],
)
def test_a_200_that_is_an_error_is_one(body: Any, status: int) -> None:
    for operation in (CHAT, EMBEDDINGS):
        found = judge_answer(dumped(body), operation, 1)
        assert isinstance(found, EngineError)
        assert found.status == status


def test_an_error_in_a_200_keeps_secrets_too() -> None:
    found = judge_answer(dumped({"error": {"message": "sk-secret", "code": 400}}), CHAT, 1, SECRETS)
    assert isinstance(found, EngineError)
    assert found.message == "***"


@pytest.mark.parametrize("nothing", ["null", "false", "0", "0.0", "-0", '""', "{}", "{ }", "[]", "[ \n]"])
def test_an_error_of_nothing_is_none(nothing: str) -> None:
    body = b'{"error": ' + nothing.encode() + b', "object": "list", "usage": {"prompt_tokens": 1}}'
    assert judge_answer(body, EMBEDDINGS, 0) == Usage(prompt=1)


@pytest.mark.parametrize(
    ("choices", "gave_up"),
    [
        ([{"finish_reason": "abort"}], True),
        ([{"finish_reason": "abort", "message": {"role": "assistant", "content": ""}}], True),
        ([{"finish_reason": "abort", "message": None, "text": ""}], True),
        ([{"finish_reason": "abort", "message": {"role": "assistant", "content": "hi"}}], False),
        ([{"finish_reason": "abort", "message": {"tool_calls": [{}]}}], False),
        ([{"finish_reason": "abort", "text": "hi"}], False),
        ([{"finish_reason": "error"}], False),
        ([{"finish_reason": "abort"}, {"index": 1, "finish_reason": "error"}], False),
        ([{"finish_reason": "stop"}, {"index": 1, "finish_reason": "abort"}], True),
    ],
)
def test_an_answer_that_the_engine_gave_up_is_no_answer(choices: list[Any], gave_up: bool) -> None:
    found = judge_answer(dumped({"choices": choices}), CHAT, len(choices))
    assert isinstance(found, EngineError)
    assert (found.status, found.gave_up) == (503 if gave_up else 500, gave_up)


# Answers of other operations --------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [RERANK, SCORE], ids=lambda o: o.name)
def test_a_list_of_scores_is_an_answer(operation: Operation) -> None:
    assert judge_answer(b' [{"index": 0, "score": 0.5}]', operation, 0) is None
    assert judge_answer(b'{"usage": {"prompt_tokens": 4}}', operation, 0) == Usage(prompt=4)
    for body in (b"[1", b"[1] x", b"", b"7"):
        with pytest.raises(EngineProtocolError):
            judge_answer(body, operation, 0)


def test_a_list_is_no_answer_elsewhere() -> None:
    with pytest.raises(EngineProtocolError):
        judge_answer(b"[]", TOKENIZE, 0)


NAMED_USED = {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}


@pytest.mark.parametrize(
    ("operation", "body", "usage"),
    [
        (RESPONSES, {"status": "completed", "error": None, "usage": NAMED_USED}, Usage(3, 1, 2)),
        (RESPONSES, {"status": "incomplete"}, Usage()),
        (MESSAGES, {"stop_reason": "end_turn", "usage": NAMED_USED}, Usage(3, 1, 2)),
        (MESSAGES, {"stop_reason": "max_tokens", "usage": {"cache_read_input_tokens": 7}}, Usage(cached=7)),
        (MESSAGES, {"stop_reason": "x", "usage": {"output_tokens": -1, "input_tokens": True}}, Usage()),
        (MESSAGES, {"stop_reason": "x", "usage": {"output_tokens": 2**31 + 1}}, Usage()),
        (MESSAGES, {"stop_reason": "x", "usage": [1]}, Usage()),
        (
            MESSAGES,
            {
                "stop_reason": "x",
                "usage": {"input_tokens": 1, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 2},
            },
            Usage(33, 30),
        ),
    ],
)
def test_an_answer_of_a_named_kind_says_that_it_is_whole(
    operation: Operation, body: Any, usage: Usage
) -> None:
    assert judge_answer(dumped(body), operation, 0) == usage


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (RESPONSES, {"status": "in_progress"}),
        (RESPONSES, {"status": "queued"}),
        (MESSAGES, {"stop_reason": None}),
        (MESSAGES, {}),
        (MESSAGES, []),
        (RESPONSES, "completed"),
    ],
)
def test_an_answer_of_a_named_kind_that_does_not_is_none(operation: Operation, body: Any) -> None:
    with pytest.raises(EngineProtocolError):
        judge_answer(dumped(body), operation, 0)


@pytest.mark.parametrize(
    ("operation", "body", "error"),
    [
        (RESPONSES, {"status": "failed"}, EngineError(500)),
        (RESPONSES, {"status": "cancelled"}, EngineError(500)),
        (
            RESPONSES,
            {"status": "failed", "error": {"message": "m", "code": "x"}},
            EngineError(500, "m", None, "x"),
        ),
        (MESSAGES, {"type": "error", "message": "m"}, EngineError(500, "m", "error")),
        (MESSAGES, {"type": "error", "error": {"type": "t", "message": "m"}}, EngineError(500, "m", "t")),
    ],
)
def test_an_answer_of_a_named_kind_may_be_an_error(
    operation: Operation, body: Any, error: EngineError
) -> None:
    assert judge_answer(dumped(body), operation, 0) == error


# Editing ----------------------------------------------------------------------------------------------------


NAMES = st.sampled_from(["org/m", "m", 'q"\u00e9'])


@given(st.dictionaries(st.sampled_from(["a", "id", "model", "response"]), json_texts()), NAMES, NAMES, NAMES)
def test_renaming_changes_nothing_but_the_name(
    members: dict[str, str], own: str, upstream: str, public: str
) -> None:
    raw = {key: text.encode() for key, text in members.items()}
    if "model" in raw:
        raw["model"] = dumped(own)
    after = raw_members(rename_model(join_members(raw), upstream, public))
    if "model" in raw and own == upstream:
        assert json.loads(after["model"]) == public
        raw["model"] = after["model"]
    assert list(after.items()) == list(raw.items())


@pytest.mark.parametrize("spelling", [b'"org/m\xc3\xa9"', b'"org\\/m\\u00e9"', b'"\\u006frg/m\xc3\xa9"'])
def test_a_name_is_known_however_it_is_escaped(spelling: bytes) -> None:
    body = b'{"id":1e0, "model": ' + spelling + b"}"
    assert rename_model(body, "org/m\u00e9", "pub") == b'{"id":1e0,"model":"pub"}'


@pytest.mark.parametrize(
    "body", [b'{"model":"other"}', b'{"model":null}', b'{"a":{"model":"m"}}', b" { } ", b'{"model":["m"]}']
)
def test_another_name_stays_and_so_does_every_byte(body: bytes) -> None:
    assert rename_model(body, "m", "public") == body


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"model":', b'{"\xff":1,"model":"m"}', b'{"model":' + b"[" * 100_000]
)
def test_what_can_not_be_renamed_is_malformed(body: bytes) -> None:
    with pytest.raises(EngineProtocolError):
        rename_model(body, "m", "public")


@given(json_objects(), json_texts())
def test_usage_is_taken_out_and_all_else_stays(text: str, usage: str) -> None:
    before = raw_members(text.encode())
    body = text.encode().replace(b"{", b'{"usage" : ' + usage.encode() + (b"," if before else b""), 1)
    expected = {key: raw for key, raw in before.items() if key != "usage"}
    assert raw_members(drop_usage(body)) == expected


@pytest.mark.parametrize("index", [1, 7, -1])
def test_a_finish_of_a_choice_that_nobody_asked_for_makes_no_answer_whole(index: int) -> None:
    body = dumped({"choices": [{"index": index, "finish_reason": "stop"}]})
    with pytest.raises(EngineProtocolError):
        judge_answer(body, CHAT, 1)
