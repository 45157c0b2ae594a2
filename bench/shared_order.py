"""The order of tenants over many replicas, with a store that all of them ask and without one.

Each replica is flooded by the tenants that are connected to it: as soon as one of a
tenant is served, another waits. Two ways to divide the slots:

* ``split``: each replica has its part of them, and serves whom its own order names.
* ``store``: one order for all, as a store has that grants slots to replicas; a slot that
  is given back is told in the replica's next turn, and who gets it hears of it in its own.

The order is the package's (`Group`). Slots, tokens and clocks are simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from trio_gateway.admission.cores import Group

MODEL: Final = "m"
WEIGHTS: Final = (1.0, 2.0, 4.0)
SPREAD: Final = 0.8  # of the logarithm of an answer's length


@dataclass(eq=False)
class Waiting:
    """One that waits, as `Group` wants it."""

    tenant: str
    number: int
    tier: int = 0
    pool: str = MODEL
    model: str = MODEL
    size: int = 1


@dataclass(frozen=True)
class Flood:
    """One situation.

    Attributes:
        replicas: how many.
        slots: of all workers together.
        tenants: their weights are 1, 2 and 4 by turns, and the answers of some are longer than others'.
        homes: replicas that each tenant is connected to.
        store: all ask one store; else slots are divided by number.
        look: seconds between two turns of a replica at the store while somebody waits.
        trip: seconds that a turn takes.
        mean_service: seconds of an answer of usual length.
        seconds: simulated; the first quarter is not counted.
    """

    replicas: int
    slots: int = 400
    tenants: int = 12
    homes: int = 1
    store: bool = False
    look: float = 0.02
    trip: float = 0.001
    mean_service: float = 2.0
    seconds: float = 120.0


@dataclass
class Shares:
    """What came of it.

    Attributes:
        service: tokens for its weight, by tenant.
        busy: share of the slots' time that was used.
        turns: at the store, a second.
    """

    service: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0
    turns: float = 0.0

    @property
    def worst(self) -> float:
        """The least that a tenant had, by the mean."""
        return min(self.service.values()) / (sum(self.service.values()) / len(self.service))


class Flooded:
    """One run. `run` answers what came of it."""

    def __init__(self, flood: Flood, seed: int) -> None:
        self._flood = flood
        self._dice = random.Random(f"flood {seed}")
        self._numbers = itertools.count()
        self._order = itertools.count()
        self._names = [f"t{number:03d}" for number in range(flood.tenants)]
        self._weights = {name: WEIGHTS[place % len(WEIGHTS)] for place, name in enumerate(self._names)}
        self._homes = {
            name: [(place + step) % flood.replicas for step in self._steps()]
            for place, name in enumerate(self._names)
        }
        self._phase = [self._dice.random() * flood.look for _ in range(flood.replicas)]
        self._ends: list[tuple[float, int, int, str, float, float]] = []
        self._used = 0.0
        self.shares = Shares(dict.fromkeys(self._names, 0.0))
        parts = 1 if flood.store else flood.replicas
        self._groups = [Group[Waiting](self._weights.__getitem__) for _ in range(parts)]
        self._free = [self._slots_of(part, parts) for part in range(parts)]
        for name in self._names:
            for home in [0] if flood.store else self._homes[name]:
                self._wait(home, name)

    def _steps(self) -> Iterator[int]:
        """Which replicas a tenant is connected to, from its first one on."""
        flood = self._flood
        return (step * flood.replicas // flood.homes for step in range(min(flood.homes, flood.replicas)))

    def _slots_of(self, part: int, parts: int) -> int:
        slots = self._flood.slots
        return slots * (part + 1) // parts - slots * part // parts

    def run(self) -> Shares:
        """Play it to its end."""
        for part in range(len(self._groups)):
            self._serve(part, 0.0)
        flood = self._flood
        while self._ends and self._ends[0][0] < flood.seconds:
            now, _, part, tenant, charged, tokens = heapq.heappop(self._ends)
            self._groups[part].settle(tenant, charged, tokens)
            if now >= flood.seconds / 4:
                self.shares.service[tenant] += tokens / self._weights[tenant]
            self._free[part] += 1
            self._serve(part, now)
        counted = flood.seconds * 3 / 4
        self.shares.busy = self._used / (flood.slots * counted)
        if flood.store:
            self.shares.turns = len({home for homes in self._homes.values() for home in homes}) / (
                flood.look + flood.trip
            )
        return self.shares

    def _wait(self, part: int, tenant: str) -> None:
        self._groups[part].add(Waiting(tenant, next(self._numbers)))

    def _serve(self, part: int, now: float) -> None:
        group = self._groups[part]
        while self._free[part]:
            line = next(group.lines(), None)
            if line is None:
                return
            waiter = line[0]
            group.remove(waiter)
            self._free[part] -= 1
            self._begin(part, waiter.tenant, now)
            self._wait(part, waiter.tenant)

    def _begin(self, part: int, tenant: str, now: float) -> None:
        """Let one answer begin when its replica knows that it may; it takes as long as it has tokens."""
        flood = self._flood
        usual = 100.0 * (1 + self._names.index(tenant) % 4)
        tokens = usual * self._dice.lognormvariate(-(SPREAD**2) / 2, SPREAD)
        charged = self._groups[part].charge(tenant, MODEL, usual)
        start = now + self._idle(tenant, now) if flood.store else now
        end = start + tokens / 250 * flood.mean_service
        counted = max(min(end, flood.seconds) - max(start, flood.seconds / 4), 0.0)
        self._used += counted
        heapq.heappush(self._ends, (end, next(self._order), part, tenant, charged, tokens))

    def _idle(self, tenant: str, now: float) -> float:
        """Seconds for which a slot is nobody's: until it is told, and until who gets it looks."""
        flood = self._flood
        every = flood.look + flood.trip
        phase = self._phase[self._dice.choice(self._homes[tenant])]
        told = now + flood.trip
        hears = math.ceil((told - phase) / every) * every + phase + flood.trip
        return hears - now


def flooded(flood: Flood, seed: int) -> Shares:
    """Play one flood."""
    return Flooded(flood, seed).run()
