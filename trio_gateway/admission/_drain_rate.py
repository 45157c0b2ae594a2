"""How long leases last, and so how fast slots come free. Pure.

Measured is how long each lease was out that came back. Idle slots add nothing to it, so it
says the same whether few or all of them are in use, and slots that come free together are
as many as they are. Leases that are still out count for the time by which they are older
than those that came back: the short ones, which come back first, must not pass for all.
"""

from __future__ import annotations

from typing import Final

ENOUGH: Final = 20  # returns that make a prediction
FIRST: Final = 1.0  # seconds that a lease still lasts, as long as none has come back
_ROUNDS: Final = 4  # a lease is forgotten after about as many times those that are out have come back


class DrainRate:
    """Leases of one pool: how many are out, and how long one of them lasts."""

    __slots__ = ("_at", "_ended", "_running", "_seen", "_spent", "out")

    def __init__(self) -> None:
        self.out = 0
        self._running = 0.0  # seconds that those which are out have been out, together
        self._spent = 0.0  # seconds that those which came back were; the older the less they count
        self._ended = 0.0  # how many those are; likewise
        self._seen = 0
        self._at = 0.0

    def granted(self, now: float) -> None:
        """Count a lease that goes out."""
        self._pass(now)
        self.out += 1

    def returned(self, now: float, seconds: float) -> None:
        """Count a lease that came back after so many seconds."""
        self._pass(now)
        most = max(_ROUNDS * self.out, ENOUGH)
        if self._ended >= most:
            self._spent *= 1 - 1 / most
            self._ended *= 1 - 1 / most
        self._spent += seconds
        self._ended += 1
        self._seen += 1
        self.out -= 1
        self._running = max(self._running - seconds, 0.0) if self.out else 0.0  # no rounding adds up

    def lasting(self, now: float) -> float:
        """Seconds that a lease lasts, on average; above 0.

        Until as many have come back as are out, those that are missing count as if they
        came back `FIRST` seconds from now.
        """
        usual = self._spent / self._ended if self._seen else 0.0
        running = self._running + self.out * max(now - self._at, 0.0)
        older = max(running - self.out * usual, 0.0)
        missing = max(self.out, 1) - min(self._seen, max(self.out, 1))
        return max((self._spent + older + missing * FIRST) / (self._ended + missing), _SHORTEST)

    def pace(self, now: float) -> float:
        """Leases a second that come back while as many are out as now, or at least one."""
        return max(self.out, 1) / self.lasting(now)

    def predicted(self, places: int, now: float) -> float | None:
        """Seconds in which ``places`` leases will probably come back; None: too few did yet."""
        return None if self._seen < ENOUGH else places / self.pace(now)

    def _pass(self, now: float) -> None:
        if now > self._at:
            self._running += self.out * (now - self._at)
            self._at = now


_SHORTEST: Final = 1e-6  # seconds
