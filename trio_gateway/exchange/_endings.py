"""What the client still gets when an exchange ends: the table of contracts 2.9."""

from __future__ import annotations

import enum
from typing import Final

from ..contract import Ending, Outcome
from ..errors import Problem


class Farewell(enum.Enum):
    """How a client is left."""

    NOTHING = enum.auto()  # all is said
    AFTER_ALL = enum.auto()  # every whole event that arrived, then the error
    AT_ONCE = enum.auto()  # unsent events are dropped, then the error
    CUT = enum.auto()  # the connection is closed without a proper end


FAREWELLS: Final[dict[Outcome, Farewell]] = {
    Outcome.COMPLETED: Farewell.NOTHING,
    Outcome.REFUSED: Farewell.AFTER_ALL,
    Outcome.UPSTREAM_FAILED: Farewell.AFTER_ALL,
    Outcome.DEADLINE_EXCEEDED: Farewell.AT_ONCE,
    Outcome.OPERATOR_CANCELLED: Farewell.AT_ONCE,
    Outcome.GATEWAY_SHUTDOWN: Farewell.AT_ONCE,
    Outcome.CLIENT_CANCELLED: Farewell.AT_ONCE,
    Outcome.CLIENT_GONE: Farewell.CUT,
    Outcome.CLIENT_STALLED: Farewell.CUT,
}

FAREWELL_LIMIT: Final = 2.0  # seconds to finish a half-written event and say why

GONE: Final = Ending(Outcome.CLIENT_GONE)
STALLED: Final = Ending(Outcome.CLIENT_STALLED)
COMPLETED: Final = Ending(Outcome.COMPLETED)
TOO_LATE: Final = Ending(
    Outcome.DEADLINE_EXCEEDED, Problem.of("deadline_exceeded", "the deadline of the request passed")
)
BUG: Final = Ending(
    Outcome.UPSTREAM_FAILED,
    Problem.of("internal_error", "the gateway failed; the request id tells where to look"),
)
OWNER: Final = Ending(
    Outcome.CLIENT_CANCELLED, Problem.of("request_cancelled", "the owner of the request cancelled it")
)
OPERATOR: Final = Ending(
    Outcome.OPERATOR_CANCELLED,
    Problem.of("operator_cancelled", "an operator ended the request"),
)
SHUT_DOWN: Final = Ending(
    Outcome.GATEWAY_SHUTDOWN, Problem.of("gateway_draining", "the gateway is shutting down", retry_after=1.0)
)


def ending_of(problem: Problem) -> Ending:
    """Name the outcome of an accepted exchange that ends with ``problem``."""
    if problem.code == "deadline_exceeded":
        return Ending(Outcome.DEADLINE_EXCEEDED, problem)
    if problem.code == "gateway_draining":
        return Ending(Outcome.GATEWAY_SHUTDOWN, problem)
    if problem.status in (502, 504, 500):
        return Ending(Outcome.UPSTREAM_FAILED, problem)
    return Ending(Outcome.REFUSED, problem)
