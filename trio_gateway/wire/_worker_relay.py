"""An agent's answer, read on the gateway's side. Sans-IO.

`AgentRelay` makes a client's event stream of a streamed answer, `AgentAnswer`
reads a buffered one, `ReleaseReader` the stream on which an agent says what its
engine has let go. What leaves the grammar of `_worker_stream` is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Final, Protocol

import msgspec

from ..contract import CHAT, Operation, Style
from ..units import KiB
from ._answers import ABORT, NO_FINISH, EngineError, Usage
from ._json import join_members
from ._lines import LineReader
from ._named_relay import NamedRelay
from ._relay import StreamShape
from ._sse import DONE, receipt_comment, write_event
from ._worker_messages import (
    Accepted,
    Delta,
    End,
    Failed,
    Finish,
    NamedEvent,
    Ping,
    RawFields,
    Record,
    Release,
    ReleasedRequest,
    Result,
    ToolCall,
    UsageCounts,
    read_message,
)
from ._worker_stream import MAX_LINE, AnswerForm, Grammar, OutOfGrammar, Stage, failure_of, read_record

_ENVELOPE: Final = 64 * KiB  # bytes that a result may have around its body
_MAX_EVENT: Final = 64 * KiB  # bytes of a line of the stream of releases

_encode = msgspec.json.Encoder().encode


class _Sink(Protocol):
    """What becomes of a stream's records. Attributes as `AgentRelay` has them."""

    @property
    def committed(self) -> bool: ...
    @property
    def events(self) -> int: ...
    @property
    def content_events(self) -> int: ...
    @property
    def silent_at_end(self) -> int: ...
    @property
    def fault(self) -> EngineError | None: ...
    @property
    def aborted(self) -> bool: ...
    @property
    def usage(self) -> Usage | None: ...
    @property
    def receipt(self) -> str | None: ...
    @property
    def closing(self) -> bytes: ...
    @property
    def sequence(self) -> int: ...

    def take(self, record: Record) -> bytes:
        """Answer what the client gets for a record; nothing for one that holds nothing for it."""

    def finish(self) -> bytes:
        """Answer what the client gets at the end, before the closing word."""


