"""What Ollama's ``/api/chat`` answers, said in the words of the OpenAI chat API. Sans-IO.

A stream is NDJSON: records with a piece of the message each, the last of them
with ``done``. An error may stand in place of any record (``{"error": text}``),
which its own OpenAI layer hides: the reason to read this API and not that one.
Tool calls come whole. (API: Ollama's docs/api.md and the types of its server,
read at fb307609, 2026-08-21.)
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ..errors import EngineProtocolError
from ._answers import MOST_TOKENS, EngineError, Usage, read_error
from ._json import join_members, may_hold_infinity, with_finite_numbers
from ._lines import LineReader
from ._relay import StreamShape
from ._sse import DONE, receipt_comment, write_event

# All that it says of an answer that is whole; "load" and "unload" answer requests without messages.
# Versions before `done_reason`, and its documentation, end with `done` alone.
_FINISHES: Final = {None: "stop", "": "stop", "stop": "stop", "length": "length"}
_MAX_COUNT: Final = MOST_TOKENS
_Raw = msgspec.Raw
_encode = msgspec.json.Encoder().encode


class _Function(msgspec.Struct):
    name: str
    arguments: _Raw = _Raw()


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[_Call] | None = None


class _Record(msgspec.Struct):
    """One record of a stream, or a whole answer, which is a record with everything."""

    message: _Message | None = None
    done: bool = False
    done_reason: str | None = None
    logprobs: _Raw = _Raw()
    prompt_eval_count: Any = None
    eval_count: Any = None
    error: Any = None
    object: Any = None


_record = msgspec.json.Decoder(_Record)
_any = msgspec.json.Decoder()
_SILENT: Final = _Message()


def _read_record(data: bytes, secrets: tuple[str, ...]) -> _Record | EngineError:
    """Read one record, or the error that stands in its place.

    Raises:
        ValueError: it is no record.
    """
    if may_hold_infinity(data):
        data = with_finite_numbers(data)
    try:
        record = _record.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        if _is_error(data):
            return read_error(data, None, secrets)
        raise ValueError("not a record") from None
    if record.error or record.object == "error":
        return read_error(data, None, secrets)
    return record


def _is_error(data: bytes) -> bool:
    """Whether what can not be read as a record is an error with other fields of any form."""
    try:
        value = _any.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.get("error") or value.get("object") == "error")


def _finish_of(record: _Record, calls: int) -> str | None:
    """The finish reason of an answer with so many tool calls; None: it is none, the answer was given up."""
    reason = _FINISHES.get(record.done_reason)
    return "tool_calls" if reason == "stop" and calls else reason


def _usage_of(record: _Record) -> Usage | None:
    """What it counted; a count of 0 is left out there."""
    prompt, generated = _count(record.prompt_eval_count), _count(record.eval_count)
    return None if prompt is None and generated is None else Usage(prompt, None, generated)


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else None


def _write_usage(usage: Usage) -> bytes:
    prompt, generated = usage.prompt or 0, usage.generated or 0
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        prompt,
        generated,
        prompt + generated,
    )


def _write_logprobs(raw: _Raw) -> bytes | None:
    """Its list of tokens has the form of ours already.

    Raises:
        ValueError: it is not UTF-8.
    """
    listed = bytes(raw)
    if not listed.startswith(b"[") or listed == b"[]":
        return None
    listed.decode()
    return b'{"content":' + listed.replace(b"\r", b" ") + b',"refusal":null}'  # a CR would end a line


class _Calls:
    """Writes tool calls: numbered through the whole answer, each with an id.

    Args:
        answer_id: ids are made from it where Ollama gives none, as older versions do.
    """

    def __init__(self, answer_id: str) -> None:
        self._stem = answer_id.removeprefix("chatcmpl-")
        self.made = 0

    def write(self, calls: list[_Call], *, numbered: bool) -> bytes:
        """Write a list of calls.

        Raises:
            ValueError: the arguments of one are not UTF-8.
        """
        return b"[" + b",".join([self._write(call, numbered) for call in calls]) + b"]"

    def _write(self, call: _Call, numbered: bool) -> bytes:
        arguments = bytes(call.function.arguments).decode()
        if arguments in ("", "null"):
            arguments = "{}"
        # An object there is text here, number for number as it was.
        text = arguments.encode() if arguments.startswith('"') else _encode(arguments)
        members = {"index": b"%d" % self.made} if numbered else {}
        members |= {
            "id": _encode(call.id or f"call_{self._stem}_{self.made}"),
            "type": b'"function"',
            "function": b'{"name":' + _encode(call.function.name) + b',"arguments":' + text + b"}",
        }
        self.made += 1
        return join_members(members)


class OllamaRelay:
    """One attempt's stream, from NDJSON to the events of a chat stream. Surface as `StreamRelay`.

    The role goes with the first event, and nothing goes out before there is
    output, so that no event is ever held.

    Args:
        answer_id: identity of the answer, ``chatcmpl-`` and the attempt's id.
        created: seconds since the epoch, the same in every event.

    Attributes:
        committed, fault, aborted, events, content_events, silent_at_end, progress: as in `StreamRelay`.
        done: a record said that the answer is whole.
        dropped: records that hold nothing for the client.
    """

    def __init__(self, shape: StreamShape, answer_id: str, created: int) -> None:
        self._shape = shape
        self._reader = LineReader(shape.max_event_bytes)
        self._calls = _Calls(answer_id)
        self._hash = hashlib.sha256() if shape.receipt else None
        self._head = b'{"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            _encode(answer_id),
            created,
            _encode(shape.public_model),
        )
        self._role = b'"role":"assistant",'
        self.committed = False
        self.done = False
        self.fault: EngineError | None = None
        self.aborted = False
        self.usage: Usage | None = None
        self.events = 0
        self.content_events = 0
        self.silent_at_end = 0
        self.progress = 0
        self.dropped = 0

    @property
    def all_finished(self) -> bool:
        """Whether the one choice has its finish reason."""
        return self.done

    @property
    def over(self) -> bool:
        """Whether nothing more is read from the engine's stream."""
        return self.done or self.fault is not None or self.aborted

    @property
    def receipt(self) -> str | None:
        """SHA-256 over the data of each event handed out, each followed by LF; None unless asked for."""
        return None if self._hash is None else self._hash.hexdigest()

    @property
    def closing(self) -> bytes:
        """What the client gets last, once the answer is whole."""
        return DONE if self._hash is None else receipt_comment(self._hash.hexdigest(), self.events) + DONE

    @property
    def sequence(self) -> int:
        """Number of an error event of ours; these streams do not number theirs."""
        return 0

    def feed(self, data: bytes) -> bytes:
        """Take in bytes of the engine and answer whole events for the client."""
        if self.over:
            return b""
        out: list[bytes] = []
        try:
            for line in self._reader.feed(data):
                if not self._take(line, out):
                    break
        except ValueError:
            self._malformed("a record can not be read")
        if self._reader.too_large and not self.over:
            self._malformed(f"a record is over {self._shape.max_event_bytes} bytes")
        return b"".join(out)

    def end(self) -> bytes:
        """Take the proper end of the engine's message: the last record may lack its line end.

        What is no record then is one that was cut, and so is the answer.
        """
        line = None if self.over else self._reader.end()
        out: list[bytes] = []
        if line is not None:
            with contextlib.suppress(ValueError):
                self._take(line, out)
        return b"".join(out)

    def _malformed(self, message: str) -> None:
        self.fault = EngineError(502, message, code="engine_protocol_error")

    def _take(self, line: bytes, out: list[bytes]) -> bool:
        """Take one record; answers whether more may follow.

        Raises:
            ValueError: it is none.
        """
        record = _read_record(line, self._shape.secrets)
        if isinstance(record, EngineError):
            self.fault = record
            return False
        deltas = list(self._deltas(record))
        self.progress += 1
        self.usage = _usage_of(record) or self.usage
        reason = _finish_of(record, self._calls.made)
        if record.done and reason is None:
            # The engine ended the answer for a reason that finishes nothing.
            self.fault, self.aborted = (EngineError(500), False) if deltas else (None, True)
            return False
        for delta, logprobs in deltas:
            self.content_events += 1
            self._pass(delta, logprobs, None, out)
            self.silent_at_end = 0
        if record.done:
            self._finish(reason, out)
        elif not deltas:
            self.dropped += 1
        return not self.done

    def _deltas(self, record: _Record) -> Iterator[tuple[bytes, bytes | None]]:
        """The members of each delta that a record makes, with its logprobs.

        Thinking stands alone: many clients look at one kind of output in an event.
        """
        message = record.message or _SILENT
        logprobs = _write_logprobs(record.logprobs)
        if message.thinking:
            yield b'"reasoning":' + _encode(message.thinking), logprobs
            logprobs = None
        said = []
        if message.content:
            said.append(b'"content":' + _encode(message.content))
        if message.tool_calls:
            said.append(b'"tool_calls":' + self._calls.write(message.tool_calls, numbered=True))
        if said or logprobs:
            yield b",".join(said), logprobs

    def _finish(self, reason: str | None, out: list[bytes]) -> None:
        empty = b'"content":""' if self._role else b""  # nothing was said: the role needs something beside it
        self._pass(empty, None, reason, out)
        if self._shape.wants_usage and self.usage is not None:
            self._write(b'],"usage":' + _write_usage(self.usage) + b"}", out)
        self.done = True

    def _pass(self, delta: bytes, logprobs: bytes | None, reason: str | None, out: list[bytes]) -> None:
        self.committed = True
        role, self._role = self._role, b""
        parts = [b'{"index":0,"delta":{', (role + delta).rstrip(b","), b"}"]
        if logprobs is not None:
            parts += [b',"logprobs":', logprobs]
        parts += [b',"finish_reason":', _encode(reason), b"}]}"]
        self._write(b"".join(parts), out)

    def _write(self, rest: bytes, out: list[bytes]) -> None:
        data = self._head + rest
        if self._hash is not None:
            self._hash.update(data + b"\n")
        self.events += 1
        self.silent_at_end += 1
        out.append(write_event(data))


