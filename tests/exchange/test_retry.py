"""What a failed attempt means: the table of failures, row by row, for what one attempt can tell."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.errors import CODES, Problem, UpstreamFailed, UpstreamFault
from trio_gateway.exchange import RetryBudget
from trio_gateway.exchange._retry import (
    ABORTED,
    CUT,
    FIRST_TOKEN,
    NO_PROGRESS,
    WRONG_TYPE,
    Failure,
    Way,
    not_possible,
    of_error,
    of_transport,
    read_retry_after,
    secrets_of,
)
from trio_gateway.testing import make_worker
from trio_gateway.wire import EngineError

REASONS = {
    "aborted",
    "broken",
    "content_type",
    "credentials",
    "cut",
    "error",
    "first_token",
    "invalid",
    "malformed",
    "no_progress",
    "not_found",
    "not_possible",
    "out_of_memory",
    "overloaded",
    "too_large",
    "unreachable",
}


def judged(failure: Failure) -> tuple[Way, bool, bool, int, str]:
    """A failure's row: the way, whether fault, whether rejection, and what the caller is told at last."""
    problem = failure.problem
    assert failure.reason in REASONS
    return failure.way, failure.fault, failure.rejected, problem.status, problem.code


# No answer that could be read -------------------------------------------------------------------------------

UNREACHABLE = (Way.ELSEWHERE, True, False, 502, "engine_failed")
FAULT = (Way.ONCE, True, False, 502, "engine_failed")
PROTOCOL_FAULT = (Way.ONCE, True, False, 502, "engine_protocol_error")


@pytest.mark.parametrize(
    ("fault", "row"),
    [
        (UpstreamFault.UNREACHABLE, UNREACHABLE),
        (UpstreamFault.BROKEN, FAULT),
        (UpstreamFault.MALFORMED, PROTOCOL_FAULT),
        # A larger answer would be as large the next time; it is no fault of the worker.
        (UpstreamFault.TOO_LARGE, (Way.NOWHERE, False, False, 502, "engine_protocol_error")),
    ],
)
def test_an_answer_that_could_not_be_read_is_judged_by_what_was_seen_of_it(
    fault: UpstreamFault, row: tuple[Way, bool, bool, int, str]
) -> None:
    failure = of_transport(UpstreamFailed(fault, "secret.internal:8000: connection refused"))
    assert judged(failure) == row
    assert "internal:" not in failure.problem.message
    assert "refused" not in failure.problem.message


@pytest.mark.parametrize(
    ("failure", "row"),
    [
        (CUT, FAULT),
        (NO_PROGRESS, FAULT),
        (WRONG_TYPE, PROTOCOL_FAULT),
        (FIRST_TOKEN, (Way.ONCE, True, False, 504, "first_token_timeout")),
        (ABORTED, (Way.ANYWHERE, False, True, 503, "engine_overloaded")),
    ],
    ids=["cut", "no progress", "wrong type", "first token", "aborted"],
)
def test_an_answer_that_ended_or_began_wrongly_has_its_row(
    failure: Failure, row: tuple[Way, bool, bool, int, str]
) -> None:
    assert judged(failure) == row
    assert failure.retry_after is None


# The engine's own errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 502, 504, 505, 507, 599, 424])
def test_a_failing_engine_is_tried_once_elsewhere(status: int) -> None:
    failure = of_error(EngineError(status, "secret traceback", "t", "c", "p"))
    assert judged(failure) == FAULT
    assert (failure.problem.message, failure.problem.param) == ("the engine failed", None)


@pytest.mark.parametrize("status", [200, 201, 204, 206, 600, 999])
def test_a_status_that_means_nothing_here_is_a_failure(status: int) -> None:
    assert judged(of_error(EngineError(status))) == FAULT


def test_what_no_other_worker_would_do_better_is_not_tried_again() -> None:
    failure = of_error(EngineError(500, final=True))
    assert (failure.way, failure.fault, failure.problem.code) == (Way.NOWHERE, True, "engine_failed")


def test_a_stream_that_could_not_be_read_is_a_protocol_error() -> None:
    failure = of_error(EngineError(502, "an event is not valid JSON", code="engine_protocol_error"))
    assert judged(failure) == PROTOCOL_FAULT


