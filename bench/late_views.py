"""Many gateways before many workers: `bench.simulation` without an event for each reading.

Two hundred gateways that read five thousand workers once a second make a million
readings a second. Here a gateway takes its readings when it next decides, or when
something of its own changes, each as the worker was at the reading's moment; so what
it decides by is the same, and nothing is paid for readings that nobody looks at.

It begins with a fleet that is as busy as the load says, since there is no time to fill it.
"""

from __future__ import annotations

import bisect
import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from trio_gateway.fleet.cores import Candidate, Snapshot, Source

from .simulation import POLICIES, Gateway, Policy, Request, Setting, Simulation, View, WorkerModel, of_all

AGAIN: Final = 0.05  # seconds after which who found no worker looks again


@functools.cache
def _figures(held: int, own_then: int, slots: int, own: int) -> tuple[int, int]:
    """Others' requests and free slots, by a snapshot of so many requests; few stand for all."""
    known = Snapshot(seq=1, source=Source.HEARTBEAT, running=held, own=own_then)
    return known.others, known.free(slots, own)


class History(WorkerModel):
    """A worker that remembers how many it had at each moment."""

    def __init__(self, number: int, setting: Setting) -> None:
        super().__init__(number, setting)
        self._moments = [-math.inf]
        self._counts = [0]

    def note(self, now: float) -> None:
        """Remember how many it has from now on."""
        self._moments.append(now)
        self._counts.append(self.held)

    def had(self, moment: float) -> int:
        """How many it had."""
        if self._moments[-1] <= moment:
            return self._counts[-1]
        return self._counts[bisect.bisect_right(self._moments, moment) - 1]


class LateView(View):
    """What one gateway has done at one worker; what it knows of it stands in the gateway's list."""

    def __init__(self, worker: WorkerModel, slots: int, gateway: LateGateway) -> None:
        super().__init__(worker, slots)
        self._gateway = gateway

    def read(self, now: float) -> None:
        self._gateway.learn(self.worker.number, now, self.worker.held)


class LateGateway(Gateway):
    """One process, which has a list of candidates and keeps it as new as its readings are.

    Args:
        moments: at which it reads each worker first; within one period.
        end: seconds; of all that is simulated.
    """

    def __init__(
        self, workers: Sequence[History], setting: Setting, first: int, moments: Sequence[float]
    ) -> None:
        super().__init__((), setting.slots, first)
        self._workers = workers
        self._slots = setting.slots
        self._period = setting.period
        self._end = setting.seconds * 2
        self.views: dict[int, View] = {}
        self._due = sorted((moment, number) for number, moment in enumerate(moments))
        self._next = 0
        self._round = 0.0
        self._names = [worker.name for worker in workers]
        self._known = [(0, 0)] * len(workers)  # requests, and own ones among them, at the last reading
        self._taken = [moment - setting.period for moment in moments]
        self._list: list[Candidate] = []

    def begin(self) -> None:
        """Read all workers as they are at the beginning."""
        for worker in self._workers:
            own = self.views[worker.number].own if worker.number in self.views else 0
            self._known[worker.number] = (worker.held, own)
        self._list = [self._candidate(number, 0.0) for number in range(len(self._workers))]

    def view(self, number: int) -> View:
        """What it has done at a worker."""
        view = self.views.get(number)
        if view is None:
            view = self.views[number] = LateView(self._workers[number], self._slots, self)
        return view

    def candidates(self, now: float) -> Sequence[Candidate]:
        self.catch_up(now)
        self.ahead = self._end - now
        for number, view in self.views.items():
            if view.outage is not None:
                self._list[number] = self._candidate(number, now)
        return self._list

    def catch_up(self, now: float) -> None:
        """Take the readings that were due until now."""
        due, workers = self._due, self._workers
        while True:
            moment, number = due[self._next]
            moment += self._round
            if moment > now:
                return
            self.learn(number, moment, workers[number].had(moment))
            self._next += 1
            if self._next == len(due):
                self._next, self._round = 0, self._round + self._period

    def learn(self, number: int, moment: float, held: int) -> None:
        """Take a reading of a worker."""
        self._taken[number] = moment
        view = self.views.get(number)
        if view is None:  # nearly always
            self._known[number] = (held, 0)
            others, free = _figures(held, 0, self._slots, 0)
            self._list[number] = Candidate(
                self._names[number], others, 0, self._slots, free, self._end - moment
            )
            return
        self._known[number] = (held, view.own)
        if view.outage is not None and _figures(held, view.own, self._slots, view.own)[1]:
            view.outage = None  # a newer snapshot with room ends it, since it named no time
        self._list[number] = self._candidate(number, moment)

    def changed(self, number: int, now: float) -> None:
        """See a worker anew, where this gateway's own count has changed."""
        self._list[number] = self._candidate(number, now)

    def _candidate(self, number: int, now: float) -> Candidate:
        view = self.views.get(number)
        own = 0 if view is None else view.own
        others, free = _figures(*self._known[number], self._slots, own)
        return Candidate(
            name=self._names[number],
            work=others + own,
            own=own,
            room=self._slots,
            free=free,
            age=self._end - self._taken[number],
            open=view is None or view.outage is None or view.outage.open(now),
        )


