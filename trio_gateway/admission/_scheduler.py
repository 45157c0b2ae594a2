"""The order of those who wait. Pure: time comes as an argument; no clock, no waiting, no Trio.

Tiers are strict; a line that nothing is placed of for long lets its eldest rise by one
tier. Inside a tier and pool tenants share by virtual token counters (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024): whoever was served least, by weight, comes next. Inside a
tenant there is one line per model, so that a full model does not block another; in a
line, first come, first served. Who was sent back keeps its arrival number, and so
stands in front again.

All steps are O(log n), in waiters and tenants.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedKeyList, SortedList


class Waiter(Protocol):
    """What the scheduler must know of one that waits; it sets ``tier`` and ``pool`` when the waiter moves."""

    tier: int  # 0 is the first
    pool: str  # the workers it waits for; models that share workers share a pool

    @property
    def tenant(self) -> str:
        """Who pays."""

    @property
    def model(self) -> str:
        """What it waits for."""

    @property
    def number(self) -> int:
        """Arrival number, unique and growing."""

    @property
    def size(self) -> int:
        """Bytes of its body."""


W = TypeVar("W", bound=Waiter)


class Group(Generic[W]):
    """Those who wait in one tier for one pool, and what its tenants were served.

    A tenant is charged an estimate when it is served, which is settled later; its
    counter has both. One that was idle is lifted, so that it can not save up service:
    when it comes back, to the least that those who wait were really served, or, if
    nobody waits, to that of the last one that left. Estimates do not lift: who comes
    must not pay for what others are given back.

    The paper has one model, and no tenant that waits though there is room. Here only those
    are a measure for who comes that wait for the same model. One with a bound of its
    own is served less for it: while it is set aside it is nobody's measure, and when it is taken
    back it is lifted as if it had been idle, but for what it has open: else one whose bound is
    just its share would lose a little each time. If no measure waits, nobody starts below any of
    whom a request for the model was placed, the virtual time of start-time fair queueing (Goyal
    et al., SIGCOMM 1996): the one that was served most may never have waited, or be set aside.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._settled: dict[str, float] = {}  # tokens for its weight, by tenant
        self._open: dict[str, float] = {}  # the same, charged and not settled
        self._lines: dict[str, dict[str, list[W]]] = {}  # by tenant and model, each by arrival
        self._order: SortedList = SortedList()  # counter and name of the tenants that are not set aside
        self._aside: set[str] = set()
        # By model: what was settled, and name, of those in the order that wait for it; the last one that
        # left; the most that was settled for one of whom a request was placed.
        self._floors: dict[str, SortedList] = {}
        self._last_left: dict[str, str] = {}
        self._reached: dict[str, float] = {}
        self._spent: dict[str, tuple[float, float]] = {}  # what tenants were charged since `take_spent`

    def __bool__(self) -> bool:
        return bool(self._lines)

    def counter(self, tenant: str) -> float:
        """Tokens that a tenant was served for its weight, estimates included."""
        return self.settled(tenant) + self._open.get(tenant, 0.0)

    def settled(self, tenant: str) -> float:
        """Tokens that a tenant was really served for its weight."""
        return self._settled.get(tenant, 0.0)

    def add(self, waiter: W) -> None:
        """Let a waiter in."""
        if not self.has_line(waiter.tenant, waiter.model):
            self._open_line(waiter.tenant, waiter.model)
        bisect.insort(self._lines[waiter.tenant][waiter.model], waiter, key=_number)

    def remove(self, waiter: W) -> None:
        """Take a waiter out. Raises KeyError if it is not in."""
        lines = self._lines.get(waiter.tenant, {})
        line = lines.get(waiter.model, [])
        at = bisect.bisect_left(line, waiter.number, key=_number)
        if at == len(line) or line[at] is not waiter:
            raise KeyError(waiter.number)
        del line[at]
        if not line:
            self._close_line(waiter.tenant, waiter.model)

    def charge(self, tenant: str, model: str, estimate: float) -> float:
        """Count tokens that a tenant is about to be served of a model; `settle` follows for each charge.

        Answers what was charged, in tokens for its weight, which may be another one when it is settled.
        """
        if tenant not in self._lines:
            self._lift(tenant, model)
            self._last_left[model] = tenant
        self._reached[model] = max(self._reached.get(model, 0.0), self.settled(tenant))
        charged = estimate / self._weight(tenant)
        self._change(tenant, 0.0, charged)
        return charged

    def settle(self, tenant: str, charged: float, used: float) -> None:
        """Put tokens that were really used in the place of what `charge` answered."""
        self._change(tenant, used / self._weight(tenant), -charged)

    def take_spent(self) -> dict[str, tuple[float, float]]:
        """Answer what tenants were charged for their weight since the last call, and settled of it."""
        spent, self._spent = self._spent, {}
        return spent

    def _change(self, tenant: str, settled: float, opened: float) -> None:
        charged, really = self._spent.get(tenant, (0.0, 0.0))
        self._spent[tenant] = charged + settled + opened, really + settled
        waits = tenant in self._lines
        if waits:
            self._take_out(tenant)
        self._settled[tenant] = self.settled(tenant) + settled
        left = self._open.get(tenant, 0.0) + opened
        if left > _ROUNDING:
            self._open[tenant] = left
        else:
            self._open.pop(tenant, None)
        if waits:
            self._put_in(tenant)

    def set_aside(self, tenant: str) -> None:
        """Leave a tenant out of the order until `take_back`: nothing of it can be placed."""
        if tenant in self._lines and tenant not in self._aside:
            self._take_out(tenant)
            self._aside.add(tenant)

    def take_back(self, tenant: str, *, idle: bool = False) -> None:
        """Let a tenant stand in the order again. Idempotent.

        Args:
            idle: it was kept out by somebody's will, and comes back as one that had not been there.
        """
        if tenant in self._aside:
            self._aside.discard(tenant)
            models = self._lines[tenant]
            if idle:
                self._raise(tenant, min(map(self._start, models)))
            elif floors := [floor for model in models if (floor := self._floor(model)) is not None]:
                self._raise(tenant, min(floors) - self._open.get(tenant, 0.0))
            self._put_in(tenant)

    def has_line(self, tenant: str, model: str) -> bool:
        """Whether anybody of a tenant waits here for a model."""
        return model in self._lines.get(tenant, {})

    def line(self, tenant: str, model: str) -> Iterator[list[W]]:
        """The line of a tenant for a model, if there is one."""
        if self.has_line(tenant, model):
            yield self._lines[tenant][model]

    def lines_of(self, model: str) -> Iterator[tuple[str, list[W]]]:
        """Tenants of which somebody waits here for a model, each with its line, in no order."""
        for tenant, lines in self._lines.items():
            if model in lines:
                yield tenant, lines[model]

    def heads(self, waiter: W) -> bool:
        """Whether a waiter is the first of its line."""
        return any(line[0] is waiter for line in self.line(waiter.tenant, waiter.model))

    def lines(self) -> Iterator[list[W]]:
        """Lines in the order in which they are to be served; the caller stops when it has served one."""
        for _, tenant in tuple(self._order) if len(self._order) < _FEW else self._order:
            lines = self._lines[tenant].values()
            yield from lines if len(lines) < 2 else sorted(lines, key=_head_number)

    def named_lines(self) -> Iterator[tuple[str, str, list[W]]]:
        """All lines with the tenant and the model of each, in no order."""
        for tenant, lines in self._lines.items():
            for model, line in lines.items():
                yield tenant, model, line

    def all_lines(self) -> Iterator[list[W]]:
        """All lines, in no order, those that were set aside too."""
        for lines in tuple(self._lines.values()):
            yield from tuple(lines.values())

    # -- counters

    def _open_line(self, tenant: str, model: str) -> None:
        if tenant in self._lines:
            self._take_out(tenant)
        else:
            self._lift(tenant, model)
        self._lines.setdefault(tenant, {})[model] = []
        self._put_in(tenant)

    def _close_line(self, tenant: str, model: str) -> None:
        self._take_out(tenant)
        self._last_left[model] = tenant
        del self._lines[tenant][model]
        if self._lines[tenant]:
            self._put_in(tenant)
        else:
            del self._lines[tenant]
            self._aside.discard(tenant)

    def _lift(self, tenant: str, model: str) -> None:
        self._raise(tenant, self._start(model))

    def _start(self, model: str) -> float:
        """The least with which one begins that comes for a model."""
        floor = self._floor(model)
        if floor is None:
            floor = self._reached.get(model, 0.0)
            if model in self._last_left:
                floor = max(floor, self.settled(self._last_left[model]))
        return floor

    def _floor(self, model: str) -> float | None:
        """The least that was settled for one in the order that waits for a model."""
        floors = self._floors.get(model)
        return floors[0][0] if floors else None

    def _raise(self, tenant: str, floor: float) -> None:
        self._settled[tenant] = max(self.settled(tenant), floor)

    def _take_out(self, tenant: str) -> None:
        if tenant not in self._aside:
            self._order.remove((self.counter(tenant), tenant))
            for model in self._lines[tenant]:
                self._floors[model].remove((self.settled(tenant), tenant))

    def _put_in(self, tenant: str) -> None:
        if tenant not in self._aside:
            self._order.add((self.counter(tenant), tenant))
            for model in self._lines[tenant]:
                self._floors.setdefault(model, SortedList()).add((self.settled(tenant), tenant))


