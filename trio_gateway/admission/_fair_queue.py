"""The order of those who wait. Pure: no clock, no waiting, no Trio.

First form: first come, first served, one line per tenant and model, so that a
full model does not block another. Who was sent back keeps its arrival number
and so stands in front again.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    """What the queue must know of one that waits."""

    @property
    def tenant(self) -> str:
        """Who pays."""

    @property
    def model(self) -> str:
        """What it waits for."""

    @property
    def number(self) -> int:
        """Arrival number, unique and growing."""

    @property
    def size(self) -> int:
        """Bytes of its body."""


W = TypeVar("W", bound=Waiter)


class FairQueue(Generic[W]):
    """All waiters of one gateway, with their counts and bytes."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], list[W]] = {}
        self._of_tenant: dict[str, int] = {}
        self._depth = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._depth

    @property
    def bytes(self) -> int:
        """Bytes of all waiting bodies."""
        return self._bytes

    def depth_of(self, tenant: str) -> int:
        """How many of a tenant wait."""
        return self._of_tenant.get(tenant, 0)

    def tenants(self) -> dict[str, int]:
        """Depth by tenant, of those that have any."""
        return dict(self._of_tenant)

    def add(self, waiter: W) -> None:
        """Put a waiter where its arrival number belongs."""
        line = self._lines.setdefault((waiter.tenant, waiter.model), [])
        bisect.insort(line, waiter, key=_number)
        self._depth += 1
        self._bytes += waiter.size
        self._of_tenant[waiter.tenant] = self.depth_of(waiter.tenant) + 1

    def remove(self, waiter: W) -> None:
        """Take a waiter out.

        Raises:
            KeyError: it does not wait.
        """
        key = (waiter.tenant, waiter.model)
        line = self._lines.get(key, [])
        at = bisect.bisect_left(line, waiter.number, key=_number)
        if at == len(line) or line[at] is not waiter:
            raise KeyError(waiter.number)
        del line[at]
        if not line:
            del self._lines[key]
        self._depth -= 1
        self._bytes -= waiter.size
        left = self.depth_of(waiter.tenant) - 1
        if left:
            self._of_tenant[waiter.tenant] = left
        else:
            del self._of_tenant[waiter.tenant]

    def place_of(self, waiter: W) -> int:
        """Position from 1 among all that wait for the same model."""
        return 1 + sum(
            bisect.bisect_left(line, waiter.number, key=_number)
            for (_, model), line in self._lines.items()
            if model == waiter.model
        )

    def lines(self) -> list[list[W]]:
        """The lines, oldest head first; each one oldest first. Not to be changed."""
        return sorted(self._lines.values(), key=_head_number)

    def __iter__(self) -> Iterator[W]:
        """All waiters by arrival."""
        return heapq.merge(*map(tuple, self._lines.values()), key=_number)


def _number(waiter: Waiter) -> int:
    return waiter.number


def _head_number(line: list[W]) -> int:
    return line[0].number
