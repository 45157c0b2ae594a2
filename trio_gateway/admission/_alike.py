"""Those who wait, by what decides whether a worker is left for them. Pure.

Thousands wait and are of few kinds: what holds for one of a kind is found once for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    """What must be known of one that waits; it does not change meanwhile."""

    @property
    def kind(self) -> Hashable:
        """All that decides when a worker may be tried for it."""

    @property
    def number(self) -> int:
        """Unique."""

    @property
    def limit(self) -> float:
        """When it will have waited for as long as it may."""


W = TypeVar("W", bound=Waiter)


class _Kind(Generic[W]):
    """All of one kind.

    Attributes:
        soonest: no limit of any of them is before it.
    """

    __slots__ = ("soonest", "waiters")

    def __init__(self) -> None:
        self.waiters: dict[int, W] = {}
        self.soonest = math.inf


class Alike(Generic[W]):
    """Waiters by kind. All steps but `too_late` are O(1)."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind[W]] = {}

    def add(self, waiter: W) -> None:
        """Let a waiter in."""
        kind = self._kinds.get(waiter.kind)
        if kind is None:
            kind = self._kinds[waiter.kind] = _Kind()
        kind.waiters[waiter.number] = waiter
        kind.soonest = min(kind.soonest, waiter.limit)

    def remove(self, waiter: W) -> None:
        """Take a waiter out. Raises KeyError if it is not in."""
        kind = self._kinds[waiter.kind]
        del kind.waiters[waiter.number]
        if not kind.waiters:
            del self._kinds[waiter.kind]

    def too_late(self, tries_at: Callable[[W], float | None]) -> list[W]:
        """Answer those whose time is up before a worker may be tried; they stay in.

        O(kinds), unless there are any, or there may be.

        Args:
            tries_at: answers when the first worker may be tried, for one of a kind; None: there is none.
        """
        found: list[W] = []
        for kind in self._kinds.values():
            at = tries_at(next(iter(kind.waiters.values())))
            if at is None:
                found += kind.waiters.values()
            elif at >= kind.soonest:  # which may be that of one that has left
                found += [waiter for waiter in kind.waiters.values() if waiter.limit <= at]
                kind.soonest = min(waiter.limit for waiter in kind.waiters.values())
        return found
