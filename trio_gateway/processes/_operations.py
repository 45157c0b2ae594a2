"""What operators see and do in a gateway of several processes: each is asked, and their answers are one.

What was done that lasts - tenants frozen, workers taken out, limits set, breakers forced - is done again in
a process that is started later, before it serves anybody.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

import trio

from ..admin import (
    ACTS,
    MOST_ROWS,
    READS,
    Access,
    Action,
    Actor,
    ActResult,
    AdminToken,
    RequestFilter,
    Row,
    refusal,
)
from ..config import ConfigurationError, Settings, Source
from ..errors import Refused
from ..lending import Broker
from ..operations import Trail, in_force, version_of
from ..telemetry import Log
from . import _merge
from ._child import ACT_LIMIT, Child, NoAnswer

KEPT_ENDINGS: Final = 1000
MOST_PAGES: Final = 20  # of rows that are read of one process for one answer
MOST_WORDS: Final = 4000  # characters of what is wrong with a file
AGAIN: Final = 1.0  # seconds until loans that differ are compared again: messages may be on their way
READ_PATIENCE: Final = 2.0  # seconds for who hangs: somebody scrapes, or looks at a page
READ_LIMIT: Final = 10.0  # seconds for the file to be read; one on a disk that is away may take for ever
SHOWN_ONCE: Final = "key"

_PATHS: Final[dict[str, str]] = {act.action: act.path for act in ACTS} | {
    read.name: read.path for read in READS
}
_LASTING: Final[dict[str, tuple[str, ...]]] = {
    # What an action makes, and the actions that it takes the place of.
    "tenants.freeze": ("tenants.freeze",),
    "tenants.thaw": ("tenants.freeze",),
    "workers.drain": ("workers.drain", "workers.eject"),
    "workers.eject": ("workers.drain", "workers.eject"),
    "workers.resume": ("workers.drain", "workers.eject"),
    "breakers.force": (),
    "breakers.reset": (),
    "log_level.set": ("log_level.set",),
}
_UNDONE: Final = frozenset({"tenants.thaw", "workers.resume", "breakers.reset"})


class House(Protocol):
    """The supervisor, as this room knows it."""

    boot_id: str
    started: float
    source: Source
    settings: Settings
    children: Sequence[Child]
    ended: list[Row]
    broker: Broker
    access: Access
    log: Log
    copy: Path
    stopping: bool

    @property
    def capacity(self) -> str:
        """How processes count slots together; see `Place`."""
        ...

    def replace(self) -> bool:
        """Have one process after the other replaced by a new one; False: that is under way."""
        ...


class ManyOperations:
    """See `AdminPort`.

    Args:
        trail: takes what was done.
    """

    def __init__(self, house: House, trail: Trail) -> None:
        self._house = house
        self.trail: Final = trail
        self._orders: dict[tuple[str, str | None, str], Mapping[str, Any]] = {}
        self._live: dict[str, Any] = {}
        self._turn = trio.Lock()
        self._endings: deque[Row] = deque(maxlen=KEPT_ENDINGS)
        self._seen: dict[str, None] = {}
        self._ended = itertools.count(1)
        self._reached = 0

    @property
    def _whole(self) -> bool:
        """Whether each process tells all slots of a worker, and not a part."""
        return self._house.capacity != "split"

    # -- asking

    def _alive(self) -> list[Child]:
        return [child for child in self._house.children if child.ready]

    def _welcomed(self) -> list[Child]:
        """Who is told what operators say: also who is about to serve, so that nobody misses anything."""
        return [child for child in self._house.children if child.welcomed]

    async def _all(
        self,
        ask: Callable[[Child], Awaitable[Any]],
        children: Sequence[Child] | None = None,
        patience: float = READ_PATIENCE,
    ) -> tuple[dict[int, Any], list[Refused]]:
        """Ask all processes at once; answers what they answer, and how they refuse, by their numbers.

        Where something is nowhere, but not each of them said so, that is the first refusal.

        Args:
            children: those that are asked; all that serve if None.
            patience: seconds for those that have not answered when the first one has.

        Raises:
            Refused: none of them answered anything.
        """
        asked = list(self._alive() if children is None else children)
        answers: dict[int, Any] = {}
        refused: dict[int, Refused] = {}
        silent: dict[int, str] = {}

        async def one(child: Child) -> None:
            try:
                answers[child.number] = await ask(child)
            except Refused as error:
                refused[child.number] = error
            except NoAnswer as error:
                silent[child.number] = str(error)
                return
            scope.deadline = min(scope.deadline, trio.current_time() + patience)

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for child in asked:
                    nursery.start_soon(one, child)
        for number in {child.number for child in asked} - answers.keys() - refused.keys():
            reason = silent.setdefault(number, f"process {number} is silent {patience:g} s after another")
            self._house.log.write("warning", "process_silent", process=number, reason=reason)
        if not answers and not refused:
            raise refusal("not_possible", "no process answers at the moment")
        told = [refused[number] for number in sorted(refused)]
        if silent and all(each.problem.status == 404 for each in told):
            one_of_them = silent[min(silent)]
            told.insert(0, refusal("not_possible", f"nobody knows whether it is there: {one_of_them}"))
        return dict(sorted(answers.items())), told

    async def _read(self, name: str, **query: Any) -> dict[int, Any]:
        path = _PATHS[name]
        answers, refused = await self._all(lambda child: child.read(path, query))
        if not answers:
            raise refused[0]
        return answers

    async def _lists(self, name: str, **query: Any) -> dict[int, list[Row]]:
        member = next(read.member for read in READS if read.name == name)
        assert member is not None
        return {number: answer[member] for number, answer in (await self._read(name, **query)).items()}

    async def _first(self, name: str) -> Row:
        answers = await self._read(name)
        row: Row = next(iter(answers.values()))
        return row

    async def _whoever_has(self, name: str, request_id: str) -> Row:
        path = _path(name, request_id)
        answers, refused = await self._all(lambda child: child.read(path))
        if not answers:
            raise refused[0]
        number, answer = next(iter(answers.items()))
        if "request" in answer:
            answer["request"]["process"] = number
        row: Row = answer
        return row

    # -- reading

    async def statistics(self) -> Row:
        """See AdminPort."""
        house = self._house
        answers = await self._read("statistics")
        merged = _merge.statistics(answers, self._whole, house.ended)
        merged["boot_id"] = house.boot_id
        merged["uptime"] = round(trio.current_time() - house.started, 3)
        merged["process"] = None
        merged["log_lines_dropped"] += house.log.dropped
        merged["processes"] = [
            {
                "number": child.number,
                "pid": None if child.process is None else child.process.pid,
                "boot_id": child.boot_id,
                "ready": child.ready,
                "uptime": round(trio.current_time() - child.started_at, 3) if child.ready else None,
                "restarts": child.restarts,
                "running": answers[child.number]["running"] if child.number in answers else None,
                "waiting": answers[child.number]["waiting"] if child.number in answers else None,
            }
            for child in house.children
        ]
        merged["lending"] = house.broker.book.figures() if house.capacity == "shared" else None
        return merged

    async def timeline(self, request_id: str) -> Row:
        """See AdminPort."""
        return await self._whoever_has("timeline", request_id)

    async def flight(self, request_id: str) -> Row:
        """See AdminPort."""
        return await self._whoever_has("flight", request_id)

    async def tenants(self) -> list[Row]:
        """See AdminPort."""
        lists = await self._lists("tenants")
        return [_merge.tenant(rows) for rows in _merge.by_id(lists.values())]

    async def queues(self) -> Row:
        """See AdminPort."""
        return _merge.queues(await self._read("queues"), self._whole)

    async def workers(self) -> list[Row]:
        """See AdminPort."""
        lists = await self._lists("workers")
        return [_merge.worker(rows, self._whole) for rows in _merge.by_id(lists.values())]

    async def limits(self) -> Row:
        """See AdminPort."""
        return await self._first("limits")

    async def configuration(self) -> Row:
        """See AdminPort."""
        return await self._first("configuration")

    async def endings(self, limit: int) -> list[Row]:
        """See AdminPort."""
        return _merge.endings(await self._lists("endings", limit=limit), limit)

    async def endings_after(self, number: int) -> tuple[int, list[Row]]:
        """See AdminPort. Each is given its number when it is first seen."""
        for row in reversed(await self.endings(100)):
            if row["id"] not in self._seen:
                self._seen[row["id"]] = None
                self._reached = next(self._ended)
                self._endings.append({**row, "number": self._reached})
        while len(self._seen) > 10 * KEPT_ENDINGS:
            del self._seen[next(iter(self._seen))]
        new = [row for row in self._endings if row["number"] > number][-100:]
        return self._reached, [{k: v for k, v in row.items() if k != "number"} for row in new]

    def version(self) -> Row:
        """See AdminPort."""
        return version_of(self._house.boot_id, self._house.started)

    async def snapshot(self) -> Row:
        """See AdminPort."""
        merged = _merge.snapshot(await self._read("snapshot"), self._whole)
        merged["at"] = round(trio.current_time() - self._house.started, 3)
        merged["stopping"] = merged["stopping"] or self._house.stopping
        return merged

    async def requests(self, asked: RequestFilter) -> Row:
        """See AdminPort."""
        wanted = asked.offset + asked.limit
        if wanted > MOST_PAGES * MOST_ROWS:
            raise refusal("invalid_value", "so far back nobody has looked; use a filter", param="offset")
        answers, refused = await self._all(lambda child: self._pages(child, asked, wanted))
        if not answers:
            raise refused[0]
        return _merge.requests(answers, asked)

    @staticmethod
    async def _pages(child: Child, asked: RequestFilter, wanted: int) -> Row:
        """Read the first rows of a process, so many or all."""
        names = ("state", "tenant", "model", "worker", "search", "order")
        query = {name: getattr(asked, name) for name in names}
        rows: list[Row] = []
        while True:
            limit = min(wanted - len(rows), MOST_ROWS)
            page = await child.read(_PATHS["requests"], {**query, "limit": limit, "offset": len(rows)})
            rows += page["requests"]
            if len(rows) >= min(wanted, page["total"]) or not page["requests"]:
                return {"requests": rows, "total": page["total"]}

    async def tasks(self) -> list[Row]:
        """See AdminPort."""
        return _merge.numbered(await self._lists("tasks"))

    async def audit(self, limit: int) -> list[Row]:
        """See AdminPort."""
        return await self.trail.read(limit)

    async def self_audit(self) -> Row:
        """See AdminPort. What is lent is compared with what the processes say they have."""
        answers = await self._read("self_audit")
        equations = [f"process {n}: {each}" for n, answer in answers.items() for each in answer["equations"]]
        leaks = [leak for answer in answers.values() for leak in answer["leaks"]]
        if self._house.capacity == "shared":
            equations += await self._differing_loans()
        ok = all(answer["ok"] for answer in answers.values()) and not equations
        return {"ok": ok, "equations": equations, "leaks": leaks}

    async def _differing_loans(self) -> list[str]:
        """Name loans of which lender and borrower think otherwise, now and a while later."""
        before = await self._loans()
        if not before:
            return []
        await trio.sleep(AGAIN)
        after = await self._loans()
        return [
            f"loans: process {number} has {said} of {thing}, and {lent} are lent to it"
            for (number, thing), (said, lent) in after.items()
            if before.get((number, thing)) == (said, lent)
        ]

    async def _loans(self) -> dict[tuple[int, str], tuple[int, int]]:
        answers = await self._read("statistics")
        lent = self._house.broker.book.lent()
        found = {}
        for child in self._alive():
            if child.number not in answers:
                continue
            said = answers[child.number]["process"]["lent"]
            counted = {
                thing: units[child.borrower] for thing, units in lent.items() if child.borrower in units
            }
            for thing in said.keys() | counted.keys():
                both = said.get(thing, 0), counted.get(thing, 0)
                if both[0] != both[1]:
                    found[child.number, thing] = both
        return found

    # -- acting

    async def act(
        self, actor: Actor, action: Action, target: str | None, arguments: Mapping[str, Any]
    ) -> ActResult:
        """See AdminPort."""
        try:
            async with self._turn:
                # Who asked may leave meanwhile: what some processes have done all of them do, and those that
                # start later.
                longest = READ_LIMIT + 2 * ACT_LIMIT * len(self._house.children)
                with trio.fail_after(longest, shield=True):
                    result = await self._do(action, target, arguments)
        except Refused as refused:
            told = {"code": refused.problem.code, "message": refused.problem.message}
            self.trail.note(actor, action, target, "refused", dict(arguments), told)
            raise
        except BaseException as exc:
            told = {"code": "internal_error", "error": type(exc).__name__}
            self.trail.note(actor, action, target, "refused", dict(arguments), told)
            raise
        after = result.after
        if isinstance(after, dict):
            after = {name: value for name, value in after.items() if name != SHOWN_ONCE}
        self.trail.note(
            actor, action, target, "done" if result.done else "nothing_to_do", result.before, after
        )
        return result

    async def refused(self, actor: Actor, action: Action, target: str | None, code: str) -> None:
        """See AdminPort."""
        await trio.lowlevel.checkpoint()
        self.trail.note(actor, action, target, "refused", None, {"code": code})

    async def _do(self, action: str, target: str | None, arguments: Mapping[str, Any]) -> ActResult:
        if action == "reload":
            return await self._reload()
        if action == "limits.set":
            return await self._set_limits(arguments)
        if action == "processes.replace":
            return ActResult(self._house.replace(), None, {"processes": len(self._house.children)})
        path = _path(action, target)
        if action == "keys.rotate":
            return await self._rotate(path, arguments)
        told = self._welcomed()
        answers, refused = await self._all(lambda child: child.act(path, arguments), told, math.inf)
        if not answers:
            raise refused[0]
        self._remember(action, target, arguments)
        if action == "log_level.set":
            self._house.log.relevel(arguments["level"])
        return _together(list(answers.values()))

    async def _rotate(self, path: str, arguments: Mapping[str, Any]) -> ActResult:
        """Have one process do it; the others see it in the database."""
        for child in self._alive():
            try:
                return _result(await child.act(path, arguments))
            except NoAnswer as error:
                raise refusal("not_possible", f"nobody knows whether it was done: {error}") from None
        raise refusal("not_possible", "no process answers at the moment")

    async def _set_limits(self, arguments: Mapping[str, Any]) -> ActResult:
        """Set limits in all processes, or in none: the first one judges."""
        results: list[Row] = []
        for child in self._welcomed():
            try:
                results.append(await child.act(_PATHS["limits.set"], arguments))
            except NoAnswer as error:
                self._house.log.write("warning", "process_silent", process=child.number, reason=str(error))
        if not results:
            raise refusal("not_possible", "no process answers at the moment")
        self._live |= arguments["set"]
        self._live = {name: value for name, value in self._live.items() if value is not None}
        return _result(results[0])

    # -- the configuration

    async def _reload(self) -> ActResult:
        """Read the file once, and have one process after the other take it; all do, or none."""
        house, before = self._house, self._house.source
        after = None
        with trio.move_on_after(READ_LIMIT):
            try:
                after = await trio.to_thread.run_sync(before.again, abandon_on_cancel=True)
            except ConfigurationError as error:
                raise refusal("invalid_configuration", str(error)[:MOST_WORDS]) from None
        if after is None:
            raise refusal("not_possible", f"the file could not be read within {READ_LIMIT:g} s")
        self._write_copy(after)
        taken: list[tuple[Child, Row]] = []
        refused: Refused | None = None
        for child in self._welcomed():
            try:
                taken.append((child, await child.act(_PATHS["reload"], {})))
            except NoAnswer as error:
                house.log.write("warning", "process_silent", process=child.number, reason=str(error))
            except Refused as error:
                refused = error
                break
        if refused is not None:
            await self._take_back([each for each, _ in taken])
            raise refused
        if not taken:
            raise refusal("not_possible", "no process answers at the moment")
        house.source = after
        house.settings = in_force(house.settings, after.settings)
        house.log.relevel(house.settings.log.level)
        tokens = house.settings.admin.tokens
        house.access.admit(AdminToken(token.id, token.digest, token.role) for token in tokens)
        result = _result(taken[0][1])
        for name in result.after["live_values_dropped"]:
            self._live.pop(name, None)
        return result

    async def _take_back(self, children: Sequence[Child]) -> None:
        """Have processes take what was in force before."""
        self._write_copy(self._house.source)
        for child in children:
            try:
                await child.act(_PATHS["reload"], {})
            except (NoAnswer, Refused) as error:
                self._house.log.write(
                    "error", "reload_not_undone", process=child.number, reason=str(error)[:MOST_WORDS]
                )

    def _write_copy(self, source: Source) -> None:
        """Write what processes read: whole, or not at all, for one of them may be starting.

        Raises:
            Refused: it can not be written.
        """
        copy = self._house.copy
        new = copy.with_suffix(".new")
        try:
            new.write_text(source.text, encoding="utf-8")
            new.replace(copy)
        except OSError as error:
            raise refusal("not_possible", f"the copy for the processes can not be written: {error}") from None

    # -- what lasts

    def _remember(self, action: str, target: str | None, arguments: Mapping[str, Any]) -> None:
        if action not in _LASTING:
            return
        model = arguments.get("model")
        replaced = _LASTING[action]
        for known in list(self._orders):
            forced = known[0] == "breakers.force" and action.startswith("breakers.")
            if known[1] == target and (known[0] in replaced or (forced and model in (None, known[2]))):
                del self._orders[known]
        if action not in _UNDONE and arguments.get("state") != "closed":
            self._orders[action, target, model or ""] = dict(arguments)

    async def welcome(self, child: Child, configuration: str) -> None:
        """Have a process do again what was done before it was there; from then on it is told with the others.

        Args:
            configuration: digest of what it has read, which may have changed since, or been taken back.
        """
        async with self._turn:
            await self._tell_all(child, reload=configuration != self._house.source.digest)
            child.welcomed = True

    async def _tell_all(self, child: Child, *, reload: bool) -> None:
        orders = [
            *([("reload", None, {})] if reload else []),
            *(([("limits.set", None, {"set": self._live})]) if self._live else []),
            *((action, target, arguments) for (action, target, _), arguments in self._orders.items()),
        ]
        for action, target, arguments in orders:
            try:
                await child.act(_path(action, target), arguments)
            except (NoAnswer, Refused) as error:
                self._house.log.write(
                    "warning", "order_lost", process=child.number, action=action, target=target,
                    reason=str(error)[:200],
                )  # fmt: skip


def _path(name: str, target: str | None) -> str:
    return _PATHS[name].replace("{id}", quote(target or "", safe=""))


def _result(row: Row) -> ActResult:
    return ActResult(row["done"], row["before"], row["after"])


def _together(rows: Sequence[Row]) -> ActResult:
    """Put what all processes did together: they did the same, and counts are added."""
    return ActResult(
        any(row["done"] for row in rows),
        _merge.added([row["before"] for row in rows]),
        _merge.added([row["after"] for row in rows]),
    )
