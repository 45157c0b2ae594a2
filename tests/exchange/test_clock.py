"""The clocks of all exchanges in one task: a few a turn, and no fault of one is another's."""

from __future__ import annotations

import math
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context

import trio
from trio.testing import MockClock

from trio_gateway.exchange._clock import LOOKS_A_TURN, ExchangeClock, ExchangeClocks

OWNER: ContextVar[str] = ContextVar("owner", default="nobody")


@asynccontextmanager
async def running() -> AsyncIterator[ExchangeClocks]:
    clocks = ExchangeClocks()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(clocks.run)  # noqa: ASYNC113 - it looks when it runs
        yield clocks
        nursery.cancel_scope.cancel()
    assert clocks.running == 0


def started(
    clocks: ExchangeClocks, look: Callable[[float], float], failed: Callable[[Exception], None] | None = None
) -> ExchangeClock:
    def unexpected(exc: Exception) -> None:
        raise exc

    clock = ExchangeClock(clocks, look, failed or unexpected)
    clock.start(copy_context())
    clock.poke()
    return clock


class Looks:
    """Notes when it was looked, and names the times to look again."""

    def __init__(self, *again: float) -> None:
        self.at: list[float] = []
        self._again = list(again)

    def __call__(self, now: float) -> float:
        self.at.append(now)
        return self._again.pop(0) if self._again else math.inf


async def test_a_clock_is_looked_at_once_it_is_poked_and_whenever_it_said(autojump_clock: MockClock) -> None:
    async with running() as clocks:
        looks, others = Looks(5, 7), Looks(6)
        clock, other = started(clocks, looks), started(clocks, others)
        await trio.sleep(100)
        assert (looks.at, others.at) == ([0, 5, 7], [0, 6])
        clock.stop()
        other.stop()


async def test_a_poke_looks_at_once_and_what_was_due_later_is_due_as_that_look_says(
    autojump_clock: MockClock,
) -> None:
    async with running() as clocks:
        looks = Looks(50, 60)
        clock = started(clocks, looks)
        await trio.sleep(10)
        clock.poke()
        clock.poke()
        await trio.sleep(100)
        assert looks.at == [0, 10, 60]
        clock.stop()


async def test_a_poke_for_a_time_looks_then_and_not_twice(autojump_clock: MockClock) -> None:
    async with running() as clocks:
        looks = Looks(50)
        clock = started(clocks, looks)
        await trio.sleep(10)
        clock.poke(30)
        clock.poke(40)
        clock.poke(20)
        await trio.sleep(100)
        assert looks.at == [0, 20]
        clock.stop()


async def test_one_that_was_started_and_never_poked_is_not_looked_at(autojump_clock: MockClock) -> None:
    async with running() as clocks:
        looks = Looks()
        clock = ExchangeClock(clocks, looks, lambda exc: None)
        clock.start(copy_context())
        await trio.sleep(10)
        assert looks.at == []
        clock.stop()


async def test_a_poke_out_of_a_look_makes_another_one(autojump_clock: MockClock) -> None:
    async with running() as clocks:
        at: list[float] = []

        def look(now: float) -> float:
            at.append(now)
            if len(at) == 1:
                clock.poke()
            return 5 if len(at) < 3 else math.inf

        clock = started(clocks, look)
        await trio.sleep(10)
        assert at == [0, 0, 5]
        clock.stop()


async def test_one_that_stopped_or_never_started_is_not_looked_at(autojump_clock: MockClock) -> None:
    async with running() as clocks:
        looks, never = Looks(5), Looks()
        clock = started(clocks, looks)
        ExchangeClock(clocks, never, lambda exc: None).poke()
        await trio.sleep(1)
        clock.stop()
        clock.stop()
        clock.poke()
        await trio.sleep(10)
        assert (looks.at, never.at) == ([0], [])


async def test_one_that_stops_within_its_look_stays_stopped(autojump_clock: MockClock) -> None:
    async with running() as clocks:
        at: list[float] = []

        def look(now: float) -> float:
            at.append(now)
            clock.stop()
            return now + 1

        clock = started(clocks, look)
        await trio.sleep(10)
        assert at == [0]


async def test_an_exception_is_told_to_its_own_exchange_and_the_others_go_on(
    autojump_clock: MockClock,
) -> None:
    async with running() as clocks:
        found: list[Exception] = []

        def broken(now: float) -> float:
            raise ValueError

        looks = Looks(3)
        clock = started(clocks, broken, found.append)
        other = started(clocks, looks)
        await trio.sleep(10)
        assert [type(exc) for exc in found] == [ValueError]
        assert not clock.runs
        assert looks.at == [0, 3]
        other.stop()


async def test_what_a_look_starts_belongs_to_whoever_started_the_clock(autojump_clock: MockClock) -> None:
    async with running() as clocks:
        found: list[str] = []

        def look(now: float) -> float:
            found.append(OWNER.get())
            return math.inf

        token = OWNER.set("one")
        clock = started(clocks, look)
        OWNER.reset(token)
        await trio.sleep(1)
        assert found == ["one"]
        clock.stop()


async def test_many_that_are_due_together_leave_others_their_turn(autojump_clock: MockClock) -> None:
    async with running() as clocks:
        order: list[str] = []

        def look(now: float) -> float:
            order.append("look")
            return math.inf

        many = [started(clocks, look) for _ in range(3 * LOOKS_A_TURN)]
        for _ in range(3):
            await trio.lowlevel.checkpoint()
            order.append("other")
        await trio.sleep(1)
        assert order.count("look") == 3 * LOOKS_A_TURN
        runs = "".join("l" if what == "look" else " " for what in order).split()
        assert max(map(len, runs)) <= 2 * LOOKS_A_TURN  # the end of one turn and the beginning of the next
        for clock in many:
            clock.stop()


async def test_one_that_stopped_keeps_nothing_of_its_exchange(autojump_clock: MockClock) -> None:
    async with running() as clocks:
        looks = Looks(10**6)
        known = weakref.ref(looks)
        clock = started(clocks, looks)
        await trio.sleep(1)
        clock.stop()
        del looks
        assert known() is None


async def test_entries_of_stopped_clocks_do_not_pile_up(autojump_clock: MockClock) -> None:
    async with running() as clocks:
        for _ in range(1000):
            clock = started(clocks, Looks(10**6))
            await trio.sleep(0.001)
            clock.stop()
        assert len(clocks._heap) < 100
