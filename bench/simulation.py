"""A fleet in simulated time: gateways that decide from views of their own, and workers that hold the truth.

The gateways decide with the package's own cores (`choose`, `Snapshot`, `Outage`), or
with a baseline in place of `choose`; everything around them is the same for all. One
seed gives one story: arrivals, sizes and prefixes do not depend on the policy.

What it leaves out: networks without delay, workers that never fail, and generation
whose speed does not depend on how many run together.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from trio_gateway.fleet.cores import (
    LOOKED_AT,
    MANY,
    Candidate,
    Outage,
    Snapshot,
    Source,
    choose,
    drawn,
    filtered,
)

MOST_ATTEMPTS: Final = 3  # retry.max_attempts
FRESH: Final = 0.02  # seconds; how old news may be for an attempt that is the last
STALE: Final = 3.0  # seconds, after which a snapshot is not believed
SAMPLED: Final = 0.25  # seconds between two looks at all workers

Policy = Callable[[Sequence[Candidate], random.Random, Sequence[bytes], "Gateway"], Candidate | None]


@dataclass(frozen=True)
class Setting:
    """One situation.

    Attributes:
        agents: workers reject what is over their slots, as agents do; else they queue it, as engines do.
        load: mean work offered, as a share of all slots.
        period: seconds between two readings of one worker by one gateway.
        told: ``apart`` if each gateway reads each worker at moments of its own, ``at once`` if a worker
            tells all gateways at the same moment, ``together`` if a gateway reads all workers at one moment.
        mean_service: seconds that a request holds its slot, on average; log-normal.
        spread: of the logarithm of that time.
        burst: requests that arrive together, on average (geometric); 1: a Poisson process.
        seconds: simulated time; the first quarter warms up and is not counted.
        prefixes: how many there are; 0: requests share nothing.
        skew: exponent of Zipf's law of their popularity.
        cached: prefixes that one worker's cache holds, least recently used out first.
        questions: each request goes on in its own words behind its prefix, so that it has two keys.
        salted: each gateway has a cache salt of its own: what one had computed, another does not meet.
    """

    gateways: int
    agents: bool
    workers: int = 16
    slots: int = 8
    load: float = 0.8
    period: float = 1.0
    told: str = "apart"
    mean_service: float = 5.0
    spread: float = 0.8
    burst: float = 1.0
    seconds: float = 400.0
    prefixes: int = 0
    skew: float = 0.9
    cached: int = 30
    questions: bool = False
    salted: bool = False


@dataclass
class Result:
    """What came of it.

    Attributes:
        peak, mean: requests at the busiest worker and at all of them on average, averaged over looks.
        rejected: rejections by workers; ``absorbed`` exchanges met one and were served elsewhere, ``again``
            many waited, and were served where they had been rejected, since there was room by then.
        failed: exchanges whose attempts were all rejected; ``wrongly``, while some worker had a free slot.
        waited: exchanges that found no worker at first.
        hits: share of requests whose prefix was in their worker's cache.
    """

    served: int = 0
    peak: float = 0.0
    mean: float = 0.0
    rejected: int = 0
    absorbed: int = 0
    again: int = 0
    failed: int = 0
    wrongly: int = 0
    waited: int = 0
    hits: float = 0.0
    samples: list[float] = field(default_factory=list)

    @property
    def peak_to_mean(self) -> float:
        """Load of the busiest worker by the mean load."""
        return self.peak / self.mean


# -- policies


def ours(
    candidates: Sequence[Candidate], rng: random.Random, keys: Sequence[bytes], gateway: Gateway
) -> Candidate | None:
    if len(candidates) > MANY and not keys:
        some = drawn(candidates, LOOKED_AT, rng.random)
        if (chosen := of_all(some, rng, keys, gateway)) is not None:
            return chosen
    return of_all(candidates, rng, keys, gateway)


def of_all(
    candidates: Sequence[Candidate], rng: random.Random, keys: Sequence[bytes], gateway: Gateway
) -> Candidate | None:
    """The package's choice, among however many."""
    last = gateway.waiting[0].attempts == MOST_ATTEMPTS - 1
    return choose(candidates, rng.random, keys=keys, oldest=FRESH + gateway.ahead if last else math.inf)


