"""The newest events of a stream, numbered, so that a reader who lost its connection can go on. Pure."""

from __future__ import annotations

from collections import deque

from ._delta_log import Dropped, NotSent


class EventLog:
    """Blocks, each one whole event, numbered from 1; one reader takes them in order, and may go back.

    What was taken is kept, the newest of it, while all blocks together stay within a bound.

    Args:
        most: bytes that are kept. What was not taken is kept whatever it takes: who adds has to look at
            `waiting_bytes`.

    Attributes:
        last: number of the newest block; ``taken``: of the last that was ever taken.
        bytes: of all blocks that are here; ``waiting_bytes``: of those that the reader has not taken.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: deque[bytes] = deque()
        self._first = 1  # number of the oldest that is here
        self._next = 1  # number of the next to take
        self.last = 0
        self.taken = 0
        self.bytes = 0
        self.waiting_bytes = 0

    @property
    def position(self) -> int:
        """Number of the last block that the reader took."""
        return self._next - 1

    def add(self, block: bytes) -> None:
        """Add the block with the number ``last + 1``."""
        self._blocks.append(block)
        self.last += 1
        self.bytes += len(block)
        self.waiting_bytes += len(block)
        self._drop_old()

    def take(self, most: int) -> bytes:
        """Answer the next blocks: up to ``most`` bytes, or a single larger one; ``b""``: none waits."""
        parts: list[bytes] = []
        size = 0
        while self._next <= self.last:
            block = self._blocks[self._next - self._first]
            if parts and size + len(block) > most:
                break
            parts.append(block)
            size += len(block)
            self._next += 1
        self.taken = max(self.taken, self._next - 1)
        self.waiting_bytes -= size
        self._drop_old()
        return b"".join(parts)

    def seek(self, after: int) -> None:
        """Let the reader go on behind the block ``after``.

        Raises:
            NotSent: nobody ever took that. Dropped: what follows is not here any more.
        """
        if after > self.taken:
            raise NotSent
        if after < self._first - 1:
            raise Dropped
        self._next = after + 1
        self.waiting_bytes = sum(map(len, list(self._blocks)[after + 1 - self._first :]))

    def drop_waiting(self) -> None:
        """Forget all that was never taken."""
        while self.last > self.taken:
            self.bytes -= len(self._blocks.pop())
            self.last -= 1
        self._next = min(self._next, self.last + 1)
        self.waiting_bytes = sum(map(len, list(self._blocks)[self._next - self._first :]))

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._first = self._next = self.last + 1
        self.bytes = self.waiting_bytes = 0

    def _drop_old(self) -> None:
        while self.bytes > self._most and self._first < self._next:
            self.bytes -= len(self._blocks.popleft())
            self._first += 1
