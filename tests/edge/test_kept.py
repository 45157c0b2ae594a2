"""Answers that are kept for their owners: how long, for whom, and what is given up when memory is short."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from trio_gateway.edge._kept import KeptAnswers
from trio_gateway.flow import BufferPool
from trio_gateway.tenancy import Caller, Tenant


class Kept:
    def __init__(self, pool: BufferPool, size: int, *, over: bool = True, accepted: bool = True) -> None:
        self.pool = pool
        self.kept = size
        self.over = over
        self.accepted = accepted
        pool.take(size)

    def forget(self) -> None:
        self.pool.give(self.kept)
        self.kept = 0


OWNER = Caller(Tenant("one"), "key")


async def test_it_is_kept_for_the_window_behind_its_end(autojump_clock: MockClock) -> None:
    pool = BufferPool(1000)
    answers = KeptAnswers[Kept](30.0, pool)
    running, ended = Kept(pool, 10, over=False), Kept(pool, 20)
    answers.add("running", running, OWNER)
    answers.add("ended", ended, OWNER)
    assert (len(answers), answers.bytes) == (2, 30)
    for _ in range(30):
        answers.sweep()
        assert answers.find("ended", OWNER) is ended
        await trio.sleep(1)
    answers.sweep()
    assert answers.find("ended", OWNER) is None
    assert answers.find("running", OWNER) is running
    assert pool.used == 10


async def test_one_that_is_read_again_is_not_over(autojump_clock: MockClock) -> None:
    pool = BufferPool(1000)
    answers = KeptAnswers[Kept](5.0, pool)
    kept = Kept(pool, 10)
    answers.add("it", kept, OWNER)
    answers.sweep()
    await trio.sleep(4)
    kept.over = False
    answers.sweep()
    await trio.sleep(4)
    kept.over = True
    answers.sweep()
    await trio.sleep(4)
    answers.sweep()
    assert answers.find("it", OWNER) is kept


async def test_when_memory_is_short_the_ended_go_first_the_oldest_of_them() -> None:
    pool = BufferPool(100)
    answers = KeptAnswers[Kept](30.0, pool)
    for name, over in (("running", False), ("old", True), ("new", True)):
        answers.add(name, Kept(pool, 20, over=over), OWNER)
    answers.sweep()
    assert answers.find("old", OWNER) is None
    assert answers.find("running", OWNER) is not None
    assert answers.find("new", OWNER) is not None
    assert pool.used == 40


async def test_what_was_turned_away_is_forgotten_as_soon_as_its_client_was_told() -> None:
    pool = BufferPool(100)
    answers = KeptAnswers[Kept](30.0, pool)
    telling, told = (Kept(pool, 1, over=over, accepted=False) for over in (False, True))
    answers.add("telling", telling, OWNER)
    answers.add("told", told, OWNER)
    answers.sweep()
    assert answers.find("telling", OWNER) is telling
    assert answers.find("told", OWNER) is None
    assert pool.used == 1


async def test_only_the_key_that_asked_finds_it() -> None:
    pool = BufferPool(100)
    answers = KeptAnswers[Kept](30.0, pool)
    answers.add("it", Kept(pool, 1), OWNER)
    assert answers.find("it", Caller(Tenant("two"), "key")) is None
    assert answers.find("it", Caller(Tenant("one"), "other")) is None
    assert answers.find("it", OWNER) is not None


async def test_one_that_nobody_swept_away_in_time_is_overdue(autojump_clock: MockClock) -> None:
    pool = BufferPool(1000)
    answers = KeptAnswers[Kept](5.0, pool)
    answers.add("ended", Kept(pool, 10), OWNER)
    answers.add("running", Kept(pool, 20, over=False), OWNER)
    answers.sweep()
    await trio.sleep(5)
    assert answers.overdue(trio.current_time()) == []
    await trio.sleep(2)
    assert answers.overdue(trio.current_time()) == [("ended", 2.0, 10)]
    answers.sweep()
    assert answers.overdue(trio.current_time()) == []


async def test_what_the_objects_of_many_take_makes_memory_short_too() -> None:
    pool = BufferPool(1000)
    answers = KeptAnswers[Kept](30.0, pool, weight=100)
    for number in range(8):
        answers.add(f"{number}", Kept(pool, 1, over=number != 0), OWNER)
    answers.sweep()
    assert [number for number in range(8) if answers.find(f"{number}", OWNER)] == [0, 5, 6, 7]
