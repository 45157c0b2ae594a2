"""Reads the file of a recorded exchange, and says what its engine and its client did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from ..exchange import FLIGHT_VERSION
from ..units import MiB
from ._recorded_form import check_form

JUST: Final = 1e-6  # seconds; what is recorded is rounded to as much
MOST_BYTES: Final = 256 * MiB  # that are played
MOST_EVENTS: Final = 1_000_000
STEPS: Final = 256  # in which those are played that were not kept


class UnreadableFlight(ValueError):
    """The file is none, or holds too little to be played."""


class Read(NamedTuple):
    """What moved at a moment: bytes, and events of a stream."""

    at: float
    size: int
    events: int


@dataclass(frozen=True, slots=True)
class Failed:
    """How an attempt failed: when, the word for it, and the problem's status and code."""

    at: float
    reason: str
    status: int
    code: str


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt.

    Attributes:
        placed: when it got its worker, which has a name like ``w1``.
        opened: when the engine's head came, with which status; None: it did not.
        whole: when the answer was whole; None: it never was.
        counts: of its stream: events, those with output, those without at the end, and usage.
    """

    worker: str
    placed: float
    opened: tuple[float, int] | None
    reads: tuple[Read, ...]
    counts: Mapping[str, Any] | None
    whole: float | None
    failed: Failed | None


class Recorded:
    """One recorded exchange.

    Args:
        value: the file, read as JSON.

    Attributes:
        ending: what was settled.
        tries: the attempts in order.
        ended: when it ended, seconds after it arrived.
        sent_back: how often it waited again.
        slow_since: when the client was slow for the first time; infinite: never.
        takes: what it took from then on.

    Raises:
        UnreadableFlight: it can not be played; says why.
    """

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict) or "flight" not in value:
            raise UnreadableFlight("this is no recorded exchange: it has no `flight` version")
        if value["flight"] != FLIGHT_VERSION:
            raise UnreadableFlight(
                f"this recording has version {value['flight']!r}, not the {FLIGHT_VERSION} that is read here"
            )
        if value.get("ending") is None:
            raise UnreadableFlight("the exchange had not ended when it was recorded: there is no ending")
        if value.get("terms") is None:
            raise UnreadableFlight("sizes were not recorded: telemetry.flights was 0")
        try:
            check_form(value)
            self._read(value)
        except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
            raise UnreadableFlight(f"the recording is damaged: {type(error).__name__} {error}") from error

    def _read(self, value: dict[str, Any]) -> None:
        self.id = str(value.get("id", ""))
        self.terms: dict[str, Any] = value["terms"]
        self.limits: dict[str, Any] = self.terms["limits"]
        self.ending: dict[str, Any] = value["ending"]
        steps = [_Step(step["at"], step["what"], step["detail"]) for step in value["steps"]]
        self.steps_lost: int = value["steps_lost"]
        self.ended = next(step.at for step in steps[::-1] if step.what == "ended")
        self.sent_back = sum(step.what == "sent_back" for step in steps)
        self.tries = tuple(_tries(steps, value["reads"]))
        if len(self.tries) != self.ending["attempts"]:
            raise ValueError("not all of its attempts are recorded")
        reads = [read for each in self.tries for read in each.reads]
        if sum(read.size for read in reads) > MOST_BYTES or sum(read.events for read in reads) > MOST_EVENTS:
            raise ValueError("more than can be played")
        takes = value["takes"]
        self.slow_since: float = math.inf if takes is None else takes["since"]
        self._waited: int = 0 if takes is None else takes["waited"]
        self.takes = () if takes is None else tuple(_reads(takes))

    @property
    def events(self) -> int:
        """Events for the client, of the last attempt."""
        counts = self.tries[-1].counts if self.tries else None
        return 0 if counts is None else counts["events"]

    @property
    def taken_before(self) -> int:
        """Bytes that the client had taken when it was slow for the first time."""
        latest = self.slow_since + JUST
        come = sum(read.size for each in self.tries for read in each.reads if read.at <= latest)
        return max(come - self._waited, 0)

    @property
    def slow_block_at(self) -> float:
        """When that came which it did not take at once."""
        latest = self.slow_since + JUST
        times = [read.at for each in self.tries for read in each.reads]
        times += [each.whole for each in self.tries if each.whole is not None]
        times += [each.failed.at for each in self.tries if each.failed is not None]
        return max((at for at in times if at <= latest), default=self.slow_since)


class _Step(NamedTuple):
    at: float
    what: str
    detail: dict[str, Any]


def _tries(steps: list[_Step], reads: list[dict[str, Any]]) -> Iterator[Try]:
    starts = [number for number, step in enumerate(steps) if step.what == "placed"]
    for number, (start, track) in enumerate(zip(starts, reads, strict=True)):
        own = steps[start : starts[number + 1] if number + 1 < len(starts) else None]
        opened = _first(own, "opened")
        failed = _first(own, "attempt_failed")
        buffered = _first(own, "last_content") or _first(own, "first_content")
        yield Try(
            own[0].detail["worker"],
            own[0].at,
            None if opened is None else (opened.at, opened.detail["status"]),
            tuple(_reads(track)),
            track["counts"],
            None if failed is not None or not _is_whole(own) or buffered is None else buffered.at,
            None if failed is None else Failed(failed.at, **_without(failed.detail, "worker")),
        )


def _first(steps: list[_Step], what: str) -> _Step | None:
    return next((step for step in steps if step.what == what), None)


def _is_whole(steps: list[_Step]) -> bool:
    first = _first(steps, "first_content")
    return _first(steps, "last_content") is not None or (first is not None and "bytes" in first.detail)


def _without(detail: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in detail.items() if key != name}


def _reads(track: dict[str, Any]) -> Iterator[Read]:
    """Answer what moved; those rows that were not kept as if they had come evenly."""
    since, rows = track["since"], track["rows"]
    if not rows:
        return
    if any(before[0] > row[0] or before[2] > row[2] for before, row in pairwise(rows)):
        raise ValueError("what moved is not in order")
    at, size, events = rows[0]
    come = 0
    if since is not None and at > since + JUST:
        more = rows[-1][2] - events
        each = sum(row[1] for row in rows[1:]) / more if more else 0.0
        come = events - (max(min(round(size / each), events), 1) if each else events)
        yield from _evenly(since, at, come, each)
    for at, size, events in rows:
        yield Read(at, size, events - come)
        come = events


def _evenly(since: float, until: float, events: int, each: float) -> Iterator[Read]:
    """Spread events of so many bytes each over a time."""
    steps, come = min(events, STEPS), 0
    for step in range(1, steps + 1):
        come, before = events * step // steps, come
        yield Read(since + (until - since) * (step - 1) / steps, round(each * (come - before)), come - before)
