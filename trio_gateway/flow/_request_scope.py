"""A nursery whose cancel scope remembers what ended it first."""

from __future__ import annotations

from types import TracebackType

import trio

from ..contract import Ending


class RequestScope:
    """The one scope through which an exchange ends, whoever ends it; ``async with`` opens its nursery.

    Args:
        deadline: absolute, Trio clock seconds.
        at_deadline: the ending to record when the deadline passes first; may change meanwhile.
    """

    def __init__(self, deadline: float, at_deadline: Ending) -> None:
        self._deadline = deadline
        self.at_deadline = at_deadline
        self._ending: Ending | None = None
        self._manager = trio.open_nursery()
        self._scope: trio.CancelScope | None = None  # of the nursery: one of its own would only cost
        self._cancelled: str | None = None

    @property
    def ending(self) -> Ending | None:
        """The first cause that was reported; None while the exchange goes on."""
        return self._ending

    @property
    def over(self) -> bool:
        """Whether it was cancelled, or its deadline has come."""
        return self._cancelled is not None or trio.current_time() >= self._deadline

    def note(self, ending: Ending) -> bool:
        """Record a cause without cancelling; answers whether it was the first."""
        first = self._ending is None
        if first:
            self._ending = ending
        return first

    def end(self, ending: Ending) -> bool:
        """Record a cause, unless another came first, and cancel all that is left."""
        first = self.note(ending)
        self._cancelled = self._cancelled or ending.outcome.value
        if self._scope is not None:
            self._scope.cancel(reason=self._cancelled)
        return first

    async def __aenter__(self) -> trio.Nursery:
        """Open the nursery; only once."""
        nursery = await self._manager.__aenter__()
        self._scope = scope = nursery.cancel_scope
        scope.deadline = self._deadline
        if self._cancelled is not None:
            scope.cancel(reason=self._cancelled)
        return nursery

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Wait for the tasks of the nursery; swallows the cancellation that it caused."""
        swallowed = await self._manager.__aexit__(exc_type, exc_value, traceback)  # noqa: ASYNC102 - a nursery's own
        if self._scope is not None and self._scope.cancelled_caught:
            self.note(self.at_deadline)
        return swallowed
