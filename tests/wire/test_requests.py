"""Public bodies: the fields that are acted on are checked, all others reach the engine as they came."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.grammar import json_objects
from trio_gateway.contract import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    OPERATIONS,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    Dialect,
    InternalRequest,
    Operation,
)
from trio_gateway.errors import Problem, Refused
from trio_gateway.wire._json import raw_members, read_object
from trio_gateway.wire._requests import (
    MAX_CHOICES,
    ReadBody,
    forbidden_field,
    internal_body,
    model_of,
    read_body,
)
from trio_gateway.wire._scan import Json, JsonObject

TALK = '"messages": [{"role": "user", "content": "hi"}]'
INPUTS = {
    CHAT: TALK,
    COMPLETIONS: '"prompt": "hi"',
    EMBEDDINGS: '"input": "hi"',
    RESPONSES: '"input": "hi"',
    MESSAGES: TALK,
    COUNT_TOKENS: TALK,
    RERANK: '"query": "hi", "documents": ["a"]',
    SCORE: '"text_1": "a", "text_2": "b"',
    TOKENIZE: '"prompt": "hi"',
    DETOKENIZE: '"tokens": [1]',
}
JSON_OPERATIONS = [operation for operation in OPERATIONS if not operation.multipart]
named = pytest.mark.parametrize("operation", JSON_OPERATIONS, ids=lambda operation: operation.name)


def body_of(operation: Operation, *fields: str) -> bytes:
    """A body with a model, something to do, and further fields as they are written."""
    return ("{" + ", ".join(['"model": "m"', INPUTS[operation], *fields]) + "}").encode()


def read(body: bytes, operation: Operation = CHAT) -> ReadBody:
    return read_body(operation, read_object(body, 1000))


def refusal(body: bytes, operation: Operation = CHAT) -> Problem:
    with pytest.raises(Refused) as refused:
        read(body, operation)
    problem = refused.value.problem
    assert (problem.status, problem.type, problem.final) == (400, "invalid_request_error", True)
    return problem


# What the gateway acts on -----------------------------------------------------------------------------------


def test_a_bare_body_has_the_defaults() -> None:
    found = read(body_of(CHAT))
    assert (found.model, found.stream, found.n, found.choices) == ("m", False, 1, 1)
    assert (found.wants_usage, found.wants_running_usage) == (False, False)
    assert list(found.members) == ["model", "messages"]


OPTIONAL = [
    "stream",
    "stream_options",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "user",
    "prompt_cache_key",
]


@pytest.mark.parametrize("field", OPTIONAL)
def test_null_equals_absent_for_every_optional_field(field: str) -> None:
    with_null, without = read(body_of(CHAT, f'"{field}": null')), read(body_of(CHAT))
    assert with_null.members.pop(field) == b"null"
    assert with_null == without


@pytest.mark.parametrize("field", ["include_usage", "continuous_usage_stats"])
def test_null_equals_absent_inside_stream_options(field: str) -> None:
    found = read(body_of(CHAT, f'"stream_options": {{"{field}": null}}'))
    assert (found.wants_usage, found.wants_running_usage) == (False, False)


@pytest.mark.parametrize(
    ("options", "usage", "running"),
    [
        ("{}", False, False),
        ('{"include_usage": true}', True, False),
        ('{"include_usage": false}', False, False),
        ('{"include_usage": true, "continuous_usage_stats": true}', True, True),
        ('{"continuous_usage_stats": true}', False, False),
        ('{"include_usage": true, "include_obfuscation": false}', True, False),
    ],
)
def test_running_usage_is_wanted_only_beside_usage(options: str, usage: bool, running: bool) -> None:
    found = read(body_of(CHAT, '"stream": true', f'"stream_options": {options}'))
    assert (found.wants_usage, found.wants_running_usage) == (usage, running)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("model", ["1", "true", "[]", "{}", '""', '"' + "m" * 513 + '"']),
        ("stream", ["1", "0", '"true"', "[]"]),
        ("stream_options", ["true", "[]", '"x"']),
        ("stream_options.include_usage", ['{"include_usage": 1}', '{"include_usage": "yes"}']),
        ("stream_options.continuous_usage_stats", ['{"continuous_usage_stats": 0}']),
        ("n", ["0", "-1", "1.0", "1e0", '"1"', "true", "[]", str(MAX_CHOICES + 1), "1" * 30]),
        ("max_tokens", ["0", "-1", "1.5", '"5"', "true", str(2**31), "9" * 40]),
        ("max_completion_tokens", ["0", "1.0", "{}"]),
        ("user", ["1", "{}", "false"]),
        ("prompt_cache_key", ["1", "[]"]),
    ],
)
def test_a_wrong_value_is_named_by_its_path_and_not_quoted(field: str, bad: list[str]) -> None:
    top = field.partition(".")[0]
    for text in bad:
        fields = {"model": '"m"', "messages": '[{"content": "hi"}]', top: text}
        body = "{" + ", ".join(f'"{key}": {value}' for key, value in fields.items()) + "}"
        problem = refusal(body.encode())
        assert (problem.code, problem.param) == ("invalid_value", field)
        assert problem.message.startswith(f"'{field}' ")
        assert text not in problem.message or len(text) < 4


@pytest.mark.parametrize(
    ("field", "good"),
    [
        ("n", ["1", str(MAX_CHOICES)]),
        ("max_tokens", ["1", str(2**31 - 1)]),
        ("max_completion_tokens", ["1", "4096"]),
        ("user", ['""', '"\\u00e9"']),
        ("stream", ["true", "false"]),
    ],
)
def test_a_right_value_is_taken(field: str, good: list[str]) -> None:
    for text in good:
        assert read(body_of(CHAT, f'"{field}": {text}')).members[field] == text.encode()


@named
def test_without_a_model_or_something_to_do_there_is_nothing_to_do(operation: Operation) -> None:
    for text in ("{" + INPUTS[operation] + "}", "{" + INPUTS[operation] + ', "model": null}'):
        problem = refusal(text.encode(), operation)
        assert problem.param == "model"
    for text in ('{"model": "m"}', f'{{"model": "m", "{operation.input}": null}}'):
        problem = refusal(text.encode(), operation)
        assert (problem.code, problem.param) == ("missing_field", operation.input)


def test_the_model_is_judged_by_itself() -> None:
    assert model_of(JsonObject({"model": "m"}, {})) == "m"
    absent: list[dict[str, Json]] = [{}, {"model": None}]
    for value in absent:
        with pytest.raises(Refused) as refused:
            model_of(JsonObject(value, {}))
        assert (refused.value.problem.code, refused.value.problem.param) == ("missing_field", "model")
    wrong: list[Json] = ["", 1, True, ["m"], {}]
    for name in wrong:
        with pytest.raises(Refused) as refused:
            model_of(JsonObject({"model": name}, {}))
        assert (refused.value.problem.code, refused.value.problem.param) == ("invalid_value", "model")


LONG = "x" * 300_000


@pytest.mark.parametrize("field", ["model", "user", "prompt_cache_key", "stream_options", "n"])
def test_what_the_gateway_acts_on_is_not_long(field: str) -> None:
    fields = {"model": '"m"', field: f'{{"x": "{LONG}"}}' if field == "stream_options" else f'"{LONG}"'}
    text = "{" + TALK + "".join(f', "{name}": {raw}' for name, raw in fields.items()) + "}"
    problem = refusal(text.encode())
    assert (problem.code, problem.param) == ("invalid_value", field)
    if field == "model":
        with pytest.raises(Refused) as refused:
            model_of(read_object(text.encode(), 1000))
        assert refused.value.problem.param == "model"


def test_a_long_input_is_judged_by_what_its_items_are() -> None:
    many = ", ".join(["12"] * 100_000)
    prompts = ((f"[{many}]", 1), (f'["{LONG}", "b"]', 2), (f"[[{many}], []]", 2), (f'"{LONG}"', 1))
    for prompt, choices in prompts:
        body = f'{{"model": "m", "prompt": {prompt}, "n": 2}}'.encode()
        assert read_body(COMPLETIONS, read_object(body, 200_000)).choices == choices * 2
    for prompt in (f"[{many}, true]", f'["{LONG}", 1]', f"[{many}, 1.5]"):
        body = f'{{"model": "m", "prompt": {prompt}}}'.encode()
        with pytest.raises(Refused) as refused:
            read_body(COMPLETIONS, read_object(body, 200_000))
        assert refused.value.problem.param == "prompt"
    for messages in (f'["{LONG}"]', f'{{"a": "{LONG}"}}'):
        assert refusal(f'{{"model": "m", "messages": {messages}}}'.encode()).param == "messages"


@named
def test_only_what_streams_can_be_asked_for_as_a_stream(operation: Operation) -> None:
    assert not read(body_of(operation, '"stream": false'), operation).stream
    if operation in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        assert read(body_of(operation, '"stream": true'), operation).stream
    else:
        problem = refusal(body_of(operation, '"stream": true'), operation)
        assert (problem.code, problem.param) == ("invalid_value", "stream")


@pytest.mark.parametrize(
    ("operation", "fields", "tokens"),
    [
        (CHAT, "", None),
        (CHAT, '"max_tokens": 5', 5),
        (CHAT, '"max_completion_tokens": 7', 7),
        (CHAT, '"max_tokens": 5, "max_completion_tokens": 7', 7),
        (CHAT, '"max_output_tokens": 5', None),
        (COMPLETIONS, '"max_tokens": 5, "max_completion_tokens": 7', 5),
        (MESSAGES, '"max_tokens": 5', 5),
        (RESPONSES, '"max_output_tokens": 9, "max_tokens": 5', 9),
        (RESPONSES, '"max_tokens": 5', None),
    ],
)
def test_the_bound_of_the_output_is_read_where_the_operation_names_it(
    operation: Operation, fields: str, tokens: int | None
) -> None:
    assert read(body_of(operation, *([fields] if fields else [])), operation).tokens == tokens


# Something to do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", ['"hi"', "[]", "{}", "1", '["hi"]', '[{"role": "user"}, null]', "[[]]"])
def test_messages_are_objects_in_an_array(messages: str) -> None:
    problem = refusal(f'{{"model": "m", "messages": {messages}}}'.encode())
    assert (problem.code, problem.param) == ("invalid_value", "messages")


@pytest.mark.parametrize("operation", [MESSAGES, COUNT_TOKENS], ids=lambda o: o.name)
def test_anthropic_s_messages_are_objects_in_an_array_too(operation: Operation) -> None:
    problem = refusal(b'{"model": "m", "messages": "hi"}', operation)
    assert (problem.code, problem.param) == ("invalid_value", "messages")


@pytest.mark.parametrize("given_input", ["[]", "1", "{}", "true"])
def test_the_input_of_a_response_is_text_or_items(given_input: str) -> None:
    problem = refusal(f'{{"model": "m", "input": {given_input}}}'.encode(), RESPONSES)
    assert (problem.code, problem.param) == ("invalid_value", "input")
    assert read(b'{"model": "m", "input": [{"role": "user"}]}', RESPONSES).choices == 0


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        (RESPONSES, "prompt"),
        (RESPONSES, "previous_response_id"),
        (SCORE, "queries"),
        (SCORE, "query"),
        (SCORE, "data_1"),
        (TOKENIZE, "messages"),
        (TOKENIZE, "content"),
        (TOKENIZE, "text"),
    ],
)
def test_some_operations_have_other_words_for_what_is_to_do(operation: Operation, field: str) -> None:
    assert read(f'{{"model": "m", "{field}": "x"}}'.encode(), operation).model == "m"
    problem = refusal(f'{{"model": "m", "{field}": null}}'.encode(), operation)
    assert (problem.code, problem.param) == ("missing_field", operation.input)


PROMPTS = {
    '"hi"': 1,
    '""': 1,
    "[1]": 1,
    "[1, 2, 3]": 1,
    '["a"]': 1,
    '["a", "b", "c"]': 3,
    "[[1, 2], [3]]": 2,
    "[[1]]": 1,
    '[{"prompt_embeds": "x"}, {}]': 2,
}


@pytest.mark.parametrize(("prompt", "count"), PROMPTS.items())
@pytest.mark.parametrize("n", [None, 1, 3])
def test_choices_are_prompts_times_n(prompt: str, count: int, n: int | None) -> None:
    body = f'{{"model": "m", "prompt": {prompt}, "n": {json.dumps(n)}}}'.encode()
    found = read(body, COMPLETIONS)
    assert (found.n, found.choices) == (n or 1, count * (n or 1))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_embeddings_have_no_choices(prompt: str) -> None:
    assert read(f'{{"model": "m", "input": {prompt}, "n": 2}}'.encode(), EMBEDDINGS).choices == 0


@pytest.mark.parametrize("n", [1, 2, MAX_CHOICES])
def test_a_chat_has_n_choices(n: int) -> None:
    assert read(body_of(CHAT, f'"n": {n}')).choices == n


@pytest.mark.parametrize(
    "prompt", ["[]", "1", "{}", "true", "[true]", '["a", 1]', "[[1], 2]", "[null]", "[1.5]", '[{}, "a"]']
)
@pytest.mark.parametrize("operation", [COMPLETIONS, EMBEDDINGS], ids=lambda o: o.name)
def test_prompts_are_text_or_tokens_of_one_kind(operation: Operation, prompt: str) -> None:
    problem = refusal(f'{{"model": "m", "{operation.input}": {prompt}}}'.encode(), operation)
    assert (problem.code, problem.param) == ("invalid_value", operation.input)


# Towards the engine -----------------------------------------------------------------------------------------

PLAIN = Dialect("openai", False, None, None, False, False, 0.5, frozenset())
FULL = Dialect("full", True, None, "rid", True, False, 0.5, frozenset({"priority"}))
ATTEMPT = "0" * 32 + "-01"


def internal(body: bytes, operation: Operation = CHAT, upstream: str = "m", **others: Any) -> InternalRequest:
    found = read(body, operation)
    return InternalRequest(
        exchange_id="0" * 32,
        client_request_id=None,
        tenant="acme",
        key_id=None,
        operation=operation,
        model=found.model,
        upstream_model=upstream,
        members=found.members,
        size=len(body),
        stream=found.stream,
        choices=found.choices,
        n=found.n,
        wants_usage=found.wants_usage,
        wants_running_usage=found.wants_running_usage,
        arrived=0.0,
        deadline=1.0,
        **others,
    )


def sent(body: bytes, dialect: Dialect = PLAIN, upstream: str = "m", **others: Any) -> dict[str, bytes]:
    request = internal(body, upstream=upstream, **others)
    return raw_members(b"".join(internal_body(request, dialect, ATTEMPT, "salt")))


@given(json_objects(keys=st.text(min_size=1, max_size=5).map("x_{}".format)), st.booleans())
def test_every_other_field_reaches_the_engine_as_it_was_written(text: str, stream: bool) -> None:
    other = text.strip()[1:-1].strip()
    body = body_of(CHAT, f'"stream": {json.dumps(stream)}', *([other] if other else []))
    given_members = raw_members(body)
    for dialect in (PLAIN, FULL):
        members = sent(body, dialect, upstream="engine/m")
        assert {key: raw for key, raw in members.items() if key.startswith("x_")} == {
            key: raw for key, raw in given_members.items() if key.startswith("x_")
        }
        assert [key for key in members if key in given_members] == list(given_members)
        assert members["messages"] == given_members["messages"]


@pytest.mark.parametrize(
    "spelling", ["1e0", "0.70", "-0.0", "1E-2", "123456789012345678901234567890", '"\\u00e9"']
)
def test_a_sampling_field_keeps_its_spelling(spelling: str) -> None:
    body = body_of(CHAT, f'"temperature": {spelling}', f'"deep": {{"er": [{spelling}]}}')
    members = sent(body, FULL)
    assert members["temperature"] == spelling.encode()
    assert spelling.encode() in members["deep"]


def test_the_engine_gets_its_own_name_of_the_model() -> None:
    assert sent(body_of(CHAT), upstream="org/m")["model"] == b'"org/m"'
    assert list(sent(body_of(CHAT), upstream="org/m")) == ["model", "messages"]


def test_a_body_that_needs_nothing_more_gets_nothing_more() -> None:
    assert sent(body_of(CHAT)) == raw_members(body_of(CHAT))


def options_of(members: dict[str, bytes]) -> Any:
    return json.loads(members["stream_options"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {"include_usage": True}),
        ("null", {"include_usage": True}),
        ("{}", {"include_usage": True}),
        ('{"include_usage": false}', {"include_usage": True}),
        ('{"include_usage": null, "x": 1}', {"include_usage": True, "x": 1}),
    ],
)
def test_usage_is_always_asked_of_a_stream(options: str | None, expected: dict[str, Any]) -> None:
    fields = [] if options is None else [f'"stream_options": {options}']
    body = body_of(CHAT, '"stream": true', *fields)
    assert options_of(sent(body)) == expected
    assert options_of(sent(body, FULL)) == expected | {"continuous_usage_stats": True}
    assert "stream_options" not in sent(body_of(CHAT))


@pytest.mark.parametrize("operation", [MESSAGES, RESPONSES, EMBEDDINGS], ids=lambda o: o.name)
def test_usage_is_not_asked_where_it_comes_anyway(operation: Operation) -> None:
    body = body_of(operation, '"stream": true') if operation.streams else body_of(operation)
    assert "stream_options" not in sent(body, FULL, operation=operation)


@pytest.mark.parametrize(
    ("operation", "kind", "field"),
    [
        (CHAT, "vllm", "max_tokens"),
        (CHAT, "openai", "max_completion_tokens"),
        (COMPLETIONS, "openai", "max_tokens"),
        (MESSAGES, "vllm", "max_tokens"),
        (RESPONSES, "vllm", "max_output_tokens"),
        (EMBEDDINGS, "vllm", None),
        (TOKENIZE, "vllm", None),
    ],
)
def test_the_model_s_bound_stands_in_the_operation_s_own_field(
    operation: Operation, kind: str, field: str | None
) -> None:
    dialect = Dialect(kind, False, None, None, False, False, 0.5, frozenset())
    bounded = sent(body_of(operation), dialect, operation=operation, output_limit=77)
    free = sent(body_of(operation), dialect, operation=operation)
    assert bounded == free | ({field: b"77"} if field else {})


def test_defaults_fill_only_what_the_caller_left_open() -> None:
    defaults = {"temperature": b"0.70", "top_p": b"1e0", "seed": b"1"}
    body = body_of(CHAT, '"top_p": null', '"seed": 0')
    members = sent(body, defaults=defaults)
    assert (members["temperature"], members["top_p"], members["seed"]) == (b"0.70", b"1e0", b"0")


def test_an_alias_becomes_the_engine_s_name_however_it_is_spelt() -> None:
    body = ('{"model": "\\u006d", ' + TALK + "}").encode()
    assert sent(body)["model"] == b'"\\u006d"'
    assert sent(body, upstream="org/m")["model"] == b'"org/m"'


def test_an_engine_with_an_api_of_its_own_gets_its_own_body() -> None:
    native = Dialect("ollama", False, None, None, False, False, 0.5, frozenset(), native_chat=True)
    members = sent(body_of(CHAT, '"stream": true'), native, upstream="org/m")
    assert (members["model"], "stream_options" in members) == (b'"org/m"', False)
    prompt = body_of(COMPLETIONS)
    assert sent(prompt, native, operation=COMPLETIONS) == sent(prompt, operation=COMPLETIONS)


def test_our_identity_replaces_whatever_the_caller_sent() -> None:
    body = body_of(CHAT, '"rid": "theirs"', '"cache_salt": "theirs"')
    members = sent(body, FULL)
    assert (members["rid"], members["cache_salt"]) == (b'"' + ATTEMPT.encode() + b'"', b'"salt"')
    assert sent(body)["rid"] == b'"theirs"'


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ((), None),
        (('"x": 1',), None),
        (('"priority": 1',), "priority"),
        (('"x": 1', '"rid": "a"', '"priority": 1'), "rid"),
        (('"priority": null', '"rid":  null '), None),
        (('"priority": false',), "priority"),
        (('"priority": "null"',), "priority"),
        (('"deep": {"priority": 1}',), None),
    ],
)
def test_a_field_that_steers_the_engine_is_found_unless_it_is_null(
    fields: tuple[str, ...], found: str | None
) -> None:
    members = read(body_of(CHAT, *fields)).members
    assert forbidden_field(members, frozenset({"priority", "rid"})) == found
    assert forbidden_field(members, frozenset()) is None
