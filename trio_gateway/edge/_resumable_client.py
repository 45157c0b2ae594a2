"""The client port of a stream over HTTP that survives its connection.

Its exchange runs in the gateway's nursery and adds events to a log. Whoever reads
them, the connection that asked or a later one, takes them from there. Without a
reader nothing is taken, so the exchange stops as it does for a reader that is slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import trio

from ..contract import AnswerHead, Operation
from ..errors import ClientGone, Problem, Refused
from ..flow import BufferPool, Dropped, EventLog, NotSent
from ..wire import HEARTBEAT, write_event
from ._http_client import HttpClient
from ._problems import problem_event

PIECE: Final = 16 * 1024  # bytes of events joined into one write
_NOTHING_LEFT: Final = b": end\n\n"  # for a reader who has all events, and still needs a proper end


@dataclass(frozen=True, slots=True)
class KeepTerms:
    """How much is kept, and for how long.

    Attributes:
        bytes: of events, sent ones included.
        window: seconds that the exchange goes on without a reader.
    """

    bytes: int
    window: float


@final
class ResumableClient:
    """See ClientPort.

    Args:
        pool: counts what is kept.

    Attributes:
        accepted: see KeptAnswer; known once its exchange has ended.
    """

    def __init__(self, operation: Operation, terms: KeepTerms, pool: BufferPool) -> None:
        self.operation: Final = operation
        self._terms = terms
        self._pool = pool
        self._log = EventLog(terms.bytes)
        self._counted = 0
        self._partial = b""  # an event that is not whole yet
        self._skipping = False  # and whose rest is not wanted
        self._head: AnswerHead | None = None
        self._problem: tuple[Problem, dict[str, object] | None] | None = None
        self._reader: HttpClient | None = None
        self._joined: list[tuple[int, int]] = []  # events that stand for more, and how many more
        self._started = 0  # event after which the reader began
        self._arrived = (0, 0)
        self._bytes_before = 0  # that earlier readers got
        self._ended = False
        self._done = False  # a reader has all of it
        self._cut = False
        self._over = False
        self.accepted = True
        self._figure = 0
        self._seen = -1
        self._alone_since: float | None = trio.current_time()
        self._told: Callable[[], None] | None = None
        self._moved = trio.lowlevel.ParkingLot()

    # -- ClientPort

    @property
    def begun(self) -> bool:
        """See ClientPort."""
        return self._head is not None or self._problem is not None

    @property
    def pending(self) -> int:
        """See ClientPort."""
        return self._log.waiting_bytes + (0 if self._reader is None else self._reader.pending)

    @property
    def ended(self) -> bool:
        """See ClientPort."""
        return self._ended

    @property
    def finished(self) -> bool:
        """See ClientPort."""
        return self._done and not self._cut

    def taken(self) -> int:
        """See ClientPort. Without a reader it always grows: then the window ends the exchange."""
        taken = -1 if self._reader is None else self._reader.taken()
        if taken < 0 or taken != self._seen:
            self._figure += 1
        self._seen = taken
        return self._figure

    def delivered(self) -> tuple[int, int]:
        """See ClientPort."""
        events, size = self._look_what_arrived()
        return events + sum(more for number, more in self._joined if number <= events), size

    def _look_what_arrived(self) -> tuple[int, int]:
        """Answer the number of the last event that arrived, and bytes of all readers."""
        if self._reader is not None:
            events, size = self._reader.delivered()
            self._arrived = max(self._arrived[0], self._started + events), self._bytes_before + size
        return self._arrived

    def begin(self, head: AnswerHead) -> None:
        """See ClientPort."""
        self._head = head
        self._moved.unpark_all()

    def push(
        self, piece: bytes, *, last: bool = False, joined: Sequence[tuple[int, int]] = (), events: int = 0
    ) -> None:
        """See ClientPort."""
        self._check()
        if piece == HEARTBEAT:
            self._beat()
            return
        data = self._partial + piece
        more = {data.count(b"\n\n", 0, len(self._partial) + end) - 1: more for end, more in joined}
        blocks = data.split(b"\n\n")
        self._partial = blocks.pop()
        comment = b""  # goes with the event that it stands before
        for number, block in enumerate(blocks):
            if self._skipping:
                self._skipping = False
            elif block.startswith(b":"):
                comment += block + b"\n\n"
            else:
                self._log.add(comment + block + b"\n\n")
                comment = b""
                if number in more:
                    self._joined.append((self._log.last, more[number]))
        self._ended = self._ended or last
        self._count()
        self._moved.unpark_all()

    async def flush(self) -> None:
        """See ClientPort."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.pending or (self._ended and not self._done):
            self._check()
            await self._moved.park()
        self._check()

    def withdraw(self) -> None:
        """See ClientPort."""
        self._log.drop_waiting()
        self._joined = [each for each in self._joined if each[0] <= self._log.last]
        self._skipping = bool(self._partial)
        self._count()

    def respond(self, problem: Problem, extra: dict[str, object] | None) -> None:
        """See ClientPort."""
        self._problem = problem, extra
        self._ended = True
        self._moved.unpark_all()

    def error_event(self, problem: Problem, extra: dict[str, object], sequence: int) -> bytes:
        """See ClientPort."""
        name, data = problem_event(problem, extra, self.operation, sequence)
        return write_event(data, name)

    def cut(self) -> None:
        """See ClientPort."""
        self._cut = True
        if self._reader is not None:
            self._look_what_arrived()
            self._reader.cut()
        self._log.clear()
        self._count()
        self._moved.unpark_all()

    def on_leaving(self, told: Callable[[], None] | None) -> None:
        """See ClientPort. A client may have left when no reader is there."""
        self._told = told
        if self._alone_since is not None:
            self._tell_of_leaving()

    def _tell_of_leaving(self) -> None:
        told, self._told = self._told, None
        if told is not None:
            told()

    async def wait_gone(self) -> None:
        """See ClientPort. Gone is a client that has not come back within the window."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._gone:
            with trio.CancelScope() as scope:
                if self._alone_since is not None:
                    scope.deadline = self._alone_since + self._terms.window
                await self._moved.park()
        self._moved.unpark_all()  # whoever waits for a flush has to know as well

    @property
    def _gone(self) -> bool:
        alone = self._alone_since
        return alone is not None and not self._done and trio.current_time() >= alone + self._terms.window

    def _check(self) -> None:
        if self._cut or self._gone:
            raise ClientGone

    def _beat(self) -> None:
        """Pass a heartbeat on, if there is somebody to whom nothing else is on its way."""
        reader = self._reader
        if reader is None or reader.pending or reader.ended or self._log.waiting_bytes:
            return
        with contextlib.suppress(ClientGone):
            self._begin_for(reader)
            reader.push(HEARTBEAT)

    def _count(self) -> None:
        """Tell the pool how many bytes are here."""
        counted = self._log.bytes
        if counted > self._counted:
            self._pool.take(counted - self._counted)
        elif counted < self._counted:
            self._pool.give(self._counted - counted)
        self._counted = counted

    # -- KeptAnswer

    @property
    def kept(self) -> int:
        """See KeptAnswer."""
        return self._counted

    @property
    def over(self) -> bool:
        """See KeptAnswer."""
        return self._over and self._reader is None

    def settle(self, *, accepted: bool) -> None:
        """Its exchange has ended. ``accepted``: see KeptAnswer."""
        self._over = True
        self.accepted = accepted

    def forget(self) -> None:
        """See KeptAnswer."""
        self._log.clear()
        self._count()

    # -- reading

    async def serve(self, reader: HttpClient, after: int) -> None:
        """Write to a reader until it has everything; whoever read before is cut off.

        Args:
            after: number of the last event that the reader has.

        Raises:
            Refused: what follows is not here; nothing was written. Ask `seek` first.
            ClientGone: it left, or another one came.
        """
        if self._reader is not None:
            self._leave(self._reader)
        self.seek(after)
        self._reader, self._started, self._alone_since = reader, after, None
        self._moved.unpark_all()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_end_when_gone, reader, nursery.cancel_scope)
                await self._write(reader)
                nursery.cancel_scope.cancel()
        except* ClientGone:
            pass
        finally:
            if self._reader is reader:
                self._leave(reader)
        if not reader.finished:
            raise ClientGone

    def seek(self, after: int) -> None:
        """Go on behind the event ``after`` with whoever reads.

        Raises:
            Refused: what follows is not here.
        """
        if self._problem is not None:
            return
        try:
            if self._cut:
                raise Dropped
            self._log.seek(after)
        except NotSent:
            what = "so many events were not sent yet"
            raise Refused(Problem.of("invalid_value", what, param="after")) from None
        except Dropped:
            what = "the events behind that one are not kept any more"
            raise Refused(Problem.of("request_not_found", what, param="after")) from None

    async def _write(self, reader: HttpClient) -> None:
        while self._reader is reader:
            if self._cut and self._problem is None:
                raise ClientGone
            if not self._offer(reader):
                await self._moved.park()
                continue
            await self._flush(reader)
            await trio.lowlevel.checkpoint()
            self._done = self._done or reader.finished
            self._count()
            self._moved.unpark_all()
            if reader.ended:
                break

    async def _flush(self, reader: HttpClient) -> None:
        """Wait until a reader has taken what it got; once the exchange is over, nobody else sees it stall.

        Raises:
            ClientGone: it took nothing for as long as it might have stayed away.
        """
        while reader.pending:
            before = reader.taken()
            with trio.move_on_after(self._terms.window):
                await reader.flush()
            if self._over and reader.pending and reader.taken() == before:
                raise ClientGone

    def _offer(self, reader: HttpClient) -> bool:
        """Push the next events to a reader; False: there is nothing for it."""
        if self._problem is not None:
            reader.respond(*self._problem)
            return True
        if self._head is None:
            return False
        self._begin_for(reader)
        if reader.pending:  # a heartbeat
            return True
        block = self._log.take(PIECE)
        last = self._ended and not self._log.waiting_bytes
        if block or last:
            reader.push(block or _NOTHING_LEFT, last=last)
        return bool(block or last)

    def _begin_for(self, reader: HttpClient) -> None:
        if self._head is not None and not reader.begun:
            reader.begin(self._head)

    def _leave(self, reader: HttpClient) -> None:
        """Part from a reader: what its kernel did not acknowledge waits for the next one."""
        self._arrived = self._look_what_arrived()
        self._bytes_before = self._arrived[1]
        self._reader = None
        if not reader.finished:
            reader.cut()
        if not self._done:
            self._alone_since = trio.current_time()
            with contextlib.suppress(Dropped, NotSent):
                self._log.seek(self._arrived[0])
            self._tell_of_leaving()
        self._moved.unpark_all()


async def _end_when_gone(reader: HttpClient, scope: trio.CancelScope) -> None:
    await reader.wait_gone()
    scope.cancel()
