"""Ollama's records: lines in any cut, and what becomes of them in the words of the chat API."""

from __future__ import annotations

import json
from typing import Any, Final

from trio_gateway.errors import EngineProtocolError
from trio_gateway.wire import EngineError
from trio_gateway.wire._lines import LineReader
from trio_gateway.wire._ollama import OllamaRelay, ollama_answer

from ..target import Target, cuts, seed, split
from .answers import PUBLIC, SECRETS, expect_harmless
from .streams import read_strictly, relay_all, shape_of

ANSWER_ID: Final = "chatcmpl-" + "0" * 32 + "-01"


def check(data: bytes) -> None:
    """See `Target`. Options: those of `shape_of`."""
    stream, (option, bound) = split(data, 2)
    shape = shape_of(option, bound)
    _expect_lines(stream, shape.max_event_bytes)
    events, relay = relay_all(lambda: OllamaRelay(shape, ANSWER_ID, 1), stream, shape)
    text = ""
    for event in events:
        value = read_strictly(event.data)
        assert value is not None, event
        assert (event.name, value["id"], value["model"]) == (
            None,
            ANSWER_ID,
            PUBLIC if option & 8 else "org/model",
        )
        text += "".join(choice["delta"].get("content") or "" for choice in value["choices"])
    assert "".join(_texts(stream)).startswith(text)
    assert not (relay.done and "usage" in json.loads(events[-1].data)) or shape.wants_usage
    _expect_answer(stream)


def _expect_lines(stream: bytes, bound: int) -> None:
    """Lines are those that LF ends, however the stream is cut, and none is over the bound."""
    lines = [line.removesuffix(b"\r") for line in stream.split(b"\n")]
    kept = [line for line in lines if line and not line.isspace()]
    for pieces in ([stream], *cuts(stream)):
        reader = LineReader(bound)
        read: list[bytes] = []
        for piece in pieces:
            read += reader.feed(piece)
            assert len(reader._rest) <= bound + 1
        last = reader.end()
        read += [] if last is None else [last]
        assert read == kept[: len(read)]
        assert (len(read) < len(kept)) is reader.too_large is any(len(line) > bound for line in kept)


def _texts(stream: bytes) -> list[str]:
    """What the records say, as far as they are records."""
    found = []
    for line in stream.split(b"\n"):
        value = read_any(line)
        message = value.get("message") if value is not None else None
        content = message.get("content") if isinstance(message, dict) else None
        found.append(content if isinstance(content, str) else "")
    return found


def read_any(data: bytes) -> dict[str, Any] | None:
    """The object that a record holds, by Python's reader; what is no UTF-8 may stand where nobody looks."""
    try:
        value = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _expect_answer(body: bytes) -> None:
    try:
        answer = ollama_answer(body, ANSWER_ID, 1, PUBLIC, SECRETS)
    except EngineProtocolError as exc:
        assert str(exc).isprintable()
        return
    if isinstance(answer, EngineError):
        expect_harmless(answer)
        return
    value = read_strictly(answer[0])
    assert value is not None, answer
    (choice,) = value["choices"]
    assert (value["id"], value["model"]) == (ANSWER_ID, PUBLIC)
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")


_STREAMS: Final = (
    b'{"model":"m","message":{"role":"assistant","content":"a"},"done":false}\n'
    b'{"message":{"content":"b","thinking":"t"},"done":false}\n'
    b'{"message":{"content":""},"done":true,"done_reason":"stop","prompt_eval_count":3,"eval_count":2}\n',
    b'{"message":{"content":"a","tool_calls":[{"function":{"name":"f","arguments":{"a":1e0,"b":"\\u00e9"}}}'
    b"]}}\r\n"
    b'\r\n \n{"done":true}',
    b'{"message":{"content":"a"}}\n{"error":"sk-secret at 10.0.0.5:8000"}\n',
    b'{"message":{"content":"a"},"logprobs":[{"token":"a","logprob":-Infinity}]}\n{"done":true,'
    b'"done_reason":"load"}\n',
    b'{"done":true,"done_reason":"length"}\n{"message":{"content":"late"}}\n',
    b'{"object":"error","message":"m"}\n',
    b"not a record\n",
    b'{"message":{"content":"' + b"x" * 200 + b'"}}\n',
)

TARGET: Final = Target(
    check,
    tuple(
        seed(stream, option, bound)
        for stream in _STREAMS
        for option, bound in ((0, 255), (10, 255), (24, 255), (0, 6))
    ),
    (
        b'{"message":{"content":"a"}}\n', b'{"done":true}\n', b'"done_reason":"stop"', b'"thinking":"t"',
        b'"done":false',
        b'"tool_calls":[{"function":{"name":"f","arguments":{}}}]', b'"arguments":"', b'"logprobs":[',
        b'"eval_count":1',
        b'"error":"e"', b'"id":"c"', b"\n", b"\r\n", b"null", b"NaN", b"-Infinity", b"\\ud800", b"\\n",
        b"\xff", b" ",
    ),
)  # fmt: skip
