"""Engines' bodies: each gets a verdict, what is passed on is short, printable and tells no secret."""

from __future__ import annotations

import json
from typing import Any, Final

from trio_gateway.contract import OPERATIONS, RERANK, SCORE, Operation
from trio_gateway.errors import EngineProtocolError
from trio_gateway.wire import EngineError, Usage, judge_answer, read_error, rename_model
from trio_gateway.wire._answers import MAX_MESSAGE_BYTES, drop_usage, read_usage

from ..target import Target, seed, split

SECRETS: Final = ("sk-secret", "http://10.0.0.5:8000", "10.0.0.5:8000")
UPSTREAM: Final = "org/model"
PUBLIC: Final = "m1"
STATUSES: Final = (None, 400, 404, 422, 429, 500, 503)


def check(data: bytes) -> None:
    """See `Target`. Options: the operation and how many choices it has, the HTTP status of an error."""
    body, (which, status) = split(data, 2)
    operation = OPERATIONS[which % len(OPERATIONS)]
    expect_harmless(read_error(body, STATUSES[status % len(STATUSES)], SECRETS))
    _expect_verdict(body, operation, 1 + which // 128)
    _expect_edits(body)


def expect_harmless(error: EngineError) -> None:
    """What is passed on of an error can be shown to anybody."""
    assert 400 <= error.status < 600
    assert len(error.message.encode()) <= MAX_MESSAGE_BYTES
    for text in (error.message, error.type, error.code, error.param):
        assert (text or "").isprintable()
        assert not any(secret in (text or "") for secret in SECRETS)
    for label in (error.type, error.code, error.param):
        assert label is None or 0 < len(label) <= 64


def _expect_verdict(body: bytes, operation: Operation, choices: int) -> None:
    try:
        verdict = judge_answer(body, operation, choices, SECRETS)
    except EngineProtocolError as exc:
        assert str(exc).isprintable()
        return
    value = json.loads(body)
    if operation in (RERANK, SCORE) and isinstance(value, list):
        return  # some engines answer lists
    assert isinstance(value, dict)
    if isinstance(verdict, EngineError):
        expect_harmless(verdict)
    else:
        assert not value.get("error")
        assert value.get("object") != "error"
        _expect_counts(verdict)
        if operation.choices:
            finished = {choice.get("index", 0) for choice in value["choices"] if choice.get("finish_reason")}
            assert len(finished) >= choices


def _expect_counts(usage: Usage | None) -> None:
    if usage is not None:
        counts = (usage.prompt, usage.cached, usage.generated)
        assert all(count is None or 0 <= count <= 2**53 for count in counts)


def _expect_edits(body: bytes) -> None:
    """An edit changes what it is for, and keeps every other value's bytes."""
    value = _object(body)
    if value is None:
        return
    _expect_counts(read_usage(body))
    renamed = rename_model(body, UPSTREAM, PUBLIC)
    if value.get("model") == UPSTREAM:
        assert repr(json.loads(renamed)) == repr({**value, "model": PUBLIC})
    else:
        assert renamed == body
    rest = {key: item for key, item in value.items() if key != "usage"}
    assert repr(json.loads(drop_usage(body))) == repr(rest)


def _object(body: bytes) -> dict[str, Any] | None:
    """The object that a body is, by Python's reader without its own additions; None if it is none."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # no lone surrogates
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not body.startswith(b"\xef\xbb\xbf") else None


def _no_constant(word: str) -> None:
    raise ValueError(word)


_BODIES: Final = (
    b'{"id":"x","model":"org/model","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"prompt_tokens_details":'
    b'{"cached_tokens":2}}}',
    b'{"choices":[{"index":0,"text":"a","finish_reason":"length"},{"index":1,"finish_reason":"abort"}]}',
    b'{"error":{"message":"key sk-secret at http://10.0.0.5:8000/v1","type":"t","param":"p","code":"503"}}',
    b'{"object":"error","message":"10.0.0.5:8000 \\u202e\\u0000 bad","code":400}',
    b'{"error":"text","error_type":"validation"}',
    b'{"error":{"message":"Model is overloaded","http_status_code":422}}',
    b'{"detail":[{"msg":"field required"}],"status":"429"}',
    b'{"error":{"message":"CUDA out of memory"}}',
    b'{"object":"list","data":[{"embedding":[0.1]}],"model":"org/model","usage":{"prompt_tokens":1e0}}',
    b'{"id":"r","object":"response","status":"completed","model":"org/model","output":[],"usage":'
    b'{"input_tokens":3,"output_tokens":5,"input_tokens_details":{"cached_tokens":1}}}',
    b'{"id":"m","type":"message","role":"assistant","stop_reason":"end_turn","content":[],"usage":'
    b'{"input_tokens":3,"output_tokens":5,"cache_read_input_tokens":1}}',
    b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}',
    b"<html>\r\n502 sk-secret\x00\xff</html>",
    b'{"usage":{},"model":"org\\/model","usag\\u0065":1}',
    b'"sk-secret"',
    b"[" * 300,
    b"",
)

TARGET: Final = Target(
    check,
    tuple(seed(body, which, status) for body in _BODIES for which, status in ((0, 0), (131, 1), (3, 4))),
    (
        b'"error":', b'"message":', b'"code":', b'"type":', b'"param":', b'"status":',
        b'"http_status_code":', b"422",
        b'"usage":', b'"prompt_tokens":', b'"completion_tokens":', b'"model":"org/model"', b'"choices":',
        b'"finish_reason":"stop"', b'"finish_reason":"abort"', b'"index":', b'"object":"error"', b"sk-secret",
        b"10.0.0.5:8000", b"http://", b"\\u202e", b"\\ud800", b"\\u0000", b"null", b"{}", b"[]", b"NaN",
        b"1e999",
        b'"stop_reason":', b'"output_tokens":', b'"status":"completed"', b"out of memory", b"\xff",
        b"99999999999999999999",
    ),
)  # fmt: skip
