"""Chat requests in the words of Ollama: what keeps its bytes, what is said otherwise, what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.wire.grammar import JSON_VALUES, json_objects
from trio_gateway.errors import Problem, Refused
from trio_gateway.wire._json import raw_members
from trio_gateway.wire._ollama_request import ollama_chat_body

HELLO = [{"role": "user", "content": "hi"}]


def written(**fields: Any) -> dict[str, bytes]:
    """The members of a body that was made of these fields; bytes are JSON already."""
    members = {key: value if isinstance(value, bytes) else _json(value) for key, value in fields.items()}
    return raw_members(ollama_chat_body({"model": b'"public"', "messages": _json(HELLO), **members}, "up"))


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def said(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that come of these."""
    found: list[dict[str, Any]] = json.loads(written(messages=list(messages))["messages"])
    return found


def options(**fields: Any) -> dict[str, bytes]:
    return raw_members(written(**fields)["options"])


def refusal(**fields: Any) -> Problem:
    with pytest.raises(Refused) as caught:
        written(**fields)
    return caught.value.problem


def message_refusal(*messages: Any) -> Problem:
    return refusal(messages=list(messages))


# The frame --------------------------------------------------------------------------------------------------


def test_a_plain_question_has_the_upstream_name_its_messages_and_says_whether_to_stream() -> None:
    assert written() == {
        "model": b'"up"',
        "messages": b'[{"role":"user","content":"hi"}]',
        "stream": b"false",
    }
    assert written(stream=True)["stream"] == b"true"
    assert written(stream=None)["stream"] == b"false"


def test_a_name_with_quotes_stays_a_string() -> None:
    body = ollama_chat_body({"messages": _json(HELLO)}, 'a"b\\c\u00e9')
    assert json.loads(body)["model"] == 'a"b\\c\u00e9'


def test_fields_that_ollama_has_no_word_for_are_left_out() -> None:
    fields = {
        "user": "u",
        "logit_bias": {"1": 2},
        "stream_options": {"include_usage": True},
        "n": 1,
        "parallel_tool_calls": True,
        "_debug_render_only": True,
        "template": "x",
        "anything": [1],
    }
    assert written(**fields) == written()


OPTIONAL = [
    "n", "stream", "tools", "tool_choice", "response_format", "reasoning_effort", "reasoning", "think",
    "stop", "temperature", "top_p", "seed", "max_tokens", "max_completion_tokens", "frequency_penalty",
    "presence_penalty", "logprobs", "top_logprobs", "options", "keep_alive",
]  # fmt: skip


@pytest.mark.parametrize("field", OPTIONAL)
def test_null_equals_absent(field: str) -> None:
    assert written(**{field: b"null"}) == written()


def test_more_than_one_choice_is_refused() -> None:
    problem = refusal(n=2)
    assert (problem.status, problem.code, problem.param) == (400, "invalid_value", "n")
    assert problem.final


# Messages ---------------------------------------------------------------------------------------------------


@given(st.text(), st.booleans(), st.sampled_from(["user", "system", "assistant", "tool"]))
def test_every_text_arrives_as_it_was(text: str, escaped: bool, role: str) -> None:
    raw = json.dumps(text, ensure_ascii=escaped).encode()
    found = written(messages=b'[{"role": "' + role.encode() + b'", "content": ' + raw + b"}]")["messages"]
    assert json.loads(found) == [{"role": role, "content": text}]
    assert raw in found


@given(st.lists(st.text(), max_size=4))
@example([" a ", "", "\n"])
def test_texts_in_parts_are_joined_as_ollama_joins_messages(texts: list[str]) -> None:
    parts = [{"type": "text", "text": text} for text in texts]
    assert said({"role": "user", "content": parts}) == [{"role": "user", "content": "\n\n".join(texts)}]


def test_a_developers_message_is_the_systems() -> None:
    assert said({"role": "developer", "content": "x"}) == [{"role": "system", "content": "x"}]


def test_names_and_unknown_fields_of_messages_are_left_out() -> None:
    message = {"role": "user", "content": "x", "name": "n", "weight": 1, "tool_calls": None}
    assert said(message) == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_what_was_thought_goes_back_by_ollamas_name(field: str) -> None:
    message = {"role": "assistant", "content": "x", field: "why \u00e9"}
    assert said(message) == [{"role": "assistant", "content": "x", "thinking": "why \u00e9"}]
    assert said({"role": "assistant", "content": "x", field: None}) == [{"role": "assistant", "content": "x"}]


def test_an_assistants_missing_content_is_empty_and_anyone_elses_is_refused() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert said({"role": "assistant", "content": None, "tool_calls": calls})[0]["content"] == ""
    assert said({"role": "assistant"})[0]["content"] == ""
    for message in ({"role": "user"}, {"role": "user", "content": None}, {"role": "tool", "content": 1}):
        assert message_refusal(*HELLO, message).param == "messages.1.content"


