"""The client port of one HTTP exchange: it owns the socket's writer while the exchange runs.

Streams leave as chunks (HTTP/1.1) or until the connection is closed (HTTP/1.0);
buffered answers with their length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import trio

from ..contract import CHAT, AnswerHead, Operation
from ..errors import ClientGone, Problem
from ..ledger import EventMarks
from ..wire import CONTINUE, HEARTBEAT, LAST_CHUNK, RequestHead, write_chunk, write_event
from ._connection import Connection
from ._head import answer_head
from ._problems import JSON, problem_body, problem_event, problem_headers

ASK_AT_MOST: Final = 4  # questions before headers; then a FIN means gone
SMALL_ANSWER: Final = 8 * 1024  # bytes of one that was not acknowledged in time because nobody is there
_STREAM_HEADERS: Final = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)


@final
class HttpClient:
    """See ClientPort.

    Args:
        identity: headers of every answer to this request.
        answer_limit: seconds after which an answer without acknowledgement counts as undeliverable.
        ask_every: seconds between two questions to a half-closed client.
        operation: decides the shape of errors.
        latest: answers further headers of every answer, as they are when it begins.
    """

    def __init__(
        self,
        connection: Connection,
        head: RequestHead,
        identity: tuple[tuple[str, str], ...],
        answer_limit: float,
        ask_every: float,
        operation: Operation = CHAT,
        latest: Callable[[], tuple[tuple[str, str], ...]] = tuple,
    ) -> None:
        self._connection = connection
        self._buffers = connection.buffers
        self._modern = head.version == b"1.1"
        self._asks = self._modern and connection.asks_after_fin
        self._identity = identity
        self._answer_limit = answer_limit
        self._ask_every = ask_every
        self._operation = operation
        self._latest = latest
        self._start = connection.written
        self._pending = b""
        self._head = b""
        self._chunked = False
        self._streamed = False
        self._begun = False
        self._ended = False
        self._cut = False
        self._at_boundary = True
        self._marks: EventMarks | None = None  # of a stream
        self.keep_alive = head.keep_alive

    # -- state

    @property
    def begun(self) -> bool:
        """See ClientPort."""
        return self._begun

    @property
    def pending(self) -> int:
        """See ClientPort."""
        return len(self._pending) + self._connection.waiting if self._buffers else len(self._pending)

    @property
    def ended(self) -> bool:
        """See ClientPort."""
        return self._ended

    @property
    def finished(self) -> bool:
        """See ClientPort."""
        return self._ended and not self.pending and not self._cut

    def taken(self) -> int:
        """See ClientPort."""
        return self._connection.progress()

    def delivered(self) -> tuple[int, int]:
        """See ClientPort."""
        done = self._connection.acknowledged()
        events = 0 if self._marks is None else self._marks.delivered(done)
        return events, max(done - self._start, 0)

    # -- answering

    def begin(self, head: AnswerHead) -> None:
        """See ClientPort."""
        headers = [*self._identity, *self._latest(), *head.headers]
        if head.length is None:
            headers += _STREAM_HEADERS
            self._streamed = True
            self._marks = EventMarks()
            self._chunked = self._modern
            if self._modern:
                headers.append(("transfer-encoding", "chunked"))
            else:
                self.keep_alive = False
        else:
            headers += [("content-type", head.content_type), ("content-length", str(head.length))]
        self._put_head(head.status, headers)
        # What fits into any peer's receive buffer its kernel takes, however slow the program behind it is.
        if head.length is None or head.length > SMALL_ANSWER:
            self._connection.silent_limit(self._answer_limit)

    def push(
        self, piece: bytes, *, last: bool = False, joined: Sequence[tuple[int, int]] = (), events: int = 0
    ) -> None:
        """See ClientPort."""
        data, start = piece, self._connection.written  # where the piece begins in all that is written
        if self._chunked:
            data = write_chunk(piece)
            start += len(data) - len(piece) - 2
        if self._head:
            # A question may still be on its way when the answer begins.
            head, self._head = self._pending + self._head, b""
            data, start = head + data, start + len(head)
        if last:
            self._ended = True
            if self._chunked:
                data += LAST_CHUNK
        if self._marks is not None and self._marks.add(start, piece, joined, events):
            self._marks.forget(self._connection.acknowledged())
        self._at_boundary = piece.endswith(b"\n\n")
        count = self._connection.write(data)
        self._pending = data[count:] if count < len(data) else b""

    async def flush(self) -> None:
        """See ClientPort."""
        while self.pending:
            await self._connection.wait_writable()
            self._pending = self._pending[self._connection.write(self._pending) :]

    def withdraw(self) -> None:
        """See ClientPort. A piece goes to the socket as one, so none can be taken back."""

    def respond(self, problem: Problem, extra: dict[str, object] | None) -> None:
        """See ClientPort."""
        body = problem_body(problem, extra, self._operation.anthropic)
        headers = [*self._identity, *self._latest(), *problem_headers(problem), ("content-type", JSON)]
        if problem.code == "gateway_draining":
            self.keep_alive = False
        self._put_head(problem.status, [*headers, ("content-length", str(len(body)))])
        self.push(body, last=True)

    def error_event(self, problem: Problem, extra: dict[str, object], sequence: int) -> bytes:
        """See ClientPort."""
        name, data = problem_event(problem, extra, self._operation, sequence)
        return write_event(data, name)

    def cut(self) -> None:
        """See ClientPort."""
        if self._cut:
            return
        self._cut = True
        self._connection.close(reset=bool(self.pending) or (self._streamed and not self._chunked))

    # -- watching

    def on_leaving(self, told: Callable[[], None] | None) -> None:
        """See ClientPort."""
        self._connection.on_leaving(told)

    async def wait_gone(self) -> None:
        """See ClientPort."""
        hangup = self._connection.hangup
        await self._connection.wait_end()
        asked = 0
        while not hangup.gone:
            if not self._asks or (not self._begun and asked == ASK_AT_MOST):
                return
            asked += not self._begun
            self._ask()
            with trio.move_on_after(self._ask_every):
                await hangup.wait_gone()

    def _ask(self) -> None:
        """Write something harmless: only a reset answers that nobody is there."""
        if self.pending or self._ended:
            return  # what is on its way asks already
        try:
            if not self._begun:
                self._pending = CONTINUE[self._connection.write(CONTINUE) :]
            elif self._streamed and self._at_boundary:
                self.push(HEARTBEAT)
        except ClientGone:
            return  # the hangup says it

    def _put_head(self, status: int, headers: list[tuple[str, str]]) -> None:
        if not self.keep_alive:
            headers = [*headers, ("connection", "close")]
        elif not self._modern:
            headers = [*headers, ("connection", "keep-alive")]
        self._begun = True
        self._head = answer_head(status, headers)
