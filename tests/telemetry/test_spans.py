"""Spans of an exchange: ids known beforehand, names of the conventions, and nothing of a prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ledger.making import make_record, make_request
from trio_gateway.contract import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from trio_gateway.telemetry._spans import (
    Span,
    Step,
    attempt_headers,
    context_of,
    note_end,
    operation_name,
    span_id,
    spans_of,
)

ID = "0190000000000000aaaaaaaaaaaaaaaa"
PARENT = b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"
STEPS: tuple[Step, ...] = (
    (100.0, "arrived", {"size": 10}),
    (100.1, "placed", {"worker": "w1", "attempt": 1}),
    (100.2, "opened", {"status": 503}),
    (100.3, "attempt_failed", {"worker": "w1", "reason": "overloaded", "status": 503}),
    (100.4, "sent_back", {"position": 1}),
    (101.0, "placed", {"worker": "w2", "attempt": 2}),
    (101.1, "opened", {"status": 200}),
    (101.5, "first_content", {}),
    (102.0, "ended", {"outcome": "completed", "code": None}),
    (102.0, "settled", {}),
)


def spans(
    steps: tuple[Step, ...] = STEPS, request: dict[str, Any] | None = None, **changes: Any
) -> list[Span]:
    asked = make_request(**{"exchange_id": ID, **(request or {})})
    record = dataclasses.replace(
        make_record(), **{"exchange_id": ID, "arrived_at": 1000.0, "settled_at": 1002.0, **changes}
    )
    ended = note_end(asked, record, steps, context_of(asked, 1.0))
    return list(spans_of(ended, {"w1": ("10.0.0.1", 8000)}.get))


def test_an_exchange_is_a_span_with_a_child_for_each_attempt() -> None:
    whole, first, second = spans()
    assert (whole.name, whole.client, whole.parent_id) == ("chat m", False, None)
    assert (first.name, first.client) == ("chat org/m", True)
    assert {first.parent_id, second.parent_id} == {whole.span_id}
    assert len({whole.span_id, first.span_id, second.span_id}) == 3
    assert (whole.began, whole.ended) == (1000.0, 1002.0)
    assert (first.began, first.ended) == pytest.approx((1000.1, 1000.3))
    assert (second.began, second.ended) == pytest.approx((1001.0, 1002.0))
    assert (first.error, second.error, whole.error) == ("overloaded", None, None)
    assert first.attributes["server.address"] == "10.0.0.1"
    assert first.attributes["http.response.status_code"] == 503
    assert "server.address" not in second.attributes  # nobody knows that worker any more
    assert [name for _, name in second.events] == ["opened", "first_content"]


@pytest.mark.parametrize(
    ("outcome", "code", "error"),
    [
        ("upstream_failed", "engine_failed", "engine_failed"),
        ("deadline_exceeded", None, "deadline_exceeded"),
        ("client_gone", None, None),
        ("client_cancelled", "request_cancelled", None),
    ],
)
def test_an_attempt_that_ends_with_its_exchange_ends_as_that_does(
    outcome: str, code: str | None, error: str | None
) -> None:
    whole, _, last = spans(outcome=outcome, code=code)
    assert whole.error == last.error == error
    assert whole.attributes["error.type"] == last.attributes["error.type"] == outcome


@given(st.floats(0, 1e6), st.floats(1e9, 2e9), st.floats(0.3, 100))
def test_no_attempt_ends_after_its_exchange_however_both_were_rounded(
    clock: float, arrived: float, took: float
) -> None:
    steps: tuple[Step, ...] = (
        (clock, "arrived", {"size": 10}),
        (clock + 0.1, "placed", {"worker": "w1", "attempt": 1}),
        (clock + took, "ended", {"outcome": "completed", "code": None}),
    )
    record = {"arrived_at": round(arrived, 6), "settled_at": round(arrived + took, 6)}
    whole, attempt = spans(steps, {"arrived": clock}, **record)
    assert attempt.ended <= whole.ended


def test_one_that_was_never_placed_has_one_span() -> None:
    steps = (STEPS[0], (103.0, "ended", {"outcome": "refused", "code": "queue_timeout"}))
    (whole,) = spans(steps, outcome="refused", code="queue_timeout", first_content_at=None)
    assert whole.error == "queue_timeout"
    assert "gen_ai.response.model" not in whole.attributes


def test_what_was_asked_is_told_in_numbers_only() -> None:
    members = {"temperature": b"0.5", "top_p": b"null", "messages": b'[{"content":"secret"}]'}
    whole = spans(request={"members": members, "n": 2, "tokens": 7})[0]
    assert whole.attributes["gen_ai.request.temperature"] == 0.5
    assert whole.attributes["gen_ai.request.max_tokens"] == 7
    assert whole.attributes["gen_ai.request.choice.count"] == 2
    assert "gen_ai.request.top_p" not in whole.attributes
    assert "secret" not in repr(spans(request={"members": members}))


def test_a_number_as_long_as_a_book_is_not_kept() -> None:
    long = {"temperature": memoryview(b"0." + b"1" * 1_000_000)}
    assert "gen_ai.request.temperature" not in spans(request={"members": long})[0].attributes


def test_the_callers_trace_goes_on() -> None:
    trace = ((b"traceparent", PARENT), (b"tracestate", b"a=1"))
    whole, first, _ = spans(request={"trace": trace})
    assert whole.context.trace_id == first.context.trace_id == "1" * 32
    assert whole.parent_id == "2" * 16
    assert whole.context.state == b"a=1"
    headers = dict(attempt_headers(make_request(exchange_id=ID, trace=trace), f"{ID}-01", 0.0))
    assert headers == {
        b"traceparent": b"00-" + b"1" * 32 + b"-" + first.span_id.encode() + b"-01",
        b"tracestate": b"a=1",
    }


def test_a_trace_that_begins_here_has_the_exchanges_id() -> None:
    request = make_request(exchange_id=ID)
    assert context_of(request, 1.0).trace_id == ID
    headers = attempt_headers(request, f"{ID}-02", 1.0)
    assert headers == ((b"traceparent", f"00-{ID}-aaaaaaaaaaaaaaac-01".encode()),)


@pytest.mark.parametrize(("flags", "sampled"), [(b"00", False), (b"01", True), (b"03", True), (b"02", False)])
def test_a_caller_decides_whether_its_trace_is_sampled(flags: bytes, sampled: bool) -> None:
    request = make_request(trace=((b"traceparent", PARENT[:-2] + flags),))
    assert context_of(request, 0.0).sampled is context_of(request, 1.0).sampled is sampled


@given(st.integers(0, 2**64 - 1), st.floats(0, 1))
def test_so_many_of_the_others_are_sampled(random: int, ratio: float) -> None:
    request = make_request(exchange_id=f"{1:016x}{random:016x}")
    assert context_of(request, 1.0).sampled
    assert not context_of(request, 0.0).sampled
    assert context_of(request, ratio).sampled == (random < ratio * 2**64)


@given(st.integers(0, 2**64 - 1))
def test_ids_of_spans_are_never_zero_nor_the_same(random: int) -> None:
    ids = [span_id(f"{1:016x}{random:016x}", number) for number in range(50)]
    assert len(set(ids)) == 50 or "f" * 16 in ids
    assert all(len(each) == 16 and int(each, 16) for each in ids)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (CHAT, "chat"),
        (RESPONSES, "chat"),
        (MESSAGES, "chat"),
        (COMPLETIONS, "text_completion"),
        (EMBEDDINGS, "embeddings"),
    ],
)
def test_operations_have_the_names_of_the_conventions(operation: Any, name: str) -> None:
    assert operation_name(make_request(operation=operation)) == name