@pytest.mark.parametrize("retry_after", [None, 0.0, 7.0])
def test_no_room_is_unexecuted_and_no_fault(retry_after: float | None) -> None:
    busy = of_error(EngineError(503, "secret state of the engine"), retry_after)
    assert judged(busy) == (Way.ANYWHERE, False, True, 503, "engine_overloaded")
    assert busy.problem.type == "overloaded_error"
    assert "secret" not in busy.problem.message
    assert busy.retry_after == retry_after

    limited = of_error(EngineError(429, "slow down"), retry_after)
    assert judged(limited) == (Way.ANYWHERE, False, True, 429, "engine_overloaded")
    assert (limited.problem.type, limited.problem.message) == ("rate_limit_error", "slow down")
    assert limited.retry_after == retry_after
    assert of_error(EngineError(429)).problem.message == "the engine has no room"


def test_what_an_engine_gave_up_is_unexecuted() -> None:
    assert of_error(EngineError(503, gave_up=True)) == ABORTED


def test_an_unknown_model_is_tried_elsewhere_and_told_in_the_engine_s_words() -> None:
    failure = of_error(EngineError(404, "no such model", "NotFoundError", None, "model"))
    assert judged(failure) == (Way.ELSEWHERE, False, False, 404, "model_not_found")
    assert failure.problem == Problem(
        "model_not_found", "no such model", 404, "NotFoundError", "model", final=True
    )


@pytest.mark.parametrize(
    ("message", "lacks"),
    [
        ("The model `x` does not exist.", True),
        ("model 'x' not found", True),
        ("no such MODEL", True),
        ("Response with id 'r1' not found.", False),
        ("Response with id 'the model' not found.", False),
        ('Response with id "r\' model" not found.', False),
    ],
)
def test_a_worker_lacks_a_model_only_if_the_engine_says_so_and_not_its_caller(
    message: str, lacks: bool
) -> None:
    failure = of_error(EngineError(404, message))
    assert (failure.way, failure.signal) == (Way.ELSEWHERE, "model_not_loaded" if lacks else "")


@pytest.mark.parametrize("status", [400, 402, 405, 409, 410, 413, 415, 422, 451, 499])
def test_what_the_caller_did_wrong_is_final_and_no_fault(status: int) -> None:
    failure = of_error(EngineError(status, "m", "its_type", "its_code", "its_param"))
    assert judged(failure) == (Way.NOWHERE, False, False, status, "its_code")
    assert failure.problem == Problem("its_code", "m", status, "its_type", "its_param", final=True)


def test_not_implemented_is_the_caller_s_400() -> None:
    failure = of_error(EngineError(501, "no such parameter"))
    assert judged(failure) == (Way.NOWHERE, False, False, 400, "invalid_value")


@pytest.mark.parametrize("status", [300, 301, 302, 307, 308, 399, 401, 403])
def test_credentials_and_redirects_are_our_fault_and_not_told(status: int) -> None:
    failure = of_error(EngineError(status, "key sk-secret is wrong", "t", "c", "p"))
    assert judged(failure) == (Way.NOWHERE, False, False, 502, "engine_credentials")
    assert failure.problem == Problem.of("engine_credentials", "the gateway could not use the worker")


@pytest.mark.parametrize("status", [500, 502, 503, 507])
def test_out_of_memory_is_not_retried_and_says_what_helps(status: int) -> None:
    failure = of_error(EngineError(status, "CUDA out of memory at 0xdeadbeef", out_of_memory=True), 5.0)
    assert judged(failure) == (Way.NOWHERE, False, False, 503, "engine_out_of_memory")
    assert "max_tokens" in failure.problem.message
    assert "CUDA" not in failure.problem.message
    assert failure.problem.final
    assert failure.problem.retry_after is None


def test_a_caller_s_mistake_that_speaks_of_memory_stays_one() -> None:
    failure = of_error(EngineError(400, "the prompt says: out of memory", out_of_memory=True))
    assert judged(failure) == (Way.NOWHERE, False, False, 400, "invalid_value")


