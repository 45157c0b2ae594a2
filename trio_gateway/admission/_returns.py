"""When those who are refused shall come back: one behind the other. Pure.

Whoever is refused is promised the next free place behind those that wait and those that
were promised before, and is told the time at which its turn will be, at the pace at which
slots come free. So the clients that are refused in one second do not all hear the same
second, and come back no faster than they can be served.
"""

from __future__ import annotations

from typing import Final

SOONEST: Final = 1.0  # seconds; ``Retry-After`` has whole ones
LONGEST: Final = 60.0  # nobody is told to stay away longer
JITTER: Final = 0.25  # of its time is added to each by dice: no two gateways or programs stay in step
HORIZON: Final = LONGEST / (1 + JITTER)  # seconds that places are promised ahead
_KEPT: Final = 64  # seconds; more than the horizon


class Returns:
    """The places that one queue has promised, counted by the second in which they are due.

    A promise is forgotten when its second is over. Places are counted and not moments kept, so
    that a queue whose pace turns out to be faster than it was thought to be fills up the seconds
    that it had promised too thinly, and promises none of them twice.
    """

    __slots__ = ("_due", "_second")

    def __init__(self) -> None:
        self._due = [0] * _KEPT  # by second, modulo
        self._second = 0  # the first that is not over

    def book(self, waiting: int, pace: float, now: float, dice: float) -> float:
        """Promise the next place; answers the seconds until then, from `SOONEST` to `LONGEST`.

        Args:
            waiting: how many wait in the queue now.
            pace: places a second at which it moves; above 0.
            now: seconds, never below zero.
            dice: from 0 to 1.

        Beyond the horizon no place is promised: more are refused than can be served within a
        minute. Those are spread over what is left of it, not before the queue as it is now has
        moved up, and not before half of it.
        """
        moment = self._free(waiting, pace, now)
        if moment is None:
            earliest = min(max(waiting / pace, LONGEST / 2), HORIZON)
            return earliest + (LONGEST - earliest) * dice
        self._due[int(moment) % _KEPT] += 1
        return _jittered(moment - now, dice)

    def peek(self, waiting: int, pace: float, now: float, dice: float) -> float:
        """What `book` would answer within the horizon, at most `LONGEST`; promises nothing."""
        moment = self._free(waiting, pace, now)
        return LONGEST if moment is None else _jittered(moment - now, dice)

    def _free(self, waiting: int, pace: float, now: float) -> float | None:
        """Find the moment of the next free place; None: it is beyond the horizon."""
        self._forget(int(now))
        due, first, busy = self._due, now + max(SOONEST, (waiting + 1) / pace), now
        for second in range(int(now), int(now + HORIZON) + 1):
            end = second + 1
            busy = max(busy, second)
            if first < end:
                busy = max(busy, first)
            busy += due[second % _KEPT] / pace  # whatever its promises need beyond it is the next one's
            if first < end and busy < end:
                return busy if busy - now <= HORIZON else None
        return None

    def _forget(self, second: int) -> None:
        for over in range(self._second, min(second, self._second + _KEPT)):
            self._due[over % _KEPT] = 0
        self._second = max(second, self._second)


def _jittered(seconds: float, dice: float) -> float:
    return min(max(seconds, SOONEST) * (1 + JITTER * dice), LONGEST)
