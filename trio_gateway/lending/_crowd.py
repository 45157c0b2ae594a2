"""How many connections each process has, in memory that all see: who has more lets others accept first.

All processes wait at the same sockets, and the kernel wakes all of them for each connection. Whichever is
awake already would take every one of a burst, and serve them alone.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

ABSENT: Final = 1 << 60  # connections of a process that accepts none
_SIZE: Final = 8  # bytes of one count: written and read at once, so that no lock is needed


class Crowd:
    """The counts of all processes.

    Args:
        descriptor: of the memory; it stays the caller's.
        of: how many processes there are.
        number: of the process that counts here.
    """

    def __init__(self, descriptor: int, of: int, number: int = 0) -> None:
        self._memory = mmap.mmap(descriptor, of * _SIZE)
        self._counts = memoryview(self._memory).cast("q")
        self._number = number

    @staticmethod
    def make(of: int) -> int:
        """Make the memory, in which nobody is there yet; answers its descriptor, which is the caller's."""
        descriptor = os.memfd_create("trio-gateway-connections")
        os.ftruncate(descriptor, of * _SIZE)
        crowd = Crowd(descriptor, of)
        for number in range(of):
            crowd.leave(number)
        crowd.close()
        return descriptor

    def enter(self) -> None:
        """Accept connections from now on."""
        self._counts[self._number] = 0

    def leave(self, number: int) -> None:
        """A process accepts no more."""
        self._counts[number] = ABSENT

    def count(self, more: int) -> None:
        """Note that connections came, or went."""
        if self._counts[self._number] != ABSENT:
            self._counts[self._number] += more

    def ahead(self) -> bool:
        """Whether another process has fewer."""
        return self._counts[self._number] > min(self._counts)

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._counts.release()
        self._memory.close()
