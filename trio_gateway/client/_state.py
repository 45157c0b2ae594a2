"""What is known of one stream on the client's side: numbers, acknowledgements, and how it survives a socket.

Pure: what comes in from the gateway, the consumer and the socket is told; what has to be sent is asked for. A
delta counts as consumed once its consumer comes for the next one. Only that is acknowledged, and behind it a
stream is resumed; what arrives a second time is known by its number.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec

from ..wire import Ack, CancelStream, GenerateStream, Resume
from ._errors import StreamCancelled, StreamFailed, TokensError
from ._messages import Accepted, Cancelled, Delta, Done, Failed, Queued, StreamMessage

ACK_DELAY: Final = 0.2  # seconds that a consumed delta may go unacknowledged while its consumer waits
ACK_BYTES: Final = 32 * 1024  # of consumed chunks: a gateway that keeps them must not have to stop for it
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for, as ``generate`` has it.

    Attributes:
        body: JSON of the operation's HTTP request.
        credit: deltas that may be under way or wait here, not consumed; at least 1.
        timeout_ms: milliseconds that the gateway may spend; None: its default.
    """

    body: bytes
    operation: str = "chat.completions"
    credit: int = 64
    resumable: bool = False
    timeout_ms: int | None = None
    priority: str | None = None
    session: str | None = None


class OutOfOrder(Exception):
    """A delta that does not follow the last one, or for which there was no credit."""


class _Phase(enum.Enum):
    NEW = "nothing was sent"
    ASKED = "sent, and the gateway has not named it yet"
    KNOWN = "the gateway has named it"
    OVER = "it ended, one way or the other"


