"""What was recorded of an exchange, as a file that can be played again: times, sizes and causes, no content.

Times are seconds after the request arrived, workers have numbers instead of names: the file says nothing of
the machine, the tenant or the key. `trio_gateway.testing` reads it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from ._flight import Flight, Track

FLIGHT_VERSION: Final = 1
PLACES: Final = 6  # of seconds after the point
_ENDING: Final = (
    "outcome",
    "phase",
    "code",
    "status",
    "attempts",
    "events_delivered",
    "bytes_delivered",
    "tokens_prompt",
    "tokens_generated",
    "tokens_delivered",
    "usage_source",
)


def flight_file(exchange_id: str, flight: Flight) -> dict[str, Any]:
    """Answer the file as a JSON value; until it has ended there is nothing to compare a replay with."""
    steps, record = list(flight), flight.record
    arrived = steps[0].at
    numbers = _Numbers()
    return {
        "flight": FLIGHT_VERSION,
        "id": exchange_id,
        "terms": None if flight.terms is None else _terms(flight),
        "steps": [
            {"at": _after(arrived, step.at), "what": step.what, "detail": numbers.of(step.detail)}
            for step in steps
        ],
        "steps_lost": flight.lost,
        "reads": [_track(track, arrived) for track in flight.reads],
        "takes": None if flight.takes is None else {"waited": flight.waited, **_track(flight.takes, arrived)},
        "ending": None if record is None else {name: getattr(record, name) for name in _ENDING},
    }


class _Numbers:
    """Puts numbers in the place of workers' names, in the order in which they were tried."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, detail: dict[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in detail.items() if value is not None}
        if "worker" in found:
            found["worker"] = self._known.setdefault(found["worker"], f"w{len(self._known) + 1}")
        return found


def _terms(flight: Flight) -> dict[str, Any]:
    assert flight.terms is not None
    asked = flight.terms._asdict()
    limits, of_attempts = asked.pop("limits")
    found = {**dataclasses.asdict(limits), **dataclasses.asdict(of_attempts)}
    return {**asked, "limits": {**found.pop("delivery"), **found}}


def _track(track: Track, arrived: float) -> dict[str, Any]:
    return {
        "since": None if track.since is None else _after(arrived, track.since),
        "rows": [[_after(arrived, at), size, events] for at, size, events in track.rows],
        "counts": None if track.counts is None else track.counts._asdict(),
    }


def _after(arrived: float, moment: float) -> float:
    return round(moment - arrived, PLACES)
