"""The record: what happened, in wall-clock times, with the tokens that somebody counted or nobody did."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ledger.making import make_record, make_request
from trio_gateway.contract import EMBEDDINGS, TRANSCRIPTIONS, Ending, Outcome, Phase
from trio_gateway.errors import Problem
from trio_gateway.ledger import Tally
from trio_gateway.wire import StreamRelay, StreamShape, Usage

GONE = Ending(Outcome.CLIENT_GONE)
REFUSED = Ending(Outcome.REFUSED, Problem.of("queue_timeout", "no"))


def relay_of(*events: bytes) -> StreamRelay:
    relay = StreamRelay(StreamShape(1, True, False, "m", "m", 10_000))
    for event in events:
        relay.feed(b"data: " + event + b"\n\n")
    return relay


ROLE = b'{"choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}]}'
SAYS = b'{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'


def test_a_record_names_the_request_and_its_ending() -> None:
    record = make_record(REFUSED)
    assert record.exchange_id == "0123456789abcdef0123456789abcdef"
    assert (record.client_request_id, record.boot_id) == ("mine", "boot")
    assert (record.tenant, record.key_id, record.tier) == ("acme", "k1", "batch")
    assert (record.operation, record.model, record.stream) == ("chat.completions", "m", True)
    assert (record.outcome, record.code, record.phase) == ("refused", "queue_timeout", "queued")
    assert (record.worker, record.attempts, record.status) == (None, 0, None)
    assert make_record().code is None


def test_times_are_those_of_the_wall_clock() -> None:
    tally = Tally()
    tally.placed, tally.opened, tally.headers = 101.0, 102.5, 103.0
    tally.first_content, tally.last_content = 104.0, 129.9999999
    record = make_record(tally=tally)
    assert record.arrived_at == 970.0
    assert (record.placed_at, record.upstream_opened_at, record.headers_at) == (971.0, 972.5, 973.0)
    assert (record.first_content_at, record.last_content_at, record.settled_at) == (974.0, 1000.0, 1000.0)


def test_what_did_not_happen_has_no_time() -> None:
    record = make_record(REFUSED)
    assert (record.placed_at, record.upstream_opened_at, record.headers_at) == (None, None, None)
    assert (record.first_content_at, record.last_content_at) == (None, None)


def test_a_record_is_json_field_by_field() -> None:
    record = make_record(REFUSED)
    values = record.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert values == {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


# Phases -----------------------------------------------------------------------------------------------------


def test_the_phase_is_what_the_client_had() -> None:
    tally = Tally()
    assert tally.phase() is Phase.QUEUED
    tally.placed = 1.0
    assert tally.phase() is Phase.BEFORE_HEADERS
    tally.begin(2.0, 200)
    assert tally.phase() is Phase.BEFORE_CONTENT
    tally.commit(3.0)
    assert tally.phase() is Phase.AFTER_CONTENT
    assert (tally.headers, tally.first_content, tally.status) == (2.0, 3.0, 200)


def test_only_the_first_head_counts() -> None:
    tally = Tally()
    tally.begin(2.0, 200)
    tally.begin(3.0, 503)
    assert (tally.headers, tally.status) == (2.0, 200)


def test_a_heartbeat_in_the_queue_is_a_byte() -> None:
    tally = Tally()
    tally.begin(2.0, 200)
    assert tally.phase() is Phase.BEFORE_CONTENT


def test_content_brings_its_own_headers() -> None:
    tally = Tally()
    tally.commit(3.0)
    assert (tally.headers, tally.first_content, tally.status) == (3.0, 3.0, 200)


# Tokens -----------------------------------------------------------------------------------------------------


def tokens_of(tally: Tally, *, outcome: Outcome = Outcome.CLIENT_GONE) -> tuple[Any, ...]:
    record = make_record(Ending(outcome), tally)
    assert record.tokens_acknowledged is None
    return (record.tokens_generated, record.tokens_delivered, record.usage_source)


def asked() -> Tally:
    """What is known when an engine was asked and has said nothing yet."""
    tally = Tally()
    tally.asked = True
    return tally


def test_where_no_engine_was_asked_nothing_was_used() -> None:
    record = make_record(REFUSED, size=4000)
    assert (record.tokens_prompt, record.tokens_cached, record.prompt_source) == (0, None, "none")
    assert tokens_of(Tally()) == (0, 0, "none")


def test_where_an_engine_was_asked_and_said_nothing_the_prompt_is_estimated() -> None:
    record = make_record(GONE, asked(), size=4001)
    assert (record.tokens_prompt, record.tokens_cached, record.prompt_source) == (1001, None, "estimated")
    assert tokens_of(asked()) == (0, 0, "estimated")


def test_prompt_and_answer_may_be_counted_by_different_ones() -> None:
    tally = asked()
    tally.usage = Usage(prompt=7)
    tally.events = tally.content_events = 2
    record = make_record(GONE, tally)
    assert (record.tokens_prompt, record.prompt_source) == (7, "engine")
    assert (record.tokens_generated, record.usage_source) == (2, "estimated")
    tally.usage = Usage(generated=9)
    record = make_record(GONE, tally, size=80)
    assert (record.tokens_prompt, record.prompt_source) == (20, "estimated")
    assert (record.tokens_generated, record.usage_source) == (9, "engine")


def test_a_whole_answer_without_usage_is_estimated_by_its_size() -> None:
    tally = asked()
    tally.answer_bytes = 401
    record = make_record(tally=tally, stream=False)
    assert (record.tokens_generated, record.tokens_delivered, record.usage_source) == (101, 101, "estimated")
    cut = make_record(GONE, tally, stream=False)
    assert (cut.tokens_generated, cut.tokens_delivered, cut.usage_source) == (101, 0, "estimated")


def test_the_estimate_is_that_of_the_model() -> None:
    record = asked().record(
        make_request(size=100), GONE, "boot", 130.0, 1000.0, lambda model, size: size / len(model)
    )
    assert record.tokens_prompt == 100


def test_an_operation_that_generates_nothing_has_no_count_of_it() -> None:
    record = make_record(tally=asked(), operation=EMBEDDINGS, size=40)
    assert (record.tokens_prompt, record.prompt_source) == (10, "estimated")
    assert (record.tokens_generated, record.tokens_delivered, record.usage_source) == (None, None, "none")


def test_nobody_can_tell_the_tokens_of_a_recording_by_its_bytes() -> None:
    record = make_record(tally=asked(), operation=TRANSCRIPTIONS, size=40_000)
    assert (record.tokens_prompt, record.prompt_source) == (None, "none")


def test_the_engine_s_usage_counts() -> None:
    tally = Tally()
    tally.usage = Usage(7, 3, 40)
    record = make_record(tally=tally)
    assert (record.tokens_prompt, record.tokens_cached, record.usage_source) == (7, 3, "engine")
    assert (record.tokens_generated, record.tokens_delivered) == (40, 40)


def test_events_with_content_are_the_estimate_where_usage_is_missing() -> None:
    tally = asked()
    tally.usage = Usage(prompt=7)
    tally.events, tally.content_events, tally.events_delivered = 6, 5, 4
    assert tokens_of(tally) == (5, 3, "estimated")  # the one without content came first
    tally.own_events = 1
    assert tokens_of(tally) == (5, 2, "estimated")  # the last one said why the answer ends
    assert tokens_of(tally, outcome=Outcome.COMPLETED) == (5, 5, "estimated")


@pytest.mark.parametrize(
    ("delivered", "tokens"), [(0, 0), (1, 0), (2, 1), (4, 3), (5, 4), (6, 4), (7, 4), (8, 4)]
)
def test_events_behind_the_last_output_take_nothing_from_what_was_delivered(
    delivered: int, tokens: int
) -> None:
    """One without output in front, four with, two behind; and `[DONE]`, which counts as no engine's event."""
    tally = asked()
    tally.events, tally.content_events, tally.silent_at_end = 7, 4, 2
    tally.events_delivered = delivered
    assert tokens_of(tally) == (4, tokens, "estimated")


