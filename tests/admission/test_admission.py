"""Who is placed, who gets a position, who is refused; and that all of it is given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_gateway.admission import Admission, AdmissionLimits, Lease, TenantShare, Ticket
from trio_gateway.contract import Rejection
from trio_gateway.errors import Problem, Refused
from trio_gateway.fleet import Fleet, Route
from trio_gateway.testing import WorkerSet, make_request, make_worker
from trio_gateway.units import MiB

NO_ROOM = Problem.of("engine_overloaded", "the engine has no room")


def limits(
    max_queued: int = 1024, max_queued_bytes: int = 256 * MiB, max_wait: float = 60.0
) -> AdmissionLimits:
    return AdmissionLimits(max_queued, max_queued_bytes, max_wait)


def one_slot(**options: Any) -> WorkerSet:
    return WorkerSet(make_worker(slots=1), **options)


def placed(ticket: Ticket) -> bool:
    return not ticket.waiting


async def taken(admission: Admission, **request: Any) -> Lease:
    """Enter and take the lease, which must be there."""
    with trio.fail_after(1):
        return await admission.enter(make_request(**request)).wait()


def refusal(admission: Admission, **request: Any) -> Problem:
    """Enter and answer the problem that it is refused with."""
    with pytest.raises(Refused) as refused:
        admission.enter(make_request(**request))
    return refused.value.problem


class Waiter:
    """A task that waits for a ticket; it keeps the lease that it gets."""

    def __init__(self, ticket: Ticket, nursery: trio.Nursery) -> None:
        self.ticket = ticket
        self.lease: Lease | None = None
        self.problem: Problem | None = None
        self.ended_at: float | None = None
        self.scope = trio.CancelScope()
        nursery.start_soon(self._wait)

    async def _wait(self) -> None:
        with self.scope:
            try:
                self.lease = await self.ticket.wait()
            except Refused as refused:
                self.problem = refused.problem
        self.ended_at = trio.current_time()

    @property
    def code(self) -> str | None:
        return None if self.problem is None else self.problem.code


def waiter(workers: WorkerSet, nursery: trio.Nursery, **request: Any) -> Waiter:
    return Waiter(workers.admission.enter(make_request(**request)), nursery)


def end_of(workers: WorkerSet) -> None:
    """Nothing may be left, and the equations hold."""
    assert workers.unbalanced() == []
    assert workers.left_over() == []


# Placing --------------------------------------------------------------------------------------------------


async def test_a_request_that_can_be_placed_takes_no_position(autojump_clock: MockClock) -> None:
    workers = one_slot(limits=limits(max_queued=0))
    ticket = workers.admission.enter(make_request())
    assert (ticket.waiting, ticket.place) == (False, None)
    counts = workers.admission.statistics()
    assert (counts.granted, counts.held, counts.queued) == (1, 1, 0)
    with await ticket.wait() as lease:
        assert lease.worker.id == "w1"
    end_of(workers)


async def test_with_no_queue_a_request_is_served_or_refused(autojump_clock: MockClock) -> None:
    workers = one_slot(limits=limits(max_queued=0))
    lease = await taken(workers.admission)
    assert refusal(workers.admission).code == "queue_full"
    assert workers.admission.statistics().queued == 0
    lease.release()
    with await taken(workers.admission):
        pass
    end_of(workers)


async def test_waiting_holds_no_slot(autojump_clock: MockClock) -> None:
    workers = one_slot()
    lease = await taken(workers.admission)
    ticket = workers.admission.enter(make_request(size=700))
    counts = workers.admission.statistics()
    assert (counts.granted, counts.held, counts.queued, counts.queued_bytes) == (1, 1, 1, 700)
    assert counts.queued_by_tenant == {"t1": 1}
    ticket.leave()
    lease.release()
    end_of(workers)


async def test_who_waits_is_placed_in_the_moment_in_which_a_slot_comes_free(nursery: trio.Nursery) -> None:
    workers = one_slot()
    lease = await taken(workers.admission)
    waiting = waiter(workers, nursery)
    await wait_all_tasks_blocked()
    assert waiting.lease is None
    lease.release()
    assert placed(waiting.ticket)  # before any task ran: nobody can come between
    assert workers.admission.statistics().held == 1
    await wait_all_tasks_blocked()
    assert waiting.lease is not None
    waiting.lease.release()
    end_of(workers)


async def test_inside_a_line_who_comes_first_is_served_first(nursery: trio.Nursery) -> None:
    workers = one_slot()
    lease = await taken(workers.admission)
    waiting = [waiter(workers, nursery) for _ in range(4)]
    assert [w.ticket.place for w in waiting] == [1, 2, 3, 4]
    for number, first in enumerate(waiting):
        lease.release()
        await wait_all_tasks_blocked()
        assert [w.lease is not None for w in waiting] == [n <= number for n in range(4)]
        assert [w.ticket.place for w in waiting[number + 1 :]] == list(range(1, 4 - number))
        assert first.lease is not None
        lease = first.lease
    lease.release()
    end_of(workers)


async def test_nobody_jumps_over_a_line_of_the_same_tenant_and_model(nursery: trio.Nursery) -> None:
    workers = WorkerSet(make_worker(kind="llamacpp", slots=2))
    lease = await taken(workers.admission)
    wide = waiter(workers, nursery, n=2)
    narrow = waiter(workers, nursery)  # would fit, but is behind
    await wait_all_tasks_blocked()
    assert (wide.lease, narrow.lease) == (None, None)
    lease.release()
    await wait_all_tasks_blocked()
    assert wide.lease is not None
    assert narrow.lease is None
    wide.lease.release()
    await wait_all_tasks_blocked()
    assert narrow.lease is not None
    narrow.lease.release()
    end_of(workers)


@pytest.mark.parametrize("way", ["leaves", "is cancelled", "times out"])
async def test_when_the_first_of_a_line_goes_whoever_it_held_up_is_placed(
    way: str, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = WorkerSet(make_worker(kind="llamacpp", slots=2))
    lease = await taken(workers.admission)
    wide = waiter(workers, nursery, n=2, seconds=5)
    narrow = waiter(workers, nursery)
    await wait_all_tasks_blocked()
    assert narrow.lease is None
    match way:
        case "leaves":
            wide.ticket.leave()
        case "is cancelled":
            wide.scope.cancel()
        case "times out":
            await trio.sleep(5)
    await wait_all_tasks_blocked()
    assert narrow.lease is not None
    narrow.lease.release()
    lease.release()
    wide.scope.cancel()
    await wait_all_tasks_blocked()
    end_of(workers)


async def test_a_full_model_does_not_block_another(nursery: trio.Nursery) -> None:
    workers = WorkerSet(
        make_worker("w1", slots=1), make_worker("w2", slots=1), models={"m1": ["w1"], "m2": ["w2"]}
    )
    first = await taken(workers.admission, model="m1")
    stuck = waiter(workers, nursery, model="m1")
    other = await taken(workers.admission, model="m2")
    behind = waiter(workers, nursery, model="m2")
    assert (stuck.ticket.place, behind.ticket.place) == (1, 1)
    other.release()
    await wait_all_tasks_blocked()
    assert behind.lease is not None
    assert stuck.lease is None
    behind.lease.release()
    first.release()
    await wait_all_tasks_blocked()
    assert stuck.lease is not None
    stuck.lease.release()
    end_of(workers)


async def test_requests_that_need_several_slots_take_and_return_as_many(autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(kind="llamacpp", slots=4))
    book = workers.fleet.books["w1"]
    with await taken(workers.admission, n=3):
        assert (book.held, book.free) == (3, 1)
        wide, narrow = (
            workers.admission.enter(make_request(n=2)),
            workers.admission.enter(make_request(tenant="t2", n=1)),
        )
        assert (placed(wide), placed(narrow)) == (False, True)
        wide.leave()
        narrow.leave()
    assert refusal(workers.admission, n=5).code == "invalid_value"
    end_of(workers)


async def test_a_model_without_workers_is_refused_at_once(autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(), models={"m1": ["w1"], "m2": []})
    problem = refusal(workers.admission, model="m2")
    assert (problem.code, problem.status) == ("no_worker", 503)
    assert (problem.retry_after or 0) >= 1
    end_of(workers)


# Tenants --------------------------------------------------------------------------------------------------


async def test_a_tenant_is_placed_only_below_its_own_concurrency(nursery: trio.Nursery) -> None:
    workers = WorkerSet(make_worker(slots=8), shares={"small": TenantShare(2, 64)})
    leases = [await taken(workers.admission, tenant="small") for _ in range(2)]
    waiting = waiter(workers, nursery, tenant="small")
    with await taken(workers.admission, tenant="big"):
        pass  # others pass by, and their leaving gives nothing to the small one
    await wait_all_tasks_blocked()
    assert waiting.lease is None
    leases.pop().release()
    await wait_all_tasks_blocked()
    assert waiting.lease is not None
    for lease in (*leases, waiting.lease):
        lease.release()
    end_of(workers)


async def test_concurrency_counts_exchanges_not_slots(autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(kind="llamacpp", slots=8), share=TenantShare(2, 0))
    with await taken(workers.admission, n=3), await taken(workers.admission, n=3):
        assert refusal(workers.admission, n=1).code == "rate_limit_exceeded"
    end_of(workers)


async def test_a_draining_lease_counts_against_the_worker_and_not_the_tenant(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = WorkerSet(
        make_worker("w1", slots=1, cancel_grace=2.0), make_worker("w2", slots=1), share=TenantShare(1, 64)
    )
    nursery.start_soon(workers.run)
    lease = await taken(workers.admission)
    lease.engine_started("attempt")
    waiting = waiter(workers, nursery)
    with lease:
        pass
    counts = workers.admission.statistics()
    assert (counts.granted, counts.held, counts.draining, counts.returned) == (2, 1, 1, 0)
    await wait_all_tasks_blocked()
    assert waiting.lease is not None
    assert waiting.lease.worker.id == "w2"
    third = waiter(workers, nursery, tenant="t2")
    await trio.sleep(1.9)
    assert third.lease is None
    await trio.sleep(0.2)
    assert third.lease is not None
    assert third.lease.worker.id == "w1"
    third.lease.release()
    waiting.lease.release()
    end_of(workers)


async def test_a_lease_is_returned_at_once_when_the_engine_is_done(autojump_clock: MockClock) -> None:
    workers = one_slot()
    with await taken(workers.admission) as lease:
        lease.engine_started("attempt")
        lease.engine_done()
    assert workers.admission.statistics().draining == 0
    end_of(workers)


async def test_a_second_release_is_counted_and_changes_nothing(autojump_clock: MockClock) -> None:
    workers = one_slot()
    lease = await taken(workers.admission)
    lease.release()
    lease.release()
    lease.drain()
    counts = workers.admission.statistics()
    assert (counts.granted, counts.held, counts.draining, counts.returned) == (1, 0, 0, 1)
    assert counts.double_releases == 1
    assert workers.fleet.books["w1"].free == 1


async def test_a_draining_lease_that_is_released_early_is_returned_once(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = one_slot()
    nursery.start_soon(workers.run)
    lease = await taken(workers.admission)
    lease.drain()
    lease.release()
    counts = workers.admission.statistics()
    assert (counts.draining, counts.returned) == (0, 1)
    await trio.sleep(5)  # the grace time comes all the same, and does nothing
    assert workers.fleet.books["w1"].free == 1
    counts = workers.admission.statistics()
    assert (counts.draining, counts.returned) == (0, 1)


# Bounds ---------------------------------------------------------------------------------------------------


async def test_the_queue_is_bounded_in_requests_for_each_tenant_and_for_all(
    autojump_clock: MockClock,
) -> None:
    workers = one_slot(limits=limits(max_queued=3), share=TenantShare(None, 2))
    lease = await taken(workers.admission)
    tickets = [workers.admission.enter(make_request(tenant=name)) for name in ("a", "a", "b")]
    for tenant in ("a", "b", "c"):  # its own bound, that of all, that of all
        problem = refusal(workers.admission, tenant=tenant)
        assert (problem.code, problem.status) == ("queue_full", 429)
        assert (problem.retry_after or 0) >= 1
        assert workers.admission.statistics().queued == 3
    tickets.pop().leave()
    assert refusal(workers.admission, tenant="a").code == "queue_full"
    tickets.append(workers.admission.enter(make_request(tenant="c")))
    assert workers.admission.statistics().queued_by_tenant == {"a": 2, "c": 1}
    for ticket in tickets:
        ticket.leave()
    lease.release()
    end_of(workers)


async def test_a_tenant_at_its_own_concurrency_is_told_so(autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(slots=8), share=TenantShare(1, 0))
    with await taken(workers.admission):
        problem = refusal(workers.admission)
    assert (problem.code, problem.status, problem.type) == ("rate_limit_exceeded", 429, "rate_limit_error")


async def test_the_queue_is_bounded_in_bytes(autojump_clock: MockClock) -> None:
    workers = one_slot(limits=limits(max_queued_bytes=1000))
    lease = await taken(workers.admission, size=100_000)  # placed at once: it does not count
    one = workers.admission.enter(make_request(size=600))
    two = workers.admission.enter(make_request(size=400))
    assert refusal(workers.admission, size=1).code == "queue_full"
    two.leave()
    assert refusal(workers.admission, size=401).code == "queue_full"
    three = workers.admission.enter(make_request(size=400))
    assert workers.admission.statistics().queued_bytes == 1000
    one.leave()
    three.leave()
    lease.release()
    end_of(workers)


# Time -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "max_wait", "code", "status", "at"),
    [(600.0, 7.0, "queue_timeout", 503, 7.0), (4.0, 7.0, "deadline_exceeded", 504, 4.0)],
)
async def test_an_expired_waiter_leaves_at_once_with_its_reason(
    seconds: float,
    max_wait: float,
    code: str,
    status: int,
    at: float,
    autojump_clock: MockClock,
    nursery: trio.Nursery,
) -> None:
    workers = one_slot(limits=limits(max_wait=max_wait))
    lease = await taken(workers.admission)
    began = trio.current_time()
    expired = waiter(workers, nursery, seconds=seconds)
    await trio.sleep(at + 1)
    assert expired.problem is not None
    assert (expired.code, expired.problem.status) == (code, status)
    assert expired.ended_at == began + at
    assert (expired.problem.retry_after is not None) is (status == 503)
    assert workers.admission.statistics().queued == 0
    lease.release()
    end_of(workers)


async def test_a_placement_in_the_last_moment_counts(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = one_slot(limits=limits(max_wait=5))
    lease = await taken(workers.admission)
    ticket = workers.admission.enter(make_request())
    await trio.sleep(4)
    lease.release()
    await trio.sleep(4)  # it was placed in time; nobody looked
    with await ticket.wait():
        assert workers.admission.statistics().held == 1
    end_of(workers)


# Leaving --------------------------------------------------------------------------------------------------


async def test_leaving_gives_the_position_back_and_is_idempotent(autojump_clock: MockClock) -> None:
    workers = one_slot()
    lease = await taken(workers.admission)
    one, two = workers.admission.enter(make_request()), workers.admission.enter(make_request())
    one.leave()
    one.leave()
    assert two.place == 1
    assert workers.admission.statistics().queued == 1
    two.leave()
    lease.release()
    end_of(workers)


async def test_leaving_gives_an_unclaimed_placement_back(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = one_slot()
    ticket = workers.admission.enter(make_request())
    second = waiter(workers, nursery)
    ticket.leave()
    ticket.leave()
    await wait_all_tasks_blocked()
    assert second.lease is not None
    second.lease.release()
    end_of(workers)


async def test_a_waiter_that_is_cancelled_when_it_was_just_placed_gives_the_slot_back(
    nursery: trio.Nursery,
) -> None:
    workers = one_slot()
    lease = await taken(workers.admission)
    waiting = waiter(workers, nursery)
    await wait_all_tasks_blocked()
    waiting.scope.cancel()
    lease.release()
    assert workers.admission.statistics().held == 1
    await wait_all_tasks_blocked()
    assert waiting.lease is None
    end_of(workers)


# Sent back ------------------------------------------------------------------------------------------------


async def test_one_that_is_sent_back_has_its_place_in_front_again(nursery: trio.Nursery) -> None:
    workers = one_slot(limits=limits(max_queued=2))
    first = workers.admission.enter(make_request())
    lease = await first.wait()
    others = [waiter(workers, nursery) for _ in range(2)]
    assert first.back(without=None, last=NO_ROOM)  # over the bound of two
    assert (first.place, [w.ticket.place for w in others]) == (1, [2, 3])
    assert workers.admission.statistics().queued == 3
    lease.release()
    again = Waiter(first, nursery)
    await wait_all_tasks_blocked()
    assert again.lease is not None
    assert [w.lease for w in others] == [None, None]
    again.lease.release()
    for other in others:
        await wait_all_tasks_blocked()
        assert other.lease is not None
        other.lease.release()
    end_of(workers)


async def test_one_that_is_sent_back_keeps_its_clock(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = one_slot(limits=limits(max_wait=10))
    began = trio.current_time()
    ticket = workers.admission.enter(make_request())
    lease = await ticket.wait()
    await trio.sleep(6)
    assert ticket.back(without=None, last=NO_ROOM)
    waiting = Waiter(ticket, nursery)
    other = workers.admission.enter(make_request())
    lease.release()
    await wait_all_tasks_blocked()
    assert waiting.lease is not None
    assert ticket.back(without=None, last=NO_ROOM)
    again = Waiter(ticket, nursery)
    other.leave()
    await trio.sleep(10)
    assert again.ended_at == began + 10
    assert again.code == "engine_overloaded"  # the last class met, not the timeout
    assert (again.problem.retry_after or 0) >= 1 if again.problem else False
    waiting.lease.release()
    end_of(workers)


async def test_a_worker_that_failed_the_exchange_is_not_tried_again(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = WorkerSet(make_worker("w1", slots=1), make_worker("w2", slots=1))
    blocker = workers.admission.enter(make_request(tenant="other"))
    on_w1 = await blocker.wait()
    ticket = workers.admission.enter(make_request())
    on_w2 = await ticket.wait()
    assert (on_w1.worker.id, on_w2.worker.id) == ("w1", "w2")
    with on_w2:
        assert ticket.back(without=on_w2.worker, last=NO_ROOM)
    again = Waiter(ticket, nursery)
    await wait_all_tasks_blocked()
    assert again.lease is None  # w2 is free, and not for this one
    assert not placed(ticket)
    with await taken(workers.admission, tenant="third") as lease:
        assert lease.worker.id == "w2"
    on_w1.release()
    await wait_all_tasks_blocked()
    assert again.lease is not None
    assert again.lease.worker.id == "w1"
    with again.lease:
        assert not ticket.back(without=again.lease.worker, last=NO_ROOM)  # none is left
        assert (ticket.waiting, workers.admission.statistics().queued) == (False, 0)
    end_of(workers)


async def test_one_that_waits_for_another_worker_does_not_hold_up_those_behind_it(
    nursery: trio.Nursery,
) -> None:
    workers = WorkerSet(make_worker("w1", slots=1), make_worker("w2", slots=1))
    on_w1 = await taken(workers.admission, tenant="other")
    ticket = workers.admission.enter(make_request())
    on_w2 = await ticket.wait()
    behind = waiter(workers, nursery)
    assert ticket.back(without=on_w2.worker, last=NO_ROOM)
    on_w2.release()
    await wait_all_tasks_blocked()
    assert behind.lease is not None
    assert behind.lease.worker.id == "w2"
    assert ticket.place == 1
    ticket.leave()
    behind.lease.release()
    on_w1.release()
    end_of(workers)


async def test_one_for_whom_no_other_worker_is_large_enough_is_not_sent_back(
    autojump_clock: MockClock,
) -> None:
    workers = WorkerSet(
        make_worker("large", kind="llamacpp", slots=4), make_worker("small", kind="llamacpp", slots=1)
    )
    ticket = workers.admission.enter(make_request(n=2))
    with await ticket.wait() as lease:
        assert not ticket.back(without=lease.worker, last=NO_ROOM)
    end_of(workers)


# Outages --------------------------------------------------------------------------------------------------


def reject(workers: WorkerSet, lease: Lease, retry_after: float | None, *, status: int = 503) -> None:
    """The lease's worker says that it has no room, to an attempt that began just now."""
    rejection = Rejection("capacity", status, retry_after, trio.current_time())
    workers.fleet.rejected(lease.worker, make_request(), rejection)


