"""The admission controller: bounded queues, and a fair order, in front of worker slots.

A request is placed when its model has a worker with room, its tenant is below its
own concurrency, its tier below its share, and nobody who comes earlier in the order
could be placed instead. Else it takes a position, if there is one. Waiting holds no
slot and no share of one.

All decisions are synchronous; a task waits only for its own event. Whoever
leaves, by whatever way, gives back what it had.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, Self, final

import trio

from ..contract import InternalRequest, LenderPort, Worker
from ..errors import Problem, Refused
from ._alike import Alike
from ._drain_rate import DrainRate
from ._estimate import Estimates
from ._loans import Loans, slots_of, tenant_of, tier_of
from ._returns import JITTER, SOONEST, Returns
from ._scheduler import Scheduler

Kind = tuple[str, str, int, bool, frozenset[str]]  # see `_kind_of`
_NO_KIND: Final[Kind] = "", "", 0, False, frozenset()

TIERS: Final = ("interactive", "standard", "batch")
PATIENCE: Final = 0.02  # seconds for the lender to call back what another process keeps and does not use
MOST_UNBOUNDED: Final = 1024  # that wait for the lender's word beyond the bounds of a queue
REASONS: Final = (
    "tenant_frozen",
    "tenant_at_concurrency",
    "model_without_worker",
    "outage",
    "tier_share",
    "ahead_in_line",
    "no_slot",
)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of all queues together, and how tiers stand to each other.

    Attributes:
        max_queued, max_queued_bytes: requests, and bytes of their bodies.
        max_wait: seconds in a queue.
        promote_after: seconds without a placement after which the eldest of a line rises by one tier.
        max_shares: largest share of a pool's slots that a tier may hold; all, where none is named.
    """

    max_queued: int
    max_queued_bytes: int
    max_wait: float
    promote_after: float = 30.0
    max_shares: Mapping[str, float] = field(default_factory=lambda: {"batch": 0.8})


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What one tenant may have: exchanges at a time (None: no own bound), positions, and its weight."""

    max_concurrency: int | None
    max_queued: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counts since start (granted, returned) and right now (the others)."""

    granted: int
    held: int
    draining: int
    returned: int
    double_releases: int
    queued: int
    queued_bytes: int
    queued_by_tenant: dict[str, int]
    queued_by_tier: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """One pool of workers right now.

    Attributes:
        held: slots of running attempts; those that drain are the workers' to tell.
        pace: slots that come free a second, as things are; None: none is in use.
        tiers: how many wait, by tier.
        oldest: Trio clock; when the one arrived that came first of those that wait. None: nobody does.
    """

    pool: str
    slots: int
    held: int
    pace: float | None
    tiers: dict[str, int]
    oldest: float | None


class Slots(Protocol):
    """Where admission finds room: the fleet, seen from here."""

    changed: Callable[[], None]

    def choose(self, request: InternalRequest, without: frozenset[str]) -> Worker | None:
        """Pick a worker with room."""

    def tries_at(self, request: InternalRequest, without: frozenset[str]) -> float | None:
        """When a worker that is large enough may be tried; None: none is left."""

    def next_opening(self, after: float) -> float | None:
        """When a worker that is out may be tried; only times after one are told."""

    def open_worker(self, request: InternalRequest, without: frozenset[str], worker: str) -> Worker | None:
        """Answer a worker by its id if the request may be placed there, whoever counts its slots."""

    def choose_kept(
        self, request: InternalRequest, without: frozenset[str], kept: Mapping[str, int]
    ) -> Worker | None:
        """Pick the best of all workers, if enough slots are kept there, by its id."""

    def obstacle(self, request: InternalRequest) -> Problem:
        """Why no worker can be tried, where `tries_at` says so."""

    def pool_of(self, model: str) -> str:
        """Name the workers that serve a model; models that share workers have one name."""

    def pool_slots(self, pool: str) -> int:
        """Slots of a pool."""

    def rejection(self, model: str) -> int:
        """Status with which the model's workers said that they have no room."""

    def retry_after(self, model: str) -> float | None:
        """Seconds that the model's workers asked to be left alone."""

    def hold(self, request: InternalRequest, worker: Worker) -> int:
        """Take slots."""

    def drain(self, request: InternalRequest, worker: Worker, slots: int) -> None:
        """Count slots as draining."""

    def free(self, request: InternalRequest, worker: Worker, slots: int, *, drained: bool) -> None:
        """Give slots back."""

    # What follows is asked only where slots are lent.

    def wanted(self, request: InternalRequest, without: frozenset[str]) -> list[tuple[str, int]]:
        """Name the workers at which slots would be of use, the best first, and how many."""

    def size_of(self, worker_id: str) -> tuple[int, float]:
        """Slots of a worker, and its grace."""

    def resized(self) -> list[str]:
        """Name workers of which slots were lent, and there are more or fewer since this was last asked."""

    def lend(self, worker_id: str, slots: int) -> bool:
        """Take slots that were lent; False: there is no such worker."""

    def idle(self, wanted: Collection[str]) -> list[tuple[str, int]]:
        """Give up slots that were lent and are idle, all of those workers that are wanted."""

    def idle_until(self) -> float | None:
        """When slots that are kept are to be given up."""

    def give_up(self, worker_id: str) -> int:
        """Give up all idle slots of one worker."""


def _tell_nobody(seconds: float) -> None:
    """Nobody listens."""


def _ask_nobody(urgent: bool) -> None:
    """Nobody grants."""


def _keep_nothing(tenant: str, pool: str, tier: int) -> Mapping[str, int]:
    """Nothing was granted."""
    return {}


