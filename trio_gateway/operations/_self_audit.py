"""The self-audit: whether the equations hold, and who holds something for an exchange that is over.

What an exchange holds it gives back in the step in which it ends, so a lease, a position or a task of an
exchange that is not under way is a leak. Whatever has a clock of its own - leases that drain, answers that
can be resumed, idle connections - is one when that clock is over. A few seconds of slack are for a loop that
is late; what has no time of its own counts from when it was first seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final, Literal

import trio

from ..admin import Row
from ..contract import Outcome
from ..exchange import Exchange, exchange_of
from ..flow import in_steps
from ._house import House
from ._tasks import TaskTree, children_of, has_ended

EVERY: Final = 10.0  # seconds between two looks in the background
SLACK: Final = 5.0  # seconds that something may be held beyond its time
FAREWELL: Final = 15.0  # seconds in which an exchange that was ended is over
MOST_LEAKS: Final = 100  # that are named
STEP: Final = 500  # things that are looked at in one step on the loop, some 0.5 ms

Seen = dict[tuple[str, str], float]  # kind and holder of what was seen, and when first
Kind = Literal["lease", "position", "buffer", "descriptor", "task"]


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that is held for nobody.

    Attributes:
        holder: id of the exchange; where nobody knows it, what holds it.
        age: seconds for which it should have been given back, at least.
        detail: what and where, for people.
    """

    kind: Kind
    holder: str
    worker: str | None
    age: float
    detail: str


