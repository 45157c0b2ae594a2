"""One WebSocket after its handshake: who reads, who writes, and how it ends.

The connection's task reads. All sending goes through one place, which takes one
frame of each sender in turn, so that no stream keeps another from the socket;
what the socket does not take at once, one writer task sends. Nothing ever cancels
it in the middle of a frame: a socket that has to go is closed for good.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from ..errors import ClientGone, Refused
from ..wire import Close, Heard, SocketReader, close_frame, ping_frame, text_frame
from ._connection import Connection
from ._http_server import UnplacedBytes

BATCH: Final = 8 * 1024  # bytes of frames joined into one write
READ_STEP: Final = 2 * 1024  # bytes read between two turns of others: as frames of nothing they take 3 ms
SAID_AT_MOST: Final = 64 * 1024  # bytes of our own messages that may wait; then nothing more is read
CLOSE_WAIT: Final = 2.0  # seconds for the other side to confirm a close
LINGER: Final = 1.0  # seconds that an oversized message is read on, so that its sender can read why
LINGER_BYTES: Final = 16 * 1024 * 1024
_LOOK_EVERY: Final = 1.0  # seconds at most between two looks at a socket that takes nothing, or owes a pong
_LOOKS: Final = 4  # within the time that a pong may take
UNCOUNTED: Final = 64 * 1024  # bytes of a message that is not whole, which every socket may hold
OVERLOADED: Final = 1013
TOO_SLOW: Final = 1008
STALL_MARGIN: Final = 1.25  # seconds: the clocks of its streams, which look once a second, come first


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds of one socket; bytes and seconds.

    Attributes:
        max_message: bytes of one message of the client.
        ping_interval, ping_timeout: seconds between two pings, and until one counts as unanswered.
        stall_timeout: seconds without an accepted or acknowledged byte while some wait; then its streams
            end, and a little later the socket.
        message_timeout: from when a message counts as large until all of it has come.
    """

    max_message: int
    ping_interval: float
    ping_timeout: float
    stall_timeout: float
    message_timeout: float = 30.0


class Sender(Protocol):
    """Who has messages for a socket."""

    def next_frame(self) -> bytes | None:
        """Answer the next frame that may be sent now; None: there is none."""

    def sent(self, end: int) -> None:
        """The oldest frame that was answered is in the socket, and ends there at ``end``."""

    def lost(self) -> None:
        """The socket is gone."""


