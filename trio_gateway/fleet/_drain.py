"""The drain keeper: holds the leases of attempts whose engine has not been seen to stop.

Without an agent nobody confirms a cancel, so a lease is kept for its worker's
``cancel_grace`` and then given back. No exchange waits for this.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

import trio


class DrainKeeper:
    """Gives each lease back when its time is up. `run` is one task of the gateway."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._nap: trio.CancelScope | None = None

    def keep(self, seconds: float, give_back: Callable[[], None]) -> None:
        """Call ``give_back`` after ``seconds``; never waits."""
        heapq.heappush(self._due, (trio.current_time() + seconds, next(self._order), give_back))
        if self._nap is not None and self._due[0][0] < self._nap.deadline:
            self._nap.deadline = self._due[0][0]

    async def run(self) -> None:
        """Give back whatever is due, for ever."""
        while True:
            with trio.CancelScope(deadline=self._due[0][0] if self._due else math.inf) as self._nap:
                await trio.sleep_forever()
            self._nap = None
            while self._due and self._due[0][0] <= trio.current_time():
                heapq.heappop(self._due)[2]()
