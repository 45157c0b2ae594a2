"""Waiting until something holds, without polling."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Condition:
    """Wakes whoever waits when told that state changed. One thread, any number of waiters."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def notify(self) -> None:
        """Let every waiter look again."""
        self._event.set()
        self._event = trio.Event()

    async def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds` answers True; always a checkpoint.

        The waiter may find later that it no longer holds: other tasks run between.
        """
        while not holds():
            await self._event.wait()
        await trio.lowlevel.checkpoint()
