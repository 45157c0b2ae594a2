"""The form of a recorded exchange's file, as far as it is played: what has another is damaged."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0, le=1e8)]
Count = Annotated[int, Meta(ge=0, le=2**53)]


class _Limits(Struct):
    stall_timeout: Seconds
    max_lag: Seconds
    heartbeat_after: Seconds
    max_attempts: Count
    buffer_bytes: Count
    heartbeat_while_queued: bool
    merge_deltas: bool
    first_token: Seconds
    between_events: Seconds
    event_bytes: Count
    answer_bytes: Count


class _Terms(Struct):
    operation: str
    stream: bool
    deadline: Seconds
    full_timeout: Seconds | None
    kept: Count
    limits: _Limits


class _Step(Struct):
    at: Seconds
    what: str
    detail: dict[str, str | float | bool]


class _Counts(Struct):
    events: Count
    content: Count
    silent: Count
    usage: tuple[Count | None, Count | None]


class _Track(Struct, kw_only=True):
    since: Seconds | None
    rows: list[tuple[Seconds, Count, Count]]
    counts: _Counts | None


class _Takes(_Track, kw_only=True):
    since: Seconds
    waited: Count


class _Ending(Struct):
    outcome: str
    phase: str
    code: str | None
    status: Count | None
    attempts: Count
    events_delivered: Count | None
    tokens_prompt: Count | None
    tokens_generated: Count | None
    tokens_delivered: Count | None
    usage_source: str | None


class _File(Struct):
    terms: _Terms
    steps: list[_Step]
    steps_lost: Count
    reads: list[_Track]
    takes: _Takes | None
    ending: _Ending
    id: str = ""


def check_form(value: object) -> None:
    """Look at every member that is played; others may be there.

    Raises:
        ValueError: one is missing, or is no value of its kind; says where.
    """
    try:
        msgspec.convert(value, _File)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
