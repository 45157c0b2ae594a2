"""The deltas of one stream that a client acknowledges: numbers, credit, and what is kept to be sent again.

Pure. Deltas are numbered from 1 without gaps. The send limit is
``max(limit, seq + credit)`` over all acknowledgements, so that one which is late or
repeated does no harm. No credit ever given: there is no such limit.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple


class Delta(NamedTuple):
    """One message of a stream.

    Attributes:
        seq: its number; 0: the last one, which says how the stream ended.
        chunk: what it carries.
        tokens, size: of the stream so far: tokens, and bytes of chunks.
    """

    seq: int
    chunk: bytes
    tokens: int
    size: int


_KEEPS_NONE: Final = deque[Delta](maxlen=0)  # of all that keep none: each of its own would be 600 bytes


class NotSent(Exception):
    """An acknowledgement of a delta that was never sent."""


class Dropped(Exception):
    """A resume behind a delta that is not kept any more."""


class DeltaLog:
    """See the module's docstring.

    Args:
        credit: deltas that may be sent before more is given; None: no limit.
        most_kept: bytes of sent deltas that may wait for an acknowledgement; beyond them nothing is
            sent. 0: none are kept.

    Attributes:
        waiting_bytes: of chunks that were not taken yet.
        kept_bytes: of chunks that were taken, and are kept.
        last: number of the newest delta; ``sent``: of the last that was taken; ``acked``: of the last
            that was acknowledged.
        grants: how often credit or room was given; grows.
    """

    def __init__(self, credit: int | None, most_kept: int) -> None:
        self._credit = credit
        self._limit: float = math.inf if credit is None else credit
        self._most_kept = most_kept
        self._waiting: deque[Delta] = deque()
        self._kept = deque() if most_kept else _KEEPS_NONE
        self.waiting_bytes = 0
        self.kept_bytes = 0
        self.last = 0
        self.sent = 0
        self.acked = 0
        self.grants = 0
        self._shed = 0

    @property
    def can_send(self) -> bool:
        """Whether something waits that may be sent now."""
        if not self._waiting:
            return False
        seq = self._waiting[0].seq
        if not seq:
            return True
        return seq <= self._limit and not 0 < self._most_kept <= self.kept_bytes

    def add(self, chunk: bytes, tokens: int, size: int) -> None:
        """Add the delta with the number ``last + 1``."""
        self.last += 1
        self._wait(Delta(self.last, chunk, tokens, size))

    def end(self, message: bytes) -> None:
        """Add the last message, which needs no credit."""
        self._wait(Delta(0, message, 0, 0))

    def take(self) -> Delta | None:
        """Answer the next message that may be sent now, and count it as sent."""
        if not self.can_send:
            return None
        delta = self._waiting.popleft()
        self.waiting_bytes -= len(delta.chunk)
        self.sent = max(self.sent, delta.seq)
        if self._most_kept:
            self._kept.append(delta)
            self.kept_bytes += len(delta.chunk)
        return delta

    def acknowledge(self, seq: int, credit: int | None) -> None:
        """Take an acknowledgement of all deltas up to ``seq``.

        Raises:
            NotSent: ``seq`` was never sent; nothing was changed.
        """
        if seq > self.sent:
            raise NotSent
        if credit is not None:
            if self._credit is None and self._limit == math.inf:
                self._limit = self.sent
            self._credit = credit
        if self._credit is not None and seq + self._credit > self._limit:
            self._limit = seq + self._credit
            self.grants += 1
        if seq > self.acked:
            self.acked = seq
            self.grants += 1
            self._forget(seq)

    def rewind(self, after: int, credit: int | None) -> None:
        """Go on behind the delta ``after``, as if all later ones had not been sent.

        Raises:
            NotSent: it was never sent. Dropped: later ones are not kept any more.
        """
        if after > self.sent:
            raise NotSent
        if after < max(self.acked, self._shed):
            raise Dropped
        self.acknowledge(after, credit)
        again = list(self._kept)
        self._kept.clear()
        self.kept_bytes = 0
        self.waiting_bytes += sum(len(delta.chunk) for delta in again)
        self._waiting.extendleft(reversed(again))

    def shed(self) -> None:
        """Keep none of the deltas that were taken: memory is short."""
        if self._kept:
            self._shed = self.sent
            self._drop_kept(self.sent)

    def drop_waiting(self) -> None:
        """Forget all that was not taken, or not again; numbers go on behind the last that was."""
        if self._waiting and self._waiting[0].seq:
            self.sent = self._waiting[0].seq - 1
        self._waiting.clear()
        self.waiting_bytes = 0
        self.last = self.sent

    def clear(self) -> None:
        """Forget everything, what is kept too."""
        self.drop_waiting()
        self._kept.clear()
        self.kept_bytes = 0

    def _wait(self, delta: Delta) -> None:
        self._waiting.append(delta)
        self.waiting_bytes += len(delta.chunk)

    def _forget(self, seq: int) -> None:
        self._drop_kept(seq)
        while self._waiting and 0 < self._waiting[0].seq <= seq:  # to be sent again, and it was there already
            self.waiting_bytes -= len(self._waiting.popleft().chunk)

    def _drop_kept(self, seq: int) -> None:
        while self._kept and 0 < self._kept[0].seq <= seq:
            self.kept_bytes -= len(self._kept.popleft().chunk)
