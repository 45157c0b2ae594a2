"""What this process knows about one worker: its slots in use, and all that was read, learnt or said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from ..contract import InternalRequest, Worker, WorkerStatus
from ..units import WHOLE, Part
from ._breaker import Breaker
from ._choice import Candidate
from ._circle import place_of
from ._outage import Outage
from ._probe_state import ProbeState
from ._progress import Progress
from ._snapshot import Snapshot, Source

TYPICAL_OUTPUT: Final = 256  # tokens; for callers that name no bound
BYTES_A_TOKEN: Final = 4
UNTOUCHED: Final = "none"
DRAINED: Final = "drained"
EJECTED: Final = "ejected"
REPORTS_ARE_LATE: Final = 10.0  # seconds

_OWN: Final = Source.OWN
_HEARTBEAT: Final = Source.HEARTBEAT


Portion = Callable[[str, int], int]
"""Answers how many of a worker's slots are this process's, by the worker's id and how many there are."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How workers are judged; durations in seconds.

    Attributes:
        first_pause: that a worker without room is left alone at first.
        consecutive_faults, fault_ratio, window, cooldown: of `Breaker`.
        probe_interval, probe_failures, probe_successes: of `ProbeState`.
        probed: somebody makes probes; else every worker counts as healthy.
        affinity: what leads a request to a worker: "prefix" (or a session that was named), "session", "none".
        share: of each worker's slots that are this gateway's to give.
        part: of those that are this process's.
        lent: how many this process may use is not known, but lent to it one by one.
        stale_after: age at which a reading is not believed any more.
    """

    first_pause: float = 1.0
    consecutive_faults: int = 5
    fault_ratio: float = 0.5
    window: float = 30.0
    cooldown: float = 10.0
    probe_interval: float = 5.0
    probe_failures: int = 3
    probe_successes: int = 1
    probed: bool = False
    affinity: str = "prefix"
    share: Fraction = Fraction(1)
    part: Part = WHOLE
    lent: bool = False
    stale_after: float = 15.0


class WorkerBook:
    """One worker of one incarnation. What comes back late from an older one finds the older one's book.

    Attributes:
        all_slots: of the worker.
        size: the most of them that this process may ever use.
        slots: those that it may use now.
        held, draining: slots in use by running attempts, and by attempts that are
            over while the engine has not been seen to stop.
        tokens: outstanding in running attempts, as far as requests tell.
        attempts, faults: since start.
        trials: exchange that tries first after an outage, by model.
        hints: until when another gateway's breaker makes it suspect, by model.
        models: names that it reports; None: nobody asked it yet.
        expires_at: when a registered worker is forgotten unless it says something; None: a static one.
        operator: what an operator did to it: `UNTOUCHED`, `DRAINED` or `EJECTED`.
        withheld: why nothing new is placed here, as whoever runs the worker says; None: nothing is said.
        fresh: of slots that were lent, those that came just now, for who waits.
        place: on the circle of those that keys lead to.
        idle_from: since when it is seen how many of them are idle; None: none is.
        earlier: what it was described as before it was described anew, while leases name that.
    """

    def __init__(self, worker: Worker, settings: FleetSettings, portion: Portion | None = None) -> None:
        self.worker = worker
        self._settings = settings
        self._portion = portion
        self.all_slots = worker.slots
        self.size = self._share_of(worker.slots)
        self.slots = 0 if settings.lent else self.size
        self.held = 0
        self.draining = 0
        self.tokens = 0.0
        self.attempts = 0
        self.faults = 0
        self.outages: dict[str, Outage] = {}
        self.trials: dict[str, str] = {}
        self.hints: dict[str, float] = {}
        self.breakers: dict[str, Breaker] = {}
        self.snapshot = Snapshot()
        self.probe = ProbeState(settings.probe_interval, settings.probe_failures, settings.probe_successes)
        self.progress = Progress()
        self.models: tuple[str, ...] | None = None
        self.expires_at: float | None = None
        self.removed = False
        self.operator = UNTOUCHED
        self.withheld: str | None = None
        self.earlier: list[Worker] = []
        self.fresh = 0
        self.idle_from: float | None = None
        self.place = place_of(worker.id.encode())
        self._least_idle = 0  # since then
        self._running: Counter[str] = Counter()  # attempts here, running or draining, by exchange
        self._ended: dict[str, float] = {}  # exchanges that were, and until when it matters

    @property
    def reporting(self) -> bool:
        """Whether it says by itself how it is, again and again."""
        return self.expires_at is not None

    # -- slots

    @property
    def free(self) -> int:
        """Slots that nobody counts on, as far as is known."""
        own = self.held + self.draining
        if self.snapshot.source is _HEARTBEAT and not self._settings.lent:
            return max(min(self.snapshot.free(self.all_slots, own), self.slots - own), 0)
        # Gauges lag behind what ended since: they say who is busier, not who has room. So do reports where
        # others' requests are counted by who lends, to the last one.
        return self.slots - own

    @property
    def has_room(self) -> bool:
        """Whether the last reading says that it could run one more."""
        known = self.snapshot
        return known.queued == 0 and known.free(self.all_slots, self.held + self.draining) > 0

    def report_slots(self, slots: int | None) -> None:
        """Take the number of slots that the worker itself tells, where none was configured."""
        if slots is not None and self.worker.slots_unknown:
            self._take_slots(slots)

    def _take_slots(self, slots: int) -> None:
        self.all_slots = slots
        self.size = self._share_of(slots)
        if not self._settings.lent:
            self.slots = self.size

    def describe(self, worker: Worker) -> None:
        """Be described anew: other slots, weight, labels or credentials. What runs here stays counted."""
        self.earlier.append(self.worker)
        known = self.worker.slots_unknown and worker.slots_unknown
        self.worker = worker
        if not known:
            self._take_slots(worker.slots)

    @property
    def configured_slots(self) -> int:
        """Those of its slots that are this process's and those of others that it shares them with."""
        return max(int(self.all_slots * self._settings.share), 1) if self.all_slots > 0 else 0

    def divide(self, portion: Portion | None) -> None:
        """Use only a portion of its slots from now on; None: all that are configured."""
        self._portion = portion
        self._take_slots(self.all_slots)

    def _share_of(self, slots: int) -> int:
        whole = max(int(slots * self._settings.share), 1) if slots > 0 else 0
        most = self._settings.part.share(whole, self.worker.id)
        return most if self._portion is None else self._portion(self.worker.id, most)

    @property
    def idle(self) -> int:
        """Slots that it may use now, and does not."""
        return self.slots - self.held - self.draining

    @property
    def room(self) -> float:
        """What it can do at once, see `Candidate`."""
        return max(self.size, 1) * self.worker.weight

    def use_lent(self, slots: int) -> None:
        """So many slots of those that were lent are in use from now on."""
        self.fresh = max(self.fresh - slots, 0)
        self._least_idle = min(self._least_idle, self.idle)

    def spare(self, now: float, kept: float) -> int:
        """Answer how many idle slots were of no use for so many seconds."""
        if self.idle_from is None:
            self.idle_from, self._least_idle = now, self.idle
        if now < self.idle_from + kept:  # as the moment is calculated at which it is asked again
            return 0
        spare = max(self._least_idle, 0)
        self.idle_from, self._least_idle = now, self.idle - spare
        return spare

    # -- whose requests it runs

    def placed(self, exchange_id: str) -> None:
        """An exchange of this process was placed here."""
        self._running[exchange_id] += 1

    def let_go(self, exchange_id: str, now: float) -> None:
        """Its slots are back. Reports that list it may still be on their way."""
        self._running[exchange_id] -= 1
        if not self._running[exchange_id]:
            del self._running[exchange_id]
        self._ended.pop(exchange_id, None)
        self._ended[exchange_id] = now + REPORTS_ARE_LATE
        self._forget_ended(now)

    def _forget_ended(self, now: float) -> None:
        while self._ended and self._ended[oldest := next(iter(self._ended))] <= now:
            del self._ended[oldest]

    @property
    def remembered(self) -> int:
        """How many exchanges are remembered, whether they are here or were here."""
        return len(self._running) + len(self._ended)

    def own_among(self, status: WorkerStatus, now: float) -> int:
        """How many of the requests that a worker reports are this process's."""
        if status.requests is None:
            return min(self.held + self.draining, status.running + status.queued)
        self._forget_ended(now)
        ours = (attempt.partition("-")[0] for attempt in status.requests)
        return sum(name in self._running or name in self._ended for name in ours)

    # -- what it may get

    def breaker(self, model: str) -> Breaker:
        """The breaker of this worker for a public model."""
        breaker = self.breakers.get(model)
        if breaker is None:
            settings = self._settings
            breaker = self.breakers[model] = Breaker(
                consecutive_faults=settings.consecutive_faults,
                fault_ratio=settings.fault_ratio,
                window=settings.window,
                cooldown=settings.cooldown,
                probed=settings.probed,
            )
        return breaker

    def reports(self, name: str) -> bool:
        """Whether it serves a name, as far as it said."""
        return self.models is None or name in self.models

    @property
    def placeable(self) -> bool:
        """Whether anything may be placed here, as far as the file, operators and its pod are concerned."""
        return not self.removed and self.operator == UNTOUCHED and self.withheld is None

    def ready(self, now: float) -> bool:
        """Whether it takes work at all: busy is ready, half-open is ready."""
        state = self.snapshot
        if not self.placeable or state.state != "ready" or state.unready or not self.probe.alive(now):
            return False
        return not self.breakers or not all(each.refuses(now) for each in self.breakers.values())

    def takes(self, request: InternalRequest, now: float) -> bool:
        """Whether its state lets it take a request; breaker, outage and room are another matter."""
        return (
            self.placeable
            and slots_for(request, self.worker) <= self.size
            and self.snapshot.takes(request.upstream_model)
            and self.probe.alive(now)
        )

    def refuses(self, model: str, now: float) -> bool:
        """Whether its breaker lets nothing through until a time has passed."""
        breaker = self.breakers.get(model)
        return breaker is not None and breaker.refuses(now)

    def hinted(self, model: str, now: float) -> bool:
        """Whether it is suspect for a model, since it failed elsewhere and gave no output here since."""
        if self.hints.get(model, now) <= now:
            self.hints.pop(model, None)
            return False
        return True

    def open(self, request: InternalRequest, now: float) -> bool:
        """Whether the request may be placed here, if there is room."""
        if not self.takes(request, now):
            return False
        breaker = self.breakers.get(request.model)
        if breaker is not None and not breaker.allows(now):
            return False
        outage = self.outages.get(request.model) if self.outages else None
        return outage is None or outage.open(now)

    def _room_to_try(self, now: float) -> int:
        """All its slots, once a rejection that filled it is old, and nothing runs here that could tell more.

        Else who was turned away would wait for the next report, however long others are gone.
        """
        if not self.snapshot.turned_away or self.held or self.draining:
            return 0
        return self.slots if all(each.open(now) for each in self.outages.values()) else 0

    def candidate(
        self,
        request: InternalRequest,
        usual: float,
        now: float,
        *,
        excluded: bool,
        free: int | None = None,
    ) -> Candidate:
        """Show it to a choice.

        Args:
            usual: tokens of a request of usual size.
            free: slots that are believed to be free; None: those that are.
        """
        own = self.tokens / usual
        known, worker, slots = self.snapshot, self.worker, slots_for(request, self.worker)
        age, others, loaded = 0.0, 0, False
        if known.source is not _OWN:
            stale_after = self._settings.stale_after
            age, loaded = known.age(now), known.loaded(now, stale_after)
            others = 0 if age > stale_after and known.source is Source.SCRAPED else known.others
        if free is None:
            free = self.free or self._room_to_try(now)
        return Candidate(
            worker.id,
            own + others,
            own,
            self.room,
            free if slots == 1 else free // slots,
            age,
            not excluded and self.open(request, now),
            known.suspect or (self.hints and self.hinted(request.model, now)) or self.progress.still(now),
            loaded,
        )


def slots_for(request: InternalRequest, worker: Worker) -> int:
    """How many slots a request takes at a worker."""
    return request.n if worker.dialect.slot_per_choice and request.operation.choices else 1


def tokens_of(request: InternalRequest) -> float:
    """Tokens that a request will probably cost: its text, and what it may generate."""
    output = request.output_limit or request.tokens or TYPICAL_OUTPUT
    return request.size / BYTES_A_TOKEN + min(output, 16 * TYPICAL_OUTPUT) * max(request.choices, 1)
