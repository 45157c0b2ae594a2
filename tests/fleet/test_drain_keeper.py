"""Leases of attempts whose engine was not seen to stop are given back when their time is up."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from trio_gateway.contract import Worker
from trio_gateway.fleet import DrainKeeper
from trio_gateway.fleet._drain import ON_THE_WAY
from trio_gateway.testing import make_worker


class Kept:
    """Callbacks that write down when they were called."""

    def __init__(self) -> None:
        self.given_back: list[tuple[str, float]] = []
        self._began = trio.current_time()

    def keep(self, keeper: DrainKeeper, seconds: float, name: str) -> None:
        worker = make_worker(cancel_grace=seconds)
        keeper.keep(worker, name, lambda: self.given_back.append((name, trio.current_time() - self._began)))


async def test_each_lease_comes_back_after_its_own_time(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    keeper, kept = DrainKeeper(), Kept()
    nursery.start_soon(keeper.run)
    kept.keep(keeper, 4.0, "slow")
    kept.keep(keeper, 0.5, "fast")
    await trio.sleep(1)
    kept.keep(keeper, 0.25, "later")
    await trio.sleep(10)
    assert kept.given_back == [("fast", 0.5), ("later", 1.25), ("slow", 4.0)]


async def test_a_shorter_time_shortens_the_nap(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    keeper, kept = DrainKeeper(), Kept()
    nursery.start_soon(keeper.run)
    kept.keep(keeper, 100.0, "long")
    await trio.sleep(1)
    kept.keep(keeper, 1.0, "short")
    await trio.sleep(2)
    assert kept.given_back == [("short", 2.0)]


async def test_what_is_due_together_comes_back_together_and_in_order(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    keeper, kept = DrainKeeper(), Kept()
    nursery.start_soon(keeper.run)
    for name in ("a", "b", "c"):
        kept.keep(keeper, 2.0, name)
    await trio.sleep(3)
    assert kept.given_back == [("a", 2.0), ("b", 2.0), ("c", 2.0)]


async def test_what_was_handed_over_before_it_runs_is_kept_too(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    keeper, kept = DrainKeeper(), Kept()
    kept.keep(keeper, 1.0, "early")
    await trio.sleep(3)
    assert kept.given_back == []
    nursery.start_soon(keeper.run)
    await trio.sleep(1)
    assert kept.given_back == [("early", 3.0)]


async def test_giving_back_may_hand_over_the_next_one(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    keeper, kept = DrainKeeper(), Kept()
    nursery.start_soon(keeper.run)
    keeper.keep(make_worker(cancel_grace=1.0), "first", lambda: kept.keep(keeper, 1.0, "second"))
    await trio.sleep(5)
    assert kept.given_back == [("second", 2.0)]


# What the worker says -------------------------------------------------------------------------------------


class Told:
    """A keeper, and what became known of idle engines."""

    def __init__(self) -> None:
        self.idle: list[tuple[str, float, bool]] = []
        self.keeper = DrainKeeper(
            lambda worker, seconds, confirmed: self.idle.append((worker.id, round(seconds, 3), confirmed))
        )
        self.given_back: list[str] = []

    def keep(self, worker: Worker, attempt_id: str) -> None:
        self.keeper.keep(worker, attempt_id, lambda: self.given_back.append(attempt_id))


AGENT = make_worker("w1", kind="agent", cancel_grace=5.0)
OTHER = make_worker("w2", kind="agent", cancel_grace=5.0)


async def test_a_worker_that_says_it_let_go_gives_the_lease_back_at_once(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    told = Told()
    nursery.start_soon(told.keeper.run)
    told.keep(AGENT, "a-01")
    told.keep(AGENT, "b-01")
    await trio.sleep(0.3)
    told.keeper.released(AGENT, "a-01")
    assert told.given_back == ["a-01"]
    told.keeper.released(AGENT, "a-01")  # a second time is nothing
    await trio.sleep(10)
    assert told.given_back == ["a-01", "b-01"]
    assert told.idle == [("w1", 0.3, True), ("w1", 5.0, False)]


async def test_what_another_worker_or_nobody_had_is_not_given_back(autojump_clock: MockClock) -> None:
    told = Told()
    told.keep(AGENT, "a-01")
    told.keeper.released(OTHER, "a-01")
    told.keeper.released(make_worker("w1", kind="agent"), "a-01")  # of the same name, another process
    told.keeper.released(AGENT, "a-02")
    told.keeper.released_all(OTHER)
    assert told.given_back == []
    assert told.keeper.of_worker(AGENT) == ["a-01"]


async def test_a_list_gives_back_what_it_lacks_unless_that_is_too_new(autojump_clock: MockClock) -> None:
    told = Told()
    told.keep(AGENT, "old-01")
    told.keep(AGENT, "listed-01")
    told.keep(OTHER, "other-01")
    await trio.sleep(0.9)
    told.keeper.listed(AGENT, [])
    assert told.given_back == []  # it may have been written before the cancel came
    await trio.sleep(0.1)
    told.keep(AGENT, "new-01")
    told.keeper.listed(AGENT, ["listed-01", "unknown-01"])
    assert told.given_back == ["old-01"]
    assert told.keeper.of_worker(AGENT) == ["listed-01", "new-01"]
    assert told.keeper.of_worker(AGENT, longer_than=0.5) == ["listed-01"]


async def test_when_a_process_is_gone_all_that_drained_in_it_is_over(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    told = Told()
    nursery.start_soon(told.keeper.run)
    for name in ("a-01", "b-01"):
        told.keep(AGENT, name)
    told.keep(OTHER, "c-01")
    await trio.sleep(1)
    told.keeper.released_all(AGENT)
    assert told.given_back == ["a-01", "b-01"]
    assert told.keeper.of_worker(AGENT) == []
    await trio.sleep(10)
    assert told.given_back == ["a-01", "b-01", "c-01"]  # and none of them twice
    assert told.idle == [("w1", 1.0, True), ("w1", 1.0, True), ("w2", 5.0, False)]


async def test_giving_back_may_release_more(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    """A lease that comes back places the next exchange, whose end may come in the same moment."""
    told = Told()
    nursery.start_soon(told.keeper.run)

    def chain() -> None:
        told.given_back.append("first")
        told.keep(AGENT, "b-01")
        told.keeper.released_all(AGENT)

    told.keeper.keep(AGENT, "a-01", chain)
    told.keeper.released_all(AGENT)
    assert told.given_back == ["first", "b-01"]
    await trio.sleep(10)
    assert told.given_back == ["first", "b-01"]


async def test_whatever_a_worker_says_of_attempts_is_passed_on(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    told: list[tuple[str, int | None]] = []
    keeper = DrainKeeper(let_go=lambda attempt_id, generated: told.append((attempt_id, generated)))
    nursery.start_soon(keeper.run)
    for attempt_id in ("a-01", "b-01", "late-01"):
        keeper.keep(AGENT, attempt_id, lambda: None)
    keeper.released(AGENT, "a-01", 7)
    keeper.released(AGENT, "never-drained-01", 9)
    await trio.sleep(ON_THE_WAY + 0.1)
    keeper.listed(AGENT, ["late-01"])
    await trio.sleep(10)  # its grace
    keeper.released(AGENT, "late-01", 3)
    assert told == [("a-01", 7), ("never-drained-01", 9), ("b-01", None), ("late-01", 3)]