class AgentRelay:
    """One attempt's stream, from an agent's records to the client's events. Surface as `StreamRelay`.

    Args:
        answer_id: identity of an answer whose engine gives none, made of the attempt's id.
        created: seconds since the epoch, the same in every event.

    Attributes:
        done: the agent said ``end``, which it does when the engine has let go.
        fault, aborted: as in `StreamRelay`. What leaves the grammar is a protocol error.
        progress: records that tell of work done; pings count when more was generated.
        dropped: records that hold nothing for the client, or are not known.
    """

    def __init__(self, shape: StreamShape, operation: Operation, answer_id: str, created: int) -> None:
        form = AnswerForm.of(operation, stream=True)
        self._shape = shape
        self._bound = min(MAX_LINE, shape.max_event_bytes)
        self._lines = LineReader(self._bound)
        self._grammar = Grammar(form, shape.choices if form is AnswerForm.CHOICES else 0)
        self._sink: _Sink
        if form is AnswerForm.CHOICES:
            self._sink = _ChunkSink(shape, operation, answer_id, created)
        else:
            self._sink = _EventSink(shape, operation.style, answer_id)
        self._counted = 0  # generated tokens that the last usage has counted
        self.done = False
        self.fault: EngineError | None = None
        self.aborted = False
        self.progress = 0
        self.dropped = 0

    @property
    def committed(self) -> bool:
        """Whether an event with content was handed out."""
        return self._sink.committed

    @property
    def events(self) -> int:
        """Events handed out."""
        return self._sink.events

    @property
    def content_events(self) -> int:
        """Events handed out that carry output."""
        return self._sink.content_events

    @property
    def silent_at_end(self) -> int:
        """How many of the events handed out last carry none."""
        return self._sink.silent_at_end

    @property
    def generated(self) -> int:
        """Tokens that the agent told of so far."""
        return self._grammar.generated

    @property
    def said_last(self) -> bool:
        """Whether the agent's last word was read: ``end`` or ``error``."""
        return self._grammar.stage is Stage.OVER

    @property
    def all_finished(self) -> bool:
        """Whether the answer is whole, and the agent said so."""
        return self.done

    @property
    def over(self) -> bool:
        """Whether nothing more is read from the agent's stream."""
        return self.done or self.fault is not None or self.aborted

    @property
    def usage(self) -> Usage | None:
        """The last usage that was reported, and the tokens that records have stood for since."""
        reported, since = self._sink.usage, self._grammar.counted - self._counted
        if reported is None:
            return Usage(generated=self.generated) if self.generated else None
        return replace(reported, generated=(reported.generated or 0) + since) if since else reported

    @property
    def receipt(self) -> str | None:
        """SHA-256 over the data of each event handed out, each followed by LF; None unless asked for."""
        return self._sink.receipt

    @property
    def closing(self) -> bytes:
        """What the client gets last, once the answer is whole."""
        return self._sink.closing

    @property
    def sequence(self) -> int:
        """The number that an event of ours would have after the last one, where events have numbers."""
        return self._sink.sequence

    def feed(self, data: bytes) -> bytes:
        """Take in bytes of the agent and answer whole events for the client."""
        if self.over:
            return b""
        out: list[bytes] = []
        for line in self._lines.feed(data):
            if not self._take(line, out):
                break
        if self._lines.too_large and not self.over:
            self._malformed(f"a record is over {self._bound} bytes")
        return b"".join(out)

    def end(self) -> bytes:
        """Take the proper end of the agent's message: the last record may lack its line end.

        What is no record then is one that was cut, and so is the answer.
        """
        line = None if self.over else self._lines.end()
        out: list[bytes] = []
        if line is not None:
            self._take(line, out, last=True)
        return b"".join(out)

    def _malformed(self, message: str) -> None:
        self.fault = EngineError(502, message, code="engine_protocol_error")

    def _take(self, line: bytes, out: list[bytes], *, last: bool = False) -> bool:
        """Take one line; answers whether more may follow."""
        before = self._grammar.generated
        try:
            record = read_record(line)
            if record is None:
                self.dropped += 1
                return True
            self._grammar.step(record)
        except OutOfGrammar as exc:
            self._malformed(str(exc))
        except ValueError as exc:
            if not last:
                self._malformed(str(exc))
        else:
            self._do(record, out, self._grammar.generated > before)
        return not self.over

    def _do(self, record: Record, out: list[bytes], more: bool) -> None:
        if isinstance(record, Failed):
            self._fail(record)
        elif isinstance(record, End):
            self._pass_on(self._sink.finish(), out)
            self.done = self.fault is None
        elif isinstance(record, Ping | Accepted):
            self.progress += more
        else:
            self._pass(record, out)

    def _fail(self, record: Failed) -> None:
        failure = failure_of(record, self._shape.secrets)
        if failure.gave_up and not self.committed:
            self.aborted = True
        else:
            # Given up in the middle is a failure like any other.
            self.fault = EngineError(500) if failure.gave_up else failure

    def _pass(self, record: Record, out: list[bytes]) -> None:
        self.progress += 1
        if isinstance(record, UsageCounts) and record.completion_tokens:
            self._counted = self._grammar.counted
        before = len(out)
        self._pass_on(self._sink.take(record), out)
        self.dropped += len(out) == before and not isinstance(record, UsageCounts)

    def _pass_on(self, block: bytes, out: list[bytes]) -> None:
        if block:
            out.append(block)
        self.fault, self.aborted = self._sink.fault, self._sink.aborted


