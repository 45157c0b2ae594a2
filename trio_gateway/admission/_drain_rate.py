"""How fast slots come free, for ``Retry-After``. Pure."""

from __future__ import annotations

from typing import Final

_WEIGHT: Final = 0.2  # of the newest interval in the moving average
ENOUGH: Final = 20  # returns that make a prediction
LONGEST: Final = 60.0  # seconds; nobody is told to stay away longer
_SPREAD: Final = 1.25  # how much longer than others the unluckiest waits


class DrainRate:
    """A moving average of the time between two returned slots."""

    def __init__(self) -> None:
        self._interval: float | None = None
        self._last: float | None = None
        self._seen = 0

    def returned(self, now: float) -> None:
        """Count one slot that came free."""
        self._seen += 1
        if self._last is not None:
            gap = now - self._last
            self._interval = (
                gap if self._interval is None else self._interval + _WEIGHT * (gap - self._interval)
            )
        self._last = now

    def predicted(self, places: int) -> float | None:
        """Seconds that ``places`` slots have lately taken to come free; None: too few were seen."""
        return None if self._interval is None or self._seen < ENOUGH else places * self._interval

    def seconds_until(self, places: int, now: float, dice: float) -> float:
        """Seconds after which ``places`` more slots should have come free.

        Args:
            dice: from 0 to 1; spreads the answers by up to a quarter, so that
                those who were refused together do not come back together.

        Answers from 1 to `LONGEST`.
        """
        interval = 1.0 if self._interval is None else self._interval
        if self._last is not None:
            interval = max(interval, min(now - self._last, LONGEST) / max(places, 1))
        return min(max(places * interval, 1.0), LONGEST / _SPREAD) * (1 + dice * (_SPREAD - 1))