def test_of_the_engine_s_tokens_the_share_of_the_delivered_events_counts() -> None:
    tally = Tally()
    tally.usage = Usage(generated=40)
    tally.events = tally.content_events = 10
    for delivered, tokens in ((0, 0), (3, 12), (10, 40), (11, 40)):
        tally.events_delivered = delivered
        assert tokens_of(tally) == (40, tokens, "engine")
    assert tokens_of(tally, outcome=Outcome.COMPLETED) == (40, 40, "engine")


def test_an_answer_without_events_that_did_not_complete_delivered_nothing() -> None:
    tally = Tally()
    tally.usage = Usage(generated=40)
    assert tokens_of(tally) == (40, 0, "engine")


@given(
    usage=st.none() | st.builds(Usage, st.none(), st.none(), st.none() | st.integers(0, 10**6)),
    events=st.integers(0, 1000),
    silent=st.integers(0, 3),
    at_end=st.integers(0, 3),
    delivered=st.integers(0, 1010),
    outcome=st.sampled_from(Outcome),
    worked=st.booleans(),
    answer=st.integers(0, 1000),
)
def test_never_more_is_delivered_than_was_generated(
    usage: Usage | None,
    events: int,
    silent: int,
    at_end: int,
    delivered: int,
    outcome: Outcome,
    worked: bool,
    answer: int,
) -> None:
    tally = Tally()
    tally.asked, tally.answer_bytes = worked, answer
    tally.usage, tally.events, tally.events_delivered = usage, events, delivered
    tally.content_events = max(events - silent, 0)
    tally.silent_at_end = min(at_end, silent, events)
    generated, reached, source = tokens_of(tally, outcome=outcome)
    assert 0 <= reached <= generated
    assert (source == "engine") is (usage is not None and usage.generated is not None)
    assert source == "engine" or (source == "estimated") is worked


