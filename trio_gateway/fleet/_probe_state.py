"""Whether a worker is alive, from probes that fail now and then and streams that prove it. Pure."""

from __future__ import annotations

import math


class ProbeState:
    """What probes say of one worker, with hysteresis: one lost answer removes nobody.

    A worker counts as alive until probes say otherwise. While its streams deliver
    events it is alive whatever they say: a long prefill makes health pages slow.

    Args:
        interval: seconds between probes.
        failures, successes: in a row, after which it is taken for dead, or alive again.
    """

    def __init__(self, interval: float = 5.0, failures: int = 3, successes: int = 1) -> None:
        self._grace = interval * failures
        self._failures = failures
        self._successes = successes
        self._answering = True
        self._row = 0  # results in a row that contradict `_answering`
        self._event = -math.inf

    def result(self, healthy: bool) -> None:
        """Take the result of a probe."""
        if healthy is self._answering:
            self._row = 0
            return
        self._row += 1
        if self._row >= (self._successes if healthy else self._failures):
            self._answering = healthy
            self._row = 0

    def event(self, at: float) -> None:
        """A stream of the worker delivered an event."""
        self._event = max(at, self._event)

    def alive(self, now: float) -> bool:
        """Whether exchanges may be placed there."""
        return self._answering or now - self._event <= self._grace