class _ChunkSink:
    """Chat and completions: records become chunks. Nothing goes out before there is output."""

    def __init__(self, shape: StreamShape, operation: Operation, answer_id: str, created: int) -> None:
        self._shape = shape
        self._chat = operation is CHAT
        self._head = b'{"id":%b,"object":%b,"created":%d,"model":%b' % (
            _encode(answer_id),
            b'"chat.completion.chunk"' if self._chat else b'"text_completion"',
            created,
            _encode(shape.public_model),
        )
        self._begun: set[int] = set()  # choices that had their role
        self._said: set[int] = set()  # choices that had output
        self._written_usage = b""
        self._hash = hashlib.sha256() if shape.receipt else None
        self.usage: Usage | None = None
        self.committed = False
        self.fault: EngineError | None = None
        self.aborted = False
        self.events = 0
        self.content_events = 0
        self.silent_at_end = 0
        self.sequence: Final = 0  # these streams do not number their events

    @property
    def receipt(self) -> str | None:
        return None if self._hash is None else self._hash.hexdigest()

    @property
    def closing(self) -> bytes:
        return DONE if self._hash is None else receipt_comment(self._hash.hexdigest(), self.events) + DONE

    def take(self, record: Record) -> bytes:
        if isinstance(record, Delta):
            return self._delta(record)
        if isinstance(record, ToolCall):
            return self._tool_call(record)
        if isinstance(record, Finish):
            return self._finish_choice(record)
        assert isinstance(record, UsageCounts)  # the grammar has let nothing else pass
        self.usage = Usage(
            _count(record.prompt_tokens), _count(record.cached_tokens), _count(record.completion_tokens)
        )
        self._written_usage = _write_usage(record, self.usage)
        return b""

    def finish(self) -> bytes:
        if not self._shape.wants_usage or not self._written_usage:
            return b""
        return self._write(b',"choices":[],"usage":' + self._written_usage + b"}")

    def _delta(self, record: Delta) -> bytes:
        raw = record.raw or _NOTHING_RAW
        logprobs = _embedded(record.logprobs)
        pieces = []
        if record.reasoning:
            # Alone: many clients look at one kind of output in an event.
            pieces.append((b'"reasoning":' + _encode(record.reasoning), b"null", _NOTHING_RAW))
        if record.text or logprobs != b"null" or _is_output(raw):
            name = b'"content":' if self._chat else b'"text":'
            said = name + _encode(record.text) if record.text or not self._chat else b""
            pieces.append((said, logprobs, raw))
        return b"".join(self._output(record.i, *piece) for piece in pieces)

    def _tool_call(self, record: ToolCall) -> bytes:
        function = {"arguments": _encode(record.arguments)}
        call = {"index": b"%d" % record.index}
        if record.name:
            function = {"name": _encode(record.name), **function}
        if record.id:
            call |= {"id": _encode(record.id), "type": b'"function"'}
        call["function"] = join_members(function)
        said = b'"tool_calls":[' + join_members(call) + b"]"
        return self._output(record.i, said, b"null", record.raw or _NOTHING_RAW)

    def _output(self, choice: int, said: bytes, logprobs: bytes, raw: RawFields) -> bytes:
        self._said.add(choice)
        self.content_events += 1
        block = self._choice(choice, said, logprobs, b"null", raw)
        self.silent_at_end = 0
        return block

    def _finish_choice(self, record: Finish) -> bytes:
        if record.reason in NO_FINISH:
            if record.reason == ABORT and record.i not in self._said:
                self.aborted = True
            else:
                self.fault = EngineError(500)
            return b""
        # Nothing was said: a role needs something beside it.
        said = b"" if record.i in self._begun else b'"content":""'
        said = said if self._chat else b'"text":""'
        return self._choice(record.i, said, b"null", _encode(record.reason), record.raw or _NOTHING_RAW)

    def _choice(self, choice: int, said: bytes, logprobs: bytes, reason: bytes, raw: RawFields) -> bytes:
        self.committed = True
        if self._chat:
            role = b"" if choice in self._begun else b'"role":"assistant"'
            self._begun.add(choice)
            members = b",".join(filter(None, (role, said, _raw_members(raw.delta, _OWN_DELTA))))
            said = b'"delta":{' + members + b"}"
        elif not said.startswith(b'"text":'):
            said = b'"text":"",' + said  # a completion always has one
        parts = [self._head]
        if beside := _raw_members(raw.chunk, _OWN_CHUNK):
            parts += [b",", beside]
        parts += [b',"choices":[{"index":%d,' % choice, said, b',"logprobs":', logprobs]
        if beside := _raw_members(raw.choice, _OWN_CHOICE):
            parts += [b",", beside]
        parts += [b',"finish_reason":', reason, b"}]"]
        if self._shape.wants_running_usage and self._written_usage:
            parts += [b',"usage":', self._written_usage]
        parts.append(b"}")
        return self._write(b"".join(parts), whole=True)

    def _write(self, data: bytes, *, whole: bool = False) -> bytes:
        data = data if whole else self._head + data
        if self._hash is not None:
            self._hash.update(data + b"\n")
        self.events += 1
        self.silent_at_end += 1
        return write_event(data)


