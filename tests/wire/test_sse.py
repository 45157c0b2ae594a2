"""The reader of event streams: WHATWG HTML 9.2.5 and 9.2.6, the same events wherever the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wire.grammar import BOM, bytewise, pieces_of, sse_streams
from tests.wire.standard import events_by_the_standard
from trio_gateway.wire._sse import DONE, HEARTBEAT, Event, EventReader, write_event

ROOMY = 10_000


def read(*pieces: bytes, limit: int = ROOMY) -> list[Event]:
    reader = EventReader(limit)
    return [event for piece in pieces for event in reader.feed(piece)]


@given(sse_streams())
@example(b"data: a\r\n\ndata: b\r\n\r")
@example(BOM + b"\ndata: a\n\n")
def test_any_stream_reads_as_the_standard_says(stream: bytes) -> None:
    assert read(stream) == events_by_the_standard(stream)


@given(st.data(), sse_streams())
@example(None, b"data: a\r\n\ndata: b\n\n")
@example(None, b"data: a\r\n\r\n\r\ndata: b\n\n")
@settings(max_examples=300)
def test_any_cut_of_a_stream_gives_the_same_events(data: st.DataObject | None, stream: bytes) -> None:
    pieces = bytewise(stream) if data is None else data.draw(pieces_of(stream))
    assert read(*pieces) == events_by_the_standard(stream)


@given(st.data(), st.binary(max_size=60))
def test_any_bytes_at_all_read_the_same_however_they_are_cut(data: st.DataObject, stream: bytes) -> None:
    assert read(*data.draw(pieces_of(stream))) == events_by_the_standard(stream)


@given(st.data(), sse_streams(), st.integers(0, 24))
def test_the_bound_of_an_event_does_not_depend_on_the_cut(
    data: st.DataObject, stream: bytes, limit: int
) -> None:
    whole, cut = EventReader(limit), EventReader(limit)
    events = whole.feed(stream)
    assert events == [event for piece in data.draw(pieces_of(stream)) for event in cut.feed(piece)]
    assert whole.too_large == cut.too_large
    assert whole.dropped == cut.dropped
    assert whole.end() == cut.end()


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [Event(None, b"a")]),
        (b"data:a\n\n", [Event(None, b"a")]),
        (b"data:  a\n\n", [Event(None, b" a")]),
        (b"data: a \n\n", [Event(None, b"a ")]),
        (b"data: a\ndata: b\n\n", [Event(None, b"a\nb")]),
        (b"data\n\n", [Event(None, b"")]),
        (b"data\ndata\n\n", [Event(None, b"\n")]),
        (b"data: a:b\n\n", [Event(None, b"a:b")]),
        (b"event: x\ndata: a\n\n", [Event(b"x", b"a")]),
        (b"event: x\nevent:\ndata: a\n\n", [Event(None, b"a")]),
        (b"event: x\n\ndata: a\n\n", [Event(None, b"a")]),
        (b"id: 1\nretry: 5\nnothing: x\n: note\ndata: a\n\n", [Event(None, b"a")]),
        (b"Data: a\n\n", []),
        (b": only a comment\n\n", []),
        (b"id: 7\n\n", []),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"\n\n\n", []),
        (BOM + b"data: a\n\n", [Event(None, b"a")]),
        (BOM + BOM + b"data: a\n\n", []),
        (b"data: a\n\n" + BOM + b"data: b\n\n", [Event(None, b"a")]),
        (b"data: a\r\rdata: b\r\n\r\n", [Event(None, b"a"), Event(None, b"b")]),
        (b"data: \xff\x00\n\n", [Event(None, b"\xff\x00")]),
    ],
)
def test_examples_of_the_standard(stream: bytes, events: list[Event]) -> None:
    assert read(stream) == events
    assert read(*bytewise(stream)) == events


def test_a_read_may_begin_with_the_second_line_end_of_a_blank_line() -> None:
    assert read(b"data: a\n", b"\ndata: b\r\r") == [Event(None, b"a"), Event(None, b"b")]


@pytest.mark.parametrize("stream", [b": a\n\n", b"id: 1\n\n", b"event: x\r\n\r\n", b"x\n\n: y\n\n"])
def test_a_block_without_data_is_counted(stream: bytes) -> None:
    reader = EventReader(ROOMY)
    assert reader.feed(stream) == []
    assert reader.dropped == stream.replace(b"\r", b"").count(b"\n\n")


def test_blank_lines_alone_are_not_counted() -> None:
    reader = EventReader(ROOMY)
    assert reader.feed(b"\n\r\n\r\r\n\n\n\ndata: a\n\n\n\n") == [Event(None, b"a")]
    assert reader.dropped == 0


@pytest.mark.parametrize(
    ("fed", "at_boundary"),
    [
        (b"", False),
        (BOM[:2], False),
        (BOM, True),
        (b"data: a\n\n", True),
        (b"data: a\n", False),
        (b"data: a\n\nd", False),
        (b"data: a\n\n\n", True),  # a blank line more, in the same read
        (b"data: a\r\r", False),  # half of a CRLF, perhaps
        (b"data: a\r\n\r\n", True),
    ],
)
def test_a_boundary_is_where_nothing_is_kept(fed: bytes, at_boundary: bool) -> None:
    reader = EventReader(ROOMY)
    reader.feed(fed)
    assert reader.at_boundary is at_boundary


def test_an_event_of_exactly_the_bound_passes_and_one_byte_more_does_not() -> None:
    just = b"data: " + b"x" * 94
    for pieces in ([just + b"\n\n"], [just, b"\n", b"\n"], bytewise(just + b"\n\n"), [b"\n", just, b"\n\n"]):
        assert read(*pieces, limit=100) == [Event(None, b"x" * 94)]
    for pieces in ([just + b"x\n\n"], [just + b"x"], bytewise(just + b"x")):
        reader = EventReader(100)
        assert [event for piece in pieces for event in reader.feed(piece)] == []
        assert reader.too_large


def test_what_stands_in_front_of_a_too_large_event_is_answered_and_nothing_after_it() -> None:
    reader = EventReader(10)
    assert reader.feed(b"data: a\n\ndata: " + b"x" * 20 + b"\n\ndata: b\n\n") == [Event(None, b"a")]
    assert reader.too_large
    assert reader.feed(b"data: c\n\n") == []
    assert reader.end() is None


@pytest.mark.parametrize(
    ("fed", "last"),
    [
        (b"", None),
        (b"data: a\n\n", None),
        (b"data: a\n\ndata: b", Event(None, b"b")),
        (b"data: a\n\ndata: b\n", Event(None, b"b")),
        (b"data: b\r", Event(None, b"b")),
        (b"event: x\ndata: b\n", Event(b"x", b"b")),
        (b": note", None),
    ],
)
def test_the_end_answers_what_had_no_blank_line(fed: bytes, last: Event | None) -> None:
    reader = EventReader(ROOMY)
    reader.feed(fed)
    assert reader.end() == last
    assert reader.end() is None


@given(
    st.binary().filter(lambda data: b"\r" not in data),
    st.sampled_from([None, b"error", b"response.completed"]),
)
def test_what_is_written_reads_back(data: bytes, name: bytes | None) -> None:
    written = write_event(data, name)
    assert read(written) == [Event(name, data)]
    assert read(*bytewise(written)) == [Event(name, data)]
    assert written.endswith(b"\n\n")
    assert written.count(b"\n\n") == 1


def test_a_heartbeat_is_a_comment_and_the_end_is_an_event() -> None:
    assert (HEARTBEAT, read(HEARTBEAT)) == (b": keep-alive\n\n", [])
    assert (DONE, read(DONE)) == (b"data: [DONE]\n\n", [Event(None, b"[DONE]")])
