"""The live feed: one snapshot a second for all who look, as server-sent events.

Nothing is queued for anybody. Whoever looks is told what is new each time the
last telling has been written: a slow operator gets the newest snapshot, and one
that takes nothing for some seconds is closed by the guard of its connection.
"""

from __future__ import annotations

from typing import Final

import msgspec
import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ._access import Access, Headers
from ._port import AdminPort, Row, answered, refusal

INTERVAL: Final = 1.0  # seconds from one snapshot to the next
MOST_FEEDS: Final = 16  # open at a time; the other connections are for questions
RETRY: Final = b"retry: 1000\n\n"  # milliseconds until a browser comes again


class Feed:
    """What all open feeds share.

    Args:
        access: says who may go on looking.
        most: feeds that may be open at a time.
    """

    def __init__(self, port: AdminPort, access: Access, most: int = MOST_FEEDS) -> None:
        self._port = port
        self._access = access
        self._most = most
        self._open = 0
        self._made = -1  # the tick of which `_snapshot` is
        self._snapshot = b""
        self._making = trio.Lock()

    @property
    def open(self) -> int:
        """Feeds that are open."""
        return self._open

    def answer(self) -> FeedAnswer:
        """Open a feed.

        Raises:
            Refused: ``feed_limit_reached``.
        """
        if self._open >= self._most:
            raise refusal("feed_limit_reached", f"{self._most} feeds are open", retry_after=INTERVAL)
        return FeedAnswer(self)

    def enter(self) -> None:
        """Count one that is open."""
        self._open += 1

    def leave(self) -> None:
        """Count one less."""
        self._open -= 1

    def may_go_on(self, headers: Headers) -> bool:
        """Whether who looks may do so still."""
        return self._access.still_lets_in(headers)

    async def latest(self, now: float) -> bytes:
        """Answer the snapshot of this tick, as JSON, the same for all who ask."""
        tick = int(now // INTERVAL)
        async with self._making:
            if tick > self._made:
                self._made, self._snapshot = tick, _json(await answered(self._port.snapshot()))
        return self._snapshot

    async def endings_after(self, number: int) -> tuple[int, bytes]:
        """Answer how many endings there were, and events for those behind a number."""
        reached, rows = await answered(self._port.endings_after(number))
        return reached, b"".join(_event(b"ending", _json(row)) for row in rows)


class FeedAnswer(Response):
    """An answer that goes on until the operator leaves, loses its token, or the gateway ends."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(headers={"content-type": "text/event-stream"})
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until cancelled, or until who looks may not any more."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body"})
            return
        self._feed.enter()
        try:
            await send(start)
            await self._tell(scope["headers"], send)
        finally:
            self._feed.leave()

    async def _tell(self, headers: Headers, send: Send) -> None:
        reached, _ = await self._feed.endings_after(2**62)  # what ended before is on another page
        text = RETRY
        while self._feed.may_go_on(headers):
            now = trio.current_time()
            reached, endings = await self._feed.endings_after(reached)
            text += endings + _event(b"snapshot", await self._feed.latest(now))
            await send({"type": "http.response.body", "body": text, "more_body": True})
            text = b""
            await trio.sleep_until((trio.current_time() // INTERVAL + 1) * INTERVAL)
        await send({"type": "http.response.body"})


def _json(value: Row) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def _event(name: bytes, data: bytes) -> bytes:
    """Write one event; its data has no line ends."""
    return b"event: %b\ndata: %b\n\n" % (name, data)
