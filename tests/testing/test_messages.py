"""The strict HTTP/1.1 reader of the fakes accepts what RFC 9112 allows and nothing else."""

from __future__ import annotations

import pytest

from trio_gateway.testing._messages import (
    MAX_HEAD_BYTES,
    BodyReader,
    MessageError,
    body_framing,
    json_object,
    parse_head,
    take_head,
)

CHUNKED = b"3\r\nabc\r\n10;note=x\r\n0123456789abcdef\r\n0\r\nx-trailer: 1\r\n\r\n"


def test_a_head_is_split_into_start_line_and_lower_case_fields() -> None:
    head = parse_head(b"POST /v1/x HTTP/1.1\r\nHost: a\r\nX-Two:  b \r\nx-two: c")
    assert head.start == ("POST", "/v1/x", "HTTP/1.1")
    assert head.fields == (("host", "a"), ("x-two", "b"), ("x-two", "c"))
    assert head.get("X-Two") == "b, c"
    assert head.get("absent") is None


def test_a_reason_phrase_may_hold_blanks_or_be_missing() -> None:
    assert parse_head(b"HTTP/1.1 404 Not Found").start == ("HTTP/1.1", "404", "Not Found")
    assert parse_head(b"HTTP/1.1 200").start == ("HTTP/1.1", "200", "")


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nbad name: 1",
        b"GET / HTTP/1.1\r\nno colon",
        b"GET / HTTP/1.1\r\na: 1\r\n folded",
        b"GET / HTTP/1.1\r\na : 1",
        b"GET / HTTP/1.1\r\na: 1\nb: 2",
        b"GET / HTTP/1.1\r\na: 1\rb: 2",
        b"GET / HTTP/1.1\r\na: \x00",
        b"GET",
    ],
)
def test_a_broken_head_is_an_error(raw: bytes) -> None:
    with pytest.raises(MessageError):
        parse_head(raw)


@pytest.mark.parametrize(
    ("fields", "framing"),
    [
        (b"", ("close", 0)),
        (b"\r\ncontent-length: 12", ("sized", 12)),
        (b"\r\ntransfer-encoding: chunked", ("chunked", 0)),
    ],
)
def test_the_framing_is_read_off_the_head(fields: bytes, framing: tuple[str, int]) -> None:
    assert body_framing(parse_head(b"HTTP/1.1 200 OK" + fields), unmarked="close") == framing


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: 1\r\ntransfer-encoding: chunked",
        b"content-length: 1\r\ncontent-length: 1",
        b"content-length: +1",
        b"content-length: 1, 1",
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
    ],
)
def test_ambiguous_framing_is_an_error(fields: bytes) -> None:
    with pytest.raises(MessageError):
        body_framing(parse_head(b"HTTP/1.1 200 OK\r\n" + fields), unmarked="close")


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_a_chunked_body_reads_the_same_however_it_is_cut(piece: int) -> None:
    reader, buffer = BodyReader("chunked"), bytearray()
    for start in range(0, len(CHUNKED), piece):
        assert not reader.complete
        buffer += CHUNKED[start : start + piece]
        reader.feed(buffer)
    assert reader.complete
    assert bytes(reader.data) == b"abc0123456789abcdef"
    assert reader.chunks == 2
    assert not buffer


@pytest.mark.parametrize(
    "raw",
    [
        b"x\r\n",
        b"-1\r\n",
        b" 3\r\nabc\r\n",
        b"3\r\nabcd\r\n",
        b"\r\n",
        b"3\nabc\r\n0\r\n\r\n",
        b"0x3\r\nabc\r\n",
    ],
)
def test_broken_chunk_framing_is_an_error(raw: bytes) -> None:
    with pytest.raises(MessageError):
        BodyReader("chunked").feed(bytearray(raw))


def test_a_sized_body_leaves_the_bytes_behind_it() -> None:
    reader, buffer = BodyReader("sized", 3), bytearray(b"abcHTTP")
    reader.feed(buffer)
    assert (bytes(reader.data), reader.complete, bytes(buffer)) == (b"abc", True, b"HTTP")


def test_only_a_close_delimited_body_is_completed_by_the_end_of_the_stream() -> None:
    for framing, complete in (("close", True), ("chunked", False), ("sized", False)):
        reader = BodyReader(framing, 5)  # type: ignore[arg-type]  # the literals of the loop
        reader.feed(bytearray(b"2\r\nab\r\n"[: 7 if framing == "chunked" else 2]))
        reader.end_of_stream()
        assert reader.complete is complete


def test_a_head_is_taken_only_when_whole() -> None:
    buffer = bytearray(b"GET / HTTP/1.1\r\nhost: a\r\n\r")
    assert take_head(buffer) is None
    buffer += b"\nrest"
    head = take_head(buffer)
    assert head is not None
    assert head.start[1] == "/"
    assert buffer == b"rest"


def test_a_head_without_an_end_is_an_error_at_the_bound() -> None:
    with pytest.raises(MessageError):
        take_head(bytearray(b"a" * (MAX_HEAD_BYTES + 1)))


@pytest.mark.parametrize("body", [b"", b"[1]", b"null", b"{"])
def test_a_body_that_is_no_json_object_is_an_error(body: bytes) -> None:
    with pytest.raises(MessageError):
        json_object(body)