@given(st.binary(max_size=40), st.sampled_from(["image/png", "image/jpeg", "image/webp", "", "Image/PNG"]))
def test_images_in_data_urls_stand_beside_the_text(picture: bytes, kind: str) -> None:
    data = base64.b64encode(picture).decode()
    url = f"data:{kind};base64,{data}"
    parts = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": url},
    ]
    (message,) = said({"role": "user", "content": parts})
    assert message == {"role": "user", "content": "what?", "images": [data, data]}


def test_a_data_url_may_be_written_in_capitals() -> None:
    parts = [{"type": "image_url", "image_url": "DATA:image/png;charset=x;BASE64,AbC="}]
    assert said({"role": "user", "content": parts})[0]["images"] == ["AbC="]


def test_sounds_stand_where_images_do() -> None:
    parts = [{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}]
    assert said({"role": "user", "content": parts}) == [
        {"role": "user", "content": "", "images": ["UklGRg=="]}
    ]


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/cat.png",
        "http://169.254.169.254/",
        "file:///etc/passwd",
        "data:image/png,AAAA",
        "data:image/png;base64",
        "AAAA",
        "",
    ],
)
def test_an_image_that_would_have_to_be_fetched_is_refused_without_quoting_it(url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    problem = message_refusal({"role": "user", "content": [part]})
    assert problem.param == "messages.0.content.0.image_url"
    assert not url or url not in problem.message


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "file", "file": {"file_id": "x"}}, "messages.0.content.0.type"),
        ({"type": "image_url"}, "messages.0.content.0.type"),
        ({"type": "text"}, "messages.0.content.0.text"),
        ({"type": "text", "text": 1}, "messages.0.content.0.text"),
        ({"type": "image_url", "image_url": {"url": 1}}, "messages.0.content.0.image_url.url"),
        ({"text": "x"}, "messages.0.content.0"),
        ("x", "messages.0.content.0"),
    ],
)
def test_a_part_that_can_not_be_said_is_refused_by_its_path(part: Any, param: str) -> None:
    problem = message_refusal({"role": "user", "content": [part]})
    assert (problem.code, problem.param) == ("invalid_value", param)
    assert problem.message.startswith(f"'{param}' ")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages.1"),
        ({"role": 1, "content": "x"}, "messages.1.role"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages.1.tool_calls.0"),
        ({"role": "assistant", "tool_calls": {}}, "messages.1.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 1}}]},
         "messages.1.tool_calls.0.function.name"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages.1.tool_call_id"),
    ],
)  # fmt: skip
def test_a_message_of_another_shape_is_refused_by_its_path(message: Any, param: str) -> None:
    assert message_refusal(*HELLO, message).param == param


# Tools ------------------------------------------------------------------------------------------------------


@given(json_objects())
def test_tools_keep_their_bytes(parameters: str) -> None:
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}]'.encode()
    assert written(tools=tools)["tools"] == tools


def test_tools_that_must_not_be_called_are_not_shown() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert "tools" not in written(tools=tools, tool_choice="none")
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        assert json.loads(written(tools=tools, tool_choice=choice)["tools"]) == tools


def calling(arguments: Any, **identity: str) -> dict[str, Any]:
    call = {**identity, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@given(json_objects())
def test_the_arguments_of_a_call_are_an_object_number_for_number(arguments: str) -> None:
    body = written(messages=[calling(arguments, id="c1")])["messages"]
    assert b'"arguments":' + arguments.strip().encode() + b"}" in body
    call = json.loads(body)[0]["tool_calls"][0]
    assert call == {"id": "c1", "function": {"name": "f", "arguments": json.loads(arguments)}}


@pytest.mark.parametrize("nothing", ["", "  ", None, {}, "{}"])
def test_no_arguments_are_an_empty_object(nothing: Any) -> None:
    (message,) = said(calling(nothing))
    assert message["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    "arguments",
    ["{", "[1]", "1", '"x"', '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "{}{}",
     '{"a": ' + "[" * 101 + "]" * 101 + "}", 5, [1]],
)  # fmt: skip
def test_arguments_that_are_no_strict_object_are_refused_without_quoting_them(arguments: Any) -> None:
    problem = message_refusal(*HELLO, calling(arguments))
    assert problem.param == "messages.1.tool_calls.0.function.arguments"
    assert problem.message.endswith("must be a string that holds a JSON object")


def test_a_tools_answer_names_its_call_and_its_tool() -> None:
    answer = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    _, told = said(calling("{}", id="c1"), answer)
    assert told == {"role": "tool", "content": "42", "tool_call_id": "c1", "tool_name": "f"}
    assert said(answer) == [{"role": "tool", "content": "42", "tool_call_id": "c1"}]
    assert said({**answer, "name": "g"})[0]["tool_name"] == "g"


# Options ----------------------------------------------------------------------------------------------------

NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "max_tokens": "num_predict",
    "max_completion_tokens": "num_predict",
    "top_k": "top_k",
    "min_p": "min_p",
}


