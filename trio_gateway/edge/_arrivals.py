"""How far the messages of one stream have come on its way: to the socket, and to the client's kernel."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import final

from ._websocket import WebSocket

_IN_FLIGHT = 256  # messages sent before the kernel is asked which of them have arrived


@final
class Arrivals:
    """See the module's docstring.

    Attributes:
        sending: bytes of the messages that the socket is taking right now.
        arrived: number, and bytes of events up to it, of the last message that the client's kernel
            has acknowledged.
    """

    def __init__(self) -> None:
        self.sending = 0
        self.arrived = (0, 0)
        self._taken: list[tuple[int, int, int]] = []  # by the socket now: number, size, length
        # Of those before: ends on the socket, numbers, sizes. Objects would cost six times as much for
        # a client that never reads.
        self._ends, self._numbers, self._sizes = array("q"), array("q"), array("q")

    def take(self, number: int, size: int, length: int) -> None:
        """The socket takes a message.

        Args:
            number: of the message; 0: it counts as none.
            size: bytes of all events up to it.
            length: of its own.
        """
        self._taken.append((number, size, length))
        self.sending += length

    def sent(self, end: int, socket: WebSocket | None) -> None:
        """The oldest of those has been taken; it ends at ``end`` of all that was sent there."""
        number, size, length = self._taken.pop(0)
        self.sending -= length
        if number:
            self._ends.append(end)
            self._numbers.append(number)
            self._sizes.append(size)
            if len(self._ends) > _IN_FLIGHT:
                self.look(socket)

    def look(self, socket: WebSocket | None) -> None:
        """Ask which have arrived; of a socket that is gone: had arrived."""
        if socket is None or not self._ends:
            return
        there = bisect_right(self._ends, socket.acknowledged())
        if there:
            self.arrived = max(self.arrived, (self._numbers[there - 1], self._sizes[there - 1]))
            for marks in (self._ends, self._numbers, self._sizes):
                del marks[:there]

    def acknowledge(self, number: int) -> None:
        """The client itself says that it has a message and all before it."""
        if number > self.arrived[0]:
            known = bisect_right(self._numbers, number)
            self.arrived = number, max(self._sizes[known - 1] if known else 0, self.arrived[1])

    def forget(self) -> None:
        """Forget what is on its way: the socket is gone, or another one's turn."""
        self._taken.clear()
        self._ends, self._numbers, self._sizes = array("q"), array("q"), array("q")
        self.sending = 0
