"""What happened to one exchange, and when: causes, sizes and times, never any content."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import trio

from ..ledger import Record

FIRST: Final = 16  # steps that are kept for ever: how it came, and how its first attempt began
LAST: Final = 48  # of the others, those that are kept
FIRST_ROWS: Final = 32  # the same of a track, whose rows are many more
LAST_ROWS: Final = 64


class Step(NamedTuple):
    """One thing that happened.

    Attributes:
        at: Trio clock, seconds.
        detail: numbers and words of bounded sets.
    """

    at: float
    what: str
    detail: dict[str, Any]


class Sums(NamedTuple):
    """What is left of rows that are not kept.

    Attributes:
        rows: how many they were.
        since, until: when the first and the last of them came, Trio clock seconds.
        sums: of their other columns.
    """

    rows: int
    since: float
    until: float
    sums: tuple[int, ...]


class Counts(NamedTuple):
    """What an attempt's stream had when it was over.

    Attributes:
        events: for the client; `content` of them carry output, and the last `silent` do not.
        usage: tokens of the prompt and of the answer, as the engine counted them; None: it did not.
    """

    events: int
    content: int
    silent: int
    usage: tuple[int | None, int | None]


class Track:
    """When bytes moved one way, and how many: a row for each move, as numbers side by side.

    The first rows and the last are kept, of those between them their sums. Adding one is a call into C,
    and now and then a short copy; a track takes 5 KiB at most.

    Args:
        columns: their names; the first is the time, Trio clock seconds.

    Attributes:
        sums: of the rows that are not kept; None: all are.
        counts: see there; None: nobody counted.
    """

    __slots__ = ("_full", "_rows", "columns", "counts", "sums")

    def __init__(self, *columns: str) -> None:
        self.columns: Final = columns
        self.sums: Sums | None = None
        self.counts: Counts | None = None
        self._rows = array("d")
        self._full = (FIRST_ROWS + 2 * LAST_ROWS) * len(columns)

    def add(self, *row: float) -> None:
        """Add a row, one figure for each column."""
        rows = self._rows
        rows.extend(row)
        if len(rows) > self._full:
            self._shorten()

    def _shorten(self) -> None:
        width, rows = len(self.columns), self._rows
        start, end = FIRST_ROWS * width, len(rows) - LAST_ROWS * width
        gone = rows[start:end]
        del rows[start:end]
        added = [int(sum(gone[column::width])) for column in range(1, width)]
        known = self.sums or Sums(0, gone[0], 0.0, (0,) * (width - 1))
        sums = tuple(old + new for old, new in zip(known.sums, added, strict=True))
        self.sums = Sums(known.rows + len(gone) // width, known.since, gone[-width], sums)

    def total(self, column: str) -> int:
        """Sum up a column, also of the rows that are not kept."""
        number = self.columns.index(column)
        gone = 0 if self.sums is None else self.sums.sums[number - 1]
        return gone + int(sum(self._rows[number :: len(self.columns)]))

    def split(self) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """Answer the rows in front of those that are not kept, and the rows behind them."""
        width, rows = len(self.columns), self._rows
        found = [tuple(rows[at : at + width]) for at in range(0, len(rows), width)]
        return (found, []) if self.sums is None else (found[:FIRST_ROWS], found[FIRST_ROWS:])


class Terms(NamedTuple):
    """What an exchange was asked for, and the bounds that it had.

    Attributes:
        limits: of the exchange, of its attempts; those of `ExchangeLimits` and `AttemptLimits`.
        kept: bytes that the client port may keep.
    """

    operation: str
    stream: bool
    choices: int
    wants_usage: bool
    receipt: bool
    deadline: float  # seconds after it arrived
    full_timeout: float | None
    kept: int
    limits: tuple[Any, Any]


class Flight:
    """The steps of one exchange. A long story loses its middle; how much of it, `lost` tells.

    Noting costs one append, and happens a few times an attempt: never for a token. What moves is on tracks,
    with one row for each read of the engine's answer and, from the moment at which the client is slow, for
    each piece that it took.

    Attributes:
        terms: see there; None: nothing that moves is recorded.
        reads: a track for each attempt.
        takes: what the client took since it was slow; None: it never was.
        taken_before: bytes of the answer that it had taken by then.
        record: how it ended; None: it has not.
    """

    __slots__ = ("_clock", "_first", "_last", "_noted", "reads", "record", "taken_before", "takes", "terms")

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._first: list[Step] = []
        self._last: deque[Step] | None = None
        self._noted = 0
        self.terms: Terms | None = None
        self.reads: list[Track] = []
        self.takes: Track | None = None
        self.taken_before = 0
        self.record: Record | None = None

    def begin_reads(self) -> Track | None:
        """Begin the track of an attempt; None: it is not recorded."""
        if self.terms is None:
            return None
        track = Track("at", "bytes", "passed", "events")
        self.reads.append(track)
        return track

    def begin_takes(self, waiting: int) -> Track | None:
        """Begin the track of a client that is slow from now on, for which so many bytes wait."""
        if self.terms is None:
            return None
        passed = sum(track.total("passed") for track in self.reads)
        self.taken_before = max(passed - waiting, 0)
        self.takes = Track("at", "bytes")
        self.takes.add(self._clock(), 0)
        return self.takes

    def note(self, what: str, **detail: Any) -> None:
        """Note a step that is taken now."""
        self.note_at(self._clock(), what, **detail)

    def note_at(self, at: float, what: str, **detail: Any) -> None:
        """Note a step that was taken at a moment."""
        self._noted += 1
        step = Step(at, what, detail)
        if len(self._first) < FIRST:
            self._first.append(step)
            return
        if self._last is None:
            self._last = deque(maxlen=LAST)
        self._last.append(step)

    @property
    def lost(self) -> int:
        """Steps that are not kept, between the first and the last."""
        return self._noted - len(self)

    def __len__(self) -> int:
        return len(self._first) + len(self._last or ())

    def __iter__(self) -> Iterator[Step]:
        """All steps that are kept, in order."""
        yield from self._first
        yield from self._last or ()
