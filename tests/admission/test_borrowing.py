"""Admission of several processes that borrow from one lender: together they are one, whoever comes where."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_gateway.admission import Admission, AdmissionLimits, Lease, TenantShare, Ticket
from trio_gateway.contract import Worker
from trio_gateway.errors import Problem, Refused
from trio_gateway.fleet import KEPT, DrainKeeper, Fleet, FleetSettings, Route
from trio_gateway.lending import Borrower, Broker
from trio_gateway.testing import make_request, make_worker

LIMITS = AdmissionLimits(1024, 1 << 28, 60.0)
ANYBODY = TenantShare(None, 1024)


class Process:
    """The parts of one process that matter here."""

    def __init__(
        self,
        sock: socket.socket,
        workers: list[Worker],
        limits: AdmissionLimits,
        shares: dict[str, TenantShare],
    ) -> None:
        self.sock = sock
        routes = [Route("m1", "m1", tuple(worker.id for worker in workers))]
        self.fleet = Fleet(workers, routes, trio.current_time, FleetSettings(lent=True), lambda: 0.5)
        self.drain = DrainKeeper()
        self.borrower = Borrower(sock)
        self.admission = Admission(
            self.fleet, limits, shares, self.drain.keep, lambda: 0.5, lender=self.borrower
        )

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.drain.run)
            nursery.start_soon(self.admission.run)
            await self.borrower.run(self.admission)
            nursery.cancel_scope.cancel()

    def die(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)

    def enter(self, **request: Any) -> Ticket:
        return self.admission.enter(make_request(**request))

    async def take(self, **request: Any) -> Lease:
        return await self.enter(**request).wait()

    @property
    def held(self) -> int:
        return sum(book.held for book in self.fleet.books.values())


class Site:
    """Several processes and their lender."""

    def __init__(self, broker: Broker, processes: list[Process]) -> None:
        self.broker = broker
        self.processes = processes

    def __getitem__(self, number: int) -> Process:
        return self.processes[number]

    @property
    def lent(self) -> dict[str, int]:
        return {thing: figures["lent"] for thing, figures in self.broker.book.figures().items()}


@asynccontextmanager
async def site(
    *workers: Worker, count: int = 2, limits: AdmissionLimits = LIMITS, **shares: TenantShare
) -> AsyncIterator[Site]:
    broker = Broker()
    processes = []
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        nursery.start_soon(broker.run)  # noqa: ASYNC113 - it waits for others
        for number in range(count):
            ours, theirs = socket.socketpair()
            for sock in (ours, theirs):
                sock.setblocking(False)
                stack.callback(sock.close)
            process = Process(theirs, list(workers), limits, {"t1": ANYBODY, "t2": ANYBODY, **shares})
            processes.append(process)
            nursery.start_soon(broker.serve, number, ours, lambda known: None)  # noqa: ASYNC113 - it waits for others
            nursery.start_soon(process.run)  # noqa: ASYNC113 - it waits for others
        yield Site(broker, processes)
        nursery.cancel_scope.cancel()


async def given_back(site: Site) -> None:
    """Expect that nobody has a slot, as soon as none can be of use."""
    await trio.sleep(3 * KEPT)
    assert site.lent == {"slots:w1": 0}


async def refusal(ticket: Ticket) -> Problem:
    with pytest.raises(Refused) as refused:
        await ticket.wait()
    return refused.value.problem


async def test_one_slot_goes_from_process_to_process_and_is_nobodys_when_nobody_needs_it(
    autojump_clock: MockClock,
) -> None:
    async with site(make_worker(slots=1)) as two:
        first = await two[0].take()
        waiting = two[1].enter()
        await wait_all_tasks_blocked()
        assert waiting.waiting
        assert waiting.why == "no_slot"
        with first:
            pass
        second = await waiting.wait()
        assert (two[0].held, two[1].held) == (0, 1)
        with second:
            pass
        await given_back(two)


async def test_a_backlog_gives_every_second_slot_to_another_that_is_as_long(
    autojump_clock: MockClock,
) -> None:
    async with site(make_worker(slots=1)) as two:
        lease = await two[0].take()
        order: list[int] = []

        async def serve(number: int) -> None:
            with await two[number].take():
                order.append(number)
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            for number in (0, 1):
                for _ in range(10):
                    nursery.start_soon(serve, number)
            await wait_all_tasks_blocked()
            with lease:
                pass
        assert sorted(order[:10]) == [0] * 5 + [1] * 5


async def test_without_positions_a_request_is_served_or_refused_wherever_it_comes(
    autojump_clock: MockClock,
) -> None:
    limits = AdmissionLimits(0, 0, 60.0)
    async with site(make_worker(slots=2), limits=limits) as two:
        leases = [await two[0].take(), await two[1].take()]
        for process in two.processes:
            problem = await refusal(process.enter())
            assert (problem.code, problem.status) == ("queue_full", 429)
            assert process.admission.statistics().queued == 0
        with leases[0]:
            pass
        with await two[1].take():
            assert two[1].held == 2
        with leases[1]:
            pass


async def test_who_finds_the_queue_full_is_refused_at_once_where_others_wait_for_the_same(
    autojump_clock: MockClock,
) -> None:
    async with site(make_worker(slots=1), limits=AdmissionLimits(1, 1 << 20, 60.0)) as two:
        lease = await two[0].take()
        waiting = two[1].enter()
        assert (await refusal(two[1].enter())).code == "queue_full"
        with pytest.raises(Refused):  # by now it is known that there is none
            two[1].enter()
        with lease:
            pass
        with await waiting.wait():
            pass


async def test_a_tenant_has_its_concurrency_once_for_all(autojump_clock: MockClock) -> None:
    async with site(make_worker(slots=8), t1=TenantShare(2, 1024)) as two:
        leases = [await two[0].take(), await two[1].take()]
        waiting = [two[0].enter(), two[1].enter()]
        await wait_all_tasks_blocked()
        assert [ticket.why for ticket in waiting] == ["tenant_at_concurrency"] * 2
        with await two[0].take(tenant="t2"):
            pass
        with leases[0]:
            pass
        await wait_all_tasks_blocked()
        assert [ticket.waiting for ticket in waiting].count(False) == 1
        with leases[1]:
            pass
        for ticket in waiting:
            with await ticket.wait():
                pass
        # What one has of it and does not use is there for the other, without a wait for anything else.
        both = [await two[1].take(), await two[1].take()]
        assert two.lent["tenant:t1"] == 2
        for lease in both:
            with lease:
                pass


async def test_a_tenant_that_is_full_is_refused_by_its_own_bound(autojump_clock: MockClock) -> None:
    async with site(make_worker(slots=8), t1=TenantShare(1, 0)) as two:
        lease = await two[0].take()
        assert (await refusal(two[1].enter())).code in ("rate_limit_exceeded", "queue_full")
        with lease:
            pass
        with await two[1].take():
            pass


async def test_a_lower_concurrency_holds_in_all_processes_as_soon_as_requests_end(
    autojump_clock: MockClock,
) -> None:
    async with site(make_worker(slots=8), t1=TenantShare(4, 1024)) as two:
        leases = [await two[number].take() for number in (0, 0, 1, 1)]
        for process in two.processes:
            process.admission.reshare({"t1": TenantShare(1, 1024)})
        waiting = [process.enter() for process in two.processes]
        await wait_all_tasks_blocked()
        for lease in leases[:3]:
            with lease:
                pass
            await wait_all_tasks_blocked()
            assert all(ticket.waiting for ticket in waiting)
        with leases[3]:
            pass
        await wait_all_tasks_blocked()
        assert [ticket.waiting for ticket in waiting].count(True) == 1
        for ticket in sorted(waiting, key=lambda each: each.waiting):
            with await ticket.wait():
                pass


async def test_a_tier_has_its_share_of_the_slots_once_for_all(autojump_clock: MockClock) -> None:
    limits = AdmissionLimits(1024, 1 << 28, 60.0, max_shares={"batch": 0.5})
    async with site(make_worker(slots=4), limits=limits) as two:
        leases = [await process.take(tier="batch") for process in two.processes]
        waiting = [process.enter(tier="batch") for process in two.processes]
        await wait_all_tasks_blocked()
        assert [ticket.why for ticket in waiting] == ["tier_share"] * 2
        others = [await process.take(tier="interactive") for process in two.processes]
        with leases[0]:
            pass
        await wait_all_tasks_blocked()
        assert [ticket.waiting for ticket in waiting].count(False) == 1
        for lease in (leases[1], *others):
            with lease:
                pass
        for ticket in waiting:
            with await ticket.wait():
                pass


async def test_slots_that_were_added_are_used_whatever_processes_knew_that_wait_for_none(
    autojump_clock: MockClock,
) -> None:
    before, after = make_worker("w1", slots=2), make_worker("w1", slots=5)
    async with site(before, count=3) as here:
        with await here[2].take():
            pass
        await given_back(here)
        leases = [await here[1].take()]
        waiting = [here[0].enter() for _ in range(4)]
        await wait_all_tasks_blocked()
        assert here.lent["slots:w1"] == 2
        for process in here.processes:
            process.fleet.describe(after)
            process.admission.dispatch()
        leases += [await ticket.wait() for ticket in waiting]
        assert here.lent["slots:w1"] == 5
        for lease in leases:
            lease.release()
        await given_back(here)


async def test_a_tier_and_a_tenant_may_have_more_whatever_processes_knew_that_have_all_they_want(
    autojump_clock: MockClock,
) -> None:
    limits = AdmissionLimits(1024, 1 << 28, 60.0, max_shares={"batch": 0.2})
    worker = make_worker("w1", slots=10)
    async with site(worker, limits=limits, t1=TenantShare(2, 1024)) as here:
        leases = [await here[1].take(tenant="t1"), await here[1].take(tenant="t2", tier="batch")]
        waiting = [here[0].enter(tenant="t1") for _ in range(3)]
        waiting += [here[0].enter(tenant="t2", tier="batch") for _ in range(3)]
        await wait_all_tasks_blocked()
        assert (here.lent["tenant:t1"], here.lent["tier:batch:m1"]) == (2, 2)
        for process in here.processes:
            process.admission.limits = replace(limits, max_shares={"batch": 0.4})
            process.admission.reshare({"t1": TenantShare(4, 1024)})
        leases += [await ticket.wait() for ticket in waiting]
        assert (here.lent["tenant:t1"], here.lent["tier:batch:m1"]) == (4, 4)
        for lease in leases:
            lease.release()


async def test_slots_that_drain_stay_borrowed(autojump_clock: MockClock) -> None:
    async with site(make_worker(slots=1, cancel_grace=2.0)) as two:
        with await two[0].take() as lease:
            lease.engine_started("a-01")
        began = trio.current_time()
        with await two[1].take():
            assert trio.current_time() - began == pytest.approx(2.0)


async def test_slots_of_a_process_that_died_come_back_after_the_grace(autojump_clock: MockClock) -> None:
    async with site(make_worker(slots=2, cancel_grace=3.0)) as two:
        await two[0].take()
        began = trio.current_time()
        kept = await two[1].take()
        waiting = two[1].enter()
        two[0].die()
        with await waiting.wait():
            assert trio.current_time() - began == pytest.approx(3.0)
        with kept:
            pass


async def test_the_worker_that_would_be_chosen_is_the_one_that_is_borrowed(autojump_clock: MockClock) -> None:
    workers = [make_worker("w1", slots=2), make_worker("w2", slots=2)]
    async with site(*workers) as two:
        leases = [await two[number].take() for number in (0, 0, 1, 1)]
        # Each knows its own work, and balances it; where nothing is left it takes what there is.
        assert Counter(lease.worker.id for lease in leases) == {"w1": 2, "w2": 2}
        for lease in leases:
            with lease:
                pass


async def test_slots_of_a_worker_that_is_gone_go_back(autojump_clock: MockClock) -> None:
    async with site(make_worker(slots=1)) as two:
        lease = await two[0].take()
        for process in two.processes:
            process.fleet.remove("w1")
        with lease:
            pass
        await given_back(two)


async def test_what_was_lent_too_late_goes_back(autojump_clock: MockClock) -> None:
    async with site(make_worker(slots=1)) as two:
        ticket = two[0].enter()
        ticket.leave()
        other = two[0].enter()
        two[0].fleet.remove("w1")  # who waits for it is refused, while it is being lent
        assert (await refusal(other)).code == "no_worker"
        await wait_all_tasks_blocked()
        with await two[1].take():
            pass


async def test_nothing_is_wanted_after_the_end(autojump_clock: MockClock) -> None:
    async with site(make_worker(slots=1)) as two:
        lease = await two[1].take()
        waiting = two[0].enter()
        await wait_all_tasks_blocked()
        two[0].admission.close(Problem.of("gateway_draining", "it ends"))
        assert (await refusal(waiting)).code == "gateway_draining"
        await wait_all_tasks_blocked()
        assert two.broker.book.figures()["slots:w1"]["wanted"] == 0
        with lease:
            pass


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_no_slot_is_used_twice_and_everybody_is_served(
    seed: int, autojump_clock: MockClock
) -> None:
    dice = random.Random(seed)
    workers = [make_worker("w1", slots=3, cancel_grace=0.5), make_worker("w2", slots=2, cancel_grace=0.5)]
    using: Counter[str] = Counter()
    running: Counter[str] = Counter()
    served = 0

    async with site(*workers, count=3, t1=TenantShare(2, 1024)) as three:

        async def client() -> None:
            nonlocal served
            await trio.sleep(dice.random() * 20)
            tenant, tier = dice.choice(("t1", "t2")), dice.choice(("interactive", "batch"))
            ticket = three[dice.randrange(3)].enter(tenant=tenant, tier=tier)
            if dice.random() < 0.2:
                with trio.move_on_after(dice.random()):
                    with await ticket.wait():
                        pass
                return
            with await ticket.wait() as lease:
                using[lease.worker.id] += 1
                running[tenant] += 1
                assert using["w1"] <= 3
                assert using["w2"] <= 2
                assert running["t1"] <= 2
                await trio.sleep(dice.random() * 0.8)
                using[lease.worker.id] -= 1
                running[tenant] -= 1
            served += 1

        async with trio.open_nursery() as nursery:
            for _ in range(150):
                nursery.start_soon(client)
        assert served > 100
        await trio.sleep(3 * KEPT)
        lent = {thing: units for thing, units in three.lent.items() if thing.startswith("slots:")}
        assert set(lent.values()) == {0}
        for process in three.processes:
            statistics = process.admission.statistics()
            assert (statistics.held, statistics.queued) == (0, 0)
            assert +process.borrower.lent == +process.admission._loans.permits  # type: ignore[union-attr]


async def test_a_slot_is_used_again_without_a_question_unless_another_process_waits(
    autojump_clock: MockClock,
) -> None:
    async with site(make_worker(slots=2)) as two:
        with await two[0].take():
            pass
        again = two[0].enter()
        assert not again.waiting  # it was placed at once: no word of the lender was needed
        with await again.wait():
            both = [await two[1].take()]
        both.append(await two[1].take())  # what the first one keeps is called back
        for lease in both:
            with lease:
                pass
        await given_back(two)


async def test_a_slot_of_another_worker_than_the_best_is_not_used_because_it_is_there(
    autojump_clock: MockClock,
) -> None:
    workers = [make_worker("w1", slots=2), make_worker("w2", slots=2)]
    async with site(*workers) as two:
        first, second = await two[0].take(), await two[0].take()
        assert (first.worker.id, second.worker.id) == ("w1", "w2")
        with second:
            pass
        with first:
            pass
        # Both are kept; the first of equals is taken, and not the one that came free last.
        with await two[0].take() as lease:
            assert lease.worker.id == "w1"
            with await two[0].take() as other:
                assert other.worker.id == "w2"
