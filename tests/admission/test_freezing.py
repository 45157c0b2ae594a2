"""Freezing tenants, other limits while requests wait, and why one waits."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_gateway.admission import REASONS, AdmissionLimits, Lease, TenantShare, Ticket
from trio_gateway.admission._scheduler import Group
from trio_gateway.contract import InternalRequest, Rejection, Worker
from trio_gateway.errors import Refused
from trio_gateway.testing import WorkerSet, make_request, make_worker
from trio_gateway.units import MiB


def limits(max_queued: int = 1024, promote_after: float = 30.0, batch: float = 0.8) -> AdmissionLimits:
    return AdmissionLimits(max_queued, 256 * MiB, 60.0, promote_after, {"batch": batch})


def workers(slots: int = 1, share: TenantShare | None = None) -> WorkerSet:
    return WorkerSet(make_worker(slots=slots), limits=limits(), share=share)


async def lease_of(ticket: Ticket) -> Lease:
    with trio.fail_after(1):
        return await ticket.wait()


# Freezing -------------------------------------------------------------------------------------------------


async def test_nothing_of_a_frozen_tenant_is_placed_though_there_is_room(autojump_clock: MockClock) -> None:
    here = workers(4)
    assert here.admission.freeze("a")
    assert not here.admission.freeze("a")
    ticket = here.admission.enter(make_request(tenant="a"))
    assert (ticket.waiting, ticket.why, ticket.eta, ticket.place) == (True, "tenant_frozen", None, 1)
    assert here.admission.frozen == {"a"}
    other = here.admission.enter(make_request(tenant="b"))
    assert not other.waiting
    (await lease_of(other)).release()
    assert here.admission.thaw("a")
    assert not here.admission.thaw("a")
    assert not ticket.waiting  # in this moment, before any task ran
    (await lease_of(ticket)).release()
    assert here.left_over() == []


async def test_what_runs_goes_on_and_who_waits_is_in_nobodys_way(autojump_clock: MockClock) -> None:
    here = workers(1)
    running = await lease_of(here.admission.enter(make_request(tenant="a")))
    frozen = [here.admission.enter(make_request(tenant="a")) for _ in range(3)]
    other = here.admission.enter(make_request(tenant="b"))
    assert other.place == 4
    here.admission.freeze("a")
    assert [ticket.place for ticket in frozen] == [1, 2, 3]
    assert other.place == 1
    running.release()
    assert not other.waiting
    assert [ticket.waiting for ticket in frozen] == [True] * 3
    (await lease_of(other)).release()
    for ticket in frozen:
        ticket.leave()
    assert here.left_over() == []


async def test_a_frozen_waiter_is_refused_when_its_time_is_up(autojump_clock: MockClock) -> None:
    here = workers(1)
    here.admission.freeze("a")
    ticket = here.admission.enter(make_request(tenant="a"))
    with pytest.raises(Refused) as refused:
        await ticket.wait()
    assert (trio.current_time(), refused.value.problem.code) == (60.0, "queue_timeout")
    assert here.left_over() == []


async def test_the_bounds_of_a_frozen_tenant_stay(autojump_clock: MockClock) -> None:
    here = workers(1, TenantShare(None, 2))
    here.admission.freeze("a")
    tickets = [here.admission.enter(make_request(tenant="a")) for _ in range(2)]
    with pytest.raises(Refused) as refused:
        here.admission.enter(make_request(tenant="a"))
    assert refused.value.problem.code == "queue_full"
    for ticket in tickets:
        ticket.leave()


async def test_a_frozen_crowd_makes_nobody_elses_wait_look_too_long(autojump_clock: MockClock) -> None:
    here = workers(1)
    for _ in range(30):  # a lease lasts a second, and enough came back to predict by
        lease = await lease_of(here.admission.enter(make_request(tenant="c")))
        await trio.sleep(1)
        lease.release()
    lease = await lease_of(here.admission.enter(make_request(tenant="c")))
    here.admission.freeze("a")
    crowd = [here.admission.enter(make_request(tenant="a", seconds=999)) for _ in range(60)]
    ticket = here.admission.enter(make_request(tenant="b", seconds=5))
    assert ticket.waiting
    lease.release()
    (await lease_of(ticket)).release()
    for each in crowd:
        each.leave()


async def test_other_shares_do_not_thaw_and_an_end_does_not_either(autojump_clock: MockClock) -> None:
    here = workers(2)
    running = await lease_of(here.admission.enter(make_request(tenant="a")))
    here.admission.freeze("a")
    ticket = here.admission.enter(make_request(tenant="a"))
    here.admission.reshare({"a": TenantShare(9, 9, 2.0)})
    running.release()
    assert ticket.waiting
    here.admission.thaw("a")
    (await lease_of(ticket)).release()


def test_one_that_was_frozen_saved_nothing_up_whoever_waits_when_it_is_thawed() -> None:
    class One:
        tier, pool, model, size = 0, "m1", "m1", 1

        def __init__(self, tenant: str, number: int) -> None:
            self.tenant, self.number = tenant, number

    group: Group[One] = Group(lambda tenant: 1.0)
    group.add(One("frozen", 1))
    group.set_aside("frozen")
    for _ in range(10):
        group.settle("b", group.charge("b", "m1", 100), 100)
    group.take_back("frozen", idle=True)
    assert group.settled("frozen") == 1000
    group.take_back("frozen", idle=True)  # it is back: nothing more
    group.add(One("b", 2))
    assert [line[0].tenant for line in group.lines()] == ["b", "frozen"]


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from("abc"), st.sampled_from(["m1", "m2"])),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("freeze"), st.sampled_from("abc")),
        st.tuples(st.just("thaw"), st.sampled_from("abc")),
        st.tuples(st.just("drain"), st.integers(0, 1)),
        st.tuples(st.just("resume"), st.integers(0, 1)),
    ),
    max_size=60,
)


@given(OPS)
@settings(max_examples=60, deadline=None)
def test_whatever_is_frozen_and_thawed_room_goes_to_whoever_may_have_it(
    ops: list[tuple[object, ...]],
) -> None:
    """Nothing of a frozen tenant is placed, and no room is left while one waits who is not held back."""

    async def story() -> None:  # noqa: ASYNC124  (the parts look at Trio's clock)
        here = WorkerSet(
            make_worker("w1", slots=2),
            make_worker("w2", slots=1),
            models=("m1", "m2"),
            share=TenantShare(2, 99),
        )
        admission, tickets, leases = here.admission, list[Ticket](), list[Lease]()

        def collect() -> None:
            for ticket in [each for each in tickets if not each.waiting]:
                tickets.remove(ticket)
                if ticket._granted is not None:
                    if ticket.tenant in admission.frozen:
                        raise AssertionError("placed though frozen")
                    leases.append(ticket._granted)
                    ticket._granted = None

        for op in ops:
            match op:
                case "enter", str(tenant), str(model):
                    try:
                        tickets.append(admission.enter(make_request(model, tenant=tenant)))
                    except Refused:
                        assert not here.fleet.ready()
                case "release", int(index) if leases:
                    leases.pop(index % len(leases)).release()
                case "leave", int(index) if tickets:
                    tickets.pop(index % len(tickets)).leave()
                case "freeze", str(tenant):
                    admission.freeze(tenant)
                case "thaw", str(tenant):
                    admission.thaw(tenant)
                case "drain", int(index):
                    here.fleet.touch(f"w{index + 1}", "drained")
                case "resume", int(index):
                    here.fleet.touch(f"w{index + 1}", "none")
            collect()
            assert here.unbalanced() == []
            free = sum(max(book.free, 0) for book in here.fleet.books.values() if book.placeable)
            running = Counter(lease._request.tenant for lease in leases)
            able = [t for t in tickets if t.tenant not in admission.frozen and running[t.tenant] < 2]
            assert not (free and able), (free, [ticket.why for ticket in able])
            assert all(ticket.why in REASONS for ticket in tickets)
            assert admission.running_by_tenant() == running
        for lease in leases:
            lease.release()
        for ticket in tickets:
            ticket.leave()
        assert here.left_over() == []

    trio.run(story)


# Why ------------------------------------------------------------------------------------------------------


async def test_why_one_waits_is_the_first_thing_that_keeps_it(autojump_clock: MockClock) -> None:
    here = WorkerSet(
        make_worker("w1", slots=2),
        models={"m1": ("w1",), "m2": ("w1",)},
        limits=limits(batch=0.5),
        shares={"bound": TenantShare(1, 9)},
    )
    admission = here.admission
    first = await lease_of(admission.enter(make_request(tenant="bound")))
    bound = admission.enter(make_request(tenant="bound"))
    batch = await lease_of(admission.enter(make_request(tenant="b", tier="batch")))
    more = admission.enter(make_request(tenant="b", tier="batch"))
    full = admission.enter(make_request(tenant="c"))
    behind = admission.enter(make_request(tenant="c"))
    waiting = (bound, more, full, behind)
    assert [ticket.why for ticket in waiting] == [
        "tenant_at_concurrency",
        "tier_share",
        "no_slot",
        "ahead_in_line",
    ]
    request = batch._request
    here.fleet.rejected(batch.worker, request, Rejection("capacity", 503, 20.0, trio.current_time()))
    assert full.why == "outage"
    for ticket in waiting:
        ticket.leave()
    assert full.why is None
    for lease in (first, batch):
        lease.release()


async def test_one_that_no_worker_can_come_for_is_told_so(autojump_clock: MockClock) -> None:
    here = workers(1)
    lease = await lease_of(here.admission.enter(make_request()))
    ticket = here.admission.enter(make_request())
    ticket.without = frozenset({"w1"})
    assert ticket.why == "model_without_worker"
    ticket.leave()
    lease.release()


async def test_what_nobody_can_tell_is_not_predicted(autojump_clock: MockClock) -> None:
    here = workers(1)
    lease = await lease_of(here.admission.enter(make_request()))
    ticket = here.admission.enter(make_request())
    await trio.sleep(9)
    assert ticket.eta == pytest.approx(10.0)  # the one before it is out for so long, and still is
    request = lease._request
    here.fleet.rejected(lease.worker, request, Rejection("capacity", 503, 20.0, trio.current_time()))
    assert ticket.eta == pytest.approx(20.0)  # it is not tried before
    ticket.without = frozenset({"w1"})
    assert ticket.eta is None
    (pool,) = here.admission.pools()
    assert pool.pace == pytest.approx(1 / 10)
    ticket.leave()
    lease.release()
    (pool,) = here.admission.pools()
    assert pool.pace is None


async def test_who_waits_for_its_own_tenant_is_not_told_the_pace_of_all(autojump_clock: MockClock) -> None:
    shares = {"bound": TenantShare(1, 9)}
    here = WorkerSet(make_worker(slots=10), limits=limits(), shares=shares)
    leases = [await lease_of(here.admission.enter(make_request(tenant="a"))) for _ in range(8)]
    leases.append(await lease_of(here.admission.enter(make_request(tenant="bound"))))
    bound = [here.admission.enter(make_request(tenant="bound")) for _ in range(3)]
    await trio.sleep(9)
    assert [ticket.eta for ticket in bound] == pytest.approx([10.0, 20.0, 30.0])
    for ticket in bound:
        ticket.leave()
    for lease in leases:
        lease.release()
    assert here.left_over() == []


# Workers that leave ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "drained"])
async def test_what_runs_at_a_worker_that_leaves_keeps_nobody_from_those_that_are_left(
    how: str, autojump_clock: MockClock
) -> None:
    here = WorkerSet(make_worker("w1", slots=2), make_worker("w2", slots=2), limits=limits())
    leases = [await lease_of(here.admission.enter(make_request())) for _ in range(4)]
    if how == "removed":
        here.fleet.remove("w1")
    else:
        here.fleet.touch("w1", "drained")
    for lease in leases:
        if lease.worker.id == "w2":
            lease.release()
    more = [here.admission.enter(make_request()) for _ in range(3)]
    assert [ticket.waiting for ticket in more] == [False, False, True]
    for ticket in more:
        ticket.leave()
    for lease in leases:
        if lease.worker.id == "w1":
            lease.release()
    assert here.left_over() == []


# Limits ---------------------------------------------------------------------------------------------------


async def test_a_lower_bound_refuses_who_comes_and_nobody_who_waits(autojump_clock: MockClock) -> None:
    here = workers(1)
    lease = await lease_of(here.admission.enter(make_request()))
    tickets = [here.admission.enter(make_request()) for _ in range(3)]
    here.admission.relimit(limits(max_queued=1))
    with pytest.raises(Refused):
        here.admission.enter(make_request())
    assert [ticket.waiting for ticket in tickets] == [True] * 3
    for ticket in tickets:
        lease.release()
        lease = await lease_of(ticket)
    assert here.admission.enter(make_request()).waiting
    lease.release()


async def test_a_larger_share_of_a_tier_places_who_waits_for_it_at_once(autojump_clock: MockClock) -> None:
    here = WorkerSet(make_worker(slots=2), limits=limits(batch=0.5))
    lease = await lease_of(here.admission.enter(make_request(tier="batch")))
    ticket = here.admission.enter(make_request(tier="batch"))
    assert ticket.why == "tier_share"
    here.admission.relimit(limits(batch=1.0))
    assert not ticket.waiting
    lease.release()
    (await lease_of(ticket)).release()


async def test_who_waited_long_enough_rises_when_the_time_for_it_is_shortened(nursery: trio.Nursery) -> None:
    here = workers(1)
    lease = await lease_of(here.admission.enter(make_request()))
    gone = here.admission.enter(make_request(tier="batch", tenant="x"))
    gone.leave()
    ticket = here.admission.enter(make_request(tier="batch"))
    await wait_all_tasks_blocked()
    here.admission.relimit(limits(promote_after=1e-9))
    assert ticket.tier < 2
    ticket.leave()
    lease.release()


# Pools ----------------------------------------------------------------------------------------------------


async def test_pools_tell_their_slots_and_who_waits(autojump_clock: MockClock) -> None:
    here = workers(2)
    leases = [await lease_of(here.admission.enter(make_request())) for _ in range(2)]
    await trio.sleep(3)
    tickets = [here.admission.enter(make_request(tier=tier)) for tier in ("batch", "standard")]
    (pool,) = here.admission.pools()
    assert (pool.pool, pool.slots, pool.held, pool.oldest) == ("m1", 2, 2, 3.0)
    assert pool.tiers == {"interactive": 0, "standard": 1, "batch": 1}
    assert pool.pace is not None
    for ticket in tickets:
        ticket.leave()
    for lease in leases:
        lease.release()
    (pool,) = here.admission.pools()
    assert (pool.held, pool.oldest) == (0, None)
    assert here.admission.service_of("t1") > 0
    assert here.admission.share_of("t1") == TenantShare(None, 64)


# Many who wait ----------------------------------------------------------------------------------------------


async def test_for_a_slot_that_comes_free_the_workers_are_asked_once_for_each_kind_of_request(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = WorkerSet(make_worker("w1", slots=1, kind="llamacpp"), limits=limits())
    lease = await lease_of(here.admission.enter(make_request()))
    waiting = [
        here.admission.enter(make_request(tenant=f"t{number}", n=1)) for number in range(20) for _ in range(3)
    ]
    asked: list[str] = []
    choose = here.fleet.choose

    def counted(request: InternalRequest, without: frozenset[str]) -> Worker | None:
        asked.append(request.tenant)
        return choose(request, without)

    monkeypatch.setattr(here.fleet, "choose", counted)
    lease.release()
    placed = [ticket for ticket in waiting if not ticket.waiting]
    assert len(placed) == 1
    assert len(asked) == 2  # the one that is placed, and one for all others
    for ticket in waiting:
        ticket.leave()
    assert here.left_over() == []


async def test_who_needs_more_slots_or_may_not_try_a_worker_speaks_for_nobody_else(
    autojump_clock: MockClock,
) -> None:
    here = WorkerSet(make_worker("w1", slots=3, kind="llamacpp"), limits=limits())
    leases = [await lease_of(here.admission.enter(make_request())) for _ in range(3)]
    wide = here.admission.enter(make_request(tenant="a", n=3))
    slim = here.admission.enter(make_request(tenant="b", n=1))
    leases.pop().release()
    assert (wide.waiting, slim.waiting) == (True, False)
    for ticket in (wide, slim):
        ticket.leave()
    for lease in leases:
        lease.release()
    assert here.left_over() == []