# Counting attempts ------------------------------------------------------------------------------------------


def test_a_stream_s_counts_are_taken_over() -> None:
    tally = Tally()
    tally.count(relay_of(ROLE, SAYS, SAYS, b"noise", USAGE), 120.0)
    assert (tally.events, tally.content_events, tally.silent_at_end, tally.dropped) == (4, 2, 1, 1)
    assert (tally.usage, tally.last_content) == (Usage(3, None, 2), 120.0)


def test_a_failed_attempt_adds_what_it_dropped_and_takes_nothing_away() -> None:
    tally = Tally()
    tally.usage = Usage(generated=9)
    tally.count(relay_of(ROLE, b"noise"), math.inf)
    assert (tally.events, tally.content_events, tally.dropped) == (0, 0, 1)
    assert (tally.usage, tally.last_content) == (Usage(generated=9), None)
    tally.count(relay_of(SAYS), math.inf)
    assert (tally.events, tally.last_content) == (1, None)


def test_progress_without_content_is_no_content() -> None:
    tally = Tally()
    tally.count(relay_of(ROLE), 120.0)
    assert tally.last_content is None


def test_numbers_of_the_client_s_side_are_written_as_they_are() -> None:
    tally = Tally()
    tally.events_delivered, tally.bytes_delivered, tally.dropped = 4, 999, 2
    tally.worker, tally.attempts, tally.status = "gpu-0", 2, 200
    tally.events = tally.content_events = 4
    record = make_record(tally=tally)
    assert (record.events_delivered, record.bytes_delivered, record.events_dropped) == (4, 999, 2)
    assert (record.worker, record.attempts, record.status) == ("gpu-0", 2, 200)


@pytest.mark.parametrize(
    ("usage", "events", "delivered", "acknowledged", "tokens"),
    [
        (None, 10, 8, None, None),
        (None, 10, 8, 0, 0),
        (None, 10, 8, 3, 3),
        (None, 10, 2, 3, 2),  # the kernel was asked later than the client
        (20, 10, 8, 3, 6),
        (5, 10, 8, 4, 2),
        (None, 0, 0, 0, 0),
    ],
)
def test_acknowledged_events_are_told_in_tokens_of_the_engine_and_never_exceed_the_delivered(
    usage: int | None, events: int, delivered: int, acknowledged: int | None, tokens: int | None
) -> None:
    tally = Tally()
    tally.usage = None if usage is None else Usage(generated=usage)
    tally.events = tally.content_events = events
    tally.events_delivered, tally.acknowledged = delivered, acknowledged
    record = make_record(tally=tally, ending=Ending(Outcome.CLIENT_GONE))
    assert record.tokens_acknowledged == tokens
    assert (record.tokens_acknowledged or 0) <= (record.tokens_delivered or 0)


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_its_word(outcome: Outcome) -> None:
    assert make_record(Ending(outcome)).outcome == str(outcome)