class WebSocket:
    """See the module's docstring.

    Args:
        hear: takes each message of the client, and must not wait.
        room: counts what has come of large messages that are not whole yet.

    Attributes:
        over: set once nothing can be sent any more.
        heard: the message or control frame that came last, Trio clock seconds.
    """

    def __init__(
        self,
        connection: Connection,
        limits: SocketLimits,
        hear: Callable[[str], None],
        room: UnplacedBytes,
    ) -> None:
        self._connection = connection
        self._limits = limits
        self._hear = hear
        self._room = room
        self._held = 0
        self._whole_by = math.inf  # all of the message that is counted
        self._reader = SocketReader(limits.max_message)
        # Lists, because they are short, and an empty deque takes 600 bytes.
        self._said: list[bytes] = []
        self._said_bytes = 0
        self._ready: list[Sender] = []
        self._senders: set[Sender] = set()
        self._batch: list[tuple[Sender, int]] = []  # frames that were taken, and where they end
        self._rest = b""
        self._nursery: trio.Nursery | None = None
        self._writing = False  # a task is at what the socket did not take
        self._emptied = trio.lowlevel.ParkingLot()
        self._hurry = trio.lowlevel.ParkingLot()
        self._closing: Close | None = None
        self._close_by = math.inf
        self._last_acknowledged = 0
        self._full = False  # the socket took no more when it was lost
        self._pulse = Pulse(limits, trio.current_time())
        self._taken = -1
        self._taken_at = math.inf  # while bytes wait: when some were taken last
        self.heard = trio.current_time()
        self.over = trio.Event()

    # -- reading

    def hear_at_most(self, size: int | None) -> None:
        """Take no message of more bytes from now on; None: as the limits say."""
        most = self._limits.max_message
        self._reader.max_message = most if size is None else min(size, most)

    # -- sending

    @property
    def open(self) -> bool:
        """Whether messages can still be sent."""
        return self._closing is None and not self.over.is_set()

    def attach(self, sender: Sender) -> None:
        """Let a sender take part; one that comes too late is told so at once."""
        if not self.open:
            sender.lost()
            return
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
        if self.open and sender in self._senders and sender not in self._ready:
            self._ready.append(sender)
            self._pump()

    def say(self, message: bytes) -> None:
        """Send a message of no stream, in front of all that wait; dropped once the socket is closing."""
        if self.open:
            self._put(text_frame(message))

    def close(self, code: int, reason: str = "") -> None:
        """End the socket: only this is sent any more, and its senders are told. Idempotent, never waits."""
        if self._closing is None:
            self._closing = Close(code, reason, fault=False)
            self._close_by = trio.current_time() + CLOSE_WAIT
            self._let_go()
            self._put(close_frame(code, reason))
            self._hurry.unpark_all()

    def progress(self) -> int:
        """A figure that changes whenever the socket accepts bytes or the peer's kernel acknowledges some."""
        return self._connection.progress()

    def acknowledged(self) -> int:
        """How many of the bytes that were sent the peer's kernel surely has; of a closed one: had."""
        if not self._connection.closed:
            self._last_acknowledged = self._connection.acknowledged()
        return self._last_acknowledged

    @property
    def _blocked(self) -> bool:
        """Whether bytes wait that the socket did not take."""
        return bool(self._rest or self._connection.waiting)

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
        frames, self._said = self._said, []
        size = self._said_bytes
        self._said_bytes = 0
        self._emptied.unpark_all()
        start = self._connection.written
        while self._ready and size < BATCH:
            sender = self._ready.pop(0)
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
        if not self._connection.waiting:
            self._tell_sent()
        if self._blocked:
            self._see_to_rest()
            if self._taken_at == math.inf:
                self._hurry.unpark_all()
        else:
            self._emptied.unpark_all()

    def _see_to_rest(self) -> None:
        """Let a task write what the socket does not take now; most sockets never need one."""
        if self._nursery is not None and not self._writing:
            self._writing = True
            self._nursery.start_soon(self._write_rest)

    def _tell_sent(self) -> None:
        there = self._connection.written
        while self._batch and self._batch[0][1] <= there:
            sender, end = self._batch.pop(0)
            sender.sent(end)

    def _lose(self) -> None:
        """Nothing can be sent any more: tell everybody."""
        if self.over.is_set():
            return
        self.acknowledged()
        self._full = self._blocked
        self.over.set()
        self._rest = b""
        self._let_go()
        self._emptied.unpark_all()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def _let_go(self) -> None:
        """Tell all senders that nothing of theirs is sent any more."""
        self._batch.clear()
        self._ready.clear()
        senders, self._senders = self._senders, set()
        for sender in senders:
            sender.lost()

    # -- running

    async def run(self) -> Close | None:
        """Serve until it is closed or lost; the connection is closed afterwards. Answers the client's close.

        Senders were told that it is lost before this returns.
        """
        closed: Close | None = None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if self._blocked:
                    self._see_to_rest()
                nursery.start_soon(self._look_after)
                try:
                    closed = await self._read()
                finally:
                    self._nursery = None  # it takes no more tasks
                nursery.cancel_scope.cancel()
        finally:
            self._room.give(self._held)
            self._held = 0
            self._lose()
            self._connection.close(reset=self._full)
        return closed

    async def _write_rest(self) -> None:
        while self._blocked and not self.over.is_set():
            try:
                await self._connection.wait_writable()
            except ClientGone:
                self._lose()
                return
            self._write()
            self._pump()
        self._writing = False

    async def _read(self) -> Close | None:
        with contextlib.suppress(ClientGone):
            close = await self._take_in(self._connection.heads.take_rest())
            while close is None and not self.over.is_set():
                close = await self._read_some()
            if close is not None:
                return await self._end(close)
        return None

    async def _read_some(self) -> Close | None:
        """Read and take in what comes next; a step of its own, so that nothing of it stays meanwhile.

        Raises:
            ClientGone: nothing more will come.
        """
        data = await self._connection.receive()
        if not data:
            raise ClientGone
        return await self._take_in(data)

    async def _take_in(self, data: bytes) -> Close | None:
        for at in range(0, len(data), READ_STEP):
            if at:
                await trio.lowlevel.checkpoint()
            events = self._reader.feed(data[at : at + READ_STEP])
            full = self._count_held()
            for event in events:
                if isinstance(event, Close):
                    return event
                self._take(event)
            if full is not None:
                return full
            while self._said_bytes > SAID_AT_MOST:
                await self._emptied.park()
        return None

    def _count_held(self) -> Close | None:
        """Count what has come of a message that is not whole; answers why the socket must end, if so."""
        held = max(self._reader.held - UNCOUNTED, 0)
        if held > self._held:
            try:
                self._room.take(held - self._held)
            except Refused as refused:
                return Close(OVERLOADED, refused.problem.message, fault=True)
            if not self._held:
                self._whole_by = trio.current_time() + self._limits.message_timeout
                self._hurry.unpark_all()
        elif held < self._held:
            self._room.give(self._held - held)
            if not held:
                self._whole_by = math.inf
        self._held = held
        return None

    def _take(self, event: str | Heard) -> None:
        self.heard = trio.current_time()
        if isinstance(event, str):
            if self.open:
                self._hear(event)
        elif event.reply:
            self._answer_ping(event.reply)
        else:
            self._pulse.take_pong(event.payload)

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
            while (self._blocked or self._said) and not self.over.is_set():
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
        """Ping, and end a socket that does not answer, that takes nothing, or that does not close.

        Sleeps until something may be due: whoever makes it due earlier has it hurry.
        """
        while (due := self._look(trio.current_time())) is not None:
            with trio.move_on_at(due):
                await self._hurry.park()
        self._lose()

    def _look(self, now: float) -> float | None:
        """Do what is due, and answer when to look again; None: it is time to end."""
        if now >= self._whole_by:
            self._whole_by = math.inf
            self.close(TOO_SLOW, "a message did not come to its end in time")
        due = min(self._close_by, self._stall_due(now), self._whole_by)
        if now >= due:
            return None
        if self._blocked:
            due = min(due, now + _LOOK_EVERY)
        if not self.open:
            return due
        pulse = self._pulse
        if pulse.is_due(now):
            frame = pulse.ping(now)
            ahead = self._connection.written + len(self._rest) + self._said_bytes
            pulse.end = ahead + len(frame)
            self._put(frame)
        pulse.look(now, self.acknowledged(), blocked=self._blocked, heard=self.heard)
        return None if now >= pulse.give_up else min(due, pulse.next_look(now))

    def _stall_due(self, now: float) -> float:
        """When the socket will have taken nothing for too long; infinite while nothing waits."""
        if not self._blocked:
            self._taken_at = math.inf
            return math.inf
        taken = self.progress()
        if taken != self._taken or self._taken_at == math.inf:
            self._taken, self._taken_at = taken, now
        return self._taken_at + self._limits.stall_timeout + STALL_MARGIN


