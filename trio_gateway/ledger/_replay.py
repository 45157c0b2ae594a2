"""Replays the journal into the database: what one round does. Blocks; one thread calls it, again and again.

Nothing here remembers across processes how far it came. A new process begins at the
oldest segment that is left, since replaying twice is harmless.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from ..database import RowsRefused
from ..units import HOURS, KiB
from ._journal import Journal, Segment
from ._lines import scan
from ._rows import StorePort, read_line, rows_of

PIECE: Final = 512 * KiB  # of a segment that is read at a time; about 500 records
FORGET_EVERY: Final = 1 * HOURS
FORGET_AT_ONCE: Final = 5000  # rows in one transaction
DAY: Final = 24 * HOURS


class LogPort(Protocol):
    """Takes what operators should know, from any thread; never waits."""

    def write(self, level: str, event: str, **fields: Any) -> None:
        """Take a line."""


class Replay:
    """The state of one process's replaying.

    Args:
        journal: opened.
        boot_id: of this process.
        retention_days: how long settled exchanges stay in the database; 0: for ever.
        log: told of what was lost or closed.

    Attributes:
        replayed: lines that are in the database now.
        damaged: runs of bytes in the journal that could not be read.
        rejected: lines that the database refused; they are kept aside.
        crashed: exchanges of earlier processes that were closed; None: not looked yet.
        ahead: bytes of the oldest segment that are replayed.
    """

    def __init__(self, journal: Journal, boot_id: str, retention_days: int, log: LogPort) -> None:
        self._journal = journal
        self._boot_id = boot_id
        self._retention = retention_days * DAY
        self._log = log
        # Segments of earlier processes, the last of which may have died while it wrote.
        self._inherited = len(journal.segments) - 1
        self._forget_at = 0.0
        self.replayed = 0
        self.damaged = 0
        self.rejected = 0
        self.crashed: int | None = None
        self.ahead = 0

    def round(self, store: StorePort, now: float) -> bool:
        """Do the next piece of work; answers whether there may be more at once.

        Args:
            now: seconds since the epoch.

        Raises:
            StoreFailed: nothing is lost, the same piece comes again.
            OSError: the journal can not be read; so does it.
        """
        if self._replay_piece(store):
            return True
        if self.crashed is None and self._inherited == 0:
            # Only now, when all that they had written is there.
            crashed = store.close_crashed(self._journal.ids, self._boot_id, now)
            self.crashed = crashed
            if crashed:
                self._log.write("warning", "exchanges_crashed", count=crashed)
        return self._forget_old(store, now)

    def _replay_piece(self, store: StorePort) -> bool:
        segment = self._journal.segments[0]
        whole = segment.whole  # asked first: what is whole now has its last byte
        data = self._read(segment)
        found = scan(data, final=whole and len(data) < PIECE)
        if found.damaged:
            self.damaged += found.damaged
            self._log.write("error", "journal_damaged", segment=segment.path.name, places=found.damaged)
        self._write(store, found.payloads)
        self.ahead += found.end
        if len(data) == PIECE and not found.end:
            # One line longer than any that is written: only damage looks so.
            self.ahead += PIECE
            self.damaged += 1
        if whole and len(data) < PIECE:
            self._journal.drop_first()
            self._inherited = max(self._inherited - 1, 0)
            self.ahead = 0
            return True
        return len(data) == PIECE

    def _read(self, segment: Segment) -> bytes:
        try:
            with segment.path.open("rb") as file:
                file.seek(self.ahead)
                return file.read(PIECE)
        except FileNotFoundError:  # somebody deleted it
            if not segment.missing:
                segment.missing = True  # what is appended to it now would be lost, too
                self.damaged += 1
                self._log.write("error", "journal_damaged", segment=segment.path.name, places=1)
            return b""

    def _write(self, store: StorePort, payloads: list[bytes]) -> None:
        """Write a piece in one transaction or, if some of it can not be written, each line in its own."""
        try:
            self._write_all(store, payloads)
        except (RowsRefused, ValueError):
            for payload in payloads:
                try:
                    self._write_all(store, [payload])
                except (RowsRefused, ValueError) as error:
                    self._journal.keep_aside(payload)
                    self.rejected += 1
                    self._log.write("error", "record_rejected", reason=str(error))

    def _write_all(self, store: StorePort, payloads: list[bytes]) -> None:
        if payloads:
            store.write(*rows_of(map(read_line, payloads)))
            self.replayed += len(payloads)

    def _forget_old(self, store: StorePort, now: float) -> bool:
        if not self._retention or now < self._forget_at:
            return False
        if store.forget(now - self._retention, FORGET_AT_ONCE) >= FORGET_AT_ONCE:
            return True
        self._forget_at = now + FORGET_EVERY
        return False
