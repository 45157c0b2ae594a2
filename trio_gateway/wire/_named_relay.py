"""The relay core for streams of named events: OpenAI's Responses and Anthropic's Messages. Sans-IO.

Same life as `StreamRelay`: events are held until one commits, then pass; an event
is decoded only where its name says that it must be read. The terminal event is
not handed out with the others: it is the `closing` word, said once, when the
answer is whole.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ..contract import Style
from ._answers import EngineError, Usage, read_error, read_named_usage
from ._json import join_members, may_hold_infinity, raw_members, with_finite_numbers
from ._relay import StreamShape, is_json, may_hide_marker
from ._sse import Event, EventReader, receipt_comment, write_event

_decode = msgspec.json.Decoder().decode
_AMID: Final = frozenset(  # a message has begun before them
    {b"content_block_start", b"content_block_delta", b"content_block_stop", b"message_delta"}
)
_TYPE = re.compile(r"[\w.]+", re.ASCII)
_SEQUENCE = re.compile(rb'"sequence_number"\s*:\s*([0-9]{1,15})')


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the names of an operation's events mean.

    Attributes:
        silent: carry no output, so they do not commit.
        perhaps: commit if what they introduce is output by itself (a tool call).
        terminal: the answer is whole.
        failed: the engine gave up.
        usage: carry usage.
        holder: the member of an event that holds model and usage.
    """

    silent: frozenset[bytes]
    perhaps: frozenset[bytes]
    terminal: frozenset[bytes]
    failed: frozenset[bytes]
    usage: frozenset[bytes]
    holder: str


GRAMMARS: Final[dict[Style, Grammar]] = {
    Style.RESPONSES: Grammar(
        silent=frozenset(
            {b"response.created", b"response.queued", b"response.in_progress", b"response.content_part.added",
             b"response.reasoning_summary_part.added", b"response.reasoning_part.added"}
        ),
        perhaps=frozenset({b"response.output_item.added"}),
        terminal=frozenset({b"response.completed", b"response.incomplete"}),
        failed=frozenset({b"response.failed", b"error"}),
        usage=frozenset({b"response.completed", b"response.incomplete"}),
        holder="response",
    ),
    Style.MESSAGES: Grammar(
        silent=frozenset({b"message_start", b"ping"}),
        perhaps=frozenset({b"content_block_start"}),
        terminal=frozenset({b"message_stop"}),
        failed=frozenset({b"error"}),
        usage=frozenset({b"message_start", b"message_delta"}),
        holder="message",
    ),
}  # fmt: skip