class Pulse:
    """When a socket is pinged, and whether its silence still fits a client that is there.

    A client that reads slowly finds a ping behind all that it has not read yet. So its time begins when its
    kernel has the ping; and it begins anew when anything is heard, and while the kernel makes room in a
    full buffer: only a client that reads does that.

    Attributes:
        end: offset behind the ping in the bytes of the socket.
    """

    def __init__(self, limits: SocketLimits, now: float) -> None:
        self._limits = limits
        self._number = 0
        self._awaited: bytes | None = None
        self._next = now + limits.ping_interval
        self._since = now
        self._acknowledged = 0
        self._was_blocked = False
        self.end = 0

    def is_due(self, now: float) -> bool:
        """Whether a ping has to be sent now."""
        return self._awaited is None and now >= self._next

    def ping(self, now: float) -> bytes:
        """Answer the next ping's frame."""
        self._number += 1
        self._awaited = b"%d" % self._number
        self._since = now
        self._next = now + self._limits.ping_interval
        return ping_frame(self._awaited)

    def take_pong(self, payload: bytes) -> None:
        """Take a pong; one that nobody asked for is a sign of life only."""
        if payload == self._awaited:
            self._awaited = None

    def look(self, now: float, acknowledged: int, *, blocked: bool, heard: float) -> None:
        """Look for signs of life.

        Args:
            acknowledged: bytes that the client's kernel has.
            blocked: more wait than it takes.
            heard: when something came last.
        """
        reads = blocked and self._was_blocked and acknowledged > self._acknowledged
        if acknowledged < self.end or heard > self._since or reads:
            self._since = now
        self._acknowledged, self._was_blocked = acknowledged, blocked

    @property
    def give_up(self) -> float:
        """When the client counts as gone, if nothing is seen of it until then."""
        return math.inf if self._awaited is None else self._since + self._limits.ping_timeout

    def next_look(self, now: float) -> float:
        """When to look again."""
        if self._awaited is None:
            return self._next
        return min(self.give_up, now + min(_LOOK_EVERY, self._limits.ping_timeout / _LOOKS))
