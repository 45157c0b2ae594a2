"""The clock of one exchange: what is due when, without a timer per token.

One task sleeps until the earliest time at which something could be due, then
looks. Activity only pushes due times later, so nobody has to tell it; what can
make something due earlier pokes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio


class ExchangeClock:
    """Calls ``look`` whenever something may be due.

    Args:
        look: does what is due at the given time and answers when to look again.
    """

    def __init__(self, look: Callable[[float], float]) -> None:
        self._look = look
        self._nap: trio.CancelScope | None = None

    def poke(self) -> None:
        """Look again now: something may be due earlier than it was."""
        if self._nap is not None:
            self._nap.deadline = -math.inf

    async def run(self) -> None:
        """Look for ever."""
        while True:
            due = self._look(trio.current_time())
            with trio.CancelScope(deadline=due) as self._nap:
                await trio.sleep_forever()
            self._nap = None
