"""How often a figure was how large, in a few buckets. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, Final

LAG_BOUNDS: Final = (0.01, 0.1, 1.0, 5.0, 30.0, 120.0)  # seconds; the last ones are when clients are cut off


class Histogram:
    """Counts by size.

    Args:
        bounds: of the buckets, each included in its bucket, in rising order; there is one more above them.

    Attributes:
        total: of all that was seen, the sum.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        """How many were seen."""
        return sum(self._counts)

    def see(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def see_all(self, values: Sequence[float]) -> None:
        """Count several values. Each token of a stream brings one: hence so little."""
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)

    def see_often(self, value: float, times: int) -> None:
        """Count a value that came so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Yield each bound with how many values were not above it, as Prometheus wants them."""
        below = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            yield bound, below

    def figures(self, labels: dict[str, str]) -> dict[str, Any]:
        """Copy what was counted, cheaply: each bucket alone, the last one above all bounds."""
        return {
            "labels": labels,
            "bounds": self._bounds,
            "counts": self._counts.copy(),
            "seconds": self.total,
        }
