"""Heads of our answers. All of them say when they were made (RFC 9110 6.6.1)."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache

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
