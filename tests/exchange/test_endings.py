"""What the client still gets, by outcome: the table of farewells, and which outcome a problem is."""

from __future__ import annotations

import pytest

from trio_gateway.contract import Ending, Outcome
from trio_gateway.errors import CODES, Problem
from trio_gateway.exchange._endings import (
    BUG,
    COMPLETED,
    FAREWELL_LIMIT,
    FAREWELLS,
    GONE,
    SHUT_DOWN,
    STALLED,
    TOO_LATE,
    Farewell,
    ending_of,
)


def test_every_outcome_has_its_farewell() -> None:
    assert set(FAREWELLS) == set(Outcome)


@pytest.mark.parametrize(
    ("outcome", "farewell"),
    [
        ("completed", Farewell.NOTHING),
        ("refused", Farewell.AFTER_ALL),
        ("upstream_failed", Farewell.AFTER_ALL),
        ("deadline_exceeded", Farewell.AT_ONCE),
        ("operator_cancelled", Farewell.AT_ONCE),
        ("gateway_shutdown", Farewell.AT_ONCE),
        ("client_cancelled", Farewell.AT_ONCE),
        ("client_gone", Farewell.CUT),
        ("client_stalled", Farewell.CUT),
    ],
)
def test_a_farewell_is_what_the_client_can_still_use(outcome: str, farewell: Farewell) -> None:
    assert FAREWELLS[Outcome(outcome)] is farewell


def test_a_half_written_event_has_two_seconds() -> None:
    assert FAREWELL_LIMIT == 2.0


@pytest.mark.parametrize(
    ("ending", "outcome", "code"),
    [
        (COMPLETED, Outcome.COMPLETED, None),
        (GONE, Outcome.CLIENT_GONE, None),
        (STALLED, Outcome.CLIENT_STALLED, None),
        (TOO_LATE, Outcome.DEADLINE_EXCEEDED, "deadline_exceeded"),
        (BUG, Outcome.UPSTREAM_FAILED, "internal_error"),
        (SHUT_DOWN, Outcome.GATEWAY_SHUTDOWN, "gateway_draining"),
    ],
)
def test_an_ending_says_why_to_those_who_can_still_be_told(
    ending: Ending, outcome: Outcome, code: str | None
) -> None:
    assert ending.outcome is outcome
    assert (ending.problem.code if ending.problem else None) == code
    told = FAREWELLS[outcome] in (Farewell.AFTER_ALL, Farewell.AT_ONCE)
    assert (ending.problem is not None) is told


def test_shutting_down_says_when_to_come_back() -> None:
    assert SHUT_DOWN.problem is not None
    assert SHUT_DOWN.problem.retry_after == 1.0


OUTCOMES = {
    "deadline_exceeded": Outcome.DEADLINE_EXCEEDED,
    "gateway_draining": Outcome.GATEWAY_SHUTDOWN,
    "engine_failed": Outcome.UPSTREAM_FAILED,
    "engine_protocol_error": Outcome.UPSTREAM_FAILED,
    "engine_credentials": Outcome.UPSTREAM_FAILED,
    "first_token_timeout": Outcome.UPSTREAM_FAILED,
    "internal_error": Outcome.UPSTREAM_FAILED,
}


@pytest.mark.parametrize("code", CODES)
def test_a_problem_of_an_accepted_exchange_has_one_outcome(code: str) -> None:
    problem = Problem.of(code, "why")
    assert ending_of(problem) == Ending(OUTCOMES.get(code, Outcome.REFUSED), problem)


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429, 503])
def test_an_engine_s_own_refusal_is_a_refusal(status: int) -> None:
    problem = Problem("an_engine_s_code", "why", status, "its_type", final=True)
    assert ending_of(problem) == Ending(Outcome.REFUSED, problem)
