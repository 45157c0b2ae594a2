"""Idle connections per worker. No queue: admission comes first, so nothing ever waits here."""

from __future__ import annotations

from collections.abc import Callable

from ..contract import Worker
from ._connection import Connection


class ConnectionPool:
    """A free list per worker, newest first.

    Engines close idle connections after about 5 s; ours expire earlier.

    Args:
        idle_expiry: seconds.
        now: the clock.
    """

    def __init__(self, idle_expiry: float, now: Callable[[], float]) -> None:
        self._expiry = idle_expiry
        self._now = now
        self._free: dict[str, list[Connection]] = {}

    @property
    def idle(self) -> int:
        """Connections that wait to be used again."""
        return sum(map(len, self._free.values()))

    def take(self, worker: Worker) -> Connection | None:
        """Answer a connection that is still good; the caller owns it."""
        free = self._free.get(worker.id)
        while free:
            connection = free.pop()
            if self._now() - connection.idle_since < self._expiry and not connection.spent:
                return connection
            connection.abort()
        return None

    def give(self, worker: Worker, connection: Connection) -> None:
        """Keep a connection whose last answer ended cleanly."""
        connection.reused = True
        connection.idle_since = self._now()
        self._free.setdefault(worker.id, []).append(connection)

    def overdue(self) -> list[tuple[str, float]]:
        """Name idle connections that should have been closed: worker, and for how many seconds."""
        oldest = self._now() - self._expiry
        return [
            (worker, oldest - connection.idle_since)
            for worker, free in self._free.items()
            for connection in free
            if connection.idle_since < oldest
        ]

    def sweep(self) -> None:
        """Close what has been idle too long; called about once a second."""
        oldest = self._now() - self._expiry
        for worker, free in self._free.items():
            for connection in free:
                if connection.idle_since < oldest:
                    connection.abort()
            self._free[worker] = [c for c in free if c.idle_since >= oldest]

    def close(self) -> None:
        """Close all."""
        for free in self._free.values():
            for connection in free:
                connection.abort()
        self._free.clear()