@dataclass
class Crowds:
    """How many gateways chose one worker within one snapshot's age, wherever any did.

    Attributes:
        sizes: of each crowd.
        attempts, rejected, failed, wrongly, waited: as in `simulation.Result`, of what was counted.
        readings: a second, of all gateways.
        placements: a second, likewise.
        peak_to_mean: load of the busiest worker by the mean load.
    """

    sizes: list[int] = field(default_factory=list)
    attempts: int = 0
    rejected: int = 0
    failed: int = 0
    wrongly: int = 0
    waited: int = 0
    readings: float = 0.0
    placements: float = 0.0
    peak_to_mean: float = 0.0

    @property
    def mean(self) -> float:
        return sum(self.sizes) / max(len(self.sizes), 1)

    @property
    def largest(self) -> int:
        return max(self.sizes, default=0)

    def quantile(self, share: float) -> int:
        ordered = sorted(self.sizes)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0


CHOICES: Final[dict[str, Policy]] = {**POLICIES, "ours, of all": of_all}


class LateSimulation(Simulation):
    """See the module's docstring. `crowds` answers what came of it."""

    def __init__(self, setting: Setting, policy: str, seed: int) -> None:
        self._dice = random.Random(f"moments {seed}")
        at_once = [self._dice.random() * setting.period for _ in range(setting.workers)]
        self._at_once = at_once if setting.told == "at once" else None
        super().__init__(setting, CHOICES[policy], seed, seed)
        self._chosen: dict[tuple[int, int], set[int]] = {}
        self._woken: set[int] = set()
        self._attempts = 0
        self._numbers_of = {id(gateway): number for number, gateway in enumerate(self._gateways)}
        self._fill()

    def crowds(self) -> Crowds:
        """Play the story; what still runs at its end is not waited for."""
        self._at(self._setting.seconds, self._events.clear)
        result = self.run()
        counted = self._setting.seconds - self._counts_from
        return Crowds(
            sizes=[len(each) for each in self._chosen.values()],
            attempts=self._attempts,
            rejected=result.rejected,
            failed=result.failed,
            wrongly=result.wrongly,
            waited=result.waited,
            readings=len(self._gateways) * len(self._workers) / self._setting.period,
            placements=self._attempts / counted,
            peak_to_mean=result.peak_to_mean,
        )

    # -- what is other than in the parent

    def _worker(self, number: int) -> WorkerModel:
        return History(number, self._setting)

    def _gateway(self, first: int) -> Gateway:
        moments = self._at_once or [self._dice.random() * self._setting.period for _ in self._workers]
        return LateGateway(self._histories, self._setting, first, moments)

    @property
    def _histories(self) -> list[History]:
        return [worker for worker in self._workers if isinstance(worker, History)]

    @property
    def _late(self) -> list[LateGateway]:
        return [gateway for gateway in self._gateways if isinstance(gateway, LateGateway)]

    @property
    def _counts_from(self) -> float:
        return self._setting.seconds / 4

    def _first_readings(self) -> list[tuple[float, Gateway, View]]:
        return []

    def _fill(self) -> None:
        """Let the fleet be busy: each request at the emptier of two workers, and somewhere in its middle."""
        setting, dice = self._setting, self._dice
        late = self._late
        middle = math.log(setting.mean_service) + setting.spread**2 / 2  # those that are met are long ones
        for number in range(round(setting.load * setting.workers * setting.slots)):
            one, other = dice.choice(self._workers), dice.choice(self._workers)
            worker = min(one, other, key=lambda each: each.running)
            if worker.running == setting.slots:
                continue
            gateway = dice.choice(late)
            gateway.view(worker.number).own += 1
            rest = dice.lognormvariate(middle, setting.spread) * dice.random()
            self._start(worker, gateway, Request(-1 - number, rest, None))
        for gateway in late:
            gateway.begin()

    def _attempt(self, gateway: Gateway, view: View, request: Request) -> bool:
        assert isinstance(gateway, LateGateway)
        number = view.worker.number
        if self._now >= self._counts_from:
            self._attempts += 1
            window = int(self._now / self._setting.period)
            self._chosen.setdefault((window, number), set()).add(self._numbers_of[id(gateway)])
        before = self.result.rejected
        placed = super()._attempt(gateway, view, request)
        if self._now < self._counts_from:
            self.result.rejected = before
        gateway.changed(number, self._now)
        return placed

    def _start(self, worker: WorkerModel, gateway: Gateway, request: Request) -> None:
        super()._start(worker, gateway, request)
        assert isinstance(worker, History)
        worker.note(self._now)

    def _finish(self, worker: WorkerModel, gateway: Gateway) -> None:
        assert isinstance(gateway, LateGateway)
        assert isinstance(worker, History)
        gateway.catch_up(self._now)  # what was read until now was read with the old count
        super()._finish(worker, gateway)
        worker.note(self._now)
        gateway.changed(worker.number, self._now)

    def _serve_waiting(self, gateway: Gateway) -> None:
        super()._serve_waiting(gateway)
        number = self._numbers_of[id(gateway)]
        if gateway.waiting and number not in self._woken:
            self._woken.add(number)
            self._at(self._now + AGAIN, lambda: self._wake(gateway))

    def _enter(self, gateway: Gateway, request: Request) -> None:
        super()._enter(gateway, request)
        self._serve_waiting(gateway)

    def _wake(self, gateway: Gateway) -> None:
        self._woken.discard(self._numbers_of[id(gateway)])
        self._serve_waiting(gateway)


def crowds(setting: Setting, policy: str, seed: int) -> Crowds:
    """Run one story under one of `CHOICES`."""
    return LateSimulation(setting, policy, seed).crowds()
