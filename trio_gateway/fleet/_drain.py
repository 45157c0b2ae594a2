"""The drain keeper: holds the leases of attempts whose engine has not been seen to stop.

A lease goes back when the worker confirms that its engine let go, as agents do, or
when its worker's ``cancel_grace`` is over. No exchange waits for this.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import trio

from ..contract import Worker

ON_THE_WAY: Final = 1.0  # seconds that an attempt, its cancel, or a report may be on their way


@dataclass(slots=True, eq=False)
class _Draining:
    worker: Worker
    attempt_id: str
    since: float
    give_back: Callable[[], None]
    over: bool = False


def _tell_nobody(*_: object) -> None:
    """Nobody listens."""


class DrainKeeper:
    """Gives each lease back when its engine let go, or its time is up. `run` is one task of the gateway.

    Args:
        idle: told worker, seconds since the attempt was over, and whether the worker confirmed it.
        let_go: told the id of every attempt that a worker has let go of, whether it drained here or not,
            and how many tokens had been generated, if it said so.
    """

    def __init__(
        self,
        idle: Callable[[Worker, float, bool], None] = _tell_nobody,
        let_go: Callable[[str, int | None], None] = _tell_nobody,
    ) -> None:
        self._idle = idle
        self._let_go = let_go
        self._due: list[tuple[float, int, _Draining]] = []
        self._of_worker: dict[Worker, dict[str, _Draining]] = {}
        self._order = itertools.count()
        self._nap: trio.CancelScope | None = None

    def keep(self, worker: Worker, attempt_id: str, give_back: Callable[[], None]) -> None:
        """Call ``give_back`` once, after the worker's ``cancel_grace`` at the latest; never waits."""
        now = trio.current_time()
        draining = _Draining(worker, attempt_id, now, give_back)
        self._of_worker.setdefault(worker, {})[attempt_id] = draining
        heapq.heappush(self._due, (now + worker.cancel_grace, next(self._order), draining))
        if self._nap is not None and self._due[0][0] < self._nap.deadline:
            self._nap.deadline = self._due[0][0]

    def of_worker(self, worker: Worker, longer_than: float = 0.0) -> list[str]:
        """Ids of the attempts that drain at a worker, for at least so many seconds."""
        latest = trio.current_time() - longer_than
        return [each.attempt_id for each in self._of_worker.get(worker, {}).values() if each.since <= latest]

    def released(self, worker: Worker, attempt_id: str, generated: int | None = None) -> None:
        """The worker confirmed that its engine let go of an attempt, after so many tokens."""
        draining = self._of_worker.get(worker, {}).get(attempt_id)
        if draining is not None:
            self._end(draining, confirmed=True)
        self._let_go(attempt_id, generated)

    def released_all(self, worker: Worker) -> None:
        """The worker's process is gone, and everything in it."""
        for draining in tuple(self._of_worker.get(worker, {}).values()):
            self._end(draining, confirmed=True)

    def listed(self, worker: Worker, attempt_ids: Collection[str]) -> None:
        """The worker told which attempts hold a slot; those it has not are gone, unless they are too new."""
        for attempt_id in self.of_worker(worker, ON_THE_WAY):
            if attempt_id not in attempt_ids:
                self.released(worker, attempt_id)

    async def run(self) -> None:
        """Give back whatever is due, for ever."""
        while True:
            with trio.CancelScope(deadline=self._due[0][0] if self._due else math.inf) as self._nap:
                await trio.sleep_forever()
            self._nap = None
            while self._due and self._due[0][0] <= trio.current_time():
                self._end(heapq.heappop(self._due)[2], confirmed=False)

    def _end(self, draining: _Draining, *, confirmed: bool) -> None:
        if draining.over:
            return
        draining.over = True
        kept = self._of_worker[draining.worker]
        if kept.get(draining.attempt_id) is draining:
            del kept[draining.attempt_id]
        if not kept:
            del self._of_worker[draining.worker]
        self._idle(draining.worker, trio.current_time() - draining.since, confirmed)
        draining.give_back()