def at_random(
    candidates: Sequence[Candidate], rng: random.Random, _: Sequence[bytes], __: Gateway
) -> Candidate | None:
    eligible = filtered(candidates, 1)
    return rng.choice(eligible) if eligible else None


def round_robin(
    candidates: Sequence[Candidate], _: random.Random, __: Sequence[bytes], gateway: Gateway
) -> Candidate | None:
    eligible = set(filtered(candidates, 1))
    for _turn in candidates:
        candidate = candidates[next(gateway.turn) % len(candidates)]
        if candidate in eligible:
            return candidate
    return None


def least_loaded(
    candidates: Sequence[Candidate], rng: random.Random, _: Sequence[bytes], __: Gateway
) -> Candidate | None:
    """The strongest form: with the same credit for what the gateway itself placed, and dice for equals."""
    eligible = filtered(candidates, 1)
    return min(eligible, key=lambda each: (each.load, rng.random())) if eligible else None


POLICIES: Final[dict[str, Policy]] = {
    "random": at_random,
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "ours": ours,
}

# -- the story


@dataclass(frozen=True)
class Arrival:
    """One request of a story.

    Attributes:
        at: seconds from its beginning.
        gateway: number of the one that it arrives at.
        service: seconds that it holds a slot.
        prefix: number of what it shares with others; None: nothing.
    """

    at: float
    gateway: int
    service: float
    prefix: int | None


def story(setting: Setting, seed: int) -> Iterator[Arrival]:
    """Tell who arrives when, in order: the same for every policy, and for a run of real processes."""
    dice = random.Random(f"story {seed}")
    popular = _zipf(setting.prefixes, setting.skew)
    mean = math.log(setting.mean_service) - setting.spread**2 / 2
    rate = setting.load * setting.workers * setting.slots / setting.mean_service / setting.burst
    now = 0.0
    while now < setting.seconds:
        size = 1
        while dice.random() < 1 - 1 / setting.burst:
            size += 1
        for _ in range(size):
            service = dice.lognormvariate(mean, setting.spread)
            prefix = _found(popular, dice.random()) if popular else None
            yield Arrival(now, dice.randrange(setting.gateways), service, prefix)
        now += dice.expovariate(rate)


# -- the parties


@dataclass(eq=False)
class Request:
    """One exchange.

    Attributes:
        service: seconds that it holds a slot.
        prefix: number of what it shares with others; None: nothing.
    """

    number: int
    service: float
    prefix: int | None
    attempts: int = 0
    refused_by: set[int] = field(default_factory=set)


class WorkerModel:
    """Slots, a queue behind them (of an engine), and a cache of prefixes."""

    def __init__(self, number: int, setting: Setting) -> None:
        self.number = number
        self.name = f"worker-{number:02d}"
        self._setting = setting
        self.running = 0
        self.queue: deque[tuple[Request, Gateway]] = deque()
        self._cache: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> int:
        return self.running + len(self.queue)

    def takes(self) -> bool:
        """Whether it admits one more: the second admission."""
        return not self._setting.agents or self.running < self._setting.slots

    def meets(self, prefix: int) -> bool:
        """Whether a prefix is in the cache; then it is."""
        hit = prefix in self._cache
        self._cache[prefix] = None
        self._cache.move_to_end(prefix)
        if len(self._cache) > self._setting.cached:
            self._cache.popitem(last=False)
        return hit


