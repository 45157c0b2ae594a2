"""Requests: a body is refused with a clear word, or reaches the engine as it was, but for what is ours."""

from __future__ import annotations

from typing import Any, Final

from trio_gateway.contract import OPERATIONS, Dialect, InternalRequest, Operation
from trio_gateway.errors import CODES, Problem, Refused
from trio_gateway.fleet import DIALECTS
from trio_gateway.wire import ReadBody, forbidden_field, internal_body, model_of, read_body, read_object
from trio_gateway.wire._ollama_request import ollama_chat_body

from ..target import Target, seed, split
from .json_bodies import read_by_python

VALUES: Final = 1000
UPSTREAM: Final = "org/\u00e9"
ATTEMPT: Final = "0" * 32 + "-01"
JSON_OPERATIONS: Final = tuple(operation for operation in OPERATIONS if not operation.multipart)
KINDS: Final = tuple(DIALECTS.values())


def check(data: bytes) -> None:
    """See `Target`. Options: the operation, the dialect."""
    body, (which, kind) = split(data, 2)
    operation = JSON_OPERATIONS[which % len(JSON_OPERATIONS)]
    dialect = KINDS[kind % len(KINDS)]
    try:
        whole = read_object(body, VALUES)
        model = model_of(whole)
        read = read_body(operation, whole)
    except Refused as refused:
        expect_clear(refused.problem)
        return
    value = whole.value
    assert read.model == model == value["model"]
    _expect_read(read, value, operation)
    _expect_engine_body(_request(read, operation), dict(value), dialect, read)
    if operation.name == "chat.completions":
        _expect_ollama_body(read)


def expect_clear(problem: Problem) -> None:
    """A refusal names a known code, and says printable words."""
    assert problem.code in CODES
    assert 400 <= problem.status < 500
    assert problem.message.isprintable()
    assert len(problem.message) < 1000
    problem.message.encode()
    (problem.param or "").encode()


def _expect_read(read: ReadBody, value: dict[str, Any], operation: Operation) -> None:
    assert read.stream is bool(value.get("stream"))
    assert operation.streams or not read.stream
    assert (read.choices > 0) is operation.choices
    assert list(read.members) == list(value)
    steering = frozenset({"rid", "priority"})
    found = forbidden_field(read.members, steering)
    assert (found is None) is all(value.get(name) is None for name in steering)


def _request(read: ReadBody, operation: Operation) -> InternalRequest:
    return InternalRequest(
        exchange_id="0" * 32,
        client_request_id=None,
        tenant="t",
        key_id=None,
        operation=operation,
        model=read.model,
        upstream_model=UPSTREAM,
        members=read.members,
        size=0,
        stream=read.stream,
        choices=read.choices,
        n=read.n,
        wants_usage=read.wants_usage,
        wants_running_usage=read.wants_running_usage,
        arrived=0.0,
        deadline=1.0,
    )


def _expect_engine_body(
    request: InternalRequest, value: dict[str, Any], dialect: Dialect, read: ReadBody
) -> None:
    """The engine reads what was checked, and besides only what is ours."""
    try:
        written = b"".join(internal_body(request, dialect, ATTEMPT, "salt"))
    except Refused as refused:  # some engines can not be asked for some of it
        assert dialect.native(request.operation)
        expect_clear(refused.problem)
        return
    if dialect.native(request.operation):
        return  # said in other words
    theirs = read_by_python(written, VALUES + 10)
    assert theirs is not None, written
    ours = {"model": UPSTREAM}
    if dialect.request_id_field is not None:
        ours[dialect.request_id_field] = ATTEMPT
    if dialect.cache_salt:
        ours["cache_salt"] = "salt"
    asked = theirs.get("stream_options")
    if request.stream and request.operation.choices:
        assert isinstance(asked, dict)
        assert asked["include_usage"] is True
        asked.pop("include_usage")
        asked.pop("continuous_usage_stats", None)
        before = value.pop("stream_options", None) or {}
        before.pop("include_usage", None)
        before.pop("continuous_usage_stats", None)
        assert repr(theirs.pop("stream_options")) == repr(before)
    wanted = {**value, **ours}
    assert repr(sorted(theirs.items())) == repr(sorted(wanted.items()))
    untouched = [key for key in read.members if key not in ours and key != "stream_options"]
    assert all(read.members[key] in written for key in untouched)


def _expect_ollama_body(read: ReadBody) -> None:
    """What Ollama is asked is JSON as strict as what was read, or it is refused."""
    try:
        written = ollama_chat_body(read.members, UPSTREAM)
    except Refused as refused:
        expect_clear(refused.problem)
        return
    theirs = read_by_python(written, 1_000_000)
    assert theirs is not None, written
    assert theirs["model"] == UPSTREAM
    assert theirs["stream"] is read.stream


_BODIES: Final = (
    b'{"model":"m1","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{'
    b'"include_usage":true,'
    b'"x":1},"n":2,"temperature":1e0,"seed":123456789012345678901}',
    b'{"model":"m1","prompt":["a","b"],"max_tokens":5,"stream":false,"logit_bias":{"5":-1.0}}',
    b'{"model":"m1","prompt":[[1,2],[3]],"n":null,"rid":"x","priority":null,"cache_salt":"mine"}',
    b'{"model":"m1","input":"a","encoding_format":"base64","user":"u","stream_options":null,"stream":true}',
    b'{"model":"m1","query":"q","documents":["a"],"text_1":"a","text_2":["b"],"tokens":[1],'
    b'"prompt_cache_key":"k"}',
    b'{"model":"m1","messages":[{"role":"system","content":[{"type":"text","text":"a"},{"type":"image_url",'
    b'"image_url":'
    b'{"url":"data:image/png;base64,AA=="}}]},{"role":"assistant","content":null,"tool_calls":[{"id":"c",'
    b'"function":'
    b'{"name":"f","arguments":"{\\"a\\": 1e0}"}}]},{"role":"tool","tool_call_id":"c","content":"r"}],"stop":'
    b'"x",'
    b'"response_format":{"type":"json_schema","json_schema":{"schema":{"a":1}}},"reasoning_effort":"low",'
    b'"tools":[]}',
    b'{"model":"m1","messages":[{"role":"user","content":"\\ud83d\\ude00"}],"options":{"num_ctx":1},"top_k":'
    b'"x",'
    b'"reasoning":{"effort":null},"max_completion_tokens":3,"logprobs":true,"think":"high","stop":["a","b"]}',
    b'{"model":"","messages":[]}',
    b'{"model":7}',
    b"{}",
)

TARGET: Final = Target(
    check,
    tuple(seed(body, which, which) for body in _BODIES for which in range(len(JSON_OPERATIONS))),
    (
        b'"model":"m1"', b'"messages":[{"role":"user","content":"a"}]', b'"prompt":', b'"input":',
        b'"stream":true',
        b'"stream_options":{"include_usage":true}', b'"n":2', b'"max_tokens":1', b'"rid":"x"',
        b'"priority":1',
        b'"cache_salt":""', b'"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]',
        b'"content":[{"type":"text"',
        b'"response_format":{"type":"json_object"}', b'"stop":["a"]', b'"options":{}',
        b'"reasoning_effort":"low"',
        b'"temperature":1e0', b'"image_url":{"url":"data:;base64,AA"}', b'"input_audio":{"data":"AA"}',
        b'"query":"q"',
        b'"text_1":"a"', b'"tokens":[1]', b"null", b"true", b"\\u0061", b"\\ud83d\\ude00", b"1e0", b"{}",
        b"[]", b'""',
    ),
)  # fmt: skip
