"""The strict event stream reader sees what a lenient one would hide."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.testing import EventStreamReader, StreamEvent, read_chat_stream

MIXED = "\ufeffdata: a\r\ndata: b\r\rdata:c\n\n: note\nevent: error\rdata: {}\r\n\r\n".encode()
MIXED_EVENTS = [StreamEvent("a\nb"), StreamEvent("c"), StreamEvent("{}", "error")]


def read(*pieces: bytes) -> EventStreamReader:
    reader = EventStreamReader()
    for piece in pieces:
        reader.feed(piece)
    reader.end()
    return reader


@given(st.lists(st.integers(0, len(MIXED)), max_size=12))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(MIXED)]
    reader = read(*(MIXED[a:b] for a, b in pairwise(places)))
    assert reader.events == MIXED_EVENTS
    assert reader.comments == [" note"]
    assert not reader.problems


def test_every_single_byte_may_come_alone() -> None:
    reader = read(*(bytes([byte]) for byte in MIXED))
    assert reader.events == MIXED_EVENTS
    assert not reader.problems


def test_only_one_blank_after_the_colon_is_dropped() -> None:
    assert read(b"data:  x\n\n").events == [StreamEvent(" x")]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"data: \xff\n\n", "UTF-8"),
        (b"data: whole\n\ndata: half\n", "inside"),
        (b"data: half", "inside"),
        (b"id: 7\n\n", "without data"),
        (b"event: ping\n\n", "without data"),
    ],
)
def test_what_clients_trip_over_is_a_problem(raw: bytes, problem: str) -> None:
    assert any(problem in found for found in read(raw).problems)


def test_comments_are_no_events_and_no_problem() -> None:
    reader = read(b": keep-alive\n\n: keep-alive\n\n")
    assert not reader.events
    assert not reader.problems
    assert len(reader.comments) == 2


def test_field_names_are_remembered() -> None:
    assert read(b"id: 1\nretry: 5\ndata: x\n\n").fields == {"id", "retry", "data"}


def test_a_chat_stream_is_joined_by_choice() -> None:
    reader = read(
        b'data: {"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"choices":[{"index":0,"delta":{"content":"a"}},{"index":1,"delta":{"content":"x"}}]}\n\n'
        b'data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"length"}]}\n\n'
        b'data: {"choices":[],"usage":{"total_tokens":5}}\n\n'
        b"data: [DONE]\n\n"
    )
    reading = read_chat_stream(reader)
    assert reading.texts == {0: "ab", 1: "x"}
    assert reading.text == "ab"
    assert reading.finishes == {0: "length"}
    assert reading.roles == {0: 1}
    assert reading.usage == {"total_tokens": 5}
    assert reading.models == {"m"}
    assert (reading.done, reading.after_done) == (1, 0)


def test_what_follows_the_end_is_counted() -> None:
    reading = read_chat_stream(read(b"data: [DONE]\n\ndata: [DONE]\n\ndata: {}\n\n"))
    assert (reading.done, reading.after_done) == (2, 2)


def test_errors_and_broken_json_are_kept_apart() -> None:
    reading = read_chat_stream(read(b'data: {"error":{"message":"no"}}\n\ndata: {oops\n\n'))
    assert reading.errors == [{"message": "no"}]
    assert reading.not_json == ["{oops"]
