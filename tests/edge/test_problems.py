"""How a refusal looks to its client: the shape of its API, and headers that say whether to come back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.contract import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Operation
from trio_gateway.edge._problems import problem_body, problem_event, problem_headers
from trio_gateway.errors import CODES, Problem

WHY = Problem.of("invalid_value", "why", param="a.b")
GATEWAY = {"request_id": "x", "retryable": False}


# Headers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("retry_after", [None, 2.5])
def test_every_code_says_whether_and_when_to_come_back(code: str, retry_after: float | None) -> None:
    problem = Problem.of(code, "why", retry_after=None if CODES[code].final else retry_after)
    headers = dict(problem_headers(problem))
    assert len(headers) == len(problem_headers(problem))
    must_say_when = problem.status in (429, 503) and code not in (
        "engine_out_of_memory",
        "operator_cancelled",
    )
    says_when = problem.retry_after is not None or must_say_when
    assert ("retry-after" in headers) is ("retry-after-ms" in headers) is says_when
    assert (headers.get("x-should-retry") == "false") is CODES[code].final
    assert headers.get("www-authenticate") == ("Bearer" if problem.status == 401 else None)
    assert headers.get("upgrade") == ("websocket" if problem.status == 426 else None)


@pytest.mark.parametrize(
    ("seconds", "whole", "milliseconds"),
    [
        (0.0, "1", "1"),
        (0.0004, "1", "1"),
        (0.25, "1", "250"),
        (1.0, "1", "1000"),
        (1.0001, "2", "1000"),
        (59.2, "60", "59200"),
        (3600.0, "3600", "3600000"),
    ],
)
def test_seconds_are_whole_rounded_up_and_at_least_one(seconds: float, whole: str, milliseconds: str) -> None:
    headers = problem_headers(Problem.of("queue_full", "why", retry_after=seconds))
    assert headers == [("retry-after", whole), ("retry-after-ms", milliseconds)]


@given(st.floats(0.0, 3600.0))
def test_whoever_waits_as_long_as_told_has_waited_long_enough(seconds: float) -> None:
    headers = dict(problem_headers(Problem.of("queue_full", "why", retry_after=seconds)))
    assert int(headers["retry-after"]) >= 1
    assert seconds <= int(headers["retry-after"]) < seconds + 1 or seconds < 1
    assert abs(int(headers["retry-after-ms"]) / 1000 - seconds) <= 0.001


def test_a_final_problem_that_names_a_time_names_only_the_time() -> None:
    headers = dict(problem_headers(WHY.but(retry_after=3.0)))
    assert "x-should-retry" not in headers
    assert headers["retry-after"] == "3"


def test_a_problem_s_own_headers_come_last() -> None:
    problem = Problem.of("method_not_allowed", "why", headers=(("allow", "POST"), ("x-request-id", "1")))
    assert problem_headers(problem) == [("x-should-retry", "false"), ("allow", "POST"), ("x-request-id", "1")]


# Bodies -----------------------------------------------------------------------------------------------------


def test_openai_s_shape_has_four_fields() -> None:
    assert json.loads(problem_body(WHY, None)) == {
        "error": {"message": "why", "type": "invalid_request_error", "param": "a.b", "code": "invalid_value"}
    }
    assert json.loads(problem_body(WHY.but(param=None), None))["error"]["param"] is None


def test_an_accepted_exchange_tells_more_of_itself() -> None:
    assert json.loads(problem_body(WHY, {**GATEWAY}))["error"]["gateway"] == GATEWAY
    assert json.loads(problem_body(WHY, {**GATEWAY}, anthropic=True))["error"]["gateway"] == GATEWAY


@pytest.mark.parametrize("text", ['"', "\\", "\u2028", "\u00e9 \U0001f600", "</script>", "a\nb"])
def test_no_text_breaks_out_of_its_string(text: str) -> None:
    assert json.loads(problem_body(WHY.but(message=text, param=text), None))["error"]["message"] == text
    assert b"\n" not in problem_body(WHY.but(message=text), None)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_value", "invalid_request_error"),
        ("invalid_api_key", "authentication_error"),
        ("model_not_allowed", "permission_error"),
        ("model_not_found", "not_found_error"),
        ("request_timeout", "invalid_request_error"),
        ("request_too_large", "request_too_large"),
        ("queue_full", "rate_limit_error"),
        ("internal_error", "api_error"),
        ("engine_failed", "api_error"),
        ("no_worker", "overloaded_error"),
        ("deadline_exceeded", "timeout_error"),
    ],
)
def test_anthropic_s_shape_has_its_own_types(code: str, kind: str) -> None:
    value = json.loads(problem_body(Problem.of(code, "why"), None, anthropic=True))
    assert value == {"type": "error", "error": {"type": kind, "message": "why", "code": code}}


# Events -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [CHAT, COMPLETIONS], ids=lambda o: o.name)
def test_a_stream_of_chunks_ends_with_an_error_without_a_name(operation: Operation) -> None:
    assert problem_event(WHY, {**GATEWAY}, operation, 7) == (None, problem_body(WHY, {**GATEWAY}))


def test_a_stream_of_messages_ends_with_an_error_in_anthropic_s_shape() -> None:
    assert problem_event(WHY, {**GATEWAY}, MESSAGES, 7) == (
        b"error",
        problem_body(WHY, {**GATEWAY}, anthropic=True),
    )


def test_a_stream_of_responses_ends_with_a_numbered_error() -> None:
    name, data = problem_event(WHY, {**GATEWAY}, RESPONSES, 7)
    expected: dict[str, Any] = {"type": "error", "code": "invalid_value", "message": "why", "param": "a.b"}
    expected |= {"sequence_number": 7, "gateway": GATEWAY}
    expected["error"] = json.loads(problem_body(WHY, {**GATEWAY}))["error"]  # what OpenAI's SDK looks at
    assert (name, json.loads(data)) == (b"error", expected)