@dataclass(frozen=True, slots=True)
class Line:
    """Those of one tenant that wait in one tier for one model, in order.

    Attributes:
        pool, tier: of the group in which its tenant is compared with others.
        alike: how many, from the first, need the same of the same workers, as far as it was asked.
        cost: tokens for its tenant's weight that the first will probably be charged.
    """

    pool: str
    tier: int
    tenant: str
    model: str
    first: InternalRequest
    without: frozenset[str]
    alike: int
    cost: float


@final
class Lease:
    """A worker's slots, from placement until the engine let go.

    Leaving the ``with`` block never waits: the slots are returned if the engine's
    message was read to its end (or nothing was sent), else handed to the drain
    keeper. A second release is a counted no-op.
    """

    def __init__(
        self,
        admission: Admission,
        request: InternalRequest,
        worker: Worker,
        slots: int,
        counted_at: tuple[str, int],
        now: float,
    ) -> None:
        self._admission = admission
        self._request = request
        self._worker = worker
        self._slots = slots
        self.counted_at: Final = counted_at  # pool and tier
        self.since: Final = now
        self._engine_busy = False
        self._engine_asked = False
        self._state = "held"
        self.attempt_id = ""  # of the attempt that is made with it
        self.draining_since: float | None = None

    @property
    def worker(self) -> Worker:
        """See LeasePort."""
        return self._worker

    @property
    def exchange_id(self) -> str:
        """The exchange for which it is held."""
        return self._request.exchange_id

    @property
    def engine_asked(self) -> bool:
        """See LeasePort."""
        return self._engine_asked

    def engine_started(self, attempt_id: str) -> None:
        """See LeasePort."""
        self._engine_busy = self._engine_asked = True
        self.attempt_id = attempt_id

    def engine_done(self) -> None:
        """See LeasePort."""
        self._engine_busy = False

    def __enter__(self) -> Self:
        """See LeasePort."""
        return self

    def __exit__(self, *exc: object) -> None:
        """See LeasePort."""
        if self._engine_busy:
            self.drain()
        else:
            self.release()

    def release(self) -> None:
        """Give the slots back now."""
        before, self._state = self._state, "returned"
        self._admission._returned(self, self._request, self._worker, self._slots, before)

    def drain(self) -> None:
        """Keep the slots counted until the worker's grace is over; the tenant is free at once."""
        if self._state == "held":
            self._state = "draining"
            self.draining_since = trio.current_time()
            self._admission._draining(self, self._request, self._worker, self._slots)


@final
class Ticket:
    """One exchange in admission, from acceptance until it ends; waits again when sent back."""

    def __init__(self, admission: Admission, request: InternalRequest, number: int, limit: float) -> None:
        self._admission = admission
        self.request = request
        self.number: Final = number
        self.tenant: Final = request.tenant
        self.model: Final = request.model
        self.size: Final = request.size
        self.limit = limit  # when max_wait or the deadline is over
        self.without: frozenset[str] = frozenset()
        self.kind: Kind = _NO_KIND  # while it waits
        self.last: Problem | None = None
        self._granted: Lease | None = None
        self._refused: Problem | None = None
        self._wake: trio.Event | None = None  # of who has to wait
        self.queued = False
        self.tier = TIERS.index(request.tier)
        self.pool = admission.pool_of(request.model)
        self.charged = 0.0  # what its tenant was charged for the placement it has, see Group.charge
        self.charged_at = self.pool, self.tier
        self.unbounded: Problem | None = None  # it stands in the queue beyond its bounds, until this is due
        self.judged_with = 0  # the question to the lender whose answer decides
        self.judged_at = math.inf  # not before: others may have to give back first

    @property
    def waiting(self) -> bool:
        """See TicketPort."""
        return self.queued

    @property
    def place(self) -> int | None:
        """See TicketPort."""
        return self._admission.place_of(self) if self.queued else None

    @property
    def eta(self) -> float | None:
        """See TicketPort."""
        return self._admission.eta_of(self) if self.queued else None

    @property
    def why(self) -> str | None:
        """See TicketPort."""
        return self._admission.why(self) if self.queued else None

    async def wait(self) -> Lease:
        """See TicketPort."""
        try:
            if self._granted is not None or self._refused is not None:  # as nearly always
                await trio.lowlevel.checkpoint_if_cancelled()
            else:
                self._wake = trio.Event()
                with trio.CancelScope(deadline=self.limit):
                    await self._wake.wait()
        except BaseException:
            self.leave()
            raise
        if self._granted is not None:
            lease, self._granted = self._granted, None
            return lease
        self.leave()
        raise Refused(self._refused or self._admission.waited_too_long(self))

    def back(self, *, without: Worker | None, last: Problem) -> bool:
        """See TicketPort."""
        if without is not None:
            self.without |= {without.id}
        self._admission.refund(self)
        if not self._admission.can_try(self):
            return False
        self.last = last
        self._refused = None
        self._admission.requeue(self)
        return True

    def served(self, prompt: int | None, generated: int | None) -> None:
        """See TicketPort."""
        self._admission.settle(self, prompt, generated)

    def leave(self) -> None:
        """See TicketPort."""
        if self.queued:
            self._admission.withdraw(self)
            self._admission.dispatch()  # it may have held up whoever stands behind it
        if self._granted is not None:
            lease, self._granted = self._granted, None
            lease.release()

    def grant(self, lease: Lease) -> None:
        """Hand over a placement; only admission calls this."""
        self._granted = lease
        if self._wake is not None:
            self._wake.set()

    def refuse(self, problem: Problem) -> None:
        """End the waiting with a refusal; only admission calls this."""
        self._refused = problem
        if self._wake is not None:
            self._wake.set()


class Looked:
    """What one look at the workers found, as long as nothing changes: many wait, and few kinds of them.

    Attributes:
        full: kinds for which no worker has room, each with the first that was found of it.
        waiting: how many of each of them could be placed if there were.
    """

    __slots__ = ("full", "waiting")

    def __init__(self) -> None:
        self.full: dict[Kind, Ticket] = {}
        self.waiting: Counter[Kind] = Counter()


