"""The durable ledger: every accepted exchange leaves exactly one record, whatever happens to this process.

The loop writes two lines an exchange into the journal and waits for nothing else. Two
threads work behind it: one has the disk confirm the journal now and then, the other
replays it into the database. Only bytes of the journal grow while the database is away.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..contract import InternalRequest, Outcome
from ..database import RowsRefused, StoreFailed, open_with
from ..errors import Problem, Refused
from ._journal import Journal
from ._record import Record
from ._replay import LogPort, Replay
from ._rows import (
    StorePort,
    UsageRow,
    accepted_line,
    read_line,
    record_json,
    release_line,
    rows_of,
    settled_line,
)

if TYPE_CHECKING:
    from ._store import Store

REPLAY_INTERVAL: Final = 0.5  # seconds
LONGEST_PAUSE: Final = 5.0  # seconds between two tries at a database that is away
CLOSE_LIMIT: Final = 2.0  # seconds for each thread; what is not replayed by then, the next start replays
MOST_CUT: Final = 4096  # exchanges, of which an agent's last word may still come
_NOTHING: Final[list[bytes]] = []
ROOM_AGAIN: Final = 5.0  # seconds, told to whom is turned away for want of room in the journal


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """Where records go.

    Attributes:
        url: of the database, as SQLAlchemy writes it.
        journal: a folder that no other process uses.
        journal_bytes: of the journal from which on nothing new is accepted.
        sync_interval: seconds; the most that the loss of power can take.
        retention_days: how long settled exchanges are kept in the database; 0: for ever.
        gateway_id: name of this gateway, the same after each start; None: the journal keeps one.
    """

    url: str
    journal: Path
    journal_bytes: int
    sync_interval: float
    retention_days: int
    gateway_id: str | None


class Ledger:
    """See the module's docstring. All methods are called by the loop, and none of them waits but the last.

    Args:
        settings: where records go.
        boot_id: of this process.
        log: told of what operators should know.
    """

    def __init__(self, settings: LedgerSettings, boot_id: str, log: LogPort) -> None:
        self._settings = settings
        self._boot_id = boot_id
        self._log = log
        self._journal = Journal(settings.journal, settings.journal_bytes, settings.gateway_id)
        self._replay: Replay | None = None
        self._unwritten: Final = deque[bytes]()
        # Accepted and not settled, with what agents already said of them: it completes a settled row.
        self._open: dict[str, list[bytes]] = {}
        # Settled before their end, so that an agent's last word may say more than was known.
        self._cut: dict[str, None] = {}
        self._refused = 0
        self._trouble: str | None = None
        self._alarm: str | None = None
        self._stop = threading.Event()
        self._abandoned = False
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Take the journal and start the threads. The database need not be there.

        Raises:
            OSError: the journal can not be had, or the driver of the database is not installed.
        """
        store = open_store(self._settings.url)
        self._journal.open()
        self._replay = Replay(self._journal, self._boot_id, self._settings.retention_days, self._log)
        self._threads = [
            threading.Thread(target=self._replay_on, args=(store,), name="ledger-replay", daemon=True),
            threading.Thread(target=self._sync_on, name="ledger-sync", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Replay and sync what is left, within `CLOSE_LIMIT` each, and let go of the journal. Idempotent."""
        self._stop.set()
        for thread in self._threads:
            thread.join(CLOSE_LIMIT)
        self._abandoned = True
        self._threads.clear()
        self._journal.close()

    # -- what the loop says

    def accept(self, request: InternalRequest, arrived_at: float) -> None:
        """Note that an exchange is being accepted; after this, it must be settled.

        Args:
            arrived_at: by the wall clock.

        Raises:
            Refused: that can not be noted, so it must not be accepted.
        """
        journal = self._journal
        if journal.has_room and journal.append(
            accepted_line(request, journal.gateway_id, self._boot_id, arrived_at)
        ):
            self._open[request.exchange_id] = _NOTHING
            return
        self._refused += 1
        message = "requests can not be recorded at the moment"
        wait = ROOM_AGAIN * random.uniform(1.0, 1.5)
        raise Refused(Problem.of("records_unavailable", message, retry_after=wait))

    def settle(self, record: Record, written: bytes | None = None) -> None:
        """Note how an exchange ended. Never raises; what the journal does not take goes to the database.

        Args:
            written: the record as `record_json` writes it, if somebody has done that.
        """
        line = settled_line(record_json(record) if written is None else written, self._journal.gateway_id)
        if not self._journal.append(line):
            # No more than run when the disk fails: without the journal nothing is accepted.
            self._unwritten.append(line)
        early = self._open.pop(record.exchange_id, _NOTHING)
        if record.outcome == Outcome.COMPLETED:
            return
        for line in early:
            self._journal.append(line)
        self._cut[record.exchange_id] = None
        if len(self._cut) > MOST_CUT:
            del self._cut[next(iter(self._cut))]

    def release(self, attempt_id: str, released_at: float, generated: int | None) -> None:
        """Note that an engine has let go of an attempt, if more may be known by that. Never raises.

        Args:
            released_at: by the wall clock.
            generated: tokens that the engine had made, if it said so.
        """
        exchange_id = attempt_id.rpartition("-")[0]
        if exchange_id in self._open:
            line = release_line(attempt_id, released_at, generated)
            self._open[exchange_id] = [*self._open[exchange_id], line]
        elif exchange_id in self._cut:
            self._journal.append(release_line(attempt_id, released_at, generated))

    def statistics(self) -> dict[str, Any]:
        """Answer the figures of this moment."""
        journal, replay = self._journal, self._replay
        return {
            "gateway_id": journal.gateway_id if journal.ids else None,
            "journal_bytes": journal.size,
            "journal_limit": journal.limit,
            "segments": len(journal.segments),
            "behind_bytes": max(journal.size - (replay.ahead if replay else 0), 0),
            "replayed": replay.replayed if replay else 0,
            "damaged": replay.damaged if replay else 0,
            "rejected": replay.rejected if replay else 0,
            "crashed": replay.crashed if replay else None,
            "refused": self._refused,
            "unwritten": len(self._unwritten),
            "trouble": self._trouble,
        }

    # -- the threads

    def _replay_on(self, store: StorePort) -> None:
        pause = REPLAY_INTERVAL
        while not self._abandoned:
            last = self._stop.is_set()
            try:
                more = self._round(store)
                pause = REPLAY_INTERVAL
                self._be_well()
            except Exception as error:  # this thread is the only one that empties the journal
                more = False
                self._be_ill(error)
                pause = min(2 * pause, LONGEST_PAUSE)
            self._watch_size()
            if not more:
                if last:
                    break
                self._stop.wait(pause)
        store.close()

    def _round(self, store: StorePort) -> bool:
        assert self._replay is not None
        while self._unwritten:
            try:
                store.write(*rows_of([read_line(self._unwritten[0])]))
            except RowsRefused as error:
                self._log.write("error", "record_rejected", reason=str(error))
            self._unwritten.popleft()
        return self._replay.round(store, time.time())

    def _be_well(self) -> None:
        if self._trouble is not None:
            self._trouble = None
            self._log.write("info", "database_back")

    def _be_ill(self, error: Exception) -> None:
        if self._trouble is None:
            expected = isinstance(error, StoreFailed | OSError)
            reason = str(error) if expected else f"bug: {type(error).__name__}"
            self._log.write("warning", "database_away", reason=reason)
        self._trouble = str(error)[:200] or type(error).__name__

    def _watch_size(self) -> None:
        """Raise an alarm once while the journal is too large, or can not be written."""
        journal = self._journal
        if journal.failure is not None:
            alarm = "journal_unwritable"
        elif not journal.has_room:
            alarm = "journal_full"
        elif journal.size >= journal.limit // 2:
            alarm = "journal_growing"
        elif journal.size < journal.limit // 4 or self._alarm == "journal_unwritable":
            self._alarm = None
            return
        else:
            return
        if alarm == self._alarm or (alarm == "journal_growing" and self._alarm == "journal_full"):
            return  # told, or it shrinks
        self._alarm = alarm
        if alarm == "journal_unwritable":
            self._log.write("error", "journal_unwritable", reason=journal.failure)
        elif alarm == "journal_full":
            self._log.write("error", "journal_full", bytes=journal.size, limit=journal.limit)
        else:
            self._log.write("warning", "journal_growing", bytes=journal.size, limit=journal.limit)

    def _sync_on(self) -> None:
        complained = False
        last = False
        while not (last or self._abandoned):
            last = self._stop.wait(self._settings.sync_interval)
            try:
                self._journal.sync()
                complained = False
            except OSError as error:
                if not complained:
                    self._log.write("error", "journal_not_synced", reason=str(error.strerror))
                complained = True


def open_store(url: str) -> Store:
    """Make the database's end of the ledger, without connecting.

    Raises:
        OSError: its driver is not installed.
    """
    from ._store import Store  # see `trio_gateway.database` on why here

    return open_with(lambda: Store(url))


def read_usage(
    url: str, by: Sequence[str], since: float | None = None, until: float | None = None
) -> list[UsageRow]:
    """Sum up what exchanges used, sorted by group.

    Args:
        url: of the database.
        by: some of `DIMENSIONS`.
        since: seconds since the epoch; only exchanges that arrived then or later.
        until: only those that arrived before.

    Raises:
        StoreFailed: the database is away.
        OSError: its driver is not installed.
    """
    store = open_store(url)
    try:
        return store.usage(by, since, until)
    finally:
        store.close()
