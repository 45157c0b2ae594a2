"""Strict reading of an event stream, and what a chat stream means. Sans-IO.

Follows WHATWG HTML 9.2.6 to the letter and reports what a lenient reader would
hide: bytes that are not UTF-8, fields that clients trip over, an end inside an
event.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One dispatched event.

    Attributes:
        data: its data lines joined by LF.
        name: its ``event`` field, ``message`` where there is none.
    """

    data: str
    name: str = "message"

    @property
    def is_done(self) -> bool:
        """Whether this is the ``[DONE]`` that ends OpenAI's streams."""
        return self.data == "[DONE]"

    def json(self) -> dict[str, object] | None:
        """The data as a JSON object, or None where it is none."""
        try:
            value = json.loads(self.data)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


class EventStreamReader:
    """Turns bytes into events, however they are cut.

    Attributes:
        events: the events dispatched so far.
        comments: the comment lines so far, without their colon.
        fields: every field name that occurred.
        problems: what a strict reader objects to.
    """

    def __init__(self) -> None:
        self.events: list[StreamEvent] = []
        self.comments: list[str] = []
        self.fields: set[str] = set()
        self.problems: list[str] = []
        self._line = bytearray()
        self._after_cr = False
        self._first = True
        self._data: list[str] = []
        self._name = ""
        self._pending = False

    def feed(self, data: bytes) -> None:
        """Take in bytes of the body."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r") or (self._after_cr and not data)
        lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines[:-1]:
            self._end_line(bytes(self._line) + line)
            self._line.clear()
        self._line += lines[-1]

    def end(self) -> None:
        """Say that the body ended; an event without its blank line is a problem."""
        if self._line or self._pending:
            self.problems.append("ends inside an event")

    def _end_line(self, raw: bytes) -> None:
        if self._first:
            self._first = False
            raw = raw.removeprefix(BOM)
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            self.problems.append(f"not UTF-8: {raw[:60]!r}")
            line = raw.decode("utf-8", "replace")
        if not line:
            self._dispatch()
        elif line.startswith(":"):
            self.comments.append(line[1:])
        else:
            self._field(line)

    def _dispatch(self) -> None:
        if self._data:
            self.events.append(StreamEvent("\n".join(self._data), self._name or "message"))
        elif self._pending:
            self.problems.append("an event without data")  # the OpenAI SDK fails on those
        self._data, self._name, self._pending = [], "", False

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        self.fields.add(name)
        self._pending = True
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value


@dataclass(slots=True)
class ChatReading:
    """What the events of a chat or completions stream say.

    Attributes:
        texts: content joined, by choice.
        finishes: finish reasons, by choice.
        roles: role deltas seen, by choice.
        usage: the last usage object.
        errors: error objects, in order.
        done: how many ``[DONE]`` came.
        after_done: events behind the first ``[DONE]``.
        models: every model name seen.
        not_json: data that is neither ``[DONE]`` nor a JSON object.
    """

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    roles: dict[int, int] = field(default_factory=dict)
    usage: dict[str, object] | None = None
    errors: list[dict[str, object]] = field(default_factory=list)
    done: int = 0
    after_done: int = 0
    models: set[str] = field(default_factory=set)
    not_json: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.texts.get(0, "")

    def add(self, event: StreamEvent) -> None:
        """Take in one more event."""
        self.after_done += self.done > 0
        if event.is_done:
            self.done += 1
            return
        chunk = event.json()
        if chunk is None:
            self.not_json.append(event.data)
            return
        self._add_chunk(chunk)

    def _add_chunk(self, chunk: dict[str, object]) -> None:
        error, usage, choices = chunk.get("error"), chunk.get("usage"), chunk.get("choices")
        if isinstance(error, dict):
            self.errors.append(error)
        if isinstance(usage, dict):
            self.usage = usage
        if isinstance(chunk.get("model"), str):
            self.models.add(str(chunk["model"]))
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._add_choice(choice)

    def _add_choice(self, choice: dict[str, object]) -> None:
        index = choice.get("index", 0)
        index = index if isinstance(index, int) else 0
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        text = delta.get("content", choice.get("text"))
        if isinstance(text, str):
            self.texts[index] = self.texts.get(index, "") + text
        if delta.get("role"):
            self.roles[index] = self.roles.get(index, 0) + 1
        if isinstance(choice.get("finish_reason"), str):
            self.finishes[index] = str(choice["finish_reason"])


def read_chat_stream(reader: EventStreamReader) -> ChatReading:
    """Read the meaning of all events dispatched so far."""
    reading = ChatReading()
    for event in reader.events:
        reading.add(event)
    return reading
