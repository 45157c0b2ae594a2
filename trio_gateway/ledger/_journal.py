"""The journal: an append-only file in segments, in a folder that one process owns at a time.

Every record is in the kernel's hands, by one ``write``, before anything else happens to
its exchange: ``kill -9`` loses nothing. What the loss of power can take is bounded by the
interval in which a thread of its own calls `sync`.

A segment is only ever appended to, and deleted once all of it is in the database. Each
process begins a new one, so that a line that its predecessor left half-written stays the last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..units import KiB, MiB
from ._lines import frame

LARGEST_SEGMENT: Final = 16 * MiB
_NAME: Final = re.compile(r"([0-9]{10})\.journal")
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@dataclass(slots=True)
class Segment:
    """One file of the journal.

    Attributes:
        size: bytes in it, as far as was written.
        whole: nothing is appended to it any more.
        missing: somebody deleted it, as the replaying thread saw.
    """

    path: Path
    size: int
    whole: bool
    missing: bool = False


class Journal:
    """Writes lines, from one thread, and keeps account of the segments.

    Args:
        folder: made if it is not there, readable by its owner only.
        limit: bytes of all segments from which on `has_room` says no.
        gateway_id: the name that was configured; without one, that which the folder has or gets.

    Attributes:
        segments: oldest first; the last one is written to. Only the replaying thread takes them away.
        ids: all names that this gateway has had; the last one is its name now.
        failure: why the last write failed; None: it did not.
    """

    def __init__(self, folder: Path, limit: int, gateway_id: str | None = None) -> None:
        self._folder = folder
        self._limit = limit
        self._segment_limit = min(LARGEST_SEGMENT, max(limit // 8, 4 * KiB))
        self._configured = gateway_id
        self.segments: Final = deque[Segment]()
        self.ids: list[str] = []
        self.failure: str | None = None
        self._lock: int | None = None
        self._file: int | None = None
        self._retired: Final = deque[int]()
        self._number = 0
        self._torn = False
        self._unsynced = False
        self._new_name = False
        # Each is changed by one thread only, so that their difference needs no lock.
        self._written = 0
        self._dropped = 0

    # -- opening and closing

    def open(self) -> None:
        """Take the folder and begin a segment.

        Raises:
            OSError: it can not be written, or another process has it.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise OSError(f"the journal {self._folder} is in use by another process") from None
        try:
            self.ids = self._know_oneself()
            self._find_segments()
            self._begin_segment()
        except OSError:
            self.close()
            raise

    def _know_oneself(self) -> list[str]:
        """Read the names that this gateway has had, and add its present one."""
        file = self._folder / "gateway_id"
        ids = file.read_text("utf-8").split() if file.exists() else []
        name = self._configured or (ids[-1] if ids else secrets.token_hex(8))
        if ids[-1:] != [name]:
            ids = [*(old for old in ids if old != name), name]
            new = file.with_suffix(".new")
            new.write_text("".join(f"{each}\n" for each in ids), "utf-8")
            new.replace(file)
        return ids

    def _find_segments(self) -> None:
        self.segments.clear()
        for path in sorted(self._folder.iterdir()):
            if match := _NAME.fullmatch(path.name):
                self._number = int(match[1])
                self.segments.append(Segment(path, path.stat().st_size, whole=True))
        self._written, self._dropped = sum(segment.size for segment in self.segments), 0

    def close(self) -> None:
        """Let go of the folder; what was written stays. Idempotent."""
        for descriptor in (*self._retired, self._file, self._lock):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._retired.clear()
        self._file = self._lock = None

    # -- writing

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return self._written - self._dropped

    @property
    def has_room(self) -> bool:
        """Whether work that makes further lines may begin."""
        return self.size < self._limit

    @property
    def limit(self) -> int:
        """Bytes from which on there is no room."""
        return self._limit

    @property
    def gateway_id(self) -> str:
        """The name of this gateway."""
        return self.ids[-1]

    def append(self, payload: bytes) -> bool:
        """Write one line; answers whether it is written. Never raises."""
        segment = self.segments[-1]
        try:
            if segment.size >= self._segment_limit or segment.missing:
                segment = self._begin_segment()
            assert self._file is not None
            line = frame(payload)
            if self._torn:
                line = b"\n" + line
            written = os.write(self._file, line)
        except OSError as error:
            self.failure = error.strerror or type(error).__name__
            return False
        segment.size += written
        self._written += written
        self._unsynced = True
        self._torn = written < len(line)
        self.failure = "the disk is full" if self._torn else None
        return written >= len(line) - 1  # the line feed is made up for

    def _begin_segment(self) -> Segment:
        self._number += 1
        segment = Segment(self._folder / f"{self._number:010}.journal", 0, whole=False)
        descriptor = os.open(segment.path, _FLAGS, 0o600)
        if self._file is not None:
            self._retired.append(self._file)
        if self.segments:
            self.segments[-1].whole = True
        self._file = descriptor
        self._torn = False
        self._new_name = True
        self.segments.append(segment)
        return segment

    # -- for the threads beside it

    def sync(self) -> None:
        """Wait until the disk has what was written before this was called. Only one thread calls this.

        Raises:
            OSError: the disk says no.
        """
        if self._new_name:
            self._new_name = False
            self._sync_folder()
        while self._retired:
            descriptor = self._retired[0]
            os.fdatasync(descriptor)
            self._retired.popleft()
            os.close(descriptor)
        if self._unsynced and self._file is not None:
            self._unsynced = False  # before: what is written meanwhile may miss it
            try:
                os.fdatasync(self._file)
            except OSError:
                self._unsynced = True
                raise

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def drop_first(self) -> None:
        """Delete the oldest segment, which is not the one that is written to.

        Raises:
            OSError: it can not be deleted.
        """
        assert self.segments[0].whole
        self.segments[0].path.unlink(missing_ok=True)
        self._dropped += self.segments.popleft().size

    def keep_aside(self, payload: bytes) -> None:
        """Keep a line that the database will never take, for people to look at.

        Raises:
            OSError: it can not be written.
        """
        with (self._folder / "rejected.jsonl").open("ab") as file:
            file.write(payload + b"\n")