@pytest.mark.parametrize(("field", "name"), NUMBERS.items())
@pytest.mark.parametrize("number", [b"0", b"1e0", b"-0.10", b"123456789012345678901234567890"])
def test_numbers_keep_their_bytes(field: str, name: str, number: bytes) -> None:
    assert options(**{field: number}) == {name: number}


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["hot", True, [1], {}])
def test_what_is_no_number_is_refused_before_it_looks_like_the_engines_failure(
    field: str, value: Any
) -> None:
    problem = refusal(**{field: value})
    assert (problem.status, problem.code, problem.param) == (400, "invalid_value", field)


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert options(max_completion_tokens=5, max_tokens=9) == {"num_predict": b"5"}
    assert options(max_tokens=9, max_completion_tokens=None) == {"num_predict": b"9"}


@pytest.mark.parametrize(
    ("stop", "found"), [('"\\u00e9"', '["\\u00e9"]'), ('["a", "b"]', '["a", "b"]'), ("[]", "[]")]
)
def test_stop_texts_are_a_list(stop: str, found: str) -> None:
    assert options(stop=stop.encode()) == {"stop": found.encode()}


@pytest.mark.parametrize(("stop", "param"), [(1, "stop"), ({}, "stop"), (["a", 1], "stop.1")])
def test_stop_texts_that_are_none_are_refused(stop: Any, param: str) -> None:
    assert refusal(stop=stop).param == param


def test_what_the_caller_leaves_out_is_left_to_the_model() -> None:
    assert "options" not in written()


def test_ollamas_own_options_stand_under_what_the_common_names_say() -> None:
    assert options(options={"num_ctx": 8, "seed": 1}, seed=2) == {"num_ctx": b"8", "seed": b"2"}
    assert refusal(options=[1]).param == "options"


@pytest.mark.parametrize("field", ["logprobs", "top_logprobs", "truncate", "shift", "keep_alive"])
@given(JSON_VALUES.filter(lambda value: value is not None))
def test_fields_of_the_same_name_keep_their_bytes(field: str, value: Any) -> None:
    assert written(**{field: value})[field] == _json(value)


# Form and thought -------------------------------------------------------------------------------------------


def test_plain_text_is_no_format() -> None:
    assert "format" not in written(response_format={"type": "text"})


def test_any_object_is_the_word_json() -> None:
    assert written(response_format={"type": "json_object"})["format"] == b'"json"'
    assert written(response_format={"type": "json_schema"})["format"] == b'"json"'
    assert (
        written(response_format={"type": "json_schema", "json_schema": {"name": "x"}})["format"] == b'"json"'
    )


@given(json_objects())
def test_a_schema_keeps_its_bytes(schema: str) -> None:
    form = b'{"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": %b}}'
    assert written(response_format=form % schema.encode())["format"] == schema.encode()


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ("json", "response_format"),
        ({}, "response_format"),
        ({"type": 1}, "response_format.type"),
        ({"type": "structural_tag"}, "response_format.type"),
        ({"type": "json_schema", "json_schema": 1}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "response_format.json_schema.schema"),
    ],
)
def test_a_format_that_can_not_be_said_is_refused(form: Any, param: str) -> None:
    assert refusal(response_format=form).param == param


EFFORTS = {
    "none": b"false",
    "minimal": b'"low"',
    "low": b'"low"',
    "medium": b'"medium"',
    "high": b'"high"',
    "xhigh": b'"max"',
    "max": b'"max"',
}


@pytest.mark.parametrize(("effort", "think"), EFFORTS.items())
def test_the_effort_of_thinking_is_said_on_ollamas_scale(effort: str, think: bytes) -> None:
    assert written(reasoning_effort=effort)["think"] == think
    assert written(reasoning={"effort": effort})["think"] == think


def test_ollamas_own_word_for_thinking_goes_first() -> None:
    assert written(think=False, reasoning_effort="high")["think"] == b"false"
    assert written(think="high", reasoning={"effort": "low"})["think"] == b'"high"'
    assert "think" not in written(reasoning={"effort": None}) | written(reasoning={"summary": "auto"})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "hardest"}, "reasoning_effort"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"reasoning": {"effort": "hardest"}}, "reasoning.effort"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"reasoning": "high"}, "reasoning"),
    ],
)
def test_an_effort_off_every_scale_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param
