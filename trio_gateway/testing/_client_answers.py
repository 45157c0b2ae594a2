"""The client's side of HTTP/1.1 for the fakes: requests as bytes, answers as seen. Sans-IO."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Literal, TypeAlias

from ._event_stream import ChatReading, EventStreamReader, read_chat_stream
from ._messages import BodyReader, MessageError, MessageHead, body_framing, json_object, take_head
from ._steps import Headers

Ending: TypeAlias = Literal["complete", "fin", "reset"]


def http_request(
    method: str, target: str, *, headers: Headers = (), body: bytes | None = None, host: str = "gateway"
) -> bytes:
    """Write a request; a body brings its ``content-length``."""
    fields = [("host", host), *headers]
    if body is not None:
        fields.append(("content-length", str(len(body))))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")


def json_request(
    target: str, body: Mapping[str, object], *, key: str | None = None, headers: Headers = ()
) -> bytes:
    """Write a POST with a JSON body and, if given, an API key."""
    bearer: Headers = () if key is None else (("authorization", f"Bearer {key}"),)
    kind = ("content-type", "application/json")
    return http_request("POST", target, headers=(kind, *bearer, *headers), body=json.dumps(body).encode())


def chat_request(
    text: str = "hi",
    *,
    model: str = "m1",
    stream: bool = True,
    key: str | None = None,
    headers: Headers = (),
    **fields: object,
) -> bytes:
    """Write a chat completion request; `fields` go into the body as they are."""
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "stream": stream, **fields}
    return json_request("/v1/chat/completions", body, key=key, headers=headers)


class Answer:
    """One response, growing while it arrives.

    Attributes:
        ended: ``complete`` where the message ended by its own framing, ``fin`` or
            ``reset`` where the connection was closed before that (a *cut* answer),
            None while it still arrives.
        events: reader of the body where it is an event stream, else None.
    """

    def __init__(self, head: MessageHead, framing: BodyReader) -> None:
        self.head = head
        self.ended: Ending | None = "complete" if framing.complete else None
        is_stream = (head.get("content-type") or "").startswith("text/event-stream")
        self.events = EventStreamReader() if is_stream else None
        self._body = framing
        self._seen = 0

    def __repr__(self) -> str:
        return f"<Answer {self.status} {len(self._body.data)} bytes, {self.ended or 'open'}>"

    @property
    def status(self) -> int:
        """The status code."""
        return int(self.head.start[1])

    @property
    def body(self) -> bytes:
        """The body so far, without framing."""
        return bytes(self._body.data)

    @property
    def chunks(self) -> int:
        """Whole chunks of a chunked body so far."""
        return self._body.chunks

    @property
    def was_cut(self) -> bool:
        """Whether the connection was closed before the message ended."""
        return self.ended in ("fin", "reset")

    def header(self, name: str) -> str | None:
        """A field's value, repeated ones joined by a comma; None where it is absent."""
        return self.head.get(name)

    def json(self) -> dict[str, object]:
        """The body, which must be a JSON object.

        Raises:
            MessageError: it is not.
        """
        return json_object(self.body)

    def error(self) -> dict[str, object]:
        """The ``error`` object of a refusal.

        Raises:
            MessageError: there is none.
        """
        error = self.json().get("error")
        if not isinstance(error, dict):
            raise MessageError(f"no error object: {self.body[:200]!r}")
        return error

    def chat(self) -> ChatReading:
        """What an event stream of chat or completion chunks says.

        Raises:
            MessageError: the answer is no event stream.
        """
        if self.events is None:
            raise MessageError(f"no event stream: {self.head.get('content-type')}")
        return read_chat_stream(self.events)

    def feed(self, buffer: bytearray) -> None:
        """Take what belongs to this answer out of the front of `buffer`."""
        self._body.feed(buffer)
        if self.events is not None:
            self.events.feed(bytes(self._body.data[self._seen :]))
            self._seen = len(self._body.data)
        if self._body.complete:
            self._end("complete")

    def end_of_stream(self, how: Literal["fin", "reset"]) -> None:
        """Say that the connection ended."""
        if how == "fin":
            self._body.end_of_stream()
        self._end("complete" if self._body.complete else how)

    def _end(self, how: Ending) -> None:
        if self.ended is None:
            self.ended = how
            if self.events is not None and how == "complete":
                self.events.end()


class AnswerReader:
    """Cuts what a connection sends into answers.

    Attributes:
        answers: final answers in order, the last one perhaps unfinished.
        interims: status codes of interim (1xx) answers in order.
        methods: of the requests whose answers are still to come; empty means POST.
    """

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.interims: list[int] = []
        self.methods: deque[str] = deque()
        self._buffer = bytearray()

    @property
    def unfinished(self) -> Answer | None:
        """The answer whose end is still to come."""
        last = self.answers[-1] if self.answers else None
        return last if last is not None and last.ended is None else None

    def feed(self, data: bytes) -> None:
        """Take in bytes from the connection.

        Raises:
            MessageError: they are no HTTP/1.1 answer.
        """
        self._buffer += data
        while self._buffer:
            answer = self.unfinished
            if answer is None:
                head = take_head(self._buffer)
                if head is None:
                    return
                self._begin(head)
            else:
                before = len(self._buffer)
                answer.feed(self._buffer)
                if len(self._buffer) == before and answer.ended is None:
                    return

    def end_of_stream(self, how: Literal["fin", "reset"]) -> None:
        """Say that the connection ended.

        Raises:
            MessageError: it ended within a head.
        """
        if self.unfinished is not None:
            self.unfinished.end_of_stream(how)
        elif self._buffer:
            raise MessageError(f"ends within a head: {bytes(self._buffer[:80])!r}")

    def _begin(self, head: MessageHead) -> None:
        version, status, _ = head.start
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (status.isdigit() and len(status) == 3):
            raise MessageError(f"not a status line: {' '.join(head.start)!r}")
        if status.startswith("1") and status != "101":
            self.interims.append(int(status))
            return
        method = self.methods.popleft() if self.methods else "POST"
        bodyless = method == "HEAD" or status in ("101", "204", "304")  # RFC 9112, 6.3
        framing = BodyReader("none") if bodyless else BodyReader(*body_framing(head, unmarked="close"))
        self.answers.append(Answer(head, framing))
