"""Answers that outlive the connection they went over, until their owner comes for them or nobody may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import trio

from ..flow import BufferPool
from ..tenancy import Caller


class KeptAnswer(Protocol):
    """What can be gone on with."""

    @property
    def kept(self) -> int:
        """Bytes that it keeps, as the pool counts them."""

    @property
    def over(self) -> bool:
        """Whether its exchange has ended, and all of it was sent."""

    @property
    def accepted(self) -> bool:
        """Whether its request was accepted; before, there is nothing to come back for."""

    def forget(self) -> None:
        """Give back what is kept: nobody may go on any more."""


AnswerT = TypeVar("AnswerT", bound=KeptAnswer)


@dataclass(slots=True)
class _Entry(Generic[AnswerT]):
    answer: AnswerT
    tenant: str
    key_id: str | None
    ended: float | None = None  # when it was first seen to be over, Trio clock seconds


class KeptAnswers(Generic[AnswerT]):
    """Answers by request id, each for the key that asked for it.

    Args:
        window: seconds that one is kept after its end.
        pool: when more than half of it is used, the ended are forgotten earlier, the oldest first.
        weight: bytes that the objects of one take, which count for that; the pool knows only what they keep.

    Attributes:
        window: see above.
    """

    def __init__(self, window: float, pool: BufferPool, weight: int = 0) -> None:
        self.window = window
        self._pool = pool
        self._weight = weight
        self._entries: dict[str, _Entry[AnswerT]] = {}

    @property
    def bytes(self) -> int:
        """Bytes that they keep."""
        return sum(entry.answer.kept for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: str, answer: AnswerT, caller: Caller) -> None:
        """Keep an answer for its owner."""
        self._entries[request_id] = _Entry(answer, caller.tenant.id, caller.key_id)

    def find(self, request_id: str, caller: Caller) -> AnswerT | None:
        """Answer this caller's own; None: there is no such, or no longer."""
        if not self.has(request_id, caller.tenant.id, caller.key_id):
            return None
        return self._entries[request_id].answer

    def has(self, request_id: str, tenant: str, key_id: str | None) -> bool:
        """Whether there is one of this key."""
        entry = self._entries.get(request_id)
        return entry is not None and (entry.tenant, entry.key_id) == (tenant, key_id)

    def overdue(self, now: float) -> list[tuple[str, float, int]]:
        """Name those that should have been forgotten: id, for how many seconds, and bytes."""
        return [
            (request_id, now - entry.ended - self.window, entry.answer.kept)
            for request_id, entry in self._entries.items()
            if entry.ended is not None and now - entry.ended > self.window
        ]

    def sweep(self) -> None:
        """Forget those that ended long ago, and more if memory is short; to be called about once a second.

        What was turned away is not kept: it costs its client nothing to ask again and again.
        """
        now = trio.current_time()
        for request_id, entry in tuple(self._entries.items()):
            if not entry.answer.over:
                entry.ended = None
                continue
            entry.ended = now if entry.ended is None else entry.ended
            left = self._pool.left - self._weight * len(self._entries)
            short = left * 2 < self._pool.total
            if now - entry.ended >= self.window or short or not entry.answer.accepted:
                del self._entries[request_id]
                entry.answer.forget()