def ollama_answer(
    body: bytes, answer_id: str, created: int, model: str, secrets: tuple[str, ...] = ()
) -> tuple[bytes, Usage | None] | EngineError:
    """Judge a whole 200 body and say it as a chat completion.

    Answers the completion with its usage, or the error that the body holds.

    Args:
        answer_id: identity of the answer, ``chatcmpl-`` and the attempt's id.
        created: seconds since the epoch.
        model: the public name.
        secrets: texts that must not be passed on.

    Raises:
        EngineProtocolError: it is no record, or one of an answer that is not whole.
    """
    try:
        record = _read_record(body, secrets)
        if isinstance(record, EngineError):
            return record
        choice = _write_choice(record, _Calls(answer_id))
    except ValueError:
        raise EngineProtocolError("the answer is not the JSON that was asked for") from None
    if not record.done:
        raise EngineProtocolError("the answer does not say that it is whole")
    if _finish_of(record, 0) is None:
        silent = _is_silent(record.message or _SILENT)
        return EngineError(503 if silent else 500, gave_up=silent)
    usage = _usage_of(record)
    members = {
        "id": _encode(answer_id),
        "object": b'"chat.completion"',
        "created": b"%d" % created,
        "model": _encode(model),
        "choices": b"[" + choice + b"]",
    }
    if usage is not None:
        members["usage"] = _write_usage(usage)
    return join_members(members), usage


def _is_silent(message: _Message) -> bool:
    return not (message.content or message.thinking or message.tool_calls)


def _write_choice(record: _Record, calls: _Calls) -> bytes:
    said = record.message or _SILENT
    message = {"role": b'"assistant"', "content": _encode(said.content or "")}
    if said.thinking:
        message["reasoning"] = _encode(said.thinking)
    if said.tool_calls:
        message["tool_calls"] = calls.write(said.tool_calls, numbered=False)
    return join_members(
        {
            "index": b"0",
            "message": join_members(message),
            "logprobs": _write_logprobs(record.logprobs) or b"null",
            "finish_reason": _encode(_finish_of(record, calls.made)),
        }
    )
