"""One WebSocket after its handshake: who reads, who writes, and how it ends.

The connection's task reads. All sending goes through one place, which takes one
frame of each sender in turn, so that no stream keeps another from the socket;
what the socket does not take at once, one writer task sends. Nothing ever cancels
it in the middle of a frame: a socket that has to go is closed for good.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from ..errors import ClientGone
from ..wire import Close, SocketReader, close_frame, ping_frame, text_frame
from ._connection import Connection

BATCH: Final = 16 * 1024  # bytes of frames joined into one write
SAID_AT_MOST: Final = 64 * 1024  # bytes of our own messages that may wait; then nothing more is read
CLOSE_WAIT: Final = 2.0  # seconds for the other side to confirm a close
LINGER: Final = 1.0  # seconds that an oversized message is read on, so that its sender can read why
LINGER_BYTES: Final = 16 * 1024 * 1024
_LOOK_EVERY: Final = 1.0  # seconds between two looks at a socket that takes nothing
_LOOK_AT_LEAST: Final = 0.01


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds of one socket; bytes and seconds.

    Attributes:
        max_message: bytes of one message of the client.
        ping_interval, ping_timeout: seconds between two pings, and until one counts as unanswered.
        stall_timeout: seconds without an accepted or acknowledged byte while some wait.
    """

    max_message: int
    ping_interval: float
    ping_timeout: float
    stall_timeout: float


class Sender(Protocol):
    """Who has messages for a socket."""

    def next_frame(self) -> bytes | None:
        """Answer the next frame that may be sent now; None: there is none."""

    def sent(self, end: int) -> None:
        """All frames that were answered are in the socket; the last of them ends at ``end``."""

    def lost(self) -> None:
        """The socket is gone."""


