"""The client port of one response on a WebSocket: the engine's events become messages of a lane."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final, final

import trio

from ..contract import AnswerHead, Ending, InternalRequest, Outcome
from ..errors import ClientGone, Problem
from ..flow import DeltaLog
from ..ledger import Tally
from ..wire import EventReader, LaneWriter, as_text, text_frame
from ._arrivals import Arrivals
from ._problems import error_object, problem_headers
from ._websocket import WebSocket

_FAREWELL: Final = b"!"  # an engine's event never begins so: what stands behind it is ours


@final
class ResponseStream:
    """See ClientPort and Sender.

    Args:
        lane: in which it is answered.
        over: called once, when its last message is in the socket, or lost; perhaps before its exchange
            has ended, which may wait for the engine.

    Attributes:
        tally: of its exchange, once it has one.
    """

    door: Final = "responses"

    def __init__(self, lane: str | None, socket: WebSocket, over: Callable[[], None]) -> None:
        self.request_id = ""
        self.tally: Tally | None = None
        self._tell_over = over
        self._socket: WebSocket | None = socket
        self._log = DeltaLog(None, 0)
        self._writer = LaneWriter(lane)
        self._reader = EventReader(sys.maxsize)  # events have had their bound where they came in
        self._arrivals = Arrivals()
        self._size = 0
        self._figure = 0
        self._seen = -1
        self._begun = False
        self._ended = False
        self._withdrawn = False
        self._cut = False
        self._settled = False
        self._over = False
        self._gone = trio.Event()
        self._told: Callable[[], None] | None = None
        self._moved = trio.lowlevel.ParkingLot()
        socket.attach(self)

    # -- ClientPort: state

    @property
    def begun(self) -> bool:
        """See ClientPort."""
        return self._begun

    @property
    def pending(self) -> int:
        """See ClientPort."""
        return self._log.waiting_bytes + self._arrivals.sending

    @property
    def ended(self) -> bool:
        """See ClientPort."""
        return self._ended

    @property
    def finished(self) -> bool:
        """See ClientPort."""
        return self._ended and not self.pending and not self._cut

    def taken(self) -> int:
        """See ClientPort. Grows also while it waits for its turn on a socket that moves."""
        if self._socket is not None and self.pending:
            progress = self._socket.progress()
            if progress != self._seen:
                self._seen = progress
                self._figure += 1
        return self._figure

    def delivered(self) -> tuple[int, int]:
        """See ClientPort. Bytes are those of the events themselves."""
        self._arrivals.look(self._socket)
        return self._arrivals.arrived

    # -- ClientPort: answering

    def begin(self, head: AnswerHead) -> None:
        """See ClientPort. Nothing goes out: an answer begins with its first event."""
        self._begun = True

    def push(
        self, piece: bytes, *, last: bool = False, joined: Sequence[tuple[int, int]] = (), events: int = 0
    ) -> None:
        """See ClientPort. Events of this API are never joined."""
        self._check()
        for event in self._reader.feed(piece):
            self._take(event.data)
        self._ended = self._ended or last
        self._wake()
        self._see_if_over()
        self._check()

    async def flush(self) -> None:
        """See ClientPort."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.pending:
            self._check()
            await self._moved.park()
        self._check()

    def withdraw(self) -> None:
        """See ClientPort."""
        self._log.drop_waiting()
        self._withdrawn = True

    def respond(self, problem: Problem, extra: dict[str, object] | None) -> None:
        """See ClientPort."""
        self._begun = self._ended = True
        self._log.end(self._failure(problem, extra))
        self._wake()
        self._see_if_over()

    def error_event(self, problem: Problem, extra: dict[str, object], sequence: int) -> bytes:
        """See ClientPort."""
        return b"data: " + _FAREWELL + self._failure(problem, extra, sequence) + b"\n\n"

    def cut(self) -> None:
        """See ClientPort. The socket has other lanes: it stays."""
        self._cut = True
        self._log.clear()
        self._moved.unpark_all()

    def on_leaving(self, told: Callable[[], None] | None) -> None:
        """See ClientPort."""
        self._told = told
        if self._gone.is_set():
            self._tell_of_leaving()

    def _tell_of_leaving(self) -> None:
        told, self._told = self._told, None
        if told is not None:
            told()

    async def wait_gone(self) -> None:
        """See ClientPort."""
        await self._gone.wait()

    def _check(self) -> None:
        if self._cut or self._gone.is_set():
            raise ClientGone

    def _take(self, data: bytes) -> None:
        if data.startswith(_FAREWELL):
            self._say(data[len(_FAREWELL) :])
        elif data.startswith(b"{") and not self._withdrawn:
            self._size += len(data)
            self._say(self._writer.event(as_text(data)))

    def _say(self, message: bytes) -> None:
        self._log.add(message, 0, self._size)

    def _failure(
        self, problem: Problem, extra: dict[str, object] | None, sequence: int | None = None
    ) -> bytes:
        headers = [("x-request-id", self.request_id), *problem_headers(problem)]
        return self._writer.error(problem.status, error_object(problem, extra), headers, sequence)

    def _wake(self) -> None:
        if self._socket is not None:
            self._socket.wake(self)

    # -- Sender

    def next_frame(self) -> bytes | None:
        """See Sender."""
        delta = self._log.take()
        if delta is None:
            return None
        self._arrivals.take(delta.seq, delta.size, len(delta.chunk))
        return text_frame(delta.chunk)

    def sent(self, end: int) -> None:
        """See Sender."""
        self._arrivals.sent(end, self._socket)
        self._figure += 1
        if not self.pending:
            self._moved.unpark_all()
            self._see_if_over()

    def lost(self) -> None:
        """See Sender."""
        self._arrivals.look(self._socket)
        self._arrivals.forget()
        self._log.clear()
        self._gone.set()
        self._tell_of_leaving()
        self._moved.unpark_all()
        self._see_if_over()

    # -- how its exchange goes, see StreamPort

    def queued(self, request: InternalRequest, position: int, eta: float | None) -> None:
        """See StreamPort. This protocol has no word for it."""

    def placed(self, request: InternalRequest) -> None:
        """See StreamPort. This protocol has no word for it."""

    async def last_words(self) -> None:
        """See StreamPort. Nothing is acknowledged here."""
        await trio.lowlevel.checkpoint_if_cancelled()

    def settle(self, ending: Ending) -> None:
        """See StreamPort."""
        self._settled = True
        problem = ending.problem
        if ending.outcome is Outcome.CLIENT_STALLED:
            problem = Problem.of("client_stalled", "the client did not take the answer in time")
        if problem is not None and (self._cut or not self._ended) and self._socket is not None:
            self._socket.say(self._failure(problem, None))
        self._see_if_over()

    def _see_if_over(self) -> None:
        if self.pending or not (self._ended or self._settled):
            return
        if not self._over:
            self._over = True
            self._tell_over()
        if self._settled and self._socket is not None:
            self._arrivals.look(self._socket)
            self._socket.detach(self)
            self._socket = None
