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
_WORTH_PACKING: Final = 8  # rows


class Step(NamedTuple):
    """One thing that happened.

    Attributes:
        at: Trio clock, seconds.
        detail: numbers and words of bounded sets.
    """

    at: float
    what: str
    detail: dict[str, Any]


_Noted = tuple[float, str, dict[str, Any]]  # a Step, before anybody asks for one


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

    A row is Trio clock seconds, bytes, and all events by then. Events are counted from the start, so that the
    rows which are not kept need no sum. New rows are objects, as a token may have one and that costs least;
    once its client is slow and there is time, they are packed into a fifth of the memory.

    Attributes:
        since: when the first bytes moved; None: nothing did.
        counts: see there; None: nobody counted.
    """

    __slots__ = ("_fresh", "_packed", "counts", "since")

    def __init__(self) -> None:
        self._fresh: deque[tuple[float, int, int]] | None = None
        self._packed: Final = array("d")  # rows end to end: whole numbers up to 2**53 stay what they are
        self.since: float | None = None
        self.counts: Counts | None = None

    def adder(self) -> Callable[[tuple[float, int, int]], None]:
        """Answer what adds a row at the cost of an append to a bounded queue."""
        self._fresh = deque(maxlen=ROWS)
        return self._fresh.append

    def add(self, at: float, size: int, events: int) -> None:
        """Add a row, packed."""
        self._packed.extend((at, size, events))
        if len(self._packed) > 2 * ROWS * _ROW:
            del self._packed[: -ROWS * _ROW]

    def pack(self) -> None:
        """Take less memory from now on, if there are some rows to pack."""
        if self._fresh is not None and len(self._fresh) >= _WORTH_PACKING:
            for row in self._fresh:
                self.add(*row)
            self._fresh.clear()

    @property
    def rows(self) -> list[tuple[float, int, int]]:
        """Those that are kept, in order."""
        figures = iter(self._packed)
        rows = zip(figures, figures, figures, strict=True)
        packed = [(at, int(size), int(events)) for at, size, events in rows]
        return [*packed, *(self._fresh or ())][-ROWS:]


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

    __slots__ = ("_clock", "_first", "_last", "_later", "reads", "record", "takes", "terms", "waited")

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._first: list[_Noted] = []
        self._last: deque[_Noted] | None = None
        self._later = 0  # steps behind the first
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

    def pack(self) -> None:
        """Take less memory, as the client is slow."""
        if self.reads:
            self.reads[-1].pack()

    def note(self, what: str, **detail: Any) -> None:
        """Note a step that is taken now."""
        self._keep((self._clock(), what, detail))

    def note_at(self, at: float, what: str, **detail: Any) -> None:
        """Note a step that was taken at a moment; where that is known, it costs half as much as `note`."""
        if len(self._first) < FIRST:
            self._first.append((at, what, detail))
        else:
            self._keep((at, what, detail))

    def _keep(self, step: _Noted) -> None:
        if len(self._first) < FIRST:
            self._first.append(step)
            return
        if self._last is None:
            self._last = deque(maxlen=LAST)
        self._last.append(step)
        self._later += 1

    @property
    def lost(self) -> int:
        """Steps that are not kept, between the first and the last."""
        return self._later - len(self._last or ())

    def __len__(self) -> int:
        return len(self._first) + len(self._last or ())

    def __iter__(self) -> Iterator[Step]:
        """All steps that are kept, in order."""
        for step in self._first:
            yield Step(*step)
        for step in self._last or ():
            yield Step(*step)
