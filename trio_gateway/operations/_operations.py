"""What operators see and do, behind one port: see `trio_gateway.admin.AdminPort`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import trio

from ..admin import Action, Actor, ActResult, RequestFilter, Row, refusal
from ..config import Settings, Source
from ..errors import Refused
from ..exchange import OPERATOR, Exchange, flight_file
from ..fleet import DRAINED, EJECTED, UNTOUCHED
from ..flow import in_steps
from . import _requests, _standing
from ._apply import Prepared
from ._audit import Outcome, Trail
from ._configuration import Configuration
from ._house import House
from ._keys import rotate
from ._pulse import Pulse
from ._self_audit import SelfAudit
from ._signals import version_of
from ._statistics import statistics
from ._tasks import TaskTree

MOST_ENDINGS: Final = 100  # that the feed tells at a time
LONGEST_OVERLAP: Final = 366 * 86_400.0  # seconds for which a replaced key may still be good
ENDED: Final = 50  # requests in one step on the loop, some 1 ms
END_LIMIT: Final = 5.0  # seconds to end many requests
SHOWN_ONCE: Final = "key"  # of a result, never in the audit table

Act = Callable[[str, Mapping[str, Any]], Awaitable[ActResult]]


class Operations:
    """See the module's docstring. Reading answers from memory; acting goes through `act` alone.

    Args:
        settings: in force at the start.
        source: where they come from; None: nobody knows, and none can be changed.
        trail: takes what was done.
        changed: told when other settings are in force.
    """

    def __init__(
        self,
        house: House,
        settings: Settings,
        source: Source | None,
        trail: Trail,
        changed: Callable[[Prepared], None],
    ) -> None:
        self._house = house
        self.configured: Final = Configuration(house, settings, source, changed)
        self.trail: Final = trail
        self._pulse = Pulse(house)
        self._tree = TaskTree()
        self.auditor: Final = SelfAudit(house)
        self._rotating = trio.CapacityLimiter(1)
        self._acts: dict[Action, Act] = {
            "requests.cancel": self._cancel_request,
            "tenants.cancel": self._cancel_tenant,
            "tenants.freeze": self._freeze,
            "tenants.thaw": self._thaw,
            "workers.drain": self._drain,
            "workers.resume": self._resume,
            "workers.eject": self._eject,
            "breakers.reset": self._reset_breakers,
            "breakers.force": self._force_breaker,
            "limits.set": self._set_limits,
            "keys.rotate": self._rotate_key,
            "reload": self._reload,
            "processes.replace": self._replace_processes,
            "log_level.set": self._set_log_level,
        }

    # -- reading

    def statistics(self) -> Row:
        """See AdminPort."""
        return statistics(self._house)

    def timeline(self, request_id: str) -> Row:
        """See AdminPort."""
        return _requests.timeline(self._house, request_id)

    async def tenants(self) -> list[Row]:
        """See AdminPort."""
        return await _standing.tenants(self._house)

    def queues(self) -> Row:
        """See AdminPort."""
        return _standing.queues(self._house)

    def workers(self) -> list[Row]:
        """See AdminPort."""
        return _standing.workers(self._house)

    async def limits(self) -> Row:
        """See AdminPort."""
        return await self.configured.limits()

    def endings(self, limit: int) -> list[Row]:
        """See AdminPort."""
        wall = self._house.parts.attempts.wall()
        recent = list(self._house.books.recent)[-limit:]
        return [_requests.ending(record, wall) for record in reversed(recent)]

    def endings_after(self, number: int) -> tuple[int, list[Row]]:
        """See AdminPort."""
        reached = sum(self._house.books.outcomes.values())
        new = min(max(reached - number, 0), MOST_ENDINGS)
        return reached, self.endings(new)[::-1] if new else []

    def version(self) -> Row:
        """See AdminPort."""
        return version_of(self._house.boot_id, self._house.started)

    async def configuration(self) -> Row:
        """See AdminPort."""
        return await self.configured.shown()

    def snapshot(self) -> Row:
        """See AdminPort."""
        return self._pulse.snapshot()

    async def requests(self, asked: RequestFilter) -> Row:
        """See AdminPort."""
        return await _requests.requests(self._house, asked)

    async def tasks(self) -> list[Row]:
        """See AdminPort."""
        return await self._tree.rows()

    async def self_audit(self) -> Row:
        """See AdminPort."""
        return await self.auditor.look()

    async def audit(self, limit: int) -> list[Row]:
        """See AdminPort."""
        return await self.trail.read(limit)

    async def flight(self, request_id: str) -> Row:
        """See AdminPort."""
        await trio.lowlevel.checkpoint()
        flight = self._house.live.flight(request_id)
        if flight is None:
            raise refusal("not_found", "there is no such request, or it ended long ago")
        return flight_file(request_id, flight)

    # -- acting

    async def act(
        self, actor: Actor, action: Action, target: str | None, arguments: Mapping[str, Any]
    ) -> ActResult:
        """See AdminPort."""
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            result = await self._acts[action](target or "", arguments)
        except Refused as refused:
            problem = refused.problem
            told = {"code": problem.code, "message": problem.message}
            self.trail.note(actor, action, target, "refused", dict(arguments), told)
            raise
        except BaseException as exc:
            told = {"code": "internal_error", "error": type(exc).__name__}
            self.trail.note(actor, action, target, "refused", dict(arguments), told)
            raise
        outcome: Outcome = "done" if result.done else "nothing_to_do"
        self.trail.note(actor, action, target, outcome, result.before, _without_secret(result.after))
        return result

    async def refused(self, actor: Actor, action: Action, target: str | None, code: str) -> None:
        """See AdminPort."""
        await trio.lowlevel.checkpoint()
        self.trail.note(actor, action, target, "refused", None, {"code": code})

    # -- requests and tenants

    async def _cancel_request(self, target: str, arguments: Mapping[str, Any]) -> ActResult:  # noqa: ASYNC124
        exchange = self._house.live.find(target)
        if exchange is not None:
            state = exchange.standing_word()
            exchange.end(OPERATOR)
            ending = exchange.ending
            outcome = None if ending is None else ending.outcome.value
            return ActResult(state != "ended", {"state": state}, {"state": "ended", "outcome": outcome})
        standing = self._house.live.standing(target)
        if standing is None:
            raise refusal("not_found", "there is no such request, or it ended long ago")
        told = {"state": standing.state, "outcome": standing.outcome}
        return ActResult(False, told, told)

    async def _cancel_tenant(self, target: str, arguments: Mapping[str, Any]) -> ActResult:
        self._expect_tenant(target)
        ended = await self._end(lambda exchange: exchange.request.tenant == target)
        return ActResult(ended > 0, {"under_way": ended}, {"under_way": 0, "cancelled": ended})

    async def _end(self, is_meant: Callable[[Exchange], bool]) -> int:
        meant = [each for each in self._house.live if each.ending is None and is_meant(each)]
        # Those that wait come first: else they get the slots of the others, and an engine begins for nobody.
        meant.sort(key=lambda each: each.standing_word() != "waiting")
        with trio.move_on_after(END_LIMIT, shield=True):  # all of it, also if the operator leaves
            await in_steps(_ended(meant), ENDED)
        return len(meant)

    async def _freeze(self, target: str, arguments: Mapping[str, Any]) -> ActResult:  # noqa: ASYNC124
        self._expect_tenant(target)
        done = self._house.admission.freeze(target)
        return ActResult(done, {"frozen": not done}, {"frozen": True})

    async def _thaw(self, target: str, arguments: Mapping[str, Any]) -> ActResult:  # noqa: ASYNC124
        if target not in self._house.admission.frozen:
            self._expect_tenant(target)
        done = self._house.admission.thaw(target)
        return ActResult(done, {"frozen": done}, {"frozen": False})

    def _expect_tenant(self, target: str) -> None:
        under_way = any(exchange.request.tenant == target for exchange in self._house.live)
        if target not in self._house.keyring.tenants and not under_way:
            raise refusal("not_found", "there is no such tenant")

    # -- workers

    async def _drain(self, target: str, arguments: Mapping[str, Any]) -> ActResult:  # noqa: ASYNC124
        return self._touch(target, DRAINED)

    async def _resume(self, target: str, arguments: Mapping[str, Any]) -> ActResult:  # noqa: ASYNC124
        return self._touch(target, UNTOUCHED)

    async def _eject(self, target: str, arguments: Mapping[str, Any]) -> ActResult:
        result = self._touch(target, EJECTED)
        ended = await self._end(lambda exchange: exchange.worker == target)
        return ActResult(result.done or ended > 0, result.before, {**result.after, "cancelled": ended})

    def _touch(self, target: str, how: str) -> ActResult:
        self._expect_worker(target)
        before = self._house.fleet.touch(target, how)
        return ActResult(before != how, {"operator": before}, {"operator": how})

    async def _reset_breakers(self, target: str, arguments: Mapping[str, Any]) -> ActResult:  # noqa: ASYNC124
        self._expect_worker(target)
        fleet, model = self._house.fleet, arguments.get("model")
        before = fleet.breaker_states(target)
        models = [model] if model in before else [] if model is not None else list(before)
        fleet.reset_breakers(target, models)
        after = fleet.breaker_states(target)
        return ActResult(before != after, before, after)

    async def _force_breaker(self, target: str, arguments: Mapping[str, Any]) -> ActResult:  # noqa: ASYNC124
        self._expect_worker(target)
        fleet, model = self._house.fleet, arguments["model"]
        if all(book.worker.id != target for book in fleet.serving(model)):
            raise refusal("not_found", "the worker does not serve this model", param="model")
        before = fleet.breaker_states(target)
        if arguments["state"] == "open":
            fleet.force_breaker(target, model)
        else:
            fleet.reset_breakers(target, [model])
        after = fleet.breaker_states(target)
        return ActResult(before != after, before, after)

    def _expect_worker(self, target: str) -> None:
        if target not in self._house.fleet.books:
            raise refusal("not_found", "there is no such worker")

    # -- settings

    async def _set_limits(self, target: str, arguments: Mapping[str, Any]) -> ActResult:
        return await self.configured.set(arguments["set"])

    async def _reload(self, target: str, arguments: Mapping[str, Any]) -> ActResult:
        return await self.configured.reload()

    async def _replace_processes(self, target: str, arguments: Mapping[str, Any]) -> ActResult:
        raise refusal("not_possible", "there is one process alone: see server.processes")

    async def _set_log_level(self, target: str, arguments: Mapping[str, Any]) -> ActResult:
        level, log = arguments["level"], self._house.log
        if self.configured.changeable:
            return await self.configured.set({"log.level": level})
        before = log.level
        log.relevel(level)
        return ActResult(before != level, {"log.level": before}, {"log.level": level})

    async def _rotate_key(self, target: str, arguments: Mapping[str, Any]) -> ActResult:
        tenant, key = arguments["tenant"], arguments["id"]
        settings = self.configured.settings
        of_file = (each.id for owner in settings.tenants for each in owner.keys)
        if key in of_file:
            raise refusal("not_possible", "the key stands in the configuration file: change that", param="id")
        if settings.database.url is None:
            raise refusal("not_found", "there is no database, and no such key in the file", param="id")
        overlap = float(arguments.get("overlap", 0.0))
        if not 0 <= overlap <= LONGEST_OVERLAP:
            raise refusal("invalid_value", "overlap is from 0 to a year, in seconds", param="overlap")
        made = await rotate(settings.database.url.value, key, tenant, overlap, self._rotating)
        if self._house.follower is not None:
            self._house.follower.look_again()
        return ActResult(True, {"id": key}, made)


def _ended(exchanges: Iterable[Exchange]) -> Iterator[Exchange]:
    for each in exchanges:
        each.end(OPERATOR)
        yield each


def _without_secret(after: Any) -> Any:
    if isinstance(after, dict) and SHOWN_ONCE in after:
        return {name: value for name, value in after.items() if name != SHOWN_ONCE}
    return after
