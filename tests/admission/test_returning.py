"""Many are refused in one second, and come back when they were told to: served, and not all at once."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import trio
from trio.testing import MockClock

from trio_gateway.admission import AdmissionLimits, TenantShare
from trio_gateway.errors import Refused
from trio_gateway.testing import WorkerSet, make_request, make_worker
from trio_gateway.units import MiB

SLOTS = 16
ANSWER = 0.25  # seconds, on average
CAPACITY = SLOTS / ANSWER


def limits(max_queued: int) -> AdmissionLimits:
    return AdmissionLimits(max_queued, 64 * MiB, 60.0)


def whole_seconds(wait: float) -> float:
    return math.ceil(wait)


def exact(wait: float) -> float:
    return wait


class Crowd:
    """Clients that obey ``Retry-After``, and engines whose answers take a quarter of a second, more or less.

    Attributes:
        attempts: how often each client came, in the order of the ends.
        returns: when clients came again.
    """

    def __init__(self, workers: WorkerSet, obey: Callable[[float], float], seed: int = 1) -> None:
        self._admission = workers.admission
        self._obey = obey
        self._dice = random.Random(seed)
        self.attempts: list[int] = []
        self.returns: list[float] = []

    async def burst(self, count: int, seconds: float, tenants: tuple[str, ...] = ("t1",)) -> None:
        """Let so many clients come, evenly, and wait until all are served."""
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(self._client, number * seconds / count, tenants[number % len(tenants)])

    async def _client(self, delay: float, tenant: str) -> None:
        await trio.sleep(delay)
        attempts = 1
        while (wait := await self._ask(tenant)) is not None:
            await trio.sleep(self._obey(wait))
            self.returns.append(trio.current_time())
            attempts += 1
        self.attempts.append(attempts)

    async def _ask(self, tenant: str) -> float | None:
        try:
            ticket = self._admission.enter(make_request(tenant=tenant))
        except Refused as refused:
            return refused.problem.retry_after or 0.0
        with await ticket.wait():
            await trio.sleep(ANSWER * self._dice.uniform(0.5, 1.5))
        ticket.leave()
        return None

    def peak(self) -> int:
        """The most that came again in one second."""
        return max(sum(at <= other < at + 1 for other in self.returns) for at in self.returns)


def crowd_before(
    obey: Callable[[float], float],
    *,
    max_queued: int = 2 * int(CAPACITY),
    shares: Mapping[str, TenantShare] | None = None,
    share: TenantShare | None = None,
) -> Crowd:
    dice = random.Random(2)
    workers = WorkerSet(
        make_worker(slots=SLOTS),
        limits=limits(max_queued),
        shares=shares,
        share=share or TenantShare(None, max_queued),
        dice=dice.random,
    )
    return Crowd(workers, obey)


@pytest.mark.parametrize("obey", [whole_seconds, exact])
@pytest.mark.parametrize("warm", [True, False], ids=["measured", "just begun"])
async def test_after_a_burst_two_attempts_are_enough_and_no_second_gets_too_many(
    autojump_clock: MockClock, obey: Callable[[float], float], warm: bool
) -> None:
    crowd = crowd_before(obey)
    if warm:
        await crowd.burst(200, 4.0)
        assert Counter(crowd.attempts) == {1: 200}
    began = trio.current_time()
    await crowd.burst(int(10 * CAPACITY), 1.0)
    assert max(crowd.attempts) == 2
    assert crowd.peak() <= 1.5 * CAPACITY
    assert trio.current_time() - began <= 15  # and the engines were not left idle meanwhile


async def test_who_had_only_its_tenants_queue_full_comes_back_at_its_tenants_pace(
    autojump_clock: MockClock,
) -> None:
    """Four slots of sixteen: a quarter of the capacity, and so of those that come again in a second."""
    crowd = crowd_before(exact, max_queued=1024, shares={"small": TenantShare(4, 32)})
    await crowd.burst(64, 8.0)
    crowd.attempts.clear()
    await crowd.burst(120, 1.0, ("small",))
    assert max(crowd.attempts) == 2
    assert crowd.peak() <= 1.5 * CAPACITY / 4


async def test_a_tenant_is_told_its_share_of_the_slots_while_others_wait(autojump_clock: MockClock) -> None:
    crowd = crowd_before(exact, max_queued=1024, share=TenantShare(None, 48))
    await crowd.burst(64, 2.0)
    crowd.attempts.clear()
    await crowd.burst(int(4 * CAPACITY), 1.0, ("a", "b", "c"))
    assert Counter(crowd.attempts).keys() <= {1, 2, 3}
    assert crowd.attempts.count(3) <= 5  # shares are not exact
    assert crowd.peak() <= 1.5 * CAPACITY


async def test_one_tenants_refusals_put_nobody_elses_return_off(autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(slots=1), limits=limits(8), share=TenantShare(None, 4))
    tickets = [workers.admission.enter(make_request(tenant="flood")) for _ in range(5)]

    def told(tenant: str) -> float:
        with pytest.raises(Refused) as refused:
            tickets.append(workers.admission.enter(make_request(tenant=tenant)))
        return refused.value.problem.retry_after or 0.0

    waits = [told("flood") for _ in range(30)]
    assert waits == sorted(waits)
    assert len(set(waits)) == 30
    tickets += [workers.admission.enter(make_request(tenant="other")) for _ in range(4)]
    assert told("third") == 9  # behind the eight that wait, a second each, and nobody else
    for ticket in tickets:
        ticket.leave()


async def test_a_full_queue_is_that_of_the_pool_whatever_waits_for_others(autojump_clock: MockClock) -> None:
    workers = WorkerSet(
        make_worker("w1", slots=1),
        make_worker("w2", slots=1),
        models={"m1": ["w1"], "m2": ["w2"]},
        limits=limits(20),
    )
    tickets = [workers.admission.enter(make_request(model="m1")) for _ in range(20)]
    tickets += [workers.admission.enter(make_request(model="m2")) for _ in range(2)]
    with pytest.raises(Refused) as refused:
        workers.admission.enter(make_request(model="m2"))
    assert refused.value.problem.retry_after == 2  # behind the one that waits for the same worker
    for ticket in tickets:
        ticket.leave()


async def test_expired_waiters_are_told_different_moments(autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(slots=1), limits=AdmissionLimits(64, 64 * MiB, 5.0))
    waits: list[float] = []

    async def wait() -> None:
        with pytest.raises(Refused) as refused:
            await workers.admission.enter(make_request()).wait()
        assert refused.value.problem.code == "queue_timeout"
        waits.append(refused.value.problem.retry_after or 0.0)

    with await workers.admission.enter(make_request()).wait():
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(wait)
    assert len(set(waits)) == 5


async def test_who_is_refused_before_its_model_is_known_gets_a_turn_behind_the_longest_queue(
    autojump_clock: MockClock,
) -> None:
    workers = WorkerSet(
        make_worker("w1", slots=1), make_worker("w2", slots=1), models={"m1": ["w1"], "m2": ["w2"]}
    )
    assert [workers.admission.next_return() for _ in range(2)] == [1, 1]
    tickets = [workers.admission.enter(make_request(model=model)) for model in ("m1", "m2", "m1", "m1", "m2")]
    assert [workers.admission.next_return() for _ in range(3)] == [3, 4, 5]
    for ticket in tickets:
        ticket.leave()
