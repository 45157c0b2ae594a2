"""The lender: has the book, and one socket to each borrower, with whose end its loans end."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from typing import Any, Final

import trio

from ..contract import Want
from ._book import LendingBook, Loan, Recall
from ._messages import Lines, Told, encode, read_said
from ._speaker import Speaker

PIECE: Final = 64 * 1024  # bytes that are read at a time

Tell = Callable[[dict[str, Any]], None]


_NOTHING: Final = Told()


class _Borrower:
    """One borrower, and what it is told next.

    Attributes:
        speaks: it could serve, so its loop runs and hears.
        calls, answered: numbers of the last call to it, and of the last that it has answered.
        asked: it is to say something, before it gets more.
        question: number of its last question that has no answer yet; 0: none.
    """

    def __init__(self, number: int, speaker: Speaker) -> None:
        self.number: Final = number
        self.speaker: Final = speaker
        self.next = Told()
        self.calm: dict[str, None] = {}
        self.speaks = False
        self.calls = self.answered = 0
        self.asked = False
        self.question = 0

    def speak(self) -> None:
        """Send what there is to say. That it may keep things can wait until there is something else."""
        if self.next != _NOTHING:
            self.next.calm = list(self.calm)
            self.calm.clear()
            self.speaker.send(encode(self.next))
            self.next = Told()


class Broker:
    """Lends to the processes of one machine. `run` is one task.

    Args:
        now: the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = trio.current_time) -> None:
        self.book: Final = LendingBook()
        self._now = now
        self._borrowers: dict[int, _Borrower] = {}
        self._nap: trio.CancelScope | None = None

    async def serve(
        self, number: int, sock: socket.socket, ready: Tell, last: Tell = lambda counted: None
    ) -> None:
        """Lend to one borrower until it is gone; then what it had is mourned, and comes free.

        Args:
            number: never used before.
            sock: of a pair, not blocking; closed at the end.
            ready: told what a borrower says of itself once it serves.
            last: told what one has counted that is about to end.

        Raises:
            ValueError: it says what can not be.
        """
        borrower = self._borrowers[number] = _Borrower(number, Speaker(sock))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(borrower.speaker.run)
                lines = Lines()
                while data := await _read(sock):
                    for line in lines.feed(data):
                        self._hear(borrower, line, ready, last)
                    self._act()
                nursery.cancel_scope.cancel()
        finally:
            sock.close()
            del self._borrowers[number]
            self.book.leave(number, self._now())
            self._act()

    def let_go(self, number: int) -> None:
        """Let a borrower begin to serve."""
        if (borrower := self._borrowers.get(number)) is not None:
            borrower.next.go = True
            borrower.speak()

    def retire(self, number: int) -> None:
        """Have a borrower accept nothing more, and end once all that it accepted is served."""
        if (borrower := self._borrowers.get(number)) is not None:
            borrower.next.retire = True
            borrower.speak()

    def call(self, number: int) -> int:
        """Call a borrower, whose loop answers at once; answers how many calls before have no answer yet.

        One that is still starting hears nothing yet, and is not called. While one has not answered, nothing
        is lent to it: it would get all that comes free, and use nothing of it.
        """
        borrower = self._borrowers.get(number)
        if borrower is None or not borrower.speaks:
            return 0
        silent = borrower.calls - borrower.answered
        self.book.hears(number, not silent)
        borrower.calls += 1
        borrower.next.call = borrower.calls
        borrower.speak()
        return silent

    async def run(self) -> None:
        """Lend what comes free because a grace is over, for ever."""
        while True:
            due = self.book.next_due()
            with trio.CancelScope(deadline=math.inf if due is None else due) as self._nap:
                await trio.sleep_forever()
            self._nap = None
            self._act()

    def _hear(self, borrower: _Borrower, line: bytes, ready: Tell, last: Tell) -> None:
        said, number, book = read_said(line), borrower.number, self.book
        borrower.asked = False
        book.says(number)
        if said.alive:
            borrower.answered = max(borrower.answered, said.alive)
            book.hears(number, True)
        for thing, (units, grace) in said.of.items():
            book.describe(number, thing, units, grace)
        for thing, units in said.back.items():
            book.give_back(number, thing, units)
        for name, want in said.want.items():
            book.want(number, name, None if want is None else Want(*want))
        if said.asks:
            borrower.question = said.asks
        if said.ready is not None:
            borrower.speaks = True
            ready(said.ready)
        if said.last is not None:
            last(said.last)

    def _act(self) -> None:
        """Lend what can be lent, and tell everybody who is concerned."""
        concerned: dict[int, None] = {}
        for loan in self.book.lend(self._now()):
            self._tell_loan(loan)
            concerned[loan.borrower] = None
        for recall in self.book.recalls():
            self._tell_recall(recall)
            concerned[recall.borrower] = None
        for number in self.book.passed:
            if self._has_to_speak(self._borrowers[number]):
                concerned[number] = None
        for number, borrower in self._borrowers.items():
            if borrower.question and number not in self.book.passed:  # else it is still to get more
                borrower.next.heard, borrower.question = borrower.question, 0
            if number in concerned or borrower.next.heard:
                borrower.speak()
        due = self.book.next_due()
        if self._nap is not None and due is not None:
            self._nap.deadline = min(self._nap.deadline, due)

    def _has_to_speak(self, borrower: _Borrower) -> bool:
        """Have a borrower say something; False: it was told to. It answers its last call once more."""
        if borrower.asked:
            return False
        borrower.asked = True
        borrower.calls = borrower.next.call = max(borrower.calls, 1)
        return True

    def _tell_loan(self, loan: Loan) -> None:
        self._borrowers[loan.borrower].next.lent.append((loan.name, loan.thing, loan.units))

    def _tell_recall(self, recall: Recall) -> None:
        if (borrower := self._borrowers.get(recall.borrower)) is None:
            return
        if recall.wanted:
            if recall.thing in borrower.calm:
                del borrower.calm[recall.thing]  # it was never told that it may keep it
            else:
                borrower.next.wanted.append(recall.thing)
        elif recall.thing in borrower.next.wanted:
            borrower.next.wanted.remove(recall.thing)
        else:
            borrower.calm[recall.thing] = None


async def _read(sock: socket.socket) -> bytes:
    """Answer what the peer said; nothing: it is gone."""
    while True:
        await trio.lowlevel.wait_readable(sock)
        try:
            return sock.recv(PIECE)
        except BlockingIOError:
            continue
        except OSError:
            return b""
