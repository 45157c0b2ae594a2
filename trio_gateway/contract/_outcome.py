"""How an exchange ended, and what the client had got by then (contracts section 6)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..errors import Problem


class Outcome(enum.StrEnum):
    """The one value with which an exchange is settled."""

    COMPLETED = "completed"
    REFUSED = "refused"
    CLIENT_GONE = "client_gone"
    CLIENT_CANCELLED = "client_cancelled"
    CLIENT_STALLED = "client_stalled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    UPSTREAM_FAILED = "upstream_failed"
    OPERATOR_CANCELLED = "operator_cancelled"
    GATEWAY_SHUTDOWN = "gateway_shutdown"


class Phase(enum.StrEnum):
    """What the client had when the exchange ended."""

    QUEUED = "queued"  # never placed
    BEFORE_HEADERS = "before_headers"  # placed, no byte
    BEFORE_CONTENT = "before_content"  # headers or heartbeats
    AFTER_CONTENT = "after_content"  # committed


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an exchange is over, and what its client is told (None: nothing, or all is said)."""

    outcome: Outcome
    problem: Problem | None = None
