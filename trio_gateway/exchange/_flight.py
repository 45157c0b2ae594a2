"""What happened to one exchange, and when: causes, sizes and times, never any content."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import trio

FIRST: Final = 16  # steps that are kept for ever: how it came, and how its first attempt began
LAST: Final = 48  # of the others, those that are kept


class Step(NamedTuple):
    """One thing that happened.

    Attributes:
        at: Trio clock, seconds.
        detail: numbers and words of bounded sets.
    """

    at: float
    what: str
    detail: dict[str, Any]


class Flight:
    """The steps of one exchange. A long story loses its middle; how much of it, `lost` tells.

    Noting costs one append, and happens a few times an attempt: never for a token.
    """

    __slots__ = ("_clock", "_first", "_last", "_noted")

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._first: list[Step] = []
        self._last: deque[Step] | None = None
        self._noted = 0

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
