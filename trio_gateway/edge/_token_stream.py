"""The client port of one stream of a WebSocket: the exchange's events become numbered messages.

A *resumable* stream keeps its deltas until they are acknowledged. It survives the
loss of its socket for a while, and goes on over another one behind the last delta
that its client has.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import msgspec
import trio

from ..contract import AnswerHead, Ending, InternalRequest, Operation, Outcome
from ..errors import ClientGone, Problem
from ..flow import BufferPool, Delta, DeltaLog, Dropped
from ..ledger import Tally
from ..wire import DeltaWriter, EventReader, StreamEnds, as_text, text_frame, write_token_message
from ._arrivals import Arrivals
from ._problems import error_object
from ._websocket import WebSocket

ACK_WAIT: Final = 1.0  # seconds after the end for the last acknowledgements of a client that sends some
_FAREWELL: Final = b"!"  # an engine's event never begins so: what stands behind it is ours
_CANCELLED: Final = "request_cancelled"
_LAST: Final = b"{}"  # stands for the last message until it is written
_LAST_DELTA: Final = Delta(0, _LAST, 0, 0)

Members = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamTerms:
    """What a client and the settings say about one stream.

    Attributes:
        credit: deltas that may be sent before more is given; None: as many as the socket takes.
        max_event: bytes of one event.
        kept: bytes of sent deltas that are kept until they are acknowledged; 0: it is not resumable.
        window: seconds that a resumable one survives without a socket.
    """

    credit: int | None
    max_event: int
    kept: int
    window: float


@final
class TokenStream:
    """See ClientPort and Sender.

    Args:
        stream_id: as its client calls it.
        pool: counts what is kept.

    Attributes:
        tally: of its exchange, once it has one.
    """

    door: Final = "websocket"

    def __init__(
        self, stream_id: str, terms: StreamTerms, operation: Operation, socket: WebSocket, pool: BufferPool
    ) -> None:
        self.terms: Final = terms
        self.stream_id = stream_id
        self.request_id = ""
        self.tally: Tally | None = None
        self._pool = pool
        self._socket: WebSocket | None = socket
        self._log = DeltaLog(terms.credit, terms.kept)
        self._writer = DeltaWriter(stream_id)
        self._reader = EventReader(terms.max_event)
        self._ends = StreamEnds(operation)
        self._size = 0
        self._sent_size = 0
        self._tokens = array("Q", [0])  # by number of a delta: of all up to it
        self._arrivals = Arrivals()
        self._joined: list[tuple[int, int]] = []  # deltas that stand for more events, and how many more
        self._counted = 0  # bytes that the pool counts as kept
        self._figure = 0
        self._seen = -1
        self._lost_at: float | None = None
        self._told: Callable[[], None] | None = None
        self._last_end: int | None = None  # of the last message on the socket
        self._arrived_whole = False  # before the socket was lost
        self._last: tuple[str, Members] | None = None
        self._stage: tuple[str, Members] | None = None  # what was said last of how it goes
        self._begun = False
        self._skips = False  # the rest of an event that was withdrawn follows
        self._cut = False
        self._given_up = False  # its exchange was told that nobody is there
        self._settled = False
        self._moved = trio.lowlevel.ParkingLot()
        self._came_or_went = trio.lowlevel.ParkingLot()  # the socket; bytes move much more often
        socket.attach(self)

    # -- ClientPort: state

    @property
    def begun(self) -> bool:
        """See ClientPort."""
        return self._begun

    @property
    def pending(self) -> int:
        """See ClientPort. Bytes of chunks that the socket has not accepted."""
        return self._log.waiting_bytes + self._arrivals.sending

    @property
    def ended(self) -> bool:
        """See ClientPort."""
        return self._last is not None

    @property
    def finished(self) -> bool:
        """See ClientPort."""
        return self.ended and not self.pending and not self._cut

    def taken(self) -> int:
        """See ClientPort. Grows also by credit, and while it waits for its turn on a socket that moves.

        If it can be resumed, only its credit counts: a socket that does not move is lost before long, and
        what has none has its window.
        """
        waits = self._log.can_send or self._arrivals.sending > 0
        if self._socket is None or (waits and self.terms.kept):
            self._figure += 1
        elif waits:
            progress = self._socket.progress()
            if progress != self._seen:
                self._seen = progress
                self._figure += 1
        return self._figure + self._log.grants

    def delivered(self) -> tuple[int, int]:
        """See ClientPort. Deltas, and bytes of events in them; what is acknowledged has arrived."""
        self._arrivals.look(self._socket)
        number, size = self._arrivals.arrived
        return number + sum(more for seq, more in self._joined if seq <= number), size

    # -- ClientPort: answering

    def begin(self, head: AnswerHead) -> None:
        """See ClientPort. Nothing goes out: an answer begins with its first delta."""
        self._begun = True

    def push(
        self, piece: bytes, *, last: bool = False, joined: Sequence[tuple[int, int]] = (), events: int = 0
    ) -> None:
        """See ClientPort."""
        self._check()
        at = 0
        for end, more in (*joined, (len(piece), 0)):
            found = self._reader.feed(piece[at:end])
            at = end
            for number, event in enumerate(found, 1):
                self._take(event.data, more if number == len(found) else 0)
        if last and self._last is None:
            self._end("done", self._how_it_finished())
        self._wake()
        self._check()

    async def flush(self) -> None:
        """See ClientPort. Waits also for a socket, if what was sent may have been lost with the last one."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.pending or (self.terms.kept and self._socket is None and not self._arrived_whole):
            self._check()
            await self._moved.park()
        if not self.finished:
            self._check()

    def withdraw(self) -> None:
        """See ClientPort."""
        self._log.drop_waiting()
        self._size = self._sent_size
        del self._tokens[self._log.last + 1 :]
        self._joined = [(seq, more) for seq, more in self._joined if seq <= self._log.last]
        self._skips = self._reader.half_read

    def respond(self, problem: Problem, extra: dict[str, object] | None) -> None:
        """See ClientPort."""
        self._begun = True
        self._end(*_failure(problem, extra))
        self._wake()

    def error_event(self, problem: Problem, extra: dict[str, object], sequence: int) -> bytes:
        """See ClientPort."""
        return b"data: " + _FAREWELL + msgspec.json.encode(_failure(problem, extra)) + b"\n\n"

    def cut(self) -> None:
        """See ClientPort. The socket has other streams: it stays."""
        self._cut = True
        self._log.clear()
        self._count_kept()
        self._moved.unpark_all()

    def on_leaving(self, told: Callable[[], None] | None) -> None:
        """See ClientPort. A client may have left when its socket has."""
        self._told = told
        if self._lost_at is not None:
            self._tell_of_leaving()

    def _tell_of_leaving(self) -> None:
        told, self._told = self._told, None
        if told is not None:
            told()

    async def wait_gone(self) -> None:
        """See ClientPort."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._gone:
            with trio.CancelScope() as scope:
                if self._lost_at is not None:
                    scope.deadline = self._lost_at + self.terms.window
                await self._came_or_went.park()
        self._given_up = True
        self._moved.unpark_all()  # whoever waits for a flush has to know as well

    @property
    def _gone(self) -> bool:
        if self._lost_at is None:
            return False
        return not self.terms.kept or trio.current_time() >= self._lost_at + self.terms.window

    def _check(self) -> None:
        if self._gone:
            self._given_up = True
        if self._cut or self._given_up:
            raise ClientGone

    def _take(self, data: bytes, more: int) -> None:
        """Take an event to which ``more`` were joined."""
        if data.startswith(_FAREWELL):
            kind, members = msgspec.json.decode(data[len(_FAREWELL) :])
            self._end(kind, members)
            if self.tally is not None:
                self.tally.own_events -= 1  # the last message is no delta
        elif self._skips:
            self._skips = False
        elif data.startswith(b"{"):
            chunk, before = as_text(data), self._ends.tokens
            self._ends.take(chunk, 1 + more)
            self._size += len(data)
            self._tokens.append(self._tokens[-1] + self._ends.tokens - before)
            self._log.add(chunk, self._tokens[-1], self._size)
            if more:
                self._joined.append((self._log.last, more))

    def _end(self, kind: str, members: Members) -> None:
        if self._last is None:
            self._last = kind, members
            self._log.end(_LAST)

    def _how_it_finished(self) -> Members:
        tally = self.tally
        usage = None if tally is None or tally.usage is None else tally.usage
        members: Members = {"finish_reasons": self._ends.finish_reasons, "usage": None}
        if usage is not None:
            prompt, generated = usage.prompt or 0, usage.generated or 0
            members["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": generated,
                "total_tokens": prompt + generated,
            }
            if usage.cached is not None:
                members["usage"]["prompt_tokens_details"] = {"cached_tokens": usage.cached}
        if tally is not None and tally.receipt is not None:
            members["receipt"] = tally.receipt
        return members

    # -- Sender

    def next_frame(self) -> bytes | None:
        """See Sender."""
        delta = self._log.take()
        if delta is None:
            return None
        self._arrivals.take(delta.seq, delta.size, len(delta.chunk))
        self._sent_size = delta.size or self._sent_size
        if not self._pool.left:
            self._log.shed()  # whoever loses the socket now can not come back for it
        self._count_kept()
        return text_frame(self._write(delta))

    def sent(self, end: int) -> None:
        """See Sender."""
        self._arrivals.sent(end, self._socket)
        self._figure += 1
        if not self.pending:
            if self.ended:
                self._last_end = end
            self._moved.unpark_all()
            if self._settled:
                self._leave_socket()

    def lost(self) -> None:
        """See Sender."""
        if self._socket is not None and self._last_end is not None:
            self._arrived_whole = self._last_end <= self._socket.acknowledged()
        self._arrivals.look(self._socket)
        self._socket = None
        self._lost_at = trio.current_time()
        if self.pending and not self.terms.kept:
            self.cut()
        self._arrivals.forget()
        self._tell_of_leaving()
        self._came_or_went.unpark_all()
        self._moved.unpark_all()

    def _write(self, delta: Delta) -> bytes:
        if delta.seq:
            return self._writer.write(delta.seq, delta.chunk, delta.tokens, delta.size)
        assert self._last is not None
        kind, members = self._last
        return write_token_message(
            kind, self.stream_id, request_id=self.request_id, **members, delivery=self._counts()
        )

    def _counts(self) -> Members:
        """Count tokens. Delivered are those in deltas that were sent before: whoever reads this has them."""
        sent, tally = self._tokens[self._log.sent], self.tally
        if tally is None:
            return {"generated": sent, "delivered": sent, "acknowledged": None}
        generated = max(tally.tokens_generated()[0], self._ends.tokens)
        whole = self._last is not None and self._last[0] == "done"
        delivered = generated if whole else tally.tokens_in(sent)
        acknowledged = tally.acknowledged
        return {
            "generated": generated,
            "delivered": delivered,
            "acknowledged": None if acknowledged is None else min(tally.tokens_in(acknowledged), delivered),
        }

    def _wake(self) -> None:
        self._count_kept()
        if self._socket is not None:
            self._socket.wake(self)

    def _count_kept(self) -> None:
        """Tell the pool how many bytes stay here for another socket."""
        counted = self._log.kept_bytes + self._log.waiting_bytes if self.terms.kept else 0
        if counted > self._counted:
            self._pool.take(counted - self._counted)
        elif counted < self._counted:
            self._pool.give(self._counted - counted)
        self._counted = counted

    # -- how its exchange goes, see StreamPort

    def queued(self, request: InternalRequest, position: int, eta: float | None) -> None:
        """See StreamPort."""
        eta_ms = None if eta is None else round(eta * 1000)
        self._tell("queued", request_id=self.request_id, position=position, eta_ms=eta_ms)

    def placed(self, request: InternalRequest) -> None:
        """See StreamPort."""
        self._tell("accepted", request_id=self.request_id, model=request.model)

    async def last_words(self) -> None:
        """See StreamPort. A client that acknowledges, or gave credit, may do so for the last deltas too.

        One that may come back has that time once more after it came.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if not (self._log.acked or self.terms.credit is not None or self.terms.kept):
            return
        socket, patience = self._socket, trio.current_time() + ACK_WAIT
        while self._log.acked < self._log.sent and (self._socket is not None or self.terms.kept):
            if self._socket is not socket:
                socket, patience = self._socket, trio.current_time() + ACK_WAIT
                if self._lost_at is not None:
                    patience = self._lost_at + self.terms.window
            with trio.move_on_at(patience) as scope:
                await self._moved.park()
            if scope.cancelled_caught:
                break

    def settle(self, ending: Ending) -> None:
        """See StreamPort."""
        self._settled = True
        problem = ending.problem
        if self._last is None or self._cut:
            if ending.outcome is Outcome.CLIENT_STALLED:
                problem = Problem.of("client_stalled", "the client did not take the answer in time")
            if problem is not None and self._socket is not None:
                self._last = _failure(problem, None)
                self._socket.say(self._write(_LAST_DELTA))
        if not self.pending:
            self._leave_socket()

    def _tell(self, kind: str, **members: object) -> None:
        self._stage = kind, members
        self._tell_again()

    def _tell_again(self) -> None:
        if self._socket is not None and self._stage is not None:
            kind, members = self._stage
            self._socket.say(write_token_message(kind, self.stream_id, **members))

    # -- what its client says

    @property
    def kept(self) -> int:
        """Bytes that are kept for another socket, as the pool counts them."""
        return self._counted

    @property
    def over(self) -> bool:
        """Whether its exchange has ended, and all of it was sent or can not be for now."""
        return self._settled and not (self.pending and self._socket is not None)

    @property
    def accepted(self) -> bool:
        """Whether its client was told that it waits, or has a worker."""
        return self._stage is not None

    def is_on(self, socket: WebSocket) -> bool:
        """Whether it goes over this socket, and not over another one by now."""
        return self._socket is socket

    def acknowledge(self, seq: int, credit: int | None) -> None:
        """Take an acknowledgement.

        Raises:
            NotSent: of a delta that was not sent.
        """
        self._log.acknowledge(seq, credit)
        self._note_acknowledged()
        self._moved.unpark_all()
        self._wake()

    def resume(self, stream_id: str, socket: WebSocket, after: int, credit: int | None) -> None:
        """Go on over another socket behind the delta ``after``; the one that it had forgets it.

        Raises:
            NotSent, Dropped: it can not.
        """
        if self._cut or self._given_up or self._gone:
            raise Dropped
        self._log.rewind(after, credit)
        self._leave_socket()
        self._arrivals.forget()
        self.stream_id = stream_id
        self._writer = DeltaWriter(stream_id)
        self._socket = socket
        self._lost_at = self._last_end = None
        self._arrived_whole = False
        self._seen = -1
        self._note_acknowledged()
        self._count_kept()
        self._came_or_went.unpark_all()
        self._moved.unpark_all()
        self._tell_again()
        socket.attach(self)

    def forget(self) -> None:
        """Give back what is kept: nobody resumes it any more."""
        self._log.clear()
        self._count_kept()

    def _leave_socket(self) -> None:
        if self._socket is not None:
            self._arrivals.look(self._socket)
            self._socket.detach(self)

    def _note_acknowledged(self) -> None:
        acked = self._log.acked
        if self.tally is not None:
            self.tally.acknowledged = self._tokens[acked]
        self._arrivals.look(self._socket)
        self._arrivals.acknowledge(acked)


def _failure(problem: Problem, extra: dict[str, object] | None) -> tuple[str, Members]:
    """Answer kind and members of the message that tells a failure."""
    kind = "cancelled" if problem.code == _CANCELLED else "error"
    members: Members = {} if kind == "cancelled" else {"error": error_object(problem, extra)}
    if problem.retry_after is not None:
        members["retry_after_ms"] = max(round(problem.retry_after * 1000), 1)
    return kind, members
