"""The supervisor calls its processes: whoever runs answers, is let go, told to retire, and tells the last."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_gateway.contract import Want
from trio_gateway.lending import Borrower, Broker

NUMBER = 7


class Nobody:
    """A process that uses nothing of what is lent."""

    def lent(self, thing: str, units: int) -> None:
        """See Listener."""

    def recall(self, thing: str) -> None:
        """See Listener."""

    def judged(self, heard: int) -> None:
        """See Listener."""


class Line:
    """A lender, one borrower, and what the lender was told of it."""

    def __init__(self, broker: Broker, borrower: Borrower) -> None:
        self.broker = broker
        self.borrower = borrower
        self.ready: list[dict[str, Any]] = []
        self.last: list[dict[str, Any]] = []


@asynccontextmanager
async def line() -> AsyncIterator[Line]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        made = Line(Broker(), Borrower(theirs))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.broker.serve, NUMBER, ours, made.ready.append, made.last.append)  # noqa: ASYNC113 - it waits for others
            yield made
            nursery.cancel_scope.cancel()


async def test_a_process_whose_loop_runs_answers_every_call(autojump_clock: MockClock) -> None:
    async with line() as made, trio.open_nursery() as nursery:
        nursery.start_soon(made.borrower.run, Nobody())
        nursery.start_soon(lambda: made.borrower.be_ready(boot_id="b"))
        await wait_all_tasks_blocked()
        assert made.ready == [{"boot_id": "b"}]
        for _ in range(9):
            assert made.broker.call(NUMBER) == 0
            await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def test_calls_that_nobody_answers_are_counted_and_forgotten_at_the_next_answer(
    autojump_clock: MockClock,
) -> None:
    async with line() as made, trio.open_nursery() as nursery:
        assert made.broker.call(NUMBER) == 0  # it is still starting
        nursery.start_soon(lambda: made.borrower.be_ready(boot_id="b"))
        await wait_all_tasks_blocked()
        assert [made.broker.call(NUMBER) for _ in range(4)] == [0, 1, 2, 3]
        nursery.start_soon(made.borrower.run, Nobody())
        await wait_all_tasks_blocked()
        assert [made.broker.call(NUMBER), made.broker.call(8)] == [0, 0]
        nursery.cancel_scope.cancel()


async def test_nothing_is_lent_to_one_that_has_not_answered_until_it_does(autojump_clock: MockClock) -> None:
    async with line() as made, trio.open_nursery() as nursery:
        borrower, broker = made.borrower, made.broker
        nursery.start_soon(lambda: borrower.be_ready(boot_id="b"))
        await wait_all_tasks_blocked()
        broker.call(NUMBER)
        broker.call(NUMBER)
        borrower.describe("slots:w1", 2, 0.0)
        borrower.want({"x": Want(("slots:w1",), 1, 2)})
        borrower.speak()
        await wait_all_tasks_blocked()
        assert broker.book.figures()["slots:w1"]["lent"] == 0
        nursery.start_soon(borrower.run, Nobody())
        await wait_all_tasks_blocked()
        assert broker.book.figures()["slots:w1"]["lent"] == borrower.lent["slots:w1"] == 2
        nursery.cancel_scope.cancel()


async def test_who_has_to_say_something_before_it_gets_more_is_asked_once(autojump_clock: MockClock) -> None:
    async with line() as made, trio.open_nursery() as nursery:
        borrower, broker = made.borrower, made.broker
        nursery.start_soon(lambda: borrower.be_ready(boot_id="b"))
        borrower.describe("slots:w1", 16, 0.0)
        borrower.want({"x": Want(("slots:w1",), 1, 15)})
        borrower.speak()
        await wait_all_tasks_blocked()
        assert broker.book.figures()["slots:w1"]["lent"] == 2
        assert [broker.call(NUMBER) for _ in range(3)] == [1, 2, 3]  # a loop that hangs is not asked again
        nursery.start_soon(borrower.run, Nobody())
        await wait_all_tasks_blocked()
        assert broker.book.figures()["slots:w1"]["lent"] == borrower.lent["slots:w1"] == 15
        assert broker.call(NUMBER) == 0
        nursery.cancel_scope.cancel()


class Asking(Nobody):
    """A process that notes what it has when a question of it is answered."""

    def __init__(self, borrower: Borrower) -> None:
        self._borrower = borrower
        self.answers: list[tuple[int, dict[str, int]]] = []

    def judged(self, heard: int) -> None:
        """See Listener."""
        if heard:
            self.answers.append((heard, dict(self._borrower.lent)))


async def test_a_question_is_answered_when_all_is_lent_that_there_is_for_who_asks(
    autojump_clock: MockClock,
) -> None:
    """Whoever is not placed by then is refused."""
    async with line() as made, trio.open_nursery() as nursery:
        borrower = made.borrower
        asking = Asking(borrower)
        nursery.start_soon(borrower.run, asking)
        borrower.describe("slots:w1", 16, 0.0)
        borrower.want({"x": Want(("slots:w1",), 1, 15)})
        assert borrower.ask() == 1
        borrower.speak()
        await wait_all_tasks_blocked()
        assert asking.answers == [(1, {"slots:w1": 15})]
        borrower.want({"x": Want(("slots:w1",), 1, 2)})
        assert borrower.ask() == 2
        borrower.speak()
        await wait_all_tasks_blocked()
        assert asking.answers[1:] == [(2, {"slots:w1": 16})]
        nursery.cancel_scope.cancel()


async def test_who_is_told_to_retire_tells_at_its_end_what_it_counted_however_much_that_is(
    autojump_clock: MockClock,
) -> None:
    counted = {str(number): "x" * 1000 for number in range(2000)}
    async with line() as made, trio.open_nursery() as nursery:
        nursery.start_soon(made.borrower.run, Nobody())
        await wait_all_tasks_blocked()
        assert not made.borrower.retired.is_set()
        made.broker.retire(NUMBER)
        made.broker.retire(8)  # who is gone can not be told
        await made.borrower.retired.wait()
        await made.borrower.tell_last(counted)
        await wait_all_tasks_blocked()
        assert made.last == [counted]
        nursery.cancel_scope.cancel()