class WebSocket:
    """See the module's docstring.

    Args:
        hear: takes each message of the client, and must not wait.

    Attributes:
        over: set once nothing can be sent any more.
        heard: the message or control frame that came last, Trio clock seconds.
    """

    def __init__(self, connection: Connection, limits: SocketLimits, hear: Callable[[str], None]) -> None:
        self._connection = connection
        self._limits = limits
        self._hear = hear
        self._reader = SocketReader(limits.max_message)
        self._said: deque[bytes] = deque()
        self._said_bytes = 0
        self._ready: deque[Sender] = deque()
        self._senders: set[Sender] = set()
        self._batch: list[tuple[Sender, int]] = []
        self._rest = b""
        self._work = trio.lowlevel.ParkingLot()
        self._emptied = trio.lowlevel.ParkingLot()
        self._hurry = trio.lowlevel.ParkingLot()
        self._closing: Close | None = None
        self._close_sent = False
        self._last_acknowledged = 0
        self._pong: bytes | None = None  # that is waited for
        self._taken = -1
        self._taken_at = 0.0
        self.heard = trio.current_time()
        self.over = trio.Event()

    # -- sending

    @property
    def open(self) -> bool:
        """Whether messages can still be sent."""
        return self._closing is None and not self.over.is_set()

    def attach(self, sender: Sender) -> None:
        """Let a sender take part."""
        self._senders.add(sender)
        self.wake(sender)

    def detach(self, sender: Sender) -> None:
        """Forget a sender; what was begun of its frames still leaves. Idempotent."""
        self._senders.discard(sender)
        self._batch = [(other, end) for other, end in self._batch if other is not sender]
        if sender in self._ready:
            self._ready.remove(sender)

    def wake(self, sender: Sender) -> None:
        """Send what ``sender`` has, when its turn comes: now, if the socket takes it."""
        if sender in self._senders and sender not in self._ready:
            self._ready.append(sender)
            self._pump()

    def say(self, message: bytes) -> None:
        """Send a message of no stream, in front of all that wait; dropped once the socket is closing."""
        if self.open:
            self._put(text_frame(message))

    def close(self, code: int, reason: str = "") -> None:
        """End the socket: nothing but this is sent any more. Idempotent, never waits."""
        if self._closing is None:
            self._closing = Close(code, reason, fault=False)
            self._ready.clear()
            self._put(close_frame(code, reason))
            self._close_sent = True
            self._work.unpark_all()
            self._hurry.unpark_all()

    def progress(self) -> int:
        """A figure that changes whenever the socket accepts bytes or the peer's kernel acknowledges some."""
        return self._connection.progress()

    def acknowledged(self) -> int:
        """How many of the bytes that were sent the peer's kernel surely has; of a closed one: had."""
        if not self._connection.closed:
            self._last_acknowledged = self._connection.acknowledged()
        return self._last_acknowledged

    def _put(self, frame: bytes) -> None:
        self._said.append(frame)
        self._said_bytes += len(frame)
        self._pump()

    def _pump(self) -> None:
        """Write until nothing is left or the socket takes no more; the writer goes on from there."""
        while not (self._rest or self._batch or self.over.is_set()):
            data = self._gather()
            if not data:
                return
            self._rest = data
            self._write()

    def _gather(self) -> bytes:
        frames: list[bytes] = list(self._said)
        size = self._said_bytes
        self._said.clear()
        self._said_bytes = 0
        self._emptied.unpark_all()
        start = self._connection.written
        while self._ready and size < BATCH:
            sender = self._ready.popleft()
            frame = sender.next_frame()
            if frame is not None:
                size += len(frame)
                frames.append(frame)
                self._batch.append((sender, start + size))
                self._ready.append(sender)
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _write(self) -> None:
        """Give the socket what it takes now."""
        try:
            self._rest = self._rest[self._connection.write(self._rest) :]
        except ClientGone:
            self._lose()
            return
        if self._rest or self._connection.waiting:
            self._work.unpark_all()
            return
        batch, self._batch = self._batch, []
        for sender, end in batch:
            sender.sent(end)
        self._emptied.unpark_all()

    def _lose(self) -> None:
        """Nothing can be sent any more: tell everybody."""
        if self.over.is_set():
            return
        self.acknowledged()
        self.over.set()
        self._rest = b""
        self._batch.clear()
        self._ready.clear()
        senders, self._senders = self._senders, set()
        for sender in senders:
            sender.lost()
        self._work.unpark_all()
        self._emptied.unpark_all()

    # -- running

    async def run(self) -> Close | None:
        """Serve until it is closed or lost; the connection is closed afterwards. Answers the client's close.

        Senders were told that it is lost before this returns.
        """
        closed: Close | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_rest)
                nursery.start_soon(self._look_after)
                nursery.start_soon(self._wait_over, nursery.cancel_scope)
                closed = await self._read()
                nursery.cancel_scope.cancel()
        finally:
            self._lose()
            self._connection.close(reset=bool(self._rest or self._connection.waiting))
        return closed

    async def _wait_over(self, scope: trio.CancelScope) -> None:
        await self.over.wait()
        scope.cancel()

    async def _write_rest(self) -> None:
        while not self.over.is_set():
            if not (self._rest or self._connection.waiting):
                if self._close_sent and not self._said:
                    break
                await self._work.park()
                continue
            try:
                await self._connection.wait_writable()
            except ClientGone:
                self._lose()
                return
            self._write()
            self._pump()

    async def _read(self) -> Close | None:
        data = self._connection.heads.take_rest()
        while not self.over.is_set():
            for event in self._reader.feed(data):
                self.heard = trio.current_time()
                if isinstance(event, Close):
                    return await self._end(event)
                if isinstance(event, str):
                    if self._closing is None:
                        self._hear(event)
                elif event.reply:
                    self._answer_ping(event.reply)
                elif event.payload == self._pong:
                    self._pong = None
            while self._said_bytes > SAID_AT_MOST:
                await self._emptied.park()
            try:
                data = await self._connection.receive()
            except ClientGone:
                break
            if not data:
                break
        return None

    def _answer_ping(self, reply: bytes) -> None:
        """Answer a ping; of several that wait, the newest is enough (RFC 6455 5.5.3)."""
        if self._closing is not None:
            return
        if self._said and self._said[-1][0] == reply[0]:
            self._said_bytes -= len(self._said.pop())
        self._put(reply)

    async def _end(self, close: Close) -> Close | None:
        """Say goodbye after the client's close frame, or after a fault of it."""
        ours = self._closing is not None
        self.close(close.code, close.reason if close.fault else "")
        with trio.move_on_after(CLOSE_WAIT):
            while (self._rest or self._connection.waiting or self._said) and not self.over.is_set():
                await self._emptied.park()  # the writer is at it
            if close.fault:
                await self._linger()
        return None if ours or close.fault else close

    async def _linger(self) -> None:
        """Read on for a moment: closing with unread bytes would be a reset, and take our reason with it."""
        left = LINGER_BYTES
        with contextlib.suppress(ClientGone), trio.move_on_after(LINGER):
            await self._connection.finish_sending()
            while left > 0 and (count := await self._connection.discard()):
                left -= count

    # -- the clock

    async def _look_after(self) -> None:
        """Ping, and end a socket that does not answer, that takes nothing, or that does not close."""
        number = 0
        next_ping = trio.current_time() + self._limits.ping_interval
        unanswered_since = next_ping
        ping_end = 0
        close_by: float | None = None
        while True:
            now = trio.current_time()
            if self._closing is not None:
                close_by = close_by or now + CLOSE_WAIT
                if now >= close_by:
                    break
            if self._is_stalled(now):
                break
            if self._pong is not None:
                # What was said since counts, and on a slow line the ping itself takes its time.
                if self.acknowledged() < ping_end or self.heard > unanswered_since:
                    unanswered_since = now
                if now - unanswered_since >= self._limits.ping_timeout:
                    break
            elif now >= next_ping and self.open:
                number += 1
                self._pong = b"%d" % number
                self._put(ping_frame(self._pong))
                ping_end = self._connection.written + len(self._rest)
                unanswered_since = now
                next_ping = now + self._limits.ping_interval
            wake = min(next_ping, now + _LOOK_EVERY) if self._pong is None else now + _LOOK_EVERY / 4
            with trio.move_on_at(max(wake, now + _LOOK_AT_LEAST)):
                await self._hurry.park()
        self._lose()

    def _is_stalled(self, now: float) -> bool:
        if not (self._rest or self._connection.waiting):
            self._taken_at = now
            return False
        taken = self.progress()
        if taken != self._taken:
            self._taken, self._taken_at = taken, now
        return now - self._taken_at >= self._limits.stall_timeout
