"""The framing of bodies: the same bytes and the same end wherever a read cuts them, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.wire.grammar import ODD_CHUNKS, bytewise, chunked_bodies, cut, pieces_of
from trio_gateway.errors import EngineProtocolError
from trio_gateway.wire._http1 import (
    CHUNKED,
    LAST_CHUNK,
    MAX_CHUNK_LINE,
    MAX_TRAILER_BYTES,
    UNTIL_CLOSE,
    BodyReader,
    write_chunk,
)


def read(body: int, pieces: list[bytes]) -> tuple[bytes, bool, bytes, bool]:
    """What a reader makes of some pieces: the body, whether it ended, what followed, whether it broke."""
    reader = BodyReader(body)
    found: list[bytes] = []
    try:
        for piece in pieces:
            found += reader.feed(piece)
    except EngineProtocolError:
        return b"".join(found + reader.whole), reader.ended, b"", True
    return b"".join(found), reader.ended, reader.rest, False


@given(st.data(), chunked_bodies(), st.sampled_from([b"", b"GET / HTTP/1.1\r\n\r\n", b"\r\n"]))
def test_a_chunked_body_reads_the_same_however_it_is_spelt_and_cut(
    data: st.DataObject, framed_and_plain: tuple[bytes, bytes], after: bytes
) -> None:
    framed, plain = framed_and_plain
    pieces = data.draw(pieces_of(framed + after))
    assert read(CHUNKED, pieces) == (plain, True, after, False)


@given(st.data(), ODD_CHUNKS)
@example(None, b"5\r\nhello\r\nx\r\n")
@example(None, b"5\r\nhelloX\r\n")
@example(None, b"5\r\nhello\n")
@example(None, b"1\r\na\r\n0\r\nx\n")
def test_any_bytes_are_read_and_broken_the_same_however_they_are_cut(
    data: st.DataObject | None, framed: bytes
) -> None:
    pieces = bytewise(framed) if data is None else data.draw(pieces_of(framed))
    assert read(CHUNKED, pieces) == read(CHUNKED, [framed])


@given(chunked_bodies())
def test_a_chunked_body_without_its_end_has_not_ended(framed_and_plain: tuple[bytes, bytes]) -> None:
    framed, _ = framed_and_plain
    for end in range(len(framed)):
        reader = BodyReader(CHUNKED)
        reader.feed(framed[:end])
        assert not reader.close()
        assert not reader.ended


@pytest.mark.parametrize(
    "framed",
    [
        b"\r\n",
        b" 5\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"-1\r\n",
        b"0x5\r\nhello\r\n",
        b"5 5\r\nhello\r\n",
        b"5,\r\nhello\r\n",
        b"g\r\n",
        b";x\r\n",
        b"5\nhello\n",
        b"5\r\r\n",
        b"5;a\rb\r\n",
        b"5;a\x00b\r\n",
        b"5;\x7f\r\n",
        "\u0665\r\n".encode(),
        b"1000000000000000\r\n",  # 16 digits
        b"00000000000000005\r\n",
    ],
)
def test_a_malformed_size_breaks_the_body(framed: bytes) -> None:
    assert read(CHUNKED, [framed])[3]
    assert read(CHUNKED, bytewise(framed))[3]


@pytest.mark.parametrize("tail", [b"\n", b"x\r\n", b"\r\r\n", b"0\r\n", b"5\r\nworld\r\n"])
def test_a_chunk_ends_where_its_size_says(tail: bytes) -> None:
    framed = b"5\r\nhello" + tail
    for pieces in ([framed], bytewise(framed), cut(framed, [8])):
        assert read(CHUNKED, pieces) == (b"hello", False, b"", True)


@pytest.mark.parametrize(
    "trailer",
    [
        b"A: b\r\r\n",
        b"A: b\rc: d\r\n",
        b"A: \x00\r\n",
        b"A: b\n",
        b"A : b\r\n",
        b"A: b\r\n c\r\n",
        b"no field\r\n",
        b": b\r\n",
        b"\r\r\n",
    ],
)
def test_a_trailer_that_is_no_header_field_breaks_the_body(trailer: bytes) -> None:
    framed = b"1\r\na\r\n0\r\n" + trailer + b"\r\n"
    for pieces in ([framed], bytewise(framed)):
        assert read(CHUNKED, pieces) == (b"a", False, b"", True)


def test_what_stood_in_front_of_a_malformed_place_is_kept() -> None:
    reader = BodyReader(CHUNKED)
    assert reader.feed(b"2\r\nab\r\n") == [b"ab"]
    with pytest.raises(EngineProtocolError):
        reader.feed(b"2\r\ncd\r\n3\r\nefg\r\noops\r\n")
    assert reader.whole == [b"cd", b"efg"]
    assert not reader.ended


def test_the_largest_size_is_counted_and_not_reserved() -> None:
    reader = BodyReader(CHUNKED)
    assert reader.feed(b"f" * 15 + b"\r\nabc") == [b"abc"]
    assert not reader.ended


@pytest.mark.parametrize(
    "line_of",
    [
        lambda size: b"5;" + b"x" * (size - 4) + b"\r\n",
        lambda size: b"0\r\nA:" + b"x" * (size - 4) + b"\r\n",
    ],
    ids=["extension", "trailer"],
)
def test_a_line_of_exactly_the_bound_passes_and_one_byte_more_does_not(line_of: object) -> None:
    assert callable(line_of)
    for size, broken in ((MAX_CHUNK_LINE, False), (MAX_CHUNK_LINE + 1, True)):
        line = line_of(size)
        for pieces in ([line], bytewise(line), cut(line, [len(line) - 1])):
            assert read(CHUNKED, pieces)[3] is broken


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    for start in (b"", b"0\r\n", b"1\r\na"):
        assert not read(CHUNKED, [start, b"1" * MAX_CHUNK_LINE])[3]
        assert read(CHUNKED, [start, b"1" * (MAX_CHUNK_LINE + 1)])[3]
        assert read(CHUNKED, [start, *bytewise(b"1" * (MAX_CHUNK_LINE + 1))])[3]


def test_a_trailer_of_exactly_the_bound_passes_and_one_byte_more_does_not() -> None:
    line = b"A: " + b"x" * 59 + b"\r\n"  # 64 bytes
    lines = line * (MAX_TRAILER_BYTES // len(line) - 1)
    fits, exceeds = b"A: " + b"x" * 57 + b"\r\n", line
    for pieces in ([b"0\r\n" + lines + fits + b"\r\n"], bytewise(b"0\r\n" + lines + fits + b"\r\n")):
        assert read(CHUNKED, pieces) == (b"", True, b"", False)
    for pieces in ([b"0\r\n" + lines + exceeds + b"\r\n"], bytewise(b"0\r\n" + lines + exceeds + b"\r\n")):
        assert read(CHUNKED, pieces) == (b"", False, b"", True)


@given(st.data(), st.binary(max_size=40), st.binary(max_size=20))
def test_a_sized_body_ends_after_its_bytes(data: st.DataObject, body: bytes, after: bytes) -> None:
    assert read(len(body), data.draw(pieces_of(body + after))) == (body, True, after, False)


@given(st.binary(min_size=1, max_size=40))
def test_a_sized_body_that_is_cut_has_not_ended(body: bytes) -> None:
    reader = BodyReader(len(body))
    reader.feed(body[:-1])
    assert not reader.close()
    reader.feed(body[-1:])
    assert reader.close()


@given(st.data(), st.binary(max_size=40))
def test_a_body_until_the_close_ends_with_it(data: st.DataObject, body: bytes) -> None:
    reader = BodyReader(UNTIL_CLOSE)
    found = [piece for part in data.draw(pieces_of(body)) for piece in reader.feed(part)]
    assert b"".join(found) == body
    assert not reader.ended
    assert reader.close()
    assert reader.ended


def test_a_body_of_nothing_has_ended_before_it_began() -> None:
    reader = BodyReader(0)
    assert reader.ended
    assert reader.feed(b"GET") == []
    assert reader.feed(b" /") == []
    assert reader.rest == b"GET /"


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=5))
def test_written_chunks_read_back_as_they_were(chunks: list[bytes]) -> None:
    reader = BodyReader(CHUNKED)
    assert reader.feed(b"".join(map(write_chunk, chunks)) + LAST_CHUNK) == chunks
    assert reader.ended


# Lines ----------------------------------------------------------------------------------------------------

LINES = st.sampled_from([b"", b"a", b"data: {}", b"x" * 300, b"x" * 1021, b"x" * 1022, b"a\rb", b"\r"])
CONTENTS = st.one_of(
    st.builds(lambda line: line + b"\n\n", LINES),
    st.builds(lambda line: line + b"\n\n", LINES),
    st.sampled_from([b"a\nb\n\n", b"a\n", b"\n", b"\n\n\n\n", b"a", b"a\n\nb\n\n", b"\n\na", b"a\r\n\r\n"]),
)


@given(
    contents=st.lists(CONTENTS, max_size=8),
    form=st.sampled_from([b"%x\r\n%b\r\n", b"%X\r\n%b\r\n", b"0%x\r\n%b\r\n", b"%x;a\r\n%b\r\n"]),
    broken=st.none() | st.tuples(st.integers(0, 1500), st.sampled_from([b"\n", b"\r", b"z", b"", b"\r\n"])),
    data=st.data(),
)
def test_chunks_that_are_lines_are_read_as_by_the_plain_way(
    contents: list[bytes], form: bytes, broken: tuple[int, bytes] | None, data: st.DataObject
) -> None:
    framed = b"".join(form % (len(content), content) for content in contents) + LAST_CHUNK
    if broken is not None:
        framed = framed[: broken[0]] + broken[1] + framed[broken[0] + 1 :]
    pieces = data.draw(pieces_of(framed))
    plain, fast = BodyReader(CHUNKED), BodyReader(CHUNKED)
    bodies = [b"", b""]
    for piece in pieces:
        broke = [_feeds(plain, piece), _feeds_lines(fast, piece)]
        bodies[0] += b"".join(broke[0][0])
        bodies[1] += b"".join(broke[1][0])
        kept = fast._kept.partition(b"\n")[2]
        # What is kept is no whole line, let alone an event.
        assert (bodies[1] + kept, broke[0][1]) == (bodies[0], broke[1][1])
        assert b"\n" not in kept[:-1]
        assert b"\r" not in kept
        if broke[0][1]:
            return
    assert (plain.ended, plain.rest) == (fast.ended, fast.rest)


def _feeds(reader: BodyReader, data: bytes) -> tuple[list[bytes], bool]:
    try:
        return reader.feed(data), False
    except EngineProtocolError:
        return reader.whole, True


def _feeds_lines(reader: BodyReader, data: bytes) -> tuple[list[bytes], bool]:
    """Feed as lines what is some, as `Answer.pour` does."""
    end, first = reader.chunk_end(data), list[bytes]()
    if 0 < end < len(data):
        first, data = reader.feed(data[:end]), data[end:]
    lines = reader.take_lines(data)
    if lines is None:
        pieces, broke = _feeds(reader, data)
        return first + pieces, broke
    return first + [line + b"\n\n" for line in lines], False


def test_most_reads_of_a_usual_stream_are_lines() -> None:
    chunk = write_chunk(b"data: {}\n\n")
    reader, events = BodyReader(CHUNKED), 0
    for piece in cut(chunk * 1000, list(range(100, 19_000, 100))):
        end = reader.chunk_end(piece)
        assert not end or reader.feed(piece[:end]) == []
        lines = reader.take_lines(piece[end:])
        assert lines is not None
        events += len(lines)
    assert events == 1000


def test_a_body_of_other_chunks_is_not_looked_at_for_lines_for_ever() -> None:
    reader = BodyReader(CHUNKED)
    odd, usual = write_chunk(b"event: a\ndata: {}\n\n"), write_chunk(b"data: {}\n\n")
    for _ in range(8):
        assert reader.take_lines(odd) is None
        assert reader.feed(odd) == [b"event: a\ndata: {}\n\n"]
    assert reader.take_lines(usual) is None
    assert reader.feed(usual) == [b"data: {}\n\n"]
