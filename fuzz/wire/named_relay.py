"""Streams of named events (responses, messages): what every relay promises, and the names besides."""

from __future__ import annotations

from typing import Any, Final

from tests.wire.standard import events_by_the_standard
from trio_gateway.contract import Style
from trio_gateway.wire import NamedRelay, StreamShape
from trio_gateway.wire._named_relay import GRAMMARS
from trio_gateway.wire._sse import Event

from ..target import Target, seed, split
from .streams import (
    origins,
    plainly_edited,
    read_as_most,
    read_leniently,
    read_strictly,
    relay_all,
    shape_of,
)

STYLES: Final = (Style.RESPONSES, Style.MESSAGES)


def check(data: bytes) -> None:
    """See `Target`. Options: those of `shape_of`, the highest bit for the style."""
    stream, (option, bound) = split(data, 2)
    shape, style = shape_of(option, bound), STYLES[option >> 7]
    events, relay = relay_all(lambda: NamedRelay(shape, style, "id-1"), stream, shape)
    ours = relay.beginning if isinstance(relay, NamedRelay) else b""
    events = [event for event in events if event.data != ours]  # the beginning of a message that has none
    if relay.done:
        events += events_by_the_standard(relay.closing)
    holder = GRAMMARS[style].holder
    pairs = list(origins(stream, events, lambda came, sent: _same(came, sent, holder, shape)))
    for came, sent in pairs:
        assert came.name is None or sent.name == came.name
        assert sent.name not in GRAMMARS[style].failed
        value = read_strictly(sent.data)
        held = value.get(holder) if value is not None else None
        if shape.public_model != shape.upstream_model and isinstance(held, dict):
            assert held.get("model") != shape.upstream_model
    terminals = [sent.name in GRAMMARS[style].terminal for _, sent in pairs]
    assert not any(terminals[:-1])
    assert not relay.done or terminals[-1]


def _same(came: Event, sent: Event, holder: str, shape: StreamShape) -> bool:
    if came.data.strip() == sent.data.strip():
        return True
    before, after = read_leniently(came.data), read_leniently(sent.data)
    if before is None or after is None:
        if plainly_edited(came.data, shape) == plainly_edited(sent.data, shape):
            return True
        before = read_as_most(came.data)
        return before is not None and _edited(before, holder, shape) == after
    return repr(_edited(before, holder, shape)) == repr(after)


def _edited(value: dict[str, Any], holder: str, shape: StreamShape) -> dict[str, Any]:
    held = value.get(holder)
    if isinstance(held, dict) and held.get("model") == shape.upstream_model:
        return {**value, holder: {**held, "model": shape.public_model}}
    return value


_RESPONSES: Final = (
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":'
    b'{"id":"r","model":"org/model","status":"in_progress"}}\n\n'
    b'event: response.output_item.added\ndata: {"type":"response.output_item.added","item":{"type":'
    b'"message"}}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","response":{"model":"org/model","error":'
    b"null,"
    b'"usage":{"input_tokens":1,"output_tokens":2}}}\n\ndata: [DONE]\n\n',
    b'data: {"type":"response.output_item.added","item":{"type":"function_call"}}\r\n\r\n'
    b'data: {"type":"response.failed","response":{"error":{"message":"sk-secret","code":"server_error"}}}'
    b"\r\n\r\n",
    b'event: error\ndata: {"type":"error","message":"10.0.0.5:8000"}\n\n',
)
_MESSAGES: Final = (
    b'event: message_start\ndata: {"type":"message_start","message":{"model":"org/model","usage":'
    b'{"input_tokens":3}}}\n\nevent: ping\ndata: {"type":"ping"}\n\n'
    b'event: content_block_start\ndata: {"type":"content_block_start","content_block":{"type":"text","text":'
    b'""}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":'
    b'"a"}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":'
    b'{"output_tokens":2}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n',
    b'data: {"type":"content_block_delta","delta":{"text":"a"}}\n\nevent: error\ndata: {"type":"error",'
    b'"error":'
    b'{"type":"overloaded_error","message":"Overloaded"}}\n\n',
    b'data: {"type":"content_block_start","content_block":{"type":"tool_use"}}\n\ndata: x\n\ndata: {"a":NaN}'
    b"\n\n",
)

TARGET: Final = Target(
    check,
    tuple(
        seed(stream, style + option, bound)
        for style, streams in ((0, _RESPONSES), (128, _MESSAGES))
        for stream in streams
        for option, bound in ((0, 255), (8, 255), (24, 255), (0, 8))
    ),
    (
        b"event: ", b"data: ", b"\n\n", b"\r\n", b'"type":"', b"response.completed", b"response.failed",
        b"response.created",
        b"response.output_item.added", b"response.output_text.delta", b"message_start", b"message_stop",
        b"message_delta",
        b"content_block_start", b"content_block_delta", b"ping", b"error", b'"model":"org/model"',
        b'"response":{',
        b'"message":{', b'"usage":{', b'"item":{', b'"content_block":{', b'"sequence_number":', b"null",
        b"NaN", b"[DONE]",
    ),
)  # fmt: skip