class View:
    """What one gateway knows of one worker."""

    def __init__(self, worker: WorkerModel, slots: int) -> None:
        self.worker = worker
        self.slots = slots
        self.own = 0
        self.snapshot = Snapshot()
        self.outage: Outage | None = None

    def candidate(self, now: float) -> Candidate:
        known = self.snapshot
        return Candidate(
            name=self.worker.name,
            work=known.others + self.own,
            own=self.own,
            room=self.slots,
            free=known.free(self.slots, self.own),
            age=known.age(now),
            open=self.outage is None or self.outage.open(now),
            loaded=known.loaded(now, STALE),
        )

    def read(self, now: float) -> None:
        """Take a reading of the worker."""
        known = self.snapshot
        reading = Snapshot(
            seq=known.seq + 1,
            source=Source.HEARTBEAT,
            taken_at=now,
            running=self.worker.running,
            queued=len(self.worker.queue),
            own=self.own,
        )
        self.snapshot = known.read(reading)
        if self.outage is not None and self.snapshot.free(self.slots, self.own):
            self.outage = None  # a newer snapshot with room ends it, since it named no time

    def rejected(self, now: float, placed_at: float) -> None:
        self.read(now)  # the worker's snapshot comes with the rejection
        self.outage = self.outage or Outage(1.0)
        self.outage.rejected(now, 429, None, placed_at)


class Gateway:
    """One process: its views, and those who wait in it.

    Attributes:
        ahead: seconds by which its candidates' ages are more than the truth; they compare all the same.
    """

    ahead = 0.0

    def __init__(self, workers: Sequence[WorkerModel], slots: int, first: int) -> None:
        self.views: Mapping[int, View] = {each.number: View(each, slots) for each in workers}
        self.waiting: deque[Request] = deque()
        self.turn = itertools.count(first)

    def view(self, number: int) -> View:
        """What it knows of a worker."""
        return self.views[number]

    def candidates(self, now: float) -> Sequence[Candidate]:
        """All workers as it sees them, by number."""
        return [view.candidate(now) for view in self.views.values()]


# -- what becomes of it