_NOTHING_RAW: Final = RawFields()
# Fields that are ours, whatever an engine calls its own.
_OWN_CHUNK: Final = frozenset({"id", "object", "created", "model", "choices", "usage", "error"})
_OWN_CHOICE: Final = frozenset({"index", "delta", "text", "logprobs", "finish_reason"})
_OWN_DELTA: Final = frozenset({"role", "content", "reasoning", "tool_calls"})
_OWN_USAGE: Final = frozenset({"prompt_tokens", "completion_tokens", "total_tokens"})
_EMPTY: Final = frozenset({b"null", b'""', b"[]", b"{}", b"false", b"0"})
_Fields = dict[str, msgspec.Raw] | msgspec.UnsetType


def _count(value: int | msgspec.UnsetType | None) -> int | None:
    return None if value is msgspec.UNSET else value


def _embedded(raw: msgspec.Raw | msgspec.UnsetType) -> bytes:
    """Embedded JSON on one line; a CR can only be white space in it."""
    return b"null" if raw is msgspec.UNSET else bytes(raw).replace(b"\r", b" ")


def _raw_members(fields: _Fields, own: frozenset[str]) -> bytes:
    """Write further fields, but for those that are ours."""
    if fields is msgspec.UNSET:
        return b""
    kept = {key: _embedded(raw) for key, raw in fields.items() if key not in own}
    return join_members(kept)[1:-1]


def _is_output(raw: RawFields) -> bool:
    """Whether fields without a name here carry something that a client would call output."""
    inside = [fields for fields in (raw.choice, raw.delta) if fields is not msgspec.UNSET]
    progress = raw.chunk is not msgspec.UNSET and "prompt_progress" in raw.chunk
    return progress or any(bytes(raw).strip() not in _EMPTY for fields in inside for raw in fields.values())


def _write_usage(record: UsageCounts, usage: Usage) -> bytes:
    prompt, generated = usage.prompt or 0, usage.generated or 0
    members = {
        "prompt_tokens": b"%d" % prompt,
        "completion_tokens": b"%d" % generated,
        "total_tokens": b"%d" % (prompt + generated),
    }
    if usage.cached is not None:
        members["prompt_tokens_details"] = b'{"cached_tokens":%d}' % usage.cached
    if record.details is not msgspec.UNSET:
        members |= {key: _embedded(raw) for key, raw in record.details.items() if key not in _OWN_USAGE}
    return join_members(members)


class _EventSink:
    """Responses and messages: the events pass as they are, through the relay that knows their names.

    The terminal event is the closing word, and no event until the agent says that it is the end.
    """

    def __init__(self, shape: StreamShape, style: Style, answer_id: str) -> None:
        self._relay = NamedRelay(shape, style, answer_id)
        self._fault: EngineError | None = None
        self._ended = False
        self.aborted: Final = False

    @property
    def committed(self) -> bool:
        return self.events > 0

    @property
    def events(self) -> int:
        return self._relay.events - (self._relay.done and not self._ended)

    @property
    def content_events(self) -> int:
        return self._relay.content_events

    @property
    def silent_at_end(self) -> int:
        return self._relay.silent_at_end - (self._relay.done and not self._ended)

    @property
    def fault(self) -> EngineError | None:
        return self._fault or self._relay.fault

    @property
    def usage(self) -> Usage | None:
        return self._relay.usage

    @property
    def receipt(self) -> str | None:
        return self._relay.receipt

    @property
    def closing(self) -> bytes:
        return self._relay.closing

    @property
    def sequence(self) -> int:
        return self._relay.sequence

    def take(self, record: Record) -> bytes:
        if not isinstance(record, NamedEvent):
            return b""
        name = record.event.encode() if record.event else None
        # A CR can only be white space in JSON, and would end a line.
        return self._relay.feed(write_event(record.data.replace("\r", "\n").encode(), name))

    def finish(self) -> bytes:
        self._ended = self._relay.done
        if not self._ended:
            self._fault = EngineError(502, "the end before the terminal event", code="engine_protocol_error")
        return b""


