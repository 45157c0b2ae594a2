"""Agents' answers, streamed and whole, their releases and messages: in any cut, and written again."""

from __future__ import annotations

import json
from typing import Any, Final

from trio_gateway.contract import CHAT, COMPLETIONS, RESPONSES
from trio_gateway.wire import (
    AgentAnswer,
    AgentRelay,
    AnswerForm,
    Generate,
    OutOfGrammar,
    RecordWriter,
    Registered,
    Registration,
    Release,
    ReleaseReader,
    StreamShape,
    WorkerReport,
    choices_asked,
    read_message,
    rejection_of,
    write_message,
)
from trio_gateway.wire._worker_stream import read_record

from ..target import Target, cuts, seed, split
from .answers import expect_harmless
from .streams import read_strictly, relay_all, shape_of

ANSWER_ID: Final = "chatcmpl-" + "0" * 32 + "-01"
_KINDS: Final = (Registration, Registered, WorkerReport, Generate, Release)


def check(data: bytes) -> None:
    """See `Target`. Options: those of `shape_of`, of which two more bits choose the operation."""
    stream, (option, bound) = split(data, 2)
    shape = shape_of(option, bound)
    if option & 64:
        relay_all(lambda: AgentRelay(shape, RESPONSES, ANSWER_ID, 1), stream, shape)
    else:
        _expect_chunks(stream, shape, chat=not option & 32)
    _expect_rewritten(stream, shape)
    _expect_answer(stream, shape)
    _expect_messages(stream)


def _expect_chunks(stream: bytes, shape: StreamShape, *, chat: bool) -> None:
    """What leaves is chunks in our words, and nothing of a choice stands behind its finish."""
    operation = CHAT if chat else COMPLETIONS
    events, relay = relay_all(lambda: AgentRelay(shape, operation, ANSWER_ID, 1), stream, shape)
    finished: set[int] = set()
    for event in events:
        value = read_strictly(event.data)
        assert value is not None, event
        assert (event.name, value["id"], value["model"]) == (None, ANSWER_ID, shape.public_model)
        assert not value.get("error")
        assert "usage" not in value or shape.wants_usage
        for choice in value["choices"]:
            assert 0 <= choice["index"] < shape.choices
            assert choice["index"] not in finished
            assert ("delta" if chat else "text") in choice
            if choice["finish_reason"] is not None:
                finished.add(choice["index"])
    assert not relay.done or finished == set(range(shape.choices))


def _expect_rewritten(stream: bytes, shape: StreamShape) -> None:
    """Records that are read can be written again, mean the same then, and stay within the grammar."""
    writer = RecordWriter(AnswerForm.CHOICES, shape.choices)
    written = b""
    for line in stream.split(b"\n"):
        try:
            record = read_record(line)
        except ValueError as exc:
            assert str(exc).isprintable()
            continue
        if record is None:
            continue
        again = read_record(write_message(record))
        assert again == record, (again, record)
        try:
            written += writer.write(record)
        except OutOfGrammar as exc:
            assert str(exc).isprintable()
    roomy = StreamShape(shape.choices, True, False, "m", "m", 2**20)
    relay = AgentRelay(roomy, CHAT, ANSWER_ID, 1)
    relay.feed(written)
    assert relay.fault is None or b'"t":"error"' in written or b'"reason":"' in written, (
        relay.fault,
        written,
    )
    assert relay.over is writer.over or b'"reason":"' in written


def _expect_answer(stream: bytes, shape: StreamShape) -> None:
    """A buffered answer is the same in any cut; what it holds is JSON, and within its bound."""
    told = None
    for pieces in ([stream], *cuts(stream)):
        answer = AgentAnswer(shape.choices, shape.max_event_bytes, shape.secrets)
        for piece in pieces:
            answer.feed(piece)
        answer.end()
        state = (answer.result, answer.done, answer.fault, answer.aborted, answer.progress, answer.generated)
        assert told is None or told == state, (told, state)
        told = state
    if answer.fault is not None:
        expect_harmless(answer.fault)
    elif answer.done:
        assert answer.result is not None
        assert len(bytes(answer.result.body)) <= shape.max_event_bytes
        try:
            body = answer.body
        except ValueError:
            assert answer.result.content_type
            return
        assert answer.result.content_type or _is_json(body), body


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _expect_messages(data: bytes) -> None:
    """Messages are refused with a clear word, or are written as they were read."""
    for kind in _KINDS:
        try:
            message: Any = read_message(data, kind)
        except ValueError as exc:
            assert str(exc).isprintable()
            assert "sk-secret" not in str(exc)
            continue
        assert read_message(write_message(message), kind) == message
    found = rejection_of(data)
    if found is not None:
        expect_harmless(found[1])
    for operation in (CHAT, COMPLETIONS):
        try:
            assert choices_asked(operation, data) > 0
        except ValueError as exc:
            assert str(exc).isprintable()
    told = None
    for pieces in ([data], *cuts(data)):
        reader = ReleaseReader()
        releases = [release for piece in pieces for release in reader.feed(piece)]
        assert told is None or told == (releases, reader.broken)
        told = (releases, reader.broken)


