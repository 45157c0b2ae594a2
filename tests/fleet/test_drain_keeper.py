"""Leases of attempts whose engine was not seen to stop are given back when their time is up."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from trio_gateway.fleet import DrainKeeper
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