class AgentAnswer:
    """One attempt's buffered answer, from an agent's records.

    Args:
        choices: choices that the answer has; its body is judged elsewhere.
        max_bytes: bound of its body.

    Attributes:
        done: the agent said ``end``; `result` has the answer.
        fault, aborted, progress: as in `AgentRelay`.
    """

    def __init__(self, choices: int, max_bytes: int, secrets: tuple[str, ...] = ()) -> None:
        self._secrets = secrets
        self._max = max_bytes
        self._lines = LineReader(max(max_bytes + _ENVELOPE, MAX_LINE))
        self._grammar = Grammar(AnswerForm.BUFFERED, choices)
        self.result: Result | None = None
        self.done = False
        self.fault: EngineError | None = None
        self.aborted = False
        self.progress = 0

    @property
    def generated(self) -> int:
        """Tokens that the agent told of so far."""
        return self._grammar.generated

    @property
    def said_last(self) -> bool:
        """As in `AgentRelay`."""
        return self._grammar.stage is Stage.OVER

    @property
    def over(self) -> bool:
        """Whether nothing more is read from the agent's answer."""
        return self.done or self.fault is not None or self.aborted

    @property
    def body(self) -> bytes:
        """The body of `result`: its JSON, or the text of an answer that is no JSON.

        Raises:
            ValueError: the text is none.
        """
        assert self.result is not None
        raw = bytes(self.result.body)
        if not self.result.content_type:
            return raw
        try:
            return msgspec.json.decode(raw, type=str).encode()
        except msgspec.MsgspecError:
            raise ValueError("the text of an answer can not be read") from None

    def feed(self, data: bytes) -> None:
        """Take in bytes of the agent."""
        for line in self._lines.feed(data) if not self.over else ():
            self._take(line)
            if self.over:
                return
        if self._lines.too_large and not self.over:
            self._malformed("the answer is too large")

    def end(self) -> None:
        """Take the proper end of the agent's message: the last record may lack its line end."""
        line = None if self.over else self._lines.end()
        if line is not None:
            self._take(line, last=True)

    def _malformed(self, message: str) -> None:
        self.fault = EngineError(502, message, code="engine_protocol_error")

    def _take(self, line: bytes, *, last: bool = False) -> None:
        before = self._grammar.generated
        try:
            record = read_record(line)
            if record is None:
                return
            if len(line) > MAX_LINE and not isinstance(record, Result):
                raise OutOfGrammar(f"a record is over {MAX_LINE} bytes")
            self._grammar.step(record)
        except OutOfGrammar as exc:
            self._malformed(str(exc))
        except ValueError as exc:
            if not last:
                self._malformed(str(exc))
        else:
            self._note(record, self._grammar.generated > before)

    def _note(self, record: Record, more: bool) -> None:
        if isinstance(record, Failed):
            failure = failure_of(record, self._secrets)
            self.aborted = failure.gave_up
            self.fault = None if failure.gave_up else failure
        elif isinstance(record, End):
            self.done = True
        elif isinstance(record, Result):
            self.progress += 1
            self.result = record
            if len(bytes(record.body)) > self._max:
                self._malformed("the answer is too large")
        else:
            self.progress += more or not isinstance(record, Ping | Accepted)


class ReleaseReader:
    """Reads an agent's stream of events: which attempts its engine has let go.

    Attributes:
        broken: a line can not be read, or is too long; nothing is read after it.
    """

    def __init__(self) -> None:
        self._lines = LineReader(_MAX_EVENT)
        self.broken = False

    def feed(self, data: bytes) -> list[ReleasedRequest]:
        """Take in bytes, and answer the releases in them; lines that tell something else are ignored."""
        if self.broken:
            return []
        found: list[ReleasedRequest] = []
        for line in self._lines.feed(data):
            try:
                release = read_message(line, Release)
            except ValueError:
                self.broken = True
                return found
            if release.released is not msgspec.UNSET:
                found.append(release.released)
        self.broken = self._lines.too_large
        return found
