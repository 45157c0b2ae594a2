"""The counters behind the equations of contracts section 6. Pure.

``arrived = reading + turned_away + accepted`` and
``accepted = waiting + running + sum(outcomes)`` hold at every moment, because
each step moves one request from one counter to another.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from ..contract import Outcome, Phase
from ..errors import CODES
from ._histogram import Histogram
from ._record import Record
from ._times import OTHER, Names, Times

_KEPT_RECORDS = 256


@dataclass(slots=True)
class Books:
    """Counts of this process, since its start or right now.

    Attributes:
        times: how long things took.
        models, tenants: those that have counts under their names; the labels of counts are bounded.
    """

    arrived: int = 0
    reading: int = 0
    accepted: int = 0
    waiting: int = 0
    running: int = 0
    turned_away: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=lambda: Counter({o.value: 0 for o in Outcome}))
    retries: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    cancellations: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    tokens: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    times: Times = field(default_factory=Times)
    models: Names = field(default_factory=Names)
    tenants: Names = field(default_factory=Names)
    recent: deque[Record] = field(default_factory=lambda: deque(maxlen=_KEPT_RECORDS))

    @property
    def lags(self) -> Histogram:
        """Of each batch of bytes that clients took, for how many seconds the oldest of it had waited."""
        return self.times.lags

    def arrive(self) -> None:
        """A request's head came."""
        self.arrived += 1
        self.reading += 1

    def forget(self) -> None:
        """It was no request for work: health, lists."""
        self.arrived -= 1
        self.reading -= 1

    def turn_away(self, code: str) -> None:
        """It was answered, or left, before it was accepted."""
        self.reading -= 1
        self.turned_away[code] += 1

    def accept(self, *, waiting: bool) -> None:
        """It was placed, or got a position."""
        self.reading -= 1
        self.accepted += 1
        if waiting:
            self.waiting += 1
        else:
            self.running += 1

    def placed(self) -> None:
        """One that waited got a worker."""
        self.waiting -= 1
        self.running += 1

    def sent_back(self) -> None:
        """One that ran waits again."""
        self.running -= 1
        self.waiting += 1

    def settle(self, record: Record, *, waiting: bool) -> None:
        """An accepted exchange is over."""
        if waiting:
            self.waiting -= 1
        else:
            self.running -= 1
        outcome = record.outcome
        self.outcomes[outcome] += 1
        self._measure(record)
        if outcome in _FAILURES:
            self.failures[(record.phase, _label(record.code or outcome))] += 1
        elif outcome in _CANCELLATIONS:
            self.cancellations[(outcome, record.phase)] += 1
        self.recent.append(record)

    def _measure(self, record: Record) -> None:
        """Count for metrics, beside the equations."""
        tenant, model = self.tenants.of(record.tenant), self.models.of(record.model)
        self.requests[(record.operation, model, tenant, record.outcome)] += 1
        tokens, generated, delivered = self.tokens, record.tokens_generated or 0, record.tokens_delivered or 0
        tokens[(tenant, model, "prompt")] += record.tokens_prompt or 0
        tokens[(tenant, model, "generated")] += generated
        tokens[(tenant, model, "delivered")] += delivered
        tokens[(tenant, model, "acknowledged")] += record.tokens_acknowledged or 0
        if record.phase == Phase.AFTER_CONTENT:
            tokens[(tenant, model, "queued")] += generated - delivered
        self.times.settle(record, model)


def _label(code: str) -> str:
    """Name a code in metrics: an engine's own may be any word, and labels come from bounded sets."""
    return code if code in CODES else OTHER


_FAILURES = frozenset({Outcome.UPSTREAM_FAILED, Outcome.REFUSED})
_CANCELLATIONS = frozenset(
    {
        Outcome.CLIENT_GONE,
        Outcome.CLIENT_CANCELLED,
        Outcome.CLIENT_STALLED,
        Outcome.DEADLINE_EXCEEDED,
        Outcome.OPERATOR_CANCELLED,
        Outcome.GATEWAY_SHUTDOWN,
    }
)


def conservation_errors(
    books: Books,
    *,
    granted: int,
    held: int,
    draining: int,
    returned: int,
    buffered: int,
    sum_of_exchanges: int,
) -> list[str]:
    """Check the equations; each that does not hold is named with its figures."""
    turned_away = sum(books.turned_away.values())
    ended = sum(books.outcomes.values())
    equations = (
        (
            "arrived = reading + turned_away + accepted",
            books.arrived,
            books.reading + turned_away + books.accepted,
        ),
        ("accepted = waiting + running + outcomes", books.accepted, books.waiting + books.running + ended),
        ("granted = held + draining + returned", granted, held + draining + returned),
        ("buffered = sum over exchanges", buffered, sum_of_exchanges),
    )
    wrong = [f"{name}: {left} != {right}" for name, left, right in equations if left != right]
    counters = {"reading": books.reading, "waiting": books.waiting, "running": books.running, "held": held}
    counters |= {"draining": draining, "buffered": buffered}
    return wrong + [f"{name} is negative: {value}" for name, value in counters.items() if value < 0]