async def test_one_that_is_sent_back_from_the_only_worker_tries_again_when_its_outage_is_over(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = one_slot()
    nursery.start_soon(workers.run)
    ticket = workers.admission.enter(make_request())
    with await ticket.wait() as lease:
        reject(workers, lease, 3.0)
        assert ticket.back(without=None, last=NO_ROOM)
    began = trio.current_time()
    again = Waiter(ticket, nursery)
    await trio.sleep(10)
    assert again.lease is not None
    assert again.ended_at == began + 3
    again.lease.release()
    end_of(workers)


class SlowMachine(trio.abc.Clock):
    """A clock that moves whenever somebody looks, as on a machine that takes its time for each step."""

    def __init__(self) -> None:
        self._time = 0.0

    def start_clock(self) -> None:
        """Nothing has to begin."""

    def current_time(self) -> float:
        self._time += 0.001
        return self._time

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return 0.0


@pytest.mark.parametrize("half_ms", range(1, 80))
def test_an_outage_that_ends_while_somebody_looks_who_can_be_placed_is_not_missed(half_ms: int) -> None:
    async def wait_through_it() -> None:
        workers = one_slot()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.run)
            ticket = workers.admission.enter(make_request())
            with await ticket.wait() as lease:
                reject(workers, lease, half_ms / 2000)
                assert ticket.back(without=None, last=NO_ROOM)
            with trio.fail_after(5):
                (await ticket.wait()).release()
            end_of(workers)
            nursery.cancel_scope.cancel()

    trio.run(wait_through_it, clock=SlowMachine())


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limit_error"), (503, "overloaded_error")])
async def test_whoever_can_not_be_tried_in_time_is_told_so_at_once_with_the_class_and_time_of_the_worker(
    status: int, kind: str, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = one_slot(limits=limits(max_wait=60))
    with await taken(workers.admission) as lease:
        reject(workers, lease, 20.0, status=status)
    hopeless = waiter(workers, nursery, seconds=15)
    patient = waiter(workers, nursery, seconds=25)
    began = trio.current_time()
    await wait_all_tasks_blocked()
    assert (hopeless.code, hopeless.ended_at) == ("engine_overloaded", began)
    assert hopeless.problem is not None
    assert (hopeless.problem.status, hopeless.problem.type) == (status, kind)
    assert hopeless.problem.retry_after == 20
    assert patient.ended_at is None
    patient.ticket.leave()
    patient.scope.cancel()
    await wait_all_tasks_blocked()
    end_of(workers)


async def test_those_who_wait_already_are_told_when_an_outage_makes_their_wait_hopeless(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = one_slot(limits=limits(max_wait=60))
    lease = await taken(workers.admission)
    patient = waiter(workers, nursery, seconds=50)
    hopeless = [waiter(workers, nursery, seconds=15) for _ in range(3)]  # also behind one who can wait
    await wait_all_tasks_blocked()
    with lease:
        reject(workers, lease, 20.0)
    await wait_all_tasks_blocked()
    assert [w.code for w in hopeless] == ["engine_overloaded"] * 3
    assert (patient.problem, patient.lease) == (None, None)
    patient.scope.cancel()
    await wait_all_tasks_blocked()
    end_of(workers)


async def test_a_worker_that_lacks_one_name_of_a_model_serves_those_who_wait_for_its_other_name(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = WorkerSet(make_worker("w1", slots=1), make_worker("w2", slots=1))
    workers.fleet.settings = replace(workers.fleet.settings, probed=True)  # else such a word is not kept
    leases = [await taken(workers.admission, upstream_model="old") for _ in range(2)]
    old = waiter(workers, nursery, tenant="a", upstream_model="old")
    # The file was read again meanwhile: engines know the model by another name now.
    new = waiter(workers, nursery, tenant="b", upstream_model="new")
    await wait_all_tasks_blocked()
    with leases[1] as lease:
        lacking = Rejection("model_not_loaded", 404, None, trio.current_time())
        workers.fleet.rejected(lease.worker, make_request(upstream_model="old"), lacking)
    await wait_all_tasks_blocked()
    assert (old.lease, new.lease and new.lease.worker.id) == (None, "w2")
    leases[0].release()
    await wait_all_tasks_blocked()
    assert old.lease is not None
    for each in (old, new):
        assert each.lease is not None
        each.lease.release()
    end_of(workers)


async def test_after_an_outage_one_exchange_tries_first_and_the_others_follow_on_its_output(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = WorkerSet(make_worker(slots=4))
    nursery.start_soon(workers.run)
    with await taken(workers.admission) as lease:
        reject(workers, lease, 2.0)
    waiting = [waiter(workers, nursery) for _ in range(3)]
    await trio.sleep(2.1)
    assert [w.lease is not None for w in waiting] == [True, False, False]
    assert waiting[0].lease is not None
    workers.fleet.output(waiting[0].lease.worker, make_request())
    await wait_all_tasks_blocked()
    assert [w.lease is not None for w in waiting] == [True, True, True]
    for each in waiting:
        assert each.lease is not None
        each.lease.release()
    end_of(workers)


async def test_a_trial_whose_placement_nobody_takes_lets_the_next_one_try(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = WorkerSet(make_worker(slots=4))
    nursery.start_soon(workers.run)
    with await taken(workers.admission) as lease:
        reject(workers, lease, 2.0)
    first, second = waiter(workers, nursery), waiter(workers, nursery)
    await trio.sleep(1)
    lost = workers.admission.enter(make_request(tenant="t2"))
    first.ticket.leave()
    first.scope.cancel()
    second.ticket.leave()
    second.scope.cancel()
    await trio.sleep(1.1)
    assert placed(lost)  # it is the trial
    next_one = waiter(workers, nursery)
    await wait_all_tasks_blocked()
    assert next_one.lease is None
    lost.leave()
    await wait_all_tasks_blocked()
    assert next_one.lease is not None
    next_one.lease.release()
    end_of(workers)


async def test_an_outage_of_one_model_leaves_the_others_of_its_worker_alone(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = WorkerSet(make_worker(slots=2), models=["m1", "m2"])
    with await taken(workers.admission, model="m1") as lease:
        reject(workers, lease, 20.0)
    with await taken(workers.admission, model="m2") as other:
        assert other.worker.id == "w1"
    end_of(workers)


# Retry-After ----------------------------------------------------------------------------------------------


async def test_final_refusals_say_when_to_come_back_and_the_longest_outage_wins(
    autojump_clock: MockClock,
) -> None:
    workers = WorkerSet(make_worker("w1", slots=1), make_worker("w2", slots=1))
    admission = workers.admission
    assert admission.with_retry_after(NO_ROOM, "m1").retry_after == 1
    one, two = await taken(admission), await taken(admission)
    reject(workers, one, 30.0)
    reject(workers, two, 12.0)
    await trio.sleep(2)
    assert admission.with_retry_after(NO_ROOM, "m1").retry_after == 28
    kept: Mapping[str, Problem] = {
        code: Problem.of(code, "as it is")
        for code in ("engine_failed", "operator_cancelled", "invalid_value")
    }
    for problem in kept.values():
        assert admission.with_retry_after(problem, "m1") is problem
    one.release()
    two.release()
    end_of(workers)


# Closing --------------------------------------------------------------------------------------------------


async def test_closing_refuses_all_who_wait_or_come_and_leaves_those_who_run(nursery: trio.Nursery) -> None:
    workers = one_slot()
    lease = await taken(workers.admission)
    waiting = [waiter(workers, nursery) for _ in range(3)]
    draining = Problem.of("gateway_draining", "the gateway is shutting down", retry_after=1.0)
    workers.admission.close(draining)
    assert workers.admission.statistics().queued == 0
    await wait_all_tasks_blocked()
    assert [w.problem for w in waiting] == [draining] * 3
    assert refusal(workers.admission) == draining
    assert workers.admission.statistics().held == 1
    lease.release()
    end_of(workers)


# Tiers, tenants' shares and predictions ---------------------------------------------------------------------


async def test_who_would_wait_beyond_its_deadline_is_refused_on_arrival(autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(slots=1))
    for _ in range(21):  # slots come free every second
        with await workers.admission.enter(make_request()).wait():
            await trio.sleep(1)
    with await workers.admission.enter(make_request()).wait():
        patient = workers.admission.enter(make_request(seconds=60))
        with pytest.raises(Refused) as refused:
            workers.admission.enter(make_request(seconds=1.5))
        assert (refused.value.problem.code, refused.value.problem.status) == ("wait_exceeds_deadline", 429)
        assert (refused.value.problem.retry_after or 0) >= 1
        patient.leave()


async def test_a_flood_has_nobody_refused_who_comes_before_it_in_the_order(autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(slots=1))
    for _ in range(21):  # slots come free every second
        with await workers.admission.enter(make_request()).wait():
            await trio.sleep(1)
    with await workers.admission.enter(make_request()).wait():
        flood = [workers.admission.enter(make_request(seconds=60)) for _ in range(20)]
        assert refusal(workers.admission, seconds=5).code == "wait_exceeds_deadline"
        assert (
            refusal(workers.admission, seconds=5, tenant="t2", tier="batch").code == "wait_exceeds_deadline"
        )
        in_time = [
            workers.admission.enter(make_request(seconds=5, tier="interactive")),
            workers.admission.enter(make_request(seconds=5, tenant="t2")),
        ]
        assert all(ticket.waiting for ticket in in_time)
        for ticket in (*flood, *in_time):
            ticket.leave()
    end_of(workers)


async def test_interactive_goes_first_and_batch_never_takes_all_slots(autojump_clock: MockClock) -> None:
    workers = WorkerSet(make_worker(slots=5))
    batch = [workers.admission.enter(make_request(tier="batch")) for _ in range(6)]
    assert [ticket.waiting for ticket in batch] == [False] * 4 + [True] * 2  # 0.8 of five slots
    interactive = [workers.admission.enter(make_request(tier="interactive")) for _ in range(2)]
    standard = workers.admission.enter(make_request(tier="standard"))
    assert [ticket.waiting for ticket in (*interactive, standard)] == [False, True, True]
    for expected in (interactive[1], standard, batch[4]):
        assert expected.waiting
        (await batch.pop(0).wait()).release()
        assert not expected.waiting
    for ticket in (*batch, *interactive, standard):
        ticket.leave()


async def test_slots_go_to_the_tenant_that_was_served_least_for_its_weight(autojump_clock: MockClock) -> None:
    shares = {"light": TenantShare(None, 64, 1.0), "heavy": TenantShare(None, 64, 3.0)}
    workers = WorkerSet(make_worker(slots=1), shares=shares)
    served: Counter[str] = Counter()
    tickets = {
        workers.admission.enter(make_request(tenant=tenant, size=400, tokens=100)): tenant
        for _ in range(40)
        for tenant in shares
    }
    for _ in range(40):
        ticket = next(ticket for ticket in tickets if not ticket.waiting)
        served[tickets.pop(ticket)] += 1
        lease = await ticket.wait()
        lease.release()
        ticket.served(100, 100)
    assert served["heavy"] == pytest.approx(3 * served["light"], abs=4)
    for ticket in tickets:
        ticket.leave()


async def test_a_tenant_at_its_own_bound_holds_nobody_up_and_comes_again(autojump_clock: MockClock) -> None:
    shares = {"one": TenantShare(1, 64), "many": TenantShare(None, 64)}
    workers = WorkerSet(make_worker(slots=2), shares=shares)
    first, second = (workers.admission.enter(make_request(tenant="one")) for _ in range(2))
    other = workers.admission.enter(make_request(tenant="many"))
    assert [ticket.waiting for ticket in (first, second, other)] == [False, True, False]
    third = workers.admission.enter(make_request(tenant="many"))
    (await other.wait()).release()
    assert (second.waiting, third.waiting) == (True, False)
    (await first.wait()).release()
    assert not second.waiting
    for ticket in (second, third):
        ticket.leave()


async def test_tiers_come_in_order_after_workers_joined_two_pools(autojump_clock: MockClock) -> None:
    routes = (Route("A", "A", ("a", "both")), Route("B", "B", ("b", "both")))
    fleet = Fleet([make_worker("b", slots=1), make_worker("a", slots=1)], routes, trio.current_time)
    shares = {"tenant": TenantShare(None, 100)}
    admission = Admission(fleet, limits(), shares, lambda *_: None, lambda: 0.5)

    def enter(tier: str) -> Ticket:
        return admission.enter(make_request(model="B", tenant="tenant", tier=tier))

    lease = await enter("standard").wait()
    batch = [enter("batch") for _ in range(2)]
    fleet.add(make_worker("both", slots=1, labels=frozenset({"both"})))  # places one; the pools are one
    assert [ticket.waiting for ticket in batch] == [False, True]
    interactive = enter("interactive")
    assert interactive.pool == batch[1].pool == "A"
    lease.release()
    assert [ticket.waiting for ticket in (interactive, batch[1])] == [False, True]


# Other shares -----------------------------------------------------------------------------------------------


async def test_a_higher_bound_lets_those_in_who_wait_for_it(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = WorkerSet(make_worker(slots=4), shares={"t1": TenantShare(1, 64)})
    admission = workers.admission
    first = await taken(admission, tenant="t1")
    waiting = [waiter(workers, nursery, tenant="t1") for _ in range(3)]
    await wait_all_tasks_blocked()
    assert [each.lease for each in waiting] == [None, None, None]
    admission.reshare({"t1": TenantShare(3, 64)})
    await wait_all_tasks_blocked()
    assert [each.lease is not None for each in waiting] == [True, True, False]
    admission.reshare({"t1": TenantShare(1, 64)})
    first.release()
    await wait_all_tasks_blocked()
    assert waiting[2].lease is None
    for each in waiting[:2]:
        assert each.lease is not None
        each.lease.release()
    await wait_all_tasks_blocked()
    assert waiting[2].lease is not None
    waiting[2].lease.release()
    end_of(workers)


async def test_a_tenant_that_is_gone_keeps_its_bounds_until_its_requests_are(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    workers = WorkerSet(make_worker(slots=4), shares={"t1": TenantShare(1, 2), "t2": TenantShare(None, 64)})
    admission = workers.admission
    running = await taken(admission, tenant="t1")
    waiting = [waiter(workers, nursery, tenant="t1") for _ in range(2)]
    await wait_all_tasks_blocked()
    admission.reshare({"t2": TenantShare(None, 64), "t3": TenantShare(1, 0)})
    assert refusal(admission, tenant="t1").code == "rate_limit_exceeded"  # its key was read just before
    newcomer = await taken(admission, tenant="t3")
    running.release()
    for each in waiting:
        await wait_all_tasks_blocked()
        assert each.lease is not None
        each.ticket.served(3, 5)
        each.lease.release()
    newcomer.release()
    end_of(workers)
