"""Who follows a database: sees changes, keeps what it knows while it is away, and never holds up the loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from trio_gateway.database import StoreFailed
from trio_gateway.tenancy import Follower, Stored, open_roster
from trio_gateway.tenancy._roster import Roster

NOW = 1_793_491_200.0
LIMIT = 20.0  # seconds; a wait that takes longer has failed
POLL = 0.01  # seconds; a thread is waited for, which no event tells of


class Told:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, level: str, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def named(self, *names: str) -> list[str]:
        return [event for event, _ in self.events if event in names]


class Breaking:
    """A real roster that fails for as long as it is told to."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.failure: Exception | None = None
        self.hangs: threading.Event | None = None
        self.closed = False

    def newer(self, revision: int | None) -> Stored | None:
        if self.hangs is not None:
            self.hangs.wait(LIMIT)
        if self.failure is not None:
            raise self.failure
        return self._roster.newer(revision)

    def close(self) -> None:
        self._roster.close()
        self.closed = True


class Following:
    """A follower and what it took."""

    def __init__(self, roster: Breaking) -> None:
        self.roster = roster
        self.log = Told()
        self.taken: list[tuple[str, ...]] = []
        self.ignored: tuple[str, ...] = ()
        self.follower: Follower[tuple[str, ...]] = Follower(
            lambda: roster, self._build, self.taken.append, self.log
        )

    def _build(self, stored: Stored) -> tuple[tuple[str, ...], tuple[str, ...]]:
        assert threading.current_thread() is not threading.main_thread()
        return tuple(tenant.id for tenant in stored.tenants), self.ignored

    async def until(self, holds: Callable[[], object]) -> None:
        with trio.fail_after(LIMIT):
            while not holds():  # noqa: ASYNC110 - a thread's work, see POLL
                await trio.sleep(POLL)


@asynccontextmanager
async def following(
    url: str, prepare: Callable[[Following], None] = lambda following: None
) -> AsyncIterator[Following]:
    """Follow for the length of the block."""
    it = Following(Breaking(Roster(url)))
    prepare(it)
    async with trio.open_nursery() as nursery:
        await nursery.start(it.follower.run)
        yield it
        nursery.cancel_scope.cancel()
    await it.until(lambda: it.roster.closed)


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'gateway.db'}"


async def test_what_is_stored_is_known_when_it_has_started(url: str) -> None:
    roster = Roster(url)
    roster.add_tenant("acme", {}, NOW)
    async with following(url) as it:
        assert it.taken == [("acme",)]
        roster.add_tenant("other", {}, NOW)
        await it.until(lambda: len(it.taken) > 1)
        assert it.taken == [("acme",), ("acme", "other")]
        figures = it.follower.statistics()
    assert (figures["revision"], figures["stored_tenants"], figures["stored_keys"]) == (2, 2, 0)
    assert (figures["trouble"], figures["ignored"]) == (None, 0)
    assert 0 <= figures["age"] < LIMIT
    assert [fields["revision"] for event, fields in it.log.events if event == "tenants_read"] == [1, 2]
    roster.close()


async def test_what_has_not_changed_is_taken_once(file_url: str) -> None:
    async with following(file_url) as it:
        seen = it.follower._seen_at
        await it.until(lambda: it.follower._seen_at != seen)
        assert it.taken == [()]
    assert it.log.events == []  # where nothing ever was there is nothing to tell


async def test_a_database_that_is_away_leaves_what_is_known_and_counts_when_it_is_back(file_url: str) -> None:
    roster = Roster(file_url)
    roster.add_tenant("acme", {}, NOW)
    async with following(file_url) as it:
        it.roster.failure = StoreFailed("OperationalError: gone")
        await it.until(lambda: it.follower.statistics()["trouble"])
        roster.add_tenant("other", {}, NOW)
        seen = it.follower._seen_at
        assert it.taken == [("acme",)]
        it.roster.failure = None
        await it.until(lambda: len(it.taken) > 1)
        assert it.follower._seen_at != seen
        assert it.taken[-1] == ("acme", "other")
        await it.until(lambda: it.follower.statistics()["trouble"] is None)
    assert it.log.named("tenants_away", "tenants_back") == ["tenants_away", "tenants_back"]
    assert ("tenants_away", {"reason": "OperationalError: gone"}) in it.log.events
    roster.close()


async def test_it_starts_without_a_database_and_takes_it_up_when_there_is_one(tmp_path: Path) -> None:
    async with following(f"sqlite:///{tmp_path / 'later' / 'gateway.db'}") as it:
        assert it.taken == []
        figures = it.follower.statistics()
        assert "unable to open" in figures["trouble"]
        assert (figures["revision"], figures["age"]) == (None, None)
        (tmp_path / "later").mkdir()
        await it.until(lambda: it.taken)
    assert it.taken == [()]


async def test_a_database_that_never_answers_holds_up_neither_the_start_nor_the_end(file_url: str) -> None:
    answers = threading.Event()

    def hang(it: Following) -> None:
        it.roster.hangs = answers

    it = Following(Breaking(Roster(file_url)))
    hang(it)
    with trio.fail_after(LIMIT / 2):  # it hangs for longer
        async with trio.open_nursery() as nursery:
            await nursery.start(it.follower.run)
            assert it.taken == []
            nursery.cancel_scope.cancel()
    answers.set()
    await it.until(lambda: it.roster.closed)
    assert it.taken == []  # the loop may be gone when it answers


async def test_a_bug_is_told_and_does_not_end_the_following(file_url: str) -> None:
    async with following(file_url) as it:
        it.roster.failure = ZeroDivisionError("secret")
        await it.until(lambda: it.follower.statistics()["trouble"])
        assert it.follower.statistics()["trouble"] == "bug: ZeroDivisionError"
        it.roster.failure = None
        await it.until(lambda: it.follower.statistics()["trouble"] is None)


async def test_what_is_ignored_is_told_once_until_it_changes(file_url: str) -> None:
    roster = Roster(file_url)

    def ignore(it: Following) -> None:
        it.ignored = ("one", "two")

    async with following(file_url, ignore) as it:
        assert it.follower.statistics()["ignored"] == 2
        it.ignored = ("two", "three")
        roster.add_tenant("acme", {}, NOW)
        await it.until(lambda: len(it.taken) > 1)
    told = [fields["reason"] for event, fields in it.log.events if event == "entry_ignored"]
    assert told == ["one", "two", "three"]
    roster.close()


def test_without_the_driver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(OSError, match=r"needs the package psycopg: install trio-gateway\[postgres\]"):
        open_roster("postgresql+psycopg://gateway@127.0.0.1/x")
