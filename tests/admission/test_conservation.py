"""Random stories of admission: whatever happens in whatever order, nothing is lost, doubled or kept waiting.

Each step is drawn from what is possible in the state that the steps before it led to.
"""

from __future__ import annotations

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_gateway.admission import AdmissionLimits, Lease, TenantShare, Ticket
from trio_gateway.contract import Rejection
from trio_gateway.errors import Problem, Refused
from trio_gateway.testing import WorkerSet, make_request, make_worker

NO_ROOM = Problem.of("engine_overloaded", "the engine has no room")
SHARES = {"t1": TenantShare(2, 2), "t2": TenantShare(None, 5)}
LIMITS = AdmissionLimits(6, 1000, 20.0)
GRACE = 3.0


class Story:
    """Admission, and beside it a naive account of who holds what."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.workers = WorkerSet(
            make_worker("w1", kind="llamacpp", slots=3, cancel_grace=GRACE),
            make_worker("w2", slots=1, cancel_grace=GRACE),
            models={"m1": ["w1", "w2"], "m2": ["w2"]},
            limits=LIMITS,
            shares=SHARES,
        )
        self.nursery = nursery
        self.waiting: dict[Ticket, trio.CancelScope] = {}
        self.leases: dict[Lease, Ticket] = {}
        self.draining: dict[Lease, float] = {}
        self.idle: list[Ticket] = []  # exchanges whose attempt is over
        self.entered = self.refused = 0

    # -- steps

    def enter(self, model: str, tenant: str, n: int, size: int, seconds: float) -> None:
        admission = self.workers.admission
        before = admission.statistics()
        self.entered += 1
        try:
            ticket = admission.enter(make_request(model, tenant=tenant, n=n, size=size, seconds=seconds))
        except Refused:
            self.refused += 1
            after = admission.statistics()
            assert after == before, "a refusal takes nothing"
            return
        self.wait_for(ticket)

    def wait_for(self, ticket: Ticket) -> None:
        self.waiting[ticket] = scope = trio.CancelScope()

        async def wait() -> None:
            with scope:
                try:
                    lease = await ticket.wait()
                    self.leases[lease] = ticket
                except Refused:
                    self.refused += 1
            del self.waiting[ticket]

        self.nursery.start_soon(wait)

    def give_back(self, lease: Lease, *, busy: bool) -> None:
        self.idle.append(self.leases.pop(lease))
        if busy:
            lease.engine_started("attempt")
            self.draining[lease] = trio.current_time() + GRACE
        with lease:
            pass

    def send_back(self, lease: Lease, *, elsewhere: bool, busy: bool) -> None:
        ticket = self.leases[lease]
        self.give_back(lease, busy=busy)
        self.idle.remove(ticket)
        if ticket.back(without=lease.worker if elsewhere else None, last=NO_ROOM):
            self.wait_for(ticket)

    async def pass_time(self, seconds: float) -> None:
        await trio.sleep(seconds)
        await wait_all_tasks_blocked()
        now = trio.current_time()
        self.draining = {lease: due for lease, due in self.draining.items() if due > now}

    # -- what holds at every moment

    def check(self) -> None:
        workers = self.workers
        counts, fleet = workers.admission.statistics(), workers.fleet
        assert workers.unbalanced() == []
        assert counts.held == len(self.leases)
        assert counts.draining == len(self.draining)
        for name, book in fleet.books.items():
            assert book.held == sum(
                _slots(lease, t) for lease, t in self.leases.items() if lease.worker.id == name
            )
        queued = [ticket for ticket in self.waiting if ticket.queued]
        assert counts.queued == len(queued)
        assert counts.queued_bytes == sum(ticket.size for ticket in queued)
        assert sum(counts.queued_by_tenant.values()) == counts.queued
        for tenant, share in SHARES.items():
            running = sum(ticket.tenant == tenant for ticket in self.leases.values())
            assert share.max_concurrency is None or running <= share.max_concurrency
        self.check_nobody_waits_in_vain(queued)

    def check_nobody_waits_in_vain(self, queued: list[Ticket]) -> None:
        """Whoever stands in front of a line could not be placed now, and may hope."""
        fleet, now = self.workers.fleet, trio.current_time()
        for ticket in queued:
            line = [t for t in queued if (t.tenant, t.model) == (ticket.tenant, ticket.model)]
            share = SHARES[ticket.tenant].max_concurrency
            running = sum(t.tenant == ticket.tenant for t in self.leases.values())
            if ticket is min(line, key=lambda t: t.number) and (share is None or running < share):
                assert fleet.choose(ticket.request, ticket.without) is None
            at = fleet.tries_at(ticket.request, ticket.without)
            if now < ticket.limit:
                assert at is not None
                assert at < ticket.limit

    async def wind_up(self) -> None:
        for scope in tuple(self.waiting.values()):
            scope.cancel()
        await wait_all_tasks_blocked()
        for lease in tuple(self.leases):
            self.give_back(lease, busy=False)
        await self.pass_time(GRACE)
        self.check()
        assert self.workers.left_over() == []
        counts = self.workers.admission.statistics()
        assert counts.granted == counts.returned
        assert counts.double_releases == 0


def _slots(lease: Lease, ticket: Ticket) -> int:
    return ticket.request.n if lease.worker.dialect.slot_per_choice else 1


async def play(data: st.DataObject) -> None:
    async with trio.open_nursery() as nursery:
        story = Story(nursery)
        nursery.start_soon(story.workers.run)
        for _ in range(data.draw(st.integers(1, 25), "steps")):
            await step(story, data)
            await wait_all_tasks_blocked()
            story.check()
        await story.wind_up()
        nursery.cancel_scope.cancel()


async def step(story: Story, data: st.DataObject) -> None:
    """Draw a step that is possible, and take it."""
    possible = ["enter", "enter", "time"]
    possible += ["cancel"] * bool(story.waiting)
    possible += ["return", "drain", "back", "reject", "output"] * bool(story.leases)
    match data.draw(st.sampled_from(possible), "step"):
        case "enter":
            story.enter(
                data.draw(st.sampled_from(["m1", "m2"])),
                data.draw(st.sampled_from(sorted(SHARES))),
                data.draw(st.integers(1, 4)),
                data.draw(st.sampled_from([1, 100, 600])),
                data.draw(st.sampled_from([2.0, 10.0, 600.0])),
            )
        case "time":
            await story.pass_time(data.draw(st.sampled_from([0.5, 1.0, 3.0, 9.0])))
        case "cancel":
            ticket = data.draw(st.sampled_from(sorted(story.waiting, key=lambda t: t.number)))
            story.waiting[ticket].cancel()
        case "return":
            story.give_back(draw_lease(story, data), busy=False)
        case "drain":
            story.give_back(draw_lease(story, data), busy=True)
        case "back":
            story.send_back(
                draw_lease(story, data), elsewhere=data.draw(st.booleans()), busy=data.draw(st.booleans())
            )
        case "reject":
            lease = draw_lease(story, data)
            pause = data.draw(st.sampled_from([None, 2.0, 15.0]))
            rejection = Rejection("capacity", 503, pause, trio.current_time())
            story.workers.fleet.rejected(lease.worker, story.leases[lease].request, rejection)
            story.send_back(lease, elsewhere=False, busy=False)
        case "output":
            lease = draw_lease(story, data)
            story.workers.fleet.output(lease.worker, story.leases[lease].request)


def draw_lease(story: Story, data: st.DataObject) -> Lease:
    held = sorted(story.leases, key=lambda lease: story.leases[lease].number)
    return data.draw(st.sampled_from(held))


@given(st.data())
@settings(max_examples=200)
def test_in_any_story_what_was_granted_is_held_draining_or_returned_and_nobody_waits_in_vain(
    data: st.DataObject,
) -> None:
    trio.run(play, data, clock=MockClock(autojump_threshold=0))
