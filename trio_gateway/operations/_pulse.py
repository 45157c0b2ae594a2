"""What the live feed tells every second: rates since it last told, and how long requests took lately.

Making a snapshot walks once over what is under way and asks no kernel and no lock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import trio

from ..admin import Row
from ._house import House
from ._standing import short_row

LATELY: Final = 60.0  # seconds; what ended longer ago says nothing of now
AT_LEAST: Final = 0.1  # seconds between two snapshots from which rates can be told


class Pulse:
    """Makes snapshots, one after the other."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._at = trio.current_time()
        self._ended = 0
        self._generated: Counter[str] = Counter()
        self._gaps_before: list[int] | None = None
        self._gaps: tuple[Sequence[float], list[int]] = ((), [0])
        self._rates: tuple[float, dict[str, float]] = (0.0, {})

    def snapshot(self) -> Row:
        """Answer how it stands now."""
        house, now = self._house, trio.current_time()
        books = house.books
        requests_rate, service = self._measure(now)
        waits, firsts = self._took()
        bounds, gaps = self._gaps
        return {
            "at": round(now - house.started, 3),
            "throughput": {
                "requests_per_second": round(requests_rate, 3),
                "tokens_per_second": round(sum(service.values()), 3),
            },
            "waiting": books.waiting,
            "running": books.running,
            "wait_p50": quantile(waits, 0.5),
            "wait_p99": quantile(waits, 0.99),
            "ttfc_p50": quantile(firsts, 0.5),
            "ttfc_p99": quantile(firsts, 0.99),
            "gap_p50": bucket_quantile(bounds, gaps, 0.5),
            "gap_p99": bucket_quantile(bounds, gaps, 0.99),
            "buffered_bytes": house.buffers.used,
            "refusals": dict(books.turned_away),
            "service": {tenant: round(rate, 3) for tenant, rate in service.items()},
            "workers": [short_row(book, now) for book in house.fleet.books.values()],
            "ready": house.not_ready() is None,
            "stopping": house.stopping is not None,
        }

    def _measure(self, now: float) -> tuple[float, dict[str, float]]:
        """Answer requests that ended, and tokens by tenant, a second since the last snapshot."""
        passed = now - self._at
        if passed >= AT_LEAST:
            ended, generated = sum(self._house.books.outcomes.values()), self._tokens()
            rates = {
                tenant: max(count - self._generated[tenant], 0) / passed
                for tenant, count in generated.items()
            }
            self._rates = (ended - self._ended) / passed, rates
            self._at, self._ended, self._generated = now, ended, generated
            self._see_gaps()
        return self._rates

    def _see_gaps(self) -> None:
        """Count the gaps between events since the last snapshot, by size."""
        figures = self._house.books.times.gaps.figures({})
        counts: list[int] = figures["counts"]
        before = self._gaps_before or [0] * len(counts)
        self._gaps = figures["bounds"], [now - then for now, then in zip(counts, before, strict=True)]
        self._gaps_before = counts

    def _tokens(self) -> Counter[str]:
        """Tokens that engines made for each tenant, of ended requests and of those under way."""
        made: Counter[str] = Counter()
        for (tenant, _, kind), count in self._house.books.tokens.items():
            if kind == "generated":
                made[tenant] += count
        for exchange in self._house.live:
            made[exchange.request.tenant] += exchange.generated
        return made

    def _took(self) -> tuple[list[float], list[float]]:
        """Seconds until placement, and until the first content, of what ended lately."""
        since = self._house.parts.attempts.wall() - LATELY
        lately = [record for record in self._house.books.recent if record.settled_at >= since]
        return (
            sorted(_between(record.arrived_at, record.placed_at) for record in lately if record.placed_at),
            sorted(
                _between(record.arrived_at, record.first_content_at)
                for record in lately
                if record.first_content_at
            ),
        )


def _between(start: float, end: float | None) -> float:
    return max((end or start) - start, 0.0)


def bucket_quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Answer the bound that so many of what was counted in buckets are not above; None: nothing was.

    Above all bounds the last of them is answered: it is at least that.
    """
    wanted, below = share * sum(counts), 0
    if not sum(counts):
        return None
    for bound, count in zip(bounds, counts, strict=False):
        below += count
        if below >= wanted:
            return bound
    return bounds[-1]


def quantile(values: Sequence[float], share: float) -> float | None:
    """Answer the least of sorted values that so many are not above; None: there are none."""
    return round(values[max(math.ceil(share * len(values)) - 1, 0)], 6) if values else None
