"""Whether a worker's streams stand still, measured by their own usual pace. Pure.

A health page can say 200 while nothing is generated. Each worker has a pace of its
own, by model, hardware and load, so no fixed limit fits; what it usually does is
learnt, and much longer silence of all its streams makes it suspect.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

TIMES: Final = 10.0  # the usual gap, after which silence is no pause any more
SHORTEST: Final = (
    2.0  # seconds; silence that is shorter is never suspect: others' long prefills pause streams
)
ENOUGH: Final = 32  # gaps before a worker's pace is known
_STEP: Final = 1 / 32  # weight of the newest gap
_REACH: Final = 1.0  # by how much of the log one gap can pull: a hang must not become usual
_SPARE: Final = 16  # entries that are not true any more, besides as many as there are streams
_SPREAD: Final = 3.0  # mean deviations above the mean up to which a gap is usual: about 99 of 100


class UsualGap:
    """A running estimate of the longest gap between events that is still usual.

    It keeps mean and mean deviation of the gap's logarithm as moving averages, as TCP
    does for round trips (Jacobson 1988), each pull bounded as Huber's (1964) estimators do.
    Constant memory.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._mean = 0.0
        self._deviation = 0.0

    def learn(self, gap: float) -> None:
        """Take the gap between two events, in seconds; events of one read have none."""
        value = math.log(max(gap, 1e-6))
        self.seen += 1
        if self.seen == 1:
            self._mean = value
            return
        step = max(_STEP, 1 / self.seen)  # a plain mean at first
        pull = min(max(value - self._mean, -_REACH), _REACH)
        self._mean += step * pull
        self._deviation += step * (abs(pull) - self._deviation)

    @property
    def seconds(self) -> float:
        """The estimate; infinite while too little was seen."""
        if self.seen < ENOUGH:
            return math.inf
        return math.exp(self._mean + _SPREAD * self._deviation)


class Progress:
    """The streams of one worker that have given output and are being read.

    Streams are told apart by any name. Memory is bounded by those that were begun
    and have not ended.
    """

    def __init__(self) -> None:
        self.usual = UsualGap()
        self._last: dict[str, float] = {}
        # The same, newest first, with what is not true any more: so nobody looks at all to find the newest.
        self._newest: list[tuple[float, str]] = []

    def progressed(self, stream: str, now: float, events: int = 1) -> None:
        """A stream delivered ``events`` since it was last told of, the last of them now; or it began."""
        before = self._last.get(stream)
        self._last[stream] = now
        if len(self._newest) > 2 * len(self._last) + _SPARE:
            self._newest = [(-at, name) for name, at in self._last.items()]
            heapq.heapify(self._newest)
        else:
            heapq.heappush(self._newest, (-now, stream))
        if before is not None and now > before:
            self.usual.learn((now - before) / events)

    def ended(self, stream: str) -> None:
        """A stream is over, or is not read for a while since its reader is slow. It may progress again."""
        self._last.pop(stream, None)
        if not self._last:
            self._newest.clear()

    @property
    def limit(self) -> float:
        """Seconds of silence after which streams stand still."""
        return max(TIMES * self.usual.seconds, SHORTEST)

    def still(self, now: float) -> bool:
        """Whether there are streams, and none of them made progress for longer than `limit`."""
        if not self._last:
            return False
        while self._last.get((top := self._newest[0])[1]) != -top[0]:
            heapq.heappop(self._newest)
        return now + top[0] > self.limit
