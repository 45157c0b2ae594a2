"""The borrowing end in one process: what was said and answered, and what is still to be said."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Protocol

import trio

from ..contract import Want
from ._broker import PIECE
from ._messages import Lines, Said, encode, read_told
from ._speaker import Speaker

_NOTHING: Final = Said()


class Listener(Protocol):
    """Who uses what is lent. All of it is called by the borrower's task, and waits for nothing."""

    def lent(self, thing: str, units: int) -> None:
        """Take units. `judged` follows when all that was lent with them is told."""

    def recall(self, thing: str) -> None:
        """Others wait for a thing: what of it nobody here is about to use is to be given back."""

    def judged(self, heard: int) -> None:
        """All that was lent is told, and questions up to this number are answered."""


class Borrower:
    """See `LenderPort`. `run` is one task of the gateway.

    Args:
        sock: of a pair, not blocking; stays the caller's.

    Attributes:
        lent: units by thing, as the lender counts them, too.
        retired: told to accept nothing more, and to end once all that was accepted is served.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._speaker = Speaker(sock)
        self._next = Said()
        self._described: dict[str, tuple[int, float]] = {}
        self._wanted: dict[str, Want] = {}
        self._recalled: set[str] = set()
        self._asked = 0
        self._may_go = trio.Event()
        self._gone = False
        self.lent: Final = Counter[str]()
        self.retired: Final = trio.Event()

    # -- LenderPort

    def describe(self, thing: str, units: int, grace: float) -> None:
        """See LenderPort."""
        if self._described.get(thing) != (units, grace):
            self._described[thing] = self._next.of[thing] = units, grace

    def want(self, wants: Mapping[str, Want]) -> None:
        """See LenderPort."""
        if wants == self._wanted:
            return
        for name in self._wanted.keys() - wants.keys():
            self._next.want[name] = None
        for name, want in wants.items():
            if self._wanted.get(name) != want:
                self._next.want[name] = want.things, want.units, want.count
        self._wanted = dict(wants)

    def give_back(self, thing: str, units: int) -> None:
        """See LenderPort."""
        self.lent[thing] -= units
        self._next.back[thing] = self._next.back.get(thing, 0) + units
        if not self.lent[thing]:
            del self.lent[thing]

    def recalled(self, thing: str) -> bool:
        """See LenderPort."""
        return thing in self._recalled

    def ask(self) -> int:
        """See LenderPort."""
        if not self._next.asks:
            self._asked += 1
            self._next.asks = self._asked
        return self._asked

    def speak(self) -> None:
        """See LenderPort."""
        said = self._next
        if said != _NOTHING:
            self._next = Said()
            self._speaker.send(encode(said))

    # -- beginning and going on

    async def be_ready(self, **known: Any) -> None:
        """Tell what is known of this process, and wait until it may begin to serve.

        Raises:
            OSError: the lender is gone.
        """
        self._next.ready = known
        self.speak()
        await self._may_go.wait()
        if self._gone:
            raise OSError("the supervisor is gone")

    def tell_serving(self) -> None:
        """Tell that this process serves."""
        self._next.ready = {}
        self.speak()

    async def tell_last(self, counted: dict[str, Any]) -> None:
        """Tell what this process has counted, before it ends, and wait until that is said."""
        self._next.last = counted
        self.speak()
        await self._speaker.flush()

    async def run(self, listener: Listener) -> None:
        """Hear the lender until it is gone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._speaker.run)
            lines = Lines()
            while data := await self._read():
                for line in lines.feed(data):
                    self._hear(line, listener)
            nursery.cancel_scope.cancel()
        self._gone = True
        self._may_go.set()

    async def _read(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self._sock)
            try:
                return self._sock.recv(PIECE)
            except BlockingIOError:
                continue
            except OSError:
                return b""

    def _hear(self, line: bytes, listener: Listener) -> None:
        told = read_told(line)
        if told.go:
            self._may_go.set()
        if told.retire:
            self.retired.set()
        if told.call:
            self._next.alive = told.call
            self.speak()
        self._recalled.difference_update(told.calm)
        self._recalled.update(told.wanted)
        for name, thing, units in told.lent:
            self.lent[thing] += units
            self._serve(name)
            listener.lent(thing, units)
        for thing in told.wanted:
            listener.recall(thing)
        if told.lent or told.wanted or told.heard:
            listener.judged(told.heard)

    def _serve(self, name: str) -> None:
        """The lender counts a want down as it serves it."""
        want = self._wanted.get(name)
        if want is None:
            return  # it was taken back meanwhile
        if want.count > 1:
            self._wanted[name] = Want(want.things, want.units, want.count - 1)
        else:
            del self._wanted[name]