def test_what_one_kind_of_engine_can_not_be_asked_for_another_may_do() -> None:
    problem = Problem.of("invalid_value", "no such thing here", param="n")
    failure = not_possible(problem)
    assert judged(failure) == (Way.ELSEWHERE, False, False, 400, "invalid_value")
    assert failure.problem is problem


# The words of what is passed on -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (400, "", "invalid_value"),
        (400, "This model's maximum context length is 8 tokens", "context_length_exceeded"),
        (400, "the request exceeds the available context size", "context_length_exceeded"),
        (400, "the context is odd", "invalid_value"),
        (400, "length is odd", "invalid_value"),
        (422, "maximum context length", "invalid_value"),
        (404, "", "model_not_found"),
        (404, "Response with id 'the model' not found.", "previous_response_not_found"),
        (404, "The model `response` does not exist.", "model_not_found"),
        (408, "", "request_timeout"),
        (413, "", "request_too_large"),
        (415, "", "invalid_value"),
    ],
)
def test_an_engine_without_a_code_gets_one_of_ours(status: int, message: str, code: str) -> None:
    problem = of_error(EngineError(status, message)).problem
    assert (problem.code, problem.type) == (code, CODES[code].type)
    assert problem.message == (message or f"the engine refused the request with status {status}")


@pytest.mark.parametrize(
    ("label", "kept"), [("BadRequestError", True), ("400", False), ("", False), (None, False)]
)
def test_a_number_is_no_name_for_an_error(label: str | None, kept: bool) -> None:
    problem = of_error(EngineError(400, "m", label, label)).problem
    assert problem.code == (label if kept else "invalid_value")
    assert problem.type == (label if kept else "invalid_request_error")


@given(
    status=st.integers(100, 999),
    message=st.text(max_size=5),
    label=st.none() | st.text(max_size=5),
    memory=st.booleans(),
    gave_up=st.booleans(),
)
def test_every_error_has_a_row(
    status: int, message: str, label: str | None, memory: bool, gave_up: bool
) -> None:
    failure = of_error(EngineError(status, message, label, label, label, memory, gave_up))
    way, fault, rejected, told, _ = judged(failure)
    assert 400 <= told < 600
    # Only what may have been executed is a fault, and only such a retry is paid for.
    assert fault is (way is Way.ONCE)
    assert rejected is (way is Way.ANYWHERE)
    assert not (rejected and fault)
    assert failure.problem.message


# Retry-After ------------------------------------------------------------------------------------------------

WALL = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT


