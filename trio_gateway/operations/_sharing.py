"""This process as the store of a cluster sees it: what it has, wants and was charged, what it is granted.

What workers say to one replica, others hear from it: who is there, and in which state; and which workers a
breaker spares. That goes along with turns that are taken anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from secrets import token_hex
from typing import Final

import trio

from ..admission import TIERS, Admission, Line
from ..cluster import (
    ONCE,
    Grant,
    Heard,
    Member,
    News,
    Standing,
    Survey,
    Vouching,
    Want,
    field_of,
    share_of,
)
from ..errors import Problem
from ..fleet import UNTOUCHED, Fleet, Registrations, Seen, Turned, slots_for
from ..tenancy import RateBook
from ..wire import Registration, WorkerNews, read_message, write_message

LOOK_AT_RATES: Final = 0.05  # seconds between two looks at what others used of rates that are used here
MOST_AT_ONCE: Final = 32  # wanted for one line at a time
MOST_LINES: Final = 10_000  # remembered
FROZEN: Final = "frozen:"
TOUCHED: Final = "worker:"
WORKER: Final = "worker:"
SALT: Final = ONCE + "salt"
REGISTERED: Final = "registered:"
SPARED: Final = "spared:"
MOST_SLOTS: Final = 2**31  # more than any worker has


class SharedSecrets:
    """Makes the secrets of workers that register, so that all replicas have the same.

    Attributes:
        salt: of the cluster; None: the store was not reached yet.
    """

    def __init__(self, vouching: Vouching) -> None:
        self.vouching: Final = vouching
        self.salt: str | None = None

    def make(self, asked: Registration) -> str:
        """Make the secret of a worker.

        Raises:
            Turned: 503 the store was not reached yet.
        """
        if self.salt is None:
            raise Turned(503, "the store that gateways share was not reached yet")
        return self.vouching.secret_for(self.salt, asked.worker_id, asked.incarnation, asked.url)


class Sharing:
    """See the module's docstring, and `Local`.

    Args:
        member: what is kept of the store.
        registrations, secrets: of workers that register; None: none can.
        make_salt: makes one that nobody can guess.
        split: while the store is lost, place by this replica's share; else refuse.
    """

    def __init__(
        self,
        admission: Admission,
        fleet: Fleet,
        rates: RateBook,
        member: Member,
        *,
        split: bool,
        registrations: Registrations | None = None,
        secrets: SharedSecrets | None = None,
        make_salt: Callable[[], str] = token_hex,
    ) -> None:
        self._admission = admission
        self._fleet = fleet
        self._rates = rates
        self._member = member
        self._split = split
        self._registrations = registrations
        self._secrets = secrets
        self._make_salt = make_salt
        self._salt = ""
        self._sealed: dict[str, tuple[Seen, str]] = {}
        self._lines: dict[str, Line] = {}
        self._used: dict[str, float] = {}
        self._looked = 0.0

    # -- telling

    def survey(self) -> Survey:
        """See Local."""
        caps = {_worker(book.worker.id): book.configured_slots for book in self._fleet.books.values()}
        have = {_worker(b.worker.id): n for b in self._fleet.books.values() if (n := b.held + b.draining)}
        for tenant, running in self._admission.running_by_tenant().items():
            if self._admission.share_of(tenant).max_concurrency is not None:
                have[_tenant(tenant)] = running
        for (pool, tier), slots in self._admission.holding().items():
            if self._most_of(tier) < 1:
                have[_tier(pool, tier)] = slots
        want = {}
        for line in self._admission.lines(MOST_AT_ONCE):
            if (wanted := self._want(line)) is not None:
                key = f"{line.tier}|{line.pool}|{line.tenant}|{line.model}"
                want[key], self._lines[key] = wanted, line
                self._cap(line, caps)
        while len(self._lines) > MOST_LINES:
            del self._lines[next(iter(self._lines))]
        spent = {
            field_of(_group(pool, tier), tenant): both
            for (pool, tier, tenant), both in self._admission.take_spent().items()
        }
        return Survey(caps, have, want, spent, dict(self._rates_to_tell()), self._marks(), self._news())

    def _want(self, line: Line) -> Want | None:
        best, workers = self._fleet.open_workers(line.first, line.without)
        if not workers:
            return None
        slots = slots_for(line.first, best or workers[0])
        bound = self._admission.share_of(line.tenant).max_concurrency
        return Want(
            count=line.alike,
            tier=line.tier,
            group=_group(line.pool, line.tier),
            tenant=line.tenant,
            slots=slots,
            any=() if best is None else (_worker(best.id),),
            rest="\n".join(_worker(each.id) for each in workers if slots_for(line.first, each) == slots),
            also=() if bound is None else (_tenant(line.tenant),),
            wide=() if self._most_of(line.tier) >= 1 else (_tier(line.pool, line.tier),),
            cost=float(f"{line.cost:.2g}"),
        )

    def _cap(self, line: Line, caps: dict[str, int]) -> None:
        """Tell the bounds that a line needs."""
        bound = self._admission.share_of(line.tenant).max_concurrency
        if bound is not None:
            caps[_tenant(line.tenant)] = bound
        if (most := self._most_of(line.tier)) < 1:
            slots = self._fleet.pool_slots(line.pool)
            caps[_tier(line.pool, line.tier)] = max(int(most * slots), 1)

    def _most_of(self, tier: int) -> float:
        return self._admission.limits.max_shares.get(TIERS[tier], 1.0)

    def _rates_to_tell(self) -> Iterator[tuple[str, tuple[float, int]]]:
        """What was used of rates and not told yet; sometimes also of those that others may have used."""
        now = trio.current_time()
        look = now >= self._looked + LOOK_AT_RATES
        if look:
            self._looked = now
        for name, bucket in self._rates.buckets():
            if bucket.used != self._used.get(name) or (look and bucket.until_full(now)):
                self._used[name] = bucket.used
                yield name, (bucket.used, bucket.size)

    def _marks(self) -> dict[str, str]:
        frozen = {FROZEN + tenant: "1" for tenant in self._admission.frozen}
        touched = {TOUCHED + worker: how for worker, how in self._fleet.touched.items()}
        return frozen | touched | ({SALT: self._salt} if self._salt else {})

    def _news(self) -> dict[str, News]:
        """What workers said here, and of which of them breakers opened here."""
        spared = {
            f"{SPARED}{worker}\n{model}": News("", left=round(1000 * left), stamp=opening)
            for worker, model, left, opening in self._fleet.spared()
        }
        return spared | dict(self._workers_to_tell())

    def _workers_to_tell(self) -> Iterator[tuple[str, News]]:
        if self._registrations is None or self._secrets is None or self._secrets.salt is None:
            return
        before, self._sealed = self._sealed, {}
        for seen in self._registrations.news():
            asked = seen.news.registration
            name = REGISTERED + asked.worker_id
            known, value = before.get(name, (None, ""))
            if seen != known:
                value = self._secrets.vouching.seal(name, write_message(seen.news).decode())
            self._sealed[name] = seen, value
            rank = f"{asked.incarnation:020}{seen.news.gone:d}"
            yield name, News(value, rank, round(1000 * seen.left), seen.period)

    def kept(self, tenant: str, pool: str, tier: int) -> Mapping[str, int]:
        """Slots that the store counts as had here and nobody uses, by worker, that are a tenant's to use."""
        counted = self._member.kept(trio.current_time())
        if not counted or (most := self._most_kept(counted, tenant, pool, tier)) < 1:
            return {}
        return {
            book.worker.id: min(spare, most)
            for name, count in counted.items()
            if name.startswith(WORKER)
            and (book := self._fleet.books.get(name[len(WORKER) :])) is not None
            and (spare := count - book.held - book.draining) > 0
        }

    def _most_kept(self, counted: Mapping[str, int], tenant: str, pool: str, tier: int) -> int:
        """How many slots more are counted for the tier, if one exchange more is for the tenant."""
        if self._admission.share_of(tenant).max_concurrency is not None:
            running = self._admission.running_by_tenant().get(tenant, 0)
            if counted.get(_tenant(tenant), 0) <= running:
                return 0
        if self._most_of(tier) >= 1:
            return MOST_SLOTS
        return counted.get(_tier(pool, tier), 0) - self._admission.holding().get((pool, tier), 0)

    # -- hearing

    def use(self, heard: Heard) -> bool:
        """See Local."""
        useful = [self._use_grant(grant) for grant in heard.grants]
        now = trio.current_time()
        buckets = dict(self._rates.buckets()) if heard.rates else {}
        for name, (until_full, used) in heard.rates.items():
            if name in buckets:
                buckets[name].agree(until_full, used, now)
        for name, value in heard.marks.items():
            self._take_mark(name, value)
        self._agree_on_salt()
        for name, news in heard.news.items():
            self._take_news(name, news)
        return all(useful)

    def _agree_on_salt(self) -> None:
        """Have the salt that the store has; it takes the first that it is told.

        A store that has just begun may be told an older one yet, by those who were here before.
        """
        if self._secrets is None:
            return
        if not self._salt:
            self._salt = "" if self._member.settling else self._make_salt()
        elif self._member.agreed(SALT) == self._salt:
            self._secrets.salt = self._salt

    def _take_news(self, name: str, news: News) -> None:
        left = news.left / 1000
        if name.startswith(SPARED):
            worker, _, model = name.removeprefix(SPARED).partition("\n")
            self._fleet.hint(worker, model, left)
        elif name.startswith(REGISTERED) and self._registrations is not None and self._secrets is not None:
            text = self._secrets.vouching.opened(name, news.value)
            if text is not None:
                try:
                    told = read_message(text.encode(), WorkerNews)
                except ValueError:
                    return  # another version says it otherwise
                self._registrations.told(told, left)

    def _use_grant(self, grant: Grant) -> bool:
        line = self._lines.get(grant.want)
        if line is None:
            return False
        # It was charged at the store; what admission charges now is told besides.
        self._member.charge(_group(line.pool, line.tier), line.tenant, -grant.cost)
        return self._admission.grant(line, grant.worker.removeprefix(WORKER))

    def _take_mark(self, name: str, value: str) -> None:
        if name.startswith(FROZEN):
            tenant = name.removeprefix(FROZEN)
            self._admission.freeze(tenant) if value else self._admission.thaw(tenant)
        elif name.startswith(TOUCHED):
            self._fleet.touch_anywhere(name.removeprefix(TOUCHED), value or UNTOUCHED)
        elif name == SALT:
            self._salt = value or self._salt

    def stand(self, standing: Standing, members: tuple[str, ...], poke: Callable[[bool], None]) -> None:
        """See Local."""
        if standing is Standing.SHARED:
            self._divide(None, 1)
            self._admission.place_by_grants(poke, self.kept)
        elif standing is Standing.ALONE and self._split:
            me = self._member.replica
            self._divide(lambda worker, slots: share_of(slots, worker, me, members), len(members))
            self._admission.place_freely()
        else:
            reason = "what all replicas share can not be reached now"
            self._admission.place_nothing(Problem.of("no_worker", reason, retry_after=1.0))

    def _divide(self, portion: Callable[[str, int], int] | None, parties: int) -> None:
        self._fleet.divide(portion)
        self._admission.parties = self._rates.parties = parties


def _worker(worker_id: str) -> str:
    return f"{WORKER}{worker_id}"


def _tenant(tenant: str) -> str:
    return f"tenant:{tenant}"


def _tier(pool: str, tier: int) -> str:
    return f"tier:{TIERS[tier]}|{pool}"


def _group(pool: str, tier: int) -> str:
    return f"{TIERS[tier]}|{pool}"
