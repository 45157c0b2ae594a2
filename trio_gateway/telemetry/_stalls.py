"""When to tell that the loop does not run. Pure."""

from __future__ import annotations


class StallJudge:
    """Judges looks at a beat that the loop gives; tells once for each time that it stops.

    A process that was stopped as a whole (by a signal, or a host that had no time for it) is no
    stall: nothing of it ran, the one who looks neither. Code in C that lets no other thread run
    looks the same from outside, but for the CPU time that it took.

    Args:
        limit: seconds without a beat, beyond the time between two.
        every: seconds between two looks.
        now: of the clock that beats and looks are told in.
    """

    def __init__(self, limit: float, every: float, now: float) -> None:
        self._limit = limit
        self._every = every
        self._looked = now
        self._spent = 0.0
        self._since = now  # nothing before counts
        self._told: float | None = None

    def look(self, now: float, beat: float, spent: float) -> float | None:
        """Answer for how many seconds the loop has not run, if that is to be told now.

        Args:
            beat: when it last did.
            spent: CPU seconds of the process.
        """
        late = now - self._looked - self._every
        if late > self._limit and spent - self._spent < late / 2:
            self._since = now
        self._looked, self._spent = now, spent
        silent = now - max(beat, self._since)
        if silent <= self._limit or beat == self._told:
            return None
        self._told = beat
        return silent
