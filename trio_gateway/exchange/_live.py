"""The exchanges that are under way in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import trio

from ..contract import Ending
from ._exchange import Exchange


class LiveExchanges:
    """A set of running exchanges that can be waited for and ended."""

    def __init__(self) -> None:
        self._exchanges: dict[str, Exchange] = {}
        self._empty = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._exchanges)

    def __iter__(self) -> Iterator[Exchange]:
        """All of them, oldest first; safe against changes meanwhile."""
        return iter(tuple(self._exchanges.values()))

    @property
    def buffered(self) -> int:
        """Bytes of answers that wait for clients."""
        return sum(exchange.buffered for exchange in self._exchanges.values())

    @contextlib.contextmanager
    def holding(self, exchange: Exchange) -> Iterator[None]:
        """Count an exchange as running inside the block."""
        self._exchanges[exchange.request.exchange_id] = exchange
        try:
            yield
        finally:
            del self._exchanges[exchange.request.exchange_id]
            if not self._exchanges:
                self._empty.unpark_all()

    def end_all(self, ending: Ending) -> None:
        """End all that run now."""
        for exchange in self:
            exchange.end(ending)

    async def wait_none(self) -> None:
        """Wait until nothing runs."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._exchanges:
            await self._empty.park()
