"""What is known about one worker: read a while ago, corrected by what this process did since. Pure.

A snapshot is immutable; each method answers the one that follows. What a worker
tells is behind the truth, so it is read together with what cannot be behind, the
counts of this process. Others' work is what was read less what was ours then;
work now is that plus what is ours now. So every placement and every end since the
reading is credited, and nothing is counted twice.

How long a worker that rejected is left alone is an `Outage`'s matter, whether it is
spared for its faults a `Breaker`'s; here stands only what it is.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Final, Literal

FULL_CACHE: Final = 0.95  # an engine whose KV cache is fuller is about to preempt what it runs


class Source(enum.Enum):
    """Where counts come from."""

    OWN = "own"  # nobody tells: this process's counts are all there is, and never old
    SCRAPED = "scraped"  # gauges of the engine
    HEARTBEAT = "heartbeat"  # the agent's reports
    TOLD = "told"  # the agent's reports to another gateway: its state, and no counts


State = Literal["starting", "ready", "draining", "stopping"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One worker, as far as anybody told.

    Attributes:
        incarnation: grows with each start of the worker.
        seq: grows with each reading of one incarnation.
        taken_at: seconds, when the reading was true.
        running, queued: requests inside the engine, whoever sent them.
        own: requests of this process among them.
        turned_away: a rejection said since the last reading that they fill it.
        kv_usage: share of the KV cache in use, 0 to 1; None where nothing tells.
        slots: as the worker reports; None where nothing tells.
        tokens_per_second: what it generates; None where nothing tells.
        paused: requests whose engine waits for their reader, whoever sent them.
        suspect: it failed: taken only when no other is eligible, until its next output or good probe.
        unready: it said that it cannot work yet, until its next reading, good probe or output.
        failed, missing: models whose load failed, or that it turned out not to have, until its list is read.
    """

    incarnation: int = 0
    seq: int = 0
    source: Source = Source.OWN
    taken_at: float = -math.inf
    running: int = 0
    queued: int = 0
    own: int = 0
    turned_away: bool = False
    kv_usage: float | None = None
    slots: int | None = None
    tokens_per_second: float | None = None
    paused: int = 0
    state: State = "ready"
    suspect: bool = False
    unready: bool = False
    failed: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()

    # -- how old

    def age(self, now: float) -> float:
        """Seconds since the reading was true; 0 where this process's counts are all there is."""
        return 0.0 if self.source in (Source.OWN, Source.TOLD) else max(now - self.taken_at, 0.0)

    def stale(self, now: float, bound: float) -> bool:
        """Whether it is too old to be believed. Then the worker counts as loaded."""
        return self.age(now) > bound

    # -- how loaded

    @property
    def others(self) -> int:
        """Requests inside the engine that this process did not send."""
        return max(self.running + self.queued - self.own, 0)

    def free(self, slots: int, own: int) -> int:
        """Slots that nobody is known to use, at least 0.

        Args:
            slots: of the worker, as configured or reported.
            own: slots that this process holds there now, draining ones included.
        """
        return max(slots - self.others - own, 0)

    def loaded(self, now: float, bound: float) -> bool:
        """Whether it counts as fully loaded, however few requests are counted there."""
        return self.stale(now, bound) or (self.kv_usage is not None and self.kv_usage >= FULL_CACHE)

    # -- what it may get

    def takes(self, model: str) -> bool:
        """Whether its state lets it take a request for a model; room and breaker are another matter."""
        return (
            self.state == "ready"
            and not self.unready
            and model not in self.failed
            and model not in self.missing
        )

    # -- what follows

    def read(self, reading: Snapshot) -> Snapshot:
        """Answer what is known after a reading; one that is older changes nothing.

        A higher incarnation is another process: nothing of the old one is kept. Within
        one, suspicion and models stay; readiness is what was read.
        """
        if (reading.incarnation, reading.seq) < (self.incarnation, self.seq):
            return self
        if reading.incarnation > self.incarnation:
            return reading
        return replace(reading, suspect=self.suspect, failed=self.failed, missing=self.missing)

    def listed(self) -> Snapshot:
        """Its list of models was read: what it lacked before, it may have now."""
        return replace(self, failed=frozenset(), missing=frozenset())

    def faulted(self) -> Snapshot:
        """An attempt failed in a way that counts against it, or its streams stand still."""
        return replace(self, suspect=True)

    def gave_output(self) -> Snapshot:
        """It gave output: it works. That says nothing about draining."""
        return replace(self, suspect=False, unready=False) if self.suspect or self.unready else self

    def probed_well(self) -> Snapshot:
        """A probe was good. An agent says itself when it drains; of an engine, a probe is the best news."""
        state = self.state if self.source in (Source.HEARTBEAT, Source.TOLD) else "ready"
        return replace(self, suspect=False, unready=False, state=state)

    def rejected(self, reason: str, model: str, now: float, slots: int, own: int) -> Snapshot:
        """Take a rejection at once.

        Args:
            reason: of the worker protocol, or the same said by an engine; what changes nothing
                about the worker (``deadline``, unknown ones) changes nothing here.
            model: as the worker knows it.
            slots: of the worker.
            own: slots that this process holds there now, without the rejected attempt.
        """
        match reason:
            case "capacity":
                return self._full(now, slots, own)
            case "draining" | "shutting_down":
                return replace(self, state="draining")
            case "engine_unready" | "loading":
                return replace(self, unready=True)
            case "model_not_loaded":
                return replace(self, missing=self.missing | {model})
            case "model_load_failed":
                return replace(self, failed=self.failed | {model})
        return self

    def _full(self, now: float, slots: int, own: int) -> Snapshot:
        """All its slots are in use now. Where nothing is ever read this would never end: no count is set."""
        if self.source is Source.OWN:
            return self
        if self.others + own >= slots:
            return replace(self, turned_away=True)
        return replace(self, running=slots, queued=0, own=own, turned_away=True, taken_at=now)
