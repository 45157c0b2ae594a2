"""Whether a worker that fails is spared for a while, for one model. Pure: time comes as an argument.

Every step it can take is a row of `TRANSITIONS`. Faults open it; at the end of the
cooldown a probe is asked for; a healthy one makes it half-open, and then exactly
one exchange, the trial, goes through. Only that exchange's first output closes it.

What an attempt that was placed before the breaker opened tells when it ends is old
news: it neither closes, nor opens again, nor counts later.

Not its business: a worker without room is out by an `Outage`, which counts no
faults; both must let an exchange through.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Final

MINIMUM: Final = 10  # results in the window below which a ratio says nothing
REMEMBERED: Final = 20  # transitions that operators can read
_NO_ERA: Final = -1
_BUCKETS: Final = 10  # a result leaves the window up to a tenth of its length early


class BreakerState(enum.Enum):
    """What the worker may get."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing, until the cooldown is over
    PROBING = "probing"  # nothing, until a probe is healthy
    HALF_OPEN = "half_open"  # one exchange
    TRYING = "trying"  # nothing more: that one exchange is on
    FORCED = "forced"  # nothing, until an operator resets it


_CLOSED: Final = BreakerState.CLOSED


class Step(enum.Enum):
    """What moves a breaker."""

    TOO_MANY_FAULTS = "too many faults"
    COOLED = "the cooldown is over"
    HEALTHY = "a probe was healthy"
    PLACED = "the trial was placed"
    OUTPUT = "the trial gave output"
    FAULT = "the trial failed"
    ENDED = "the trial told nothing"
    FORCE = "an operator opened it"
    RESET = "it was reset"


TRANSITIONS: Final = {
    (BreakerState.CLOSED, Step.TOO_MANY_FAULTS): BreakerState.OPEN,
    (BreakerState.OPEN, Step.COOLED): BreakerState.PROBING,
    (BreakerState.PROBING, Step.HEALTHY): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, Step.PLACED): BreakerState.TRYING,
    (BreakerState.TRYING, Step.OUTPUT): BreakerState.CLOSED,
    (BreakerState.TRYING, Step.FAULT): BreakerState.OPEN,
    (BreakerState.TRYING, Step.ENDED): BreakerState.HALF_OPEN,
    **{(state, Step.FORCE): BreakerState.FORCED for state in BreakerState},
    **{(state, Step.RESET): BreakerState.CLOSED for state in BreakerState},
}


@dataclass(frozen=True, slots=True)
class Transition:
    """One step that was taken, at a moment in seconds."""

    at: float
    before: BreakerState
    step: Step
    after: BreakerState


@dataclass(slots=True)
class _Attempt:
    """One attempt in flight: how often the breaker had opened when it was placed, and its output's bucket."""

    era: int
    bucket: int | None = None