def _kind_of(ticket: Ticket) -> Kind:
    """All of a waiter that decides whether a worker has room for it, as far as others may share it.

    What engines call a model may be another name for who came before the file was read again.
    """
    request = ticket.request
    return request.model, request.upstream_model, _choices(request), request.last_try, ticket.without


def _count_alike(line: Iterable[Ticket], kind: Kind) -> int:
    """How many of a line are of a kind, before the first that is not."""
    return sum(1 for _ in itertools.takewhile(lambda ticket: ticket.kind == kind, line))


def _choices(request: InternalRequest) -> int:
    return request.n if request.operation.choices else 1


class Admission:
    """See the module's docstring.

    Args:
        slots: the fleet.
        limits: bounds over all tenants.
        shares: bounds by tenant id.
        drain: keeps a callback until a worker's engine let go of an attempt, then calls it.
        dice: random numbers from 0 to 1, for jitter.
        held: told for how many seconds a lease was held, until its attempt was over.
        lender: of whom slots are borrowed, and what tenants and tiers may have at a time; None: all that
            there is, is this process's. What is lent is told through `lent`, `recall` and `judged`.
    """

    def __init__(
        self,
        slots: Slots,
        limits: AdmissionLimits,
        shares: Mapping[str, TenantShare],
        drain: Callable[[Worker, str, Callable[[], None]], None],
        dice: Callable[[], float],
        held: Callable[[float], None] = _tell_nobody,
        lender: LenderPort | None = None,
    ) -> None:
        self._slots = slots
        self.limits = limits
        self._shares = shares
        self._drain = drain
        self._dice = dice
        self.note_held = held
        self._alike: Alike[Ticket] = Alike()
        self._queue: Scheduler[Ticket] = Scheduler(
            len(TIERS), limits.promote_after, lambda tenant: self._shares[tenant].weight
        )
        self._running: dict[str, int] = {}
        self._numbers = itertools.count()
        self._rates: dict[str, DrainRate] = {}  # by pool
        self._returns: dict[tuple[str, str | None], Returns] = {}  # by pool, and tenant if that was full
        self._estimates = Estimates()
        self._frozen: set[str] = set()
        self._holding: dict[tuple[str, int], int] = {}  # slots by pool and tier
        self._out: set[Lease] = set()  # leases that were not given back
        self._granted = self._held = self._draining_count = self._returned_count = self._doubles = 0
        self._closed: Problem | None = None
        self._nap: trio.CancelScope | None = None
        self._looked_at = -math.inf  # when the last look at who waits began
        self._loans = None if lender is None else Loans(lender)
        self._heard = 0  # the last question that the lender has answered
        self._unbounded: dict[int, Ticket] = {}  # those that stand in a queue beyond its bounds
        self._ask: Callable[[bool], None] | None = None
        self._kept: Callable[[str, str, int], Mapping[str, int]] = _keep_nothing
        self._outage: Problem | None = None
        self.parties = 1  # processes that divide tenants' concurrency by number
        slots.changed = self.dispatch

    # -- slots that others grant

    def place_by_grants(
        self,
        ask: Callable[[bool], None] = _ask_nobody,
        kept: Callable[[str, str, int], Mapping[str, int]] = _keep_nothing,
    ) -> None:
        """Place only what `grant` says from now on, or who comes while nobody waits where slots are kept.

        Args:
            ask: told that something changed: True: somebody waits who did not before; it must not call back.
            kept: answers slots, by worker, that were granted, given back, and may be used again at once, by
                a tenant in a pool and a tier.
        """
        self._ask, self._kept, self._outage = ask, kept, None
        self.dispatch()

    def place_freely(self) -> None:
        """Place whatever the fleet has room for from now on."""
        self._ask = self._outage = None
        for tenant in self._queue.tenants():
            self._take_back(tenant)
        self.dispatch()

    def place_nothing(self, problem: Problem) -> None:
        """Refuse who comes, and let who waits wait, until something is placed again."""
        self._ask, self._kept, self._outage = _ask_nobody, _keep_nothing, problem

    @property
    def outage(self) -> Problem | None:
        """With what everybody is refused; None: nobody is for that."""
        return self._outage

    def lines(self, most: int) -> list[Line]:
        """Tell who could be placed if there were slots, of each line at most so many.

        Refuses those for whom nothing can come.
        """
        found = []
        for pool, tier, group in self._queue.all_groups():
            for tenant, model, line in tuple(group.named_lines()):
                if not self._is_held_back(tenant) and line and not self._hopeless(first := line[0]):
                    alike = _count_alike(itertools.islice(line, most), first.kind)
                    cost = self._estimates.expected(first.request) / self._shares[tenant].weight
                    found.append(Line(pool, tier, tenant, model, first.request, first.without, alike, cost))
        return found

    def grant(self, line: Line, worker: str) -> bool:
        """Place the first of a line at a worker, whose slots it was granted; False: it has no use."""
        if self._is_held_back(line.tenant):
            return False
        of_no_use: set[Kind] = set()
        for tickets in tuple(self._queue.group(line.pool, line.tier).line(line.tenant, line.model)):
            for ticket in tickets:
                if ticket.kind in of_no_use:
                    continue
                found = self._slots.open_worker(ticket.request, ticket.without, worker)
                if found is not None and _choices(ticket.request) == _choices(line.first):
                    self._hold(ticket, found)
                    return True
                of_no_use.add(ticket.kind)
        return False

    def holding(self) -> dict[tuple[str, int], int]:
        """Slots of running attempts by pool and tier."""
        return {where: slots for where, slots in self._holding.items() if slots}

    def take_spent(self) -> dict[tuple[str, int, str], tuple[float, float]]:
        """What was charged since the last call, and what of it was settled, by pool, tier and tenant.

        In tokens for the tenant's weight.
        """
        return {
            (pool, tier, tenant): both
            for pool, tier, group in self._queue.all_groups()
            for tenant, both in group.take_spent().items()
        }

    # -- AdmissionPort

    def enter(self, request: InternalRequest) -> Ticket:
        """See AdmissionPort."""
        if self._closed is not None:
            raise Refused(self._closed)
        if self._outage is not None:
            raise Refused(self._outage)
        if self._slots.tries_at(request, frozenset()) is None:
            raise Refused(self._no_worker(request))
        now = trio.current_time()
        limit = min(request.deadline, now + self.limits.max_wait)
        ticket = Ticket(self, request, next(self._numbers), limit)
        if not self._ahead_of(ticket) and (self._place(ticket, now) or self._place_kept(ticket)):
            return ticket
        try:
            self._check_room(ticket)
            self._check_time(ticket)
        except Refused as refused:
            if self._loans is None or self._is_scarce(ticket) or len(self._unbounded) >= MOST_UNBOUNDED:
                raise
            ticket.unbounded = refused.problem  # what it needs may be free, and the lender must be asked
        self._add(ticket)
        self.dispatch()
        return ticket

    def pool_of(self, model: str) -> str:
        """Name the pool of a model."""
        return self._slots.pool_of(model)

    def with_retry_after(self, problem: Problem, model: str) -> Problem:
        """See AdmissionPort."""
        if problem.status not in (429, 503) or problem.final:
            return problem
        return problem.but(retry_after=self._slots.retry_after(model) or self._next_turn(self.pool_of(model)))

    def next_return(self) -> float:
        """Promise a turn to one that is refused before its model is known; answers the seconds until then.

        It stands behind those that wait for the workers for which most wait: they hold what it lacks.
        """
        pool = max(self._queue.pools(), key=self._waiting_in, default=None)
        return SOONEST * (1 + JITTER * self._dice()) if pool is None else self._book_return(pool)

    # -- tickets

    def eta_of(self, ticket: Ticket) -> float | None:
        """Seconds until a waiting ticket will probably be placed.

        None: nobody can tell, since its tenant is frozen or no worker can be tried; `why` says which.
        """
        now = trio.current_time()
        tries_at = self._slots.tries_at(ticket.request, ticket.without)
        if ticket.tenant in self._frozen or tries_at is None:
            return None
        rate = self._rate(ticket.pool)
        eta = max(self.place_of(ticket) / rate.pace(now), tries_at - now)
        if not self._is_at_its_bound(ticket.tenant):
            return eta
        # It waits for what its own tenant has, however fast slots of others come free.
        turns = self._queue.place_in_tenant(ticket) / max(self._running.get(ticket.tenant, 0), 1)
        return max(eta, turns * rate.lasting(now))

    def place_of(self, ticket: Ticket) -> int:
        """Position of a waiting ticket; one whose tenant is frozen is in nobody's way."""
        return self._queue.place_of(ticket, self._frozen - {ticket.tenant})

    def why(self, ticket: Ticket) -> str:
        """Why a ticket waits: the first of `REASONS` that keeps it from being placed."""
        if ticket.tenant in self._frozen:
            return "tenant_frozen"
        if self._is_at_its_bound(ticket.tenant):
            return "tenant_at_concurrency"
        tries_at = self._slots.tries_at(ticket.request, ticket.without)
        if tries_at is None:
            return "model_without_worker"
        if tries_at > trio.current_time():
            return "outage"
        if self._tier_is_full(ticket.pool, ticket.tier):
            return "tier_share"
        return "no_slot" if self._queue.heads_its_line(ticket) else "ahead_in_line"

    def can_try(self, ticket: Ticket) -> bool:
        """Whether a worker is left that the exchange may try."""
        return self._slots.tries_at(ticket.request, ticket.without) is not None

    def requeue(self, ticket: Ticket) -> None:
        """Let a sent-back exchange wait again, over the bounds if need be."""
        ticket.pool = self.pool_of(ticket.model)
        self._add(ticket)
        self.dispatch()

    def withdraw(self, ticket: Ticket) -> None:
        """Take a ticket out of its queue."""
        if ticket.queued:
            ticket.queued = False
            self._queue.remove(ticket)
            self._alike.remove(ticket)
            self._unbounded.pop(ticket.number, None)

    def waited_too_long(self, ticket: Ticket) -> Problem:
        """What a waiter is told whose time is up: the last class met, or the timeout itself."""
        if ticket.last is not None:
            return self.with_retry_after(ticket.last, ticket.model)
        if ticket.limit >= ticket.request.deadline:
            return Problem.of(
                "deadline_exceeded", "the deadline passed while the request waited for a worker"
            )
        return Problem.of(
            "queue_timeout", "no worker had room in time", retry_after=self._book_return(ticket.pool)
        )

    # -- what tenants are charged

    def probable_tokens(self, request: InternalRequest) -> tuple[float, float]:
        """Tokens of the prompt and of the answer that a request will probably have, by what was learnt."""
        return self._estimates.tokens(request)

    def tokens_of(self, model: str, size: int) -> float:
        """Tokens that so many bytes of text for or from a model probably are, by what was learnt."""
        return self._estimates.tokens_of(model, size)

    def refund(self, ticket: Ticket) -> None:
        """Take back what a placement was charged: nothing came of it."""
        charged, ticket.charged = ticket.charged, 0.0
        if charged:
            self._queue.group(*ticket.charged_at).settle(ticket.tenant, charged, 0.0)

    def settle(self, ticket: Ticket, prompt: int | None, generated: int | None) -> None:
        """Put what was really used in the place of what was estimated."""
        request = ticket.request
        if generated is not None:
            self._estimates.observe(request, prompt, generated)
        charged, ticket.charged = ticket.charged, 0.0
        if charged:
            used = self._estimates.cost(request, prompt, generated or 0)
            self._queue.group(*ticket.charged_at).settle(ticket.tenant, charged, used)

    # -- the whole

    def dispatch(self) -> None:
        """Place whoever can be placed now, and release those for whom nothing can come in time."""
        if self._loans is not None:
            self._loans.begin()
        if len(self._queue):
            # What opens while it looks, it may have looked at before: that is then due at once.
            self._looked_at = trio.current_time()
            self._queue.promote(self._looked_at)
            self._follow_pools()
            self._release_hopeless()
            if self._ask is None:
                self._place_all()
                while self._release_hopeless():  # a trial was placed: others have to wait for what it tells
                    self._place_all()
        if self._loans is not None:
            self._settle_loans(self._loans)
        if self._ask is not None:
            self._ask(False)
        # To set it costs more than all of the above, as long as nobody waits.
        if self._nap is not None and (due := self._next_due()) < self._nap.deadline:
            self._nap.deadline = due

    def _place_all(self) -> None:
        for pool in self._queue.pools():
            while self._serve(pool):
                pass

    def _follow_pools(self) -> None:
        """Let waiters stand where their model's workers are: in a pool of the past no tier comes first."""
        for waiter in self._queue.one_of_each_model():
            if waiter.pool != (pool := self._slots.pool_of(waiter.model)):
                self._queue.move(waiter.model, pool)

    def _serve(self, pool: str) -> bool:
        """Do one step for a pool: place a waiter, or take one out of the way; False: none is left."""
        looked = Looked()
        for tier, group in self._queue.groups(pool):
            full = self._tier_is_full(pool, tier)
            for line in group.lines():
                tenant = line[0].tenant
                if self._is_held_back(tenant):
                    self._queue.set_aside(tenant, pool)
                    return True
                if not full and self._serve_line(line, looked):
                    return True
        if self._loans is not None:
            self._want_slots(self._loans, looked)
        return False

    # -- what is lent

    def lent(self, thing: str, units: int) -> None:
        """Take what was lent; it is used when all of it is there, see `judged`."""
        assert self._loans is not None
        kind, _, name = thing.partition(":")
        if kind == "slots":
            self._loans.scarce.clear()
            if not self._slots.lend(name, units):
                self._loans.lender.give_back(thing, units)
            return
        self._loans.permits[thing] += units
        if kind == "tenant":
            self._loans.short.pop(name, None)
            self._loans.scarce.discard(thing)
            self._take_back(name)

    def recall(self, thing: str) -> None:
        """Others wait for a thing: what of it is idle, and nobody here is about to use, is theirs."""
        assert self._loans is not None
        kind, _, name = thing.partition(":")
        if kind == "slots":
            if slots := self._slots.give_up(name):
                self._loans.lender.give_back(thing, slots)
        elif kind == "tenant":
            self._loans.keep(thing, self._running.get(name, 0) + self._queue.depth_of(name))
        elif kind == "tier":
            tier, _, pool = name.partition(":")
            index = TIERS.index(tier)
            self._loans.keep(thing, self._holding.get((pool, index), 0) + self._queue.depths_of(pool)[index])

    def judged(self, heard: int) -> None:
        """All that was lent is told: place who can be; refuse who stands beyond the bounds and can not."""
        self._heard = max(self._heard, heard)
        self.dispatch()

    def _judge(self, loans: Loans) -> None:
        """Refuse those who stand beyond the bounds when the lender had the time to call back what is idle."""
        if not self._unbounded:
            return
        now = trio.current_time()
        overdue = [
            each
            for each in self._unbounded.values()
            if each.judged_with <= self._heard and each.judged_at <= now
        ]
        for ticket in overdue:
            self._turn_away(ticket, loans)
        if overdue:
            self.dispatch()  # what they wanted, nobody wants any more

    def _turn_away(self, ticket: Ticket, loans: Loans) -> None:
        assert ticket.unbounded is not None
        self.withdraw(ticket)
        ticket.refuse(ticket.unbounded)
        loans.scarce.add(tenant_of(ticket.tenant) if ticket.tenant in loans.short else ticket.model)

    def _is_scarce(self, ticket: Ticket) -> bool:
        """Whether the lender has said lately that nothing is free, and others wait for the same."""
        assert self._loans is not None
        return not self._loans.scarce.isdisjoint((ticket.model, tenant_of(ticket.tenant)))

    def _want_slots(self, loans: Loans, looked: Looked) -> None:
        """Want slots for all of whom only that keeps them from being placed."""
        for kind, ticket in looked.full.items():
            by_units: dict[int, list[str]] = {}
            for worker, units in self._slots.wanted(ticket.request, ticket.without):
                by_units.setdefault(units, []).append(worker)
                loans.lender.describe(slots_of(worker), *self._slots.size_of(worker))
            for units, workers in by_units.items():
                loans.want_slots(ticket.model, workers, units, looked.waiting[kind])

    def _redescribe(self, loans: Loans) -> None:
        """Say what there is now of what was borrowed: others wait for it, and nobody here may any more."""
        for worker in self._slots.resized():
            loans.lender.describe(slots_of(worker), *self._slots.size_of(worker))
        for (pool, tier), holding in self._holding.items():
            if holding and (most := self._share_of(pool, tier)) is not None:
                loans.redescribe(tier_of(TIERS[tier], pool), most)

    def _settle_loans(self, loans: Loans) -> None:
        """Give back what nobody here needs, and say what would be of use."""
        self._redescribe(loans)
        for worker, slots in self._slots.idle(loans.workers):
            loans.lender.give_back(slots_of(worker), slots)
        for tenant, most in tuple(loans.short.items()):
            waiting = self._queue.depth_of(tenant)
            unused = loans.permits[tenant_of(tenant)] - self._running.get(tenant, 0)
            if not waiting:
                del loans.short[tenant]
            elif waiting > unused and tenant not in self._frozen:
                loans.want_permit(tenant_of(tenant), most, waiting - unused)
        loans.forget_plenty()
        loans.lender.want(loans.wants)
        loans.lender.speak()
        self._judge(loans)

    def _is_held_back(self, tenant: str) -> bool:
        """Whether nothing of a tenant can be placed, whatever room there is."""
        return tenant in self._frozen or self._is_at_its_bound(tenant)

    def _is_at_its_bound(self, tenant: str) -> bool:
        most, running = self._bound_of(tenant), self._running.get(tenant, 0)
        if most is None:
            return False
        if running < most and self._loans is not None and self._loans.permits[tenant_of(tenant)] <= running:
            self._loans.short[tenant] = most
            return True
        return running >= most

    def _bound_of(self, tenant: str) -> int | None:
        """How many exchanges a tenant may have at a time; None: any number."""
        most = self._shares[tenant].max_concurrency
        return None if most is None else max(most // self.parties, 1)

    def _share_of(self, pool: str, tier: int) -> int | None:
        """How many slots of a pool a tier may hold; None: all there are."""
        share = self.limits.max_shares.get(TIERS[tier], 1.0)
        if share >= 1:  # what still runs at a worker that is gone counts, and its slots do not
            return None
        slots = self._slots.pool_slots(pool)
        return max(int(share * slots), 1) if slots else 0  # 0: its models moved to another pool

    def _tier_is_full(self, pool: str, tier: int) -> bool:
        most = self._share_of(pool, tier)
        if most is None:
            return False
        holding = self._holding.get((pool, tier), 0)
        if self._loans is not None and holding < most:
            thing = tier_of(TIERS[tier], pool)
            if self._loans.permits[thing] <= holding:
                self._loans.want_permit(thing, most, self._queue.depths_of(pool)[tier] or 1)
                return True
        return 0 < most <= holding

    async def run(self) -> None:
        """Dispatch again whenever an outage is over, for ever."""
        while True:
            with trio.CancelScope(deadline=self._next_due()) as self._nap:
                await trio.sleep_forever()
            self._nap = None
            self.dispatch()

    def reshare(self, shares: Mapping[str, TenantShare]) -> None:
        """Give tenants other bounds and weights from now on; what is placed stays.

        A tenant that is not named keeps what it had: it may be gone while its requests still run or wait.
        """
        self._shares = {**self._shares, **shares}
        if self._loans is not None:
            for tenant in self._loans.tenants():
                if (most := self._bound_of(tenant)) is not None:
                    self._loans.redescribe(tenant_of(tenant), most)
        for tenant in self._queue.tenants():
            self._take_back(tenant)  # its bound may be higher now
        self.dispatch()

    def relimit(self, limits: AdmissionLimits) -> None:
        """Have other bounds from now on. Who waits goes on waiting, for as long as it was told."""
        before, self.limits = self.limits, limits
        if limits.promote_after != before.promote_after:
            self._queue.promote_after(limits.promote_after)
        self.dispatch()

    @property
    def frozen(self) -> frozenset[str]:
        """The tenants of which nothing is placed."""
        return frozenset(self._frozen)

    def freeze(self, tenant: str) -> bool:
        """Place nothing more of a tenant until `thaw`; answers whether it was not frozen before.

        What runs goes on; who waits, or comes, waits within its bounds and times, and is in nobody's way.
        """
        if tenant in self._frozen:
            return False
        self._frozen.add(tenant)
        for pool in self._queue.pools():
            self._queue.set_aside(tenant, pool)
        return True

    def thaw(self, tenant: str) -> bool:
        """Let a tenant be placed again, as one that was idle; answers whether it was frozen."""
        if tenant not in self._frozen:
            return False
        self._frozen.remove(tenant)
        self._queue.take_back(tenant, idle=True)
        self.dispatch()
        return True

    def _take_back(self, tenant: str) -> None:
        if tenant not in self._frozen:
            self._queue.take_back(tenant)

    def share_of(self, tenant: str) -> TenantShare:
        """Answer what a tenant may have."""
        return self._shares[tenant]

    def running_by_tenant(self) -> dict[str, int]:
        """Exchanges at workers, by tenant, of those that have any."""
        return dict(self._running)

    def service_of(self, tenant: str) -> float:
        """Tokens that a tenant was served for its weight, of all pools and tiers; idle ones are lifted."""
        return self._queue.service_of(tenant)

    def pools(self) -> list[PoolStatistics]:
        """Tell how it stands with each pool that was ever used or is waited for."""
        now = trio.current_time()
        return [
            PoolStatistics(
                pool,
                self._slots.pool_slots(pool),
                sum(self._holding.get((pool, tier), 0) for tier in range(len(TIERS))),
                self._rate(pool).pace(now) if self._rate(pool).out else None,
                dict(zip(TIERS, self._queue.depths_of(pool), strict=True)),
                oldest,
            )
            for pool, oldest in self._oldest_by_pool().items()
        ]

    def _oldest_by_pool(self) -> dict[str, float | None]:
        """When the one came that waits longest for each pool; None: nobody waits."""
        found: dict[str, float | None] = dict.fromkeys(self._rates)
        for waiter in self._queue.one_of_each_model():
            arrived, known = waiter.request.arrived, found.get(waiter.pool)
            found[waiter.pool] = arrived if known is None else min(known, arrived)
        return found

    def leases(self) -> list[Lease]:
        """All leases that were not given back: those of attempts, and those that drain."""
        return list(self._out)

    def waiting(self) -> list[InternalRequest]:
        """All requests that have a position, in no order that means anything."""
        lines = self._queue.all_lines()
        return [ticket.request for line in lines for ticket in line]

    def close(self, problem: Problem) -> None:
        """Refuse everything that waits or comes from now on."""
        self._closed = problem
        for ticket in tuple(self._queue):
            self.withdraw(ticket)
            ticket.refuse(problem)
        if self._loans is not None:
            self.dispatch()  # nothing is wanted any more

    def statistics(self) -> AdmissionStatistics:
        """Tell counts; ``granted = held + draining + returned`` at every moment."""
        return AdmissionStatistics(
            self._granted,
            self._held,
            self._draining_count,
            self._returned_count,
            self._doubles,
            len(self._queue),
            self._queue.bytes,
            self._queue.tenants(),
            dict(zip(TIERS, self._queue.depths(), strict=True)),
        )

    # -- placing

    def _ahead_of(self, ticket: Ticket) -> bool:
        """Whether somebody of the same tenant and tier already waits for the same model."""
        return self._queue.group(ticket.pool, ticket.tier).has_line(ticket.tenant, ticket.model)

    def _serve_line(self, line: Iterable[Ticket], looked: Looked) -> bool:
        """Place the first of a line that can be placed; answers whether one was."""
        for ticket in line:
            kind = ticket.kind
            if kind not in looked.full:
                if self._place(ticket):
                    return True
                looked.full[kind] = ticket
            looked.waiting[kind] += 1
            if not ticket.without:  # whoever stands behind it can not be placed either
                looked.waiting[kind] += self._queue.line_length(ticket) - 1
                return False
        return False

    def _release_hopeless(self) -> bool:
        """Refuse whoever no worker can come for in time, wherever it stands; answers whether any was."""
        return sum(self._hopeless(ticket) for ticket in self._alike.too_late(self._tries_at)) > 0

    def _tries_at(self, ticket: Ticket) -> float | None:
        return self._slots.tries_at(ticket.request, ticket.without)

    def _place(self, ticket: Ticket, now: float | None = None) -> bool:
        if self._ask is not None:
            return False
        if self._is_held_back(ticket.tenant) or self._tier_is_full(ticket.pool, ticket.tier):
            return False
        worker = self._slots.choose(ticket.request, ticket.without)
        if worker is None:
            return False
        self._hold(ticket, worker, now)
        return True

    def _place_kept(self, ticket: Ticket) -> bool:
        """Place at once what was granted before, while nobody waits for it."""
        if self._ask is None or len(self._queue) or self._is_held_back(ticket.tenant):
            return False
        kept = self._kept(ticket.tenant, ticket.pool, ticket.tier)
        worker = self._slots.choose_kept(ticket.request, ticket.without, kept) if kept else None
        if worker is None:
            return False
        self._hold(ticket, worker)
        self._ask(False)  # others share what was charged
        return True

    def _hold(self, ticket: Ticket, worker: Worker, at: float | None = None) -> None:
        self.withdraw(ticket)
        ticket.unbounded = None
        slots = self._slots.hold(ticket.request, worker)
        self._running[ticket.tenant] = self._running.get(ticket.tenant, 0) + 1
        self._granted += 1
        self._held += 1
        now = trio.current_time() if at is None else at
        ticket.charged_at = held = ticket.pool, ticket.tier
        ticket.charged = self._queue.charge(ticket, self._estimates.expected(ticket.request), now)
        self._holding[held] = self._holding.get(held, 0) + slots
        lease = Lease(self, ticket.request, worker, slots, held, now)
        self._out.add(lease)
        self._rate(ticket.pool).granted(now)
        ticket.grant(lease)

    def _hopeless(self, ticket: Ticket) -> bool:
        """Refuse a waiter at once if no worker can be tried before its time is up."""
        at = self._slots.tries_at(ticket.request, ticket.without)
        if at is not None and at < ticket.limit:
            return False
        if ticket.last is not None:
            problem = ticket.last
        else:
            problem = self._no_worker(ticket.request) if at is None else self._no_room(ticket.model)
        self.withdraw(ticket)
        ticket.refuse(self.with_retry_after(problem, ticket.model))
        return True

    def _no_worker(self, request: InternalRequest) -> Problem:
        """Why no worker can be tried."""
        problem = self._slots.obstacle(request)
        if problem.status in (429, 503) and problem.retry_after is None:
            return problem.but(retry_after=self._next_turn(self.pool_of(request.model)))
        return problem

    def _no_room(self, model: str) -> Problem:
        """What the workers said to those who asked them, for one who needs not ask any more."""
        problem = Problem.of("engine_overloaded", "all workers of this model said they have no room")
        if self._slots.rejection(model) == 429:
            return problem.but(status=429, type="rate_limit_error")
        return problem

    def _add(self, ticket: Ticket) -> None:
        ticket.queued = True
        ticket.kind = _kind_of(ticket)
        self._queue.add(ticket, trio.current_time())
        self._alike.add(ticket)
        if ticket.unbounded is not None and self._loans is not None:
            self._unbounded[ticket.number] = ticket
            ticket.judged_with = self._loans.lender.ask()
            ticket.judged_at = trio.current_time() + PATIENCE
        if self._ask is not None:
            self._ask(True)

    def _check_room(self, ticket: Ticket) -> None:
        tenant, share = ticket.tenant, self._shares[ticket.tenant]
        if self._queue.depth_of(tenant) >= share.max_queued:
            code = "rate_limit_exceeded" if self._is_at_its_bound(tenant) else "queue_full"
            wait = self._book_return_of(tenant, ticket.pool)
            raise Refused(Problem.of(code, "the queue of this tenant is full", retry_after=wait))
        if len(self._queue) >= self.limits.max_queued:
            raise Refused(self._full(ticket, "the queue is full"))
        if self._queue.bytes + ticket.size > self.limits.max_queued_bytes:
            raise Refused(self._full(ticket, "the queue is full by bytes"))

    def _full(self, ticket: Ticket, message: str) -> Problem:
        return Problem.of("queue_full", message, retry_after=self._book_return(ticket.pool))

    def _check_time(self, ticket: Ticket) -> None:
        """Refuse on arrival who would wait beyond its deadline."""
        now = trio.current_time()
        rate, left = self._rate(ticket.pool), ticket.request.deadline - now
        ahead = self._queue.waiting_for(ticket.model, self._frozen)
        wait = rate.predicted(ahead + 1, now)
        # Who is in time behind everybody is so in any order, which takes longer to look at.
        if wait is None or wait <= left:
            return
        if not self._queue.comes_within(ticket, left * rate.pace(now), self._frozen):
            raise Refused(
                Problem.of(
                    "wait_exceeds_deadline",
                    "the request would wait for a worker until after its deadline",
                    retry_after=self._book_return(ticket.pool),
                )
            )

    # -- when to come back

    def _rate(self, pool: str) -> DrainRate:
        rate = self._rates.get(pool)
        if rate is None:
            rate = self._rates[pool] = DrainRate()
        return rate

    def _returns_of(self, pool: str, tenant: str | None) -> Returns:
        returns = self._returns.get((pool, tenant))
        if returns is None:
            returns = self._returns[pool, tenant] = Returns()
        return returns

    def _waiting_in(self, pool: str) -> int:
        """How many wait for a pool's workers."""
        firsts = self._queue.one_of_each_model()
        return sum(self._queue.waiting_for(first.model) for first in firsts if first.pool == pool)

    def _book_return(self, pool: str) -> float:
        """Promise a refused request the next turn at a pool; answers the seconds until then."""
        now = trio.current_time()
        pace = self._rate(pool).pace(now)
        return self._returns_of(pool, None).book(self._waiting_in(pool), pace, now, self._dice())

    def _book_return_of(self, tenant: str, pool: str) -> float:
        """The same for one whose tenant's queue is full: by the pace at which that tenant is served."""
        now = trio.current_time()
        rate = self._rate(pool)
        pace = self._leases_for(tenant, rate.out) / rate.lasting(now)
        return self._returns_of(pool, tenant).book(self._queue.depth_of(tenant), pace, now, self._dice())

    def _leases_for(self, tenant: str, out: int) -> float:
        """How many of the leases that are out a tenant has at a time: its bound, its share, or more."""
        running = self._running.get(tenant, 0)
        if self._is_at_its_bound(tenant):
            return max(running, 1)
        weight = self._shares[tenant].weight
        waiting = self._queue.tenants().keys() - self._frozen - {tenant}
        others = sum(self._shares[name].weight for name in waiting)
        return max(running, max(out, 1) * weight / (weight + others))

    def _next_turn(self, pool: str) -> float:
        """Seconds until somebody who comes now could be served; promised to nobody."""
        now = trio.current_time()
        return self._returns_of(pool, None).peek(0, self._rate(pool).pace(now), now, self._dice())

    def _next_due(self) -> float:
        due = self._slots.next_opening(self._looked_at) if len(self._queue) else None
        if self._loans is None:
            return math.inf if due is None else due
        told = (each.judged_at for each in self._unbounded.values() if each.judged_with <= self._heard)
        times = (due, self._slots.idle_until(), *told)
        return min((at for at in times if at is not None), default=math.inf)

    # -- leases

    def _returned(
        self, lease: Lease, request: InternalRequest, worker: Worker, slots: int, before: str
    ) -> None:
        if before == "returned":
            self._doubles += 1
            return
        self._out.discard(lease)
        now = trio.current_time()
        if before == "held":
            self._held -= 1
            self.note_held(now - lease.since)
            self._leave_tenant(request.tenant)
            self._holding[lease.counted_at] -= slots
        else:
            self._draining_count -= 1
        self._returned_count += 1
        self._slots.free(request, worker, slots, drained=before == "draining")
        if self._loans is not None:
            self._give_back_recalled(self._loans, worker, lease.counted_at)
        self._rate(lease.counted_at[0]).returned(now, now - lease.since)
        self.dispatch()

    def _give_back_recalled(self, loans: Loans, worker: Worker, counted_at: tuple[str, int]) -> None:
        """What others wait for is not used again here."""
        thing = slots_of(worker.id)
        if loans.lender.recalled(thing) and (slots := self._slots.give_up(worker.id)):
            loans.lender.give_back(thing, slots)
        pool, tier = counted_at
        thing = tier_of(TIERS[tier], pool)
        if loans.lender.recalled(thing):
            loans.keep(thing, self._holding[counted_at])

    def _draining(self, lease: Lease, request: InternalRequest, worker: Worker, slots: int) -> None:
        self._held -= 1
        self.note_held(trio.current_time() - lease.since)
        self._draining_count += 1
        self._leave_tenant(request.tenant)
        self._holding[lease.counted_at] -= slots
        self._slots.drain(request, worker, slots)
        if self._loans is not None:
            self._give_back_recalled(self._loans, worker, lease.counted_at)
        self._drain(worker, lease.attempt_id, lease.release)
        self.dispatch()

    def _leave_tenant(self, tenant: str) -> None:
        left = self._running[tenant] - 1
        if left:
            self._running[tenant] = left
        else:
            del self._running[tenant]
        if self._loans is not None and self._loans.lender.recalled(tenant_of(tenant)):
            self._loans.keep(tenant_of(tenant), left)
        self._take_back(tenant)
