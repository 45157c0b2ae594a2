"""The clocks of all exchanges: what is due when, without a timer per token and without a task per exchange.

One task sleeps until the earliest time at which something could be due, then
looks at whom it concerns. Activity only pushes due times later, so nobody has to
tell it; what can make something due earlier pokes its clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import Context
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, final

import trio

AT_ONCE: Final = -math.inf  # a time that has come
LOOKS_A_TURN: Final = 32  # then other tasks have theirs
_STALE: Final = 64  # entries of clocks that stopped or are due at another time, beside as many as there are


def _never(now: float) -> float:
    return math.inf


def _nobody(exc: Exception) -> None:
    """Nobody is told."""


@final
class ExchangeClock:
    """Has ``look`` called whenever something may be due, from `start` to `stop`.

    Args:
        look: does what is due at the given time and answers when to look again.
        failed: told of an exception out of it; the clock has stopped then.
    """

    __slots__ = ("_clocks", "_context", "_failed", "_look", "due")

    def __init__(
        self, clocks: ExchangeClocks, look: Callable[[float], float], failed: Callable[[Exception], None]
    ) -> None:
        self._clocks = clocks
        self._look = look
        self._failed = failed
        self._context: Context | None = None
        self.due = math.inf  # the one entry of the heap that counts

    @property
    def runs(self) -> bool:
        """Whether it was started, and not stopped."""
        return self._context is not None

    def start(self, context: Context) -> None:
        """Look from now on when it is poked, in the context of a task, so that what it starts is its own."""
        self._context = context
        self._clocks.running += 1

    def stop(self) -> None:
        """Look no more, and forget whom it was for: entries outlive their exchange. Idempotent."""
        if self._context is not None:
            self._context = None
            self._look, self._failed = _never, _nobody
            self.due = math.inf
            self._clocks.running -= 1

    def poke(self, at: float = AT_ONCE) -> None:
        """Look at that time: something may be due earlier than it was."""
        if at < self.due and self._context is not None:
            self._clocks.note(self, at)

    def look(self, now: float) -> None:
        """Do what is due now, and note when to look again."""
        if self._context is None:
            return
        try:
            due = self._context.run(self._look, now)
        except Exception as exc:
            failed = self._failed
            self.stop()
            failed(exc)
            return
        if self.runs and due < self.due:
            self._clocks.note(self, due)


@final
class ExchangeClocks:
    """See the module's docstring. `run` is one task of the gateway, and outlives every exchange.

    Attributes:
        running: clocks that were started and not stopped.
    """

    def __init__(self) -> None:
        self.running = 0
        self._numbers = count()
        self._heap: list[tuple[float, int, ExchangeClock]] = []
        self._nap: trio.CancelScope | None = None

    def note(self, clock: ExchangeClock, due: float) -> None:
        """Look at this clock at that time, and not at the one that was noted before."""
        clock.due = due
        if len(self._heap) > 2 * self.running + _STALE:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].due]
            heapify(self._heap)
        heappush(self._heap, (due, next(self._numbers), clock))
        if self._nap is not None and due < self._nap.deadline:
            self._nap.deadline = due

    async def run(self) -> None:
        """Look for ever."""
        while True:
            if self._look_at_some(trio.current_time()):
                await trio.lowlevel.checkpoint()
                continue
            with trio.CancelScope(deadline=self._heap[0][0] if self._heap else math.inf) as self._nap:
                await trio.sleep_forever()
            self._nap = None

    def _look_at_some(self, now: float) -> bool:
        """Look at those that are due; answers whether some were left for the next turn."""
        looks = 0
        while self._heap and self._heap[0][0] <= now:
            if looks == LOOKS_A_TURN:
                return True
            due, _, clock = heappop(self._heap)
            if due == clock.due:
                clock.due = math.inf
                clock.look(now)
                looks += 1
        return False
