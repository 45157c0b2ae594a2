"""Heads: what two parsers could read differently is refused, wherever the bytes are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.wire.grammar import (
    REQUEST_LINES,
    STATUS_LINES,
    TOKEN_CHARACTERS,
    bytewise,
    heads,
    ordinary_fields,
    pieces_of,
)
from trio_gateway.errors import CODES, BadFraming, EngineProtocolError, WireError
from trio_gateway.wire._head_parser import PARSER, H11Parser, HeadParser, HttptoolsParser, httptools
from trio_gateway.wire._http1 import (
    CHUNKED,
    UNTIL_CLOSE,
    HeadBuffer,
    RequestHead,
    ResponseHead,
    parse_request_head,
    parse_response_head,
    write_request_head,
    write_response_head,
)

ROOMY = 10_000
MANY = 100

without_httptools = pytest.mark.skipif(httptools is None, reason="the extra `speed` is not installed")
PARSERS = [
    pytest.param(H11Parser(), id="h11"),
    pytest.param(HttptoolsParser(), id="httptools", marks=without_httptools),
]


def request(fields: bytes, line: bytes = b"POST /v1 HTTP/1.1") -> bytes:
    return line + b"\r\nHost: x\r\n" + fields + b"\r\n"


def response(fields: bytes, line: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return line + b"\r\n" + fields + b"\r\n"


def parse(head: bytes, parser: HeadParser = PARSER) -> RequestHead:
    """Cut a head out and judge it, as a connection does."""
    buffer = HeadBuffer(ROOMY)
    buffer.feed(head)
    whole = buffer.next_head()
    assert whole == head
    return parse_request_head(whole, MANY, parser)


def verdict(judge: Callable[[bytes, int, HeadParser], Any], head: bytes, parser: HeadParser) -> Any:
    """What a judgement comes to, as far as two parsers must agree: the head, or the error less its words."""
    try:
        found = judge(head, MANY, parser)
    except BadFraming as exc:
        return exc.code
    except EngineProtocolError:
        return EngineProtocolError
    # The case of the coding's name is nobody's business.
    headers = tuple((n, v.lower() if n == b"transfer-encoding" else v) for n, v in found.headers)
    return (headers, *(getattr(found, name) for name in found.__slots__ if name != "headers"))


# Cutting heads out ------------------------------------------------------------------------------------------


def heads_in(pieces: list[bytes], limit: int = ROOMY) -> tuple[list[bytes], str | None, bytes]:
    """All heads of some bytes, how they ended badly, and what is left."""
    buffer = HeadBuffer(limit)
    found: list[bytes] = []
    try:
        for piece in pieces:
            buffer.feed(piece)
            while True:
                buffer.skip_blank_lines()
                head = buffer.next_head()
                if head is None:
                    break
                found.append(head)
    except BadFraming as exc:
        return found, exc.code, b""
    kept = len(buffer)
    rest = buffer.take_rest()
    assert (len(rest), len(buffer)) == (kept, 0)
    return found, None, rest


@given(st.data(), st.lists(heads(REQUEST_LINES), max_size=3), st.sampled_from([b"", b"\r\n", b"\r\n\r\n"]))
def test_any_cut_gives_the_same_heads(data: st.DataObject, parts: list[bytes], blank: bytes) -> None:
    stream = blank.join([b"", *parts, b""])
    whole = heads_in([stream])
    assert heads_in(data.draw(pieces_of(stream))) == whole


@given(
    st.data(),
    st.lists(st.sampled_from([b"\r", b"\n", b"a", b"\r\n", b"\x00", b" "]), max_size=12).map(b"".join),
)
@example(None, b"a\r\n\r\n\r")
@example(None, b"\r\r\n")
@example(None, b"a\r\n\n")
@example(None, b"\r\n\n")
def test_any_cut_of_any_line_ends_gives_the_same_heads(data: st.DataObject | None, stream: bytes) -> None:
    pieces = bytewise(stream) if data is None else data.draw(pieces_of(stream))
    assert heads_in(pieces) == heads_in([stream])


@given(heads(REQUEST_LINES))
def test_a_head_with_a_stray_control_character_or_line_end_is_refused_and_no_other(head: bytes) -> None:
    inner = head.replace(b"\r\n", b"")
    stray = any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in inner)
    _, code, _ = heads_in([head])
    assert (code == "bad_framing") is stray


@pytest.mark.parametrize("byte", [*range(0x09), *range(0x0A, 0x20), 0x7F])
def test_every_control_character_but_the_tab_is_refused_as_soon_as_it_is_seen(byte: int) -> None:
    for start in (b"GET / HT", b"GET / HTTP/1.1\r\nA: "):
        assert heads_in([start + bytes([byte]) + b"x"])[1] == "bad_framing"


@pytest.mark.parametrize("byte", [0x09, 0x20, 0x21, 0x7E, 0x80, 0xFF])
def test_other_bytes_are_left_to_the_grammar(byte: int) -> None:
    head = b"GET / HTTP/1.1\r\nA: x" + bytes([byte]) + b"x\r\n\r\n"
    assert heads_in([head]) == ([head], None, b"")


def test_a_head_of_exactly_the_bound_passes_and_one_byte_more_does_not() -> None:
    head = b"GET / HTTP/1.1\r\nA: x\r\n\r\n"
    for pieces in ([head], bytewise(head), [head + b"more"]):
        assert heads_in(pieces, len(head))[0] == [head]
        assert heads_in(pieces, len(head) - 1)[:2] == ([], "headers_too_large")


def test_an_endless_line_is_refused_when_the_bound_is_passed() -> None:
    assert heads_in([b"G" * 100], 100)[1] is None
    assert heads_in([b"G" * 101], 100)[1] == "headers_too_large"


def test_what_follows_a_head_is_kept_for_its_body() -> None:
    buffer = HeadBuffer(ROOMY)
    buffer.feed(b"GET / HTTP/1.1\r\n\r\n\x00\n body")
    assert buffer.next_head() == b"GET / HTTP/1.1\r\n\r\n"
    assert buffer.take_rest() == b"\x00\n body"
    buffer.feed(b"GET /2 HTTP/1.1\r\n\r\n")
    assert buffer.next_head() == b"GET /2 HTTP/1.1\r\n\r\n"


# Requests ---------------------------------------------------------------------------------------------------

SMUGGLING = {
    "both lengths": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    "both lengths, other order": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    "two equal lengths": b"Content-Length: 5\r\nContent-Length: 5\r\n",
    "two lengths": b"Content-Length: 5\r\ncontent-length: 6\r\n",
    "a list of equal lengths": b"Content-Length: 5, 5\r\n",
    "a list of one length": b"Content-Length: 5,\r\n",
    "a positive length": b"Content-Length: +5\r\n",
    "a negative length": b"Content-Length: -5\r\n",
    "a hexadecimal length": b"Content-Length: 0x5\r\n",
    "a length in words": b"Content-Length: 5 5\r\n",
    "an empty length": b"Content-Length:\r\n",
    "a length in other digits": "Content-Length: \u0665\r\n".encode(),
    "a length that nobody can count": b"Content-Length: 1234567890123456789\r\n",
    "a blank before the colon of a length": b"Content-Length : 5\r\n",
    "a blank before the colon": b"Transfer-Encoding : chunked\r\n",
    "a tab before the colon": b"Transfer-Encoding\t: chunked\r\n",
    "a blank before the name": b" Transfer-Encoding: chunked\r\n",
    "a folded value": b"Transfer-Encoding:\r\n chunked\r\n",
    "a folded line with a tab": b"A: b\r\n\tTransfer-Encoding: chunked\r\n",
    "two codings": b"Transfer-Encoding: gzip, chunked\r\n",
    "chunked, then another": b"Transfer-Encoding: chunked, identity\r\n",
    "chunked with a comma": b"Transfer-Encoding: chunked,\r\n",
    "chunked with parameters": b"Transfer-Encoding: chunked;q=1\r\n",
    "chunked in quotes": b'Transfer-Encoding: "chunked"\r\n',
    "nearly chunked": b"Transfer-Encoding: xchunked\r\n",
    "chunked with a hidden byte": b"Transfer-Encoding: chunked\xa0\r\n",
    "identity": b"Transfer-Encoding: identity\r\n",
    "no coding at all": b"Transfer-Encoding:\r\n",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    "chunked and identity": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    "two hosts": b"host: y\r\n",
    "two equal hosts": b"HOST: x\r\n",
    "two credentials": b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n",
    "two equal credentials": b"Authorization: Bearer a\r\nauthorization: Bearer a\r\n",
    "two types": b"Content-Type: application/json\r\nContent-Type: application/json\r\n",
    "no name": b": x\r\n",
    "no colon": b"Transfer-Encoding\r\n",
    "a blank in a name": b"Transfer Encoding: chunked\r\n",
    "a name that is no token": b"Transfer-Encoding\xff: chunked\r\n",
    "a name in parentheses": b"(a): b\r\n",
}


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("fields", SMUGGLING.values(), ids=SMUGGLING)
def test_what_could_smuggle_a_request_is_refused(parser: HeadParser, fields: bytes) -> None:
    with pytest.raises(BadFraming) as refused:
        parse(request(fields), parser)
    assert refused.value.code == "bad_framing"


@pytest.mark.parametrize("hidden", [b"\r", b"\n", b"\x00", b"\x0b", b"\x0c", b"\x1b", b"\x7f"])
@pytest.mark.parametrize(
    "place", [b"Transfer-Encoding:%schunked\r\n", b"Content-Length: 5%s\r\n", b"A%sB: c\r\n"]
)
def test_bare_line_ends_and_control_characters_are_refused_before_any_parser(
    place: bytes, hidden: bytes
) -> None:
    assert heads_in([request(place % hidden)])[1] == "bad_framing"


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"POST /v1",
        b"POST  /v1 HTTP/1.1",
        b"POST /v1  HTTP/1.1",
        b" POST /v1 HTTP/1.1",
        b"POST /v1 HTTP/1.1 ",
        b"POST\t/v1 HTTP/1.1",
        b"PO(ST /v1 HTTP/1.1",
        b"POST /v 1 HTTP/1.1",
        "POST /ä HTTP/1.1".encode(),
        b"POST /v1 http/1.1",
        b"POST /v1 HTTP/1",
        b"POST /v1 HTTP/1.1.1",
        b"POST /v1 HTTP/1.2",
        b"POST /v1 HTTP/0.9",
        b"POST /v1 HTTP/2.0",
        b"PRI * HTTP/2.0",
    ],
)
def test_a_request_line_has_one_spelling(parser: HeadParser, line: bytes) -> None:
    with pytest.raises(BadFraming) as refused:
        parse_request_head(request(b"", line), MANY, parser)
    assert refused.value.code == "bad_framing"


@pytest.mark.parametrize("parser", PARSERS)
def test_http_1_1_needs_a_host_and_http_1_0_does_not(parser: HeadParser) -> None:
    with pytest.raises(BadFraming):
        parse(b"GET / HTTP/1.1\r\n\r\n", parser)
    assert parse(b"GET / HTTP/1.1\r\nHost:\r\n\r\n", parser).header(b"host") == b""
    assert parse(b"GET / HTTP/1.0\r\n\r\n", parser).version == b"1.0"


@pytest.mark.parametrize("parser", PARSERS)
def test_a_coded_body_is_unknown_to_http_1_0(parser: HeadParser) -> None:
    with pytest.raises(BadFraming):
        parse(request(b"Transfer-Encoding: chunked\r\n", b"POST / HTTP/1.0"), parser)
    assert parse(request(b"Content-Length: 5\r\n", b"POST / HTTP/1.0"), parser).body == 5


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (b"", 0),
        (b"Content-Length: 0\r\n", 0),
        (b"Content-Length:5\r\n", 5),
        (b"CONTENT-LENGTH: \t 007 \t\r\n", 7),
        (b"Content-Length: 123456789012345678\r\n", 123_456_789_012_345_678),
        (b"Transfer-Encoding: chunked\r\n", CHUNKED),
        (b"transfer-encoding:\tCHUNKED \r\n", CHUNKED),
        (b"Transfer_Encoding: chunked\r\n", 0),
        (b"X-Content-Length: 5\r\n", 0),
        (b"A: b\r\nA: b\r\n", 0),
    ],
)
def test_the_body_is_what_the_head_says(parser: HeadParser, fields: bytes, body: int) -> None:
    assert parse(request(fields), parser).body == body


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: keep-alive\r\n", True),
        (b"1.1", b"Connection: Close\r\n", False),
        (b"1.1", b"Connection: keep-alive, close\r\n", False),
        (b"1.1", b"Connection: x\r\nConnection:  CLOSE \r\n", False),
        (b"1.1", b"Connection: closed\r\n", True),
        (b"1.1", b"Connection: upgrade\r\nUpgrade: websocket\r\n", True),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: Keep-Alive\r\n", True),
        (b"1.0", b"Connection: close, keep-alive\r\n", False),
    ],
)
def test_a_connection_is_kept_unless_one_side_says_no(
    parser: HeadParser, version: bytes, connection: bytes, kept: bool
) -> None:
    head = parse(request(connection, b"POST / HTTP/" + version), parser)
    assert head.keep_alive is kept
    assert parse_response_head(
        response(b"Content-Length: 0\r\n" + connection, b"HTTP/" + version + b" 200 OK"), MANY, parser
    ).keep_alive is (kept and version == b"1.1")


@pytest.mark.parametrize("parser", PARSERS)
def test_a_continue_is_expected_by_http_1_1_only(parser: HeadParser) -> None:
    fields = b"Expect: 100-Continue\r\n"
    assert parse(request(fields), parser).expects_continue
    assert not parse(request(fields, b"POST / HTTP/1.0"), parser).expects_continue
    assert not parse(request(b"Expect: 200-ok\r\n"), parser).expects_continue
    assert not parse(request(b""), parser).expects_continue


@pytest.mark.parametrize("parser", PARSERS)
def test_a_head_is_read_as_it_was_written(parser: HeadParser) -> None:
    head = parse(
        request(b"A:  b \r\nX-y: 1\r\nx-Y: \xff\t2\r\n", b"PATCH //v1/%2e/../m?q=1?&r HTTP/1.1"), parser
    )
    assert head.method == "PATCH"
    assert head.target == "//v1/%2e/../m?q=1?&r"
    assert head.path == "//v1/%2e/../m"
    assert head.headers == ((b"host", b"x"), (b"a", b"b"), (b"x-y", b"1"), (b"x-y", b"\xff\t2"))
    assert head.header(b"x-y") == b"1"
    assert head.header(b"nothing") is None
    assert head.all(b"x-y") == [b"1", b"\xff\t2"]
    assert head.all(b"nothing") == []


@pytest.mark.parametrize("parser", PARSERS)
def test_the_number_of_headers_is_bounded(parser: HeadParser) -> None:
    head = request(b"A: b\r\n" * 3)
    assert len(parse_request_head(head, 4, parser).headers) == 4
    with pytest.raises(BadFraming) as refused:
        parse_request_head(head, 3, parser)
    assert refused.value.code == "headers_too_large"
    answer = response(b"A: b\r\n" * 3)
    assert len(parse_response_head(answer, 3, parser).headers) == 3
    with pytest.raises(EngineProtocolError):
        parse_response_head(answer, 2, parser)


@pytest.mark.parametrize("parser", PARSERS)
def test_the_reason_of_a_refusal_quotes_nothing_of_the_head(parser: HeadParser) -> None:
    for fields in SMUGGLING.values():
        with pytest.raises(BadFraming) as refused:
            parse_request_head(
                request(b"Authorization: sk-secret\r\nCookie: sk-secret\r\n" + fields), MANY, parser
            )
        assert "secret" not in str(refused.value)


# Two parsers ------------------------------------------------------------------------------------------------


@without_httptools
@given(heads(REQUEST_LINES))
def test_both_parsers_read_every_request_head_alike(head: bytes) -> None:
    found, code, _ = heads_in([head])
    if code is None and found:
        assert verdict(parse_request_head, found[0], H11Parser()) == verdict(
            parse_request_head, found[0], HttptoolsParser()
        )


@without_httptools
@given(heads(STATUS_LINES))
def test_both_parsers_read_every_response_head_alike(head: bytes) -> None:
    found, code, _ = heads_in([head])
    if code is None and found:
        assert verdict(parse_response_head, found[0], H11Parser()) == verdict(
            parse_response_head, found[0], HttptoolsParser()
        )


@pytest.mark.parametrize("parser", PARSERS)
@given(st.lists(ordinary_fields(), max_size=5))
def test_every_ordinary_field_is_read(parser: HeadParser, fields: list[bytes]) -> None:
    lines = b"".join(b"x-" + field + b"\r\n" for field in fields)
    expected = [(b"x-" + n.lower(), v.strip(b" \t")) for n, _, v in (f.partition(b":") for f in fields)]
    assert list(parse(request(lines), parser).headers) == [(b"host", b"x"), *expected]
    assert list(parse_response_head(response(lines), MANY, parser).headers) == expected


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("lines", [b"", b"A: b\r\n", b"A: b", b"A"])
def test_header_lines_without_their_blank_line_are_no_head(parser: HeadParser, lines: bytes) -> None:
    with pytest.raises(BadFraming):
        parser.fields(lines)


@pytest.mark.parametrize("parser", PARSERS)
def test_every_character_of_a_token_may_stand_in_a_name(parser: HeadParser) -> None:
    name = TOKEN_CHARACTERS.encode()
    assert parse(request(name + b": x\r\n"), parser).header(name.lower()) == b"x"


@pytest.mark.parametrize("parser", PARSERS)
@given(st.binary(max_size=40))
def test_no_bytes_at_all_do_more_than_be_refused(parser: HeadParser, noise: bytes) -> None:
    for judge in (parse_request_head, parse_response_head):
        for head in (noise, request(noise), response(noise)):
            try:
                judge(head, MANY, parser)
            except WireError:
                continue


# Responses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("line", "fields", "body", "kept"),
    [
        (b"HTTP/1.1 200 OK", b"", UNTIL_CLOSE, False),
        (b"HTTP/1.1 200", b"Content-Length: 5\r\n", 5, True),
        (b"HTTP/1.1 200 ", b"content-length: 0\r\n", 0, True),
        (b"HTTP/1.1 200 OK", b"Transfer-Encoding: Chunked\r\n", CHUNKED, True),
        (b"HTTP/1.0 200 OK", b"Content-Length: 5\r\n", 5, False),
        (b"HTTP/1.0 200 OK", b"", UNTIL_CLOSE, False),
        (b"HTTP/1.0 200 OK", b"Transfer-Encoding: chunked\r\n", CHUNKED, False),
        (b"HTTP/1.1 204 No Content", b"", 0, True),
        (b"HTTP/1.1 304 Not Modified", b"Content-Length: 9\r\n", 0, True),
        (b"HTTP/1.1 100 Continue", b"", 0, True),
        (b"HTTP/1.1 103 Early Hints", b"Link: x\r\n", 0, True),
        (b"HTTP/1.1 101 Switching", b"Connection: upgrade\r\nUpgrade: x\r\n", 0, True),
        (b"HTTP/1.1 500 \xff odd \t reason", b"Content-Length: 1\r\n", 1, True),
        (b"HTTP/1.1 200 OK", b"Connection: upgrade\r\nUpgrade: x\r\nContent-Length: 1\r\n", 1, True),
        (b"HTTP/1.1 200 OK", b"Content-Type: a\r\nContent-Type: b\r\n", UNTIL_CLOSE, False),
    ],
)
def test_a_response_ends_where_its_head_says(
    parser: HeadParser, line: bytes, fields: bytes, body: int, kept: bool
) -> None:
    head = parse_response_head(response(fields, line), MANY, parser)
    assert (head.body, head.keep_alive) == (body, kept)
    assert head.status == int(line.split()[1])


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "head",
    [
        response(b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"),
        response(b"Content-Length: 5\r\nContent-Length: 5\r\n"),
        response(b"Content-Length: 5\r\nContent-Length: 6\r\n"),
        response(b"Content-Length: 5, 5\r\n"),
        response(b"Content-Length: x\r\n"),
        response(b"Transfer-Encoding: gzip, chunked\r\n"),
        response(b"Transfer-Encoding: identity\r\n"),
        response(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
        response(b"Host: x\r\nHost: x\r\n"),
        response(b"A : b\r\n"),
        response(b"A: b\r\n c\r\n"),
        response(b" A: b\r\n"),
        response(b"no colon\r\n"),
        response(b"", b"HTTP/2.0 200 OK"),
        response(b"", b"HTTP/1.1 20 OK"),
        response(b"", b"HTTP/1.1 099 OK"),
        response(b"", b"HTTP/1.1 2000 OK"),
        response(b"", b"HTTP/1.1  200 OK"),
        response(b"", b"HTTP/1.1 OK"),
        response(b"", b"ICY 200 OK"),
        response(b"", b"<html>"),
    ],
)
def test_a_response_that_can_be_read_in_two_ways_is_refused(parser: HeadParser, head: bytes) -> None:
    with pytest.raises(EngineProtocolError):
        parse_response_head(head, MANY, parser)


def test_a_response_header_is_found_by_its_name() -> None:
    head = parse_response_head(response(b"Retry-After: 5\r\nretry-after: 6\r\n"), MANY)
    assert head.header(b"retry-after") == b"5"
    assert head.header(b"nothing") is None


# Writing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("status", [200, 400, 413, 429, 499, 503, 508, 599])
def test_a_written_response_reads_back(parser: HeadParser, status: int) -> None:
    written = write_response_head(status, [("content-length", "3"), ("x-a", "\xe4b")])
    assert parse_response_head(written, MANY, parser) == ResponseHead(
        status, ((b"content-length", b"3"), (b"x-a", b"\xe4b")), 3, True
    )


def test_every_status_that_is_ours_has_its_phrase() -> None:
    for status in {200, *(info.status for info in CODES.values())}:
        phrase = write_response_head(status, []).decode().removeprefix(f"HTTP/1.1 {status} ").rstrip()
        assert phrase.istitle() or phrase == "OK"
    assert write_response_head(499, []) == b"HTTP/1.1 499 \r\n\r\n"


@pytest.mark.parametrize("parser", PARSERS)
def test_a_written_request_reads_back(parser: HeadParser) -> None:
    written = write_request_head(b"POST", b"/v1/x", [(b"Host", b"a:1"), (b"Content-Length", b"3")])
    head = parse(written, parser)
    assert (head.method, head.target, head.body) == ("POST", "/v1/x", 3)
    assert head.headers == ((b"host", b"a:1"), (b"content-length", b"3"))


@pytest.mark.parametrize(
    "head",
    [
        request(b"Authorization: Bearer k\r\nX-Ver: \xe4\r\nEmpty:\r\n", b"GET /v1/a%20b?after=3 HTTP/1.1"),
        request(b"Content-Length: 7\r\nConnection: close\r\nExpect: 100-continue\r\n"),
        request(b"Transfer-Encoding: chunked\r\n"),
        request(b"", b"GET / HTTP/1.0"),
    ],
)
def test_a_head_that_is_written_again_reads_as_the_same(head: bytes) -> None:
    parsed = parse(head)
    assert parse(parsed.encode()) == parsed


def test_looking_at_what_is_left_takes_nothing_away() -> None:
    buffer = HeadBuffer(ROOMY)
    buffer.feed(request(b"") + b"rest")
    assert buffer.next_head() is not None
    assert (buffer.peek(), buffer.take_rest(), buffer.peek()) == (b"rest", b"rest", b"")
