"""Pushed confirmations: which attempts the engine has let go, to whoever sent them."""

from __future__ import annotations

from collections import deque
from typing import Final, Self

import trio

from ..wire import Release, ReleasedRequest, write_message

MAX_WAITING: Final = 10_000  # lines that a gateway does not take; its heartbeats tell the same
MAX_KEPT: Final = 1000  # lines that nobody listened to


class Subscription:
    """One gateway's stream of events. Leaving the ``with`` block unsubscribes.

    Attributes:
        overrun: more lines waited than there is room for; the stream is of no use any more.
    """

    def __init__(self, releases: Releases, credential: str) -> None:
        self._releases = releases
        self.credential = credential
        self.overrun = False
        self._lines: deque[bytes] = deque()
        self._filled = trio.lowlevel.ParkingLot()

    def push(self, line: bytes) -> None:
        """Add a line; never waits."""
        if len(self._lines) >= MAX_WAITING:
            self.overrun = True
        else:
            self._lines.append(line)
        self._filled.unpark_all()

    async def wait(self) -> bytes:
        """Wait for lines and answer all there are; ``b""`` after an overrun."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._lines and not self.overrun:
            await self._filled.park()
        lines = b"" if self.overrun else b"".join(self._lines)
        self._lines.clear()
        return lines

    def __enter__(self) -> Self:
        self._releases.subscriptions.add(self)
        for line in self._releases.take_kept(self.credential):
            self.push(line)
        return self

    def __exit__(self, *exc: object) -> None:
        self._releases.subscriptions.discard(self)


class Releases:
    """Tells gateways what was released.

    Heartbeats say as well which attempts are over, but only this says how many tokens they had. So what
    nobody listens to, while a gateway begins or comes back to listen, is kept for it.
    """

    def __init__(self) -> None:
        self.subscriptions: set[Subscription] = set()
        self._kept: deque[tuple[str, bytes]] = deque(maxlen=MAX_KEPT)

    def subscribe(self, credential: str) -> Subscription:
        """Make a subscription to the attempts that were sent with a credential."""
        return Subscription(self, credential)

    def push(self, credential: str, released: ReleasedRequest) -> None:
        """Tell every stream of the gateway that sent the attempt."""
        line = write_message(Release(released)) + b"\n"
        listening = [each for each in self.subscriptions if each.credential == credential]
        for subscription in listening:
            subscription.push(line)
        if not listening:
            self._kept.append((credential, line))

    def take_kept(self, credential: str) -> list[bytes]:
        """Answer what was kept of attempts that were sent with a credential, and keep it no longer."""
        lines = [line for whose, line in self._kept if whose == credential]
        if lines:
            self._kept = deque((each for each in self._kept if each[0] != credential), maxlen=MAX_KEPT)
        return lines
