"""One scope for the whole demo, and the first cause that ended it."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import trio

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoError(Exception):
    """Something that the demo needs did not work; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the demo ended.

    Attributes:
        status: exit status of the process.
        message: what to tell the user; empty where it went well.
        details: the end of a log, where that explains the message.
    """

    status: int
    message: str = ""
    details: str = ""


class Ending:
    """Cancels everything for the first cause that is reported; later ones are ignored.

    Attributes:
        before_engine: processes that have to end before the engine is ended.
        killed: processes whose end is no reason to end, since the demo itself has killed them.
    """

    def __init__(self) -> None:
        self.before_engine: list[trio.Process] = []
        self.killed: set[trio.Process] = set()
        self.scope = trio.CancelScope()
        self.cause: Cause | None = None
        self.answered = False

    def end(self, cause: Cause) -> None:
        """Record the cause, unless something else came first, and cancel."""
        if self.cause is None:
            self.cause = cause
            self.scope.cancel()

    async def watch(self, signals: AsyncIterator[int]) -> None:
        """Turn the first signal to stop into an ending.

        Once the answer was shown, Ctrl-C is how the demo is meant to end; before,
        the status tells the signal as shells do.
        """
        async for number in signals:
            status = 0 if self.answered and number == signal.SIGINT else 128 + number
            self.end(Cause(status))
