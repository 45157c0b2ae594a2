"""Chat streams: any cut, fast and slow alike; whole events in order, no edit but those asked for."""

from __future__ import annotations

from typing import Any, Final

from trio_gateway.wire import StreamRelay, StreamShape
from trio_gateway.wire._sse import Event

from ..target import Target, seed, split
from .answers import UPSTREAM
from .streams import origins, plainly_edited, read_leniently, read_strictly, relay_all, shape_of


def check(data: bytes) -> None:
    """See `Target`. Options: those of `shape_of`."""
    stream, (option, bound) = split(data, 2)
    shape = shape_of(option, bound)
    events, _ = relay_all(lambda: StreamRelay(shape), stream, shape)
    for came, sent in origins(stream, events, lambda came, sent: _same(came, sent, shape)):
        assert sent.name is None
        value = read_strictly(came.data)
        if value is not None:
            _expect_allowed(read_strictly(sent.data), shape)


def _same(came: Event, sent: Event, shape: StreamShape) -> bool:
    """Whether an event is the engine's, edited as the shape says."""
    if came.data.strip() == sent.data.strip():
        return True
    before, after = read_leniently(came.data), read_leniently(sent.data)
    if before is None or after is None:
        return plainly_edited(came.data, shape) == plainly_edited(sent.data, shape)
    return repr(_edited(before, shape)) == repr(after)


def _edited(value: dict[str, Any], shape: StreamShape) -> dict[str, Any]:
    if (
        value.get("usage")
        and not shape.wants_running_usage
        and (value.get("choices") or not shape.wants_usage)
    ):
        value = {key: item for key, item in value.items() if key != "usage"}
    if value.get("model") == shape.upstream_model:
        value = {**value, "model": shape.public_model}
    return value


def _expect_allowed(value: dict[str, Any] | None, shape: StreamShape) -> None:
    """Nothing leaves that clients must not see."""
    assert value is not None
    assert shape.public_model == UPSTREAM or value.get("model") != UPSTREAM
    if "\\" not in repr(list(value)):  # engines write these names as they are
        assert not value.get("error")
        assert value.get("object") != "error"
        assert not value.get("usage") or shape.wants_usage
        assert not (value.get("usage") and value.get("choices")) or shape.wants_running_usage


_STREAMS: Final = (
    b'data: {"id":"x","model":"org/model","choices":[{"index":0,"delta":{"role":"assistant","content":""},'
    b'"finish_reason":null}]}\n\ndata: {"id":"x","model":"org/model","choices":[{"index":0,"delta":{'
    b'"content":"a"},'
    b'"finish_reason":null}]}\n\ndata: {"id":"x","model":"org/model","choices":[{"index":0,"delta":{},'
    b'"finish_reason":"stop"}]}\n\ndata: {"id":"x","choices":[],"usage":{"prompt_tokens":3,'
    b'"completion_tokens":2}}\n\ndata: [DONE]\n\n',
    b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}],"usage":{"completion_tokens":1}}\n\n'
    b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":null}]}\n\n: ping\n\nid: 7\n\ndata: '
    b"hello\n\n"
    b'data: {"choices":[{"delta":{"content":"c"},"finish_reason":null}]}\n\ndata: [DONE] \r\n',
    b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\r\n\r\ndata: {"error":{"message":'
    b'"sk-secret","code":503}}\r\n\r\n',
    b'event: error\ndata: {"message":"10.0.0.5:8000","code":429}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"x"},"logprobs":{"p":[-Infinity,NaN]}}],"model":"org\\/model"}'
    b"\n\n",
    b'data: {"prompt_progress":{"total":9},"choices":[]}\n\ndata:\ndata: {"choices":\ndata: []}\n\n',
    b'data: {"object":"error","message":"m","code":400}\n\n',
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"model":"org/model",\n\n',
)

TARGET: Final = Target(
    check,
    tuple(
        seed(stream, option, bound)
        for stream in _STREAMS
        for option, bound in ((0, 255), (6, 255), (2, 255), (8, 255), (31, 255), (0, 6))
    ),
    (
        b"data: ", b"\n\n", b"\r\n",
        b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n',
        b'"finish_reason":"stop"', b'"finish_reason":null', b'"finish_reason":"abort"',
        b'"finish_reason":"error"',
        b'"usage":{"completion_tokens":1}', b',"usage":{}', b'"model":"org/model"', b'"model":',
        b'"error":', b"null",
        b'"choices":[', b'"delta":{', b'"text":"a"', b'"index":1', b"data: [DONE]\n\n", b"[DONE]",
        b"event: error\n",
        b"NaN", b"-Infinity", b'"prompt_progress":1', b'"object":"error"', b"{}", b"[]", b'\\"', b"\\u",
        b"}", b"{",
    ),
)  # fmt: skip
