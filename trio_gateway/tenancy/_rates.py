"""Requests and tokens a minute. Pure: the moment is an argument, in seconds.

Each limit is a bucket that holds a minute's amount and refills evenly, as OpenAI's
``x-ratelimit-reset-*`` promise: they tell when a limit is back "to its initial
state". So a tenant that was quiet may use a whole minute's amount at once, and in
any stretch of t seconds never more than the limit x (1 + t / 60).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MINUTE: Final = 60.0
MOST_ADDRESSES: Final = 10_000
FAILURES_A_MINUTE: Final = 100  # a key has 128 random bits: this spares the log and the CPU, nothing more
SPREAD: Final = 0.25  # of the wait is added by dice: those refused together shall not return together
_INSTANT: Final = 1e-6  # seconds; what rounding may take from somebody who came exactly in time


class Bucket:
    """An amount that is used up at once or bit by bit and refills evenly within a minute.

    Kept as the moment at which it will be full (the "theoretical arrival time" of ITU-T I.371's
    generic cell rate algorithm), so that nothing has to be done as time passes.

    Args:
        size: what it holds when it is full, as it is at first; at least 1.

    Attributes:
        used: all that was ever taken here, without what was given back.
    """

    __slots__ = ("_full_at", "_promised", "size", "used")

    def __init__(self, size: int) -> None:
        self.size = size
        self._full_at = float("-inf")
        self.used = 0.0
        self._promised = float("-inf")  # the moment that the one who was refused last was told

    def level(self, now: float) -> float:
        """What is in it; below zero after more was used than was reserved."""
        return self.size - self.until_full(now) * self.size / MINUTE

    def until_full(self, now: float) -> float:
        """Seconds until it is full, if nothing more is taken."""
        return self._full_at - now if self._full_at > now else 0.0

    def wait(self, amount: float, now: float) -> float:
        """Seconds until ``amount``, at most its size, can be taken; 0: now."""
        if self._full_at <= now:
            return 0.0
        missing = self._full_at - now - MINUTE * (1 - min(amount, self.size) / self.size)
        return missing if missing > _INSTANT else 0.0

    def promise(self, amount: float, now: float, dice: float) -> float:
        """Seconds until ``amount`` will be there that nobody was promised before; takes nothing.

        Who is refused after others is told when as much again has refilled, so that they come one
        behind the other. At most a minute is promised ahead; whoever finds no place in it is told a
        moment of its second half.

        Args:
            dice: from 0 to 1; adds up to a quarter of the time.

        Never less than `wait` answers.
        """
        wait = self.wait(amount, now)
        turn = max(now + wait, self._promised + min(amount, self.size) * MINUTE / self.size)
        if turn - now <= max(MINUTE, wait):
            self._promised = turn
            return (turn - now) * (1 + SPREAD * dice)
        earliest, latest = max(wait, MINUTE / 2), max(wait * (1 + SPREAD), MINUTE)
        return earliest + (latest - earliest) * dice

    def take(self, amount: float, now: float, parties: int = 1) -> None:
        """Take an amount, whether it is there or not, as much for each of so many who share by number."""
        self.used += amount
        begin = self._full_at
        if begin < now:
            begin = now
        self._full_at = begin + parties * amount * MINUTE / self.size

    def give(self, amount: float, parties: int = 1) -> None:
        """Give back what was taken and not used; what had refilled meanwhile is not given twice."""
        self.used -= amount
        self._full_at -= parties * amount * MINUTE / self.size

    def agree(self, until_full: float, used: float, now: float) -> None:
        """Take what all who share it found: full in so many seconds, when `used` was so much here."""
        self._full_at = now + until_full + (self.used - used) * MINUTE / self.size

    def resize(self, size: int, now: float) -> None:
        """Let it hold another amount from now on. What was used stays used, up to a minute's amount."""
        used = min(self.size - self.level(now), size)
        self.size = size
        self._full_at = now + used * MINUTE / size


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Amounts a minute; None: any."""

    requests: int | None = None
    tokens: int | None = None


class FailedKeys:
    """How often each address showed keys that nobody has; of the addresses that did it last.

    Args:
        most: addresses that are remembered; the one that was quiet for longest is forgotten first.
        a_minute: failures of an address that get a plain answer.
    """

    def __init__(self, most: int = MOST_ADDRESSES, a_minute: int = FAILURES_A_MINUTE) -> None:
        self._most = most
        self._a_minute = a_minute
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def note(self, address: str, now: float) -> float:
        """Count one failure; answers seconds until the next that is not too many, 0 if this one was not."""
        bucket = self._buckets.setdefault(address, Bucket(self._a_minute))
        self._buckets.move_to_end(address)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        wait = bucket.wait(1, now)
        if not wait:
            bucket.take(1, now)
        return wait
