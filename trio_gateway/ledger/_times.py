"""How long things took since the process started, as histograms. Pure.

What is measured once a request is counted when it is settled. The gaps between an
engine's events are the only figure that costs something per token: one look into
the bounds and three additions for each read that brought output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ._histogram import LAG_BOUNDS, Histogram
from ._record import Record

MOST_NAMES: Final = 1_000  # of models, and of tenants, that have figures of their own; all others share one
OTHER: Final = "other"

# Those that OpenTelemetry's conventions give for time to first token, and further ones for those who wait.
FIRST_CONTENT_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, 300.0),
)
WAIT_BOUNDS: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
STREAM_BOUNDS: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0)
GAP_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0)
IDLE_BOUNDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0)
HELD_BOUNDS: Final = STREAM_BOUNDS


class Names:
    """Keeps the values of a label to a bounded set.

    Args:
        most: how many names are told apart; those that come later are ``other``.
    """

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Answer the name, or ``other``."""
        known = self._known.get(name)
        if known is None:
            known = name if len(self._known) < self._most else OTHER
            if known is name:
                self._known[name] = name
        return known


@dataclass(slots=True)
class Times:
    """Histograms of seconds.

    Attributes:
        waits: by tier, from arrival until the first worker, of all that were placed.
        first_contents: by model, from arrival until the first content was handed to the client.
        streams: by model, from the first content of a stream until its exchange was over.
        gaps: between two reads of a stream that brought output, while the client keeps up.
        lags: of each batch of bytes that clients took, for how long the oldest of it had waited.
        held: from the placement until the attempt was over.
        idle: from there until the slot was free, where the engine had not been seen to stop.
    """

    waits: dict[str, Histogram] = field(default_factory=dict)
    first_contents: dict[str, Histogram] = field(default_factory=dict)
    streams: dict[str, Histogram] = field(default_factory=dict)
    gaps: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS))
    lags: Histogram = field(default_factory=lambda: Histogram(LAG_BOUNDS))
    held: Histogram = field(default_factory=lambda: Histogram(HELD_BOUNDS))
    idle: Histogram = field(default_factory=lambda: Histogram(IDLE_BOUNDS))

    def settle(self, record: Record, model: str) -> None:
        """Count what a record tells.

        Args:
            model: its name among the labels.
        """
        if record.placed_at is None:
            return
        _of(self.waits, record.tier, WAIT_BOUNDS).see(max(record.placed_at - record.arrived_at, 0.0))
        first = record.first_content_at
        if first is None:
            return
        _of(self.first_contents, model, FIRST_CONTENT_BOUNDS).see(max(first - record.arrived_at, 0.0))
        if record.stream:
            _of(self.streams, model, STREAM_BOUNDS).see(max(record.settled_at - first, 0.0))

    def figures(self) -> dict[str, list[dict[str, Any]]]:
        """Copy all of this moment: by name, one row for each set of labels."""
        by_label = {
            "admission_wait": ("tier", self.waits),
            "time_to_first_content": ("model", self.first_contents),
            "stream_duration": ("model", self.streams),
        }
        rows = {
            name: [histogram.figures({label: value}) for value, histogram in by_value.items()]
            for name, (label, by_value) in by_label.items()
        }
        rows["inter_event_gap"] = [self.gaps.figures({})]
        rows["delivery_lag"] = [self.lags.figures({})]
        rows["lease_held"] = [self.held.figures({"state": "held"}), self.idle.figures({"state": "draining"})]
        rows["cancel_to_idle"] = [self.idle.figures({})]
        return rows


def _of(by_value: dict[str, Histogram], value: str, bounds: tuple[float, ...]) -> Histogram:
    found = by_value.get(value)
    if found is None:
        found = by_value[value] = Histogram(bounds)
    return found
