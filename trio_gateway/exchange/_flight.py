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
ROWS: Final = 48  # of a track: the last
_ROW: Final = 3  # figures


class Step(NamedTuple):
    """One thing that happened.

    Attributes:
        at: Trio clock, seconds.
        detail: numbers and words of bounded sets.
    """

    at: float
    what: str
    detail: dict[str, Any]


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
    """When bytes moved one way, and how many: a row for each move. Of many, the last are kept.

    Adding one is an append, so that a token may have one. Events are counted from the start, so that the
    rows which are not kept need no sum. A track takes 3 KiB at most: three objects a row would be five times
    as much.

    Attributes:
        since: when the first bytes moved; None: nothing did.
        counts: see there; None: nobody counted.
    """

    __slots__ = ("_moves", "counts", "since")

    def __init__(self) -> None:
        self._moves: Final = array("d")  # rows end to end: whole numbers up to 2**53 stay what they are
        self.since: float | None = None
        self.counts: Counts | None = None

    def add(self, at: float, size: int, events: int) -> None:
        """Add a row: Trio clock seconds, bytes, and all events by then."""
        self._moves.extend((at, size, events))
        if len(self._moves) == 2 * ROWS * _ROW:
            del self._moves[: ROWS * _ROW]

    @property
    def rows(self) -> list[tuple[float, int, int]]:
        """Those that are kept, in order."""
        kept = self._moves[-ROWS * _ROW :]
        return [(at, int(size), int(events)) for at, size, events in zip(*[iter(kept)] * _ROW, strict=True)]


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
    with one row for each read of the engine's answer of which something passed on and, from the moment at
    which the client is slow, for each piece that it took.

    Attributes:
        terms: see there; None: nothing that moves is recorded.
        reads: a track for each attempt.
        takes: what the client took since it was slow; None: it never was.
        waited: bytes of what was read that waited for it at that moment.
        record: how it ended; None: it has not.
    """

    __slots__ = ("_clock", "_first", "_last", "_noted", "reads", "record", "takes", "terms", "waited")

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._first: list[Step] = []
        self._last: deque[Step] | None = None
        self._noted = 0
        self.terms: Terms | None = None
        self.reads: list[Track] = []
        self.takes: Track | None = None
        self.waited = 0
        self.record: Record | None = None

    def begin_reads(self) -> Track | None:
        """Begin the track of an attempt; None: it is not recorded."""
        if self.terms is None:
            return None
        track = Track()
        self.reads.append(track)
        return track

    def begin_takes(self, waiting: int) -> Track | None:
        """Begin the track of a client that is slow from now on, for which so many bytes wait."""
        if self.terms is None:
            return None
        self.waited = waiting
        self.takes = Track()
        self.takes.since = self._clock()
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