_ACCEPTED: Final = b'{"t":"accepted","slot":0}\n'
_STREAMS: Final = (
    _ACCEPTED + b'{"t":"delta","i":0,"text":"Hel","n":1}\n{"t":"delta","i":0,"text":"lo","n":1}\n'
    b'{"t":"usage","prompt_tokens":3,"completion_tokens":2,"cached_tokens":1}\n'
    b'{"t":"finish","i":0,"reason":"stop"}\n{"t":"end"}',
    _ACCEPTED
    + b'{"t":"delta","i":0,"text":"","reasoning":"hm","logprobs":{"content":[{"logprob":-Infinity}]}}\r\n'
    b'\r\n{"t":"tool_call","i":0,"index":0,"id":"c","name":"f","arguments":"{"}\n'
    b'{"t":"ping","generated":4,"paused":false}\n{"t":"finish","i":0,"reason":"tool_calls","raw":{"choice":'
    b'{"stop_reason":1,"index":5}}}\n{"t":"end"}\n',
    _ACCEPTED
    + b'{"t":"delta","i":1,"text":"b","raw":{"delta":{"refusal":"no"},"chunk":{"x":"\xc3\xa9","id":1}}}\n'
    b'{"t":"error","code":"too_long","message":"at sk-secret","retry":"never","status":400}\n',
    _ACCEPTED + b'{"t":"event","event":"response.created","data":"{\\"type\\":\\"response.created\\"}"}\n'
    b'{"t":"event","data":"{\\"type\\":\\"response.output_text.delta\\",\\r\\"delta\\":\\"a\\"}"}\n'
    b'{"t":"event","event":"response.completed","data":"{\\"response\\":{\\"usage\\":{\\"input_tokens\\":3}}}"}\n'
    b'{"t":"end"}\n',
    _ACCEPTED
    + b'{"t":"ping","generated":0,"paused":true}\n{"t":"result","status":200,"body":{"x":1e0, "y":[]}}\n'
    b'{"t":"end"}\n',
    _ACCEPTED + b'{"t":"result","status":200,"body":"WEBVTT","content_type":"text/vtt"}\n{"t":"end"}\n',
    _ACCEPTED + b'{"t":"news"}\n{"t":"finish","i":0,"reason":"abort"}\n',
    _ACCEPTED + b'{"t":"event","event":"response.completed","data":"{}"}\n',
    _ACCEPTED + b'{"t":"error","code":"moved","status":302}\n',
    b'{"released":{"id":"a","attempt":1,"generated":3,"kv_released":true}}\n{"later":1}\n',
    b'{"rejected":"capacity","worker":{"incarnation":1,"seq":2,"state":"ready","models":["m"],"slots":8,"running":8,'
    b'"queued":0}}',
    b'{"protocol":1,"request_id":"a","attempt":1,"operation":"chat.completions","model":"m","deadline_ms":5,'
    b'"priority":"standard","stream":true,"body":{"n":2,"prompt":["a","b"]}}',
    b'{"protocol":1,"worker_id":"gpu-0","incarnation":5,"url":"http://10.0.0.1:8000","models":["m"],"slots":8,'
    b'"engine":{"kind":"vllm","version":"1"},"labels":["a"]}',
    b'{"prompt":[[1],[2]],"n":3}',
)

TARGET: Final = Target(
    check,
    tuple(
        seed(stream, option, bound)
        for stream in _STREAMS
        for option, bound in ((0, 255), (7, 255), (26, 255), (34, 255), (64, 255), (80, 6))
    ),
    (
        _ACCEPTED, b'{"t":"end"}\n', b'{"t":"delta","i":0,"text":"a","n":1}\n', b'"i":1',
        b'"raw":{"delta":{}}',
        b'{"t":"finish","i":0,"reason":"stop"}\n', b'{"t":"finish","i":1,"reason":"stop"}\n', b'"error"',
        b'{"t":"error","code":"draining"}\n', b'{"t":"usage","prompt_tokens":3}\n', b'"reasoning":"r"',
        b'{"t":"result","status":200,"body":{}}\n', b'{"t":"event","data":"{}"}\n', b'"logprobs":{}',
        b'"content_type":"text/vtt"', b'"status":400', b"\n", b"\r\n", b"null", b"NaN", b"\\ud800", b"\xff",
        b" ",
    ),
)  # fmt: skip
