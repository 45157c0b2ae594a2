"""The trail of what operators did: in memory, in the log, and in a database that may be away."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import trio

from trio_gateway.admin import Actor
from trio_gateway.database import RowsRefused, StoreFailed
from trio_gateway.operations import Trail, _audit, open_audit_table
from trio_gateway.operations._audit import KEPT
from trio_gateway.testing import until

ME = Actor("ops", "operator", "r1")
WALL = 1_800_000_000.25


class Lines:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def write(self, level: str, event: str, **fields: Any) -> None:
        self.lines.append((level, event, fields))

    def events(self) -> list[str]:
        return [event for _, event, _ in self.lines]


class Table:
    """A database's end that works, or fails in some way."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.rows: dict[int, dict[str, Any]] = {}
        self.opened = self.closed = 0

    def __call__(self) -> Table:
        self.opened += 1
        return self

    def write(self, boot_id: str, entries: Sequence[tuple[int, dict[str, Any]]]) -> None:
        if self.failure is not None:
            raise self.failure
        for number, entry in entries:
            self.rows.setdefault(number, entry)

    def read(self, limit: int) -> list[dict[str, Any]]:
        if self.failure is not None:
            raise self.failure
        return list(self.rows.values())[::-1][:limit]

    def close(self) -> None:
        self.closed += 1


async def test_an_act_is_in_memory_and_in_the_log_at_once() -> None:
    log = Lines()
    trail = Trail("boot", log, wall=lambda: WALL)
    trail.note(ME, "tenants.freeze", "acme", "done", {"frozen": False}, {"frozen": True})
    trail.note(ME, "reload", None, "refused")
    assert len(trail) == 2
    newest, first = await trail.read(10)
    assert first == {
        "at": "2027-01-15T08:00:00.250+00:00",
        "actor": "ops",
        "role": "operator",
        "action": "tenants.freeze",
        "target": "acme",
        "before": {"frozen": False},
        "after": {"frozen": True},
        "outcome": "done",
        "request_id": "r1",
    }
    assert (newest["action"], newest["target"]) == ("reload", None)
    assert [entry["action"] for entry in await trail.read(1)] == ["reload"]
    level, event, fields = log.lines[0]
    assert (level, event) == ("info", "operator_action")
    assert fields == {name: value for name, value in first.items() if name != "at"}


async def test_memory_is_bounded() -> None:
    trail = Trail("boot", Lines(), Table())
    for number in range(KEPT + 5):
        trail.note(ME, "requests.cancel", str(number), "done")
    assert len(trail) == len(trail._unwritten) == KEPT


async def test_the_database_gets_what_is_new_and_keeps_no_connection() -> None:
    table, log = Table(), Lines()
    trail = Trail("boot", log, table)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trail.run)
        for number in range(3):
            trail.note(ME, "requests.cancel", str(number), "done")
            await until(lambda: len(table.rows) == number + 1)  # noqa: B023
        assert [entry["target"] for entry in await trail.read(2)] == ["2", "1"]
        nursery.cancel_scope.cancel()
    assert table.opened == table.closed
    assert set(log.events()) == {"operator_action"}


@pytest.mark.parametrize("failure", [StoreFailed("away"), OSError("no driver")])
async def test_while_the_database_is_away_nothing_is_lost_and_it_is_told_once(
    failure: Exception,
) -> None:
    table, log = Table(), Lines()
    table.failure = failure
    trail = Trail("boot", log, table)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trail.run)
        for number in range(2):
            trail.note(ME, "requests.cancel", str(number), "done")
            await until(lambda: "audit_away" in log.events())
        assert [entry["target"] for entry in await trail.read(9)] == ["1", "0"]  # from memory
        assert log.events().count("audit_away") == 1
        table.failure = None
        await until(lambda: len(table.rows) == 2)
        await until(lambda: "audit_back" in log.events())
        table.failure = failure
        trail.note(ME, "reload", None, "done")
        await trail.finish(1)
        assert log.events().count("audit_away") == 2
        nursery.cancel_scope.cancel()


async def test_a_database_that_never_answers_keeps_one_thread_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_audit, "READ_LIMIT", 0.02)
    answers = threading.Event()

    class Silent(Table):
        def read(self, limit: int) -> list[dict[str, Any]]:
            answers.wait()
            return super().read(limit)

    table = Silent()
    trail = Trail("boot", Lines(), table)
    others = trio.to_thread.current_default_thread_limiter()
    try:
        for _ in range(5):
            await trail.read(9)
        assert (table.opened, others.borrowed_tokens) == (1, 0)
        trail.note(ME, "reload", None, "done")
        assert [entry["action"] for entry in await trail.read(9)] == ["reload"]  # from memory
    finally:
        answers.set()
    await trail.finish(10)
    assert [entry["action"] for entry in await trail.read(9)] == ["reload"]


async def test_what_a_database_never_takes_is_told_and_does_not_stop_the_rest() -> None:
    table, log = Table(), Lines()
    table.failure = RowsRefused("a zero byte")
    trail = Trail("boot", log, table)
    trail.note(ME, "requests.cancel", "\0", "refused")
    await trail.finish(1)
    assert log.events() == ["operator_action", "audit_rejected"]
    table.failure = None
    trail.note(ME, "reload", None, "done")
    await trail.finish(1)
    assert [entry["action"] for entry in table.rows.values()] == ["reload"]


def test_entries_are_kept_in_a_table_once_and_read_newest_first(url: str) -> None:
    table, again = open_audit_table(url), open_audit_table(url)
    trail = Trail("boot", Lines(), lambda: table, wall=lambda: WALL)
    for number in range(3):
        trail.note(ME, "limits.set", None, "done", {"a": number}, {"a": [None, "ä"]})
    entries = list(trail._unwritten)
    table.write("boot", entries[:2])
    again.write("boot", entries)
    again.write("other", entries[:1])
    read = table.read(10)
    assert len(read) == 4
    assert [entry["before"]["a"] for entry in read if entry["before"]["a"]] == [2, 1]
    assert entries[1][1] in read
    assert len(again.read(1)) == 1
    table.close()
    again.close()