_FEW = 64  # tenants that are copied before they are walked
_ROUNDING = 1e-6  # tokens that sums of floats may leave over


class _Ages(Generic[W]):
    """Since when those wait in one tier that one tenant has there for one model, the eldest first.

    Who left is not among them: it would keep its body.
    """

    def __init__(self) -> None:
        self.waiters: OrderedDict[int, tuple[float, W]] = OrderedDict()  # by number
        self.moved = -math.inf  # when one of them was placed

    def since(self) -> float:
        """Since when the eldest waits, and none was placed."""
        came, _ = next(iter(self.waiters.values()))
        return max(came, self.moved)


class Scheduler(Generic[W]):
    """All waiters of one gateway, with their counts and bytes.

    Args:
        tiers: how many there are.
        promote_after: seconds after which the eldest of a tenant rises by one tier, if in these
            nobody of its line was placed, and none rose.
        weight: answers a tenant's weight, which may change between two calls.
    """

    def __init__(self, tiers: int, promote_after: float, weight: Callable[[str], float]) -> None:
        self._tiers = tiers
        self._promote_after = promote_after
        self._weight = weight
        self._groups: dict[tuple[str, int], Group[W]] = {}  # by pool and tier
        self._by_model: dict[str, SortedKeyList] = {}
        # By tier, tenant and model; for each there is one moment in the heap, which is never too late.
        # Who is in the first tier can not rise, and stands in none.
        self._ages: dict[tuple[int, str, str], _Ages[W]] = {}
        self._due: list[tuple[float, tuple[int, str, str]]] = []
        self._of_tenant: dict[str, int] = {}
        self._of_tier = [0] * tiers
        self._waiting: dict[int, W] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        """Bytes of all waiting bodies."""
        return self._bytes

    def depth_of(self, tenant: str) -> int:
        """How many of a tenant wait."""
        return self._of_tenant.get(tenant, 0)

    def depths(self) -> list[int]:
        """How many wait in each tier."""
        return list(self._of_tier)

    def depths_of(self, pool: str) -> list[int]:
        """How many wait for a pool, in each tier."""
        found = [0] * self._tiers
        for tier, group in self.groups(pool):
            found[tier] = sum(map(len, group.all_lines()))
        return found

    def service_of(self, tenant: str) -> float:
        """Tokens that a tenant was served for its weight, of all groups together."""
        return sum(group.counter(tenant) for group in self._groups.values())

    def tenants(self) -> dict[str, int]:
        """Depth by tenant, of those that have any."""
        return dict(self._of_tenant)

    def waits(self, waiter: W) -> bool:
        """Whether it waits."""
        return self._waiting.get(waiter.number) is waiter

    def waiting_for(self, model: str, without: Collection[str] = ()) -> int:
        """How many wait for a model, but for those of some tenants."""
        return len(self._by_model.get(model, ())) - sum(
            len(line) for tenant in without for line in self._lines_of(tenant, model)
        )

    def place_of(self, waiter: W, without: Collection[str] = ()) -> int:
        """Position from 1 by arrival, among all that wait for the same model but those of some tenants."""
        before = int(self._by_model[waiter.model].bisect_key_left(waiter.number))
        passed = (
            bisect.bisect_left(line, waiter.number, key=_number)
            for tenant in without
            for line in self._lines_of(tenant, waiter.model)
        )
        return 1 + before - sum(passed)

    def place_in_tenant(self, waiter: W) -> int:
        """Position from 1 by arrival, among those of its tenant that wait for the same model."""
        lines = self._lines_of(waiter.tenant, waiter.model)
        return 1 + sum(bisect.bisect_left(line, waiter.number, key=_number) for line in lines)

    def comes_within(self, waiter: W, turns: float, without: Collection[str] = ()) -> bool:
        """Whether one who is not in yet is probably among the next ``turns`` that are placed for its model.

        Before it come those of the tiers above, those of its own line, and of each other tenant of its
        tier as many as the weights let come until then. What tenants were served is left out: who was
        served more than others comes later than this says.

        Args:
            without: tenants of which nothing is placed.
        """
        left = turns - 1
        for count in self._before(waiter, without):
            if left < count:
                return False
            left -= count
        return left >= 0

    def _before(self, waiter: W, without: Collection[str]) -> Iterator[int]:
        """How many are probably placed before one who is not in yet, in parts."""
        for tier, group in self.groups(waiter.pool):
            if tier > waiter.tier:
                return
            own = sum(map(len, group.line(waiter.tenant, waiter.model)))
            for tenant, line in group.lines_of(waiter.model):
                if tenant in without:
                    continue
                if tier < waiter.tier or tenant == waiter.tenant:
                    yield len(line)
                    continue
                share = self._weight(tenant) / self._weight(waiter.tenant)
                yield min(len(line), math.ceil((own + 1) * share))

    def _lines_of(self, tenant: str, model: str) -> Iterator[list[W]]:
        """The lines of a tenant for a model, in all tiers."""
        if self.depth_of(tenant):
            for group in self._groups.values():
                yield from group.line(tenant, model)

    def line_length(self, waiter: W) -> int:
        """How many of its tenant wait in its tier for its model, itself included."""
        return sum(map(len, self.group(waiter.pool, waiter.tier).line(waiter.tenant, waiter.model)))

    def heads_its_line(self, waiter: W) -> bool:
        """Whether nobody of its tenant stands before it, in its tier and for its model."""
        return self.group(waiter.pool, waiter.tier).heads(waiter)

    def __iter__(self) -> Iterator[W]:
        """All waiters by arrival."""
        return heapq.merge(*map(tuple, self.all_lines()), key=_number)

    # -- coming and going

    def add(self, waiter: W, now: float) -> None:
        """Put a waiter where its arrival number belongs."""
        self._enter_group(waiter, now)
        self._waiting[waiter.number] = waiter
        self._by_model.setdefault(waiter.model, SortedKeyList(key=_number)).add(waiter)
        self._bytes += waiter.size
        self._of_tenant[waiter.tenant] = self.depth_of(waiter.tenant) + 1

    def remove(self, waiter: W) -> None:
        """Take a waiter out. Raises KeyError if it does not wait."""
        if not self.waits(waiter):
            raise KeyError(waiter.number)
        self._leave_group(waiter)
        del self._waiting[waiter.number]
        self._by_model[waiter.model].remove(waiter)
        if not self._by_model[waiter.model]:
            del self._by_model[waiter.model]
        self._bytes -= waiter.size
        left = self.depth_of(waiter.tenant) - 1
        if left:
            self._of_tenant[waiter.tenant] = left
        else:
            del self._of_tenant[waiter.tenant]

    def charge(self, waiter: W, estimate: float, now: float) -> float:
        """Count tokens that the tenant of one who is placed is about to be served; see `Group.charge`."""
        ages = self._ages.get(_line_of(waiter))
        if ages is not None:
            ages.moved = now
        return self.group(waiter.pool, waiter.tier).charge(waiter.tenant, waiter.model, estimate)

    def promote(self, now: float) -> None:
        """Let the eldest rise of each line that did not move for long: one, and the next after as long.

        A line that moves is not kept waiting by those above it, but by its own length: a flood
        that rose for its age would stand before those who share its tier.
        """
        while self._due and self._due[0][0] <= now:
            _, key = heapq.heappop(self._due)
            ages = self._ages[key]
            if not ages.waiters:
                del self._ages[key]
                continue
            due = ages.since() + self._promote_after
            if due <= now:
                self._rise(next(iter(ages.waiters.values()))[1], now)
                due = now + self._promote_after
            heapq.heappush(self._due, (due, key))

    def _rise(self, waiter: W, now: float) -> None:
        self._leave_group(waiter)
        waiter.tier -= 1
        self._enter_group(waiter, now)

    def move(self, model: str, pool: str) -> None:
        """Let all that wait for a model wait for another pool: workers came or went. None gets younger."""
        for waiter in tuple(self._by_model.get(model, ())):
            if waiter.pool != pool:
                self.group(waiter.pool, waiter.tier).remove(waiter)
                waiter.pool = pool
                self.group(pool, waiter.tier).add(waiter)

    def _enter_group(self, waiter: W, now: float) -> None:
        self.group(waiter.pool, waiter.tier).add(waiter)
        self._of_tier[waiter.tier] += 1
        if waiter.tier:
            self._ages_of(waiter, now).waiters[waiter.number] = now, waiter

    def _leave_group(self, waiter: W) -> None:
        self.group(waiter.pool, waiter.tier).remove(waiter)
        self._of_tier[waiter.tier] -= 1
        if waiter.tier:
            del self._ages[_line_of(waiter)].waiters[waiter.number]

    def _ages_of(self, waiter: W, now: float) -> _Ages[W]:
        key = _line_of(waiter)
        ages = self._ages.get(key)
        if ages is None:
            ages = self._ages[key] = _Ages()
            heapq.heappush(self._due, (now + self._promote_after, key))
        return ages

    # -- the order

    def all_groups(self) -> Iterator[tuple[str, int, Group[W]]]:
        """All groups that ever were, each with its pool and tier."""
        for (pool, tier), group in self._groups.items():
            yield pool, tier, group

    def pools(self) -> list[str]:
        """Pools for which somebody waits."""
        return list(dict.fromkeys(pool for (pool, _), group in self._groups.items() if group))

    def all_lines(self) -> Iterator[list[W]]:
        """All lines, in no order."""
        for group in self._groups.values():
            yield from group.all_lines()

    def one_of_each_model(self) -> list[W]:
        """The one that came first, for each model that is waited for."""
        return [waiters[0] for waiters in self._by_model.values()]

    def groups(self, pool: str) -> Iterator[tuple[int, Group[W]]]:
        """Tiers in which somebody waits for a pool, the first first."""
        for tier in range(self._tiers):
            group = self._groups.get((pool, tier))
            if group:
                yield tier, group

    def group(self, pool: str, tier: int) -> Group[W]:
        """Answer the group of a pool and tier."""
        group = self._groups.get((pool, tier))
        if group is None:
            group = self._groups[pool, tier] = Group(self._weight)
        return group

    def promote_after(self, seconds: float) -> None:
        """Let the eldest rise after another time from now on; who has waited as long rises next."""
        self._promote_after = seconds
        self._due = [(ages.since() + seconds, key) for key, ages in self._ages.items() if ages.waiters]
        self._ages = {key: self._ages[key] for _, key in self._due}
        heapq.heapify(self._due)

    def set_aside(self, tenant: str, pool: str) -> None:
        """Leave a tenant out of a pool's order: its own bound is reached."""
        for tier in range(self._tiers):
            if (group := self._groups.get((pool, tier))) is not None:
                group.set_aside(tenant)

    def take_back(self, tenant: str, *, idle: bool = False) -> None:
        """Let a tenant stand in every order again; see `Group.take_back`. Idempotent."""
        for group in self._groups.values():
            group.take_back(tenant, idle=idle)


def _number(waiter: Waiter) -> int:
    return waiter.number


def _line_of(waiter: Waiter) -> tuple[int, str, str]:
    return waiter.tier, waiter.tenant, waiter.model


def _head_number(line: list[W]) -> int:
    return line[0].number
