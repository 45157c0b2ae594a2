"""Waiting until anything in this process holds, without polling and without a hook in what is watched."""

from __future__ import annotations

from collections.abc import Callable

import trio


class _Look(trio.abc.Instrument):
    """Looks after every step of every task, until something was found."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds
        self.found = trio.Event()
        self.failure: Exception | None = None

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """See trio.abc.Instrument."""
        if self.found.is_set():
            return
        try:
            if self._holds():
                self.found.set()
        except Exception as exc:  # Trio would log it and forget the waiter
            self.failure = exc
            self.found.set()


async def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds` answers True; always a checkpoint.

    It is asked after every step of every task of this run, so a state that only
    lasts for a moment is seen too. What it looks at has to be changed by tasks of
    the same run: a clock or another process is not seen to move. The waiter may
    find later that it no longer holds.

    Args:
        holds: cheap and synchronous; what it raises is raised here.
    """
    look = _Look(holds)
    if not holds():
        trio.lowlevel.add_instrument(look)
        try:
            await look.found.wait()
        finally:
            trio.lowlevel.remove_instrument(look)
        if look.failure is not None:
            raise look.failure
    await trio.lowlevel.checkpoint()
