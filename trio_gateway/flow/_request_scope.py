"""A cancel scope that remembers what ended it first."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import trio

from ..contract import Ending


class RequestScope:
    """The one scope through which an exchange ends, whoever ends it.

    Args:
        deadline: absolute, Trio clock seconds.
        at_deadline: the ending to record when the deadline passes first; may change meanwhile.
    """

    def __init__(self, deadline: float, at_deadline: Ending) -> None:
        self._scope = trio.CancelScope(deadline=deadline)
        self.at_deadline = at_deadline
        self._ending: Ending | None = None

    @property
    def ending(self) -> Ending | None:
        """The first cause that was reported; None while the exchange goes on."""
        return self._ending

    @property
    def over(self) -> bool:
        """Whether it was cancelled, or its deadline has come."""
        return self._scope.cancel_called

    def note(self, ending: Ending) -> bool:
        """Record a cause without cancelling; answers whether it was the first."""
        first = self._ending is None
        if first:
            self._ending = ending
        return first

    def end(self, ending: Ending) -> bool:
        """Record a cause, unless another came first, and cancel all that is left."""
        first = self.note(ending)
        self._scope.cancel(reason=ending.outcome.value)
        return first

    def __enter__(self) -> Self:
        """Enter the scope; only once."""
        self._scope.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Leave the scope; swallows the cancellation that it caused."""
        swallowed = self._scope.__exit__(exc_type, exc_value, traceback)
        if self._scope.cancelled_caught:
            self.note(self.at_deadline)
        return swallowed
