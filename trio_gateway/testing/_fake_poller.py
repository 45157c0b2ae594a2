"""A poller without sockets: what is to be read says so itself, on whatever clock runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final, final

import trio


@final
class FakePoller:
    """Numbers that can be waited for as descriptors are. See Poller.

    Attributes:
        watched: numbers that are watched right now.
        broken: whether nothing can be watched.
        waited_since: when somebody last began to wait, Trio clock seconds.
    """

    def __init__(self) -> None:
        self.watched: Final[set[int]] = set()
        self.broken = False
        self.waited_since = 0.0
        self._readable: dict[int, None] = {}  # in the order in which they became so
        self._numbers = count(1000)
        self._changed = trio.lowlevel.ParkingLot()

    def new_number(self) -> int:
        """Answer a number that nothing has yet."""
        return next(self._numbers)

    def set_readable(self, number: int, readable: bool) -> None:
        """Say whether there is something to read, the end included."""
        self._readable.pop(number, None)
        if readable:
            self._readable[number] = None
            self._changed.unpark_all()

    def add(self, fd: int) -> None:
        """See Poller."""
        if self.broken or fd in self.watched:
            raise OSError("it can not be watched")
        self.watched.add(fd)
        self._changed.unpark_all()

    def remove(self, fd: int) -> None:
        """See Poller."""
        if fd not in self.watched:
            raise OSError("it is not watched")
        self.watched.remove(fd)

    def poll(self, most: int) -> Sequence[tuple[int, int]]:
        """See Poller."""
        ready = [number for number in self._readable if number in self.watched][:most]
        for number in ready:
            del self._readable[number]
            self._readable[number] = None  # behind those that wait longer
        return [(number, 1) for number in ready]

    async def wait(self) -> None:
        """See Poller."""
        self.waited_since = trio.current_time()
        await trio.lowlevel.checkpoint()
        while not self.watched.intersection(self._readable):
            await self._changed.park()

    def close(self) -> None:
        """See Poller."""