class SelfAudit:
    """Looks when it is asked to, and by itself."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._tree = TaskTree()
        self._seen: Seen = {}
        self._told: tuple[object, ...] = ()

    async def look(self) -> Row:
        """Answer ``{"ok", "equations", "leaks"}`` as it is now."""
        equations = self._house.equations()
        seen: Seen = {}
        leaks = _oldest_first(await in_steps(self._find(trio.current_time(), seen), STEP))
        self._seen = seen
        self._house.leaks = len(leaks)
        shown = [{**asdict(leak), "age": round(leak.age, 3)} for leak in leaks[:MOST_LEAKS]]
        return {"ok": not (equations or leaks), "equations": equations, "leaks": shown}

    def leaks(self) -> list[Leak]:
        """Name what is held for nobody, oldest first."""
        seen: Seen = {}
        found = [leak for leak in self._find(trio.current_time(), seen) if leak is not None]
        self._seen = seen
        return _oldest_first(found)

    def _find(self, now: float, seen: Seen) -> Iterator[Leak | None]:
        """Look at everything, and go on a while later; None for what is right, as some of it must be.

        Args:
            seen: takes what was seen, and when first, for the next look.
        """
        # At one moment each, for what was held in the one may be given back in the next.
        yield from list(self._leases(now))
        yield from [None] * STEP
        yield from list(self._positions(now))
        yield from [None] * STEP
        yield from [*self._buffers(now, seen), *self._descriptors(now, seen)]
        yield from self._tasks(now, seen)

    async def run(self) -> None:
        """Look from time to time, for ever; what changed is logged."""
        while True:
            await trio.sleep(EVERY)
            self._tell(await self.look())

    def _tell(self, found: Row) -> None:
        holders = tuple((leak["kind"], leak["holder"]) for leak in found["leaks"])
        told = (*found["equations"], *holders)
        if bool(told) == bool(self._told) and set(holders) <= set(self._told):
            return
        self._told = told
        if found["ok"]:
            self._house.log.write("info", "self_audit_passed")
            return
        leaks = [f"{leak['kind']} of {leak['holder']}: {leak['detail']}" for leak in found["leaks"][:10]]
        self._house.log.write("error", "self_audit_failed", equations=found["equations"], leaks=leaks)

    # -- what there is to hold

    def _over_for(self, exchange: str, since: float, now: float) -> float | None:
        """Seconds since an exchange was over; None: it is under way.

        Args:
            since: when it certainly had begun; counts if nobody remembers when it ended.
        """
        live = self._house.live
        if live.find(exchange) is not None:
            return None
        ended = live.ended_for(exchange, now)
        return now - since if ended is None else ended

    def _leases(self, now: float) -> Iterator[Leak]:
        for lease in self._house.admission.leases():
            exchange, worker = lease.exchange_id, lease.worker
            if lease.draining_since is not None:
                age = now - lease.draining_since - worker.cancel_grace
                detail = f"drains, {worker.cancel_grace} s were granted"
            else:
                over = self._over_for(exchange, lease.since, now)
                age = 0.0 if over is None else over
                detail = f"held for {now - lease.since:.1f} s by attempt {lease.attempt_id or 'none yet'}"
            if age > SLACK:
                yield Leak("lease", exchange, worker.id, age, detail)

    def _positions(self, now: float) -> Iterator[Leak]:
        for request in self._house.admission.waiting():
            over = self._over_for(request.exchange_id, request.arrived, now)
            if over is not None and over > SLACK:
                detail = f"a position of tenant {request.tenant} for {request.model}"
                yield Leak("position", request.exchange_id, None, over, detail)

    def _buffers(self, now: float, seen: Seen) -> Iterator[Leak]:
        house = self._house
        for kept in (house.sockets.kept, house.generator.kept):
            for request_id, age, size in kept.overdue(now):
                if age > SLACK:
                    yield Leak("buffer", request_id, None, age, f"{size} bytes of an answer to be resumed")
        unknown = house.buffers.used - house.live.buffered - house.kept_bytes
        if unknown <= 0:
            return
        for exchange, age, size in house.live.debts(now):
            unknown -= size
            if age > SLACK:
                yield Leak("buffer", exchange, None, age, f"{size} bytes for its client")
        if unknown > 0 and (age := self._since("buffer", "unknown", now, seen)) > SLACK:
            yield Leak("buffer", "unknown", None, age, f"{unknown} bytes that no exchange has")

    def _descriptors(self, now: float, seen: Seen) -> Iterator[Leak]:
        house = self._house
        for worker, age in house.connections.overdue():
            if age > SLACK:
                yield Leak("descriptor", worker, worker, age, "an idle connection that is not closed")
        watched = len(house.watch) - house.server.open
        if watched > 0 and (age := self._since("descriptor", "watched", now, seen)) > SLACK:
            yield Leak("descriptor", "watched", None, age, f"{watched} sockets without a connection")

    def _tasks(self, now: float, seen: Seen) -> Iterator[Leak | None]:
        for task in _all_tasks():
            yield self._orphan(task, now, seen)
        for each in self._house.live:
            yield self._straggler(each, now, seen)

    def _orphan(self, task: trio.lowlevel.Task, now: float, seen: Seen) -> Leak | None:
        """A task that outlives its exchange."""
        exchange = exchange_of(task)
        if exchange is None or self._house.live.find(exchange) is not None:
            return None
        since = self._since("task", f"{exchange} {id(task)}", now, seen)
        age = max(since, self._house.live.ended_for(exchange, now) or 0.0)
        if age <= SLACK:
            return None
        where = self._tree.where(task) or "nowhere of ours"
        return Leak("task", exchange, None, age, f"{task.name} at {where}")

    def _straggler(self, exchange: Exchange, now: float, seen: Seen) -> Leak | None:
        """An exchange that was ended and is not over."""
        ending = exchange.ending
        if ending is None or ending.outcome is Outcome.COMPLETED:
            return None  # who has all of it may still be asked for its last words
        request_id = exchange.request.exchange_id
        if self._house.live.find(request_id) is not exchange:
            return None  # over by now
        age = self._since("ended", request_id, now, seen) - FAREWELL
        if age <= 0:
            return None
        place = None if exchange.task is None else self._tree.where(exchange.task)
        return Leak("task", request_id, None, age, f"ended as {ending.outcome.value}, at {place}")

    def _since(self, kind: str, holder: str, now: float, seen: Seen) -> float:
        """Seconds since something was first seen without a pause."""
        first = seen[kind, holder] = self._seen.get((kind, holder), now)
        return now - first


def _oldest_first(leaks: list[Leak]) -> list[Leak]:
    return sorted(leaks, key=lambda leak: -leak.age)


def _all_tasks() -> Iterator[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    left = [] if root is None else [root]
    while left:
        task = left.pop()
        if has_ended(task):
            continue
        yield task
        left += children_of(task)
