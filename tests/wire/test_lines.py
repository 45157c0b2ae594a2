"""Lines that LF ends: which lines there are, their bound, and the same for any cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.wire.grammar import bytewise, pieces_of
from trio_gateway.wire._lines import LineReader

BOUND = 8

_pieces = st.sampled_from(
    [b"a", b"{}", b" ", b"\t", b"\r", b"\n", b"\r\n", b"\n", b"1234567", b"12345678", b"123456789", b"\xff"]
)
streams = st.lists(_pieces, max_size=12).map(b"".join)


def read(*pieces: bytes, bound: int = BOUND) -> tuple[list[bytes], bytes | None, bool]:
    """All lines of a stream, what stood behind the last LF, and whether a line was over the bound."""
    reader = LineReader(bound)
    lines = [line for piece in pieces for line in reader.feed(piece)]
    return lines, reader.end(), reader.too_large


def lines_by_definition(stream: bytes) -> tuple[list[bytes], bytes | None, bool]:
    """The same, from the whole stream and without any thought of speed."""
    *ended, last = (line.removesuffix(b"\r") for line in stream.split(b"\n"))
    for at, line in enumerate([*ended, last]):
        if len(line) > BOUND:
            return [one for one in ended[:at] if one.strip()], None, True
    return [line for line in ended if line.strip()], last if last.strip() else None, False


@given(streams)
def test_the_lines_are_those_that_the_definition_gives(stream: bytes) -> None:
    assert read(stream) == lines_by_definition(stream)


@given(st.data(), streams)
def test_any_cut_of_a_stream_gives_the_same_lines(data: st.DataObject, stream: bytes) -> None:
    assert read(*data.draw(pieces_of(stream))) == read(stream)


def test_a_cr_before_the_lf_is_no_part_of_a_line_but_one_elsewhere_is() -> None:
    assert read(b"a\r\nb\rc\nd\r\r\n") == ([b"a", b"b\rc", b"d\r"], None, False)


def test_lines_of_nothing_but_white_space_are_ignored() -> None:
    assert read(b"\n\r\n  \n\t\r\na\n\n") == ([b"a"], None, False)


def test_a_last_line_that_no_lf_ended_is_answered_at_the_end() -> None:
    assert read(b"a\nb") == ([b"a"], b"b", False)
    assert read(b"a\nb\r") == ([b"a"], b"b", False)
    assert read(b"a\n \r") == ([b"a"], None, False)


def test_the_end_is_answered_once() -> None:
    reader = LineReader(BOUND)
    reader.feed(b"a")
    assert [reader.end(), reader.end()] == [b"a", None]


def test_a_line_of_exactly_the_bound_is_taken_whatever_ends_it() -> None:
    for end in (b"\n", b"\r\n"):
        assert read(*bytewise(b"12345678" + end)) == ([b"12345678"], None, False)
    assert read(*bytewise(b"12345678\r")) == ([], b"12345678", False)


def test_the_lines_in_front_of_one_over_the_bound_are_answered_and_nothing_behind_it() -> None:
    lines, last, too_large = read(b"a\nb\n123456789\nc\n", b"d\n")
    assert (lines, last, too_large) == ([b"a", b"b"], None, True)


def test_a_line_over_the_bound_is_told_before_its_end_comes_and_is_not_kept() -> None:
    reader = LineReader(BOUND)
    assert reader.feed(b"12345678") == []
    assert not reader.too_large
    assert reader.feed(b"9") == []
    assert reader.too_large
    assert reader.end() is None