class NamedRelay:
    """One attempt's stream of named events. Attributes as `StreamRelay`.

    Args:
        answer_id: identity of a message whose engine does not begin it: llama.cpp leaves ``message_start``
            out where the first token is half a character, and clients could not read what follows. None:
            whoever is handed the events begins it.
    """

    def __init__(self, shape: StreamShape, style: Style, answer_id: str | None) -> None:
        self._shape = shape
        self._grammar = GRAMMARS[style]
        self._answer_id = answer_id or ""
        self._begun = style is not Style.MESSAGES or answer_id is None
        self._reader = EventReader(shape.max_event_bytes)
        self._rename = shape.upstream_model != shape.public_model
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._usage = Usage()
        self._last = b""
        self._noise = 0
        self._hash = hashlib.sha256() if shape.receipt else None
        self.closing = b""
        self.committed = False
        self.done = False
        self.fault: EngineError | None = None
        self.aborted = False
        self.events = 0
        self.content_events = 0
        self.silent_at_end = 0
        self.progress = 0

    @property
    def dropped(self) -> int:
        """Blocks without data, events that are no object, and the end of a block that nobody began."""
        return self._noise + self._reader.dropped

    @property
    def all_finished(self) -> bool:
        """Whether the terminal event came."""
        return self.done and self.fault is None

    @property
    def over(self) -> bool:
        """Whether nothing more is read from the engine's stream."""
        return self.done or self.fault is not None

    @property
    def usage(self) -> Usage | None:
        """The usage that the engine reported."""
        return None if self._usage == Usage() else self._usage

    @property
    def sequence(self) -> int:
        """The number that an event of ours would have after the last one."""
        found = _SEQUENCE.search(self._last)
        return int(found[1]) + 1 if found else 0

    def feed(self, data: bytes) -> bytes:
        """Take in bytes of the engine and answer whole events for the client."""
        if self.over:
            return b""
        out: list[bytes] = []
        for event in self._reader.feed(data):
            if not self._take(event, out):
                break
        if self._reader.too_large and not self.over:
            self._malformed(f"an event is over {self._shape.max_event_bytes} bytes")
        return b"".join(out)

    def end(self) -> bytes:
        """Take the proper end of the engine's message; without a terminal event it is a cut answer."""
        self._reader.end()
        return b""

    def _take(self, event: Event, out: list[bytes]) -> bool:
        data = event.data.strip() if not event.data.startswith(b"{") else event.data
        if not data.startswith(b"{"):
            if event.name == b"error":
                self.fault = read_error(data, None, self._shape.secrets)
                return False
            self._noise += data != b"[DONE]"
            return True
        if may_hold_infinity(data):
            data = with_finite_numbers(data)
        name = event.name or _name_of(data)
        self.progress += 1
        grammar = self._grammar
        if name in grammar.failed:
            self.fault = _failure(data, self._shape.secrets)
            return False
        read = (
            not self.committed
            or self._rename
            or name in grammar.usage
            or name in grammar.perhaps
            or b'"error"' in data
            or may_hide_marker(data)
            or not is_json(data)
        )
        if read and not self._read(name, data):
            return False
        data = self._renamed(data) if self._rename and not self.over else data
        if not self._begun and (name in _AMID or name == b"message_start"):
            self._begun = True
            if name in _AMID and not self._pass(b"message_start", self.beginning, out):
                return False
            if name == b"content_block_stop":  # and its block has not begun either
                self._noise += 1
                return True
        return not self.over and self._pass(name, data, out)

    @property
    def beginning(self) -> bytes:
        """Data of the event that begins a message in the engine's place; nothing is known of its prompt."""
        message: dict[str, Any] = {
            "id": "msg_" + self._answer_id.removeprefix("chatcmpl-"),
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._shape.public_model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return msgspec.json.encode({"type": "message_start", "message": message})

    def _read(self, name: bytes, data: bytes) -> bool:
        """Read what the name promises; False: the event is a failure."""
        try:
            value = _decode(data)
        except (msgspec.MsgspecError, RecursionError):
            self._malformed("an event is not valid JSON")
            return False
        if _is_error(value):
            self.fault = read_error(data, None, self._shape.secrets)
            return False
        if name in self._grammar.usage:
            self._usage = read_named_usage(value, self._grammar.holder, self._usage)
        if name in self._grammar.perhaps and _introduces_output(value):
            self.committed = True
        return True

    def _pass(self, name: bytes, data: bytes, out: list[bytes]) -> bool:
        grammar = self._grammar
        quiet = name in grammar.silent or name in grammar.perhaps
        self.committed = self.committed or not quiet
        block = write_event(data, name)
        self._last = data
        if self._hash is not None:
            self._hash.update(data + b"\n")
        if not self.committed:
            self._held.append(block)
            self._held_bytes += len(block)
            if self._held_bytes > self._shape.max_event_bytes:
                self._malformed("the engine sends events without end and without content")
            return not self.over
        if self._held:
            out.extend(self._held)
            self.events += len(self._held)
            self._held.clear()
        self.events += 1
        self.silent_at_end = self.silent_at_end + 1 if quiet or name in grammar.terminal else 0
        if name in grammar.terminal:
            self.closing = self._receipt() + block
            self.done = True
            return False
        self.content_events += not quiet
        out.append(block)
        return True

    def _receipt(self) -> bytes:
        return b"" if self._hash is None else receipt_comment(self._hash.hexdigest(), self.events)

    @property
    def receipt(self) -> str | None:
        """SHA-256 of what was handed out; None unless asked for."""
        return None if self._hash is None else self._hash.hexdigest()

    def _renamed(self, data: bytes) -> bytes:
        """Put the public name into an event that was read before, so that it is JSON."""
        members = raw_members(data)
        inner = members.get(self._grammar.holder)
        if inner is None or not inner.startswith(b"{"):
            return data
        held = raw_members(inner)
        if "model" not in held or _decode(held["model"]) != self._shape.upstream_model:
            return data
        held["model"] = msgspec.json.encode(self._shape.public_model)
        members[self._grammar.holder] = join_members(held)
        return join_members(members)

    def _malformed(self, message: str) -> None:
        self.fault = EngineError(502, message, code="engine_protocol_error")


def _name_of(data: bytes) -> bytes:
    """An event without a name carries it as its type."""
    try:
        found = _decode(raw_members(data).get("type", b'""'))
    except (ValueError, RecursionError):
        return b""
    return found.encode() if isinstance(found, str) and _TYPE.fullmatch(found) else b""


def _is_error(value: Any) -> bool:
    return not isinstance(value, dict) or bool(value.get("error")) or value.get("type") == "error"


def _introduces_output(value: dict[str, Any]) -> bool:
    """Whether what begins is output by itself: a tool call, or text that is there already."""
    begun = value.get("item") or value.get("content_block") or {}
    if not isinstance(begun, dict):
        return False
    kind = str(begun.get("type", ""))
    return kind not in ("message", "reasoning", "text", "thinking", "") or bool(
        begun.get("text") or begun.get("thinking")
    )


def _failure(data: bytes, secrets: tuple[str, ...]) -> EngineError:
    """Read ``response.failed`` and ``error`` events, whose error may stand in the response."""
    try:
        members = raw_members(data)
        response = raw_members(members["response"]) if "response" in members else members
        if response.get("error", b"null").strip() != b"null":
            return read_error(b'{"error":' + response["error"] + b"}", None, secrets)
    except (ValueError, RecursionError):
        pass
    return read_error(data, None, secrets)
