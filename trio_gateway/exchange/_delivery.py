"""Delivery: from the pump to the client's socket, and the clocks of a reader that is slow or silent.

Blocks are written through while the socket takes everything. A writer task comes
to life when it does not, and takes over from the byte channel; from then on the
order of bytes is the channel's.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from ..contract import AnswerHead, ClientPort
from ..errors import ClientGone
from ..flow import ByteChannel
from ..wire import HEARTBEAT
from ._clock import AT_ONCE
from ._flight import Track

PIECE: Final = 16 * 1024  # bytes written through at once
SLOW_PIECE: Final = 8 * 1024  # bytes per write to a slow client: what it may cost beyond its buffer
HEADROOM: Final = 3 * PIECE  # for the next read, a block partly taken, and what the writer has in hand
PIECES_A_TURN: Final = 8  # then other tasks have theirs
WORTH_TELLING: Final = 1.0  # seconds for which an engine was not read
_LOOKS: Final = 4  # at a slow reader within its stall timeout
_LOOK_EVERY: Final = 0.5  # seconds at most between two of them: so much later than the rule a stall may end


@dataclass(frozen=True, slots=True)
class DeliveryLimits:
    """Bounds of one delivery.

    Attributes:
        stall_timeout: seconds without an accepted or acknowledged byte while bytes wait.
        max_lag: seconds that the oldest waiting block may wait.
        heartbeat_after: seconds of silence towards a streaming client; 0: never.
    """

    stall_timeout: float
    max_lag: float
    heartbeat_after: float


def _say_nothing(seconds: float) -> None:
    """Nobody listens."""


def _note_nothing(what: str, **detail: object) -> None:
    """Nobody keeps it."""


def _record_nothing(waiting: int) -> None:
    """Nobody keeps it."""


class Delivery:
    """The writing side of one exchange.

    Args:
        head: makes the head of a streamed answer when the first byte is due.
        poke: told from when on something may be due, if that may be earlier than the clock thinks.
        gone: told when the client's connection broke.
        stalled: told when the reader stalled by the rules.
        full_timeout: seconds that a full buffer may keep the engine from being read.
        lagged: told of each batch of bytes that had to wait, once the client took it whole: for how many
            seconds the oldest of it did.
        note: told what happens, for operators.
        record: told that the client is slow from now on, and how many bytes wait for it, but for the end of
            the message; answers what is to have a row for each piece that it takes.

    Attributes:
        slow: whether the client has not always taken everything at once.
        through: batches that the client took at once.
    """

    def __init__(
        self,
        client: ClientPort,
        channel: ByteChannel,
        limits: DeliveryLimits,
        *,
        head: Callable[[], AnswerHead] | None,
        poke: Callable[[float], None],
        gone: Callable[[], None],
        stalled: Callable[[], None],
        full_timeout: float = math.inf,
        lagged: Callable[[float], None] = _say_nothing,
        note: Callable[..., None] = _note_nothing,
        record: Callable[[int], Track | None] = _record_nothing,
    ) -> None:
        self._client = client
        self._channel = channel
        # A small buffer would else hold up the engine for whatever waits.
        self._headroom = min(HEADROOM, channel.cap // 2)
        self._limits = limits
        self._head = head
        self._poke = poke
        self._gone = gone
        self._stalled = stalled
        self._full_timeout = full_timeout
        self._lagged = lagged
        self._note = note
        self._record = record
        self._takes: Track | None = None
        self._untold = 0  # bytes in the port's hand that have no row yet
        self._end_size = 0  # of the end of the message, which is of no read
        self._nursery: trio.Nursery | None = None
        self._untaken = b""  # that could not go to the socket at once
        self.slow = False
        self._flushed: trio.Event | None = None  # of the writer task, from when it comes to life
        self._silent_since = math.inf
        self._taken = -1
        self._taken_at = 0.0
        # Of what is in the port's hand: how many bytes stand behind each block, and since when it waits.
        self._in_hand: list[tuple[int, float]] = []  # few: those of one piece
        self._batch_since: float | None = None  # of what is in its hand, the oldest
        self._blocked_since: float | None = None
        self._told_full = False
        self.through = 0

    @property
    def blocked(self) -> bool:
        """Whether the engine is not read, because what it sent has to wait for the client."""
        return self._blocked_since is not None

    def lag(self, now: float) -> float:
        """Seconds for which the oldest byte waits that the client has not taken."""
        return max(now - self._oldest_since(now), 0.0) if self._client.pending or self._channel.used else 0.0

    def stalled_for(self, now: float) -> float:
        """Seconds for which the client has taken nothing while bytes waited; within a look of the truth."""
        waits = self.slow and (self._client.pending or self._channel.used)
        return max(now - self._taken_at, 0.0) if waits else 0.0

    def stall(self) -> None:
        """Count the reader as stalled: whoever had to wait for it gave up."""
        self._stalled()

    def start(self, nursery: trio.Nursery) -> None:
        """Name the nursery in which a writer task may come to life."""
        self._nursery = nursery

    def expect_output(self, now: float) -> None:
        """From now on silence counts, and is broken by heartbeats."""
        if self._silent_since == math.inf:
            self._silent_since = now
            if self._head is not None and self._limits.heartbeat_after:
                self._poke(now + self._limits.heartbeat_after)

    def begin(self) -> None:
        """Begin a streamed answer. Idempotent."""
        if not self._client.begun:
            assert self._head is not None
            self._client.begin(self._head())

    def begin_sized(self, head: AnswerHead) -> None:
        """Begin an answer whose length is known."""
        self._client.begin(head)

    async def hand_over(self, block: bytes, now: float) -> None:
        """Hand over whole events; waits while the channel is full. Raises ClientGone."""
        if not self.pass_through(block, now):
            await self.catch_up()

    @property
    def flows(self) -> bool:
        """Whether the client has taken all that there was, so that a block may go to its socket at once."""
        if self._client.pending:
            return False
        return not self.slow or not (self._channel.used or self._batch_since is not None)

    def pass_through(self, block: bytes, now: float, events: int = 0) -> bool:
        """Hand over whole events as far as that needs no waiting. Raises ClientGone.

        False: `catch_up` has to be awaited before anything else is handed over.

        Args:
            events: how many the block is, if they are all the engine's; 0: not known.
        """
        self._silent_since = now
        waiting = self._client.pending
        if self.slow or waiting or len(block) > PIECE:
            if not self.flows or len(block) > SLOW_PIECE:
                self._untaken = block
                return False
            return self._write_through(block, now)
        self._client.push(block, events=events)
        if self._client.pending:
            return self._note_pushed(now)
        self.through += 1
        return True

    async def catch_up(self) -> None:
        """Let a writer see to what the client did not take at once; waits while the channel is full."""
        block, self._untaken = self._untaken, b""
        if block:
            self._start_writing(len(block))
            await self._wait_blocked(self._channel.put(block))
        else:
            self._see_to_pending()

    def _see_to_pending(self) -> None:
        """Let a writer flush what is pending, if anything is."""
        if self._client.pending:
            self._start_writing()
            self._channel.poke()

    async def room(self) -> None:
        """Wait until the next block will find room, so that nothing is read which nothing can hold."""
        if self.slow:
            await self._wait_blocked(self._channel.wait_room(self._headroom))

    async def _wait_blocked(self, waiting: Awaitable[None]) -> None:
        self._blocked_since = trio.current_time()
        if self._full_timeout < _LOOK_EVERY:
            self._poke(AT_ONCE)  # the clock would look too late
        try:
            await waiting
        finally:
            self._note_unblocked()

    def _note_unblocked(self) -> None:
        self._blocked_since = None
        if self._told_full:
            self._told_full = False
            self._note("room")

    def _note_blocked(self, since: float, now: float) -> None:
        """A pause that nobody could notice is not worth a step."""
        if not self._told_full and now - since >= WORTH_TELLING:
            self._told_full = True
            self._note("full", bytes=self._client.pending + self._channel.used)

    def hand_over_last(self, block: bytes) -> None:
        """Hand over the end of the message. Raises ClientGone."""
        self._end_size = len(block)
        if not self.slow and len(block) <= PIECE and not self._client.pending:
            self._client.push(block, last=True)
            self._note_pushed()
        else:
            self._channel.put_nowait(block)
        self._channel.close()

    async def finish(self) -> None:
        """Wait until the client's socket accepted all that was handed over. Raises ClientGone."""
        if self._flushed is not None:
            await self._flushed.wait()
        elif self._client.pending or self._channel.used:
            self._begin_writing()
            await self.deliver()

    async def deliver(self) -> None:
        """Write until the channel is closed and empty. Raises ClientGone."""
        turn = 0
        while True:
            await self._client.flush()
            self._in_hand.clear()
            if self._batch_since is not None:
                now = trio.current_time()
                self._lagged(now - self._batch_since)
                self._batch_since = None
                self._note_takes(now)
            piece, ends = self._channel.take_dated(SLOW_PIECE)
            if piece:
                self._batch_since = ends[0].since
                self._untold += len(piece)
                self._in_hand.extend((len(piece) - end, since) for end, since, _ in ends)
                joined = [(end, more) for end, _, more in ends if more]
                self._client.push(piece, last=self._channel.closed and not self._channel.used, joined=joined)
                turn = (turn + 1) % PIECES_A_TURN
                if not turn:
                    await trio.lowlevel.checkpoint()
            elif self._channel.closed:
                break
            else:
                await self._channel.wait()
        if self._flushed is not None:
            self._flushed.set()

    def _write_through(self, block: bytes, now: float) -> bool:
        """Write what the client takes at once; answers whether that is all."""
        self._client.push(block)
        whole = self._note_pushed(now)
        if self.slow:
            self._untold += len(block)
            self._note_takes(now)
        return whole

    def _note_pushed(self, at: float | None = None) -> bool:
        if self._client.pending:
            now = trio.current_time() if at is None else at
            self._batch_since = now
            self._hold_alone(now)
            return False
        self.through += 1
        return True

    def _start_writing(self, size: int = 0) -> None:
        """Let a writer task take over; a block of so many bytes is about to be put."""
        if not self.slow:
            assert self._nursery is not None
            self._begin_writing(size)
            self._flushed = trio.Event()
            self._nursery.start_soon(self._write)

    def _begin_writing(self, size: int = 0) -> None:
        self.slow = True
        self._watch_reader()
        self._untold = self._client.pending
        self._takes = self._record(self._untold + self._channel.used + size - self._end_size)

    def _note_takes(self, at: float) -> None:
        """Note what the client has taken since this was last noted."""
        taken = self._untold - self._client.pending
        if self._takes is not None and taken > 0:
            self._takes.add(at, taken, 0)
            self._untold -= taken

    def note_rest(self) -> None:
        """Note what the client took of a piece that it has not taken whole, as far as is known when."""
        if self.slow:
            self._note_takes(self._taken_at)

    def _watch_reader(self) -> None:
        self._taken_at = trio.current_time()
        self._poke(AT_ONCE)

    async def _write(self) -> None:
        try:
            await self.deliver()
        except ClientGone:
            self._gone()

    # -- the clock

    def look(self, now: float) -> float:
        """Do what is due, and answer when to look again."""
        self._see_to_pending()  # the port itself may have pushed something, to ask a half-closed client
        again = self._look_at_silence(now)  # first: a heartbeat may be what the reader does not take
        return min(again, self._look_at_reader(now))

    def _look_at_reader(self, now: float) -> float:
        """The stall clock: it runs only while bytes wait."""
        if not self.slow:
            return math.inf
        again = now + min(self._limits.stall_timeout / _LOOKS, _LOOK_EVERY)
        if not (self._client.pending or self._channel.used):
            self._taken_at = now
            return again
        taken = self._client.taken()
        if taken != self._taken:
            self._taken, self._taken_at = taken, now
        due = self._taken_at + self._limits.stall_timeout
        due = min(due, self._oldest_since(now) + self._limits.max_lag)
        if self._blocked_since is not None:
            self._note_blocked(self._blocked_since, now)
            due = min(due, self._blocked_since + self._full_timeout)
        if due > now:
            return min(due, again)
        self._stalled()
        return math.inf

    def _oldest_since(self, now: float) -> float:
        """When the oldest block was handed over of which some waits."""
        pending = self._client.pending
        if not pending:
            oldest = self._channel.oldest_since
            return now if oldest is None else oldest
        # Framing stands behind the last block, so one whose end just left may count for a few bytes more.
        while self._in_hand and self._in_hand[0][0] >= pending:
            del self._in_hand[0]
        if not self._in_hand:
            self._hold_alone(now)  # the port pushed something by itself, to ask a half-closed client
        return self._in_hand[0][1]

    def _hold_alone(self, since: float) -> None:
        self._in_hand.clear()
        self._in_hand.append((0, since))

    def _look_at_silence(self, now: float) -> float:
        """Heartbeats: headers and a comment after silence, in every phase."""
        after = self._limits.heartbeat_after
        if not after or self._head is None or self._silent_since == math.inf or self._channel.closed:
            return math.inf
        if self._silent_since + after > now:
            return self._silent_since + after
        self._silent_since = now
        if not (self._client.pending or self._channel.used):
            try:
                self.begin()
                self._write_through(HEARTBEAT, now)
                self._see_to_pending()
            except ClientGone:
                self._gone()
        return now + after
