"""The exchanges that are under way in this process."""

from __future__ import annotations

import heapq
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import trio

from ..contract import Ending, Outcome, Worker
from ..flow import ByteChannel, in_steps
from ._exchange import Exchange
from ._flight import Flight

REMEMBERED: Final = 60.0  # seconds after its end in which an exchange can be asked for
MOST_REMEMBERED: Final = 100_000
_COMPLETED: Final = Outcome.COMPLETED.value
_TOLD: Final = 64  # exchanges whose progress is told in one step
FLIGHTS: Final = 256  # of ended exchanges; the ledger's books keep as many records


class Standing(NamedTuple):
    """Where an exchange stands, as its owner may see it.

    Attributes:
        state: ``waiting``, ``running`` or ``ended``.
        position: in the queue, from 1.
        eta: seconds until it will probably be placed.
    """

    tenant: str
    state: str
    position: int | None = None
    eta: float | None = None
    outcome: str | None = None


class LiveExchanges:
    """Running exchanges, to be found, waited for and ended; the ended are remembered a while.

    Args:
        flights: of how many exchanges that completed, and of as many that did not, it is kept what happened
            to them: a flood of good ones does not push out the incident.
    """

    def __init__(self, flights: int = FLIGHTS) -> None:
        self._most_flights = flights
        self._flights_of_others: OrderedDict[str, Flight] = OrderedDict()
        self._exchanges: dict[str, Exchange] = {}
        self._ended: OrderedDict[str, tuple[float, Standing]] = OrderedDict()
        self._channels: dict[str, weakref.ref[ByteChannel]] = {}  # of the ended, if anybody still has them
        self._flights: OrderedDict[str, Flight] = OrderedDict()
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

    def most_buffered(self) -> tuple[int, int]:
        """Answer the bytes that wait for one client: the most, and what 99 of 100 are not above."""
        count = len(self._exchanges)
        sizes = heapq.nlargest(count // 100 + 1, (each.buffered for each in self._exchanges.values()))
        return (sizes[0], sizes[-1]) if sizes else (0, 0)

    @property
    def held_up(self) -> int:
        """How many have an engine that is not read now, because their client is slow."""
        return sum(exchange.held_up for exchange in self._exchanges.values())

    def holding(self, exchange: Exchange) -> _Holding:
        """Count an exchange as running inside the ``with`` block."""
        return _Holding(self, exchange)

    def begin(self, exchange: Exchange) -> None:
        """Count an exchange as running from now on."""
        self._exchanges[exchange.request.exchange_id] = exchange

    def over(self, exchange: Exchange) -> None:
        """It runs no more; it is remembered for a while."""
        del self._exchanges[exchange.request.exchange_id]
        self._remember(exchange)
        if not self._exchanges:
            self._empty.unpark_all()

    def standing(self, exchange_id: str) -> Standing | None:
        """Tell where an exchange stands; None: nobody knows it."""
        exchange = self._exchanges.get(exchange_id)
        if exchange is not None:
            return Standing(exchange.request.tenant, *exchange.standing())
        self.forget_old()
        found = self._ended.get(exchange_id)
        return None if found is None else found[1]

    def find(self, exchange_id: str) -> Exchange | None:
        """Answer an exchange that is under way."""
        return self._exchanges.get(exchange_id)

    def flight(self, exchange_id: str) -> Flight | None:
        """Answer what happened to an exchange that is under way, or among the last that were."""
        exchange = self._exchanges.get(exchange_id)
        if exchange is not None:
            return exchange.flight
        return self._flights.get(exchange_id) or self._flights_of_others.get(exchange_id)

    def ended_for(self, exchange_id: str, now: float) -> float | None:
        """Seconds since an exchange ended; None: it is under way, or ended longer ago than is remembered."""
        found = self._ended.get(exchange_id)
        return None if found is None else now - found[0]

    def debts(self, now: float) -> list[tuple[str, float, int]]:
        """Name ended exchanges whose channel holds bytes: id, seconds since the end, and bytes."""
        found = []
        for exchange_id, channel_of in self._channels.items():
            channel, ended = channel_of(), self.ended_for(exchange_id, now)
            if channel is not None and channel.used and ended is not None:
                found.append((exchange_id, ended, channel.used))
        return found

    def end(self, exchange_id: str, ending: Ending) -> None:
        """End one exchange, if it runs."""
        exchange = self._exchanges.get(exchange_id)
        if exchange is not None:
            exchange.end(ending)

    def forget_old(self) -> None:
        """Forget who ended long ago."""
        self._forget_until(trio.current_time() - REMEMBERED)

    def _forget_until(self, oldest: float) -> None:
        while self._ended and (
            next(iter(self._ended.values()))[0] < oldest or len(self._ended) > MOST_REMEMBERED
        ):
            self._channels.pop(self._ended.popitem(last=False)[0], None)

    def _remember(self, exchange: Exchange) -> None:
        if exchange.accepted:
            outcome = exchange.ending.outcome.value if exchange.ending is not None else None
            standing = Standing(exchange.request.tenant, "ended", outcome=outcome)
            now, id_ = trio.current_time(), exchange.request.exchange_id
            self._forget_until(now - REMEMBERED)
            self._ended[id_] = (now, standing)
            self._channels[id_] = weakref.ref(exchange.channel)
            flights = self._flights if outcome == _COMPLETED else self._flights_of_others
            flights[id_] = exchange.flight
            if len(flights) > self._most_flights:
                flights.popitem(last=False)

    async def tell_progress(self, progressed: Callable[[Worker, str, float, int | None], None]) -> None:
        """Tell how far the streams have come that are being read: worker, exchange, when, and new events.

        None for the events: it is not read for a while, since its reader is slow.
        """

        def tell(exchange: Exchange) -> None:
            found = exchange.take_progress()
            if found is not None:
                worker, at, events = found
                progressed(worker, exchange.request.exchange_id, at, events)

        await in_steps(map(tell, tuple(self)), _TOLD)

    def end_all(self, ending: Ending) -> None:
        """End all that run now."""
        for exchange in self:
            exchange.end(ending)

    async def wait_none(self) -> None:
        """Wait until nothing runs."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._exchanges:
            await self._empty.park()


class _Holding:
    """Counts an exchange as running inside the block; as a generator it would cost four times as much."""

    __slots__ = ("_exchange", "_live")

    def __init__(self, live: LiveExchanges, exchange: Exchange) -> None:
        self._live = live
        self._exchange = exchange

    def __enter__(self) -> None:
        self._live.begin(self._exchange)

    def __exit__(self, *exc: object) -> None:
        self._live.over(self._exchange)
