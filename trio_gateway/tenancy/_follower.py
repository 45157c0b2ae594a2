"""Follows the tenants and keys of a database, in a thread of its own; the loop never waits for it.

What is known last is kept while the database is away. What was changed meanwhile
counts as soon as it is back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import trio

from ..database import StoreFailed, open_with
from ._stored import LogPort, RosterPort, Stored

if TYPE_CHECKING:
    from ._roster import Roster

LOOK_INTERVAL: Final = 0.4  # seconds; with what reading takes, a change counts within one
LONGEST_PAUSE: Final = 1.0  # seconds between two tries at a database that is away
FIRST_LOOK: Final = 2.0  # seconds of the start that are spent on waiting for it
CLOSE_LIMIT: Final = 0.5  # seconds for the thread to end; it may hang in a network

T = TypeVar("T")


class Follower(Generic[T]):
    """See the module's docstring.

    Args:
        open_roster: makes the database's end, without connecting.
        build: makes of what is stored what the loop needs; in the thread, since there may be much of it.
        take: puts it in the place of what was; on the loop, and as short as it can be.
        log: told of what operators should know.
    """

    def __init__(
        self,
        open_roster: Callable[[], RosterPort],
        build: Callable[[Stored], tuple[T, tuple[str, ...]]],
        take: Callable[[T], None],
        log: LogPort,
    ) -> None:
        self._open_roster = open_roster
        self._build = build
        self._take = take
        self._log = log
        self._stop = threading.Event()
        self._looked = trio.Event()
        self._news: trio.Event = trio.Event()
        self._built: T | None = None
        self._stored: Stored | None = None
        self._ignored: tuple[str, ...] = ()
        self._again = False
        self._seen_at: float | None = None
        self._trouble: str | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow until cancelled. Started after the first look, or `FIRST_LOOK` seconds of waiting for it.

        Raises:
            OSError: the driver of the database is not installed.
        """
        roster = self._open_roster()
        token = trio.lowlevel.current_trio_token()
        thread = threading.Thread(target=self._follow, args=(roster, token), name="tenants", daemon=True)
        thread.start()
        try:
            with trio.move_on_after(FIRST_LOOK):
                await self._looked.wait()
            self._take_news()
            task_status.started()
            while True:
                await self._news.wait()
                self._take_news()
        finally:
            self._stop.set()
            thread.join(CLOSE_LIMIT)

    @property
    def stored(self) -> Stored | None:
        """What was read last; None: nothing was yet."""
        return self._stored

    def look_again(self) -> None:
        """Build once more from what is stored, changed or not: what is built with has changed."""
        self._again = True

    def statistics(self) -> dict[str, Any]:
        """Answer the figures of this moment."""
        stored, seen_at = self._stored, self._seen_at
        return {
            "revision": None if stored is None else stored.revision,
            "stored_tenants": 0 if stored is None else len(stored.tenants),
            "stored_keys": 0 if stored is None else len(stored.keys),
            "ignored": len(self._ignored),
            "age": None if seen_at is None else round(time.monotonic() - seen_at, 3),
            "trouble": self._trouble,
        }

    # -- the loop

    def _take_news(self) -> None:
        self._news = trio.Event()
        built, self._built = self._built, None
        if built is not None:
            self._take(built)

    def _arrived(self, built: T | None) -> None:
        if built is not None:
            self._built = built
            self._news.set()
        self._looked.set()

    # -- the thread

    def _follow(self, roster: RosterPort, token: trio.lowlevel.TrioToken) -> None:
        pause = LOOK_INTERVAL
        while not self._stop.is_set():
            built = None
            try:
                built = self._look(roster)
                pause = LOOK_INTERVAL
                self._be_well()
            except Exception as error:  # this thread is the only one that looks
                pause = min(2 * pause, LONGEST_PAUSE)
                self._be_ill(error)
            if built is not None or not self._looked.is_set():
                with contextlib.suppress(trio.RunFinishedError):
                    token.run_sync_soon(self._arrived, built)
            self._stop.wait(pause)
        roster.close()

    def _look(self, roster: RosterPort) -> T | None:
        again = self._again
        stored = roster.newer(None if again or self._stored is None else self._stored.revision)
        if again:
            self._again = False
        self._seen_at = time.monotonic()
        if stored is None:
            return None
        built, ignored = self._build(stored)
        for reason in ignored:
            if reason not in self._ignored:
                self._log.write("warning", "entry_ignored", reason=reason)
        self._stored, self._ignored = stored, ignored
        if stored.revision:  # else the database is there for records alone
            self._log.write(
                "info",
                "tenants_read",
                revision=stored.revision,
                tenants=len(stored.tenants),
                keys=len(stored.keys),
            )
        return built

    def _be_well(self) -> None:
        if self._trouble is not None:
            self._trouble = None
            self._log.write("info", "tenants_back")

    def _be_ill(self, error: Exception) -> None:
        expected = isinstance(error, StoreFailed)
        reason = str(error) if expected else f"bug: {type(error).__name__}"
        if self._trouble is None:
            self._log.write("warning", "tenants_away", reason=reason)
        self._trouble = reason[:200]


def open_roster(url: str) -> Roster:
    """Make the database's end of the tenants, without connecting.

    Raises:
        OSError: its driver is not installed.
    """
    from ._roster import Roster  # see `trio_gateway.database` on why here

    return open_with(lambda: Roster(url))