class Breaker:
    """The breaker of one worker for one model.

    Each `placed` is followed by one `ended`, whatever happens in between: until then
    the attempt is remembered, so memory is bounded by the attempts in flight.

    Args:
        consecutive_faults: faults without an output between them that open it.
        fault_ratio: share of faults among the results of the window that opens it.
        window: seconds.
        cooldown: seconds.
        probed: whether the worker has a probe; one without counts as healthy.

    Attributes:
        history: the last transitions, oldest first.
    """

    def __init__(
        self,
        *,
        consecutive_faults: int = 5,
        fault_ratio: float = 0.5,
        window: float = 30.0,
        cooldown: float = 10.0,
        probed: bool = True,
    ) -> None:
        self._most = consecutive_faults
        self._ratio = fault_ratio
        self._window = _Window(window)
        self._cooldown = cooldown
        self._probed = probed
        self._state = BreakerState.CLOSED
        self._row = 0  # faults since the last output that stands
        self._proof: tuple[str, int] | None = None  # whose output that was, and the row it ended
        self._until = 0.0  # end of the cooldown; while probing, when to ask again
        self._era = 0
        self._attempts: dict[str, _Attempt] = {}
        self._trial: str | None = None
        self.history: deque[Transition] = deque(maxlen=REMEMBERED)

    # -- questions

    def state(self, now: float) -> BreakerState:
        """Answer the state at this moment."""
        self._advance(now)
        return self._state

    def allows(self, now: float) -> bool:
        """Whether an exchange may be placed now."""
        if self._state is _CLOSED:  # as nearly always
            return True
        return self.state(now) in (BreakerState.CLOSED, BreakerState.HALF_OPEN)

    def refuses(self, now: float) -> bool:
        """Whether nothing can be placed until a time has passed or somebody acts; in a trial others wait."""
        if self._state is _CLOSED:
            return False
        return self.state(now) in (BreakerState.OPEN, BreakerState.PROBING, BreakerState.FORCED)

    def remaining(self, now: float) -> float:
        """Seconds for which it surely refuses, for ``Retry-After``; 0 if it does not.

        Nobody knows when an operator resets it: a whole cooldown then.
        """
        if not self.refuses(now):
            return 0.0
        return self._cooldown if self._state is BreakerState.FORCED else max(self._until - now, 0.0)

    def opening(self, now: float) -> int | None:
        """Number of the opening by faults whose cooldown is not over; None: it is not open for that."""
        return self._era if self.state(now) is BreakerState.OPEN else None

    def opens_at(self) -> float | None:
        """When a probe, or a trial of a worker without one, is due; None: nothing is due by time."""
        return self._until if self._state in (BreakerState.OPEN, BreakerState.PROBING) else None

    def wants_probe(self, now: float) -> bool:
        """Whether a probe is to be made at once; `probe` takes its result."""
        return self.state(now) is BreakerState.PROBING and now >= self._until

    # -- what happens

    def placed(self, exchange_id: str, now: float) -> None:
        """An exchange was placed, after `allows` said so; if it did not, this one will tell nothing."""
        self._attempts[exchange_id] = _Attempt(self._era if self.allows(now) else _NO_ERA)
        if self._state is BreakerState.HALF_OPEN:
            self._trial = exchange_id
            self._step(Step.PLACED, now)

    def output(self, exchange_id: str, now: float) -> None:
        """An exchange got output; only the first counts."""
        attempt = self._current(exchange_id)
        if attempt is None or attempt.bucket is not None:
            return
        if self._trial == exchange_id:
            self._close(Step.OUTPUT, now)
        attempt.bucket = self._window.add(now, good=1)
        self._proof = (exchange_id, self._row)
        self._row = 0

    def fault(self, exchange_id: str, now: float) -> None:
        """An exchange failed in a way that counts against the worker."""
        attempt = self._current(exchange_id)
        if attempt is None:
            return
        if self._trial == exchange_id:
            self._open(Step.FAULT, now)
            return
        self._take_back(exchange_id, attempt)
        self._row += 1
        self._window.add(now, bad=1)
        if self._row >= self._most or self._window.bad_share(now) >= self._ratio:
            self._open(Step.TOO_MANY_FAULTS, now)

    def ended(self, exchange_id: str, now: float) -> None:
        """An exchange is over: finished, failed in a way that is not counted, left, or never made."""
        self._attempts.pop(exchange_id, None)
        if self._trial == exchange_id:
            self._trial = None
            self._step(Step.ENDED, now)

    def probe(self, healthy: bool, now: float) -> None:
        """A probe told something. Before the cooldown is over nobody asked, and it changes nothing."""
        if self.state(now) is not BreakerState.PROBING:
            return
        if healthy:
            self._step(Step.HEALTHY, now)
        else:
            self._until = now + self._cooldown

    def force_open(self, now: float) -> None:
        """Let nothing through until `reset`: an operator says so."""
        self._begin_era()
        self._step(Step.FORCE, now)

    def reset(self, now: float) -> None:
        """Forget all faults: an operator says so, or the worker is a new incarnation."""
        self._begin_era()
        self._close(Step.RESET, now)

    # -- steps

    def _current(self, exchange_id: str) -> _Attempt | None:
        """The attempt, unless it is unknown or older than the last opening."""
        attempt = self._attempts.get(exchange_id)
        return attempt if attempt is not None and attempt.era == self._era else None

    def _take_back(self, exchange_id: str, attempt: _Attempt) -> None:
        """Undo what its output counted for: a worker that cuts every answer has a row of faults too."""
        if attempt.bucket is not None:
            self._window.take_back(attempt.bucket)
        if self._proof is not None and self._proof[0] == exchange_id:
            self._row += self._proof[1]
            self._proof = None

    def _advance(self, now: float) -> None:
        """Take the steps that time alone takes."""
        if self._state is BreakerState.OPEN and now >= self._until:
            self._step(Step.COOLED, self._until)
            if not self._probed:
                self._step(Step.HEALTHY, self._until)

    def _begin_era(self) -> None:
        """Make all that was placed until now tell nothing."""
        self._era += 1
        self._trial = None

    def _open(self, step: Step, now: float) -> None:
        self._begin_era()
        self._until = now + self._cooldown
        self._step(step, now)

    def _close(self, step: Step, now: float) -> None:
        self._trial = None
        self._row = 0
        self._proof = None
        self._window.clear()
        self._step(step, now)

    def _step(self, step: Step, now: float) -> None:
        before, self._state = self._state, TRANSITIONS[self._state, step]
        self.history.append(Transition(now, before, step, self._state))


class _Window:
    """Results of the last seconds, counted in a few buckets."""

    def __init__(self, length: float) -> None:
        self._width = length / _BUCKETS
        self.counts: dict[int, list[int]] = {}  # number of the bucket: good, bad

    def add(self, now: float, *, good: int = 0, bad: int = 0) -> int:
        """Count a result; answers its bucket."""
        number = self._forget(now)
        count = self.counts.setdefault(number, [0, 0])
        count[0] += good
        count[1] += bad
        return number

    def take_back(self, number: int) -> None:
        """Uncount a good result, unless its bucket is gone."""
        if number in self.counts:
            self.counts[number][0] -= 1

    def bad_share(self, now: float) -> float:
        """Answer the share of bad results; 0 while there are few."""
        self._forget(now)
        good, bad = (sum(count[i] for count in self.counts.values()) for i in (0, 1))
        return bad / (good + bad) if good + bad >= MINIMUM else 0.0

    def clear(self) -> None:
        self.counts.clear()

    def _forget(self, now: float) -> int:
        number = int(now // self._width)
        for old in [n for n in self.counts if n <= number - _BUCKETS]:
            del self.counts[old]
        return number
