"""A client without a socket, for exchanges on a fake clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, final

import msgspec
import trio

from ..contract import AnswerHead
from ..errors import ClientGone, Problem
from ..wire import HEARTBEAT

ASK_EVERY: Final = 10.0  # seconds between two questions to a half-closed client


@final
class RecordingClient:
    """A client that takes what it is given and writes it down. See ClientPort.

    Its socket takes bytes while there is `room`, which `read` enlarges: infinite
    room is a client that reads at once, no room is one that never reads. Using
    the port against its rules raises AssertionError, so that every test with
    this client is a test of the rules too.

    Args:
        room: bytes its socket takes until the client reads some.

    Attributes:
        head: of the answer that was begun.
        problem: that the client was told instead of an answer, with `extra`.
        received: bytes of the body that the socket took.
        times: when it took some, Trio clock seconds, with how many.
        unacknowledged: bytes of those that its kernel does not confirm.
        fin, gone: it has half-closed, it has left.
        was_cut: the gateway closed the connection without a proper end.
    """

    def __init__(self, room: float = math.inf) -> None:
        self.head: AnswerHead | None = None
        self.problem: Problem | None = None
        self.extra: dict[str, object] | None = None
        self.received = bytearray()
        self.times: list[tuple[float, int]] = []
        self.unacknowledged = 0
        self.fin = False
        self.gone = False
        self.was_cut = False
        self._room = room
        self._pending = b""
        self._ended = False
        self._joined: list[tuple[int, int]] = []
        self._told: Callable[[], None] | None = None
        self._lot: Final = trio.lowlevel.ParkingLot()

    # -- what the client does

    def read(self, count: float) -> None:
        """Take `count` bytes out of the socket, which makes room for as many."""
        self._room += count
        self._lot.unpark_all()

    async def trickle(self, bytes_per_second: float, *, every: float = 1.0) -> None:
        """Read at this pace for ever, some bytes `every` so many seconds."""
        while True:
            await trio.sleep(every)
            self.read(bytes_per_second * every)

    def stop_reading(self) -> None:
        """Let the socket take no more bytes, as when it is full."""
        self._room = 0

    def half_close(self) -> None:
        """Send a FIN and go on reading: from now on the port asks whether somebody is there."""
        self.fin = True
        self._lot.unpark_all()
        self.on_leaving(self._told)

    def leave(self) -> None:
        """Reset the connection: nothing is taken any more. Idempotent."""
        self.gone = True
        self._lot.unpark_all()
        self.on_leaving(self._told)

    # -- what it got

    @property
    def events(self) -> list[bytes]:
        """Data of the whole events that the socket took; comments are none."""
        blocks = bytes(self.received).split(b"\n\n")[:-1]
        return [block.removeprefix(b"data: ") for block in blocks if not block.startswith(b":")]

    @property
    def comments(self) -> int:
        """How many whole comments the socket took."""
        return sum(block.startswith(b":") for block in bytes(self.received).split(b"\n\n")[:-1])

    # -- ClientPort

    @property
    def begun(self) -> bool:
        """See ClientPort."""
        return self.head is not None or self.problem is not None

    @property
    def pending(self) -> int:
        """See ClientPort."""
        return len(self._pending)

    @property
    def ended(self) -> bool:
        """See ClientPort."""
        return self._ended

    @property
    def finished(self) -> bool:
        """See ClientPort."""
        return self._ended and not self._pending and not self.was_cut

    def taken(self) -> int:
        """See ClientPort."""
        return 2 * len(self.received) - self.unacknowledged

    def delivered(self) -> tuple[int, int]:
        """See ClientPort. Events only of a streamed answer."""
        done = max(len(self.received) - self.unacknowledged, 0)
        if self.head is None or self.head.length is not None:
            return 0, done
        blocks = bytes(self.received[:done]).split(b"\n\n")[:-1]
        more = sum(more for end, more in self._joined if end <= done)
        return sum(not block.startswith(b":") for block in blocks) + more, done

    def begin(self, head: AnswerHead) -> None:
        """See ClientPort."""
        assert not self.begun, "an answer is begun once"
        self.head = head

    def push(
        self, piece: bytes, *, last: bool = False, joined: Sequence[tuple[int, int]] = (), events: int = 0
    ) -> None:
        """See ClientPort."""
        assert self.begun, "an answer begins with its head"
        assert not self._ended, "nothing follows the last piece"
        assert not self._pending, "at most one piece is pending"
        assert piece, "a piece has bytes"
        self._ended = last
        self._joined += [(len(self.received) + end, more) for end, more in joined]
        self._pending = piece
        self._write()

    async def flush(self) -> None:
        """See ClientPort."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._pending:
            self._write()
            if self._pending:
                await self._lot.park()

    def withdraw(self) -> None:
        """See ClientPort. It pushes bytes, of which none can be taken back."""

    def respond(self, problem: Problem, extra: dict[str, object] | None) -> None:
        """See ClientPort."""
        assert not self.begun, "a whole error answer stands alone"
        self.problem, self.extra = problem, extra
        self.push(_error(problem, extra), last=True)

    def error_event(self, problem: Problem, extra: dict[str, object], sequence: int) -> bytes:
        """See ClientPort."""
        return b"data: " + _error(problem, extra) + b"\n\n"

    def cut(self) -> None:
        """See ClientPort."""
        self.was_cut = True
        self._lot.unpark_all()

    def on_leaving(self, told: Callable[[], None] | None) -> None:
        """See ClientPort."""
        left = self.fin or self.gone
        self._told = None if left else told
        if left and told is not None:
            told()

    async def wait_gone(self) -> None:
        """See ClientPort."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self.gone:
            if self.fin:
                self._ask()
            with trio.move_on_after(ASK_EVERY if self.fin else math.inf):
                await self._lot.park()

    def _ask(self) -> None:
        """Write a comment between two events, as ports do to find out."""
        between = self.head is not None and self.head.length is None and self.received.endswith(b"\n\n")
        if between and not self._pending and not self._ended:
            self.push(HEARTBEAT)

    def _write(self) -> None:
        if self.gone or self.was_cut:
            raise ClientGone
        count = len(self._pending) if self._room == math.inf else min(int(self._room), len(self._pending))
        if count:
            self._room -= count
            self.received += self._pending[:count]
            self._pending = self._pending[count:]
            self.times.append((trio.current_time(), count))


def _error(problem: Problem, extra: dict[str, object] | None) -> bytes:
    error: dict[str, object] = {"message": problem.message, "type": problem.type, "code": problem.code}
    if extra is not None:
        error["gateway"] = extra
    return msgspec.json.encode({"error": error})