@pytest.fixture
def far_from_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process runs where clocks show another hour."""
    monkeypatch.setenv("TZ", "XXX+7")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"0", 0.0),
        (b"7", 7.0),
        (b" 7 ", 7.0),
        (b"3600", 3600.0),
        (b"0000000000000000007", 7.0),
        (b"Tue, 14 Nov 2023 22:13:50 GMT", 30.0),
        (b"Tuesday, 14-Nov-23 22:13:50 GMT", 30.0),
        (b"Tue Nov 14 22:13:50 2023", 30.0),
        (b"Tue, 14 Nov 2023 22:13:50 -0000", 30.0),
        (b"Tue, 14 Nov 2023 22:13:50", 30.0),
        (b"Tue, 14 Nov 2023 23:13:20 GMT", 3600.0),
        (b"Tue, 14 Nov 2023 22:13:19 GMT", 0.0),
        (b"Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
    ],
)
@pytest.mark.usefixtures("far_from_greenwich")
def test_retry_after_is_seconds_or_a_date_in_greenwich(value: bytes, seconds: float) -> None:
    assert read_retry_after(value, WALL) == seconds


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b" ",
        b"-1",
        b"+1",
        b"1.5",
        b"1e3",
        b"7s",
        b"soon",
        b"\xb2",
        "\u0667".encode(),
        b"3601",
        b"9" * 5000,
        b"Tue, 14 Nov 2023 23:13:21 GMT",
        b"Tue, 14 Nov 2033 22:13:20 GMT",
        b"Tue, 99 Nov 2023 22:13:20 GMT",
        b"Tue, 14 Nov 99999 22:13:20 GMT",
        b"Fri, 31 Dec 9999 23:59:59 -2300",
    ],
)
def test_what_is_neither_or_far_away_counts_as_absent(value: bytes | None) -> None:
    assert read_retry_after(value, WALL) is None


@given(
    st.one_of(
        st.binary(), st.text("0123456789 ,:+-ADEGJMNOSTUVacdeghilnoprtuvy", max_size=40).map(str.encode)
    )
)
def test_any_retry_after_is_at_most_an_hour_or_none(value: bytes) -> None:
    seconds = read_retry_after(value, WALL)
    assert seconds is None or 0.0 <= seconds <= 3600.0


# Secrets ----------------------------------------------------------------------------------------------------


def test_a_worker_s_key_and_addresses_are_secrets() -> None:
    url = "https://10.0.0.5:8000/v1"
    worker = make_worker(url=url, host="10.0.0.5", port=8000, authority="10.0.0.5:8000", api_key="sk-secret")
    assert set(secrets_of(worker)) == {"sk-secret", url, "10.0.0.5:8000", "10.0.0.5"}


@pytest.mark.parametrize(
    ("host", "hidden"), [("gpu-0.internal", True), ("fd00::5", True), ("localhost", False), ("w", False)]
)
def test_a_host_that_is_a_plain_word_is_no_secret(host: str, hidden: bool) -> None:
    worker = make_worker(url=f"http://{host}:1", host=host, port=1, authority=f"{host}:1")
    assert (host in secrets_of(worker)) is hidden
    assert f"{host}:1" in secrets_of(worker)


def test_the_path_of_a_socket_is_a_secret() -> None:
    worker = make_worker(
        url="http+unix:///run/e.sock", host="", port=0, authority="localhost", socket_path="/run/e.sock"
    )
    assert set(secrets_of(worker)) == {"http+unix:///run/e.sock", "/run/e.sock", "localhost"}


@given(st.text("abc.:/", min_size=1, max_size=6), st.integers(1, 65535))
def test_no_secret_stands_behind_a_part_of_it(host: str, port: int) -> None:
    """They are replaced in order: a part that went first would leave the rest to be seen."""
    authority = f"{host}:{port}"
    secrets = secrets_of(make_worker(url=f"http://{authority}", host=host, port=port, authority=authority))
    for at, text in enumerate(secrets):
        assert not any(earlier in text and earlier != text for earlier in secrets[:at])


# The budget -------------------------------------------------------------------------------------------------


def test_a_full_budget_pays_for_ten_retries_at_once() -> None:
    budget = RetryBudget(0.2)
    assert [budget.spend(1000.0) for _ in range(11)] == [True] * 10 + [False]


def test_requests_and_time_fill_the_budget() -> None:
    budget = RetryBudget(0.2, size=1.0, per_second=3.0)
    assert budget.spend(0.0)
    for _ in range(4):
        budget.deposit()
    assert not budget.spend(0.0)
    budget.deposit()
    assert budget.spend(0.0)
    assert not budget.spend(0.25)
    assert budget.spend(0.375)


def test_a_budget_does_not_save_more_than_its_size() -> None:
    budget = RetryBudget(1.0, size=2.0, per_second=1.0)
    for _ in range(100):
        budget.deposit()
    assert [budget.spend(500.0) for _ in range(3)] == [True, True, False]
    assert [budget.spend(1000.0) for _ in range(3)] == [True, True, False]


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.booleans()), max_size=100))
def test_retries_stay_within_what_was_filled_in(steps: list[tuple[float, bool]]) -> None:
    budget = RetryBudget(0.2)
    now, requests, retries = 0.0, 0, 0
    for wait, is_request in steps:
        now += wait
        if is_request:
            budget.deposit()
            requests += 1
        else:
            retries += budget.spend(now)
        assert retries <= 10 + 0.2 * requests + 3.0 * now + 1e-6


def test_a_retry_that_is_not_made_costs_nothing_and_gains_nothing() -> None:
    budget = RetryBudget(0.2, size=2.0)
    assert budget.spend(5.0)
    budget.give_back()
    budget.give_back()
    assert [budget.spend(5.0) for _ in range(3)] == [True, True, False]