class Simulation:
    """One run. `run` answers what came of it.

    Args:
        seed: of the story.
        dice: seed of choices, and of the moments at which workers are read.
    """

    def __init__(self, setting: Setting, policy: Policy, seed: int, dice: int) -> None:
        self._setting = setting
        self._policy = policy
        self._rng = random.Random(f"dice {dice}")
        self._story = story(setting, seed)
        self._workers = [self._worker(number) for number in range(setting.workers)]
        firsts = range(setting.gateways)
        self._gateways = [self._gateway(self._rng.randrange(99)) for _ in firsts]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._now = 0.0
        self._prefixed = 0
        self._hits = 0
        self._peaks: list[int] = []
        self._means: list[float] = []
        self.result = Result()

    def _worker(self, number: int) -> WorkerModel:
        return WorkerModel(number, self._setting)

    def _gateway(self, first: int) -> Gateway:
        return Gateway(self._workers, self._setting.slots, first)

    def run(self) -> Result:
        """Play the story to its end; all who arrived are served or failed before it answers."""
        for moment, gateway, view in self._first_readings():
            self._at(moment, self._reads(gateway, view))
        self._expect_next()
        self._at(self._setting.seconds / 4, self._look)
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        result = self.result
        result.peak = sum(self._peaks) / len(self._peaks)
        result.mean = sum(self._means) / len(self._means)
        result.samples = [peak / mean for peak, mean in zip(self._peaks, self._means, strict=True) if mean]
        result.hits = self._hits / max(self._prefixed, 1)
        return result

    def _first_readings(self) -> list[tuple[float, Gateway, View]]:
        setting, dice = self._setting, self._rng.random
        at_once = [dice() for _ in self._workers]
        together = [dice() for _ in self._gateways]

        def moment(gateway: int, worker: int) -> float:
            match setting.told:
                case "at once":
                    return at_once[worker]
                case "together":
                    return together[gateway]
            return dice()

        return [
            (moment(g, w) * setting.period, gateway, view)
            for g, gateway in enumerate(self._gateways)
            for w, view in gateway.views.items()
        ]

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    @property
    def _over(self) -> bool:
        return self._now >= self._setting.seconds

    # -- what happens

    def _expect_next(self) -> None:
        arrival = next(self._story, None)
        if arrival is not None:
            self._at(arrival.at, lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> None:
        """A request arrives at its gateway; then the next is due."""
        request = Request(next(self._numbers), arrival.service, arrival.prefix)
        self._enter(self._gateways[arrival.gateway], request)
        self._expect_next()

    def _enter(self, gateway: Gateway, request: Request) -> None:
        gateway.waiting.append(request)
        if len(gateway.waiting) > 1 or not self._place(gateway):
            self.result.waited += 1

    def _place(self, gateway: Gateway) -> bool:
        """Try to place the first that waits; answers whether it left the queue."""
        request = gateway.waiting[0]
        while request.attempts < MOST_ATTEMPTS:
            candidates = gateway.candidates(self._now)
            chosen = self._policy(candidates, self._rng, self._keys(request), gateway)
            if chosen is None:
                return False
            request.attempts += 1
            if self._attempt(gateway, gateway.view(number_of(chosen)), request):
                gateway.waiting.popleft()
                return True
        gateway.waiting.popleft()
        self.result.failed += 1
        self.result.wrongly += any(worker.takes() for worker in self._workers)
        return True

    def _keys(self, request: Request) -> Sequence[bytes]:
        if request.prefix is None:
            return ()
        shared = request.prefix.to_bytes(16, "big")
        return (shared, request.number.to_bytes(17, "big")) if self._setting.questions else (shared,)

    def _attempt(self, gateway: Gateway, view: View, request: Request) -> bool:
        worker = view.worker
        if not worker.takes():
            self.result.rejected += 1
            request.refused_by.add(worker.number)
            view.rejected(self._now, self._now - 1e-9)
            return False
        view.own += 1
        if view.outage is not None:
            view.outage = None  # its trial was admitted; output follows
        if request.refused_by:
            again = worker.number in request.refused_by
            self.result.again += again
            self.result.absorbed += not again
        if request.prefix is not None:
            self._prefixed += 1
            salt = self._gateways.index(gateway) if self._setting.salted else 0
            self._hits += worker.meets(request.prefix + salt * self._setting.prefixes)
        if worker.running < self._setting.slots:
            self._start(worker, gateway, request)
        else:
            worker.queue.append((request, gateway))
        return True

    def _start(self, worker: WorkerModel, gateway: Gateway, request: Request) -> None:
        worker.running += 1
        self._at(self._now + request.service, lambda: self._finish(worker, gateway))

    def _finish(self, worker: WorkerModel, gateway: Gateway) -> None:
        worker.running -= 1
        gateway.view(worker.number).own -= 1
        self.result.served += 1
        if worker.queue:
            request, owner = worker.queue.popleft()
            self._start(worker, owner, request)
        self._serve_waiting(gateway)

    def _serve_waiting(self, gateway: Gateway) -> None:
        while gateway.waiting and self._place(gateway):
            pass

    def _reads(self, gateway: Gateway, view: View) -> Callable[[], None]:
        def read() -> None:
            view.read(self._now)
            self._serve_waiting(gateway)
            if not self._over or gateway.waiting:
                self._at(self._now + self._setting.period, read)

        return read

    def _look(self) -> None:
        """Note how loaded the workers are."""
        held = [worker.held for worker in self._workers]
        self._peaks.append(max(held))
        self._means.append(sum(held) / len(held))
        if not self._over:
            self._at(self._now + SAMPLED, self._look)


def number_of(candidate: Candidate) -> int:
    """The number of the worker behind it."""
    return int(candidate.name.rpartition("-")[2])


def _zipf(count: int, skew: float) -> list[float]:
    """Cumulative shares of ``count`` things by Zipf's law."""
    weights = [1 / rank**skew for rank in range(1, count + 1)]
    total = sum(weights)
    return list(itertools.accumulate(weight / total for weight in weights))


def _found(cumulative: list[float], dice: float) -> int:
    low, high = 0, len(cumulative) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if cumulative[middle] < dice else (low, middle)
    return low


def simulate(setting: Setting, policy: str, seed: int, dice: int | None = None) -> Result:
    """Run one story under one policy; with other ``dice`` the same story takes another course."""
    return Simulation(setting, POLICIES[policy], seed, seed if dice is None else dice).run()
