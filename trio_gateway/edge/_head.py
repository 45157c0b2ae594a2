"""Heads of our answers. All of them say when they were made (RFC 9110 6.6.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache

from ..contract import RateStanding
from ..wire import write_response_head


def answer_head(status: int, headers: list[tuple[str, str]]) -> bytes:
    """Write the head of an answer that leaves now; ``headers`` are ours, in latin-1 without line ends."""
    return write_response_head(status, [("date", http_date(int(time.time()))), *headers])


@lru_cache(maxsize=1)
def http_date(second: int) -> str:
    """Write a time as an IMF-fixdate (RFC 9110 5.6.7), once for all answers of a second.

    Args:
        second: since the epoch.
    """
    return formatdate(second, usegmt=True)


def rate_headers(standings: Iterable[RateStanding]) -> tuple[tuple[str, str], ...]:
    """Write what is left of a minute's amounts as OpenAI does."""
    headers: list[tuple[str, str]] = []
    for standing in standings:
        limit, left, reset = str(standing.limit), str(standing.remaining), go_duration(standing.reset)
        if standing.kind == "requests":
            headers += [
                ("x-ratelimit-limit-requests", limit),
                ("x-ratelimit-remaining-requests", left),
                ("x-ratelimit-reset-requests", reset),
            ]
        else:
            headers += [
                ("x-ratelimit-limit-tokens", limit),
                ("x-ratelimit-remaining-tokens", left),
                ("x-ratelimit-reset-tokens", reset),
            ]
    return tuple(headers)


def go_duration(seconds: float) -> str:
    """Write a duration as OpenAI does (``20ms``, ``1.5s``, ``6m0s``), rounded up to milliseconds."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