class StreamState:
    """See the module's docstring.

    Attributes:
        request_id: the gateway's name for it; empty until it is known.
        model: that answers; empty until a worker was found.
        queued: the newest word about its place in the queue.
        received: number of the last delta that arrived; ``consumed``: that its consumer is done with;
            ``acked``: that an acknowledgement was made for.
        done: how it ended, if it was finished.
        error: how it ended, if not.
        left: whether its consumer has gone.
    """

    def __init__(self, stream_id: str, question: Question) -> None:
        self.stream_id: Final = stream_id
        self.question: Final = question
        self.request_id = ""
        self.model = ""
        self.queued: Queued | None = None
        self.received = 0
        self.consumed = 0
        self.acked = 0
        self.done: Done | None = None
        self.error: TokensError | None = None
        self.left = False
        self._phase = _Phase.NEW
        self._waiting: deque[Delta] = deque()
        self._in_hand: Delta | None = None
        self._consumed_bytes = 0
        self._acked_bytes = 0
        self._unacked_since = math.inf
        self._must_resume = False
        self._cancel_sent = False

    # -- what is known

    @property
    def named(self) -> bool:
        """Whether the gateway has said anything of it, or will not any more."""
        return self._phase in (_Phase.KNOWN, _Phase.OVER)

    @property
    def over(self) -> bool:
        """Whether nothing more comes from the gateway."""
        return self._phase is _Phase.OVER

    @property
    def waiting(self) -> int:
        """Deltas that arrived and that nobody took."""
        return len(self._waiting)

    @property
    def wants_socket(self) -> bool:
        """Whether it can not go on without a socket that it has not got yet."""
        return self._phase is _Phase.NEW or self._must_resume

    @property
    def ack_by(self) -> float:
        """When an acknowledgement is due at the latest; infinite: nothing is to be acknowledged."""
        return self._unacked_since + ACK_DELAY

    # -- the consumer

    def take(self, now: float) -> Delta | None:
        """Be done with the last delta, and answer the next; None: none has arrived."""
        self._finish_last(now)
        if not self._waiting:
            return None
        self._in_hand = self._waiting.popleft()
        return self._in_hand

    def leave(self) -> None:
        """The consumer goes: what it has not taken is nobody's any more."""
        self.left = True
        self._waiting.clear()
        if self._phase is _Phase.NEW:
            self._phase = _Phase.OVER

    def _finish_last(self, now: float) -> None:
        delta, self._in_hand = self._in_hand, None
        if delta is None:
            return
        if self.consumed == self.acked:
            self._unacked_since = now
        self.consumed = delta.seq
        self._consumed_bytes = delta.bytes

    # -- the gateway

    def hear(self, message: StreamMessage) -> None:
        """Take one message of this stream.

        Raises:
            OutOfOrder: the socket can not go on.
        """
        if self.over:
            return
        if isinstance(message, Delta):
            self._hear_delta(message)
            return
        self.request_id = message.request_id or self.request_id
        if isinstance(message, Queued | Accepted):
            self._phase = _Phase.KNOWN
            if isinstance(message, Queued):
                self.queued = message
            else:
                self.model = message.model
                self.queued = None
        elif isinstance(message, Done):
            self.done = message
            self._end()
        else:
            self._end(self._error_in(message))

    def _hear_delta(self, delta: Delta) -> None:
        if delta.seq <= self.received:
            return  # sent again after a resume
        if delta.seq != self.received + 1:
            raise OutOfOrder(f"delta {delta.seq} came after {self.received}")
        if delta.seq > self.acked + self.question.credit:
            raise OutOfOrder(f"delta {delta.seq} came without credit")
        self.received = delta.seq
        if not self.left:
            self._waiting.append(delta)

    def _error_in(self, message: Failed | Cancelled) -> TokensError:
        delivery = None if message.delivery is None else msgspec.structs.asdict(message.delivery)
        request_id = self.request_id or None
        if isinstance(message, Cancelled):
            error = {"code": "request_cancelled", "message": "the stream was cancelled"}
            return StreamCancelled(error, delivery=delivery, request_id=request_id)
        after = message.retry_after_ms
        return StreamFailed(
            message.error,
            delivery=delivery,
            retry_after=None if after is None else after / 1000,
            request_id=request_id,
        )

    def _end(self, error: TokensError | None = None) -> None:
        self.error = error
        self._phase = _Phase.OVER
        self._must_resume = False

    # -- the socket

    def lose(self, error: TokensError) -> None:
        """The socket is gone, with everything that was on its way."""
        self._cancel_sent = False
        if self.over:
            self.acked = self.consumed  # there is nobody any more to be told
            self._unacked_since = math.inf
        elif self._phase is _Phase.KNOWN and self.question.resumable:
            self._must_resume = True
        elif self._phase is not _Phase.NEW:
            self.give_up(error)

    def give_up(self, error: TokensError) -> None:
        """There will be no other socket."""
        if not self.over:
            self._end(error.of_stream(self.request_id))

    def has_to_say(self, now: float) -> bool:
        """Whether `next_message` would answer one."""
        return self.wants_socket or self._ack_is_due(now) or self._cancel_is_due

    def next_message(self, now: float) -> bytes | None:
        """Answer what has to be sent now, and count it as sent; None: nothing."""
        if self._phase is _Phase.NEW:
            self._phase = _Phase.ASKED
            return self._question()
        if self._must_resume:
            return self._resume()
        if self._ack_is_due(now):
            self._note_acked()
            return _encode(Ack(self.stream_id, self.acked))
        if self._cancel_is_due:
            self._cancel_sent = True
            return _encode(CancelStream(self.stream_id))
        return None

    def _question(self) -> bytes:
        question = self.question
        return _encode(
            GenerateStream(
                self.stream_id,
                msgspec.Raw(question.body),
                operation=question.operation,
                timeout_ms=question.timeout_ms,
                priority=question.priority,
                credit=question.credit,
                resumable=question.resumable,
                session=question.session,
            )
        )

    def _resume(self) -> bytes:
        """Go on behind what was consumed: the gateway takes that for an acknowledgement."""
        self._must_resume = False
        self._note_acked()
        return _encode(Resume(self.stream_id, self.request_id, self.acked, self.question.credit))

    def _note_acked(self) -> None:
        self.acked = self.consumed
        self._acked_bytes = self._consumed_bytes
        self._unacked_since = math.inf

    @property
    def _cancel_is_due(self) -> bool:
        return self.left and not (self.over or self._cancel_sent)

    def _ack_is_due(self, now: float) -> bool:
        count = self.consumed - self.acked
        if not count:
            return False
        return (
            2 * count >= self.question.credit
            or self._consumed_bytes - self._acked_bytes >= ACK_BYTES
            or now >= self.ack_by
            or self.left
            or (self.over and self.consumed == self.received)
        )
