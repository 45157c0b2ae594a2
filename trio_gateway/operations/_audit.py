"""The trail of what operators did: in memory at once, in the log, and in the database as soon as it takes it.

No action waits for a database: at night it may be just what is down.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

import trio

from ..admin import Action, Actor
from ..database import RowsRefused, StoreFailed, open_with
from ..ledger import LogPort

if TYPE_CHECKING:
    from ._audit_table import AuditTable

KEPT: Final = 1000  # entries in memory
LONGEST_PAUSE: Final = 5.0  # seconds between two tries at a database that is away
READ_LIMIT: Final = 5.0  # seconds for the database to answer

T = TypeVar("T")
Entry = dict[str, Any]
Outcome = Literal["done", "nothing_to_do", "refused"]


class TablePort(Protocol):
    """Where entries are kept. All of it blocks, and raises `StoreFailed`."""

    def write(self, boot_id: str, entries: Sequence[tuple[int, Entry]]) -> None:
        """Write entries with their numbers; those that are there already stay as they are."""

    def read(self, limit: int) -> list[Entry]:
        """Answer the latest entries, newest first."""

    def close(self) -> None:
        """Let go of the connection."""


class Trail:
    """See the module's docstring. `run` is one task of the gateway.

    Args:
        boot_id: of this process.
        table: makes the database's end, without connecting; None: there is no database.
        wall: seconds since the epoch.
    """

    def __init__(
        self,
        boot_id: str,
        log: LogPort,
        table: Callable[[], TablePort] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._boot_id = boot_id
        self._log = log
        self._make = table
        self._wall = wall
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._unwritten: deque[tuple[int, Entry]] = deque(maxlen=KEPT)
        self._numbers: Iterator[int] = itertools.count(1)
        # One thread at a time, even one that was given up on: a database that never answers gets no others.
        self._turn = trio.CapacityLimiter(1)
        self._news = trio.Event()
        self._away = False

    def note(
        self,
        actor: Actor,
        action: Action,
        target: str | None,
        outcome: Outcome,
        before: Any = None,
        after: Any = None,
    ) -> None:
        """Note what was done; never waits. Nothing of it may be secret."""
        at = datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds")
        entry = {
            "at": at,
            "actor": actor.id,
            "role": actor.role,
            "action": action,
            "target": target,
            "before": before,
            "after": after,
            "outcome": outcome,
            "request_id": actor.request_id,
        }
        self._entries.append(entry)
        if self._make is not None:
            self._unwritten.append((next(self._numbers), entry))
            self._news.set()
        self._log.write(
            "info",
            "operator_action",
            actor=actor.id,
            role=actor.role,
            action=action,
            target=target,
            before=before,
            after=after,
            outcome=outcome,
            request_id=actor.request_id,
        )

    def __len__(self) -> int:
        """Entries in memory."""
        return len(self._entries)

    async def read(self, limit: int) -> list[Entry]:
        """Answer the latest entries, newest first: of all gateways with this database, if it answers."""
        if self._make is not None:
            with trio.move_on_after(READ_LIMIT):
                try:
                    await self._flush()
                    return await self._in_thread(partial(_read, limit))
                except (OSError, StoreFailed) as error:
                    self._complain(error)
        else:
            await trio.lowlevel.checkpoint()
        return list(itertools.islice(reversed(self._entries), limit))

    async def run(self) -> None:
        """Write to the database whatever is new, for ever."""
        pause = LONGEST_PAUSE / 8
        while True:
            if not self._unwritten:
                self._news = trio.Event()
                await self._news.wait()
            try:
                await self._flush()
                pause = LONGEST_PAUSE / 8
            except (OSError, StoreFailed) as error:
                self._complain(error)
                pause = min(pause * 2, LONGEST_PAUSE)
                await trio.sleep(pause)

    async def finish(self, limit: float) -> None:
        """Write what is not written yet, within a limit in seconds."""
        with trio.move_on_after(limit):
            try:
                await self._flush()
            except (OSError, StoreFailed) as error:
                self._complain(error)

    async def _flush(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._unwritten:
            batch = list(self._unwritten)
            try:
                await self._in_thread(partial(_write, self._boot_id, batch))
            except RowsRefused as error:
                self._log.write("error", "audit_rejected", reason=str(error))
            while self._unwritten and self._unwritten[0][0] <= batch[-1][0]:
                self._unwritten.popleft()
            if self._away:
                self._away = False
                self._log.write("info", "audit_back")

    async def _in_thread(self, ask: Callable[[TablePort], T]) -> T:
        make = self._make
        assert make is not None

        def ask_and_close() -> T:
            table = make()  # acts are rare: no connection is kept between them
            try:
                return ask(table)
            finally:
                table.close()

        return await trio.to_thread.run_sync(ask_and_close, abandon_on_cancel=True, limiter=self._turn)

    def _complain(self, error: Exception) -> None:
        if not self._away:
            self._away = True
            self._log.write("warning", "audit_away", reason=str(error)[:200])


def _write(boot_id: str, batch: list[tuple[int, Entry]], table: TablePort) -> None:
    table.write(boot_id, batch)


def _read(limit: int, table: TablePort) -> list[Entry]:
    return table.read(limit)


def open_audit_table(url: str) -> AuditTable:
    """Make the database's end of the trail, without connecting.

    Raises:
        OSError: its driver is not installed.
    """
    from ._audit_table import AuditTable  # see `trio_gateway.database` on why here

    return open_with(lambda: AuditTable(url))
